"""Generation with plain transformers: one batched decoding loop with a KV cache, on CPU or GPU.

Noise is one uniform number a token and sample, turned into a token by the inverse of the cumulative
distribution, so the draws of a sample do not depend on its neighbours in the batch; its logits do, in
their last bits, unless `deterministic` (then each request is a batch of its own).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging as transformers_logging

from envs.errors import UserError, nearest
from rollouts.engine import check_fit, check_prompt
from rollouts.samples import Edit, Request, Sample, SamplingParams, Version, sample_id
from rollouts.weights import PackedWeights, lora_delta

# Its new name is not known to every release that we support.
warnings.filterwarnings("ignore", message="`past_key_values` is deprecated")


class TransformersEngine:
    """See the module. `max_batch_sequences` bounds how many completions are decoded at once."""

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str = "float32",
        deterministic: bool = True,
        max_batch_sequences: int = 64,
        attn_implementation: str = "sdpa",
        trust_remote_code: bool = False,
    ) -> None:
        torch.set_num_threads(1 if deterministic else torch.get_num_threads())
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        transformers_logging.disable_progress_bar()
        model: Any = AutoModelForCausalLM.from_pretrained(
            model_path,
            dtype=getattr(torch, dtype),
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
        )
        self.model = model.to(self.device).eval().requires_grad_(False)
        self.deterministic, self.max_batch_sequences = deterministic, max_batch_sequences
        self.batches_callers = not deterministic
        self.version: Version = (0, 0)
        self.eos_ids = end_tokens(self.model)
        self.window = getattr(self.model.config, "max_position_embeddings", None)
        self._base: dict[str, torch.Tensor] = {}  # weights under an adapter, before it

    # --- weights

    def load_weights(self, packed: PackedWeights) -> None:
        """The model's tensors become views of what arrived, or copies where dtype or device differ.

        kind "lora": adapters are added to the weights they sit on, in float32. Raises WeightsError when
        names or shapes are not the model's; then nothing changed.
        """
        own = dict(self.model.named_parameters(remove_duplicate=False))
        own |= dict(self.model.named_buffers(remove_duplicate=False))
        tensors = packed.tensors()
        if packed.kind == "lora":
            delta = lora_delta(tensors, packed.meta["scaling"])
            check_fit(delta, own)
            for name in delta:
                self._base.setdefault(name, own[name].data)
            tensors = dict(self._base)
            for name, change in delta.items():
                tensors[name] = self._base[name].float() + change.to(self.device)
        else:
            check_fit(tensors, own)
            self._base = {}
        for name, tensor in tensors.items():
            # Never copied into: what is there may be another version's read-only memory.
            own[name].data = tensor.to(self.device, own[name].dtype)
        self.version = packed.version

    # --- generation

    @torch.no_grad()
    def generate(self, requests: list[Request]) -> list[list[Sample]]:
        """See `Engine.generate`. Raises UserError for a prompt that does not fit the model's window."""
        for request in requests:
            self._check(request)
        answers: list[list[Sample]] = [[] for _ in requests]
        for batch in self._batches(requests):
            with self._edited(requests[batch[0]].edit):
                rows = [_Row(request=requests[i], index=j) for i in batch for j in range(requests[i].n)]
                for start in range(0, len(rows), self.max_batch_sequences):
                    self._decode(rows[start : start + self.max_batch_sequences])
            at = 0
            for i in batch:
                answers[i] = [self._sample(row) for row in rows[at : at + requests[i].n]]
                at += requests[i].n
                for name in requests[i].capture:
                    self._capture(requests[i], answers[i], name)
        return answers

    def _check(self, request: Request) -> None:
        request.check()
        check_prompt(request, self.window, self.model.get_input_embeddings().num_embeddings)
        if not (request.capture or request.edit):
            return
        modules = dict(self.model.named_modules())
        for name in [*request.capture, *(edit.module for edit in request.edit)]:
            if name not in modules:
                raise UserError(f"the model has no module '{name}'", allowed=nearest(name, modules))

    def _batches(self, requests: list[Request]) -> Iterator[list[int]]:
        """Which requests are decoded together: each alone when deterministic, else those of equal edits."""
        if self.deterministic:
            yield from ([i] for i in range(len(requests)))
            return
        by_edit: dict[Any, list[int]] = {}
        for i, request in enumerate(requests):
            by_edit.setdefault(tuple(edit.key() for edit in request.edit), []).append(i)
        for same in by_edit.values():
            batch: list[int] = []
            for i in same:
                if batch and sum(requests[j].n for j in [*batch, i]) > self.max_batch_sequences:
                    yield batch
                    batch = []
                batch.append(i)
            yield batch

    def _decode(self, rows: list[_Row]) -> None:
        """Fill the rows' tokens. The prompt of a request goes through the model once, whatever n is."""
        prompts: list[Request] = []
        for row in rows:
            if not prompts or prompts[-1] is not row.request:
                prompts.append(row.request)
        longest = max(len(r.prompt_ids) for r in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, request in enumerate(prompts):
            ids[i, longest - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[i, longest - len(request.prompt_ids) :] = 1
        ids, mask = ids.to(self.device), mask.to(self.device)
        position = (mask.cumsum(-1) - 1).clamp(min=0)
        padded = bool((mask == 0).any())
        cache = DynamicCache(config=self.model.config)
        out = self.model(
            input_ids=ids,
            attention_mask=mask if padded else None,
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        source = torch.tensor(
            [next(i for i, p in enumerate(prompts) if p is row.request) for row in rows], device=self.device
        )
        cache.batch_select_indices(source)
        logits, mask, position = out.logits[source, -1], mask[source], position[source, -1:]
        active = list(rows)
        draw = _Sampler(active, self.device)
        while True:
            tokens = draw(logits, active)
            keep = [i for i, row in enumerate(active) if not row.ended(self.eos_ids)]
            if not keep:
                return
            if len(keep) < len(active):
                chosen = torch.tensor(keep, device=self.device)
                cache.batch_select_indices(chosen)
                active = [active[i] for i in keep]
                tokens, mask, position = tokens[chosen], mask[chosen], position[chosen]
                draw = _Sampler(active, self.device)
            mask = torch.cat([mask, mask.new_ones(len(active), 1)], 1)
            position = position + 1
            logits = self.model(
                input_ids=tokens[:, None],
                attention_mask=mask if padded else None,
                position_ids=position,
                past_key_values=cache,
                use_cache=True,
            ).logits[:, -1]

    def _sample(self, row: _Row) -> Sample:
        streams = {}
        if row.request.top_logprobs:
            streams = {"top_ids": np.stack(row.top_ids), "top_logprobs": np.stack(row.top_logprobs)}
        return Sample(
            id=sample_id(row.request, row.index),
            group=row.request.group,
            index=row.index,
            prompt_ids=list(row.request.prompt_ids),
            completion_ids=row.tokens,
            finish=row.finish,
            logp_rollout=np.array(row.logp, np.float32),
            version=self.version,
            streams=streams,
            meta=dict(row.request.meta),
        )

    # --- activations

    def _capture(self, request: Request, samples: list[Sample], name: str) -> None:
        """One more pass over prompt and completion; the module's output at the completion's own tokens."""
        kept: list[torch.Tensor] = []
        module = self.model.get_submodule(name)
        with self._edited(request.edit):
            handle = module.register_forward_hook(lambda m, args, out: kept.append(_tensor_of(out)))
            try:
                for sample in samples:
                    ids = torch.tensor([sample.prompt_ids + sample.completion_ids], device=self.device)
                    self.model(input_ids=ids, use_cache=False, logits_to_keep=1)
                    at = kept.pop()[0, len(sample.prompt_ids) :]
                    sample.streams[f"capture/{name}"] = at.float().cpu().numpy()
            finally:
                handle.remove()

    @contextmanager
    def _edited(self, edits: tuple[Edit, ...]) -> Iterator[None]:
        handles = [
            self.model.get_submodule(edit.module).register_forward_hook(_editing_hook(edit, self.device))
            for edit in edits
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def end_tokens(model: Any) -> frozenset[int]:
    """Token ids that end a completion, by the model's generation config or its config; may be empty."""
    for config in (getattr(model, "generation_config", None), model.config):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return frozenset([eos] if isinstance(eos, int) else eos)
    return frozenset()


@dataclass
class _Row:
    """One completion while it is being written."""

    request: Request
    index: int
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    top_ids: list[np.ndarray] = field(default_factory=list)
    top_logprobs: list[np.ndarray] = field(default_factory=list)
    finish: str = ""
    noise: np.ndarray | None = None  # (max_new_tokens,) uniform

    def uniform(self) -> float:
        """The noise of the next token."""
        if self.noise is None:
            generator = self.request.generator(self.index)
            self.noise = generator.random(self.request.params.max_new_tokens)
        return float(self.noise[len(self.tokens)])

    def ended(self, eos_ids: frozenset[int]) -> bool:
        """Whether the newest token was the last one; notes why."""
        params = self.request.params
        if self.tokens[-1] in eos_ids:
            self.finish = "eos"
        elif self.tokens[-1] in params.stop_ids:
            self.finish = "stop"
        elif len(self.tokens) == params.max_new_tokens:
            self.finish = "length"
        return bool(self.finish)


class _Sampler:
    """Draws the next token of every row and notes it with its log-probability."""

    def __init__(self, rows: list[_Row], device: torch.device) -> None:
        params = [row.request.params for row in rows]
        self.greedy = torch.tensor([p.temperature == 0 for p in params], device=device)
        self.any_greedy = any(p.temperature == 0 for p in params)
        scale = [p.temperature if p.temperature else 1.0 for p in params]
        self.temperature = torch.tensor(scale, device=device)[:, None]
        self.cut = list(params) if any(p.top_k or p.top_p < 1 for p in params) else None
        self.top = max(row.request.top_logprobs for row in rows)

    def __call__(self, logits: torch.Tensor, rows: list[_Row]) -> torch.Tensor:
        logp = processed_logprobs(logits, self.temperature, self.cut)
        cumulative = logp.double().exp().cumsum(-1)
        noise = torch.tensor([row.uniform() for row in rows], dtype=torch.float64, device=logits.device)
        drawn = torch.searchsorted(cumulative, noise[:, None] * cumulative[:, -1:], right=True)[:, 0]
        drawn = drawn.clamp(max=logits.shape[-1] - 1)
        chosen = logp.gather(-1, drawn[:, None])[:, 0]
        if self.any_greedy:
            drawn = torch.where(self.greedy, logits.argmax(-1), drawn)
            chosen = torch.where(self.greedy, torch.zeros_like(chosen), chosen)
        if self.top:
            values, indices = logp.topk(self.top)
        for i, (row, token, value) in enumerate(zip(rows, drawn.tolist(), chosen.tolist())):
            row.tokens.append(token)
            row.logp.append(value)
            if row.request.top_logprobs:
                row.top_ids.append(indices[i, : row.request.top_logprobs].cpu().numpy())
                row.top_logprobs.append(values[i, : row.request.top_logprobs].cpu().numpy())
        return drawn


def processed_logprobs(
    logits: torch.Tensor, temperature: torch.Tensor, cut: list[SamplingParams] | None = None
) -> torch.Tensor:
    """Log-probabilities (B, V) float32 of the distribution that is drawn from; -inf where it is cut.

    `temperature` (B, 1). Top-k first, then the smallest set of tokens whose probability reaches top-p,
    renormalised, as Hugging Face's and vLLM's samplers do.
    """
    logp = torch.log_softmax(logits.float() / temperature, -1)
    if cut is None:
        return logp
    size = logits.shape[-1]
    ordered, order = logp.sort(-1, descending=True)
    k = torch.tensor([p.top_k or size for p in cut], device=logits.device)[:, None]
    rank = torch.arange(size, device=logits.device)[None]
    ordered = ordered.masked_fill(rank >= k, -torch.inf)
    ordered = torch.log_softmax(ordered, -1)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    p = torch.tensor([p.top_p for p in cut], device=logits.device)[:, None]
    ordered = ordered.masked_fill((before >= p) & (rank > 0), -torch.inf)
    ordered = torch.log_softmax(ordered, -1)
    return torch.empty_like(logp).scatter_(-1, order, ordered)


def _tensor_of(out: Any) -> torch.Tensor:
    """A module's hidden states, whether it returns them alone or first of several."""
    return out[0] if isinstance(out, tuple) else out


def _editing_hook(edit: Edit, device: torch.device) -> Callable[..., Any]:
    vector = torch.from_numpy(np.asarray(edit.vector, np.float32)).to(device)

    def hook(module: Any, args: Any, out: Any) -> Any:
        hidden = _tensor_of(out)
        v = vector.to(hidden.dtype)
        if edit.op == "add":
            changed = hidden + v
        elif edit.op == "set":
            changed = v.expand_as(hidden)
        else:
            changed = hidden - (hidden @ v)[..., None] * v / (v @ v)
        return (changed, *out[1:]) if isinstance(out, tuple) else changed

    return hook
