"""Attention credit: the formulas on maps that are known, and against a dense reference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("trl", reason="needs the extra 'language'")

import torch

from algos.attention_credit import (
    AttentionCredit,
    AttentionCreditConfig,
    AttentionMaps,
    attention_jump,
    coupled_gamma,
    future_rows,
    gamma,
    sampled_layers,
    shaped,
    split_heads,
    top_share,
    watching,
)
from envs.errors import UserError
from rollouts.samples import Sample
from tests.reference import attention_credit as dense
from tests.rollouts.tiny_model import tiny_llama

N = 60


def summed(
    maps: np.ndarray, start: int = 0, end: int = N, window: int = 10, low: int = 2, high: int = 30
) -> Any:
    """`AttentionMaps` of maps (H, N, N): queries are their logarithms, keys the unit vectors."""
    logs = torch.from_numpy(maps).log().clamp(min=-1e30)
    seen = AttentionMaps([start], [end], window, low, high)
    keys = torch.eye(maps.shape[-1], dtype=torch.float64).expand(1, len(maps), -1, -1)
    seen.add(logs[None], keys, 1.0)
    return seen


def every(seen: Any, name: str) -> np.ndarray:
    return seen.metric(name, np.arange(torch.cat(seen.waad, 1).shape[1]))[0]


def lag(m: int) -> np.ndarray:
    """Every token looks m tokens back, the first ones at token 0."""
    a = np.zeros((1, N, N))
    for t in range(N):
        a[0, t, max(0, t - m)] = 1.0
    return a


def random_maps(heads: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    a = np.tril(rng.exponential(size=(heads, N, N)) ** 3)
    return a / a.sum(-1, keepdims=True)


def test_uniform_rows() -> None:
    t = np.arange(N)
    a = np.tril(np.ones((1, N, N)) / (t[:, None] + 1))
    seen = summed(a)
    assert seen.head_spans()[0] == pytest.approx(np.mean(t / 2))
    w = np.where(t <= 10, t / 2, (10 * 11 / 2 + 10 * (t - 10)) / (t + 1))
    assert every(seen, "waad") == pytest.approx(w)
    f = [np.mean([1 / (u + 1) for u in range(s + 2, min(N - 1, s + 30) + 1)] or [0.0]) for s in range(N)]
    assert every(seen, "fai") == pytest.approx(np.array(f))


@pytest.mark.parametrize("m", [0, 1, 4, 25])
def test_a_constant_lag(m: int) -> None:
    seen = summed(lag(m))
    w = np.minimum(np.minimum(np.arange(N), m), 10)
    assert every(seen, "waad") == pytest.approx(w)
    assert seen.head_spans()[0] == pytest.approx(np.minimum(np.arange(N), m).mean())
    if m < 2:
        assert not every(seen, "fai")[1:].any()


def test_a_planted_anchor_is_found() -> None:
    a, mass, column = random_maps(1, 1) * 0.6, 0.4, 17
    a[0, :, column] += mass
    a[0, :column] = random_maps(1, 2)[0, :column]  # rows before it can't see it
    seen = summed(a)
    f = every(seen, "fai")
    later = list(range(column + 2, min(N - 1, column + 30) + 1))
    assert f[column] == pytest.approx(mass + np.mean([random_maps(1, 1)[0, t, column] * 0.6 for t in later]))
    assert top_share(f, 1 / N).argmax() == column


def test_a_sawtooth_fires_on_rise_and_fall() -> None:
    w = np.ones(24)
    w[[6, 12, 18]] = 8.0
    jump = attention_jump(w)
    assert np.flatnonzero(jump == 7).tolist() == [5, 6, 11, 12, 17, 18]
    assert jump[-1] == 0


@pytest.mark.parametrize(("start", "end"), [(0, N), (7, N), (20, 45), (30, 32)])
def test_streaming_is_the_dense_reference(start: int, end: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("algos.attention_credit.ROWS", 7)
    maps = random_maps(5, 3)
    seen = summed(maps, start, end)
    assert seen.head_spans() == pytest.approx(dense.span(maps, start, end), abs=1e-12)
    for heads in ([0], [1, 3], [0, 2, 4]):
        mean = maps[heads].mean(0)
        assert seen.metric("waad", np.array(heads))[0] == pytest.approx(
            dense.waad(mean, start, end, 10), abs=1e-12
        )
        assert seen.metric("fai", np.array(heads))[0] == pytest.approx(
            dense.fai(mean, start, end, 2, 30), abs=1e-12
        )


def test_bounds_and_row_sums() -> None:
    for seed in range(5):
        seen = summed(random_maps(2, seed), 5, 50)
        w, f = every(seen, "waad"), every(seen, "fai")
        assert ((w >= 0) & (w <= 10)).all()
        assert ((f >= 0) & (f <= 1)).all()
        assert (future_rows(45, 2, 30) * f).sum() <= 45
        for alpha in (0.0, 0.3, 1.0):
            cfg = AttentionCreditConfig(alpha=alpha)
            g = gamma("coupled", cfg, waad=w, fai=f)
            assert ((g >= 1) & (g <= 1 + 0.5 * (1 + alpha) + 1e-12)).all()


def test_coupled_is_the_loop_of_the_text_and_keeps_the_budget() -> None:
    rng = np.random.default_rng(5)
    shared = 0
    for _ in range(200):
        n = int(rng.integers(3, 40))
        w, f = rng.integers(0, 6, n) / 2.0, rng.random(n).round(1)
        cfg = AttentionCreditConfig(alpha=0.3, lookback=2)
        anchors = top_share(f, 0.4)
        g = coupled_gamma(w, anchors, cfg)
        assert g == pytest.approx(dense.coupled(w, f, 0.4, 1.5, 0.3, 2))
        assert (g - 1).sum() <= 0.5 * anchors.sum() + 1e-12
        shared += (g - 1).sum() < 0.5 * anchors.sum() - 1e-9
    assert shared > 10  # planners that two anchors share are paid once


def test_special_cases() -> None:
    rng = np.random.default_rng(6)
    w, f = rng.random(30) * 10, rng.random(30)
    cfg = AttentionCreditConfig(horizon_low=2, horizon_high=30)
    no_share = AttentionCreditConfig(horizon_low=2, horizon_high=30, alpha=0.0)
    assert np.array_equal(gamma("coupled", no_share, waad=w, fai=f), gamma("global", cfg, waad=w, fai=f))
    assert gamma("global", cfg, waad=w, fai=f).sum() == pytest.approx(30 + 0.5 * 12)  # exactly ceil(0.4 * 30)
    whole = AttentionCreditConfig(share=1.0, horizon_low=2)
    assert np.array_equal(gamma("local", whole, waad=w, fai=f), np.full(30, 1.5))
    bottom = AttentionCreditConfig(bottom=True, horizon_low=2)
    top = gamma("global", cfg, waad=w, fai=f) > 1
    assert f[gamma("global", bottom, waad=w, fai=f) > 1].max() < f[top].min()
    short = AttentionCreditConfig(horizon_low=10)
    assert np.array_equal(gamma("coupled", short, waad=w[:10], fai=np.zeros(10)), np.ones(10))
    drawn = gamma("random", cfg, waad=w, fai=f, rng=np.random.default_rng(1))
    assert (drawn == 1.5).sum() == 12
    by_entropy = gamma("entropy", cfg, waad=w, fai=f, entropy=np.arange(30.0))
    assert np.flatnonzero(by_entropy > 1).tolist() == list(range(18, 30))


def test_shaped_signs_and_normalisation() -> None:
    factor = np.array([1.5, 1.0, 1.0, 1.5])
    cfg = AttentionCreditConfig
    assert shaped(-2.0, factor, cfg()).tolist() == [-3, -2, -2, -3]
    assert shaped(-2.0, factor, cfg(sign="positive")).tolist() == [-2] * 4
    assert shaped(2.0, factor, cfg(sign="negative")).tolist() == [2] * 4
    assert shaped(2.0, factor, cfg(normalize=True)) == pytest.approx([2.4, 1.6, 1.6, 2.4])
    plain = np.full(4, np.float32(0.7310586))
    amplified = gamma("global", cfg(amplification=1.0, horizon_low=1), waad=factor, fai=factor)
    assert np.array_equal(shaped(float(plain[0]), amplified, cfg()), plain)  # bit for bit


def test_heads_and_layers() -> None:
    spans = np.array([3.0, 1.0, 2.0, 1.0, 9.0, 9.0, 4.0, 5.0, 6.0, 7.0])
    local, anchor = split_heads(spans, 0.3)
    assert local.tolist() == [1, 3, 2]
    assert anchor.tolist() == [4, 5, 9]
    with pytest.raises(UserError, match="overlap"):
        split_heads(spans[:1], 0.3)
    assert sampled_layers(36, 5) == [12, 15, 18, 21, 24]
    assert sampled_layers(6, 5) == [2, 3, 4]
    assert sampled_layers(1, 5) == [0]


def sample(prompt: list[int], completion: list[int], name: str = "s") -> Sample:
    return Sample(
        id=name,
        group=0,
        index=0,
        prompt_ids=prompt,
        completion_ids=completion,
        finish="length",
        logp_rollout=np.zeros(len(completion), np.float32),
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_llama(tmp_path_factory.mktemp("attention"), num_hidden_layers=3)


def samples() -> list[Sample]:
    rng = np.random.default_rng(2)
    sizes = [(3, 20), (9, 31), (1, 12)]
    return [
        sample(rng.integers(2, 12, p).tolist(), rng.integers(2, 12, t).tolist(), str(p)) for p, t in sizes
    ]


def test_observed_streams_are_those_of_the_model_s_own_maps(model: Any) -> None:
    """Grouped-query attention, right padding and hooks, against output_attentions of the same model."""
    cfg = AttentionCreditConfig(horizon_low=2, horizon_high=9, window=4, strategy="entropy")
    algorithm = AttentionCredit(cfg, 0)
    given = samples()
    streams = algorithm.observe(model, given)
    model.set_attn_implementation("eager")
    layers = sampled_layers(3, 5)
    maps, spans, entropies = [], 0.0, []
    for s in given:
        ids = torch.tensor([s.prompt_ids + s.completion_ids])
        with torch.no_grad():
            out = model(ids, output_attentions=True)
        maps.append(torch.cat([out.attentions[i][0] for i in layers]).double().numpy())
        start, end = len(s.prompt_ids), ids.shape[1]
        spans = spans + dense.span(maps[-1], start, end) * (end - start)
        p = torch.softmax(out.logits[0, start - 1 : end - 1], -1).double()
        entropies.append(-(p * p.log()).sum(-1).numpy())
    model.set_attn_implementation("sdpa")
    local, anchor = split_heads(spans, 0.3)
    for i, s in enumerate(given):
        start, end = len(s.prompt_ids), len(s.prompt_ids) + len(s.completion_ids)
        assert streams["waad"][i] == pytest.approx(
            dense.waad(maps[i][local].mean(0), start, end, 4), abs=1e-5
        )
        assert streams["fai"][i] == pytest.approx(
            dense.fai(maps[i][anchor].mean(0), start, end, 2, 9), abs=1e-6
        )
        assert streams["entropy"][i] == pytest.approx(entropies[i], abs=1e-5)


def test_order_and_company_do_not_matter(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = AttentionCredit(AttentionCreditConfig(horizon_low=2), 0)
    given = samples()
    forward = algorithm.observe(model, given)
    monkeypatch.setattr("algos.attention_credit.BATCH", 1)
    backward = algorithm.observe(model, given[::-1])
    for name in ("waad", "fai"):
        for a, b in zip(forward[name], backward[name][::-1], strict=True):
            assert a == pytest.approx(b, abs=1e-5)


def test_credit_is_gamma_times_advantage() -> None:
    algorithm = AttentionCredit(AttentionCreditConfig(strategy="local"), 0)
    s = sample([2], [3, 4, 5, 6, 7])
    s.streams = {"waad": np.array([1.0, 1.0, 6.0, 1.0, 1.0]), "fai": np.zeros(5), "entropy": np.zeros(5)}
    credit = algorithm.credit([[s]], np.array([[-2.0]]))
    assert credit[0].tolist() == [-2, -3, -3, -2, -2]  # ceil(0.4 * 5) = 2: before and at the jump
    assert s.streams["gamma"].tolist() == [1, 1.5, 1.5, 1, 1]


def test_windowed_layers_are_refused() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=12,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=4,
    )
    model = MistralForCausalLM(config).eval()
    maps = AttentionMaps([1], [6], 10, 1, 9)
    with pytest.raises(UserError, match="sliding window"), watching(model, [1], maps), torch.no_grad():
        model(torch.tensor([[2, 3, 4, 5, 6, 7]]))
    model(torch.tensor([[2, 3, 4]]))  # and nothing is left behind


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"strategy": "locall"}, "algo.strategy"),
        ({"sign": "plus"}, "algo.sign"),
        ({"share": 0.0}, "algo.share"),
        ({"share": 1.1}, "algo.share"),
        ({"head_share": 0.6}, "algo.head_share"),
        ({"alpha": 1.5}, "algo.alpha"),
        ({"amplification": 0.9}, "algo.amplification"),
        ({"horizon_low": 0}, "algo.horizon_low"),
        ({"horizon_low": 9, "horizon_high": 8}, "horizon ends before"),
        ({"window": 0}, "algo.window"),
    ],
    ids=str,
)
def test_settings_that_cannot_work(setting: dict[str, Any], message: str) -> None:
    cfg = SimpleNamespace(algo=AttentionCreditConfig(**setting))
    with pytest.raises(UserError, match=message):
        AttentionCredit.check(cfg)
    AttentionCredit.check(SimpleNamespace(algo=AttentionCreditConfig()))
