"""Supervised fine-tuning and pre-training of masked language models, in place of next-token prediction.

`objective=masked`: the loss of MDLM and LLaDA. `objective=any_order`: the fine-tuning that makes a model obey
the any-order rules (d2, arXiv 2509.21474; the authors train only query, key and value projections, here
`model.peft.target_modules=[q_proj,k_proj,v_proj]`). Losses: `trainers.masked_training`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from envs.errors import UserError
from trainers.language import LanguageAlgorithm
from trainers.trl_arguments import check_loss_settings

OBJECTIVES = ("masked", "any_order")


@dataclass(kw_only=True)
class MaskedDiffusionSFTConfig:
    """Completions have rollout.max_new_tokens tokens; shorter ones are filled up with end tokens."""

    name: str = "masked_diffusion_sft"
    objective: str = "masked"  # masked | any_order
    block_length: int | None = None  # of any_order: orders are random within blocks; None: one block


class MaskedDiffusionSFT(LanguageAlgorithm):
    """On demonstrations; rows without a prompt (a dataset's `text`) are completions from end to end."""

    kind = "sft"
    Config = MaskedDiffusionSFTConfig
    headline = (("accuracy", "masked_accuracy"),)

    @classmethod
    def check(cls, cfg: Any) -> None:
        check_loss_settings(cls.kind, cfg.learner)
        if cfg.algo.objective not in OBJECTIVES:
            raise UserError("unknown algo.objective", given=cfg.algo.objective, allowed=OBJECTIVES)
        length, block = cfg.rollout.max_new_tokens, cfg.algo.block_length
        if block is not None and not (1 <= block <= length and length % block == 0):
            raise UserError(
                "algo.block_length must divide rollout.max_new_tokens",
                given=f"algo.block_length={block} rollout.max_new_tokens={length}",
            )

    def prepare(self, cfg: Any, tokenizer: Any) -> None:
        """What `loss` needs of the run."""
        self.length = cfg.rollout.max_new_tokens
        self.tokens = {"pad": tokenizer.pad_token_id, "end": tokenizer.eos_token_id}
        self._right: list[torch.Tensor] = []

    def loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """See `LanguageAlgorithm.loss`; input_ids and labels (B, T) of TRL's collator."""
        from rollouts.masked_model import mask_token
        from trainers.masked_training import any_order_loss, masked_loss, rows_of_labels

        rows = rows_of_labels(inputs["input_ids"], inputs["labels"], self.length, **self.tokens)
        mask_id = mask_token(model)
        if self.config.objective == "masked":
            loss, right = masked_loss(model, rows, mask_id)
        else:
            loss, right = any_order_loss(model, rows, mask_id, self.config.block_length)
        self._right.append(right.detach())
        return loss

    def after_step(self, learner: Any, step: int) -> dict[str, Any]:
        """Share of masked tokens whose likeliest token was right, over the step."""
        right, self._right = torch.stack(self._right).mean(), []
        return {"masked_accuracy": float(right)}
