"""GRPO: the language engine with no seam filled. Everything is `trainers.credit` and TRL's loss.

"DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", arXiv 2402.03300.
TRL's other losses (`learner.loss_type`) are variants of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainers.language import LanguageAlgorithm


@dataclass(kw_only=True)
class GRPOConfig:
    """Nothing of its own: the settings are those of the sections `rollout`, `learner` and `reward`."""

    name: str = "grpo"


class GRPO(LanguageAlgorithm):
    """Group-relative advantages on every token of a completion."""

    kind = "policy"
    Config = GRPOConfig
