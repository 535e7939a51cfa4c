"""DPO: the language engine's preference learner with no seam filled.

"Direct Preference Optimization: Your Language Model is Secretly a Reward Model", arXiv 2305.18290.
TRL's other preference losses (`learner.loss_type`) are variants of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainers.language import LanguageAlgorithm
from trainers.trl_arguments import check_loss_settings


@dataclass(kw_only=True)
class DPOConfig:
    """Nothing of its own; `learner.beta` is the weight of the distance to the starting model."""

    name: str = "dpo"


class DPO(LanguageAlgorithm):
    """-log sigmoid(beta * (log-ratio of chosen - log-ratio of rejected)), ratios to the starting model."""

    kind = "dpo"
    Config = DPOConfig
    headline = (("accuracy", "rewards/accuracies"), ("margin", "rewards/margins"))

    @classmethod
    def check(cls, cfg: Any) -> None:
        check_loss_settings(cls.kind, cfg.learner)
