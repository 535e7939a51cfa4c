"""The folder a run leaves: plain transformers loads it, adapters are merged, and half of one never stays."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers

from envs.errors import UserError
from tests.trainers.tiny_language import Recipe, make_learner, make_model, newest, train
from trainers.model_output import card, export_model
from trainers.models import ModelConfig

ADAPTERS = {"r": 4, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp("model"), dropout=0.0)


def trained(recipe: Recipe, folder: Path) -> tuple[dict[str, Any], Any]:
    """(the checkpoint's tree, the model as it was in memory when the run ended)."""
    kept: list[Any] = []

    def make(given: Recipe, context: Any) -> Any:
        kept.append(make_learner(given, context))
        return kept[0]

    return newest(train(recipe, folder, make=make)), kept[0].model.eval()


def config(**model: Any) -> Any:
    return SimpleNamespace(model=ModelConfig(attn_implementation="eager", **model))


IDS = torch.tensor([[3, 13, 4, 14], [5, 13, 6, 14]])


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", ["sft", "reward_model"])
def test_the_folder_computes_what_the_trained_model_did(
    kind: str, lora: bool, model: str, tmp_path: Path
) -> None:
    tree, live = trained(Recipe(kind, model, steps=2, lr=1e-2, lora=lora), tmp_path)
    cfg = config(**({"peft": ADAPTERS} if lora else {}))
    folder = export_model(kind, cfg, model, tree, tmp_path / "model", {"run": "a run", "step": 2})
    auto = transformers.AutoModelForCausalLM
    if kind == "reward_model":
        auto = transformers.AutoModelForSequenceClassification
    with torch.no_grad():
        wanted = live(input_ids=IDS).logits
        merged = auto.from_pretrained(folder)
        assert torch.allclose(merged(input_ids=IDS).logits, wanted, atol=1e-5 if lora else 0)
        assert not torch.allclose(auto.from_pretrained(model)(input_ids=IDS).logits, wanted, atol=1e-3)
    assert (folder / "adapter").is_dir() == lora
    if lora:  # the adapters alone, on what the run began with
        base = auto.from_pretrained(model, **({"num_labels": 1} if kind == "reward_model" else {}))
        apart = peft.PeftModel.from_pretrained(base, folder / "adapter")
        with torch.no_grad():
            assert torch.allclose(apart(input_ids=IDS).logits, wanted, atol=1e-5)
    words = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    assert words("3 + 4 =")["input_ids"] == [6, 13, 7, 14]
    assert {p.suffix for p in folder.rglob("*") if p.is_file()} <= {".json", ".safetensors", ".md"}


def test_a_second_export_replaces_the_first_and_a_broken_one_leaves_it(model: str, tmp_path: Path) -> None:
    tree, _ = trained(Recipe(model=model, steps=2), tmp_path)
    folder = export_model("sft", config(), model, tree, tmp_path / "model", {"run": "first"})
    export_model("sft", config(), model, tree, tmp_path / "model", {"run": "second"})
    assert "# second" in (folder / "README.md").read_text()
    with pytest.raises(UserError, match="other parameters than this model"):
        export_model("sft", config(), model, {"model": {}}, tmp_path / "model", {"run": "third"})
    assert "# second" in (folder / "README.md").read_text()
    transformers.AutoModelForCausalLM.from_pretrained(folder)


def test_a_full_disk_is_told(model: str, tmp_path: Path, small_disk: Path) -> None:
    tree, _ = trained(Recipe(model=model, steps=1), tmp_path)
    (small_disk / "filler").write_bytes(b"0" * (1024 * 1024 - 64 * 1024))
    with pytest.raises(UserError, match="Cannot write the trained model"):
        export_model("sft", config(), model, tree, small_disk / "model", {})
    assert not (small_disk / "model").exists()


def test_the_card_says_what_it_is_and_loads_as_the_hub_reads_it(tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    text = card("reward_model", {"run": "rm-1", "task": "countdown", "step": 7})
    read = ModelCard(text)
    assert read.data.pipeline_tag == "text-classification"
    assert read.data.tags == ["seedbed", "reward_model"]
    assert "| task | countdown |" in read.text
    assert "# rm-1" in read.text
