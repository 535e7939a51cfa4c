"""The policy's learner against TRL's own trainer on the same completions and rewards: bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs the extra 'language'")

import datasets
import torch
import trl
from trl.trainer import grpo_trainer

from tests.trainers import policy_runs
from tests.trainers.policy_runs import MICRO, ROWS, MadeUpFeed, arguments, made_up, parts, recorded
from trainers.policy import PolicySettings

LOSSES = ["dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"]


def theirs(path: Path, args: Any, lora: bool, monkeypatch: pytest.MonkeyPatch) -> Any:
    """TRL's trainer with its generation replaced by the made-up completions, and no shuffling."""
    monkeypatch.setattr(grpo_trainer, "shuffle_sequence_dict", lambda rows: rows)
    calls = {"step": 0}

    class Told(recorded(trl.GRPOTrainer)):  # type: ignore[misc]
        def _generate(self, prompts: list[Any]) -> Any:
            samples, _ = made_up(calls["step"])
            ids = [s.completion_ids for s in samples]
            completions = [" ".join(map(str, i)) for i in ids]
            return [s.prompt_ids for s in samples], ids, None, completions, None, {}, None, None

    def reward(**columns: Any) -> list[float]:
        rewards = made_up(calls["step"])[1]
        calls["step"] += 1
        return rewards.reshape(-1).tolist()

    rows = datasets.Dataset.from_dict({"prompt": ["w1 w2"] * 16})
    trainer = Told(**parts(path, lora), reward_funcs=[reward], args=args, train_dataset=rows)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return policy_runs.make_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("iterations", "more"),
    [
        *((1, {"loss_type": loss}) for loss in LOSSES),
        *((2, {"loss_type": loss, "beta": 0.1}) for loss in LOSSES),
        (2, {}),
        (1, {"beta": 0.1}),
        (1, {"temperature": 0.7}),
        (1, {"scale_rewards": "batch"}),
        (1, {"scale_rewards": "none"}),
        (2, {"epsilon_high": 0.05, "delta": 1.02, "use_bias_correction_kl": True, "beta": 0.1}),
        (2, {"off_policy_mask_threshold": 0.01}),
        (1, {"top_entropy_quantile": 0.5}),
        (2, {"entropy_coef": 0.01, "use_adaptive_entropy": True, "entropy_target": 5.0}),
        (2, {"beta": 0.1, "lora": True}),
        (2, {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2}),
    ],
    ids=str,
)
def test_loss_and_gradients_are_trl_s_bit_for_bit(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, iterations: int, more: dict[str, Any]
) -> None:
    more = dict(more)
    lora = more.pop("lora", False)
    their = theirs(model, arguments(tmp_path / "theirs", iterations, **more), lora, monkeypatch)
    our = policy_runs.learner(
        model,
        tmp_path / "ours",
        arguments(tmp_path / "ours", iterations, **more),
        feed=MadeUpFeed(more.get("scale_rewards", "group")),
        settings=PolicySettings(iterations=iterations, exact=False),
        lora=lora,
    )
    our.train()
    assert len(our.losses) == len(their.losses) == 3 * iterations * ROWS // MICRO
    for a, b in zip(our.losses, their.losses, strict=True):
        assert torch.equal(a, b)
    for step, (a, b) in enumerate(zip(our.gradients, their.gradients, strict=True)):
        for name in a:
            assert torch.equal(a[name], b[name]), (step, name)
    assert any(float(g.abs().max()) > 1e-3 for g in our.gradients[0].values())


def test_with_a_ratio_per_sequence_only_the_order_of_a_sum_differs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credit is one number a token here and one a sample there, and the ratio's gradient sums over it."""
    more = {"importance_sampling_level": "sequence"}
    their = theirs(model, arguments(tmp_path / "theirs", 2, **more), False, monkeypatch)
    our = policy_runs.learner(
        model,
        tmp_path / "ours",
        arguments(tmp_path / "ours", 2, **more),
        settings=PolicySettings(iterations=2, exact=False),
    )
    our.train()
    for a, b in zip(our.losses, their.losses, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    for a, b in zip(our.gradients, their.gradients, strict=True):
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6)
