"""What a run shows while it runs: a live panel in a terminal, plain lines elsewhere. Stores nothing."""

from __future__ import annotations

import contextlib
import os
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from envs.errors import UserError, nearest

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

KINDS = ("auto", "rich", "plain", "off")
BLOCKS = "▁▂▃▄▅▆▇█"
Value = float | int | None


@dataclass(frozen=True)
class HeadlineItem:
    """One value to show: `metric` is its key in the reported metrics, `suffix` follows it: " / 25"."""

    label: str
    metric: str
    suffix: str = ""


def format_value(value: Value) -> str:
    """A number at a readable precision: 12,340 · 431.2 · 0.912 · 3e-04; a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, int) or value == 0:
        return f"{value:,.0f}"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size < 0.01:
        return f"{value:.0e}"
    return f"{value:.{1 if size >= 10 else 2 if size >= 1 else 3}f}"


def format_duration(seconds: float) -> str:
    """4:05 or 1:04:05."""
    minutes, secs = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


class Progress:
    """Where the run is: done of total, the pace over the last reports, the time left."""

    def __init__(self) -> None:
        self.total_steps = self.total_env_steps = 0
        self.step = 0
        self.metrics: Mapping[str, Value] = {}
        self.signal: str | None = None
        self.ended = False
        self._marks: deque[tuple[float, int, float]] = deque(maxlen=16)  # (clock, step, env steps)

    def update(self, step: int, metrics: Mapping[str, Value]) -> None:
        self.step, self.metrics = step, metrics
        self._marks.append((time.monotonic(), step, float(metrics.get("env_steps") or 0)))

    def _pace(self, column: int) -> float | None:
        """Units a second between the oldest and the newest remembered report."""
        if len(self._marks) < 2:
            return None
        first, last = self._marks[0], self._marks[-1]
        return (last[column] - first[column]) / max(last[0] - first[0], 1e-9)

    @property
    def env_steps_per_second(self) -> float | None:
        return self._pace(2)

    @property
    def seconds_left(self) -> float | None:
        pace = self._pace(1)
        if not pace or not self.total_steps:
            return None
        return max(0.0, (self.total_steps - self.step) / pace - (time.monotonic() - self._marks[-1][0]))

    def facts(self) -> list[str]:
        """Step count, env steps, pace and time left as short texts."""
        facts = [f"step {self.step:,}/{self.total_steps:,}" if self.total_steps else f"step {self.step:,}"]
        done = self.metrics.get("env_steps")
        if done is not None and self.total_env_steps:
            facts.append(f"{done:,.0f}/{self.total_env_steps:,} env steps")
        if self.env_steps_per_second and not self.signal:
            facts.append(f"{self.env_steps_per_second:,.0f} env steps/s")
        seconds = self.metrics.get("seconds")
        if seconds is not None:
            facts.append(f"{format_duration(seconds)} so far")
        if self.seconds_left is not None and self.step < self.total_steps and not (self.signal or self.ended):
            facts.append(f"{format_duration(self.seconds_left)} left")
        if self.signal:
            facts.append(f"{self.signal}: {'stopped' if self.ended else 'stopping'}")
        return facts


class Display:
    """The silent display, and what the others share: they override start, stop, show and event."""

    def __init__(self, title: str) -> None:
        self.title, self.progress = title, Progress()
        self.headline: Sequence[HeadlineItem] = ()

    def start(self) -> None: ...

    def show(self) -> None: ...

    def event(self, clock: str, text: str) -> None: ...

    def plan(self, total_steps: int, total_env_steps: int, headline: Sequence[HeadlineItem]) -> None:
        self.headline = tuple(headline)
        self.progress.total_steps, self.progress.total_env_steps = total_steps, total_env_steps

    def update(self, step: int, metrics: Mapping[str, Value]) -> None:
        self.progress.update(step, metrics)
        self.show()

    def stopping(self, signal_name: str) -> None:
        """Called from a signal handler: may set state, must not print through a lock."""
        self.progress.signal = signal_name

    def stop(self) -> None:
        self.progress.ended = True


class PlainDisplay(Display):
    """Lines for logs and pipes: at most one every `every` seconds, the last report always."""

    def __init__(self, title: str, every: float = 5.0) -> None:
        super().__init__(title)
        self.every, self._next, self._shown = every, 0.0, 0

    def show(self) -> None:
        if time.monotonic() >= self._next or self.progress.step == self.progress.total_steps:
            self._line()

    def stop(self) -> None:
        super().stop()
        if self.progress.step != self._shown:
            self._line()

    def _line(self) -> None:
        values = self.progress.metrics
        items = [f"{item.label} {''.join(_shown(item, values))}" for item in self.headline]
        print(" · ".join(self.progress.facts() + items), flush=True)
        self._next, self._shown = time.monotonic() + self.every, self.progress.step

    def event(self, clock: str, text: str) -> None:
        print(f"{clock}  {text}", flush=True)

    def stopping(self, signal_name: str) -> None:
        super().stopping(signal_name)
        os.write(2, f"{signal_name}: stopping\n".encode())


class RichDisplay(Display):
    """A live panel at the bottom of the terminal; events and other prints scroll past above it."""

    def __init__(self, title: str, console: Console | None = None) -> None:
        from rich.live import Live

        super().__init__(title)
        self.console = console or _console()
        self.history: dict[str, deque[float]] = {}
        self._live = Live(get_renderable=self.render, console=self.console, auto_refresh=False)
        self._until_stop = contextlib.ExitStack()
        self._stopped = threading.Event()

    def start(self) -> None:
        self._until_stop.enter_context(_no_control_echo())
        with self.console:
            self._live.start(refresh=True)
        threading.Thread(target=self._tick, name="display", daemon=True).start()

    def stop(self) -> None:
        super().stop()
        self._stopped.set()
        with self.console:
            self._live.stop()
        self._until_stop.close()

    def _tick(self) -> None:
        while not self._stopped.wait(0.5):
            with self.console:
                if not self._stopped.is_set():
                    self._live.refresh()

    def update(self, step: int, metrics: Mapping[str, Value]) -> None:
        for item in self.headline:
            value = metrics.get(item.metric)
            if value is not None:
                self.history.setdefault(item.metric, deque(maxlen=400)).append(value)
        super().update(step, metrics)

    def event(self, clock: str, text: str) -> None:
        from rich.text import Text

        self.console.print(Text.assemble((clock, "dim"), "  ", text))

    def render(self) -> RenderableType:
        """The panel: a bar with its facts, then one column a headline item (label, value, course so far)."""
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        progress = self.progress
        parts: list[RenderableType] = []
        if not progress.total_steps:
            parts.append(Text("starting ...", style="dim"))
        else:
            bar = Table.grid(expand=True, padding=(0, 1, 0, 0))
            bar.add_column(ratio=1)
            bar.add_column(justify="right")
            percent = f"{100 * progress.step // progress.total_steps} %"
            bar.add_row(ProgressBar(progress.total_steps, progress.step), Text(percent, style="bold"))
            facts = Text(" · ".join(progress.facts()), style="yellow" if progress.signal else "")
            parts += [bar, facts, *self._headline_rows()]
        return Panel(Group(*parts), title=self.title, title_align="left", border_style="dim", padding=(0, 1))

    def _headline_rows(self) -> Iterator[RenderableType]:
        """As many columns side by side as the terminal has room for, and the rest below them."""
        from rich.table import Table
        from rich.text import Text

        cells = [
            (item, *_shown(item, self.progress.metrics), sparkline(self.history.get(item.metric, ()), 14))
            for item in self.headline
        ]
        width = max([14, *(max(len(i.label), len(value + suffix)) for i, value, suffix, _ in cells)]) + 3
        per_row = max(1, (self.console.width - 4) // width)
        for row in (cells[k : k + per_row] for k in range(0, len(cells), per_row)):
            table = Table.grid()
            for _ in row:
                table.add_column(width=width, no_wrap=True)
            table.add_row(*(Text(item.label, style="dim") for item, *_ in row))
            table.add_row(*(Text.assemble((v, "bold cyan"), (suffix, "dim")) for _, v, suffix, _ in row))
            table.add_row(*(Text(course, style="cyan") for *_, course in row))
            yield Text()
            yield table


def _shown(item: HeadlineItem, metrics: Mapping[str, Value]) -> tuple[str, str]:
    """(value, suffix) as shown; nothing follows a value that is not there."""
    value = metrics.get(item.metric)
    return format_value(value), "" if value is None else item.suffix


def _console() -> Console:
    """A console that one thread uses at a time. Rich locks the write but not the drawing before it, so that a
    panel that changed its height meanwhile would eat a line above it or leave one behind."""
    from rich.console import Console

    class OneAtATime(Console):
        turn = threading.RLock()

        def __enter__(self) -> Console:
            self.turn.acquire()
            return super().__enter__()

        def __exit__(self, *error: Any) -> None:
            try:
                super().__exit__(*error)
            finally:
                self.turn.release()

    return OneAtATime()


@contextlib.contextmanager
def _no_control_echo() -> Iterator[None]:
    """Keep the terminal from printing ^C into the panel while it is live."""
    try:
        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
        quiet = [*before]
        quiet[3] &= ~termios.ECHOCTL
        termios.tcsetattr(terminal, termios.TCSADRAIN, quiet)
    except (termios.error, OSError, ValueError, AttributeError):  # no terminal at the other end
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal has gone
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def sparkline(values: Sequence[float] | deque[float], width: int) -> str:
    """The course of `values` in `width` characters: means of equal chunks, lowest block at the minimum."""
    values = list(values)
    if len(values) < 2:
        return ""
    width = min(width, len(values))
    edges = [i * len(values) // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((mean - low) * scale)] for mean in means)


def make_display(kind: str, title: str) -> Display:
    """The display of that kind; "auto" is the live panel if stdout is a terminal, else plain lines."""
    if kind not in KINDS:
        raise UserError(
            "run.display is unknown.", given=kind, allowed=KINDS, fix=f"run.display={nearest(kind, KINDS)[0]}"
        )
    if kind == "auto":
        kind = "rich" if sys.stdout.isatty() and os.environ.get("TERM") != "dumb" else "plain"
    return {"rich": RichDisplay, "plain": PlainDisplay, "off": Display}[kind](title)
