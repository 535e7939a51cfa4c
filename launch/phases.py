"""Several trainings in a row: `phases=[sft,grpo]`. Each is a run; the next one starts from its model.

runs/<name>/phases.json          what was asked for, so that `resume=<name>` goes on where it ended
runs/<name>/1-sft/, 2-grpo/      the runs

A setting applies to every phase; `sft.learner.steps=100` to the phases of that algorithm alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from omegaconf import DictConfig

from envs.errors import UserError
from launch import arguments, config
from trainers.checkpoint import write_error
from trainers.config import engine_of, load_class
from trainers.files import replace_file

FILE = "phases.json"
Job = Callable[[DictConfig, dict[str, str]], int]


@dataclass(kw_only=True)
class Phases:
    """path: the folder of all; names: the algorithms; settings: what the user typed for each, as tokens."""

    path: Path
    names: list[str]
    settings: list[list[str]]

    def run(self, number: int) -> Path:
        """The run directory of phase `number`, from 0."""
        return self.path / f"{number + 1}-{self.names[number]}"

    def started(self, number: int) -> bool:
        """Whether the phase has a run."""
        return (self.run(number) / "config.json").is_file()

    def start(self, number: int, model: Path | None) -> list[str]:
        """The command line of a phase that starts from `model`; None: from the one that was asked for."""
        tokens = [f"algo={self.names[number]}", *self.settings[number]]
        if model is not None:
            tokens = [token for token in tokens if _key(token) not in ("model", "model.name")]
            tokens.append(f"model.name={_quoted(model)}")
        run = self.run(number)
        return [*tokens, f"run.name={run.name}", f"run.dir={_quoted(self.path)}"]

    def model(self, number: int) -> Path | None:
        """The model that phase `number` starts from: of the newest phase before it that hands one on."""
        for before in reversed(range(number)):
            if hands_on(self.names[before]):
                return self.run(before) / "model"
        return None


def asked(argv: Sequence[str]) -> bool:
    """Whether a command line is about phases: `phases=`, or `resume=` of such a folder."""
    return any(_key(token) == "phases" for token in argv) or _stored(argv) is not None


def launch(argv: Sequence[str], check: Job, job: Job) -> int:
    """Run the phases that are not finished; the exit code of the last one that ran.

    check: raises UserError for a config that cannot work, and for dry=true prints it; every phase is checked
    before the first starts. job: one run. Raises UserError.
    """
    stored = _stored(argv)
    plan = _read(stored) if stored else _plan(argv)
    more = [token for token in argv if _key(token) not in ("phases", "resume", "run.dir")] if stored else []
    for token in more:
        if _key(token) not in (*config.RESUMABLE, "dry"):
            raise UserError(
                f"{_key(token)} can't change when phases are resumed",
                given=token,
                allowed=config.RESUMABLE,
                fix="leave it out, or start anew",
            )
    lines = [
        arguments.read(
            [*([f"resume={_quoted(plan.run(k))}"] if plan.started(k) else plan.start(k, None)), *more]
        )
        for k in range(len(plan.names))
    ]
    dry = False
    for k, line in enumerate(lines):
        cfg = config.compose(line.argv)
        dry = bool(cfg.dry)
        if dry:
            print(f"--- phase {k + 1} of {len(lines)}: {plan.names[k]}\n")
        if not plan.started(k):
            check(cfg, line.given)
    if dry:
        return 0
    if stored is None:
        _write(plan)
    return _run(plan, more, job)


def _run(plan: Phases, more: list[str], job: Job) -> int:
    for k in range(len(plan.names)):
        if plan.started(k):
            line = arguments.read([f"resume={_quoted(plan.run(k))}", *more])
        else:
            model = plan.model(k)
            if model is not None and not model.is_dir():
                raise UserError(
                    f"phase {k + 1} has no model to start from: the one before it has left none",
                    given=model,
                    fix="give the phase before more steps",
                )
            line = arguments.read([*plan.start(k, model), *more])
        print(f"--- phase {k + 1} of {len(plan.names)}: {plan.names[k]}", flush=True)
        if code := job(config.compose(line.argv), line.given):
            return code
    return 0


def _plan(argv: Sequence[str]) -> Phases:
    """The phases of a command line. Raises UserError for what cannot be meant."""
    tokens = list(argv)
    for token in tokens:
        if token.startswith("-"):
            raise UserError("phases take no flags", given=token, fix="one list of phases at a time")
        if _key(token) in ("algo", "resume"):
            fix = "resume=<name> alone" if _key(token) == "resume" else "leave algo= out"
            raise UserError("phases= names the algorithms itself", given=token, fix=fix)
    (token,) = (t for t in tokens if _key(t) == "phases")
    value = arguments.parse(token).value()
    if not isinstance(value, list) or not value:
        raise UserError("phases is a list of algorithms", given=token, fix="phases=[sft,grpo]")
    names = [arguments.algorithm(str(name)) for name in value]
    for name in names:
        if not trains_a_model(name):
            raise UserError(
                f"algo={name} trains no model that a next phase could start from",
                given=f"phases=[{','.join(names)}]",
                allowed=[n for n in config.options("algo") if trains_a_model(n)],
            )
    common = [t for t in tokens if _key(t) not in ("phases", "run.name", "run.dir")]
    own = {name: [t for t in common if arguments.owner(t) == name] for name in names}
    common = [t for t in common if not any(t in theirs for theirs in own.values())]
    settings = [[*common, *(t.partition(".")[2] for t in own[name])] for name in names]
    values = {_key(t): str(arguments.parse(t).value()) for t in tokens if _key(t) in ("run.name", "run.dir")}
    return Phases(path=_folder(values, names), names=names, settings=settings)


def _folder(values: dict[str, str], names: list[str]) -> Path:
    """A new folder: of the name that was given, else of the phases' names with a number."""
    runs, name = Path(values.get("run.dir", "runs")), values.get("run.name")
    if name is not None:
        if (runs / name).exists():
            raise UserError(
                f"there is a run '{name}' already",
                given=str(runs / name),
                fix=f"continue it with: python launch/train.py resume={name}   or choose another run.name",
            )
        return runs / name
    number, name = 1, "-".join(names)
    while (runs / name).exists():
        number += 1
        name = f"{'-'.join(names)}-{number}"
    return runs / name


