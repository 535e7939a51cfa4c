"""The layer against episodes recorded on Safety-Gymnasium's pinned stack (gymnasium 0.28.1, MuJoCo 2.3.3).

The recording holds actions, rewards and costs of whole episodes, and the first 31 observations (all of them
where they agree to the end). What differs is the simulator. On MuJoCo 2.3.3 the layer gives every velocity
episode exactly, and every navigation episode up to what the last bit of NumPy's sine and cosine decides
(whether a wheel touches the ground at reset). MuJoCo 3 solves contacts a little differently, and contacts
amplify rounding.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from envs.make import EnvConfig, make_env

RECORDED = np.load(Path(__file__).parent / "data" / "safety_gymnasium_recorded.npz")
ACCELEROMETER = slice(0, 3)  # of navigation observations


@dataclass(frozen=True)
class Tolerance:
    """How far from the recording MuJoCo 3 may be.

    Observations at reset and over the first `steps` steps, each reward, the episode's cost and its length.
    """

    reset: float = 1e-6
    reset_accelerometer: float = 1e-6
    steps: int = 0
    obs: float = 1e-6
    reward: float = 0.02
    cost: int = 0
    length: int = 0


# The first entry whose text the id contains counts.
TOLERANCES = {
    "SwimmerVelocity": Tolerance(steps=150, reward=1e-6),
    "Walker2dVelocity": Tolerance(steps=150, reward=1e-6),
    "HalfCheetahVelocity": Tolerance(steps=30, reward=0.5),
    "HopperVelocity": Tolerance(steps=6, reward=0.05, cost=1, length=1),
    "AntVelocity": Tolerance(steps=2, reward=6.0, cost=3, length=2),
    "HumanoidVelocity": Tolerance(steps=3, obs=1e-4),
    "PointButton": Tolerance(steps=8, obs=5e-3, cost=3),  # gremlins stand on the floor from the start
    "CarCircle": Tolerance(reset_accelerometer=12.0, cost=6),
    "Point": Tolerance(steps=8),
    "Car": Tolerance(reset_accelerometer=12.0),
    "AntGoal": Tolerance(steps=18, obs=2e-3, reward=1e-4),
    "DoggoGoal": Tolerance(steps=10, obs=1e-5),
    "RacecarGoal": Tolerance(reset_accelerometer=1e-3),
}


@pytest.mark.parametrize("task", [str(task) for task in RECORDED["ids"]])
def test_recorded_episodes(task):
    tolerance = next(entry for name, entry in TOLERANCES.items() if name in task)
    env = make_env(EnvConfig(id=task, horizon=None))
    key = task.replace("-", "_")
    episodes = sorted({name.split("/")[1] for name in RECORDED.files if name.startswith(key + "/")})
    assert len(episodes) >= 2
    for episode in episodes:
        seed, actions, obs, rewards, costs, done = (
            RECORDED[f"{key}/{episode}/{name}"]
            for name in ("seed", "action", "obs", "reward", "cost", "done")
        )
        first, info = env.reset(seed=int(seed))
        assert info == {}
        off = np.abs(first - obs[0])
        if "Velocity" not in task:
            assert off[ACCELEROMETER].max() <= tolerance.reset_accelerometer
            off[ACCELEROMETER] = 0
        assert off.max() <= tolerance.reset

        ours = []
        for action in actions:
            observation, reward, terminated, truncated, info = env.step(action)
            ours.append((observation, reward, info["cost"], terminated or truncated))
            if ours[-1][-1]:
                break
        our_obs, our_rewards, our_costs, our_done = (np.array(column) for column in zip(*ours))
        steps = min(tolerance.steps, len(ours), len(obs) - 1)
        assert np.abs(our_obs[:steps] - obs[1 : steps + 1]).max(initial=0) <= tolerance.obs
        both = min(len(ours), len(rewards))
        assert np.abs(our_rewards[:both] - rewards[:both]).max() <= tolerance.reward
        assert abs(our_costs.sum() - costs.sum()) <= tolerance.cost
        assert abs(len(ours) - len(rewards)) <= tolerance.length
        assert our_done[-1] == done[-1]
