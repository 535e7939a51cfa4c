"""Weights on tokens, against losses that are built from whole logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers

from envs.errors import UserError
from tests.trainers.tiny_language import Recipe, build, make_model, rows, train
from trainers.learner_mixin import Seams
from trainers.learners import LEARNERS
from trainers.metrics import read_metrics
from trainers.token_weight import weigh_tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp("model"), dropout=0.0)


def confidence(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The probability of the label: with it the loss is that of dynamic fine-tuning."""
    assert not logits.requires_grad
    return logits.softmax(-1).gather(1, labels[:, None])[:, 0]


def final(recipe: Recipe, folder: Path, **seams: Any) -> dict[str, torch.Tensor]:
    learner = build(recipe, LEARNERS[recipe.kind], recipe.arguments(str(folder)), seams=Seams(**seams))
    learner.args.save_strategy = "no"
    learner.train()
    return {name: p.detach().clone() for name, p in learner.model.named_parameters()}


def farthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("lora", [False, True])
def test_weights_of_dynamic_fine_tuning_are_trls_own_loss(lora: bool, model: str, tmp_path: Path) -> None:
    plain = final(Recipe(model=model, lora=lora), tmp_path)
    ours = final(Recipe(model=model, lora=lora), tmp_path, token_weight=confidence)
    theirs = final(Recipe(model=model, lora=lora, trl={"loss_type": "dft"}), tmp_path)
    assert farthest(ours, theirs) < 1e-5
    assert farthest(ours, plain) > 1e-4


def test_weights_of_one_change_nothing(model: str, tmp_path: Path) -> None:
    ones = final(Recipe(model=model), tmp_path, token_weight=lambda z, y: torch.ones(len(y)))
    assert farthest(ones, final(Recipe(model=model), tmp_path)) == 0


def test_the_weighted_loss_by_hand(model: str, tmp_path: Path) -> None:
    """sum of w * l over the targets, divided by their number, not by the sum of the weights."""
    table = rows("sft")
    data = datasets.Dataset.from_dict({name: column[:8] for name, column in table.items()})
    recipe = Recipe(model=model, steps=1, micro=8, data=data, seams={"token_weight": confidence})
    loss = read_metrics(train(recipe, tmp_path).path)[0]["loss"]
    net = transformers.LlamaForCausalLM.from_pretrained(model)
    words = transformers.PreTrainedTokenizerFast.from_pretrained(model)
    total = 0.0
    for prompt, answer in zip(*data.to_dict().values(), strict=True):
        ids = torch.tensor([words(prompt + answer)["input_ids"] + [words.eos_token_id]])
        with torch.no_grad():
            logps = net(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[-2:, 0]
        total -= float((logps.exp() * logps).sum())
    assert loss == pytest.approx(total / 16, abs=1e-6)


def test_chunks_of_any_size_are_the_same(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not behind Adam, which lifts rounding to the size of its rate where a gradient is tiny.
    recipe = Recipe(model=model, steps=2, lr=1.0, trl={"optim": "sgd"})
    whole = final(recipe, tmp_path, token_weight=confidence)
    start = dict(transformers.LlamaForCausalLM.from_pretrained(model).named_parameters())
    assert farthest(whole, start) > 1e-2
    monkeypatch.setattr("trainers.token_weight.CHUNK", 3)
    assert farthest(whole, final(recipe, tmp_path, token_weight=confidence)) < 1e-6


def test_weights_of_another_shape_are_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"token_weight returned \(1,\) for 8 tokens"):
        final(Recipe(model=model), tmp_path, token_weight=lambda logits, labels: torch.ones(1))


def test_learners_without_a_cross_entropy_refuse_them(model: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="DPOLearner has no cross-entropy"):
        final(Recipe("dpo", model), tmp_path, token_weight=confidence)


def test_models_whose_logits_are_scaled_refuse_them(model: str) -> None:
    net = transformers.LlamaForCausalLM.from_pretrained(model)
    net.config.final_logit_softcapping = 30.0
    with pytest.raises(UserError, match="final_logit_softcapping"):
        weigh_tokens(net, confidence)
