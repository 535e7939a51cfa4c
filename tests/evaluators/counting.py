"""An environment known by heart: reward 1 a step, obs = [1 on every third step, step / 10]."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium.spaces import Box


class Counting(gymnasium.Env):
    observation_space = Box(-10.0, 10.0, (2,), np.float32)
    action_space = Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action):
        self.t += 1
        return self._obs(), 1.0, False, False, {}

    def _obs(self):
        return np.array([self.t % 3 == 0, self.t / 10], np.float32)


gymnasium.register("Counting-v0", Counting, max_episode_steps=12)
