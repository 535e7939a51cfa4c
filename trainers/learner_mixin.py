"""The mixin that makes a TRL trainer one of ours: seams, reports, checkpoints, checks. Placed before it:

    class SFTLearner(SeamMixin, SFTTrainer): ...

Leaves the trainer's loss alone. State goes to `trainers.checkpoint` trees (safetensors and JSON) and comes
back from them at step boundaries, bit for bit; the trainer's own folders of torch files are never written
or read. Knows no algorithm and no placement.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from trl import SFTTrainer

from envs.errors import UserError
from trainers import learner_state
from trainers.checkpoint import Tree
from trainers.learner_checks import GRADIENT, ChangeWatch, explain_loss, first_bad
from trainers.placement import WorkerContext
from trainers.token_weight import weigh_tokens

Host: Any = object  # stands for the trainer that the mixin is placed before

SHOWN = 60  # characters of a row in a message
HOST_STATE = ("log_history", "is_local_process_zero", "is_world_process_zero")  # not part of a checkpoint


@dataclasses.dataclass(kw_only=True)
class Seams:
    """What an algorithm may put into a learner's step; left None, TRL's step is untouched.

    loss: (model, batch) -> mean over the batch's rows, in the place of the trainer's loss;
    token_weight: (logits (N, V), labels (N)) -> weights (N), see trainers.token_weight; SFT only;
    compose: (micro-batches of the step, learner) -> as many micro-batches, perhaps of other rows;
    aggregate: (gradients (n, d)) -> (d), before clipping. One row a micro-batch of every worker, scaled so
    that their mean is the step's plain gradient; n x d numbers are kept;
    after_step: (learner, step) -> metrics; state_dict, load_state_dict: what of the algorithm must survive a
    restart; stop_after: end the run after this many steps.
    """

    loss: Callable[[Any, dict[str, Any]], torch.Tensor] | None = None
    token_weight: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    compose: Callable[[list[Any], Any], list[Any]] | None = None
    aggregate: Callable[[torch.Tensor], torch.Tensor] | None = None
    after_step: Callable[[Any, int], dict[str, Any]] | None = None
    state_dict: Callable[[], Tree] | None = None
    load_state_dict: Callable[[Tree], None] | None = None
    stop_after: int | None = None


class SeamMixin(Host):
    """See the module. `context` says where the learner runs; without one it is a plain trainer."""

    def __init__(
        self, *args: Any, context: WorkerContext | None = None, seams: Seams | None = None, **kwargs: Any
    ) -> None:
        self.context, self.seams = context, seams or Seams()
        self._resume: Tree | None = None
        self._pending: dict[str, Any] = {}
        self._gradients: list[torch.Tensor] = []
        self._lr = self._grad_norm = 0.0
        super().__init__(*args, **kwargs)
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        self.add_callback(_StepHook(self))
        world = self.accelerator.num_processes
        if context is not None and world != context.world_size:
            raise RuntimeError(
                f"the trainer sees {world} processes where {context.world_size} were placed: "
                "each would train a model of its own"
            )
        if self.seams.aggregate is not None and self.is_deepspeed_enabled:
            raise UserError(
                "an algorithm that aggregates gradients needs them whole, and ZeRO keeps them in parts",
                fix="set learner.backend=ddp",
            )
        if self.seams.token_weight is not None:
            self._weigh_tokens(self.seams.token_weight)

    # --- for placement and subclasses

    def learn(self) -> None:
        """Train to the end of the plan, from the context's checkpoint if it has one."""
        if self.context is not None and self.context.resumed is not None:
            step, tree = self.context.resumed
            if step >= min(self.args.max_steps, self.seams.stop_after or self.args.max_steps):
                return
            self.load_state_tree(tree)
        self.train()

    def extra_state(self) -> Tree:
        """More that must survive a restart; called on every rank, rank 0's is kept."""
        return {} if self.seams.state_dict is None else self.seams.state_dict()

    def load_extra_state(self, state: Tree) -> None:
        """Undo of `extra_state`, before the first step; called on every rank."""
        if self.seams.load_state_dict is not None:
            self.seams.load_state_dict(state)

    def describe_row(self, inputs: dict[str, Any], row: int) -> str:
        """How an error message names a row of a micro-batch: its number, and its text where it has one."""
        ids = inputs.get("input_ids")
        text = "" if ids is None else self.processing_class.decode(ids[row], skip_special_tokens=True)
        return f"row {row}" + (f", {text[:SHOWN]!r}" if text else "")

    # --- state

    def state_tree(self) -> Tree:
        """Everything the next step depends on, at a step boundary. All ranks call it; rank 0's is whole."""
        return {
            "attempt": self.context.attempt if self.context else 0,
            "world_size": self.accelerator.num_processes,
            "model": learner_state.model_state(self._module()),
            "optimizer": self._optimizer_state(),
            "scheduler": learner_state.encode(self.lr_scheduler.state_dict()),
            "trainer": self._trainer_state(),
            "rng": self._gather(learner_state.rng_state()),
            "tokens": getattr(self, "_total_train_tokens", 0),
            "extra": self.extra_state(),
        }

    def load_state_tree(self, tree: Tree) -> None:
        """Let the next `train()` go on from `tree`. Raises UserError when it is of another world size."""
        if tree["world_size"] != self.accelerator.num_processes:
            raise UserError(
                "the checkpoint is of another number of learner processes",
                given=f"{self.accelerator.num_processes} now, {tree['world_size']} in the checkpoint",
                fix=f"resume with learner.num_workers={tree['world_size']}",
            )
        self._resume = tree

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> Any:
        """The trainer's loop. Resumes from the tree given to `load_state_tree`, never from a folder."""
        if resume_from_checkpoint:
            raise UserError(
                "a learner does not resume from a folder of torch files",
                given=resume_from_checkpoint,
                fix="continue the run with: python launch/train.py resume=<name>",
            )
        if self._resume is None:
            return super().train(None, trial, ignore_keys_for_eval)
        with tempfile.TemporaryDirectory(prefix="resume-") as folder:
            # All that the trainer itself reads; the tensors are put in place by `_prepare_for_training`.
            (Path(folder) / "trainer_state.json").write_text(json.dumps(self._resume["trainer"]))
            return super().train(folder, trial, ignore_keys_for_eval)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        pass  # `_prepare_for_training` does it

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> Any:
        tree = self._resume
        if tree is not None:  # before the optimizer takes the weights over
            learner_state.load_model_state(self._module(), tree["model"])
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        if tree is not None:
            self._load_optimizer_state(tree["optimizer"])
            self.lr_scheduler.load_state_dict(learner_state.decode(tree["scheduler"]))
            self._total_train_tokens = tree["tokens"]
            self.load_extra_state(tree["extra"])
        self._watch = ChangeWatch(p for p in self._module().parameters() if p.requires_grad)
        return prepared

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._resume is not None:
            learner_state.set_rng_state(self._resume["rng"][self.accelerator.process_index])
            self._resume = None  # from here on the state is the trainer's own

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._flush()
        tree = self.state_tree()
        if self.context is not None and self.is_world_process_zero():
            self.context.client.checkpoint(self.state.global_step, tree)

    def _trainer_state(self) -> dict[str, Any]:
        for callback in [*self.callback_handler.callbacks, self.control]:
            if callback.__class__.__name__ in self.state.stateful_callbacks:
                self.state.stateful_callbacks[callback.__class__.__name__] = callback.state()
        state = json.loads(json.dumps(dataclasses.asdict(self.state)))
        return {key: value for key, value in state.items() if key not in HOST_STATE}

    def _module(self) -> torch.nn.Module:
        return self.accelerator.unwrap_model(self.model)

    def _optimizer_state(self) -> Tree:
        if self.is_deepspeed_enabled:
            return {"shards": self._gather(learner_state.zero_state(self._torch_optimizer()))}
        return learner_state.optimizer_state(self._torch_optimizer(), self._names())

    def _load_optimizer_state(self, state: Tree) -> None:
        if ("shards" in state) != self.is_deepspeed_enabled:
            raise UserError(
                "the checkpoint is of another learner.backend",
                fix="resume with the backend that the run began with",
            )
        if self.is_deepspeed_enabled:
            part = state["shards"][self.accelerator.process_index]
            learner_state.load_zero_state(self._torch_optimizer(), part)
        else:
            learner_state.load_optimizer_state(self._torch_optimizer(), self._names(), state)

    def _names(self) -> dict[int, str]:
        return {id(p): name for name, p in self._module().named_parameters()}

    def _torch_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer inside Accelerate's wrapper; with DeepSpeed it is ZeRO's."""
        return getattr(self.optimizer, "optimizer", self.optimizer)  # type: ignore[return-value]

    def _gather(self, value: Any) -> list[Any]:
        """`value` of every rank, on rank 0; nothing elsewhere."""
        if self.accelerator.num_processes == 1:
            return [value]
        values: list[Any] = [None] * self.accelerator.num_processes
        first = self.accelerator.is_main_process
        dist.gather_object(value, values if first else None, dst=0)
        return values if first else []

    # --- the step

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """The step's micro-batches, after the `compose` seam, and the denominator counted over them."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.seams.compose is None:
            return batches, items
        composed = self.seams.compose(batches, self)
        if len(composed) != len(batches):
            raise ValueError(f"compose returned {len(composed)} micro-batches instead of {len(batches)}")
        return composed, self._get_num_items_in_batch(composed, device)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """TRL's step; with the `aggregate` seam each micro-batch's gradient is kept apart until the last."""
        if self.seams.aggregate is None:
            loss = super().training_step(model, inputs, num_items_in_batch)
        else:
            with self.accelerator.no_sync(model):
                loss = super().training_step(model, inputs, num_items_in_batch)
            self._keep_gradient(model, self.seams.aggregate)
        scaled = getattr(self.accelerator, "scaler", None) is not None  # then infinities are part of the plan
        if self.accelerator.sync_gradients and not self.is_deepspeed_enabled and not scaled:
            self._check_gradients()
        return loss

    def _keep_gradient(self, model: Any, aggregate: Any) -> None:
        trained = [p for p in self._module().parameters() if p.requires_grad]
        flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        self._gradients.append(torch.cat([g.reshape(-1) for g in flat]))
        model.zero_grad()
        if self.accelerator.sync_gradients:
            rows = torch.stack(self._gradients) * len(self._gradients)
            self._gradients = []
            whole = aggregate(self.accelerator.gather(rows))
            if whole.shape != rows.shape[1:]:
                raise ValueError(f"aggregate returned {tuple(whole.shape)} for gradients of {rows.shape[1]}")
            for p, part in zip(trained, whole.split([p.numel() for p in trained]), strict=True):
                p.grad = part.view_as(p).to(p.dtype)

    def _weigh_tokens(self, token_weight: Any) -> None:
        if not isinstance(self, SFTTrainer):
            raise UserError(f"{type(self).__name__} has no cross-entropy whose tokens could be weighed")
        weigh_tokens(self.model, token_weight)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """TRL's loss; a loss that is not finite raises UserError naming step, first bad tensor and row."""
        if self.seams.loss is not None:
            return self._own_loss(self.seams.loss, model, dict(inputs), num_items_in_batch)
        given = dict(inputs)
        out = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss = out[0] if return_outputs else out
        if not torch.isfinite(loss.detach()).all():
            again = super().compute_loss
            what, rows = explain_loss(
                self._module(), given, lambda: again(model, dict(given), False, num_items_in_batch)
            )
            where = ", ".join(self.describe_row(given, row) for row in rows[:3])
            self._fail("loss", loss.item(), what, where)
        return out

    def _own_loss(self, loss: Any, model: Any, inputs: dict[str, Any], items: Any) -> torch.Tensor:
        """The seam's; micro-batches have equal numbers of rows, so the step's is the mean of theirs."""
        value = loss(model, inputs)
        if not torch.isfinite(value.detach()):
            rng = learner_state.rng_state()
            what, rows = explain_loss(self._module(), inputs, lambda: loss(model, inputs))
            learner_state.set_rng_state(rng)
            self._fail("loss", value.item(), what, ", ".join(self.describe_row(inputs, r) for r in rows[:3]))
        scaled = self.loss_is_scaled_for_ga
        if scaled is None:  # then the trainer itself divides, unless the model was told of the whole step
            scaled = items is not None and self.model_accepts_loss_kwargs
        return value / self.current_gradient_accumulation_steps if scaled else value

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self._grad_norm = float(norm)
        return norm

    def _check_gradients(self) -> None:
        """Before clipping, which would spread one NaN over all gradients."""
        named = [(n, p.grad) for n, p in self._module().named_parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([gradient for _, gradient in named])
        if not torch.isfinite(norm):
            bad = first_bad(named)
            self._fail("grad_norm", norm.item(), f"the gradient of {bad[0]}" if bad else "their norm", "")

    def _fail(self, metric: str, value: float, what: str, where: str) -> None:
        rank = f" of rank {self.accelerator.process_index}" if self.accelerator.num_processes > 1 else ""
        raise UserError(
            f"{metric} became {value} at step {self.state.global_step + 1}",
            given=f"bad first: {what}" + (f" ({where} of the micro-batch{rank})" if where else ""),
            fix="look at that sample and at the metrics before that step; a lower learner.lr usually helps",
        )

    def _before_update(self) -> None:
        self._lr = max(float(group["lr"]) for group in self._torch_optimizer().param_groups)

    def _after_update(self) -> None:
        """Checks of the step that was just taken; agrees with the other ranks whether to stop."""
        changed, share = self._watch.step()
        context = self.context
        asked = context is not None and context.rank == 0 and context.client.should_stop() is not None
        changed, stop = self._any(changed, asked)
        if self._watch.is_error(changed, self._lr > 0 and self._grad_norm > GRADIENT):
            raise UserError(
                f"step {self.state.global_step} changed no byte of the model",
                given=f"learning rate {self._lr:g}, gradient norm {self._grad_norm:g}",
                fix="raise learner.lr, or keep the weights in float32 (model.dtype=float32)",
            )
        if share is not None:
            self._pending["changed_share"] = share
        if self.seams.after_step is not None:
            self._pending.update(self.seams.after_step(self, self.state.global_step))
        if stop or self.seams.stop_after == self.state.global_step:
            self.control.should_save = self.control.should_training_stop = True

    def _any(self, *flags: bool) -> list[bool]:
        """For each flag whether it is up on any rank."""
        if self.accelerator.num_processes == 1:
            return list(flags)
        votes = torch.tensor(flags, dtype=torch.int32, device=self.accelerator.device)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        return [bool(vote) for vote in votes]

    # --- reports

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self._flush()

    def _flush(self) -> None:
        """Report the step's metrics once, after what an evaluation may have added."""
        metrics, self._pending = self._pending, {}
        if metrics and self.context is not None and self.is_world_process_zero():
            self.context.client.report(self.state.global_step, metrics)

    def _send_telemetry(self) -> None:
        pass  # nothing leaves the machine


class _StepHook(TrainerCallback):
    """The moments of the trainer's loop that have no method to override."""

    def __init__(self, learner: Any) -> None:
        self.learner = learner

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.learner._before_update()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.learner._after_update()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        numbers = {k: v for k, v in (logs or {}).items() if v is None or isinstance(v, int | float)}
        self.learner._pending.update(numbers)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.learner._pending.clear()  # the trainer's closing summary: the run has its own
