"""Experiment trackers beside a run's own files: W&B and trackio, each loaded only when it is asked for.

The run's directory stays the truth; a tracker that fails while the run is on is named and left out, and the
run goes on. W&B needs `wandb login` or WANDB_MODE=offline; trackio keeps its data on this machine.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from envs.errors import UserError, nearest

Values = Mapping[str, float | int | None]


class Tracker(Protocol):
    """What a run tells a tracker."""

    def log(self, step: int, values: Values) -> None:
        """The metrics of one learner step; None is left out."""

    def close(self) -> None:
        """Send what is left."""


class WandbTracker:
    """A run at Weights & Biases; a resumed run goes on under the same id. Curves are drawn over `step`."""

    def __init__(self, folder: Path, name: str, project: str, config: Mapping[str, Any]) -> None:
        import wandb

        settings = wandb.Settings(console="off", silent=True)
        try:
            self._run = wandb.init(
                project=project,
                name=name,
                id=_identity(folder),
                resume="allow",
                dir=str(folder),
                config=dict(config),
                settings=settings,
            )
        except wandb.errors.Error as error:
            raise UserError(
                f"W&B does not start: {error}",
                given="run.loggers=[wandb]",
                fix="wandb login, or set WANDB_MODE=offline, or leave wandb out of run.loggers",
            ) from error
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Values) -> None:
        self._run.log({"step": step, **{k: v for k, v in values.items() if v is not None}})

    def close(self) -> None:
        self._run.finish()


class TrackioTracker:
    """A run in trackio's local store, under the name of its directory."""

    def __init__(self, folder: Path, name: str, project: str, config: Mapping[str, Any]) -> None:
        import trackio

        self._run = trackio.init(
            project=project,
            name=name,
            config=dict(config),
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def log(self, step: int, values: Values) -> None:
        self._run.log({k: v for k, v in values.items() if v is not None}, step=step)

    def close(self) -> None:
        self._run.finish()


LOGGERS: dict[str, Callable[..., Tracker]] = {"wandb": WandbTracker, "trackio": TrackioTracker}


def check_loggers(names: Sequence[str]) -> None:
    """Raise UserError for a tracker that is unknown or not installed. Imports none."""
    for name in names:
        if name not in LOGGERS:
            close = nearest(name, LOGGERS, 1)[0]
            raise UserError("unknown logger", given=name, allowed=LOGGERS, fix=f"run.loggers=[{close}]")
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"run.loggers asks for {name}, which is not installed",
                given=f"run.loggers=[{', '.join(names)}]",
                fix=f"pip install '.[loggers]', or {name}; or leave it out",
            )


class Trackers:
    """All trackers of a run. `say` is told when one fails; it is left out from then on."""

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        project: str,
        config: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        check_loggers(names)
        self._say = say
        self._open = {name: LOGGERS[name](folder, folder.name, project, config) for name in names}

    def log(self, step: int, values: Values) -> None:
        """Tell every tracker the metrics of a step."""
        for name in list(self._open):
            self._try(name, lambda tracker: tracker.log(step, values))

    def close(self) -> None:
        """Send what is left and let go."""
        for name in list(self._open):
            self._try(name, lambda tracker: tracker.close())
        self._open = {}

    def _try(self, name: str, do: Callable[[Tracker], None]) -> None:
        try:
            do(self._open[name])
        except Exception as error:
            del self._open[name]
            self._say(f"{name} failed and is left out from here on: {error!r}; the run's own files are whole")


def _identity(folder: Path) -> str:
    """W&B's id of the run in `folder`, kept there for when it is resumed."""
    path = folder / "loggers.json"
    try:
        return str(json.loads(path.read_text())["wandb"])
    except (OSError, ValueError, KeyError):
        pass
    identity = secrets.token_hex(4)
    aside = folder / f".tmp-loggers-{os.getpid()}"
    aside.write_text(json.dumps({"wandb": identity}) + "\n")
    aside.replace(path)
    return identity
