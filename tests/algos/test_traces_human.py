"""A person labels a run: through the queue, in a real browser, in a terminal; and what survives a restart."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from envs.errors import UserError
from rewards.label_queue import LabelQueue
from tests.conftest import ROOT
from tests.rewards.browser import Browser, find_browser
from tests.trainers.control_runs import assert_same, rows, settings
from trainers.config import typed
from trainers.control import train
from trainers.run import Run

# A pendulum that shall not spin: drawn by the environment itself, without a cost. A person needs none.
SWING = [
    "env=gym",
    "env.id=Pendulum-v1",
    "env.cost=null",
    "env.horizon=30",
    "rollout.num_envs=4",
    "rollout.num_env_runners=0",
    "rollout.env_steps=480",  # 4 iterations
    "learner.minibatch_steps=60",
    "learner.epochs=2",
    "run.display=plain",
    "run.tensorboard=false",
    "run.checkpoint_every=1",
    "algo.label=human",
    "algo.human.port=0",
    "algo.human.frames=6",
    "algo.human.undo_s=0.3",
    "algo.slice_steps=5",
    "algo.start_window=4",
    "algo.start_unsafe_share=0.25",
    "algo.start_labels=2",
    "algo.gate_tries=1",
    "algo.query_min=1",
    "algo.query_fraction=0.5",
    "algo.estimator.batch_trajectories=8",
    "algo.estimator.pretrain_updates=5",
    "algo.estimator.retrain_updates=3",
]


def spins(folder: Path, clip: str) -> bool:
    """What the labellers of these tests find unsafe: an angular velocity beyond 4 rad/s."""
    obs = load_file(folder / "clips" / clip / "replay.safetensors")["obs"]
    return bool(abs(obs[:, 2]).max() > 4.0)


class Labeller(threading.Thread):
    """Answers every clip it is asked, at most `limit`, from its own look into the folder."""

    def __init__(self, folder: Path, limit: int = 10**9):
        super().__init__(daemon=True)
        self.queue, self.limit, self.given, self.stop = LabelQueue(folder), limit, 0, threading.Event()

    def run(self) -> None:
        while not self.stop.is_set():
            for clip in self.queue.pending():
                if self.given == self.limit:
                    return
                if (self.queue.folder / "clips" / clip / "replay.safetensors").exists():
                    self.queue.answer(clip, "unsafe" if spins(self.queue.folder, clip) else "safe")
                    self.given += 1
            time.sleep(0.02)


@pytest.fixture
def labelled(ray: Any) -> Iterator[Callable[..., Run]]:
    """run(folder, *overrides, labeller=..., resume=...) -> a run in this process, labelled by a thread."""
    threads: list[Labeller] = []

    def go(
        folder: Path,
        *overrides: str,
        limit: int = 10**9,
        stop_after: int | None = None,
        again: Run | None = None,
    ):
        if again is None:
            cfg, values = settings("traces", folder, *SWING, "run.display=off", *overrides)
            run = Run.create(cfg.run, values, "run")
        else:
            cfg = typed(json.loads((again.path / "config.json").read_text()))
            run = Run.open(again.path, cfg=cfg.run)
        labeller = Labeller(run.path / "labels", limit)
        threads.append(labeller)
        labeller.start()
        with run:
            if stop_after is not None:  # a signal, as soon as so many labels are given
                threading.Thread(target=_stop, args=(run, labeller, stop_after), daemon=True).start()
            train(cfg, run)
        labeller.stop.set()
        return run

    yield go
    for thread in threads:
        thread.stop.set()


def _stop(run: Run, labeller: Labeller, after: int) -> None:
    while labeller.given < after:
        time.sleep(0.01)
    time.sleep(0.3)
    run.stopped_by = "SIGTERM"


def answered(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.path / "labels" / "answers.jsonl").read_text().splitlines()]


def test_a_run_waits_for_its_labels_and_learns_from_them(
    labelled: Callable[..., Run], tmp_path: Path
) -> None:
    run = labelled(tmp_path)
    found = rows(run)
    assert [row["labels_used"] for row in found] == [2, 6, 8, 10]
    assert [row["constraint_active"] for row in found] == [0, 1, 1, 1]
    assert found[-1]["p_safe"] is not None
    assert found[-1]["p_safe_when_safe"] is None  # nobody but the person knows
    given = answered(run)
    assert len(given) == len({row["clip"] for row in given}) == 10
    saved = run.latest()
    assert saved is not None
    wholes, ends = [], saved[1]["algorithm"]["labeled"]["ends"]
    counts = saved[1]["algorithm"]["labeled"]["counts"]
    position = 0
    for count in counts:
        position += int(count)
        wholes.append(float(saved[1]["algorithm"]["labeled"]["labels"][position - 1]))
        assert ends[position - 1] == 30
    assert wholes == [float(row["label"] == "safe") for row in given]
    # A safe whole makes six safe prefixes; an unmarked unsafe one says nothing of its prefixes.
    assert [int(c) for c in counts] == [6 if w else 1 for w in wholes]
    log = (run.path / "events.log").read_text()
    assert re.search(r"a person labels this run, at http://127\.0\.0\.1:\d+/", log)
    assert "waiting for a person: 0 of 2 clips labelled, at http" in log
    assert not any((run.path / "labels" / "clips").iterdir())


def test_a_stopped_run_keeps_its_labels_and_asks_nothing_twice(
    labelled: Callable[..., Run], tmp_path: Path
) -> None:
    """Stopped while it waits for the third of six labels; the end is that of a run that never stopped."""
    unbroken = labelled(tmp_path / "a")
    broken = labelled(tmp_path / "b", limit=3, stop_after=3)
    assert broken.status is not None
    assert (broken.status["status"], broken.status["reason"]) == ("stopped", "SIGTERM")
    assert len(rows(broken)) == 1
    resumed = labelled(tmp_path, again=broken)
    given = answered(resumed)
    assert len(given) == len({row["clip"] for row in given}) == 10
    assert [row["label"] for row in given] == [row["label"] for row in answered(unbroken)]
    assert_same(unbroken, resumed)


def test_skipped_clips_are_left_out(labelled: Callable[..., Run], tmp_path: Path, monkeypatch: Any) -> None:
    given = iter(range(10**6))

    def answer(self: LabelQueue, clip: str, label: str, step: Any = None) -> None:
        self._append({"clip": clip, "label": "skip" if next(given) % 2 else label, "step": None})

    monkeypatch.setattr(LabelQueue, "answer", answer)
    run = labelled(tmp_path, "rollout.env_steps=240")
    assert [row["labels_used"] for row in rows(run)] == [1, 2]


def test_nobody_answers(labelled: Callable[..., Run], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the run waited 0\.5 s for a person's next label") as caught:
        labelled(tmp_path, "algo.human.timeout_s=0.5", limit=0)
    assert "2 of 2 clips are not labelled" in str(caught.value)
    assert "answers are kept" in str(caught.value)


def test_an_environment_that_cannot_be_drawn(labelled: Callable[..., Run], tmp_path: Path) -> None:
    toy = ["env.id=tests.trainers.toy_envs:Throttle-v0"]
    with pytest.raises(UserError, match="the clips that a person shall label cannot be drawn") as caught:
        labelled(tmp_path, *toy, limit=0)
    assert "render_mode" in str(caught.value)


def test_what_is_said_before_the_start(tmp_path: Path) -> None:
    cfg, _ = settings("traces", tmp_path, *SWING)
    said = cfg.algorithm.describe(cfg)
    assert said[0] == "a person labels clips of episodes, and the run waits for the answers; " + (
        "constraint E[P_safe] >= 0.9"
    )


def test_settings_that_cannot_work(tmp_path: Path) -> None:
    for override, message in (
        ("algo.label=crowd", "unknown algo.label"),
        ("algo.human.port=99999", "is no port"),
    ):
        with pytest.raises(UserError, match=message):
            settings("traces", tmp_path, *SWING, override)
    # The simulated annotator cannot do without a cost.
    with pytest.raises(UserError, match="constrains a cost, but this environment has none"):
        settings("traces", tmp_path, *SWING, "algo.label=oracle")


# -- from outside: the launcher, a browser, a terminal


class Launched:
    """launch/train.py in a process of its own, its output in a file."""

    def __init__(self, folder: Path, *arguments: str):
        self.log = folder / f"log-{time.monotonic_ns()}"
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "launch" / "train.py"), *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                start_new_session=True,
            )

    def said(self) -> str:
        return self.log.read_text()

    def wait_for(self, pattern: str, seconds: float = 120) -> re.Match[str]:
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.said())):
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.1)
        return found

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium or Chrome on this machine (Debian: apt-get install chromium)")
    found = Browser(program, tmp_path / "profile")
    yield found
    found.close()


WAITING = "document.getElementById('say').textContent"
SHOWN = "clip && clip.id"


def judge(page: Any, folder: Path, previous: str | None = None) -> str:
    """Look at the clip that the page shows and press a key; its id."""
    clip = page.wait(f"{SHOWN} && clip.id !== {json.dumps(previous)} && clip.id")
    if spins(folder, clip):
        page.press("m")  # the moment that is on the screen
        page.wait("document.getElementById('mark').textContent")
        page.press("u")
    else:
        page.press("s")
    page.wait(f"!clip || clip.id !== {json.dumps(clip)}")
    return clip


def test_labelling_in_a_browser_through_a_kill_and_a_closed_page(browser: Browser, tmp_path: Path) -> None:
    run_name = "swing"
    labels = tmp_path / "runs" / run_name / "labels"
    arguments = [
        "algo=traces",
        *SWING,
        f"run.name={run_name}",
        "rollout.env_steps=240",
        "algo.human.undo_s=1.5",
    ]
    run = Launched(tmp_path, *arguments)
    try:
        url = run.wait_for(r"(http://127\.0\.0\.1:\d+/)").group(1)
        page = browser.open(url)
        run.wait_for("waiting for a person: 0 of 2 clips labelled")
        first = page.wait(SHOWN)
        # Pictures, of more than one colour, and they move.
        colours = "new Set(screen.getContext('2d').getImageData(0, 0, screen.width, screen.height).data).size"
        page.wait(f"{colours} > 20")
        page.press(" ")
        assert page.value("playing") is False
        frame = page.value("Number(time.value)")
        page.press("ArrowRight")
        assert page.value("Number(time.value)") in (frame + 1, page.value("Number(time.max)"))
        # Skip, then take it back: the clip is shown again.
        page.press("k")
        page.wait(f"{SHOWN} && clip.id !== {json.dumps(first)}")
        assert "1 of 2 labelled, 0 in all" in page.wait(WAITING)
        page.press("z")
        page.wait(f"{SHOWN} === {json.dumps(first)}")
        # One answer, then the run is killed and the page closed.
        assert judge(page, labels) == first
        page.close()
        run.kill()
        assert [row["label"] for row in _lines(labels)][:2] == ["skip", "undo"]
        assert len(LabelQueue(labels).answers()) == 1

        run = Launched(tmp_path, f"resume={run_name}")
        page = browser.open(run.wait_for(r"(http://127\.0\.0\.1:\d+/)").group(1))
        run.wait_for("waiting for a person: 1 of 2 clips labelled")
        assert "1 of 2 labelled" in page.wait(f"{SHOWN} && {WAITING}")
        second = judge(page, labels)
        assert second != first
        for _ in range(4):  # two of the next iteration, then two more for the start
            judge(page, labels)
        assert run.process.wait(timeout=180) == 0, run.said()
        page.wait(f"{WAITING}.includes('does not answer')")
    finally:
        run.kill()
    clips = [row["clip"] for row in _lines(labels) if row["label"] in ("safe", "unsafe")]
    assert len(clips) == len(set(clips)) == 6
    metrics = [json.loads(line) for line in (labels.parent / "metrics.jsonl").open()]
    assert [row["labels_used"] for row in metrics] == [2, 6]


def _lines(labels: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (labels / "answers.jsonl").read_text().splitlines()]


def test_labelling_in_a_terminal(tmp_path: Path) -> None:
    """launch/label.py on a terminal of 80 by 24, beside the run: clips as blocks, answers by key."""
    labels = tmp_path / "runs" / "swing" / "labels"
    run = Launched(tmp_path, "algo=traces", *SWING, "run.name=swing", "rollout.env_steps=120")
    terminal, inside = pty.openpty()
    shown = b""
    labeller = None
    try:
        run.wait_for("waiting for a person: 0 of 2 clips labelled")
        labeller = subprocess.Popen(
            [sys.executable, str(ROOT / "launch" / "label.py"), "run=swing"],
            stdin=inside,
            stdout=inside,
            stderr=inside,
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "80", "LINES": "24"},
        )

        def read_until(text: bytes, seconds: float = 60) -> None:
            nonlocal shown
            deadline = time.monotonic() + seconds
            while text not in shown:
                assert time.monotonic() < deadline, shown[-2000:]
                shown += os.read(terminal, 65536)

        read_until(b"2 left")
        assert "▀".encode() in shown
        assert b"38;2;" in shown
        os.write(terminal, b"k")
        read_until(b"1 left")
        shown = b""
        os.write(terminal, b"z")
        read_until(b"2 left")
        os.write(terminal, b" mu")  # pause, mark, unsafe
        read_until(b"1 left")
        os.write(terminal, b"s")
        read_until(b"nothing to label now")
        os.write(terminal, b"q")
        read_until(b"2 answers given")
        assert labeller.wait(timeout=30) == 0
        assert run.process.wait(timeout=180) == 0, run.said()
    finally:
        run.kill()
        if labeller is not None and labeller.poll() is None:
            labeller.kill()
        os.close(terminal)
        os.close(inside)
    given = _lines(labels)
    assert [row["label"] for row in given] == ["skip", "undo", "unsafe", "safe"]
    assert given[2]["clip"] == given[0]["clip"] == given[1]["clip"] != given[3]["clip"]
    assert given[2]["step"] is not None
