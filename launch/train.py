"""Train: `python launch/train.py algo=<algorithm> env=<kind> [<section>.<setting>=<value> ...]`, or --help.

`phases=[sft,grpo]` in the place of `algo=` trains several times, each from the model of the one before.

Exit codes: 0 done; 2 wrong input, told without a traceback; 130, 143 or 129 stopped by Ctrl-C, SIGTERM or a
closed terminal after a checkpoint; 1 anything else, with its traceback.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

CHECKOUT = Path(__file__).resolve().parent.parent
# The checkout first, and this folder not at all: its evaluate.py must not hide a library of that name.
sys.path[:] = [
    str(CHECKOUT),
    *(p for p in sys.path if Path(p).resolve() not in (CHECKOUT, CHECKOUT / "launch")),
]
os.environ.setdefault("OMP_NUM_THREADS", "1")

from envs.errors import UserError
from envs.make import EnvConfig, own_horizon
from launch import preflight

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from trainers.config import TrainConfig
    from trainers.run import Run

EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}
EPISODES = 32  # of the evaluation that ends a run


def main(argv: Sequence[str]) -> int:
    """Checks the command line, then lets Hydra run `job` once, or once per combination with -m."""
    try:
        preflight.check_installation()
        from launch import arguments, config, phases

        if phases.asked(argv):
            return phases.launch(argv, check_job, attempt)
        args = arguments.read(argv)
        if "hydra/launcher=ray" in args.argv:
            from launch import sweep

            sweep.register()
    except UserError as error:
        return refuse(error)
    import hydra

    @hydra.main(version_base=None, config_path=str(config.CONF), config_name="train")
    def run_job(cfg: DictConfig) -> None:
        if code := attempt(cfg, args.given):
            sys.exit(code)

    # Hydra notes a sweep in a file of its own; every run has its whole config, so nobody needs it.
    with tempfile.TemporaryDirectory(prefix="sweep-") as scratch:
        sys.argv[1:] = [*args.argv, f"hydra.sweep.dir={scratch}"]
        run_job()
    return 0


def attempt(cfg: DictConfig, given: Mapping[str, str]) -> int:
    """`job`, with the whole traceback of what it raises: Hydra would shorten it."""
    try:
        return job(cfg, given)
    except Exception:
        traceback.print_exc()
        return 1


def check_job(cfg: DictConfig, given: Mapping[str, str]) -> int:
    """All of `job` that comes before anything is written. Raises UserError."""
    from launch import config
    from trainers.config import typed

    values = config.resolved(cfg)
    lines, checks = plan(typed(values), values)
    if cfg.dry:
        show(values, lines, checks)
    return 0


def plan(settings: TrainConfig, values: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What will be done and which checks it passed, a line each. Raises UserError."""
    from trainers.config import engine_of

    engine = engine_of(settings.algorithm)
    preflight.check_extras(engine.extras(settings))
    note = set_horizon(settings, values)
    checks = check(settings, engine)
    return engine.describe(settings) + note, checks


def job(cfg: DictConfig, given: Mapping[str, str]) -> int:
    """One run, from a composed config to an exit code; `given` are the settings that the user typed."""
    from launch import config
    from trainers.config import engine_of, typed
    from trainers.run import Run

    try:
        values = config.resolved(cfg)
        if cfg.resume:
            found = Run.open(cfg.resume, cfg.run.dir)
            values = config.resumed(found.config, cfg, given)
            values.setdefault("run", {})["dir"] = str(found.path.parent)
        settings = typed(values)
        engine = engine_of(settings.algorithm)
        lines, checks = plan(settings, values)
        if cfg.dry:
            show(values, lines, checks)
            return 0
        if cfg.resume:
            run = Run.open(found.path, cfg=settings.run)
            if finished(run, engine.planned_iterations(settings)):
                return 0
        else:
            run = Run.create(settings.run, values, default_name(settings))
        write_notes(run, lines)
    except UserError as error:
        return refuse(error)
    print("\n".join([f"{run.path}: {settings.algo.name} on {settings.env.id}", *lines]), flush=True)
    code = train(settings, engine, run, given)
    if code:
        report(run)
    return code or evaluate(run, settings)


def set_horizon(settings: TrainConfig, values: Mapping[str, Any]) -> list[str]:
    """Put the environment's own horizon in the place of null; a line if the config's one is shorter."""
    if not isinstance(settings.env, EnvConfig):
        return []
    env, own = settings.env, own_horizon(settings.env)
    if env.horizon is None:
        env.horizon = values["env"]["horizon"] = own
    if own is None or env.horizon is None or env.horizon >= own:
        return []
    return [
        f"NOTE: episodes are cut to {env.horizon} steps; the task's own horizon is {own} (env.horizon=null)"
    ]


def check(settings: TrainConfig, engine: Any) -> list[str]:
    """Everything that can be known to be wrong before Ray starts; one line per check passed."""
    from launch import config

    settings.run.check()
    config.check_size(settings.algo.name, settings.size)
    lines = [*preflight.check_installation(), *preflight.check_extras(engine.extras(settings))]
    engine.check(settings)
    workers = getattr(engine, "WORKERS", preflight.WORKERS)
    asked, place = engine.resources(settings), Path(settings.run.dir)
    return lines + preflight.check_machine(asked, place, os.environ, workers)


