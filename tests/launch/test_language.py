"""launch/train.py for language models: composition, refusals, arithmetic, phases with small stand-ins."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from envs.errors import UserError
from launch import config, phases, train
from launch.arguments import owner, read
from tests.launch.conftest import Command
from trainers.config import engine_of, evaluator_of, load_class, typed
from trainers.run import Run

pytest.importorskip("trl", reason="needs the extra 'language'")
LANGUAGE = [
    name
    for name in config.options("algo")
    if "model" in engine_of(load_class(config.algorithm(name).class_path)).SECTIONS
]


def settings(*argv: str):
    return typed(config.resolved(config.compose(read(argv).argv)))


# --- one run


@pytest.mark.parametrize("name", ["grpo", "sft", "dpo", "reward_model", "pretrain"])
def test_the_algorithm_alone_is_enough(name: str) -> None:
    cfg = settings(f"algo={name}")
    assert (cfg.env.task, cfg.env.id, cfg.model.name) == ("chained_arithmetic", "chained-arithmetic", "tiny")
    assert train.default_name(cfg) == f"{name}-chained-arithmetic-seed0"
    assert train.plan(cfg, {})[0]


def test_the_arithmetic_of_a_step() -> None:
    lines, checks = train.plan(
        settings("algo=grpo", "rollout.prompts_per_step=6", "rollout.samples_per_prompt=4",
                 "learner.samples_per_device_batch=8", "learner.num_iterations=2", "run.max_steps=5"),
        {},
    )  # fmt: skip
    text = "\n".join(lines)
    assert "6 prompts x 4 samples = 24 completions a batch" in text
    assert "3 batches" in text  # ceil(5 / 2)
    assert "5 steps x 24 rows = 1 process(es) x 8 per micro-batch x 3 accumulated" in text
    assert any("trl 1." in line for line in checks)


def test_dry_loads_nothing_heavy(command: Command, tmp_path: Path) -> None:
    out = command("train", "algo=grpo", "dry=true", PYTHONVERBOSE="1")
    assert out.returncode == 0, out.stderr
    loaded = {line.split("'")[1] for line in out.stderr.splitlines() if line.startswith("import '")}
    assert "trainers.language" in loaded
    assert not {"torch", "ray", "transformers", "trl", "datasets"} & loaded
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["algo=grp"], ["unknown algo 'grp'", "fix:     algo=grpo"]),
        (["algo=grpo", "env=countdwn"], ["unknown env", "fix:     env=countdown"]),
        (["algo=grpo", "env=safety-gym"], ["does not train in env=safety-gym", "chained-arithmetic"]),
        (["algo=ppo", "env=countdown"], ["does not train in env=countdown", "safety-gym"]),
        (["algo=grpo", "rollout.temprature=2"], ["unknown setting", "rollout.temperature=2"]),
        (["algo=grpo", "temperature=2"], ["unknown setting", "rollout.temperature=2"]),
        (["algo=grpo", "rollout.num_envs=2"], ["unknown setting", "rollout.num_workers"]),
        (["algo=grpo", "learner.lr=fast"], ["wrong type", "a number"]),
        (["algo=grpo,ppo", "-m"], ["different kinds of environments", "algo=ppo: safety-gym"]),
    ],
)
def test_what_cannot_be_meant_is_refused(argv: list[str], parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        read(argv)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["env.task=reasoning-gym/x"], ["unknown task", "reasoning_gym/<generator>"]),
        (["env.options.number=3"], ["env.options.number"]),
        (["reward.names=[exat]"], ["unknown reward 'exat'", "exact"]),
        (["learner.trl.scale_reward=none"], ["scale_reward"]),
        (["learner.trl.temperature=0.5"], ["rollout.temperature"]),
        (["learner.samples_per_device_batch=24"], ["16 x rollout.samples_per_prompt=16 = 256", "256 / 24"]),
        (["model=./nowhere"], ["no such model folder"]),
        (["model.dtype=float23"], ["float32"]),
        (["rollout.num_workers=400"], ["more workers than CPUs", "rollout.num_workers and learner."]),
        (["run.name=a/b"], ["run.name"]),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(argv: list[str], parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        train.plan(settings("algo=grpo", *argv), {})
    for part in parts:
        assert part in str(caught.value)


def test_arguments_of_trl_pass_through() -> None:
    cfg = settings("algo=grpo", "learner.trl.weight_decay=0.1", "learner.trl.lr_scheduler_type=linear")
    assert dict(cfg.learner.trl) == {"weight_decay": 0.1, "lr_scheduler_type": "linear", "adam_beta2": 0.99}
    train.plan(cfg, {})


@pytest.mark.parametrize(
    "name", ["tiny", "Qwen/Qwen3-0.6B", "runs/a-1/model", "/srv/models/a.b", "./here", "~/m"]
)
def test_a_model_is_a_name_or_a_folder_not_a_group(name: str) -> None:
    assert settings("algo=grpo", f"model={name}").model.name == name
    assert settings("algo=grpo", f"model.name={name}", "model.dtype=bfloat16").model.name == name


def test_a_missing_extra_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    from launch import preflight

    def version(name: str) -> str:
        if name == "trl":
            raise metadata.PackageNotFoundError(name)
        return metadata.version(name)

    monkeypatch.setattr(preflight.check_packages, "__defaults__", (version, preflight.install("safety")))
    with pytest.raises(UserError) as caught:
        train.plan(settings("algo=sft"), {})
    assert "trl is not installed" in str(caught.value)
    assert "pip install -c constraints/cpu.txt '.[language]'" in str(caught.value)
    train.plan(settings("algo=ppo", "env=gym"), {"env": {}})


def test_who_evaluates() -> None:
    modules = {name: evaluator_of(load_class(config.algorithm(name).class_path)) for name in ("sft", "ppo")}
    assert modules["sft"].__name__ == "evaluators.language"
    assert modules["ppo"].__name__ == "evaluators.control"
    assert evaluator_of(load_class(config.algorithm("reward_model").class_path)) is None


def test_commands_for_control_refuse_language_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from launch import record, study

    monkeypatch.chdir(tmp_path)
    assert study.main(["name=x", "algos=[ppo,grpo]"]) == 2
    assert "a study compares control runs" in capsys.readouterr().err
    cfg = settings("algo=grpo", "run.name=mine")
    Run.create(cfg.run, config.resolved(config.compose(read(["algo=grpo"]).argv)), "-")
    assert record.main(["run=mine", "out=there"]) == 2
    assert "run 'mine' trained a language model" in capsys.readouterr().err


# --- phases


class Jobs:
    """Stands for the trainings: notes what each was asked for, leaves what a run leaves, ends as told."""

    def __init__(self, codes: dict[str, int] | None = None) -> None:
        self.codes, self.seen = codes or {}, []

    def __call__(self, cfg, given) -> int:
        if cfg.resume:
            run = Run.open(cfg.resume, cfg.run.dir)
            self.seen.append((f"resume {run.name}", dict(given)))
        else:
            values = config.resolved(cfg)
            run = Run.create(typed(values).run, values, "-")
            self.seen.append((run.name, typed(values)))
        code = self.codes.pop(run.name, 0)
        if code == 0:
            (run.path / "model").mkdir(exist_ok=True)
        return code


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_each_phase_is_a_run_that_starts_from_the_model_before(here: Path) -> None:
    jobs = Jobs()
    argv = ["phases=[sft,reward_model,grpo]", "env=countdown", "run.seed=4", "learner.lr=1e-4",
            "grpo.learner.lr=1e-5", "sft.learner.steps=7", "run.name=first"]  # fmt: skip
    assert phases.launch(argv, train.check_job, jobs) == 0
    names, configs = zip(*jobs.seen)
    assert names == ("1-sft", "2-reward_model", "3-grpo")
    assert [c.model.name for c in configs] == ["tiny", "runs/first/1-sft/model", "runs/first/1-sft/model"], (
        "a reward model is not what a policy starts from"
    )
    assert [c.learner.lr for c in configs] == [1e-4, 1e-4, 1e-5]
    assert [c.learner.steps for c in configs] == [7, 60, 100]
    assert {(c.run.seed, c.env.task, c.run.dir) for c in configs} == {(4, "countdown", "runs/first")}


def test_what_ended_early_goes_on_in_its_phase(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = Jobs({"2-dpo": 143})
    assert phases.launch(["phases=[sft,dpo,grpo]"], train.check_job, jobs) == 143
    assert [name for name, _ in jobs.seen] == ["1-sft", "2-dpo"]
    run = Run.open("runs/sft-dpo-grpo/2-dpo")
    assert train.how_to_continue(None, run, {}).endswith("train.py resume=sft-dpo-grpo")  # type: ignore[arg-type]
    assert phases.asked(["resume=sft-dpo-grpo"])
    jobs.seen.clear()
    assert phases.launch(["resume=sft-dpo-grpo", "run.checkpoint_every=3"], train.check_job, jobs) == 0
    assert [name for name, _ in jobs.seen] == ["resume 1-sft", "resume 2-dpo", "3-grpo"]
    assert jobs.seen[1][1]["run.checkpoint_every"] == "3"
    assert jobs.seen[2][1].run.checkpoint_every == 3
    assert jobs.seen[2][1].model.name == "runs/sft-dpo-grpo/2-dpo/model"
    assert "--- phase 3 of 3: grpo" in capsys.readouterr().out


def test_the_same_phases_again_are_other_runs(here: Path) -> None:
    for _ in range(2):
        phases.launch(["phases=[sft,sft]"], train.check_job, Jobs())
    assert sorted(p.name for p in (here / "runs").iterdir()) == ["sft-sft", "sft-sft-2"]
    assert sorted(p.name for p in (here / "runs/sft-sft").iterdir()) == ["1-sft", "2-sft", "phases.json"]


def test_a_folder_with_a_strange_name(here: Path) -> None:
    jobs = Jobs()
    phases.launch(["phases=[sft,grpo]", "run.dir='my runs, {all}'"], train.check_job, jobs)
    assert jobs.seen[1][1].model.name == "my runs, {all}/sft-grpo/1-sft/model"


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["phases=[stf,grpo]"], ["unknown algo 'stf'", "algo=sft"]),
        (["phases=[ppo,grpo]"], ["algo=ppo trains no model", "grpo"]),
        (["phases=sft,grpo"], ["phases is a list", "phases=[sft,grpo]"]),
        (["phases=[]"], ["phases is a list"]),
        (["phases=[sft]", "algo=grpo"], ["names the algorithms itself"]),
        (["phases=[sft]", "resume=x"], ["resume=<name> alone"]),
        (["phases=[sft]", "-m"], ["no flags"]),
        (["phases=[sft,grpo]", "grpo.learner.lrr=1"], ["unknown setting 'learner.lrr'", "learner.lr=1"]),
        (["phases=[sft,grpo]", "dpo.learner.lr=1"], ["unknown setting 'dpo.learner.lr'"]),
        (["phases=[sft,grpo]", "grpo.rollout.temperature=0"], ["greedy completions"]),
        (["phases=[sft,grpo]", "run.name=taken"], ["there is a run 'taken' already", "resume=taken"]),
    ],
)
def test_bad_phases_are_refused_before_the_first_begins(
    argv: list[str], parts: list[str], here: Path
) -> None:
    (here / "runs" / "taken").mkdir(parents=True)
    jobs = Jobs()
    with pytest.raises(UserError) as caught:
        phases.launch(argv, train.check_job, jobs)
    for part in parts:
        assert part in str(caught.value)
    assert jobs.seen == []
    assert [p.name for p in (here / "runs").iterdir()] == ["taken"]


def test_other_settings_cannot_change_on_the_way(here: Path) -> None:
    phases.launch(["phases=[sft,grpo]"], train.check_job, Jobs({"1-sft": 130}))
    with pytest.raises(UserError, match=r"learner\.lr can't change"):
        phases.launch(["resume=sft-grpo", "learner.lr=1"], train.check_job, Jobs())
    (here / "runs/sft-grpo/phases.json").write_text(json.dumps({"names": []}))
    with pytest.raises(UserError, match="the phases can't be read"):
        phases.launch(["resume=sft-grpo"], train.check_job, Jobs())


def test_a_phase_that_left_no_model_ends_it(here: Path) -> None:
    class Nothing(Jobs):
        def __call__(self, cfg, given) -> int:
            code = super().__call__(cfg, given)
            (Path(cfg.run.dir) / cfg.run.name / "model").rmdir()
            return code

    with pytest.raises(UserError, match="phase 2 has no model to start from"):
        phases.launch(["phases=[sft,grpo]"], train.check_job, Nothing())


def test_dry_shows_every_phase_and_writes_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert train.main(["phases=[sft,grpo]", "dry=true"]) == 0
    said = capsys.readouterr().out
    for part in (
        "--- phase 1 of 2: sft",
        "--- phase 2 of 2: grpo",
        "name: 2-grpo",
        "256 completions a batch",
    ):
        assert part in said
    assert list(here.iterdir()) == []
    assert train.main(["phases=[sft,grp]"]) == 2


def test_whose_setting_it_is() -> None:
    assert owner("sft.learner.lr=1") == "sft"
    assert owner("tracess.algo.budget=1") == "traces"
    assert owner("learner.lr=sft.x") is None
    assert owner("sft=1") is None
