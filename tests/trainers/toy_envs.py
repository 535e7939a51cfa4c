"""Environments of the engine's tests: one that is learned in seconds, and one that breaks on demand.

Importing registers them with Gymnasium; a config names them as `tests.trainers.toy_envs:Throttle-v0`.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box


class Throttle(gymnasium.Env):
    """Speed v <- 0.8 v + 0.2 throttle; the reward is the speed, and a step above `limit` costs 1.

    Full throttle earns about 46 in 50 steps and costs about 46; holding 0.5 earns about 24 and costs nothing.
    """

    def __init__(self, limit: float = 0.5, spread: float = 0.1):
        self.observation_space = Box(-10.0, 10.0, (2,), np.float32)
        self.action_space = Box(-1.0, 1.0, (1,), np.float32)
        self.limit, self.spread, self.speed, self.last = limit, spread, 0.0, 0.0

    def observe(self) -> np.ndarray:
        return np.array([self.speed, self.last], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None):
        super().reset(seed=seed)
        self.speed, self.last = float(self.np_random.uniform(-self.spread, self.spread)), 0.0
        return self.observe(), {}

    def step(self, action: np.ndarray):
        self.last = float(np.clip(action[0], -1.0, 1.0))
        self.speed = 0.8 * self.speed + 0.2 * self.last
        cost = float(self.speed > self.limit)
        return self.observe(), self.speed, False, False, {"cost": cost}


class Faulty(Throttle):
    """Throttle that misbehaves while the file `armed` exists, in processes other than the one that wrote it.

    fault: `refuse` (the constructor raises), or at the process's step number `at`: `die` (SIGKILL, once: it
    removes the file), `die_always`, `hang`, `raise`, `blank`.
    """

    steps = 0  # of all instances in this process

    def __init__(self, fault: str = "none", armed: str = "", at: int = 1, **options: Any):
        super().__init__(**options)
        self.fault, self.armed, self.at = fault, Path(armed), at
        if fault == "refuse" and self.struck():
            raise RuntimeError("no licence for this simulator")

    def struck(self) -> bool:
        try:
            writer = self.armed.read_text()
            if self.fault == "die" and writer != str(os.getpid()):
                self.armed.unlink()  # of two processes that come here at once, one gets through
        except FileNotFoundError:
            return False
        return writer != str(os.getpid())

    def step(self, action: np.ndarray):
        Faulty.steps += 1
        observation, reward, terminated, truncated, info = super().step(action)
        if Faulty.steps == self.at and self.struck():
            if self.fault in ("die", "die_always"):
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "hang":
                time.sleep(3600)
            if self.fault == "raise":
                raise RuntimeError("the simulator lost its contact model")
            if self.fault == "blank":
                reward = float("nan")
        return observation, reward, terminated, truncated, info


for kind in (Throttle, Faulty):
    if f"{kind.__name__}-v0" not in gymnasium.registry:
        gymnasium.register(f"{kind.__name__}-v0", kind, max_episode_steps=50)
