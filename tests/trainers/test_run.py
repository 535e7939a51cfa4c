"""The run directory: what it holds, how it is resumed, stopped by real signals, and what a full disk does."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import numpy as np
import pytest

from envs.errors import UserError
from trainers.ray_cluster import deaf_children
from trainers.run import SIGNALS, HeadlineItem, Run, RunConfig, read_metrics

RESOLVED = {"algo": {"name": "ppo", "budget": 25.0}, "env": {"id": "A-v0"}}


def make(tmp_path: Path, **options) -> Run:
    cfg = RunConfig(**{"dir": str(tmp_path), "name": "r", "display": "off", **options})
    return Run.create(cfg, RESOLVED, "default")


def steps(run: Run | Path) -> list[int]:
    return [row["step"] for row in read_metrics(run.path if isinstance(run, Run) else run)]


class TestDirectory:
    def test_holds_config_metrics_events_and_status(self, tmp_path):
        with make(tmp_path) as run:
            run.plan(2, 200, [HeadlineItem("return", "episode_return")])
            run.report(1, {"env_steps": 100, "episode_return": np.float32(1.5), "p_safe": None})
            run.report(2, {"env_steps": np.int64(200), "episode_return": 2, "p_safe": 0.5})
            run.event("the horizon is cut to 250")
            assert run.status["status"] == "running"
        assert run.path == tmp_path / "r"
        config = json.loads((run.path / "config.json").read_text())
        assert config["algo"] == RESOLVED["algo"]
        assert (config["run"]["name"], config["run"]["seed"]) == ("r", 0)
        lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
        assert list(lines[0]) == ["step", "env_steps", "episode_return", "p_safe", "seconds"]
        assert lines[0]["p_safe"] is None
        assert [line["episode_return"] for line in lines] == [1.5, 2]
        assert 0 <= lines[0]["seconds"] <= lines[1]["seconds"] < 5
        assert (run.path / "events.log").read_text().endswith("  the horizon is cut to 250\n")
        assert run.status == {**run.status, "status": "finished", "step": 2, "reason": None}

    def test_a_line_is_on_disk_when_report_returns(self, tmp_path):
        run = make(tmp_path)
        run.report(1, {"x": 1})
        assert steps(run) == [1]

    def test_a_taken_name_says_how_to_resume(self, tmp_path):
        make(tmp_path)
        with pytest.raises(
            UserError, match=r"(?s)'r' exists already.*train\.py resume=r .*another run\.name"
        ):
            make(tmp_path)

    def test_without_a_name_a_taken_default_gets_a_number(self, tmp_path):
        names = [make(tmp_path, name=None).name for _ in range(3)]
        assert names == ["default", "default-2", "default-3"]
        assert Run.open("default-2", tmp_path).config["run"]["name"] == "default-2"

    @pytest.mark.parametrize("name", ["a/b", "..", " "])
    def test_a_name_is_one_folder(self, tmp_path, name):
        with pytest.raises(UserError, match=r"(?s)name of one folder.*run\.dir"):
            make(tmp_path, name=name)

    @pytest.mark.parametrize(
        ("option", "value"),
        [("checkpoint_every", 0), ("keep_checkpoints", 0), ("max_steps", -1), ("seed", -1)],
    )
    def test_small_numbers(self, tmp_path, option, value):
        with pytest.raises(UserError, match=rf"(?s)run\.{option} is too small.*{value}"):
            make(tmp_path, **{option: value})

    def test_unknown_display(self, tmp_path):
        with pytest.raises(
            UserError, match=r"(?s)run\.display.*'ritch'.*auto, rich, plain, off.*display=rich"
        ):
            make(tmp_path, display="ritch")

    def test_no_write_permission(self, read_only_disk):
        with pytest.raises(
            UserError, match=r"(?s)Cannot write the run directory: Read-only.*run\.dir=<folder>"
        ):
            make(read_only_disk)

    def test_a_place_below_a_file(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError, match=r"(?s)Cannot write the run directory: Not a directory.*file/r"):
            make(tmp_path / "file")

    def test_unknown_run_names_the_nearest(self, tmp_path):
        make(tmp_path, name="cheetah-3")
        make(tmp_path, name="hopper-1")
        with pytest.raises(UserError, match=r"(?s)no run 'cheeta-3'.*allowed: cheetah-3"):
            Run.open("cheeta-3", tmp_path)
        with pytest.raises(UserError, match="no run is there yet"):
            Run.open("x", tmp_path / "nowhere")

    def test_opened_by_name_and_by_path(self, tmp_path):
        run = make(tmp_path, seed=7, keep_checkpoints=5)
        for found in (Run.open("r", tmp_path), Run.open(run.path), Run.open(str(run.path) + "/")):
            assert (found.name, found.config, found.cfg) == ("r", run.config, run.cfg)
        assert Run.open("r", tmp_path, RunConfig(display="plain")).cfg.display == "plain"

    def test_a_broken_config_is_named(self, tmp_path):
        run = make(tmp_path)
        (run.path / "config.json").write_text("{")
        with pytest.raises(UserError, match="config of run 'r' cannot be read"):
            Run.open("r", tmp_path)

    def test_importing_it_is_light(self):
        code = "import sys, trainers.run; print({'torch', 'ray', 'rich', 'tensorboard'} & sys.modules.keys())"
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert ran.stdout == "set()\n"


class TestMetrics:
    @pytest.mark.parametrize("value", [float("nan"), np.float32(np.inf), float("-inf")])
    def test_nan_names_metric_and_step(self, tmp_path, value):
        run = make(tmp_path)
        with pytest.raises(UserError, match=r"metric 'loss' became -?(nan|inf) at step 3"):
            run.report(3, {"env_steps": 1, "loss": value})
        assert steps(run) == []

    def test_what_is_not_a_number(self, tmp_path):
        with pytest.raises(TypeError, match="'loss' at step 1 is str"):
            make(tmp_path).report(1, {"loss": "0.5"})

    def test_the_folder_is_moved_or_deleted_while_it_runs(self, tmp_path):
        run = make(tmp_path)
        run.report(1, {})
        run.path.rename(tmp_path / "moved")
        for write in (lambda: run.report(2, {}), lambda: run.checkpoint(1, {})):
            with pytest.raises(UserError, match=r"(?s)moved or deleted while it ran.*metrics\.jsonl"):
                write()
        assert not run.path.exists(), "nothing is written where nobody would look"
        (tmp_path / "moved").rename(run.path)
        run.checkpoint(1, {})
        assert run.latest() == (1, {})

    def test_steps_grow(self, tmp_path):
        run = make(tmp_path)
        run.report(2, {})
        with pytest.raises(ValueError, match="step 2 reported after 2"):
            run.report(2, {})

    def test_reserved_names(self, tmp_path):
        with pytest.raises(ValueError, match="written by the run itself"):
            make(tmp_path).report(1, {"seconds": 1.0})

    def test_one_writer_at_a_time(self, tmp_path):
        with make(tmp_path) as run:
            with pytest.raises(UserError, match="'r' is being written by another process"):
                Run.open("r", tmp_path).resume_at(0)
            assert Run.open("r", tmp_path).latest() is None, "reading is free"
            run.report(1, {})
        Run.open("r", tmp_path).resume_at(0)


def killed_after(tmp_path: Path, last: int, checkpoint: int) -> Path:
    """A run with lines 1 to `last`, a checkpoint at `checkpoint`, and a torn line, as a kill leaves it."""
    run = make(tmp_path)
    for step in range(1, last + 1):
        run.report(step, {"value": float(step)})
        if step == checkpoint:
            run.checkpoint(step, {"at": step})
    run.close()
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "val')
    return run.path


class TestResume:
    def test_a_torn_last_line_is_repaired(self, tmp_path):
        path = killed_after(tmp_path, last=3, checkpoint=2)
        assert steps(path) == [1, 2, 3], "readers leave it out"
        run = Run.open(path)
        assert run.last_step == 3
        run.report(4, {"value": 0.0})
        assert steps(run) == [1, 2, 3, 4]
        assert "99" not in (path / "metrics.jsonl").read_text()

    def test_lines_after_the_checkpoint_are_dropped_and_written_again(self, tmp_path):
        run = Run.open(killed_after(tmp_path, last=5, checkpoint=3))
        step, tree = run.latest()
        assert (step, tree) == (3, {"at": 3})
        run.resume_at(step)
        assert steps(run) == [1, 2, 3]
        for step in (4, 5, 6):
            run.report(step, {"value": 10.0 * step})
        assert [row["value"] for row in read_metrics(run.path)] == [1, 2, 3, 40, 50, 60]

    def test_from_the_start_when_there_was_no_checkpoint(self, tmp_path):
        run = Run.open(killed_after(tmp_path, last=2, checkpoint=0))
        assert run.latest() is None
        run.resume_at(0)
        run.report(1, {"value": 5.0})
        assert [row["value"] for row in read_metrics(run.path)] == [5]

    def test_seconds_continue(self, tmp_path):
        path = killed_after(tmp_path, last=3, checkpoint=2)
        rows = read_metrics(path)
        for row, seconds in zip(rows, (10.0, 20.0, 30.0), strict=True):
            row["seconds"] = seconds
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        with Run.open(path) as run:
            run.resume_at(2)
            run.report(3, {"value": 0.0})
            assert 20 <= read_metrics(path)[-1]["seconds"] < 21
        assert 20 <= run.status["seconds"] < 21

    def test_a_broken_checkpoint_is_named_and_set_aside(self, tmp_path):
        run = Run.open(killed_after(tmp_path, last=4, checkpoint=2))
        broken = run.checkpoint(4, {"at": 4})
        (broken / "state.json").write_text("{}")
        step, _ = run.latest()
        run.resume_at(step)
        assert step == 2
        events = (run.path / "events.log").read_text()
        assert "state.json is truncated" in events
        assert "Using step-000000002" in events
        assert "set aside as unused-step-000000004" in events
        assert steps(run) == [1, 2]


def tensorboard_curve(path: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path / "tensorboard"))
    events.Reload()
    return [(e.step, e.value) for e in events.Scalars(tag)]


class TestTensorBoard:
    def test_the_curve_is_what_was_reported(self, tmp_path):
        run = make(tmp_path)
        for step, value in enumerate((0.5, None, 2.0), start=1):
            run.report(step, {"value": value, "count": step})
        assert tensorboard_curve(run.path, "value") == [(1, 0.5), (3, 2.0)]
        assert tensorboard_curve(run.path, "count") == [(1, 1), (2, 2), (3, 3)]

    def test_a_resumed_curve_has_no_duplicates_and_no_gap(self, tmp_path):
        path = killed_after(tmp_path, last=5, checkpoint=3)
        first = next((path / "tensorboard").iterdir())
        first.write_bytes(first.read_bytes()[:-7])  # the kill tore this one as well
        for _ in range(2):
            run = Run.open(path)
            run.resume_at(3)
            for step in (4, 5, 6):
                run.report(step, {"value": 10.0 * step})
            run.close()
        expected = [(1, 1), (2, 2), (3, 3), (4, 40), (5, 50), (6, 60)]
        assert tensorboard_curve(path, "value") == expected
        assert len(list((path / "tensorboard").iterdir())) == 3

    def test_off(self, tmp_path):
        run = make(tmp_path, tensorboard=False)
        run.report(1, {"value": 1})
        assert not (run.path / "tensorboard").exists()

    def test_writing_it_needs_neither_torch_nor_tensorflow(self, tmp_path):
        code = (
            "import sys; from trainers.run import *; r = Run.create(RunConfig(dir=sys.argv[1]), {}, 'r')\n"
            "r.report(1, {'a': 1})\n"
            "print({'torch', 'tensorflow'} & sys.modules.keys(), 'tensorboard' in sys.modules)"
        )
        ran = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
        )
        assert ran.stdout.endswith("set() True\n")


CHILD = """
import sys, time
from trainers.run import Run, RunConfig
with Run.create(RunConfig(dir=sys.argv[1], name="r", display="plain"), {}, "r") as run:
    if sys.argv[2] == "ray":  # ray.init puts its own SIGTERM handler over ours
        import signal
        signal.signal(signal.SIGTERM, lambda *a: sys.exit("the wrong handler"))
    run.plan(10000, 0)
    for step in range(1, 10000):
        run.report(step, {})
        print("stepped", flush=True)
        time.sleep(60 if sys.argv[2] == "stuck" and step == 3 else 0.01)
        if reason := run.should_stop():
            break
    run.checkpoint(step, {"step": step})
    print("asked to stop by", reason, flush=True)
