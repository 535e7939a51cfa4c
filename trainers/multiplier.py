"""Lagrange multipliers for one inequality constraint. Pure Python state machines; no torch, no Ray."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from envs.errors import UserError


@dataclass(kw_only=True)
class MultiplierConfig:
    """How lambda follows the violation. The violation is positive when the constraint is broken."""

    kind: str = "gradient"  # gradient | adam | pid
    init: float = 0.1
    lr: float = 0.1  # gradient and adam: step size per iteration
    max: float = 50.0
    kp: float = 1.0  # pid: gains on the violation, its running sum and its rise
    ki: float = 0.1
    kd: float = 0.0

    def __post_init__(self) -> None:
        kinds = ("gradient", "adam", "pid")
        if self.kind not in kinds:
            raise UserError("unknown kind of multiplier", given=self.kind, allowed=kinds)
        for name in ("init", "lr", "max", "kp", "ki", "kd"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"multiplier.{name} must be at least 0", given=value, allowed="[0, inf)")


class Multiplier:
    """lambda >= 0, moved once an iteration by the violation e.

    gradient: lambda <- max(0, lambda + lr e), the dual ascent step of a Lagrangian.
    adam:     the same with Adam's step (beta 0.9, 0.999) in place of lr e.
    pid:      lambda <- max(0, kp e + ki I + kd max(0, e - e_previous)), I <- max(0, I + e)
              (Stooke, Achiam and Abbeel 2020, "Responsive Safety in RL by PID Lagrangian Methods", Alg. 2).
    """

    def __init__(self, config: MultiplierConfig):
        self.config = config
        self.value = config.init
        self._state = {"m": 0.0, "v": 0.0, "t": 0, "integral": 0.0, "previous": 0.0}

    def update(self, violation: float) -> float:
        """Move lambda by one violation and return it. Raises UserError when the violation is NaN."""
        if not math.isfinite(violation):
            raise UserError(
                "the constraint's violation is not a finite number",
                given=str(violation),
                fix="look at the costs of the last iteration in metrics.jsonl",
            )
        c, s = self.config, self._state
        if c.kind == "gradient":
            value = self.value + c.lr * violation
        elif c.kind == "adam":
            s["t"] += 1
            s["m"] = 0.9 * s["m"] + 0.1 * violation
            s["v"] = 0.999 * s["v"] + 0.001 * violation**2
            m_hat, v_hat = s["m"] / (1 - 0.9 ** s["t"]), s["v"] / (1 - 0.999 ** s["t"])
            value = self.value + c.lr * m_hat / (math.sqrt(v_hat) + 1e-8)
        else:
            s["integral"] = max(0.0, s["integral"] + violation)
            rise = max(0.0, violation - s["previous"])
            s["previous"] = violation
            value = c.kp * violation + c.ki * s["integral"] + c.kd * rise
        self.value = min(max(value, 0.0), c.max)
        return self.value

    def state_dict(self) -> dict[str, Any]:
        """Everything `update` depends on."""
        return {"value": self.value, **self._state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo of `state_dict`."""
        self.value = state["value"]
        self._state = {key: state[key] for key in self._state}
