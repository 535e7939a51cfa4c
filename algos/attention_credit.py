"""Attention credit: a token's advantage is raised where attention says that it opens or anchors a chunk.

"Attention Illuminates LLM Reasoning: The (Uncovered) Preplan-and-Anchor Rhythm Enables Fine-Grained Policy
Optimization" (arXiv 2510.13554, second version). The formulas are the functions of the first half, on plain
arrays; `AttentionCredit` below puts them into the seams `observe` and `credit`. "Ours" marks what the text
leaves open. Positions are 0-based; a metric of token t reads t's own row of attention.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from envs.errors import UserError
from rollouts.samples import Sample
from trainers.language import LanguageAlgorithm

STRATEGIES = ("uniform", "random", "entropy", "local", "global", "coupled")
ROWS = 128  # rows of attention that are in memory at a time
BATCH = 8  # sequences of one forward pass

# ------------------------------------------------------------------------------------------ the formulas


def sampled_layers(depth: int, count: int) -> list[int]:
    """`count` evenly spaced layers from floor(depth/3) to floor(2 depth/3), fewer where they coincide."""
    return sorted({int(i) for i in np.linspace(depth // 3, 2 * depth // 3, count).round() if i < depth})


def split_heads(spans: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """(local, global): indices of the share of heads with the shortest and with the longest spans.

    `spans` (n,) are mean distances in tokens. Each has max(1, round(share n)) heads, ties by index (ours).
    Raises UserError when the two would overlap.
    """
    size = max(1, round(share * len(spans)))
    if 2 * size > len(spans):
        raise UserError(
            "local and global heads would overlap",
            given=f"{len(spans)} heads in the sampled layers, {size} of each kind",
            fix="raise algo.layers, or lower algo.head_share",
        )
    return np.argsort(spans, kind="stable")[:size], np.argsort(-spans, kind="stable")[:size]


def future_rows(length: int, low: int, high: int) -> np.ndarray:
    """|T(s)| (length,): later response tokens t with s + low <= t <= s + high."""
    s = np.arange(length)
    return np.maximum(0, np.minimum(length - 1, s + high) - (s + low) + 1)


def attention_jump(waad: np.ndarray) -> np.ndarray:
    """Delta_t = |WAAD_t - WAAD_{t+1}| (T,); 0 at the last token (ours)."""
    return np.append(np.abs(np.diff(waad)), 0.0)


def top_share(score: np.ndarray, share: float, bottom: bool = False) -> np.ndarray:
    """Mask (T,) of exactly ceil(share T) tokens with the highest (or lowest) score, ties to earlier ones."""
    chosen = np.zeros(len(score), bool)
    order = np.argsort(score if bottom else -score, kind="stable")
    chosen[order[: int(np.ceil(share * len(score) - 1e-9))]] = True
    return chosen


def coupled_gamma(waad: np.ndarray, anchors: np.ndarray, cfg: AttentionCreditConfig) -> np.ndarray:
    """The coupled rhythm: an anchor that its neighbourhood planned shares its raise with the planner.

    D = {t in anchors: WAAD_t <= median, max_{t-k <= u < t} Delta_u >= the (1-q) quantile of Delta}, the
    planner is the latest u of the largest Delta there. Thresholds, alpha, k and the planner are ours.
    """
    jump = attention_jump(waad)
    planned = top_share(jump, cfg.share)
    low = waad <= np.median(waad)
    dominated = np.zeros(len(waad), bool)
    planners = np.zeros(len(waad), bool)
    for t in np.flatnonzero(anchors & low):
        before = np.arange(max(0, int(t) - cfg.lookback), int(t))
        if len(before) and planned[before].any():
            dominated[t] = True
            planners[before[len(before) - 1 - np.argmax(jump[before][::-1])]] = True
    extra = cfg.amplification - 1
    return (
        1
        + extra * (anchors & ~dominated)
        + (1 - cfg.alpha) * extra * dominated
        + cfg.alpha * extra * planners
    )


def gamma(
    strategy: str,
    cfg: AttentionCreditConfig,
    *,
    waad: np.ndarray,
    fai: np.ndarray,
    entropy: np.ndarray | None = None,
    rng: np.random.Generator | None = None,
) -> np.ndarray:
    """Factors (T,) on one response's advantage, in [1, 1 + (amplification - 1)(1 + alpha)].

    `waad` and `fai` (T,) as `AttentionMaps` gives them. Where no token has a future within the horizon
    (all FAI 0) nothing is an anchor, and the factor is 1.
    """
    length = len(waad)
    if strategy == "uniform":
        return np.ones(length)
    if strategy in ("global", "coupled"):
        if not future_rows(length, cfg.horizon_low, cfg.horizon_high).any():
            return np.ones(length)
        anchors = top_share(fai, cfg.share, cfg.bottom)
        if strategy == "coupled":
            return coupled_gamma(waad, anchors, cfg)
        chosen = anchors
    elif strategy == "local":
        chosen = top_share(attention_jump(waad), cfg.share, cfg.bottom)
    elif strategy == "entropy":
        assert entropy is not None
        chosen = top_share(entropy, cfg.share, cfg.bottom)
    else:
        assert rng is not None
        chosen = top_share(rng.random(length), cfg.share)
    return 1 + (cfg.amplification - 1) * chosen


def shaped(advantage: float, factor: np.ndarray, cfg: AttentionCreditConfig) -> np.ndarray:
    """gamma_t * A (T,): on both signs of A, or on one alone; with normalize, gamma has mean 1."""
    applies = {"both": True, "positive": advantage >= 0, "negative": advantage < 0}[cfg.sign]
    factor = factor if applies else np.ones_like(factor)
    if cfg.normalize:
        factor = factor / factor.mean()
    return (factor * advantage).astype(np.float32)


# --------------------------------------------------------------------------------- what attention shows


class AttentionMaps:
    """Span, WAAD and FAI of every head of some layers, summed up while the maps pass by.

    Of a map A (heads, N, N) only blocks of ROWS rows exist at a time; kept are numbers a head and token. For
    a response that covers tokens [start, end) of its sequence:

        span = mean over t of sum_s A[t, s] (t - s)
        WAAD_t = sum_s A[t, s] min(t - s, window)
        FAI_s = mean over t in T(s) of A[t, s],  T(s) = {t: s + low <= t <= min(end - 1, s + high)}

    `heads` of the results run over (layer, head) in the order in which layers were added.
    """

    def __init__(self, starts: list[int], ends: list[int], window: int, low: int, high: int) -> None:
        self.starts, self.ends = torch.tensor(starts), torch.tensor(ends)
        self.window, self.low, self.high = window, low, high
        self.spans: list[torch.Tensor] = []  # a layer: (heads,), summed over response tokens
        self.waad: list[torch.Tensor] = []  # a layer: (B, heads, N)
        self.fai: list[torch.Tensor] = []

    def add(self, query: torch.Tensor, key: torch.Tensor, scaling: float) -> None:
        """One layer's queries (B, heads, N, d) and keys (B, groups, N, d), rotated, as attention has them."""
        batch, heads, length, _ = query.shape
        exact = torch.promote_types(query.dtype, torch.float32)
        query, key = query.to(exact), key.to(exact).repeat_interleave(heads // key.shape[1], 1)
        at = torch.arange(length, device=query.device)
        starts, ends = self.starts.to(query.device)[:, None], self.ends.to(query.device)[:, None]
        spans = torch.zeros(heads, dtype=exact, device=query.device)
        waad = torch.zeros(batch, heads, length, dtype=exact, device=query.device)
        fai = torch.zeros_like(waad)
        for first in range(int(starts.min()), int(ends.max()), ROWS):
            last = min(first + ROWS, int(ends.max()))
            rows, columns = at[first:last], at[:last]
            distance = rows[:, None] - columns  # (R, S)
            scores = query[:, :, first:last] @ key[:, :, :last].transpose(-1, -2) * scaling
            weights = scores.masked_fill(distance < 0, -torch.inf).softmax(-1)  # (B, heads, R, S)
            inside = ((rows >= starts) & (rows < ends)).to(exact)[:, None]  # (B, 1, R)
            spans += ((weights * distance).sum(-1) * inside).sum((0, 2))
            waad[:, :, first:last] = (weights * distance.clamp(max=self.window)).sum(-1) * inside
            band = ((distance >= self.low) & (distance <= self.high)).to(exact)
            fai[:, :, :last] += (weights * band * inside[..., None]).sum(2)
        self.spans.append(spans.cpu())
        self.waad.append(waad.cpu())
        self.fai.append(fai.cpu())

    def head_spans(self) -> np.ndarray:
        """Mean span of every head (n,), over all response tokens."""
        tokens = int((self.ends - self.starts).sum())
        return torch.cat(self.spans).numpy() / max(1, tokens)

    def metric(self, name: str, heads: np.ndarray) -> list[np.ndarray]:
        """ "waad" or "fai" of every response (T,), from the mean of the maps of `heads`."""
        mean = torch.cat(getattr(self, name), 1)[:, torch.as_tensor(heads)].mean(1).numpy()
        found = []
        for row, start, end in zip(mean, self.starts.tolist(), self.ends.tolist()):
            values = row[start:end].astype(np.float64)
            if name == "fai":
                values = values / np.maximum(1, future_rows(end - start, self.low, self.high))
            found.append(values)
        return found


@contextmanager
def watching(model: Any, layers: list[int], maps: AttentionMaps) -> Iterator[None]:
    """Inside, `model`'s attention in `layers` also goes through `maps`; whatever its implementation is.

    Raises UserError, in the forward pass, for a layer that is not plain causal attention over the prefix.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = model.config._attn_implementation
    own = {id(module) for module in model.modules()}
    plain = ALL_ATTENTION_FUNCTIONS[name] if name != "eager" else sdpa_attention_forward

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        index = getattr(module, "layer_idx", None)
        if index in layers and id(module) in own:
            refuse_other_attention(module, kwargs)
            scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
            maps.add(query, key, float(scaling))
        return plain(module, query, key, value, mask, **kwargs)

    ALL_ATTENTION_FUNCTIONS[name] = attend
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]


def refuse_other_attention(module: Any, kwargs: dict[str, Any]) -> None:
    """Raise UserError unless every row of this layer's attention is a softmax over its whole prefix."""
    windowed = getattr(module, "sliding_window", None) or kwargs.get("sliding_window")
    for what, there in (
        ("a sliding window", windowed),
        ("capped scores", kwargs.get("softcap")),
        ("attention sinks", kwargs.get("s_aux") is not None),
    ):
        if there:
            raise UserError(
                f"layer {module.layer_idx} has {what}: its rows are not attention over the whole prefix",
                given=type(module).__name__,
                fix="choose a model with full attention in its middle layers",
            )


# ------------------------------------------------------------------------------------------ the algorithm


@dataclass(kw_only=True)
class AttentionCreditConfig:
    """Settings of the second version's experiments; horizons count tokens of the response."""

    name: str = "attention_credit"
    strategy: str = "coupled"  # uniform | random | entropy | local | global | coupled
    share: float = 0.4  # q: of a response's tokens
    amplification: float = 1.5
    sign: str = "both"  # of the advantages that are shaped: both | positive | negative
    normalize: bool = False  # factors of mean 1: a control against a mere rise of the step size (ours)
    bottom: bool = False  # the lowest share in place of the highest: a control
    all_heads: bool = False  # no choice of heads: a control
    window: int = 10  # W of WAAD
    horizon_low: int = 10  # H_lo of FAI
    horizon_high: int = 100  # H_hi of FAI
    head_share: float = 0.3
    layers: int = 5
    alpha: float = 0.5  # share of a planned anchor's raise that goes to its planner (ours)
    lookback: int = 3  # k


class AttentionCredit(LanguageAlgorithm):
    """GRPO whose advantages are multiplied, token by token, by what the policy's own attention says.

    One more forward pass without gradient looks at the batch, with the learner's weights. Heads are split by
    their spans over the rank's whole batch, anew in every step (ours).
    """

    kind = "policy"
    Config = AttentionCreditConfig

    def __init__(self, config: Any, seed: int) -> None:
        super().__init__(config, seed)
        self._seen: dict[str, float] = {}

    @classmethod
    def check(cls, cfg: Any) -> None:
        a = cfg.algo
        if a.strategy not in STRATEGIES:
            raise UserError("unknown algo.strategy", given=a.strategy, allowed=STRATEGIES)
        if a.sign not in ("both", "positive", "negative"):
            raise UserError("unknown algo.sign", given=a.sign, allowed=("both", "positive", "negative"))
        for name, low, high in (
            ("share", 0, 1),
            ("head_share", 0, 0.5),
            ("alpha", -1e-12, 1),
            ("amplification", 1 - 1e-12, np.inf),
        ):
            if not low < getattr(a, name) <= high:
                raise UserError(
                    f"algo.{name} is out of range", given=getattr(a, name), allowed=f"({low:g}, {high:g}]"
                )
        for name in ("window", "horizon_low", "layers", "lookback"):
            if getattr(a, name) < 1:
                raise UserError(f"algo.{name} must be at least 1", given=getattr(a, name))
        if a.horizon_high < a.horizon_low:
            raise UserError(
                "the horizon ends before it begins",
                given=f"algo.horizon_low={a.horizon_low}, algo.horizon_high={a.horizon_high}",
            )

    def observe(self, model: Any, samples: list[Sample]) -> dict[str, list[np.ndarray]]:
        """The streams "waad", "fai" and "entropy", each (T,) a sample."""
        cfg = self.config
        layers = sampled_layers(model.config.num_hidden_layers, cfg.layers)
        parts, entropies = [], []
        for at in range(0, len(samples), BATCH):
            part = samples[at : at + BATCH]
            starts = [len(s.prompt_ids) for s in part]
            ends = [len(s.prompt_ids) + len(s.completion_ids) for s in part]
            maps = AttentionMaps(starts, ends, cfg.window, cfg.horizon_low, cfg.horizon_high)
            ids = torch.zeros(
                len(part), max(ends), dtype=torch.long
            )  # padded right: causal rows don't see it
            for row, s in zip(ids, part):
                row[: len(s.prompt_ids) + len(s.completion_ids)] = torch.tensor(
                    s.prompt_ids + s.completion_ids
                )
            with torch.no_grad(), watching(model, layers, maps):
                wanted = None if cfg.strategy == "entropy" else 1
                logits = model(
                    input_ids=ids.to(model.device), use_cache=False, logits_to_keep=wanted or 0
                ).logits
            if len(maps.spans) != len(layers):
                raise UserError(
                    "the model's attention does not go through transformers' attention functions",
                    given=type(model).__name__,
                    fix="choose a model of the Llama, Qwen, Mistral or a like family",
                )
            parts.append(maps)
            entropies += [
                np.zeros(e - s) if wanted else token_entropy(logits[i, s - 1 : e - 1])
                for i, (s, e) in enumerate(zip(starts, ends))
            ]
        tokens = np.array([int((m.ends - m.starts).sum()) for m in parts])
        spans = sum(m.head_spans() * n for m, n in zip(parts, tokens)) / tokens.sum()
        local, anchor = (np.arange(len(spans)),) * 2 if cfg.all_heads else split_heads(spans, cfg.head_share)
        short = [
            not future_rows(len(s.completion_ids), cfg.horizon_low, cfg.horizon_high).any() for s in samples
        ]
        self._seen = {
            "credit/short_responses": float(np.mean(short)),
            "credit/longest_span": float(spans.max()),
        }
        return {
            "waad": [w for m in parts for w in m.metric("waad", local)],
            "fai": [f for m in parts for f in m.metric("fai", anchor)],
            "entropy": entropies,
        }

    def credit(self, groups: list[list[Sample]], advantages: np.ndarray) -> list[np.ndarray]:
        """gamma_t A of every sample, (T,) each; the factors are kept as the stream "gamma"."""
        found = []
        for group, row in zip(groups, advantages):
            for sample, advantage in zip(group, row):
                factor = gamma(
                    self.config.strategy,
                    self.config,
                    waad=sample.streams["waad"],
                    fai=sample.streams["fai"],
                    entropy=sample.streams["entropy"],
                    rng=np.random.default_rng((self.seed, zlib.crc32(sample.id.encode()))),
                )
                sample.streams["gamma"] = factor
                found.append(shaped(float(advantage), factor, self.config))
        return found

    def after_step(self, learner: Any, step: int) -> dict[str, Any]:
        """What the last look showed."""
        return dict(self._seen)


def token_entropy(logits: torch.Tensor) -> np.ndarray:
    """Entropy (T,) in nats of the distributions that tokens were drawn from, from logits (T, V)."""
    logp = torch.log_softmax(logits.float(), -1)
    return -(logp.exp() * logp).sum(-1).double().cpu().numpy()
