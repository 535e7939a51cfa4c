"""Supervised fine-tuning: the language engine's SFT learner with no seam filled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainers.language import LanguageAlgorithm
from trainers.trl_arguments import check_loss_settings


@dataclass(kw_only=True)
class SFTConfig:
    """Nothing of its own: the settings are those of the section `learner`."""

    name: str = "sft"


class SFT(LanguageAlgorithm):
    """Cross-entropy on demonstrations; where prompts are apart from completions, on the completions only."""

    kind = "sft"
    Config = SFTConfig
    headline = (("accuracy", "mean_token_accuracy"),)

    @classmethod
    def check(cls, cfg: Any) -> None:
        check_loss_settings(cls.kind, cfg.learner)
