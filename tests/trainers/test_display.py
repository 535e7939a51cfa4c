"""The display: numbers as shown, the pace and time left, a real terminal, and lines without one."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl

import pytest
from rich.console import Console

from trainers.display import (
    Display,
    HeadlineItem,
    PlainDisplay,
    Progress,
    RichDisplay,
    format_duration,
    format_value,
    make_display,
    sparkline,
)

HEADLINE = [
    HeadlineItem("return", "episode_return"),
    HeadlineItem("true cost", "episode_cost", " / 25"),
    HeadlineItem("P_safe", "p_safe", " ≥ 0.9"),
]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (0, "0"), (0.0, "0"), (12345, "12,345"), (12345.6, "12,346"), (431.24, "431.2"),
        (-17.31, "-17.3"), (1.836, "1.84"), (0.9123, "0.912"), (0.0003, "3e-04"), (True, "1"),
    ],
)  # fmt: skip
def test_format_value(value, text):
    assert format_value(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0:00"), (65.2, "1:05"), (59.6, "1:00"), (3 * 3600 + 62, "3:01:02"), (-3, "0:00")],
)
def test_format_duration(seconds, text):
    assert format_duration(seconds) == text


def test_sparkline():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline([5, 5, 5], 3) == "▁▁▁"
    assert sparkline([1], 3) == ""


def test_pace_and_time_left(monkeypatch):
    """100 steps planned, one step of 50 env steps every 2 s: 25 env steps a second, 2 s a step."""
    clock = [1000.0]
    monkeypatch.setattr("trainers.display.time.monotonic", lambda: clock[0])
    progress = Progress()
    progress.total_steps, progress.total_env_steps = 100, 5000
    for step in range(11, 21):  # a resumed run: what came before does not count into the pace
        clock[0] += 2.0
        progress.update(step, {"env_steps": 50 * step, "seconds": 65.0})
    assert progress.env_steps_per_second == pytest.approx(25.0)
    assert progress.seconds_left == pytest.approx(160.0)
    clock[0] += 1.0
    assert progress.seconds_left == pytest.approx(159.0), "it ticks down between reports"
    assert progress.facts() == [
        "step 20/100", "1,000/5,000 env steps", "25 env steps/s", "1:05 so far", "2:39 left",
    ]  # fmt: skip


def test_one_report_gives_no_pace():
    progress = Progress()
    progress.total_steps = 5
    progress.update(1, {})
    assert progress.facts() == ["step 1/5"]


class TestPlain:
    def test_first_and_last_report_and_few_between(self, capsys):
        display = PlainDisplay("r", every=1000.0)
        display.plan(50, 5000, HEADLINE)
        for step in range(1, 51):
            display.update(step, {"env_steps": 100 * step, "episode_return": float(step), "p_safe": None})
        display.event("12:00:00", "done")
        display.stop()
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 3
        assert lines[0] == "step 1/50 · 100/5,000 env steps · return 1.00 · true cost – · P_safe –"
        assert lines[1].startswith("step 50/50 · 5,000/5,000 env steps · ")
        assert lines[1].endswith(" · return 50.0 · true cost – · P_safe –")
        assert lines[2] == "12:00:00  done"

    def test_a_run_cut_short_still_tells_its_last_report(self, capsys):
        display = PlainDisplay("r", every=1000.0)
        display.plan(50, 0, [])
        for step in (1, 2, 3):
            display.update(step, {})
        display.stop()
        assert [line.split(" · ")[0] for line in capsys.readouterr().out.splitlines()] == [
            "step 1/50",
            "step 3/50",
        ]


class TestPanel:
    def draw(self, width: int, steps: int = 30) -> list[str]:
        console = Console(file=io.StringIO(), force_terminal=True, width=width, height=40, color_system=None)
        display = RichDisplay("a-run", console)
        display.plan(60, 6000, HEADLINE)
        for step in range(1, steps + 1):
            metrics = {"env_steps": 100 * step, "episode_return": 10.0 * step, "episode_cost": 20.0}
            display.update(step, metrics)
        with console.capture() as captured:
            console.print(display.render())
        return captured.get().splitlines()

    def test_wide(self):
        lines = self.draw(100)
        assert lines[0].startswith("╭─ a-run ─")
        assert "━" in lines[1]
        assert lines[1].endswith(" 50 % │")
        assert "step 30/60 · 3,000/6,000 env steps" in lines[2]
        assert lines[4].split() == ["│", "return", "true", "cost", "P_safe", "│"]
        assert lines[5].split() == ["│", "300.0", "20.0", "/", "25", "–", "│"]
        assert lines[6].split()[1:3] == ["▁▂▂▃▃▄▄▅▅▆▆▇▇█", "▁" * 14]

    def test_narrow_goes_below_instead_of_being_cut(self):
        text = "\n".join(self.draw(40))
        assert "…" not in text
        for item in HEADLINE:
            assert item.label in text
        assert all(len(line) <= 40 for line in text.splitlines())

    def test_before_the_plan(self):
        console = Console(file=io.StringIO(), force_terminal=True, width=60)
        with console.capture() as captured:
            console.print(RichDisplay("a-run", console).render())
        assert "starting ..." in captured.get()


CHILD = """
import sys, time
from trainers.run import HeadlineItem, Run, RunConfig
with Run.create(RunConfig(dir=sys.argv[1], name="r"), {}, "r") as run:
    run.plan(1000, 100000, [HeadlineItem("return", "episode_return")])
    for step in range(1, 1000):
        run.report(step, {"env_steps": 100 * step, "episode_return": 1.5 * step})
        if step % 10 == 0:
            run.event(f"event number {step} [with brackets] and no markup")
            print(f"printed at {step}")
        time.sleep(0.01)
        if run.should_stop():
            break