def trains_a_model(name: str) -> bool:
    """Whether an algorithm starts from a model and leaves one: its engine has such a section."""
    return "model" in engine_of(load_class(config.algorithm(name).class_path)).SECTIONS


def hands_on(name: str) -> bool:
    """Whether the next phase starts from the model of this one (not from a reward model, for example)."""
    return getattr(load_class(config.algorithm(name).class_path), "hands_on", True)


def _stored(argv: Sequence[str]) -> Path | None:
    """The folder of phases that `resume=` names; None without one."""
    values = {_key(t): t.partition("=")[2].strip("'\"") for t in argv}
    if not (name := values.get("resume")):
        return None
    places = [Path(values.get("run.dir", "runs")) / name, Path(name)]
    return next((place for place in places if (place / FILE).is_file()), None)


def _read(path: Path) -> Phases:
    try:
        stored = json.loads((path / FILE).read_text())
        return Phases(path=path, names=stored["names"], settings=stored["settings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"the phases can't be read: {error!r}", given=path / FILE) from error


def _write(plan: Phases) -> None:
    stored = {key: value for key, value in asdict(plan).items() if key != "path"}
    try:
        plan.path.mkdir(parents=True, exist_ok=True)
        replace_file(plan.path / FILE, json.dumps(stored, indent=2) + "\n")
    except OSError as error:
        fix = "choose a folder that you may write to, with run.dir=<folder>"
        raise write_error(error, "the phases", plan.path, fix) from error


def _key(token: str) -> str:
    return token.partition("=")[0]


def _quoted(path: Path) -> str:
    """A path as Hydra reads it whatever it holds."""
    text = str(path)
    plain = all(c.isalnum() or c in "/._-+" for c in text)
    return text if plain else "'" + text.replace("'", "\\'") + "'"
