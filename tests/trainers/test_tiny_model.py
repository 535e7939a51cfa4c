"""The tiny model as plain transformers sees it; its cache under damage, kills and rivals; its warm-up."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from envs.errors import UserError
from envs.text_tasks import Prompt, TextTask, TextTaskConfig, make_task
from trainers import tiny_model
from trainers.models import ModelConfig, check_model_config, load_model, load_tokenizer, prepare_model

CLOSED = ["chained_arithmetic", "countdown", "sudoku4"]
EASY = {"steps": 1, "largest": 2, "operators": "+"}  # one addition of 1 or 2
NASTY = [" two  blanks ", "\n\ttab\r\n", "don't , a-b .", "naïve 日本 🙂 \u200b", "[1] <b>{x}</b>", ""]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def quiet(text: str) -> None: ...


def task_of(name: str = "chained_arithmetic", **options: Any) -> TextTask:
    return make_task(TextTaskConfig(task=name, options=options))


def small(**settings: Any) -> ModelConfig:
    return ModelConfig(**{"tiny_width": 32, "tiny_layers": 1, "tiny_warmup_steps": 0, **settings})


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


class Letters(TextTask):
    """Open text: which letter follows."""

    cfg = TextTaskConfig(task="letters")
    train_size = 5
    untrusted_check = True

    def train(self, index: int) -> Prompt:
        text = f"after «{'abcde'[index]}» comes "
        return Prompt(id=str(index), messages=[{"role": "user", "content": text}], meta={})

    def check(self, meta: dict[str, Any], completion: str) -> float:
        raise AssertionError("an untrusted check must not run here")

    def demonstration(self, index: int) -> str:
        return "bcdef"[index]


# --- tokenizers


@pytest.mark.parametrize("name", CLOSED)
def test_every_text_of_a_task_survives_the_tokenizer_of_plain_transformers(name: str) -> None:
    task = task_of(name)
    path = prepare_model(small(), task, say=quiet)
    for tokenizer in (load_tokenizer(path), transformers.AutoTokenizer.from_pretrained(path)):
        words = " ".join(task.vocabulary() or [])
        texts = [words]
        for i in range(50):
            texts += [task.train(i).text or "", task.demonstration(i) or "", task.eval(i).text or ""]
        for text in texts:
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.decode(ids) == text
            assert len(ids) == len(text.split())
            assert tokenizer.unk_token_id not in ids
            ended = [*ids, tokenizer.eos_token_id]
            assert tokenizer.decode(ended, skip_special_tokens=True) == text
        special = [tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
        assert special == [0, 1, 2]
        assert tokenizer.padding_side == "left"


def test_bytes_carry_any_text_and_chats(tmp_path: Path) -> None:
    tiny_model.byte_tokenizer().save_pretrained(tmp_path)
    transformers.LlamaConfig().save_pretrained(tmp_path)
    chat = [{"role": "user", "content": "a\nb"}, {"role": "assistant", "content": "c"}]
    for tokenizer in (load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)):
        for text in NASTY:
            ids = tokenizer(text)["input_ids"]
            assert len(ids) == len(text.encode())
            assert tokenizer.decode(ids) == text
        before = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, tokenize=False)
        whole = tokenizer.apply_chat_template(chat, tokenize=False)
        assert before == "user: a\nb\nassistant: "
        assert whole == before + "c<eos>"
        assert tokenizer(whole)["input_ids"][-1] == tokenizer.eos_token_id == 1


# --- what is made


def test_the_folder_is_a_llama_that_plain_transformers_loads() -> None:
    task = task_of("countdown")
    path = prepare_model(ModelConfig(tiny_warmup_steps=0), task, say=quiet)
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    assert model.config.model_type == "llama"
    assert model.generation_config.eos_token_id == 1
    assert 200_000 <= sum(p.numel() for p in model.parameters()) <= 2_000_000
    assert not list(path.glob("*.bin"))
    ids = torch.tensor([load_tokenizer(path)(task.train(0).text)["input_ids"]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, load_model(path, ModelConfig()).eval()(ids).logits)


def test_it_is_the_same_whatever_the_process_did_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    one = prepare_model(small(tiny_warmup_steps=3), task_of(), say=quiet)
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / "other"))
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    two = prepare_model(small(tiny_warmup_steps=3), task_of(), say=quiet)
    assert one != two
    assert weights(one) == weights(two)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_what_determines_it_names_its_folder() -> None:
    base = tiny_model.tiny_key(small(), task_of())
    assert base == tiny_model.tiny_key(small(dtype="bfloat16", peft={"r": 4}), task_of())
    named = make_task(TextTaskConfig(id="mine", eval_size=7))
    assert base == tiny_model.tiny_key(small(), named)
    others = [
        tiny_model.tiny_key(small(tiny_seed=1), task_of()),
        tiny_model.tiny_key(small(tiny_warmup_target=0.3), task_of()),
        tiny_model.tiny_key(small(), task_of(largest=8)),
        tiny_model.tiny_key(small(), task_of("sudoku4")),
        tiny_model.tiny_key(small(), make_task(TextTaskConfig(seed=1))),
    ]
    assert len({base, *others}) == 6


# --- the cache


def counted(cfg: ModelConfig, task: TextTask) -> tuple[Path, int]:
    """The folder, and how many warm-up lines were said: 0 when it came from the cache."""
    said: list[str] = []
    folder = prepare_model(cfg, task, say=said.append)
    return folder, sum(line.startswith("warm-up") for line in said)


def test_it_is_made_once(cache: Path) -> None:
    cfg = small(tiny_warmup_steps=2)
    folder, made = counted(cfg, task_of())
    assert made == 1
    assert counted(cfg, task_of()) == (folder, 0)
    assert folder.parent == cache / "models"


def flip(folder: Path) -> None:
    data = bytearray(weights(folder))
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)


def cut(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(weights(folder)[:-10])


def lose(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def garble(folder: Path) -> None:
    (folder / tiny_model.MANIFEST).write_text('{"files": ')


def forget(folder: Path) -> None:
    (folder / tiny_model.MANIFEST).write_text("[]")


@pytest.mark.parametrize("damage", [flip, cut, lose, garble, forget])
def test_a_damaged_entry_is_made_anew(damage: Any, cache: Path) -> None:
    cfg = small(tiny_warmup_steps=1)
    folder, _ = counted(cfg, task_of())
    whole = weights(folder)
    damage(folder)
    aside = cache / "models" / f".tmp-{folder.name}"  # what a process left that was killed
    aside.mkdir()
    (aside / "model.safetensors").write_bytes(b"half")
    said: list[str] = []
    assert prepare_model(cfg, task_of(), say=said.append) == folder
    assert "damaged" in said[0]
    assert weights(folder) == whole
    assert sorted(p.name for p in (cache / "models").iterdir()) == [folder.name, f"{folder.name}.lock"]


def test_two_at_once_make_it_once() -> None:
    cfg, said, folders = small(tiny_warmup_steps=2), [], []  # type: ignore[var-annotated]

    def prepare() -> None:
        folders.append(prepare_model(cfg, task_of(), say=said.append))

    threads = [threading.Thread(target=prepare) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(folders) == 2
    assert folders[0] == folders[1]
    assert sum(line.startswith("warm-up") for line in said) == 1
    assert sum("waiting" in line for line in said) == 1


HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


def test_a_killed_process_leaves_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = small()
    lock = tiny_model.cache_folder() / "models" / f"tiny-{tiny_model.tiny_key(cfg, task_of())}.lock"
    lock.parent.mkdir(parents=True)
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    try:
        monkeypatch.setattr(tiny_model, "WAIT_S", 0.3)
        with pytest.raises(UserError, match="has been making the same tiny model"):
            prepare_model(cfg, task_of(), say=quiet)
    finally:
        holder.kill()
        holder.wait()
    assert prepare_model(cfg, task_of(), say=quiet).is_dir()


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="can't be used") as told:
        prepare_model(small(), task_of(), say=quiet)
    assert "SEEDBED_CACHE" in str(told.value)


# --- the warm-up


def plain_greedy(model: Any, tokenizer: Any, text: str) -> str:
    """One prompt, no padding, no cache: the likeliest token, again and again."""
    ids = tokenizer(text)["input_ids"]
    start = len(ids)
    while len(ids) < start + 40 and ids[-1] != tokenizer.eos_token_id:
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return str(tokenizer.decode(ids[start:], skip_special_tokens=True))


def test_it_ends_at_the_accuracy_that_is_asked_for() -> None:
    task = task_of(**EASY)
    cfg = ModelConfig(tiny_width=64, tiny_warmup_target=0.5)
    said: list[str] = []
    path = prepare_model(cfg, task, say=said.append)
    facts = json.loads((path / tiny_model.MANIFEST).read_text())
    assert 0.5 <= facts["accuracy"] < 1
    assert facts["steps"] < cfg.tiny_warmup_steps
    assert f"{facts['accuracy']:.0%}" in said[-1]
    model, tokenizer = load_model(path, cfg).eval(), load_tokenizer(path)
    prompts = [task.train(1_000_000 + i) for i in range(tiny_model.PROMPTS)]
    with torch.no_grad():
        right = [task.check(p.meta, plain_greedy(model, tokenizer, p.text or "")) for p in prompts]
    assert sum(right) / len(right) == pytest.approx(facts["accuracy"], abs=0.02)


def test_open_text_is_learned_as_bytes_and_its_check_does_not_run() -> None:
    cfg = ModelConfig(tiny_width=64, tiny_layers=1, tiny_warmup_batch=5, tiny_warmup_target=1.0)
    path = prepare_model(cfg, Letters(), say=quiet)
    facts = json.loads((path / tiny_model.MANIFEST).read_text())
    assert facts["accuracy"] == 1.0
    assert facts["steps"] < cfg.tiny_warmup_steps


def test_the_warm_up_ends_with_its_tokens() -> None:
    cfg = ModelConfig(tiny_width=64, tiny_layers=1, tiny_warmup_batch=5, tiny_warmup_tokens=2_000)
    path = prepare_model(cfg, Letters(), say=quiet)
    row = len("user: after «a» comes \nassistant: b".encode()) + 1  # and its end
    steps = json.loads((path / tiny_model.MANIFEST).read_text())["steps"]
    assert steps == -(-2_000 // (5 * row)) == 11


def test_a_demonstration_that_does_not_fit_the_window_is_named() -> None:
    with pytest.raises(UserError, match="longer than the tiny model's window") as told:
        prepare_model(small(tiny_window=16, tiny_warmup_steps=1), task_of(), say=quiet)
    # 8 words of the prompt (7 + 5 - 3 + 1 =) and 3 * 9 + 2 of the answer, and its end
    assert "8 + 30 tokens" in str(told.value)
    assert "model.tiny_window=64" in str(told.value)


@pytest.mark.slow
def test_the_default_warm_up_takes_about_a_minute() -> None:
    start = time.process_time()
    path = prepare_model(ModelConfig(), task_of(), say=print)
    seconds = time.process_time() - start
    facts = json.loads((path / tiny_model.MANIFEST).read_text())
    assert 0.4 <= facts["accuracy"] <= 0.6  # measured: 0.50 after 640 steps
    assert seconds < 120  # measured: 54, imports included, on a busy machine


# --- names and settings


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"dtype": "fp32"}, "model.dtype"),
        ({"attn_implementation": "flash"}, "model.attn_implementation"),
        ({"tiny_width": 100}, "width"),
        ({"tiny_layers": 0}, "layer"),
        ({"tiny_warmup_target": 1.5}, "tiny_warmup_target"),
        ({"tiny_warmup_steps": -1}, "tiny_warmup_steps"),
        ({"tiny_warmup_tokens": 0}, "tiny_warmup_tokens"),
        ({"tiny_warmup_batch": 0}, "tiny_warmup_batch"),
        ({"tiny_warmup_lr": float("nan")}, "tiny_warmup_lr"),
        ({"name": "./nowhere"}, "no such model folder"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], named: str) -> None:
    check_model_config(ModelConfig())
    with pytest.raises(UserError, match=named):
        check_model_config(ModelConfig(**settings))


def test_models_that_are_not_there_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="can't be fetched"):
        prepare_model(ModelConfig(name="not/an/id"), task_of(), say=quiet)
    with pytest.raises(UserError, match="has no config"):
        prepare_model(ModelConfig(name=str(tmp_path)), task_of(), say=quiet)
    with pytest.raises(UserError, match="can't be loaded"):
        load_model(tmp_path, ModelConfig())
    with pytest.raises(UserError, match="can't be loaded"):
        load_tokenizer(tmp_path)


def test_tokens_that_are_named_are_set_and_unknown_ones_refused(tmp_path: Path) -> None:
    tiny_model.byte_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path, ModelConfig(pad_token="<unk>")).pad_token_id == 2
    with pytest.raises(UserError, match="eos_token") as told:
        load_tokenizer(tmp_path, ModelConfig(eos_token="<eot>"))
    assert "<eos>" in str(told.value)


def test_the_settings_load_neither_torch_nor_transformers() -> None:
    code = "import sys, trainers.models; print({'torch', 'transformers'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