"""


def child(tmp_path: Path, mode: str = "") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path), mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    seen = 0
    while seen < 3:
        seen += process.stdout.readline() == "stepped\n"
    return process


class TestSignals:
    @pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
    @pytest.mark.parametrize("mode", ["", "ray"])
    def test_the_step_is_finished_and_a_checkpoint_written(self, tmp_path, name, mode):
        process = child(tmp_path, mode)
        process.send_signal(signal.Signals[name])
        out, err = process.communicate(timeout=20)
        assert process.returncode == 0, err
        assert f"asked to stop by {name}\n" in out
        assert out.splitlines()[-1].endswith(f"{name}: stopped"), "the last line is told in any case"
        assert f"{name}: stopping" in err
        run = Run.open("r", tmp_path)
        step, tree = run.latest()
        assert tree["step"] == step == run.last_step
        assert run.status == {**run.status, "status": "stopped", "reason": name, "step": step}

    @pytest.mark.parametrize("display", ["plain", "rich"])
    def test_the_terminal_closes(self, tmp_path, display):
        """The kernel sends SIGHUP, and whoever writes to the terminal from then on gets an error."""
        terminal, its_end = os.openpty()

        def make_it_ours() -> None:
            fcntl.ioctl(its_end, termios.TIOCSCTTY, 0)

        process = subprocess.Popen(
            [sys.executable, "-c", CHILD.replace("plain", display), str(tmp_path), ""],
            stdin=its_end, stdout=its_end, stderr=its_end,
            start_new_session=True, preexec_fn=make_it_ours,
        )  # fmt: skip
        os.close(its_end)
        while not (tmp_path / "r" / "metrics.jsonl").exists() or len(steps(tmp_path / "r")) < 3:
            assert process.poll() is None, os.read(terminal, 10_000)
            os.read(terminal, 10_000)
        os.close(terminal)
        assert process.wait(timeout=20) == 0
        run = Run.open("r", tmp_path)
        step, _ = run.latest()
        assert run.status == {**run.status, "status": "stopped", "reason": "SIGHUP", "step": step}

    def test_they_are_heard_in_a_process_that_was_started_deaf(self, tmp_path):
        """As by a sweep in a worker of Ray."""
        with deaf_children():
            process = child(tmp_path)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=20)
        assert process.returncode == 0, err
        assert "asked to stop by SIGTERM\n" in out

    def test_nohup_is_respected(self, tmp_path):
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            with make(tmp_path) as run:
                signal.raise_signal(signal.SIGHUP)
                assert run.should_stop() is None
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        finally:
            signal.signal(signal.SIGHUP, before)

    def test_a_second_interrupt_ends_it_at_once(self, tmp_path):
        process = child(tmp_path, "stuck")
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert "SIGINT: stopping" in process.stderr.readline()
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
        assert time.monotonic() - started < 5, "it did not wait for the stuck step"
        assert "KeyboardInterrupt" in err
        status = Run.open("r", tmp_path).status
        assert (status["status"], status["reason"], status["step"]) == ("stopped", "SIGINT", 3)

    def test_sigkill_leaves_a_run_that_can_be_taken_up(self, tmp_path):
        process = child(tmp_path)
        process.kill()
        process.communicate(timeout=20)
        run = Run.open("r", tmp_path)
        assert run.status["status"] == "running"
        with run:
            reached = run.last_step
            assert reached >= 3
            run.report(reached + 1, {})
        assert steps(run) == list(range(1, reached + 2))

    def test_handlers_are_restored(self, tmp_path):
        before = [signal.getsignal(s) for s in SIGNALS]
        with make(tmp_path) as run:
            assert run.should_stop() is None
            assert signal.getsignal(signal.SIGTERM) != before[1]
        assert [signal.getsignal(s) for s in SIGNALS] == before

    @pytest.mark.parametrize(
        ("number", "error", "code"),
        [(signal.SIGTERM, SystemExit, 143), (signal.SIGINT, KeyboardInterrupt, None)],
    )
    def test_a_signal_during_the_start_ends_it_at_once(self, tmp_path, number, error, code):
        """What is being started may wait for ever for what the same signal ended."""
        with pytest.raises(error) as raised, make(tmp_path) as run, run.starting():
            signal.raise_signal(number)
        assert getattr(raised.value, "code", None) == code

    def test_an_error_is_recorded(self, tmp_path):
        run = make(tmp_path)

        def fails():
            with run:
                run.report(4, {})
                raise RuntimeError("the env runner is gone")

        with pytest.raises(RuntimeError, match="the env runner is gone"):
            fails()
        assert run.status["status"] == "failed"
        assert (run.status["reason"], run.status["step"]) == ("the env runner is gone", 4)


class TestFullDisk:
    WIDE = {f"a_metric_with_a_long_name_{i}": i / 7 for i in range(300)}  # noqa: RUF012

    def fill(self, run: Run) -> None:
        while True:
            run.report(run.last_step + 1, self.WIDE)

    @pytest.mark.parametrize("tensorboard", [False, True])
    def test_metrics_stay_whole(self, small_disk, tensorboard):
        with make(small_disk, tensorboard=tensorboard) as run:
            (small_disk / "ballast").write_bytes(b"x" * 4096)  # gives room for status.json at the end
            with pytest.raises(UserError, match=r"(?s)the disk is full.*train\.py resume=r") as error:
                self.fill(run)
            files = ["metrics.jsonl", "tensorboard"] if tensorboard else ["metrics.jsonl"]
            assert any(repr(str(run.path / file)) in str(error.value) for file in files)
            reached = run.last_step
            (small_disk / "ballast").unlink()
        assert (run.path / "metrics.jsonl").read_bytes().endswith(b"\n"), "no half line is left"
        assert steps(run) == list(range(reached + 1))
        assert reached > 10

    def test_the_first_error_is_the_one_that_is_told(self, small_disk):
        """When nothing can be written any more, leaving the `with` block must not hide why."""

        def run_until_full():
            with make(small_disk, tensorboard=False) as run:
                self.fill(run)

        with pytest.raises(UserError, match="Cannot write the metrics: the disk is full"):
            run_until_full()

    def test_events(self, small_disk):
        run = make(small_disk)

        def talk():
            for _ in range(100):
                run.event("x" * 50_000)

        with pytest.raises(UserError, match=r"(?s)Cannot write the events: the disk is full.*events\.log"):
            talk()
