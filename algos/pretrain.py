"""Pre-training: cross-entropy on every token of running text, with no seam filled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainers.language import LanguageAlgorithm
from trainers.trl_arguments import check_loss_settings


@dataclass(kw_only=True)
class PretrainConfig:
    """Nothing of its own; `learner.trl.packing=true` fills rows up with several texts."""

    name: str = "pretrain"


class Pretrain(LanguageAlgorithm):
    """A dataset's column `text`, or a task's prompts and demonstrations as one text."""

    kind = "pretrain"
    Config = PretrainConfig
    headline = (("accuracy", "mean_token_accuracy"),)

    @classmethod
    def check(cls, cfg: Any) -> None:
        check_loss_settings(cls.kind, cfg.learner)