def show(values: Mapping[str, Any], lines: Sequence[str], checks: Sequence[str]) -> None:
    """What dry=true prints."""
    from omegaconf import OmegaConf

    print(OmegaConf.to_yaml(OmegaConf.create(dict(values))))
    for title, entries in (("Arithmetic", lines), ("Checks, all passed", checks)):
        print(f"{title}:", *(f"  {line}" for line in entries), sep="\n")
    print("\ndry=true: nothing was started and nothing written.")


def train(settings: TrainConfig, engine: Any, run: Run, given: Mapping[str, str]) -> int:
    """Train until the plan is done, a signal comes or something fails; the exit code."""
    try:
        with run:
            try:
                engine.train(settings, run)
            except SystemExit:  # a signal during the start, answered by us or by Ray
                early = run.stopped_by or "SIGTERM"
                run.finish("stopped", early)
                return stopped(early, how_to_continue(settings, run, given))
            reason = run.should_stop()
    except KeyboardInterrupt:
        reason = "SIGINT"
    except Exception as error:
        code = refuse(error) if user_error(error) else 1
        if code == 1:
            traceback.print_exc()
        print(f"run: {run.path}\n{how_to_continue(settings, run, given)}", file=sys.stderr)
        return code
    return stopped(reason, how_to_continue(settings, run, given)) if reason else 0


def stopped(reason: str, advice: str) -> int:
    """Say that a signal ended the run; the exit code that shells expect."""
    print(f"stopped by {reason}. {advice}", flush=True)
    return EXIT_CODES[reason]


def evaluate(run: Run, settings: TrainConfig) -> int:
    """Evaluation, video, curves and report of a run that is done; the exit code."""
    again = f"python launch/evaluate.py run={name_of(run)} episodes={EPISODES}"
    try:
        from trainers.config import evaluator_of
        from trainers.report import write_report

        if evaluator := evaluator_of(settings.algorithm):
            evaluator.print_table(evaluator.evaluate_run(run.path, episodes=EPISODES, seed=run.cfg.seed))
        print(f"report: {write_report(run.path)}")
    except (UserError, KeyboardInterrupt) as error:
        print(
            f"The run is finished, its evaluation is not. {error}\nrepeat it with: {again}", file=sys.stderr
        )
        return 2 if isinstance(error, UserError) else EXIT_CODES["SIGINT"]
    return 0


def report(run: Run) -> None:
    """The report of a run that ended before its plan was done, if there is something to show."""
    from trainers.report import write_report
    from trainers.run import read_metrics

    try:
        if read_metrics(run.path):
            print(f"report: {write_report(run.path)}")
    except (UserError, KeyboardInterrupt) as error:
        print(f"There is no report of what was done. {error or 'Ctrl-C'}", file=sys.stderr)


def write_notes(run: Run, lines: Sequence[str]) -> None:
    """notes.json: what the report says about the run beside its numbers."""
    from trainers.checkpoint import write_error
    from trainers.files import replace_file

    path = run.path / "notes.json"
    try:
        replace_file(path, json.dumps(lines, indent=2) + "\n")
    except OSError as error:
        raise write_error(
            error, "the notes", path, "make room or restore access there, then repeat"
        ) from error


def finished(run: Run, planned: int) -> bool:
    """Whether nothing is left of a run's plan; if so, says it."""
    status = run.status or {}
    done = status.get("status") == "finished" and status["step"] >= planned
    if done:
        print(
            f"run '{run.name}' is finished: {status['step']} of {planned} steps\n"
            f"evaluate it with: python launch/evaluate.py run={name_of(run)}"
        )
    return done


def default_name(settings: TrainConfig) -> str:
    """For example ppo-HopperVelocity-long-seed3; Run.create numbers those that are taken."""
    task = re.sub(r"-v\d+$", "", re.split("[/:]", settings.env.id)[-1]).removeprefix("Safety")
    size = [] if settings.size == "default" else [settings.size]
    return "-".join([settings.algo.name, task, *size, f"seed{settings.run.seed}"])


def how_to_continue(settings: TrainConfig, run: Run, given: Mapping[str, str]) -> str:
    """The command that takes a run up again, with the settings that are not remembered by it."""
    from launch.config import RESUMABLE

    saved = any((run.path / "checkpoints").glob("step-*"))
    again = [f"{key}={value}" for key, value in given.items() if key in RESUMABLE]
    command = " ".join(["python launch/train.py", f"resume={whole(run)}", *again])
    return f"continue with: {command}" if saved else f"there is no checkpoint yet; start over with: {command}"


def name_of(run: Run) -> str:
    """How a command names the run: by its name in runs/, else by its path."""
    return run.name if run.path.parent == Path("runs") else str(run.path)


def whole(run: Run) -> str:
    """What to resume: the run, or all phases when it is one of several."""
    folder = run.path.parent
    if not (folder / "phases.json").is_file():
        return name_of(run)
    return folder.name if folder.parent == Path("runs") else str(folder)


def user_error(error: BaseException) -> UserError | None:
    """The UserError that an exception is, or that Ray carried over from another process."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, UserError) else error if isinstance(error, UserError) else None


def refuse(error: BaseException) -> int:
    """Print a user's error; exit code 2."""
    print(user_error(error), *getattr(error, "__notes__", []), sep="\n", file=sys.stderr)
    return 2


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # before the run began
        sys.exit(EXIT_CODES["SIGINT"])
