"""Curves and report of a realistic run directory: what they hold, that they stand alone, strange input."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from envs.errors import UserError
from tests.trainers.run_directory import write_run
from trainers.curves import collect, smooth
from trainers.report import write_curves, write_report
from trainers.run import Run, RunConfig, read_metrics


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_run(tmp_path_factory.mktemp("runs"))
    write_report(path)
    return path


@pytest.fixture
def copy(run_dir: Path, tmp_path: Path) -> Path:
    """A copy to tamper with that reported the cost alone (drawing takes its time)."""
    path = Path(shutil.copytree(run_dir, tmp_path / "copy"))
    rows = [{key: row[key] for key in ("step", "env_steps", "episode_cost")} for row in read_metrics(path)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Page(HTMLParser):
    """Text, tables (rows of cell texts), sources and unclosed tags of a page."""

    VOID = ("meta", "img", "br", "input")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.sources, self.open, self.rows, self.tags = "", [], [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        self.text += data
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def page(run_dir: Path) -> Page:
    return Page((run_dir / "report.html").read_text("utf-8"))


class TestCurves:
    def test_one_figure_a_group(self, run_dir):
        names = {path.stem for path in (run_dir / "curves").iterdir()}
        assert names == {
            "return", "cost", "violations", "p_safe", "labels", "queries", "multiplier", "throughput", "time",
            "others",
        }  # fmt: skip

    def test_they_are_pictures_with_something_drawn(self, run_dir):
        for path in (run_dir / "curves").iterdir():
            image = imread(path)
            assert image.shape[0] >= 200
            assert image.shape[1] >= 500
            assert 0.005 < (image[..., :3].min(axis=2) < 0.9).mean() < 0.5, path

    def test_a_full_disk_leaves_the_curves_that_are_there(self, copy, small_disk):
        for name in ("config.json", "metrics.jsonl"):
            shutil.copy(copy / name, small_disk / name)
        (there,) = write_curves(small_disk)
        before = there.read_bytes()
        with contextlib.suppress(OSError), (small_disk / "ballast").open("wb", buffering=0) as ballast:
            while True:
                ballast.write(b"x" * 4096)
        with pytest.raises(UserError, match=r"Cannot write the curves: the disk is full"):
            write_curves(small_disk)
        assert there.read_bytes() == before
        assert list(there.parent.iterdir()) == [there]

    def test_the_font_list_is_kept_outside_the_home(self, copy, tmp_path):
        (tmp_path / "home").write_text("not a folder")
        (tmp_path / "tmp").mkdir()
        places = {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")}
        environ = {
            k: v for k, v in os.environ.items() if k not in ("MPLCONFIGDIR", "XDG_CACHE_HOME")
        } | places
        code = "import sys; from trainers.curves import write_curves; write_curves(sys.argv[1])"
        times = []
        for _ in range(2):
            line = [sys.executable, "-c", code, str(copy)]
            ran = subprocess.run(line, env=environ, capture_output=True, text=True, check=True)
            assert ran.stderr == ""
            (fonts,) = (tmp_path / "tmp").glob("seedbed-matplotlib-*/fontlist-*.json")
            times.append(fonts.stat().st_mtime_ns)
        assert times[0] == times[1], "listed once"

    def test_the_cost_curve_shows_the_budget_line(self, copy):
        """In the budget's red, across the whole width; and not without a budget."""

        def red_rows() -> np.ndarray:
            (image,) = (imread(p) for p in write_curves(copy) if p.stem == "cost")
            red = np.abs(image[..., :3] - np.array([0xC0, 0x39, 0x2B]) / 255).max(axis=2) < 0.1
            return np.flatnonzero(red.sum(axis=1) > 0.4 * image.shape[1])

        assert 1 <= len(red_rows()) <= 4
        config = json.loads((copy / "config.json").read_text())
        del config["algo"]["budget"]
        (copy / "config.json").write_text(json.dumps(config))
        assert len(red_rows()) == 0

    def test_collect_leaves_out_nulls_and_what_was_reported_once(self):
        rows = [
            {"step": 1, "env_steps": 100, "a": 1.0, "b": None, "once": 5.0, "seconds": 1.0},
            {"step": 2, "env_steps": 200, "a": 2.0, "b": 7.0, "seconds": 2.0},
            {"step": 3, "env_steps": 300, "a": None, "b": 8.0, "seconds": 3.0},
        ]
        label, curves = collect(rows)
        assert label == "environment steps"
        assert curves.keys() == {"a", "b"}
        assert np.array_equal(curves["a"], [[100, 200], [1, 2]])
        assert np.array_equal(curves["b"], [[200, 300], [7, 8]])
        assert collect([])[1] == {}
        assert collect([{"step": 1, "x": 1}, {"step": 2, "x": 2}])[0] == "learner steps"

    def test_smooth_is_the_mean_of_what_lies_around(self):
        y = np.random.default_rng(0).normal(size=90)
        expected = [y[max(0, i - 2) : i + 3].mean() for i in range(90)]  # 90 // 40 = 2 on either side
        np.testing.assert_allclose(smooth(y), expected, rtol=0, atol=1e-12)
        assert smooth(y[:39]) is None
        assert smooth(np.arange(90.0)) is None, "a counter is shown as it is"