"""


def in_terminal(arguments: list[str], seconds: float) -> str:
    """What a child writes to a real (pseudo) terminal, interrupted by the key ^C after `seconds`."""
    driver, terminal = pty.openpty()
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    modes = termios.tcgetattr(terminal)
    modes[3] |= termios.NOFLSH  # else the key ^C throws away what the terminal has not shown yet
    termios.tcsetattr(terminal, termios.TCSANOW, modes)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm-256color"},
        start_new_session=True,
        preexec_fn=lambda: ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(terminal)
    output, deadline, asked = b"", time.monotonic() + 20, False
    started: float | None = None
    while True:
        try:
            output += os.read(driver, 65536)
        except OSError:  # the child closed the terminal
            break
        if started is None and b"event number" in output:
            started = time.monotonic()
        if started is not None and not asked and time.monotonic() - started > seconds:
            os.write(driver, b"\x03")
            asked = True
        if time.monotonic() > deadline:
            child.send_signal(signal.SIGKILL)
            pytest.fail("the child did not stop")
    os.close(driver)
    assert child.wait(timeout=10) == 0
    return output.decode()


def test_live_in_a_real_terminal(tmp_path):
    """Every event and print stands alone on its line, the panel follows, and Ctrl-C ends it cleanly."""
    output = in_terminal([str(tmp_path)], seconds=1.0)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", plain)]
    events = [line for line in lines if "event number" in line]
    assert len(events) >= 3
    for line in events:
        assert re.fullmatch(r"\d\d:\d\d:\d\d  event number \d+ \[with brackets\] and no markup", line)
    printed = [line for line in lines if "printed at" in line]
    assert len(printed) == len(events)
    assert all(re.fullmatch(r"printed at \d+", line) for line in printed)
    assert any(line.startswith("╭─ r ─") for line in lines)
    assert "^C" not in plain
    assert "SIGINT: stopped" in plain[plain.rindex("╭─ r ─") :]
    assert output.rstrip().endswith("\x1b[?25h"), "the cursor is shown again"


@pytest.mark.parametrize(("kind", "made"), [("rich", RichDisplay), ("plain", PlainDisplay), ("off", Display)])
def test_kinds(kind, made):
    assert type(make_display(kind, "r")) is made


def test_auto_without_a_terminal_is_plain(capsys):
    assert type(make_display("auto", "r")) is PlainDisplay
