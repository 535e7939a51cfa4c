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
from rollouts.store import send
from trainers.credit import off_policy_weight
from trainers.learner_mixin import SeamMixin
from trainers.learner_state import load_model_state, model_state

KL_LIMIT = 20.0  # of log pi_ref - log pi, whose exponential TRL's KL estimate holds
RATIO_TOLERANCE = 1e-3  # |log pi_learner - log pi_rollout| of fresh float32 weights on one kind of engine


@dataclass(kw_only=True)
class PolicySettings:
    """What the learner needs beside TRL's arguments.

    iterations: optimizer steps on one batch of the Feed; correct: whether the rollout's probabilities may
    differ from the learner's at the start of a batch (staleness, another engine), so that log-probabilities
    of the learner are taken first and the truncated weight, at most `weight_cap`, goes into the credit;
    exact: whether they must agree within RATIO_TOLERANCE about samples of the newest weights.
    """

    iterations: int = 1
    correct: bool = False
    weight_cap: float = 2.0
    exact: bool = True


def scores_as_drawn(likelihood: Any) -> bool:
    """Whether log-probabilities of this seam (None: TRL's own) are those that samples were drawn with."""
    return likelihood is None or getattr(likelihood, "exact", False)


class PolicyLearner(SeamMixin, trl.GRPOTrainer):
    """See the module. `feed` has the methods of `trainers.feed.Feed`, `algorithm` the seams."""

    def __init__(
        self, *args: Any, feed: Any, algorithm: Any, settings: PolicySettings, **kwargs: Any
    ) -> None:
        self.feed, self.algorithm, self.policy = feed, algorithm, settings
        self._micro: list[dict[str, Any]] = []
        self._current: dict[str, Any] = {}
        self._old: torch.Tensor | None = None  # of the batch in hand, when later steps need it
        self._started = False
        self._feed_state: dict[str, Any] | None = None
        self._gaps: dict[str, tuple[float, int]] = {}  # of this step: metric -> (sum, count)
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
        if not self._started:
            self._start(step)
        if first and self.algorithm.observe is not None:
            self._observe(number, rank, world)
        rows = self.feed.rows(number, rank, world)
        self._samples, self._gaps = rows["samples"], {}
        inputs = padded(self._samples, rows["credit"], self._tokenizer.pad_token_id, device)
        inputs["policy_age"] = torch.tensor([step - s.version[1] for s in self._samples], device=device)
        self._add_log_probs(inputs, first)
        size = self.args.per_device_train_batch_size
        total = torch.tensor(float(rows["items"]), device=device)
        self._micro = [
            {**{name: value[i : i + size] for name, value in inputs.items()}, "num_items_in_batch": total}
            for i in range(0, len(self._samples), size)
        ]
        if self.seams.compose is not None:
            self._compose(self.seams.compose)
        if first:
            if self.context is not None and rank == 0:
                for text in rows["notices"]:
                    self.context.client.event(text)
            self._pending.update(rows["metrics"])
        self._pending["policy_age"] = float(inputs["policy_age"].float().mean())

    def _compose(self, compose: Any) -> None:
        """Let the algorithm choose the rows of a step; the denominator is counted again."""
        composed = compose(self._micro, self)
        if len(composed) != len(self._micro):
            raise ValueError(f"compose returned {len(composed)} micro-batches instead of {len(self._micro)}")
        mine = sum(_loss_mask(micro).sum() for micro in composed)
        total = self.accelerator.reduce(torch.as_tensor(mine, dtype=torch.float32), "sum")
        self._micro = [{**micro, "num_items_in_batch": total} for micro in composed]

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Tickets: the `compose` seam is for the rows that they stand for."""
        return super(SeamMixin, self).get_batch_samples(epoch_iterator, num_batches, device)

    def _place(self) -> tuple[int, int]:
        return self.accelerator.process_index, self.accelerator.num_processes

    def describe_row(self, inputs: dict[str, Any], row: int) -> str:
        """The sample's id and the beginning of its text."""
        if self.seams.compose is not None:
            return f"row {row}"
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
        self.accelerator.wait_for_everyone()  # the last rank's samples complete the batch

    # --- log-probabilities

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """TRL's, or those of the `likelihood` seam; notes how far the rollout's are from them."""
        if self.algorithm.likelihood is None:
            out = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        else:
            log_probs, entropies = self.algorithm.likelihood.log_probs(model, self._current)
            out = log_probs, entropies, None
        if torch.is_grad_enabled():
            if not self.policy.correct:
                self._note_gap(out[0].detach(), self._current)
            if "ref_per_token_logps" in self._current:
                self._drop_far_reference(out[0], self._current)
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
                self._note_gap(old, inputs)
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

    def _drop_far_reference(self, log_probs: torch.Tensor, inputs: dict[str, Any]) -> None:
        """Tokens with log pi_ref - log pi > KL_LIMIT get no KL term; counted as "kl_dropped".

        A clamp would not do: e^20 and -e^20 meet in the sum of the gradient, and the rest of it is lost to
        float32. On the other side nothing overflows, and the term is left as it is.
        """
        beyond = (inputs["ref_per_token_logps"] - log_probs.detach() > KL_LIMIT) & _loss_mask(inputs).bool()
        self._pending["kl_dropped"] = self._pending.get("kl_dropped", 0.0) + float(beyond.sum())
        held = torch.where(beyond, log_probs.detach(), inputs["ref_per_token_logps"])
        inputs["ref_per_token_logps"] = held

    def _score(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """Log-probabilities (B, T) of the completions, in micro-batches, without a gradient."""
        size, found = self.args.per_device_train_batch_size, []
        module: Any = self._module()
        checkpointing: Any = self.args.gradient_checkpointing_kwargs
        with torch.no_grad(), disable_gradient_checkpointing(module, checkpointing):
            for i in range(0, len(inputs["prompt_ids"]), size):
                part = {name: value[i : i + size] for name, value in inputs.items()}
                self._current = part
                ids = torch.cat([part["prompt_ids"], part["completion_ids"]], 1)
                mask = torch.cat([part["prompt_mask"], part["completion_mask"]], 1)
                length = part["completion_ids"].shape[1]
                found.append(self._get_per_token_logps_and_entropies(model, ids, mask, length)[0])
        return torch.cat(found)

    def _note_gap(self, log_probs: torch.Tensor, inputs: dict[str, Any]) -> None:
        """Mean |log pi_learner - log pi_rollout| over learnable tokens of the step so far.

        "engine_mismatch" on samples of the newest weights, where only the arithmetic can differ
        ("likelihood_gap" where the algorithm's likelihood is not the sampler's); "off_policy_gap" on older
        ones. Raises UserError for a mismatch that exact engines cannot have.
        """
        mask = _loss_mask(inputs).bool()
        fresh = (inputs["policy_age"] == 0)[:, None] & mask
        gap = (log_probs - inputs["logp_rollout"]).abs()
        newest = "engine_mismatch" if scores_as_drawn(self.algorithm.likelihood) else "likelihood_gap"
        for name, chosen in ((newest, fresh), ("off_policy_gap", mask & ~fresh)):
            if chosen.any():
                total, count = self._gaps.get(name, (0.0, 0))
                total, count = total + float(gap[chosen].sum()), count + int(chosen.sum())
                self._gaps[name] = total, count
                self._pending[name] = total / count
        worst = float(gap[fresh].max()) if fresh.any() else 0.0
        if self.policy.exact and worst > RATIO_TOLERANCE:
            raise UserError(
                "the learner and the engine disagree about samples of the newest weights",
                given=f"step {self.state.global_step + 1}: log-probabilities differ by up to {worst:.2g}",
                allowed=f"{RATIO_TOLERANCE:g}: both hold the same float32 weights",
                fix="if the model has dropout, set learner.trl.disable_dropout=true",
            )

    # --- weights out

    def _after_update(self) -> None:
        super()._after_update()
        step = self.state.global_step
        if step % self.policy.iterations == 0 and step < self.args.max_steps:
            self._publish(step)

    def _start(self, step: int) -> None:
        """Tell the Feed of this attempt and where it goes on; inside a batch it has been drawn already."""
        self._started = True
        if self.accelerator.is_main_process:
            self.feed.start(self._attempt(), self._feed_state)
        self._publish(step)

    def _attempt(self) -> int:
        return self.context.attempt if self.context is not None else 0

    def _publish(self, step: int) -> None:
        named, kind, meta = self._publication()
        if self.accelerator.is_main_process:
            weights = send(named, (self._attempt(), step), kind, meta)
            self.feed.publish(weights, step // self.policy.iterations)
        self.accelerator.wait_for_everyone()  # no rank asks for a batch that the Feed has not heard of

    def _publication(self) -> tuple[dict[str, torch.Tensor], str, dict[str, Any]]:
        """Named tensors for the engines: everything, or with adapters only those (kind "lora")."""
        module = self.accelerator.unwrap_model(self.model)
        if not hasattr(module, "peft_config"):
            return _unique(module.state_dict()), "full", {}
        return lora_publication(module)

    # --- restarts

    def extra_state(self) -> dict[str, Any]:
        """The Feed with its buffer, the algorithm's state, old log-probabilities inside a batch, and the
        reference where it moves."""
        old = None
        if self.policy.iterations > 1:
            parts = self._gather(None if self._old is None else self._old.cpu())
            old = {str(i): part for i, part in enumerate(parts)}
        first, reference = self.accelerator.is_main_process, self._moving_reference()
        return {
            "feed": self.feed.state_dict() if first else {},
            "algorithm": self.algorithm.state_dict() if first else {},
            "old": old,
            "entropy": np.array([self.entropy_coef, self._last_world_entropy]),
            "reference": {} if reference is None else model_state(reference),
        }

    def _moving_reference(self) -> Any:
        """The reference model where it follows the policy (TRL's sync_ref_model), else None."""
        moves = self.args.sync_ref_model  # type: ignore[attr-defined]
        return self.accelerator.unwrap_model(self.ref_model) if moves else None

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Undo of `extra_state`."""
        self._feed_state = state["feed"]
        self.algorithm.load_state_dict(state["algorithm"])
        self.entropy_coef, self._last_world_entropy = (float(x) for x in state["entropy"])
        if state["old"] is not None:
            mine = state["old"][str(self.accelerator.process_index)]
            self._old = None if mine is None else torch.as_tensor(mine)
        reference = self._moving_reference()
        if reference is not None:
            load_model_state(reference, state["reference"])


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
