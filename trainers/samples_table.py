"""The samples of a run as a table to browse, for report.html: one piece of HTML that needs nothing else.

Every row is in the page, escaped, and readable without scripts; the script only filters, sorts and turns
pages. It is the page's only one, so that a policy in the page's head can name it by its hash (`POLICY`).
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from typing import Any

from trainers.display import format_value
from trainers.samples_log import Record, rewards_in_words, visible

ROWS = 600  # in one page
CHARACTERS = 2000  # of one prompt or completion

STYLE = """
.samples table { width: 100%; table-layout: fixed; }
.samples th:nth-child(1) { width: 4.5rem; } .samples th:nth-child(2) { width: 11rem; }
.samples th:nth-child(3) { width: 34%; }
.samples tr[data-failed] td:nth-child(2) b { color: #c0392b; }
.samples td pre { max-height: 16rem; overflow: auto; }
.samples .bar { display: block; height: 4px; border-radius: 2px; background: #2f6db3; margin: .15rem 0; }
.tools { display: none; flex-wrap: wrap; gap: .5rem .9rem; align-items: center; margin-bottom: .7rem; }
.tools input[type=search] { min-width: 16rem; } .tools input[type=number] { width: 5rem; }
.tools input, .tools select, .tools button { font: inherit; padding: .15rem .4rem; }
"""

SCRIPT = """
(() => {
  const box = document.querySelector('.samples'), tools = box.querySelector('.tools');
  const body = box.querySelector('tbody'), rows = [...body.rows], size = 25;
  const get = name => tools.querySelector(`[name=${name}]`);
  const number = (row, key) => row.dataset[key] === '' ? -Infinity : +row.dataset[key];
  const orders = {
    oldest: (a, b) => number(a, 'step') - number(b, 'step'),
    newest: (a, b) => number(b, 'step') - number(a, 'step'),
    best: (a, b) => number(b, 'reward') - number(a, 'reward'),
    worst: (a, b) => number(a, 'reward') - number(b, 'reward'),
    longest: (a, b) => number(b, 'tokens') - number(a, 'tokens'),
  };
  let page = 0;
  const show = () => {
    const words = get('text').value.toLowerCase(), low = get('from').value, high = get('to').value;
    const found = rows.filter(row => (!words || row.textContent.toLowerCase().includes(words))
      && (low === '' || number(row, 'step') >= +low) && (high === '' || number(row, 'step') <= +high));
    found.sort(orders[get('order').value]);
    page = Math.max(0, Math.min(page, Math.ceil(found.length / size) - 1));
    body.replaceChildren(...found.slice(page * size, (page + 1) * size));
    const last = Math.min(found.length, (page + 1) * size);
    tools.querySelector('output').textContent =
      found.length ? `${page * size + 1} to ${last} of ${found.length}` : 'none';
  };
  const turn = by => () => { page += by; show(); };
  for (const name of ['text', 'from', 'to', 'order'])
    get(name).addEventListener('input', () => { page = 0; show(); });
  get('back').addEventListener('click', turn(-1));
  get('on').addEventListener('click', turn(1));
  tools.style.display = 'flex';
  show();
})();
"""
_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'; "
    f"script-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'"
)
TOOLS = """<div class="tools"><input type="search" name="text" placeholder="words in prompt or completion">
<label>step <input type="number" name="from" min="0"> to <input type="number" name="to" min="0"></label>
<label>order <select name="order"><option value="oldest">first steps</option>
<option value="newest">last steps</option><option value="best">highest reward</option>
<option value="worst">lowest reward</option><option value="longest">longest</option></select></label>
<button name="back">back</button><output></output><button name="on">on</button></div>"""


def samples_table(records: Sequence[Record]) -> str:
    """The table with its tools and its script; nothing without records."""
    if not records:
        return ""
    kept = thinned(records, ROWS)
    highest = max((abs(r["reward"]) for r in kept), default=0.0) or 1.0
    rows = "".join(_row(record, highest) for record in kept)
    head = "<tr><th>step</th><th>reward</th><th>prompt</th><th>completion</th></tr>"
    note = (
        f"{len(kept):,} of {len(records):,} samples in samples.jsonl, evenly over the run."
        if len(kept) < len(records)
        else f"All {len(records):,} samples in samples.jsonl; of every batch, some are kept."
    )
    return (
        f'<div class="card samples">{TOOLS}<div class="scroll"><table><thead>{head}</thead>'
        f'<tbody>{rows}</tbody></table></div><p class="faint">{note}</p></div><script>{SCRIPT}</script>'
    )


def thinned(records: Sequence[Record], count: int) -> list[Record]:
    """At most `count` of them: all of some batches, the first and the last among these."""
    steps = list(dict.fromkeys(record["step"] for record in records))
    if len(records) <= count:
        return list(records)
    batches = max(2, count * len(steps) // len(records))
    kept = {steps[k * (len(steps) - 1) // (batches - 1)] for k in range(batches)}
    return [record for record in records if record["step"] in kept][:count]


def _row(record: Record, highest: float) -> str:
    failed = any(isinstance(r, dict) and "failure" in r for r in record["rewards"].values())
    width = max(0.0, min(1.0, record["reward"] / highest))
    about = f"{record['tokens']} tokens, {'cut off' if record['finish'] == 'length' else record['finish']}"
    if record.get("version"):
        about += f", weights of step {record['version'][1]}"
    data = {"step": record["step"], "reward": record["reward"], "tokens": record["tokens"]}
    attributes = "".join(f' data-{name}="{escape(json.dumps(value))}"' for name, value in data.items())
    return (
        f'<tr{attributes}{" data-failed" if failed else ""}><td class="number">{record["step"]}</td>'
        f'<td><b>{escape(format_value(record["reward"]))}</b><span class="bar" '
        f'style="width:{100 * width:.0f}%"></span><span class="faint">{escape(rewards_in_words(record))}<br>'
        f"{escape(about)}</span></td>{_cell(record['prompt'])}{_cell(record['completion'])}</tr>"
    )


def _cell(text: Any) -> str:
    text = str(text)
    more = f"\n... {len(text) - CHARACTERS:,} more characters" if len(text) > CHARACTERS else ""
    return f"<td><pre>{escape(visible(text[:CHARACTERS]) + more)}</pre></td>"
