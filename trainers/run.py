"""The run directory `runs/<name>/`: config, metrics, events, checkpoints, status, and how a run stops.

Knows nothing of what is trained; imports neither torch nor Ray.

    config.json      the resolved config                 checkpoints/   see trainers.checkpoint
    metrics.jsonl    one JSON object a learner step      tensorboard/   the same metrics
    events.log       what happened, with times           status.json    running, finished, stopped or failed
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import FrameType
from typing import Any

from envs.errors import UserError, nearest
from trainers.checkpoint import Tree, latest_checkpoint, save_checkpoint, set_aside_after, write_error
from trainers.display import HeadlineItem, make_display
from trainers.files import replace_file
from trainers.loggers import Trackers, check_loggers
from trainers.metrics import checked_number, read_metrics, whole_lines
from trainers.scalar_events import ScalarEvents

__all__ = ["HeadlineItem", "Run", "RunConfig", "read_metrics"]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(kw_only=True)
class RunConfig:
    """The options every run has. `name` None: the launcher chooses; `max_steps` caps the planned steps."""

    name: str | None = None
    seed: int = 0
    dir: str = "runs"
    max_steps: int | None = None
    checkpoint_every: int = 20  # learner steps
    keep_checkpoints: int = 2
    tensorboard: bool = True
    display: str = "auto"  # auto | rich | plain | off
    loggers: list[str] = field(default_factory=list)  # wandb, trackio: beside the run's own files
    project: str = "seedbed"  # the loggers' project
    deterministic: bool = True

    def check(self) -> None:
        """Raise UserError for a value that cannot work."""
        for key, low in (("checkpoint_every", 1), ("keep_checkpoints", 1), ("max_steps", 1), ("seed", 0)):
            value = getattr(self, key)
            if value is not None and value < low:
                raise UserError(f"run.{key} is too small.", given=value, allowed=f">= {low}")
        if self.name is not None and (not self.name.strip() or self.name in (".", "..") or "/" in self.name):
            raise UserError(
                "run.name must be the name of one folder.",
                given=self.name,
                fix="put the place into run.dir instead",
            )
        make_display(self.display, "")
        check_loggers(self.loggers)


class Run:
    """One run directory, and the process that writes it.

        with Run.create(cfg, resolved, "ppo-cheetah") as run:
            run.plan(total_steps, total_env_steps, headline)
            for step in range(1, total_steps + 1):
                run.report(step, metrics)
                if run.should_stop():
                    break
            run.checkpoint(step, tree)

    The `with` block catches SIGINT, SIGTERM and SIGHUP (a terminal that closes; not under nohup), shows the
    display and writes status.json at its end.
    `report(step)` comes before `checkpoint(step)`: the metrics are synced with the checkpoint, so resuming
    finds them. Only one process can write a run at a time.
    """

    def __init__(self, path: Path, cfg: RunConfig, config: dict[str, Any]) -> None:
        self.path, self.cfg, self.config = path, cfg, config
        self.name = path.name
        self._metrics: int | None = None  # file descriptor, opened at the first write
        self._tensorboard: ScalarEvents | None = None
        self._trackers: Trackers | None = None
        self._last_step = -1
        self._seconds_before = 0.0
        self._started = time.monotonic()
        self._display = make_display(cfg.display, self.name)
        self.stopped_by: str | None = None  # the signal that asked for it
        self._starting = False
        self._handlers: dict[int, Any] = {}
        self._status_written = False

    # --- making and finding

    @classmethod
    def create(cls, cfg: RunConfig, resolved: Mapping[str, Any], default_name: str) -> Run:
        """A new directory with `resolved` as its config (its `run` section completed by `cfg` and the name).

        Without `cfg.name` it is called `default_name`, with a number behind it if that is taken. A `cfg.name`
        that is taken raises UserError with the way to resume it, and so does a place that cannot be written.
        """
        cfg.check()
        name, number = cfg.name or default_name, 1
        while cfg.name is None and _taken(Path(cfg.dir) / name):
            number += 1
            name = f"{default_name}-{number}"
        path = Path(cfg.dir) / name
        if _taken(path):
            raise UserError(
                f"Run {name!r} exists already.",
                given=str(path),
                fix=f"continue it with: python launch/train.py resume={name}   or choose another run.name",
            )
        config = {**resolved, "run": {**asdict(cfg), "name": name}}
        try:
            path.mkdir(parents=True, exist_ok=True)
            _write_json(path / "config.json", config)
        except OSError as error:
            fix = "choose a folder that you may write to, with run.dir=<folder>"
            raise write_error(error, "the run directory", path, fix) from error
        return cls(path, cfg, config)

    @classmethod
    def open(
        cls, name_or_path: str | Path, runs_dir: str | Path = "runs", cfg: RunConfig | None = None
    ) -> Run:
        """An existing run, to read it or to resume it; `cfg` takes the place of the recorded run options."""
        places = [Path(runs_dir) / name_or_path, Path(name_or_path)]
        path = next((p for p in places if (p / "config.json").is_file()), None)
        if path is None:
            runs = sorted(p.parent.name for p in Path(runs_dir).glob("*/config.json"))
            raise UserError(
                f"There is no run {str(name_or_path)!r} in {runs_dir}/.",
                allowed=nearest(str(name_or_path), runs) or "no run is there yet",
                fix="name a folder in there, or give the path of a run",
            )
        path = path.resolve() if path.name in ("", "..") else path
        try:
            config = json.loads((path / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise UserError(
                f"The config of run {path.name!r} cannot be read: {error}.", given=str(path)
            ) from error
        if cfg is None:
            known = {f.name for f in fields(RunConfig)}
            cfg = RunConfig(**{k: v for k, v in config.get("run", {}).items() if k in known})
        cfg.check()
        return cls(path, cfg, config)

    # --- metrics and events

    @property
    def seconds(self) -> float:
        """Wall seconds of training so far: since `with` or `resume_at`, plus those before it."""
        return self._seconds_before + time.monotonic() - self._started

    @property
    def last_step(self) -> int:
        """The newest reported step, -1 if there is none."""
        self._open_metrics()
        return self._last_step

    def report(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl, TensorBoard and the display.

        Values are numbers or None (written as null). NaN and infinities raise UserError naming metric and
        step. Steps must grow; `seconds` is added here.
        """
        file = self._open_metrics()
        if step <= self._last_step:
            raise ValueError(
                f"step {step} reported after {self._last_step}; a resumed run calls resume_at first"
            )
        values = {name: checked_number(name, value, step) for name, value in metrics.items()}
        self._check_place(file)
        if {"step", "seconds"} & values.keys():
            raise ValueError("the metrics 'step' and 'seconds' are written by the run itself")
        seconds = round(self.seconds, 3)
        line = json.dumps({"step": step, **values, "seconds": seconds}, allow_nan=False)
        self._append(file, line.encode() + b"\n")
        self._last_step = step
        if self.cfg.tensorboard:
            try:
                self._tensorboard = self._tensorboard or ScalarEvents(self.path / "tensorboard", step)
                self._tensorboard.write(step, values)
            except OSError as error:
                raise self._cannot_write(
                    error, "the TensorBoard curves", self.path / "tensorboard"
                ) from error
        if self._trackers is not None:
            self._trackers.log(step, values)
        self._display.update(step, {**values, "seconds": seconds})

    def event(self, text: str) -> None:
        """A line about something that happened: on screen and, with its time, in events.log."""
        now = time.localtime()
        entry = f"{time.strftime('%Y-%m-%d %H:%M:%S', now)}  {text}\n"
        self._display.event(time.strftime("%H:%M:%S", now), text)
        try:
            with (self.path / "events.log").open("a", encoding="utf-8") as file:
                file.write(entry)
        except OSError as error:
            raise self._cannot_write(error, "the events", self.path / "events.log") from error

    # --- checkpoints

    def checkpoint(self, step: int, tree: Tree) -> Path:
        """Write `tree` as the state after `step`; see trainers.checkpoint for what a tree may hold."""
        file = self._open_metrics()
        self._check_place(file)
        os.fsync(file)
        return save_checkpoint(self.path / "checkpoints", step, tree, self.cfg.keep_checkpoints)

    def latest(self) -> tuple[int, Tree] | None:
        """The newest whole checkpoint; a broken one is named by an event and the one before it used."""
        return latest_checkpoint(self.path / "checkpoints", self.event)

    def resume_at(self, step: int) -> None:
        """Forget what came after `step`, so that the run goes on as if it had not been.

        Later metrics lines are dropped, TensorBoard's curves continue at `step`, later (broken) checkpoints
        are renamed, and `seconds` counts on from there.
        """
        file = self._open_metrics()
        kept = [(line, row) for line, row in whole_lines(self._read(file)) if row["step"] <= step]
        os.ftruncate(file, sum(len(line) for line, _ in kept))
        self._take_up([row for _, row in kept])
        for folder in set_aside_after(self.path / "checkpoints", step):
            self.event(f"checkpoint set aside as {folder.name}: the run goes on from step {step}")
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None

    # --- display, signals, end

    def plan(self, total_steps: int, total_env_steps: int, headline: Sequence[HeadlineItem] = ()) -> None:
        """Tell the display how long the run is and which metrics to show."""
        self._catch_signals()
        self._display.plan(total_steps, total_env_steps, headline)

    def should_stop(self) -> str | None:
        """The signal received in the `with` block, if any: write a checkpoint and leave the loop.

        A second SIGINT raises KeyboardInterrupt at once.
        """
        self._catch_signals()
        return self.stopped_by

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Inside, a signal raises at once (KeyboardInterrupt or SystemExit).

        Nothing is there to be saved yet, and what is being started may wait for what the signal ended.
        """
        self._starting = True
        try:
            yield
        finally:
            self._starting = False

    def finish(self, status: str, reason: str | None = None) -> None:
        """Write status.json ("finished", "stopped" or "failed"). The `with` block does it by itself."""
        self._write_status(status, reason)
        self._status_written = True

    @property
    def status(self) -> dict[str, Any] | None:
        """status.json as it is on disk: status, step, reason, seconds. "running" may also be a killed run."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.path / "status.json").read_text())
        return None

    def __enter__(self) -> Run:
        self._started = time.monotonic()
        self._open_metrics()
        if self.cfg.loggers:
            self._trackers = Trackers(self.cfg.loggers, self.path, self.cfg.project, self.config, self.event)
        self._write_status("running", None)
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in SIGNALS}
            self._handlers = {
                number: handler
                for number, handler in handlers.items()
                if not (number == signal.SIGHUP and handler == signal.SIG_IGN)
            }
            self._catch_signals()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # whoever started this run may block them
        self._display.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._display.stop()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}
        try:
            if error is not None:
                stopped = isinstance(error, KeyboardInterrupt)
                with contextlib.suppress(UserError):  # the disk may be what failed; the first error matters
                    self.finish(
                        "stopped" if stopped else "failed", "SIGINT" if stopped else str(error) or repr(error)
                    )
            elif not self._status_written:
                self.finish("stopped" if self.stopped_by else "finished", self.stopped_by)
        finally:
            self.close()

    def close(self) -> None:
        """Close the files and let another process write the run. The `with` block does it."""
        if self._trackers is not None:
            self._trackers.close()
            self._trackers = None
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None
        if self._metrics is not None:
            os.close(self._metrics)
            self._metrics = None

    # --- inside

    def _catch_signals(self) -> None:
        """(Re)install the handlers: ray.init puts its own SIGTERM handler over ours."""
        for number in self._handlers:
            if signal.getsignal(number) != self._on_signal:
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again, self.stopped_by = self.stopped_by is not None, self.stopped_by or signal.Signals(number).name
        if number == signal.SIGHUP:
            _leave_terminal()
        if number == signal.SIGINT and (again or self._starting):
            raise KeyboardInterrupt
        if self._starting:
            raise SystemExit(128 + number)
        if not again:
            self._display.stopping(self.stopped_by)

    def _open_metrics(self) -> int:
        """The metrics file, locked for this process and rid of a line that a kill tore."""
        if self._metrics is not None:
            return self._metrics
        path = self.path / "metrics.jsonl"
        try:
            file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise self._cannot_write(error, "the metrics", path) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise UserError(
                f"Run {self.name!r} is being written by another process.",
                given=str(self.path),
                fix="wait for it or stop it, then resume",
            ) from None
        except OSError:
            pass  # a file system without locks
        self._metrics = file
        kept = whole_lines(self._read(file))
        os.ftruncate(file, sum(len(line) for line, _ in kept))
        self._take_up([row for _, row in kept])
        return file

    def _check_place(self, file: int) -> None:
        """Raise UserError when the folder was moved or deleted under the running process."""
        path = self.path / "metrics.jsonl"
        with contextlib.suppress(OSError):
            if os.path.samestat(path.stat(), os.fstat(file)):
                return
        raise UserError(
            "The run's folder was moved or deleted while it ran.",
            given=str(path),
            fix="put the folder back and resume the run, or start it again",
        )

    def _take_up(self, rows: list[dict[str, Any]]) -> None:
        self._last_step = rows[-1]["step"] if rows else -1
        self._seconds_before = rows[-1]["seconds"] if rows else 0.0
        self._started = time.monotonic()

    @staticmethod
    def _read(file: int) -> bytes:
        return os.pread(file, os.fstat(file).st_size, 0)

    def _append(self, file: int, line: bytes) -> None:
        """All of the line or nothing: a full disk must not leave half of it."""
        size, written = os.fstat(file).st_size, 0
        try:
            while written < len(line):
                written += os.write(file, line[written:])
        except OSError as error:
            os.ftruncate(file, size)
            raise self._cannot_write(error, "the metrics", self.path / "metrics.jsonl") from error

    def _write_status(self, status: str, reason: str | None) -> None:
        value = {
            "status": status,
            "step": self.last_step,
            "reason": reason,
            "seconds": round(self.seconds, 3),
        }
        try:
            _write_json(self.path / "status.json", value)
        except OSError as error:
            raise self._cannot_write(error, "the status", self.path / "status.json") from error

    def _cannot_write(self, error: OSError, what: str, path: Path) -> UserError:
        fix = f"make room or restore access there, then: python launch/train.py resume={self.name}"
        return write_error(error, what, path, fix)


def _leave_terminal() -> None:
    """Print into nothing from now on, where a terminal was: it has gone, and writing to it would raise."""
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(stream).st_mode):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream)
                os.close(nowhere)


def _taken(path: Path) -> bool:
    try:
        return path.exists() and (not path.is_dir() or any(path.iterdir()))
    except OSError:
        return False  # making the directory will tell


def _write_json(path: Path, value: Any) -> None:
    replace_file(path, json.dumps(value, indent=2) + "\n")
