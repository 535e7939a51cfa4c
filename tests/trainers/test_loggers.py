"""Trackers beside a run: for real, offline, where they are installed; failing and missing ones with fakes."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from envs.errors import UserError
from trainers import loggers
from trainers.loggers import check_loggers
from trainers.run import Run, RunConfig


def play(folder: Path, steps: range, *names: str, resume: bool = False) -> Run:
    """A run of a few steps; None is a metric without a value."""
    cfg = RunConfig(name="swing", dir=str(folder), loggers=list(names), display="off", tensorboard=False)
    run = Run.open(folder / "swing", cfg=cfg) if resume else Run.create(cfg, {"algo": {"budget": 25.0}}, "")
    with run:
        for step in steps:
            run.report(step, {"loss": step / 4, "p_safe": None})
    return run


class Fake:
    """A tracker that notes what it is told and breaks at a step."""

    made: list[Fake]

    def __init__(self, folder: Path, name: str, project: str, config: Any):
        self.about, self.seen, self.closed = (folder, name, project, config), [], False
        self.made.append(self)

    def log(self, step: int, values: Any) -> None:
        if step == 3:
            raise ConnectionError("the service is away")
        self.seen.append((step, dict(values)))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    kind = type("Fake", (Fake,), {"made": []})
    monkeypatch.setitem(loggers.LOGGERS, "json", kind)  # a name that can be imported
    return kind


def test_a_tracker_is_told_every_step_and_the_config(fake: type[Fake], tmp_path: Path) -> None:
    run = play(tmp_path, range(1, 3), "json")
    (tracker,) = fake.made
    folder, name, project, config = tracker.about
    assert (folder, name, project) == (run.path, "swing", "seedbed")
    assert config["algo"] == {"budget": 25.0}
    assert tracker.seen == [(1, {"loss": 0.25, "p_safe": None}), (2, {"loss": 0.5, "p_safe": None})]
    assert tracker.closed


def test_a_tracker_that_fails_does_not_end_the_run(fake: type[Fake], tmp_path: Path) -> None:
    run = play(tmp_path, range(1, 6), "json")
    (tracker,) = fake.made
    assert [step for step, _ in tracker.seen] == [1, 2]
    assert not tracker.closed
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    log = (run.path / "events.log").read_text()
    assert "json failed and is left out from here on: ConnectionError('the service is away')" in log
    assert run.status is not None
    assert run.status["status"] == "finished"


def test_unknown_and_missing_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="unknown logger") as caught:
        RunConfig(loggers=["wandbb"]).check()
    assert "run.loggers=[wandb]" in str(caught.value)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"run\.loggers asks for trackio, which is not installed") as caught:
        check_loggers(["trackio"])
    assert "pip install '.[loggers]'" in str(caught.value)


def test_nothing_is_loaded_that_is_not_asked_for(tmp_path: Path) -> None:
    for name in ("wandb", "trackio"):
        sys.modules.pop(name, None)
    play(tmp_path, range(1, 3))
    assert not {"wandb", "trackio"} & sys.modules.keys()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    def need(name: str) -> None:
        pytest.importorskip(name, reason=f"{name} is not installed (pip install '.[loggers]')")

    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "TRACKIO_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    return need


def test_wandb_offline(offline: Callable[[str], None], tmp_path: Path) -> None:
    offline("wandb")
    run = play(tmp_path, range(1, 4), "wandb")
    play(tmp_path, range(4, 6), "wandb", resume=True)
    files = sorted((run.path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2
    identity = json.loads((run.path / "loggers.json").read_text())["wandb"]
    assert {file.stem for file in files} == {f"run-{identity}"}  # one run, taken up again
    for file, value in zip(files, (b"0.75", b"1.25"), strict=True):
        content = file.read_bytes()
        for part in (b"swing", b"seedbed", b"loss", value):
            assert part in content, part
        assert b"p_safe" not in content


def test_wandb_without_a_login(
    offline: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline("wandb")
    import wandb

    def refuse(**settings: Any) -> None:
        raise wandb.errors.UsageError("api_key not configured (no-tty)")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(UserError, match="W&B does not start: api_key not configured") as caught:
        play(tmp_path, range(1, 2), "wandb")
    assert "WANDB_MODE=offline" in str(caught.value)


def test_trackio(offline: Callable[[str], None], tmp_path: Path) -> None:
    offline("trackio")
    play(tmp_path, range(1, 4), "trackio")
    play(tmp_path, range(4, 6), "trackio", resume=True)
    (file,) = (tmp_path / "trackio_dir").glob("seedbed*.db")
    rows = (
        sqlite3.connect(file).execute("select run_name, step, metrics from metrics order by step").fetchall()
    )
    found = [(name, step, json.loads(metrics)) for name, step, metrics in rows]
    assert found == [("swing", step, {"loss": step / 4}) for step in range(1, 6)]
