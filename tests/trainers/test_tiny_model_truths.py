"""The tiny model's folder as plain transformers sees it: round trips, a causal Llama, a warm start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

models = pytest.importorskip("trainers.models")
from envs.text_tasks import TextTaskConfig, make_task  # noqa: E402

CLOSED = ["chained_arithmetic", "countdown", "sudoku4"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    place = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEEDBED_CACHE", str(place))
        yield place


def cold(name: str) -> tuple[Any, str]:
    task = make_task(TextTaskConfig(task=name))
    return task, models.prepare_model(models.ModelConfig(warmup_steps=0), task)


@pytest.mark.parametrize("name", CLOSED)
def test_every_text_of_the_task_survives_the_tokenizer_of_plain_transformers(name: str, cache: Path) -> None:
    import transformers

    task, path = cold(name)
    for tokenizer in (models.load_tokenizer(path), transformers.AutoTokenizer.from_pretrained(path)):
        words = task.vocabulary()
        assert tokenizer.decode(
            tokenizer(" ".join(words), add_special_tokens=False)["input_ids"]
        ) == " ".join(words)
        for i in range(50):
            for text in (task.train(i).text, task.demonstration(i), task.eval(i).text):
                ids = tokenizer(text, add_special_tokens=False)["input_ids"]
                assert tokenizer.decode(ids) == text
                assert tokenizer.unk_token_id not in ids
        assert tokenizer.eos_token_id is not None
        assert tokenizer.pad_token_id is not None
        assert tokenizer.eos_token_id != tokenizer.pad_token_id


def test_the_folder_is_a_llama_that_plain_transformers_loads(cache: Path) -> None:
    import torch
    import transformers

    task, path = cold("countdown")
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    assert model.config.model_type == "llama"
    assert 200_000 <= sum(p.numel() for p in model.parameters()) <= 2_000_000
    assert (Path(path) / "model.safetensors").is_file()
    assert not list(Path(path).glob("*.bin"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    ids = torch.tensor([tokenizer(task.train(0).text)["input_ids"]])
    again = models.load_model(path, models.ModelConfig()).eval()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)


def test_another_task_or_size_is_another_folder(cache: Path) -> None:
    _, first = cold("countdown")
    _, other = cold("sudoku4")
    _, again = cold("countdown")
    assert first == again != other
