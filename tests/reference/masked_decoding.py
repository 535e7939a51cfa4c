"""Slow, obvious oracles for masked diffusion: decoding step by step, and joints over all outputs."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import torch


def tiny_llama(
    vocabulary: int, dtype: torch.dtype = torch.float64, seed: int = 0, spread: float = 4.0
) -> Any:
    """A Llama of random weights with peaked outputs; its last token is the mask."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
        eos_token_id=1, bos_token_id=None, mask_token_id=vocabulary - 1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype).eval()
    for parameter in model.parameters():
        parameter.data.mul_(spread if parameter.dim() > 1 else 1.0)
    return model


def plain_logits(model: Any, ids: list[int], positions: list[int], sees: list[list[int]]) -> torch.Tensor:
    """Logits (Q, V) of one sequence; sees[i]: the indices that token i attends to."""
    size = len(ids)
    bias = torch.full((1, 1, size, size), torch.finfo(model.dtype).min, dtype=model.dtype)
    for row, columns in enumerate(sees):
        bias[0, 0, row, columns] = 0
    out = model(
        input_ids=torch.tensor([ids]), attention_mask=bias,
        position_ids=torch.tensor([positions]), use_cache=False,
    )  # fmt: skip
    return out.logits[0]


def log_softmax_without(logits: torch.Tensor, banned: int, temperature: float) -> torch.Tensor:
    """log softmax over all tokens but one."""
    scaled = logits.clone()
    scaled[banned] = -torch.inf
    return torch.log_softmax(scaled / temperature, 0)


def any_order_stepwise(
    model: Any, prompt: list[int], ids: list[int], step: list[int], mask_id: int, temperature: float = 1.0
) -> list[float]:
    """Log-probability of each token, from the tokens that were there when its step came and no others.

    For every position a forward of its own: prompt, tokens of earlier steps in the order (step, position),
    and the mask at the position.
    """
    found = []
    for at in range(len(ids)):
        earlier = sorted((s, j) for j, s in enumerate(step) if s < step[at])
        places = [j for _, j in earlier]
        p = len(prompt)
        sequence = [*prompt, *(ids[j] for j in places), mask_id]
        positions = [*range(p), *(p + j for j in places), p + at]
        sees = [list(range(p)) for _ in range(p)]
        sees += [[*range(p), *range(p, p + i + 1)] for i in range(len(places))]
        sees += [list(range(p + len(places) + 1))]
        logits = plain_logits(model, sequence, positions, sees)[-1]
        found.append(float(log_softmax_without(logits, mask_id, temperature)[ids[at]]))
    return found


def full_stepwise(
    model: Any, prompt: list[int], ids: list[int], step: list[int], mask_id: int, temperature: float = 1.0
) -> list[float]:
    """The same for a model in which everything sees everything: a forward per position of the state then."""
    found = []
    for at in range(len(ids)):
        state = [i if s < step[at] else mask_id for i, s in zip(ids, step)]
        size = len(prompt) + len(ids)
        logits = plain_logits(model, prompt + state, list(range(size)), [list(range(size))] * size)
        row = log_softmax_without(logits[len(prompt) + at], mask_id, temperature)
        found.append(float(row[ids[at]]))
    return found


class Joint:
    """A random joint p over all outputs of L tokens out of V; conditionals by summing over it."""

    def __init__(self, vocabulary: int, length: int, seed: int, sharp: float = 1.5) -> None:
        self.v, self.l = vocabulary, length
        weights = np.exp(sharp * np.random.default_rng(seed).normal(size=(vocabulary,) * length))
        self.p = weights / weights.sum()
        self._marginal = functools.cache(self._sum)
        self.outputs = list(itertools.product(range(vocabulary), repeat=length))

    def marginal(self, known: dict[int, int], at: int) -> np.ndarray:
        """p(x^at | known), (V,)."""
        return self._marginal(tuple(sorted(known.items())), at)

    def _sum(self, facts: tuple[tuple[int, int], ...], at: int) -> np.ndarray:
        known = dict(facts)
        index = tuple(known.get(i, slice(None)) for i in range(self.l))
        rest = [i for i in range(self.l) if i not in known]
        table = self.p[index]
        return table.sum(tuple(n for n, i in enumerate(rest) if i != at)) / table.sum()

    def logits(self, state: torch.Tensor, mask_id: int) -> torch.Tensor:
        """As a model gives them: (B, L, V + 1) of a state (B, L); 0 for the mask token (to be banned)."""
        out = torch.zeros(*state.shape, self.v + 1, dtype=torch.float64)
        for b, row in enumerate(state.tolist()):
            known = {i: x for i, x in enumerate(row) if x != mask_id}
            for at in range(self.l):
                if at not in known:
                    out[b, at, : self.v] = torch.from_numpy(np.log(self.marginal(known, at)))
        return out

    def entropy(self, places: list[int], known: dict[int, int]) -> float:
        """H(x^places | known) in nats."""
        index = tuple(known.get(i, slice(None)) for i in range(self.l))
        rest = [i for i in range(self.l) if i not in known]
        table = self.p[index]
        table = table.sum(tuple(n for n, i in enumerate(rest) if i not in places)) / table.sum()
        return float(-(table * np.log(table)).sum())

    def total_correlation(self, order: list[int], segments: int) -> float:
        """sum_n E[ sum_{l in S_n} H(x^l | z_n) - H(x^{S_n} | z_n) ], one token a step in `order`."""
        size, total = self.l // segments, 0.0
        for n in range(segments):
            before, mine = order[: n * size], order[n * size : (n + 1) * size]
            for values in itertools.product(range(self.v), repeat=len(before)):
                known = dict(zip(before, values))
                index = tuple(known.get(i, slice(None)) for i in range(self.l))
                weight = float(self.p[index].sum())
                alone = sum(self.entropy([place], known) for place in mine)
                total += weight * (alone - self.entropy(mine, known))
        return total