class TestReport:
    def test_is_well_formed_and_needs_nothing_else(self, page):
        assert page.open == []
        assert all(source.startswith("data:") for source in page.sources)
        assert "script" not in page.tags
        assert "link" not in page.tags

    def test_carries_every_curve_and_the_video(self, page, run_dir):
        def embedded(kind: str) -> list[bytes]:
            head = f"data:{kind};base64,"
            return [base64.b64decode(s.removeprefix(head)) for s in page.sources if s.startswith(head)]

        assert sorted(embedded("image/png")) == sorted(p.read_bytes() for p in (run_dir / "curves").iterdir())
        assert embedded("video/mp4") == [(run_dir / "video.mp4").read_bytes()]
        assert page.tags.count("video") == 1

    def test_evaluation_table(self, page):
        assert ["quantity", "as trained", "deterministic"] in page.rows
        assert ["episode return", "412.2 [398.5, 426.0]", "533.0"] in page.rows
        assert ["episode cost", "15.5 [13.2, 17.8]", "41.0 [38.0, 44.0]"] in page.rows
        assert ["violation rate", "12.5 % [5.0 %, 28.0 %]", "100.0 % [89.0 %, 100.0 %]"] in page.rows
        assert "32 episodes; mean and 95 % confidence interval. budget 25.0, checkpoint step 120" in page.text

    def test_config_status_notes_and_events(self, page):
        assert ["lr", "0.0006"] in page.rows
        assert ["options.a.b", "1"] in page.rows
        assert ["hidden_sizes", "[64, 64]"] in page.rows
        assert ["id", '"SafetyHalfCheetahVelocity-v1"'] in page.rows
        assert "seed 5 · finished at step 120" in page.text
        assert "horizon cut from 1000 to 250 steps, budget left at 25" in page.text
        assert re.search(r"\d\d:\d\d:\d\d  constraint active: estimator fitted on 138 labels", page.text)

    def test_tiles(self, page, run_dir):
        cost = np.mean([row["episode_cost"] for row in read_metrics(run_dir)[-10:]])
        assert f"{cost:.1f} / 25" in page.text
        assert "480,000" in page.text
        assert "true cost / budget, mean of the last 10 reports" in page.text

    def test_everything_is_escaped(self, page, run_dir):
        html = (run_dir / "report.html").read_text("utf-8")
        for danger in ("<script>alert", "<b>alias", "<more>", "<Env-v0>"):
            assert danger not in html
        for text in (
            "<script>alert('an event')</script>",
            "<b>alias</b>",
            "= 480,000 & <more>",
            "env <Env-v0>",
        ):
            assert text in page.text

    def test_names_that_are_markup(self, tmp_path):
        run = Run.create(
            RunConfig(dir=str(tmp_path), name="<i>&", display="off"), {"<x>": {"<y>": "<z>"}}, "-"
        )
        for step in (1, 2):
            run.report(step, {"<img src=x onerror=alert(1)>": step})
        page = Page(write_report(run.path).read_text("utf-8"))
        assert page.open == []
        assert page.text.strip().startswith("<i>&")
        assert "i" not in page.tags
        assert page.tags.count("img") == 1  # the curve
        assert ["<y>", '"<z>"'] in page.rows

    def test_a_run_that_has_only_begun(self, tmp_path):
        run = Run.create(RunConfig(dir=str(tmp_path), name="new", display="off"), {}, "-")
        page = Page(write_report(run.path).read_text("utf-8"))
        assert "Nothing was reported yet." in page.text
        for section in ("Evaluation", "One episode", "Curves", "Events", "Notes"):
            assert section not in page.text

    def test_a_torn_optional_file_is_left_out(self, copy):
        (copy / "evaluation.json").write_text("{")
        (copy / "events.log").write_bytes(b"caf\xe9 ok\n")
        (copy / "video.mp4").unlink()
        text = Page(write_report(copy).read_text("utf-8")).text
        assert "Evaluation" not in text
        assert "One episode" not in text
        assert "caf\ufffd ok" in text

    def test_not_a_run(self, tmp_path):
        with pytest.raises(UserError, match=r"config of run .* cannot be read"):
            write_report(tmp_path)

    def test_a_full_disk(self, run_dir, small_disk):
        for name in ("config.json", "metrics.jsonl"):
            shutil.copy(run_dir / name, small_disk / name)
        (small_disk / "ballast").write_bytes(b"x" * (1024 * 1024 - 130 * 1024))
        with pytest.raises(
            UserError, match=r"(?s)Cannot write the (curves|report): the disk is full.*repeat"
        ):
            write_report(small_disk)
        assert not (small_disk / "report.html").exists()
