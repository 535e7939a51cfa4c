"""The house's rules, read from the source itself: rooms, floors, papers' names, what is never loaded."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Ground floor first. A room imports from itself and from rooms above it in this list.
ROOMS = ["envs", "rollouts", "rewards", "trainers", "algos", "evaluators", "stages", "launch"]
OTHER_FOLDERS = {"seeds", "tests", "benchmarks"}
# Modules of algos/ that are common knowledge, not a paper's.
BASELINES = {"__init__", "ppo", "ppo_lag", "grpo", "sft", "dpo", "reward_model", "pretrain"} | {
    "masked_diffusion_sft"
}


def tracked_files() -> list[Path]:
    """Every file that git tracks or would track; without git, every file outside ignored-looking folders."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        paths = [ROOT / line for line in out.splitlines()]
    except (OSError, subprocess.CalledProcessError):
        skipped = {".venv", "runs", "build", "outputs", "multirun", "__pycache__"}
        paths = [p for p in ROOT.rglob("*") if not skipped & set(p.relative_to(ROOT).parts)]
    return sorted(p for p in paths if p.is_file())


FILES = tracked_files()
PYTHON = [p for p in FILES if p.suffix == ".py"]


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, top-level package) of every import, also of those inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: relative import"
            yield node.lineno, (node.module or "").split(".")[0]


def paper_modules() -> list[Path]:
    return sorted(p for p in (ROOT / "algos").glob("*.py") if p.stem not in BASELINES)


def paper_names() -> set[str]:
    """The name of every paper's module and the aliases that its configuration gives it."""
    names: set[str] = set()
    for module in paper_modules():
        names.add(module.stem)
        conf = (ROOT / "launch" / "conf" / "algo" / f"{module.stem}.yaml").read_text(encoding="utf-8")
        aliases = re.search(r"aliases:\s*\[([^\]]*)\]", conf)
        names |= {a.strip() for a in aliases.group(1).split(",") if a.strip()} if aliases else set()
    return names


def papers_in(text: str, names: set[str]) -> list[str]:
    """Paper names that occur in the text as words or as parts of identifiers, whatever their case."""
    words = {part for word in re.findall(r"[A-Za-z0-9_]+", text) for part in (word, *word.split("_"))}
    words |= {part for word in set(words) for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", word)}
    return sorted(names & {word.lower() for word in words})


@pytest.mark.parametrize("path", [p for p in PYTHON if room_of(p) in ROOMS], ids=name_of)
def test_imports_respect_the_floors(path: Path) -> None:
    floor = ROOMS.index(room_of(path))
    forbidden = set(ROOMS[floor + 1 :]) | {"tests", "benchmarks", "seeds"}
    wrong = [f"line {line}: {package}" for line, package in imported(path) if package in forbidden]
    assert not wrong, f"{name_of(path)} imports from a room below it: {wrong}"


NEVER = {
    "envs": {"ray", "torch", "transformers", "trl"},
    "algos": {"ray"},
    "evaluators": {"trl"},
}


@pytest.mark.parametrize("path", [p for p in PYTHON if room_of(p) in NEVER], ids=name_of)
def test_rooms_do_not_import_what_they_never_hold(path: Path) -> None:
    wrong = {package for _, package in imported(path)} & NEVER[room_of(path)]
    assert not wrong, f"{name_of(path)} imports {wrong}"


def test_every_paper_has_a_card() -> None:
    without = [m.stem for m in paper_modules() if not (ROOT / "seeds" / f"{m.stem}.md").exists()]
    assert not without, f"no card in seeds/ for {without}"


def test_there_is_a_paper() -> None:
    assert {"traces", "tracess"} <= paper_names()


SHARED = [p for p in PYTHON if room_of(p) in ROOMS and room_of(p) != "algos"]


@pytest.mark.parametrize("path", SHARED, ids=name_of)
def test_shared_rooms_know_no_paper(path: Path) -> None:
    found = papers_in(path.read_text(encoding="utf-8"), paper_names())
    assert not found, f"{name_of(path)} knows a paper's name: {found}"


def test_the_search_for_papers_sees_what_it_should() -> None:
    names = {"traces", "tracess"}
    for text in ["algos.traces", "class TracesConfig", "use_traces = 1", "'tracess'", "TRACES"]:
        assert papers_in(text, names), text
    for text in ["traceset", "retraces the steps", "backtrace"]:
        assert not papers_in(text, names), text


def test_top_level_folders_are_the_rooms() -> None:
    folders = {room_of(p) for p in PYTHON if len(p.relative_to(ROOT).parts) > 1}
    assert folders <= set(ROOMS) | OTHER_FOLDERS, folders - set(ROOMS) - OTHER_FOLDERS


def test_no_room_is_empty() -> None:
    for room in {room_of(p) for p in PYTHON} & set(ROOMS):
        assert any(p.name != "__init__.py" for p in PYTHON if room_of(p) == room), f"{room}/ holds nothing"


def test_every_module_states_its_boundary() -> None:
    silent = [
        name_of(p)
        for p in PYTHON
        if room_of(p) in ROOMS and not ast.get_docstring(ast.parse(p.read_text(encoding="utf-8")))
    ]
    assert not silent, f"no docstring on the first lines of {silent}"


UNPICKLERS = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}


def unsafe_loads(source: str) -> list[str]:
    """Calls that would run what a file says: unpickling in any dress."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [f"line {node.lineno}: {m}" for m in modules if m.split(".")[0] in UNPICKLERS]
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        options = {k.arg: k.value for k in node.keywords}
        value = {name: getattr(node_, "value", None) for name, node_ in options.items()}
        call = ast.unparse(node.func)
        if (call == "torch.load" and value.get("weights_only") is not True) or (
            call in {"np.load", "numpy.load"} and value.get("allow_pickle", False) is not False
        ):
            found.append(f"line {node.lineno}: {call}")
        if call in {"yaml.load", "yaml.unsafe_load", "yaml.full_load"}:
            found.append(f"line {node.lineno}: {call}")
    return found


@pytest.mark.parametrize("path", [p for p in PYTHON if room_of(p) in ROOMS], ids=name_of)
def test_nothing_is_unpickled(path: Path) -> None:
    assert not unsafe_loads(path.read_text(encoding="utf-8")), name_of(path)


def test_the_search_for_unpickling_sees_what_it_should() -> None:
    bad = ["import pickle", "from cloudpickle import loads", "torch.load(p)", "yaml.load(f)"]
    bad += ["torch.load(p, weights_only=False)", "np.load(p, allow_pickle=True)"]
    good = ["torch.load(p, weights_only=True)", "np.load(p)", "yaml.safe_load(f)", "json.load(f)"]
    assert all(unsafe_loads(source) for source in bad)
    assert not any(unsafe_loads(source) for source in good)


MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|root|Users|work)/")


def test_no_path_of_a_machine() -> None:
    assert MACHINE_PATH.search('open("' + "/ro" + 'ot/data")')
    assert not MACHINE_PATH.search('"runs/work/x"')
    found = []
    for path in FILES:
        if path.suffix in {".png", ".npz", ".safetensors", ".mp4"}:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="ignore").splitlines(), 1):
            if MACHINE_PATH.search(line):
                found.append(f"{name_of(path)}:{number}: {line.strip()[:80]}")
    assert not found, "\n".join(found)
