"""The arms that TraCeS is compared with: what they fit, in closed form, and the same loop around it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from algos.rlsf import RLSF, RLSFConfig, StepClassifier
from algos.traces import EstimatorConfig, LabelBatch, Labeled, _pad
from algos.traces_ct import LearnedBudget, StepModel, TracesCT, TracesCTConfig
from envs.errors import UserError
from rollouts.collect import collect
from tests.algos.test_ppo_lag_run import LEARN
from tests.algos.test_traces_run import EARLY, SMALL
from tests.algos.test_traces_truths import SPEC, pool_of, scored, settings
from tests.reference import chain
from tests.rollouts.toys import Counter, random_policy
from tests.trainers.control_runs import assert_resumes, assert_same, rows, start
from trainers.multiplier import MultiplierConfig

GENERATOR = torch.Generator()
PLAIN = EstimatorConfig(decoder_width=16, class_weight=1.0)


def lively(kind: str, config: EstimatorConfig = PLAIN) -> StepModel:
    torch.manual_seed(0)
    model = LearnedBudget(5, config, horizon=30) if kind == "ct" else StepClassifier(5, config, budget=4.0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape))
    model.fit_scaling(np.random.default_rng(0).normal([0.5, 4, 0, 0, 0], [0.3, 3, 1, 1, 1], (99, 5)))
    return model


def ragged(seed: int = 0) -> tuple[list[Labeled], torch.Tensor, LabelBatch]:
    """Three trajectories of 12, 5 and 9 steps with labelled prefixes."""
    rng = np.random.default_rng(seed)
    items = [
        Labeled(rng.standard_normal((length, 5), np.float32), np.array(ends), np.array(y, np.float32))
        for length, ends, y in ((12, [4, 8, 12], [1, 1, 0]), (5, [4, 5], [0, 0]), (9, [9], [1]))
    ]
    return items, *_pad(items)


# -- what is fitted


def test_ct_s_loss_is_the_cross_entropy_of_the_margin() -> None:
    model = lively("ct")
    items, x, batch = ragged()
    y_hat, y = [], []
    for item in items:
        cost = model.credit(torch.from_numpy(item.inputs)[:, None])[0][:, 0]
        y_hat += [torch.sigmoid(model.log_budget.exp() - cost[:end].sum()) for end in item.ends]
        y += item.labels.tolist()
    plain = torch.nn.functional.binary_cross_entropy(torch.stack(y_hat), torch.tensor(y))
    torch.testing.assert_close(model.loss(x, batch, GENERATOR), plain)
    assert model.loss(x, batch, GENERATOR).requires_grad
    # Unsafe prefixes weigh 3: the mean over safe ones and three times the unsafe ones.
    losses = torch.nn.functional.binary_cross_entropy(torch.stack(y_hat), torch.tensor(y), reduction="none")
    weights = torch.tensor([1.0 if label else 3.0 for label in y])
    heavy = lively("ct", EstimatorConfig(decoder_width=16, class_weight=3.0)).loss(x, batch, GENERATOR)
    torch.testing.assert_close(heavy, (weights * losses).sum() / weights.sum())


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_rlsf_s_loss_copies_every_prefix_s_label_to_its_steps(weight: float) -> None:
    model = lively("rlsf", EstimatorConfig(decoder_width=16, class_weight=weight))
    items, x, batch = ragged()
    logits, unsafe = [], []
    for item in items:
        f = model(torch.from_numpy(item.inputs))
        for end, label in zip(item.ends, item.labels, strict=True):
            logits += list(f[:end])
            unsafe += [1.0 - label] * int(end)
    assert len(unsafe) == 4 + 8 + 12 + 4 + 5 + 9
    copied = torch.nn.functional.binary_cross_entropy_with_logits(
        torch.stack(logits), torch.tensor(unsafe), pos_weight=torch.tensor(weight), reduction="sum"
    )
    pairs = sum(weight if u else 1.0 for u in unsafe)
    torch.testing.assert_close(model.loss(x, batch, GENERATOR), copied / pairs)


@pytest.mark.parametrize("kind", ["ct", "rlsf"])
def test_the_runners_steps_equal_the_module(kind: str) -> None:
    model = lively(kind)
    runner = model.runner(None, version=1, active=True, visible=False)
    rollout = collect(
        [Counter((5, 9)), Counter((20,))], random_policy(3, 2, 3), runner, steps=20, seed=0, iteration=0
    )
    x = np.concatenate([rollout.obs[:-1], rollout.executed], -1)
    with torch.no_grad():
        cost, var = (v.numpy() for v in model.credit(torch.from_numpy(x)))
    assert np.ptp(cost) > 0.1
    np.testing.assert_allclose(rollout.model_cost, cost, rtol=1e-5, atol=1e-6)
    assert not var.any()
    assert not rollout.model_cost_var.any()
    assert rollout.memory.shape[-1] == 0
    off = model.runner(None, version=0, active=False, visible=False)
    assert not off.step(rollout.obs[0], rollout.executed[0], off.init(2))[0].any()
    if kind == "ct":
        assert (cost > 0).all()
    else:
        assert set(np.unique(cost)) == {0.0, 1.0}


def test_p_safe_of_episodes() -> None:
    ct, rlsf = lively("ct"), lively("rlsf")
    with torch.no_grad():
        ct.log_budget.fill_(math.log(4.0))
    found = ct.episode_p_safe(np.array([4.0, 3.0, 6.0]))
    np.testing.assert_allclose(found, [0.5, 0.7310586, 0.1192029], rtol=1e-6)
    np.testing.assert_array_equal(rlsf.episode_p_safe(np.array([0.0, 4.0, 5.0])), [1.0, 1.0, 0.0])


STEPS, BUDGET = 7, 2  # of the tabular chain: cost 1 in state B


def chain_batch() -> tuple[torch.Tensor, LabelBatch, np.ndarray, np.ndarray]:
    """All 128 trajectories with all their prefixes."""
    paths = chain.trajectories(STEPS)
    labels = np.stack([chain.prefix_labels(p, BUDGET) for p in paths])
    items = [
        Labeled(np.eye(2, dtype=np.float32)[p], np.arange(1, STEPS + 1), y.astype(np.float32))
        for p, y in zip(paths, labels, strict=True)
    ]
    return *_pad(items), paths, labels


def fitted(model: Any, updates: int) -> Any:
    x, batch, _, _ = chain_batch()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(updates):
        optimizer.zero_grad()
        model.loss(x, batch, GENERATOR).backward()
        optimizer.step()
    return model


def test_ct_finds_the_cost_and_the_budget_of_a_markov_chain() -> None:
    """Its class holds the truth: B always costs the same, A nothing, the budget lies between 2 and 3 B."""
    torch.manual_seed(0)
    model = fitted(LearnedBudget(2, PLAIN, horizon=STEPS), 1500)
    with torch.no_grad():
        a, b = model.credit(torch.eye(2)[:, None])[0][:, 0].tolist()
        total = np.array([[a, b][s] for s in range(2)])
    assert a < 0.02 * b
    assert 2 * b < model.budget < 3 * b
    _, _, paths, labels = chain_batch()
    survival = model.episode_p_safe(np.cumsum(total[paths], 1))
    assert ((survival > 0.5) == (labels > 0.5)).all()


def test_rlsf_learns_the_share_of_unsafe_prefixes_that_hold_a_state() -> None:
    """For two states the best classifier is that share, counted here pair by pair."""
    torch.manual_seed(0)
    model = fitted(StepClassifier(2, PLAIN, budget=0.0), 800)
    _, _, paths, labels = chain_batch()
    counts = np.zeros((2, 2))
    for path, y in zip(paths, labels, strict=True):
        for end in range(1, STEPS + 1):
            for t in range(end):
                counts[path[t], int(y[end - 1])] += 1
    shares = counts[:, 0] / counts.sum(1)
    assert shares[1] > shares[0]
    with torch.no_grad():
        np.testing.assert_allclose(torch.sigmoid(model(torch.eye(2))).numpy(), shares, atol=5e-3)


# -- the multiplier and the queries


def arm(kind: str, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "multiplier": MultiplierConfig(init=1.0, lr=0.1),
        "window_episodes": 32,
        **changes,
    }
    config = TracesCTConfig(**given) if kind == "ct" else RLSFConfig(**given)
    a = (TracesCT if kind == "ct" else RLSF)(config, SPEC, seed=0)
    a.active = True
    return a


def test_lambda_follows_the_learned_sum_against_the_budget() -> None:
    ct = arm("ct")
    with torch.no_grad():
        ct.estimator.log_budget.fill_(math.log(2.0))
    # `scored` gives an episode the sum -log P: sums 3 and 2, mean 2.5, a quarter of the budget too much.
    assert ct.constrain(scored(math.exp(-3), math.exp(-2))).multiplier == pytest.approx(1.025, abs=1e-5)
    # All four: (3 + 2 + 0.5 + 0.5) / 4 = 1.5, a quarter below.
    assert ct.constrain(scored(math.exp(-0.5), math.exp(-0.5))).multiplier == pytest.approx(1.0, abs=1e-5)
    # Far beyond the budget one budget too much is all that counts.
    assert arm("rlsf", budget=1.0).constrain(scored(math.exp(-9))).multiplier == pytest.approx(1.1, abs=1e-5)
    assert arm("rlsf", budget=4.0).constrain(scored(math.exp(-3))).multiplier == pytest.approx(
        0.975, abs=1e-5
    )


def test_ct_asks_where_it_is_undecided() -> None:
    a = arm("ct")
    doubts = [a._doubt(np.zeros((4, 5)), np.zeros(4), np.zeros(4), p) for p in (0.02, 0.5, 0.8, 1.0)]
    assert doubts == pytest.approx([0.0196, 0.25, 0.16, 0.0])


def test_rlsf_asks_for_what_is_new() -> None:
    a = arm("rlsf", novelty_bits=3)
    a._directions = np.zeros((5, 3))
    a._directions[[0, 1, 2], [0, 1, 2]] = 1.0  # the signs of the first three inputs, as bits 1, 2 and 4
    steps = np.array([[1, -1, -1, 0, 0], [1, 1, -1, 0, 0], [-1, -1, 1, 0, 0], [-1, -1, -1, 9, 9]], np.float32)
    np.testing.assert_array_equal(a.codes(steps), [1, 3, 4, 0])
    assert a._doubt(steps, steps, steps, 1.0) == 1.0
    a.labeled.append(Labeled(steps[:2], np.array([2]), np.array([1.0])))
    a._refresh()
    assert a._doubt(steps, steps, steps, 1.0) == 0.5
    assert a._doubt(steps[:2], steps, steps, 1.0) == 0.0


def test_random_queries_are_all_random(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TracesCT, "_fit", lambda *args: 0.0)
    counts = np.zeros(8)
    for seed in range(1000):
        a = arm("ct", query_fraction=0.25, query_uncertain_share=0.0, query_min=1, bias_labels=16)
        a.pool = pool_of([9.0, 8.0, 1, 1, 1, 1, 1, 1], [0.5] * 8, unsafe=set())
        known = {id(t.inputs): i for i, t in enumerate(a.pool)}
        a._query_and_retrain(np.random.default_rng(seed), 0)
        counts[[known[id(x.inputs)] for x in a.labeled]] += 1
        assert len(a._bias) == 2
    np.testing.assert_allclose(counts / 1000, 0.25, atol=0.055)  # four standard deviations


def test_what_is_said_before_the_start() -> None:
    cfg = settings(budget=25.0)
    assert TracesCT.describe(cfg)[0].endswith(
        "annotator only; constraint: mean learned cost <= learned budget"
    )
    assert "this algorithm is told the annotator's budget" in RLSF.describe(cfg)[0]
    cfg.algo = RLSFConfig(novelty_bits=21)
    with pytest.raises(UserError, match=r"algo\.novelty_bits is out of range"):
        RLSF.check(cfg)


# -- the whole engine

ARMS = {
    "traces_ct": ["algo=traces_ct"],
    "rlsf": ["algo=rlsf"],
    "point": ["algo=traces", "algo.estimator.head=point"],
    "blind": ["algo=traces", "algo.memory_in_policy=false"],
    "random": ["algo=traces", "algo.query_uncertain_share=0"],
}


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_is_deterministic_and_resumes(ray: Any, tmp_path: Path, name: str) -> None:
    algo, *overrides = ARMS[name]
    given = (*EARLY, *overrides)
    algo = algo.removeprefix("algo=")
    unbroken = start(algo, tmp_path / "a", *given)
    assert [row["constraint_active"] for row in rows(unbroken)] == [0, 1, 1, 1, 1, 1, 1, 1]
    assert len({row["estimator_version"] for row in rows(unbroken)}) > 3
    assert_same(unbroken, start(algo, tmp_path / "b", *given))
    assert_resumes(unbroken, algo, tmp_path / "c", [1, 3], *given)


@pytest.mark.parametrize("name", ["traces_ct", "rlsf"])
def test_the_baselines_learn_where_the_cost_is_markov(ray: Any, tmp_path: Path, name: str) -> None:
    """At most one and a half budgets of 10; without a constraint the same steps cost more than 40 (PPO)."""
    overrides = [*LEARN, "rollout.env_steps=32000", *SMALL, "algo.window_episodes=8", "algo.start_labels=24"]
    last = rows(start(name, tmp_path, *overrides, "algo.estimator.pretrain_updates=200"))[-10:]
    assert np.mean([row["episode_cost"] for row in last]) <= 15
    assert np.mean([row["episode_return"] for row in last]) > 8
