"""The policy's learner: TRL's GRPO trainer on rows that come from the Feed. TRL's loss is left alone.

A ticket of the trainer's data loader stands for "my rows of this step". What the trainer would have
computed while it generated (old and reference log-probabilities, padding, the denominator) is put together
here from the Feed's samples. Loading this module loads TRL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import trl
from torch.utils.data import DataLoader
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from envs.errors import UserError
from rollouts.weights import pack
from trainers.credit import off_policy_weight
from trainers.learner_mixin import SeamMixin

RATIO_TOLERANCE = 1e-3  # |log pi_learner - log pi_rollout| of fresh float32 weights on one kind of engine


@dataclass(kw_only=True)
class PolicySettings:
    """What the learner needs beside TRL's arguments.

    iterations: optimizer steps on one batch of the Feed; correct: whether the rollout's probabilities may
    differ from the learner's at the start of a batch (staleness, another engine), so that log-probabilities
    of the learner are taken first and the truncated weight, at most `weight_cap`, goes into the credit;
    exact: whether they must agree within RATIO_TOLERANCE when the policy is fresh.
    """

    iterations: int = 1
    correct: bool = False
    weight_cap: float = 2.0
    exact: bool = True
    max_steps: int = 0


class PolicyLearner(SeamMixin, trl.GRPOTrainer):
    """See the module. `feed` has the methods of `trainers.feed.Feed`, `algorithm` the seams."""

    def __init__(
        self, *args: Any, feed: Any, algorithm: Any, settings: PolicySettings, **kwargs: Any
    ) -> None:
        self.feed, self.algorithm, self.policy = feed, algorithm, settings
        self._micro: list[dict[str, Any]] = []
        self._current: dict[str, Any] = {}
        self._old: torch.Tensor | None = None  # of the batch in hand, when later steps need it
        self._published = False
        self._mismatch: list[float] = []
        super().__init__(*args, reward_funcs=[_never_called], **kwargs)

    # --- rows in

    def get_train_dataloader(self) -> Any:
        """Tickets: which rows a step has is the Feed's affair, so there is nothing to skip on resume."""
        tickets = range(self.args.max_steps * self.args.gradient_accumulation_steps)
        return DataLoader(tickets, batch_size=1, collate_fn=_ticket)  # type: ignore[arg-type]

    def _prepare_inputs(self, ticket: Any) -> dict[str, Any]:
        at = self._step % self.args.gradient_accumulation_steps
        if at == 0:
            self._take(self.state.global_step)
        self._current = self._micro[at]
        return self._current

    def _take(self, step: int) -> None:
        number, rank, world = step // self.policy.iterations, *self._place()
        first, device = step % self.policy.iterations == 0, self.accelerator.device
        if not self._published:
            self._publish(step)
        if first and self.algorithm.observe is not None:
            self._observe(number, rank, world)
        rows = self.feed.rows(number, rank, world)
        self._samples = rows["samples"]
        inputs = padded(self._samples, rows["credit"], self._tokenizer.pad_token_id, device)
        self._add_log_probs(inputs, first)
        size = self.args.per_device_train_batch_size
        total = torch.tensor(float(rows["items"]), device=device)
        self._micro = [
            {**{name: value[i : i + size] for name, value in inputs.items()}, "num_items_in_batch": total}
            for i in range(0, len(self._samples), size)
        ]
        if first:
            for text in rows["notices"] if rank == 0 else ():
                self.context.client.event(text)
            self._pending.update(rows["metrics"])
        ages = [step - sample.version[1] for sample in self._samples]
        self._pending["policy_age"] = float(np.mean(ages))

    def _place(self) -> tuple[int, int]:
        return self.accelerator.process_index, self.accelerator.num_processes

    def describe_row(self, inputs: dict[str, Any], row: int) -> str:
        """The sample's id and the beginning of its text."""
        size = self.args.per_device_train_batch_size
        at = next((i for i, micro in enumerate(self._micro) if micro is self._current), 0)
        sample = self._samples[at * size + row]
        return f"sample {sample.id}, prompt {sample.prompt[:60]!r}"

    def _observe(self, number: int, rank: int, world: int) -> None:
        samples = self.feed.samples(number, rank, world)
        model = self.accelerator.unwrap_model(self.model)
        was_training = model.training
        model.eval()
        with torch.no_grad():
            streams = self.algorithm.observe(model, samples)
        model.train(was_training)
        self.feed.observed(number, rank, world, streams)

    # --- log-probabilities

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """TRL's, or those of the `likelihood` seam; notes how far the engine's are from the learner's."""
        if self.algorithm.likelihood is None:
            out = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        else:
            log_probs, entropies = self.algorithm.likelihood.log_probs(model, self._current)
            out = log_probs, entropies, None
        if self.policy.correct is False and model.training and torch.is_grad_enabled():
            self._note_mismatch(out[0].detach(), self._current)
        return out

    def _add_log_probs(self, inputs: dict[str, Any], first: bool) -> None:
        """Old log-probabilities where they differ from the current ones; the reference's with a KL term."""
        device = self.accelerator.device
        if not first:
            assert self._old is not None
            inputs["old_per_token_logps"] = self._old.to(device)
        elif self.policy.correct or self.policy.iterations > 1:
            old = self._score(self.model, inputs)
            inputs["old_per_token_logps"] = old
            self._old = old if self.policy.iterations > 1 else None
        if self.policy.correct:
            old = inputs["old_per_token_logps"]
            if first:
                self._note_mismatch(old, inputs)
            weight = off_policy_weight(
                old.double().cpu().numpy(),
                inputs["logp_rollout"].double().cpu().numpy(),
                self.policy.weight_cap,
            )
            weights = torch.from_numpy(weight).to(device, torch.float32)
            inputs["advantages"] = inputs["advantages"] * weights
            mask = inputs["completion_mask"].bool()
            self._pending["off_policy_weight"] = float(weights[mask].mean())
        if self.beta != 0.0:
            inputs["ref_per_token_logps"] = self._reference(inputs)

    def _reference(self, inputs: dict[str, Any]) -> torch.Tensor:
        if self.ref_model is not None:
            return self._score(self.ref_model, inputs)
        model = self.accelerator.unwrap_model(self.model)
        with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
            return self._score(self.model, inputs)

    def _score(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """Log-probabilities (B, T) of the completions, in micro-batches, without a gradient."""
        size, found = self.args.per_device_train_batch_size, []
        with (
            torch.no_grad(),
            disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs),
        ):
            for i in range(0, len(inputs["prompt_ids"]), size):
                part = {name: value[i : i + size] for name, value in inputs.items()}
                self._current = part
                ids = torch.cat([part["prompt_ids"], part["completion_ids"]], 1)
                mask = torch.cat([part["prompt_mask"], part["completion_mask"]], 1)
                length = part["completion_ids"].shape[1]
                found.append(self._get_per_token_logps_and_entropies(model, ids, mask, length)[0])
        return torch.cat(found)

    def _note_mismatch(self, log_probs: torch.Tensor, inputs: dict[str, Any]) -> None:
        """Engine mismatch: mean |log pi_learner - log pi_rollout| over learnable tokens."""
        mask = _loss_mask(inputs).bool()
        difference = (log_probs - inputs["logp_rollout"]).abs()[mask]
        if not len(difference):
            return
        self._pending["engine_mismatch"] = float(difference.mean())
        fresh = not self.policy.correct and self.policy.iterations == 1
        worst = float(difference.max())
        if self.policy.exact and fresh and worst > RATIO_TOLERANCE:
            raise UserError(
                "the learner and the engine disagree about samples of the newest weights",
                given=f"step {self.state.global_step + 1}: log-probabilities differ by up to {worst:.2g}",
                allowed=f"{RATIO_TOLERANCE:g}: both hold the same float32 weights",
                fix="dropout or another attention kernel in the learner? Otherwise report it as a defect",
            )

    # --- weights out

    def _after_update(self) -> None:
        super()._after_update()
        step = self.state.global_step
        if step % self.policy.iterations == 0 and step < self.args.max_steps:
            self._publish(step)

    def _publish(self, step: int) -> None:
        self._published = True
        named, kind, meta = self._publication()
        if self.accelerator.is_main_process:
            attempt = self.context.attempt if self.context is not None else 0
            self.feed.publish(pack(named, (attempt, step), kind, meta), step // self.policy.iterations)

    def _publication(self) -> tuple[dict[str, torch.Tensor], str, dict[str, Any]]:
        """Named tensors for the engines: everything, or with adapters only those (kind "lora")."""
        module = self.accelerator.unwrap_model(self.model)
        if not hasattr(module, "peft_config"):
            return _unique(module.state_dict()), "full", {}
        return lora_publication(module)

    # --- restarts

    def extra_state(self) -> dict[str, Any]:
        """The Feed with its buffer, the algorithm's state, old log-probabilities inside a batch."""
        old = None
        if self.policy.iterations > 1:
            parts = self._gather(None if self._old is None else self._old.cpu())
            old = {str(i): part for i, part in enumerate(parts)}
        first = self.accelerator.is_main_process
        return {
            "feed": self.feed.state_dict() if first else {},
            "algorithm": self.algorithm.state_dict() if first else {},
            "old": old,
        }

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Undo of `extra_state`."""
        if self.accelerator.is_main_process:
            self.feed.load_state_dict(state["feed"])
        self.algorithm.load_state_dict(state["algorithm"])
        if state["old"] is not None:
            mine = state["old"][str(self.accelerator.process_index)]
            self._old = None if mine is None else torch.as_tensor(mine)


def padded(
    samples: list[Any], credit: list[np.ndarray], pad_id: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Samples as the tensors that TRL's loss takes: prompts padded left, completions right.

    prompt_ids, prompt_mask (B, P); completion_ids, completion_mask (B, T); advantages (B, T); logp_rollout
    (B, T); tool_mask (B, T) if a token must not be learned from (TRL's name for that); every per-token
    stream by its own name, (B, T, ...).
    """
    count = len(samples)
    before = max(len(s.prompt_ids) for s in samples)
    after = max(len(s.completion_ids) for s in samples)
    out = {
        "prompt_ids": torch.full((count, before), pad_id),
        "prompt_mask": torch.zeros(count, before, dtype=torch.long),
        "completion_ids": torch.full((count, after), pad_id),
        "completion_mask": torch.zeros(count, after, dtype=torch.long),
        "advantages": torch.zeros(count, after),
        "logp_rollout": torch.zeros(count, after),
    }
    if any(s.mask is not None and not np.all(s.mask) for s in samples):
        out["tool_mask"] = torch.zeros(count, after, dtype=torch.long)
    for name in samples[0].streams:
        shape, dtype = samples[0].streams[name].shape[1:], torch.from_numpy(samples[0].streams[name]).dtype
        out[name] = torch.zeros(count, after, *shape, dtype=dtype)
    for i, sample in enumerate(samples):
        p, t = len(sample.prompt_ids), len(sample.completion_ids)
        out["prompt_ids"][i, before - p :] = torch.tensor(sample.prompt_ids)
        out["prompt_mask"][i, before - p :] = 1
        out["completion_ids"][i, :t] = torch.tensor(sample.completion_ids)
        out["completion_mask"][i, :t] = 1
        out["advantages"][i, :t] = torch.from_numpy(np.array(credit[i], np.float32))
        out["logp_rollout"][i, :t] = torch.from_numpy(np.array(sample.logp_rollout, np.float32))
        if "tool_mask" in out:
            mask = np.ones(t) if sample.mask is None else np.array(sample.mask)
            out["tool_mask"][i, :t] = torch.from_numpy(mask).long()
        for name, values in sample.streams.items():
            out[name][i, :t] = torch.from_numpy(np.array(values))
    return {name: value.to(device) for name, value in out.items()}


def _loss_mask(inputs: dict[str, Any]) -> torch.Tensor:
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def _unique(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict without the second names of tied tensors."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    found = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        found[name] = tensor
    return found


def lora_publication(module: Any) -> tuple[dict[str, torch.Tensor], str, dict[str, Any]]:
    """A PEFT model's adapters as `rollouts.weights.lora_delta` takes them, by the base model's names."""
    named, scaling = {}, {}
    for name, layer in module.named_modules():
        if hasattr(layer, "lora_A") and "default" in getattr(layer, "lora_A", {}):
            base = name.removeprefix("base_model.model.")
            named[f"{base}.lora_A"] = layer.lora_A["default"].weight
            named[f"{base}.lora_B"] = layer.lora_B["default"].weight
            scaling[base] = float(layer.scaling["default"])
    return named, "lora", {"scaling": scaling}


def _ticket(numbers: list[int]) -> dict[str, torch.Tensor]:
    return {"ticket": torch.tensor(numbers)}


def _never_called(**columns: Any) -> list[float]:
    raise RuntimeError("rewards come from the Feed")
