"""Composition: precedence, every size of every algorithm, what is saved, what a resumed run may change."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from envs.errors import UserError
from launch import config
from trainers.config import engine_of, typed

ALGORITHMS = config.options("algo")


def composed(*overrides: str):
    name = next((o.removeprefix("algo=") for o in overrides if o.startswith("algo=")), config.default("algo"))
    config.register([name])
    env = [] if any(o.startswith("env=") for o in overrides) else [f"env={config.envs(name)[0]}"]
    return config.compose([*env, *overrides])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_size_composes_into_typed_settings_that_pass_the_checks(name: str) -> None:
    for size in config.sizes(name):
        settings = typed(config.resolved(composed(f"algo={name}", f"size={size}")))
        assert settings.size == size
        assert settings.algo.name == name
        assert isinstance(settings.algo, settings.algorithm.Config)
        engine = engine_of(settings.algorithm)
        engine.check(settings)
        assert engine.describe(settings)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_default_is_what_the_dataclasses_and_the_algorithm_say(name: str) -> None:
    own = OmegaConf.to_container(OmegaConf.load(config.CONF / "algo" / f"{name}.yaml"), resolve=True)
    settings = typed(config.resolved(composed(f"algo={name}")))
    assert settings.algo == settings.algorithm.Config()
    for section, kind in engine_of(settings.algorithm).SECTIONS.items():
        chosen = {"kind": config.envs(name)[0]} if section == "env" else {}
        assert getattr(settings, section) == kind(**chosen, **own.get(section, {}))


def test_precedence() -> None:
    """Dataclass < size < command line, whatever the order on the command line."""
    assert composed("algo=ppo").env.horizon == 250
    assert composed("algo=ppo", "size=long").env.horizon == 1000
    for overrides in (("size=long", "env.horizon=77"), ("env.horizon=77", "size=long")):
        assert composed("algo=ppo", *overrides).env.horizon == 77


def test_a_size_is_over_the_environment_and_the_environment_over_the_dataclass() -> None:
    assert composed("algo=ppo", "env=gym").env.horizon is None
    assert composed("algo=ppo", "env=gym", "size=long").env.horizon == 1000


def test_default_choices() -> None:
    assert (config.default("algo"), config.default("env"), config.default("size")) == (
        "traces",
        "safety-gym",
        "default",
    )
    assert config.aliases()["tracess"] == "traces"


def test_a_size_that_an_algorithm_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "options", lambda group: ["long"])
    with pytest.raises(UserError, match=r"algo=ppo has no size 'paper'(.|\n)*allowed: default, long"):
        config.check_size("ppo", "paper")


def test_the_commands_own_keys_are_not_saved() -> None:
    saved = config.resolved(composed("algo=ppo", "dry=true", "resume=x"))
    assert not {"dry", "resume", "hydra"} & saved.keys()
    assert list(saved["learner"]["hidden_sizes"]) == [64, 64]


def test_an_interpolation_is_resolved_and_a_broken_one_refused() -> None:
    saved = config.resolved(composed("algo=ppo", "learner.lr=0.25", "learner.critic_lr=${learner.lr}"))
    assert saved["learner"]["critic_lr"] == 0.25
    with pytest.raises(UserError, match=r"learner\.nothing"):
        config.resolved(composed("algo=ppo", "learner.lr=${learner.nothing}"))


def test_a_mistake_in_a_yaml_file_names_the_file() -> None:
    with pytest.raises(UserError, match="nowhere"):
        config.compose(["algo=nowhere"])


STORED = ("algo=ppo_lag", "run.seed=3", "learner.lr=0.001", "++env.options={a:1}")


def resume(*given: str) -> dict:
    stored = config.resolved(composed(*STORED))
    stored["run"] |= {"name": "mine"}
    start = [f"algo={stored['algo']['name']}", f"env={stored['env']['kind']}", f"size={stored['size']}"]
    own = {g.partition("=")[0] for g in given}
    cfg = composed(*(s for s in start if s.partition("=")[0] not in own), *given)
    return config.resumed(stored, cfg, own)


def test_a_resumed_run_keeps_its_settings() -> None:
    values = resume("run.max_steps=7", "run.display=plain", "rollout.num_env_runners=0")
    settings = typed(values)
    assert (settings.run.max_steps, settings.run.display, settings.rollout.num_env_runners) == (7, "plain", 0)
    assert (settings.run.seed, settings.run.name, settings.learner.lr) == (3, "mine", 0.001)
    assert settings.env.options == {"a": 1}


def test_a_resumed_run_may_be_told_what_it_already_is() -> None:
    assert resume("algo=ppo_lag", "run.seed=3", "learner.lr=1e-3") == resume()


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ("learner.lr=0.5", ["learner.lr can't change", "learner.lr=0.5, the run has 0.001"]),
        ("run.seed=4", ["run.seed=4, the run has 3"]),
        ("env=gym", ["env=gym, the run has safety-gym"]),
        ("size=long", ["size=long, the run has default"]),
        (
            "rollout.num_envs=2",
            ["rollout.num_envs can't change", "rollout.num_env_runners", "start a new run"],
        ),
    ],
)
def test_a_resumed_run_refuses_other_settings(given: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        resume(given)
    for part in parts:
        assert part in str(caught.value)


def test_a_resumed_run_refuses_another_algorithm() -> None:
    stored = config.resolved(composed("algo=ppo_lag"))
    with pytest.raises(UserError, match="algo=ppo, the run has ppo_lag"):
        config.resumed(stored, composed("algo=ppo"), ["algo"])


def test_the_nearest_settings() -> None:
    known = config.keys(composed("algo=ppo_lag"))
    assert "algorithm" not in known
    assert config.nearest_keys("lr", known) == ["algo.multiplier.lr", "learner.lr"]
    assert config.nearest_keys("rollout.envs", known)[0] == "rollout.num_envs"
    assert config.nearest_keys("learnr.clp", known)[0] == "learner.clip"
