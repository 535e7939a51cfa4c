"""The estimators alone, on episodes whose hidden limit is known: accuracy, localisation, memory, noise.

400 labelled episodes of 60 steps with prefixes every 5, 300 others to be judged by, through the algorithms'
own fit. The bars of the first two tests are the paper notes', met here on seeds not looked at before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from algos.traces import EstimatorConfig, Labeled, Traces, TracesConfig
from algos.traces_ct import TracesCT, TracesCTConfig
from rewards.labels import ThresholdOracle, prefix_ends
from rollouts.trajectories import EnvSpec
from tests.algos.test_traces_truths import algorithm, pool_of
from tests.reference.hidden_limits import SLICE, STEPS, TASKS, costs, crossing, episode

SPEC = EnvSpec(obs_dim=4, action_low=-np.ones(1), action_high=np.ones(1), horizon=STEPS)
TRAIN, TEST, BATCH = 400, 300, 32
ENDS = prefix_ends(STEPS, SLICE)


class Score(NamedTuple):
    accuracy: float  # of whole episodes, P_safe against 1/2
    localised: float  # share of unsafe ones whose largest credit is within 5 steps of the crossing
    safe: float  # mean P_safe of truly safe ones
    unsafe: float


def labelled(task: str, n: int, rng: np.random.Generator, noise: float) -> list[Labeled]:
    oracle = ThresholdOracle(TASKS[task], noise)
    kept = [episode(rng) for _ in range(n)]
    return [Labeled(x, ENDS, oracle.label(np.array(costs(task, x)), ENDS, False, rng)) for x in kept]


def score(arm: str, task: str, seed: int, epochs: int, noise: float = 0.0) -> Score:
    rng = np.random.default_rng((2026, seed))
    train, test = labelled(task, TRAIN, rng, noise), labelled(task, TEST, rng, 0.0)
    given: dict[str, Any] = {"batch_trajectories": BATCH, "held_out_every": 10**9, "class_weight": 1.0}
    if arm == "ct":
        a: Traces = TracesCT(TracesCTConfig(estimator=EstimatorConfig(decoder_width=64, **given)), SPEC, seed)
    else:
        a = Traces(TracesConfig(estimator=EstimatorConfig(head=arm, **given)), SPEC, seed)
    a.labeled = train
    a.estimator.fit_scaling(np.concatenate([x.inputs for x in train]))
    a._fit(epochs * -(-TRAIN // BATCH), 3e-3, 0.0, 0)
    x = torch.from_numpy(np.stack([t.inputs for t in test], 1))
    with torch.no_grad():
        credit = a.estimator.credit(x)[0].numpy()
    p_safe = a.estimator.episode_p_safe(credit.sum(0, dtype=np.float64))
    safe = np.array([t.labels[-1] > 0.5 for t in test])
    crossings = [crossing(task, t.inputs) for t in test]
    assert [c is None for c in crossings] == safe.tolist()
    assert 0.3 < safe.mean() < 0.6  # no class is nearly all
    near = [abs(int(credit[:, b].argmax()) - c) <= 5 for b, c in enumerate(crossings) if c is not None]
    return Score(
        float(np.mean((p_safe > 0.5) == safe)),
        float(np.mean(near)),
        float(p_safe[safe].mean()),
        float(p_safe[~safe].mean()),
    )


@pytest.mark.parametrize("seed", [11, 12])
def test_a_markov_limit_is_learned_and_the_crossing_found(seed: int) -> None:
    ours = score("lognormal", "markov", seed, epochs=30)
    assert ours.accuracy >= 0.85
    assert ours.localised >= 0.65
    # CT's class contains this truth: it should be at least as good.
    assert score("ct", "markov", seed, epochs=30).accuracy >= ours.accuracy - 0.02


def test_a_limit_that_remembers_needs_memory() -> None:
    seeds = (11, 12, 13)
    ours = [score("lognormal", "latch", seed, epochs=60).accuracy for seed in seeds]
    ct = [score("ct", "latch", seed, epochs=60).accuracy for seed in seeds]
    assert np.mean(ours) - np.mean(ct) >= 0.07, (ours, ct)


# -- noise


@pytest.mark.parametrize("noise", [0.1, 0.2])
def test_under_noise_the_point_head_still_tells_and_errs_on_the_safe_side(noise: float) -> None:
    """Trained on flipped labels, judged by the true ones. A perfect P_safe would be 1 - q and q.

    It stays below 1 - q on safe episodes, by 0.15 to 0.17 on this seed: the bias that random labels correct.
    """
    ours = score("point", "markov", 11, epochs=30, noise=noise)
    assert ours.accuracy >= 0.85
    assert 1 - noise - 0.25 <= ours.safe <= 1 - noise
    assert ours.unsafe == pytest.approx(noise, abs=0.12)


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.2])
def test_the_correction_under_noise(noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """An estimator that calls everything 0.95 safe, where 6 of 10 episodes are: random labels put it right.

    What is measured is the probability of the label "safe", q + (1 - 2 q) 0.6; the limit is on that scale.
    The unsafe episodes are the doubtful ones: labels of what they leave would say 0.75 or more.
    """
    monkeypatch.setattr(Traces, "_fit", lambda *args: 0.0)
    a = algorithm(
        noise=noise, budget=25.0, query_fraction=0.4, query_min=1, bias_labels=4000, window_episodes=10
    )
    a._recent.extend([0.95] * 10)
    rng = np.random.default_rng(0)
    for _ in range(2000):
        a.pool = pool_of([5.0] * 4 + [1.0] * 6, [0.95] * 10, unsafe={0, 1, 2, 3})
        a._query_and_retrain(rng, 0)
    assert len(a._bias) == 4000
    assert a.corrected_p_safe() == pytest.approx(noise + (1 - 2 * noise) * 0.6, abs=0.03)
