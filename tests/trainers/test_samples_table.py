"""Samples as readers see them: on screen and in report.html, also when the model wrote to do harm."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.test_report import Page
from trainers.report import write_report
from trainers.run import Run, RunConfig
from trainers.samples_log import read_samples, rewards_in_words, shown, spread, visible
from trainers.samples_table import CHARACTERS, POLICY, samples_table, thinned

HOSTILE = (
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "</pre></td></table></body><h1>the end</h1><!--",
    '" onmouseover="alert(1)" x="',
    "\x1b[2J\x1b]0;owned\x07 \u202egnp.exe",
    "&lt;b&gt; &amp; <svg/onload=alert(1)>",
)


def sample(step: int = 0, reward: float = 1.0, **changes: Any) -> dict[str, Any]:
    record = {
        "step": step,
        "id": f"0-{step}-0-0",
        "version": [0, step],
        "prompt": "1 + 2 =",
        "completion": "ans 3",
        "finish": "eos",
        "tokens": 2,
        "reward": reward,
        "rewards": {"exact": reward},
    }
    return record | changes


def run_with(folder: Path, records: list[dict[str, Any]]) -> Path:
    config = {"algo": {"name": "grpo"}, "env": {"id": "", "task": "chained_arithmetic"}}
    run = Run.create(RunConfig(dir=str(folder), name="mine", display="off"), config, "-")
    for step in (1, 2):
        run.report(step, {"reward": 0.25 * step, "loss": -0.5, "completion_length": 30.0, "kl": 0.1 * step})
    (run.path / "samples.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return run.path


def test_text_that_would_do_harm_is_only_shown(tmp_path: Path) -> None:
    records = [sample(k, prompt=text, completion=text) for k, text in enumerate(HOSTILE)]
    records.append(sample(9, rewards={"<b>x</b>": {"failure": "<i>died</i>"}}, finish="<u>"))
    html = write_report(run_with(tmp_path, records)).read_text("utf-8")
    page = Page(html)
    assert page.open == []
    assert page.tags.count("script") == 1
    assert not {"svg", "i", "u", "x"} & set(page.tags)
    assert page.tags.count("h1") == 1
    assert page.tags.count("b") == len(records) + html.count('class="tile"')
    assert page.tags.count("img") == len(list((tmp_path / "mine" / "curves").iterdir()))
    assert "onmouseover" not in re.sub(r">[^<]*<", "><", html), "nor in any tag"
    for text in HOSTILE:
        assert visible(text) in page.text
    assert not re.search("[\x1b\x07\u202e]", html)
    assert "<b>x</b> failed (<i>died</i>)" in page.text
    assert "data-failed" in html


def test_the_page_names_its_only_script_by_its_hash(tmp_path: Path) -> None:
    import base64
    import hashlib

    html = write_report(run_with(tmp_path, [sample()])).read_text("utf-8")
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in html
    assert f'http-equiv="Content-Security-Policy" content="{POLICY}"' in html
    assert "default-src 'none'" in POLICY


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a browser: chromium")
def test_a_browser_runs_our_script_and_no_other(tmp_path: Path) -> None:
    records = [sample(k, k / 40, completion=HOSTILE[k % len(HOSTILE)]) for k in range(40)]
    path = write_report(run_with(tmp_path, records))
    line = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'home'}"]
    out = subprocess.run(
        [*line, "--dump-dom", f"file://{path}"], capture_output=True, text=True, timeout=120
    ).stdout
    assert "<title>mine</title>" in out, "the script of a sample would have changed it"
    assert out.count("<tr data-step=") == 25, "our script shows one page of the 40"
    assert "<output>1 to 25 of 40</output>" in out


def test_what_is_in_the_report(tmp_path: Path) -> None:
    parts = {"format": {"value": 0.5, "opened": 1.0, "closed": 0.0}, "exact": 1.0, "math": None}
    page = Page(write_report(run_with(tmp_path, [sample(3, 1.5, rewards=parts)])).read_text("utf-8"))
    assert "grpo · chained_arithmetic · seed 0" in page.text
    assert "format 0.500 (opened 1, closed 0), exact 1, math not applicable" in page.text
    assert "2 tokens, eos, weights of step 3" in page.text
    assert "0.375reward, mean of the last 2 reports" in page.text
    assert "loss" not in page.text.split("Curves")[0], "a policy's loss says nothing"
    curves = {path.stem for path in (tmp_path / "mine" / "curves").iterdir()}
    assert curves == {"reward", "loss", "tokens", "kl"}


def test_without_samples_there_is_no_section_and_no_script(tmp_path: Path) -> None:
    html = write_report(run_with(tmp_path, [])).read_text("utf-8")
    assert "Samples" not in html
    assert "<script" not in html
    assert samples_table([]) == ""


def test_long_texts_and_many_samples_are_cut() -> None:
    table = samples_table([sample(completion="x" * (CHARACTERS + 1234))])
    assert "x" * CHARACTERS + "\n... 1,234 more characters" in table
    many = [sample(step) for step in range(1000) for _ in range(4)]
    kept = thinned(many, 600)
    steps = [record["step"] for record in kept]
    assert len(kept) == 600
    assert (steps[0], steps[-1]) == (0, 999)
    assert all(steps.count(step) == 4 for step in set(steps)), "whole batches"
    assert thinned(many[:600], 600) == many[:600]


def test_a_torn_line_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text(json.dumps(sample(1)) + "\n" + '{"step": 2, "pro')
    assert read_samples(tmp_path) == [sample(1)]
    assert read_samples(tmp_path / "nowhere") == []


def test_on_the_screen() -> None:
    text = shown(
        [sample(prompt="a\nb", completion="\x1b[31mred\x9b" + "y" * 500, finish="length")], length=20
    )
    assert text.splitlines() == [
        "  reward 1: exact 1 · 2 tokens, cut off",
        "    prompt      a",
        "                b",
        f"    completion  \\x1b[31mred\\x9b{'y' * 5} ... (509 characters)",
    ]
    assert rewards_in_words(sample(rewards={"math": {"failure": "timeout"}})) == "math failed (timeout)"


def test_the_best_the_middle_and_the_worst() -> None:
    assert spread([0.0, 3.0, 1.0, 2.0, 4.0], 3) == [4, 3, 0]
    assert spread([1.0, 2.0], 3) == [1, 0]
    assert spread([7.0], 3) == [0]
