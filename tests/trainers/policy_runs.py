"""A policy's learner on made-up samples, without pool and rewards: what its tests share."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from rollouts.samples import Sample
from rollouts.store import StoredWeights
from rollouts.weights import PackedWeights
from trainers.credit import group_advantages
from trainers.learner_mixin import Seams
from trainers.placement import WorkerContext
from trainers.policy import PolicyLearner, PolicySettings
from trainers.trl_arguments import trl_config

PAD, EOS, VOCABULARY = 0, 1, 24
PROMPTS, GROUP, MICRO = 2, 4, 4
ROWS = PROMPTS * GROUP


def make_model(path: Path) -> Path:
    """A Llama of 20 thousand parameters and a tokenizer of single words."""
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
                    logp_rollout=rng.normal(-3, 0.5, len(ids)).astype(np.float32),
                    prompt=" ".join(f"w{i - 2}" for i in prompt),
                )
            )
    return samples, rng.normal(size=(PROMPTS, GROUP)).astype(np.float32)


class MadeUpFeed:
    """Gives the made-up rows, as a Feed would. `failed`: rows of every batch whose reward failed."""

    def __init__(self, scale: str = "group", failed: tuple[int, ...] = ()) -> None:
        self.scale, self.failed, self.log = scale, failed, []

    def start(self, attempt: int, state: Any) -> None:
        self.log.append(("start", attempt))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def publish(self, weights: PackedWeights | StoredWeights, batch: int) -> None:
        packed = weights.fetch(10) if isinstance(weights, StoredWeights) else weights
        packed.verify()
        self.log.append(("publish", packed.version, batch))

    def samples(self, number: int, rank: int, world: int) -> list[Sample]:
        return made_up(number)[0]

    def observed(self, number: int, rank: int, world: int, streams: dict[str, Any]) -> None:
        self.log.append(("observed", number, streams))

    def rows(self, number: int, rank: int, world: int) -> dict[str, Any]:
        samples, rewards = made_up(number)
        valid = np.ones(ROWS, bool)
        for row in self.failed:
            valid[row] = False
            samples[row].mask = np.zeros(len(samples[row].completion_ids), np.float32)
        advantages = group_advantages(rewards, valid.reshape(rewards.shape), self.scale).reshape(-1)
        credit = [np.full(len(s.completion_ids), a, np.float32) for s, a in zip(samples, advantages)]
        items = sum(len(s.completion_ids) for s, ok in zip(samples, valid) if ok)
        return {"samples": samples, "credit": credit, "items": items, "metrics": {}, "notices": []}


def algorithm(**filled: Any) -> Any:
    """An algorithm with no seam filled but these."""
    kept = {"observe": None, "credit": None, "likelihood": None, "state_dict": dict}
    return SimpleNamespace(**{**kept, **filled})


class Client:
    """A run that keeps what it is told."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.events: list[str] = []

    def report(self, step: int, metrics: dict[str, Any]) -> None:
        self.rows.append((step, metrics))

    def event(self, text: str) -> None:
        self.events.append(text)

    def checkpoint(self, step: int, tree: Any) -> None:
        pass

    def should_stop(self) -> None:
        return None


def arguments(
    folder: Path, iterations: int = 1, micro: int = MICRO, user: dict[str, Any] | None = None, **more: Any
) -> Any:
    """TRL's config for three batches of made-up rows; `user`: what came as learner.trl."""
    return trl_config(
        "policy",
        user or {},
        **{
            "output_dir": str(folder),
            "max_steps": 3 * iterations,
            "learning_rate": 1e-2,
            "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": ROWS // micro,
            "steps_per_generation": ROWS // micro,
            "num_generations": GROUP,
            "num_iterations": iterations,
            "max_completion_length": 8,
            "save_steps": 1000,
            **more,
        },
    )


def recorded(base: type) -> Any:
    """A trainer that notes every loss, and the gradients that the optimizer sees."""

    class Recorded(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.losses: list[torch.Tensor] = []
            self.gradients: list[dict[str, torch.Tensor]] = []
            super().__init__(*args, **kwargs)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            self.losses.append(loss.detach().clone())
            return loss

        def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
            trained = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
            self.gradients.append({n: p.grad.clone() for n, p in trained})
            return super()._get_grad_norm(model, grad_norm=grad_norm)

    return Recorded


def parts(path: Path, lora: bool = False) -> dict[str, Any]:
    """What both trainers are made of."""
    import peft

    set_seed(0)
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return {
        "model": LlamaForCausalLM.from_pretrained(path),
        "processing_class": PreTrainedTokenizerFast.from_pretrained(path),
        "peft_config": adapters if lora else None,
    }


def learner(
    path: Path,
    folder: Path,
    args: Any = None,
    *,
    feed: Any = None,
    filled: dict[str, Any] | None = None,
    settings: PolicySettings | None = None,
    seams: Seams | None = None,
    lora: bool = False,
) -> Any:
    """Our learner on the made-up rows, not yet trained."""
    return recorded(PolicyLearner)(
        **parts(path, lora),
        args=args or arguments(folder),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["-"]}),
        feed=feed or MadeUpFeed(),
        algorithm=algorithm(**(filled or {})),
        settings=settings or PolicySettings(exact=False),
        context=WorkerContext(client=Client(), scratch=str(folder)),
        seams=seams,
    )
