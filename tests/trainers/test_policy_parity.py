"""The policy's learner against TRL's own trainer on the same completions and rewards: bit for bit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("trl", reason="needs the extra 'language'")

import datasets
import torch
import trl
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from trl.trainer import grpo_trainer

from rollouts.samples import Sample
from trainers.credit import group_advantages
from trainers.placement import WorkerContext
from trainers.policy import PolicyLearner, PolicySettings
from trainers.trl_arguments import trl_config

PAD, EOS, VOCABULARY = 0, 1, 24
PROMPTS, GROUP, MICRO = 2, 4, 4
LOSSES = ["dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"]


def tiny(path: Path) -> Path:
    """A Llama of 50k parameters and a tokenizer of single words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(VOCABULARY - 2))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(path)
    return path


def made_up(step: int) -> tuple[list[Sample], np.ndarray]:
    """Samples of different lengths, and their rewards (P, G), as a function of the step."""
    rng = np.random.default_rng(step)
    samples = []
    for group in range(PROMPTS):
        prompt = rng.integers(2, VOCABULARY, 3 + group).tolist()
        for index in range(GROUP):
            ids = [*rng.integers(2, VOCABULARY, rng.integers(2, 7)).tolist(), EOS]
            samples.append(
                Sample(
                    id=f"{step}-{group}-{index}",
                    group=group,
                    index=index,
                    prompt_ids=prompt,
                    completion_ids=ids,
                    finish="eos",
                    logp_rollout=np.full(len(ids), -3.0, np.float32),
                )
            )
    return samples, rng.normal(size=(PROMPTS, GROUP)).astype(np.float32)


class MadeUpFeed:
    """Gives the made-up rows, as `trainers.feed.Feed` would."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def start(self, attempt: int, state: Any) -> None:
        pass

    def publish(self, packed: Any, batch: int) -> None:
        pass

    def rows(self, number: int, rank: int, world: int) -> dict[str, Any]:
        samples, rewards = made_up(number)
        advantages = group_advantages(rewards, np.ones_like(rewards, bool)).reshape(-1)
        credit = [np.full(len(s.completion_ids), a, np.float32) for s, a in zip(samples, advantages)]
        items = sum(len(s.completion_ids) for s in samples)
        return {"samples": samples, "credit": credit, "items": items, "metrics": {}, "notices": []}


SEAMLESS = SimpleNamespace(observe=None, credit=None, likelihood=None, state_dict=dict)


class Silent:
    """A run that nobody reads."""

    def report(self, step: int, metrics: dict[str, Any]) -> None:
        pass

    def event(self, text: str) -> None:
        pass

    def checkpoint(self, step: int, tree: Any) -> None:
        pass

    def should_stop(self) -> None:
        return None


def arguments(folder: Path, iterations: int, **more: Any) -> Any:
    return trl_config(
        "policy",
        {},
        output_dir=str(folder),
        max_steps=3 * iterations,
        learning_rate=1e-2,
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=PROMPTS * GROUP // MICRO,
        steps_per_generation=PROMPTS * GROUP // MICRO,
        num_generations=GROUP,
        num_iterations=iterations,
        max_completion_length=8,
        save_steps=1000,
        **more,
    )


def recorded(base: type) -> Any:
    """A trainer that notes every loss, and the gradients that the optimizer sees."""

    class Recorded(base):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            self.losses.append(loss.detach().clone())
            return loss

        def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
            self.gradients.append({n: p.grad.clone() for n, p in self.model.named_parameters()})
            return super()._get_grad_norm(model, grad_norm=grad_norm)

    return Recorded


def ours(path: Path, folder: Path, iterations: int, **more: Any) -> Any:
    set_seed(0)
    learner = recorded(PolicyLearner)(
        model=LlamaForCausalLM.from_pretrained(path),
        args=arguments(folder, iterations, **more),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["-"]}),
        processing_class=tokenizer_of(path),
        feed=MadeUpFeed(),
        algorithm=SEAMLESS,
        settings=PolicySettings(iterations=iterations, exact=False),
        context=WorkerContext(client=Silent(), scratch=str(folder)),
    )
    learner.losses, learner.gradients = [], []
    learner.train()
    return learner


def theirs(path: Path, folder: Path, iterations: int, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Any:
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

    set_seed(0)
    trainer = Told(
        model=LlamaForCausalLM.from_pretrained(path),
        reward_funcs=[reward],
        args=arguments(folder, iterations, **more),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["w1 w2"] * 16}),
        processing_class=tokenizer_of(path),
    )
    trainer.losses, trainer.gradients = [], []
    trainer.train()
    return trainer


def tokenizer_of(path: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("iterations", "more"),
    [
        *((1, {"loss_type": loss}) for loss in LOSSES),
        (2, {}),
        (1, {"beta": 0.1}),
        (2, {"beta": 0.1, "loss_type": "grpo"}),
        (1, {"temperature": 0.7}),
    ],
    ids=str,
)
def test_loss_and_gradients_are_trl_s_bit_for_bit(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, iterations: int, more: dict[str, Any]
) -> None:
    their = theirs(model, tmp_path / "theirs", iterations, monkeypatch, **more)
    our = ours(model, tmp_path / "ours", iterations, **more)
    assert len(our.losses) == len(their.losses) == 3 * iterations * PROMPTS * GROUP // MICRO
    for a, b in zip(our.losses, their.losses, strict=True):
        assert torch.equal(a, b)
    for step, (a, b) in enumerate(zip(our.gradients, their.gradients, strict=True)):
        for name in a:
            assert torch.equal(a[name], b[name]), (step, name)
    assert any(float(g.abs().max()) > 1e-3 for g in our.gradients[0].values())
