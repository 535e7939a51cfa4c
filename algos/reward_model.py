"""A scalar reward model from preferences: the language engine's learner with no seam filled.

The model of pairwise choices is Bradley and Terry's (1952); for language models: arXiv 2203.02155.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainers.language import LanguageAlgorithm
from trainers.trl_arguments import check_loss_settings


@dataclass(kw_only=True)
class RewardModelConfig:
    """Nothing of its own: the settings are those of the section `learner`."""

    name: str = "reward_model"


class RewardModel(LanguageAlgorithm):
    """-log sigmoid(score of chosen - score of rejected)."""

    kind = "reward_model"
    Config = RewardModelConfig
    evaluator = None  # it writes no answers
    hands_on = False  # a next phase starts from the model before it
    headline = (("accuracy", "accuracy"), ("margin", "margin"))

    @classmethod
    def check(cls, cfg: Any) -> None:
        check_loss_settings(cls.kind, cfg.learner)
