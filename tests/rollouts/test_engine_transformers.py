"""The transformers engine against full forward passes and enumerated distributions."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="needs the extra 'language'")

import torch

from envs.errors import UserError
from rollouts.engine import EngineSpec, make_engine
from rollouts.engine_transformers import TransformersEngine, processed_logprobs
from rollouts.samples import Edit, Request, Sample, SamplingParams
from rollouts.weights import WeightsError, pack
from tests.rollouts.tiny_model import EOS, tiny_llama

PROMPTS = [[2, 3, 4], [5, 6, 7, 8, 9], [10], [3, 3, 3, 3]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return tiny_llama(folder)


def requests(params: SamplingParams, n: int = 4, **more: Any) -> list[Request]:
    return [
        Request(prompt_ids=p, n=n, seed=(7, i), group=i, params=params, **more) for i, p in enumerate(PROMPTS)
    ]


def forward(model: Any, sample: Sample) -> torch.Tensor:
    """Logits (T, V) before each token of the completion, from one pass over the whole text."""
    ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
    with torch.no_grad():
        return model(ids).logits[0, len(sample.prompt_ids) - 1 : -1]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_a_full_forward_pass(
    model: Any, folder: Path, deterministic: bool, temperature: float
) -> None:
    engine = TransformersEngine(str(folder), deterministic=deterministic)
    params = SamplingParams(max_new_tokens=9, temperature=temperature)
    lengths = set()
    for answer in engine.generate(requests(params)):
        for sample in answer:
            logp = torch.log_softmax(forward(model, sample) / temperature, -1)
            by_hand = logp.gather(1, torch.tensor(sample.completion_ids)[:, None])[:, 0].numpy()
            assert sample.logp_rollout == pytest.approx(by_hand, abs=2e-5)
            lengths.add(len(sample.completion_ids))
            ended = sample.completion_ids[-1] == EOS
            assert sample.finish == ("eos" if ended else "length")
            assert ended or len(sample.completion_ids) == 9
            assert EOS not in sample.completion_ids[:-1]
    assert len(lengths) > 2  # rows ended at different times


def test_batched_draws_are_single_draws(model: Any, folder: Path) -> None:
    params = SamplingParams(max_new_tokens=9)
    together = TransformersEngine(str(folder), deterministic=False).generate(requests(params))
    alone = TransformersEngine(str(folder)).generate(requests(params))
    small = TransformersEngine(str(folder), deterministic=False, max_batch_sequences=3).generate(
        requests(params)
    )
    for answers in zip(together, alone, small, strict=True):
        for a, b, c in zip(*answers, strict=True):
            assert a.completion_ids == b.completion_ids == c.completion_ids
            assert a.logp_rollout == pytest.approx(b.logp_rollout, abs=2e-5)


def test_deterministic_samples_do_not_depend_on_their_company(folder: Path, model: Any) -> None:
    engine = TransformersEngine(str(folder))
    every = requests(SamplingParams(max_new_tokens=9))
    whole = engine.generate(every)
    last = engine.generate(every[2:3])[0]
    for a, b in zip(whole[2], last, strict=True):
        assert a.completion_ids == b.completion_ids
        assert np.array_equal(a.logp_rollout, b.logp_rollout)


def test_samples_follow_the_enumerated_distribution(model: Any, folder: Path) -> None:
    """Chi-square over all completions of two tokens, 4,000 draws."""
    n, params = 4000, SamplingParams(max_new_tokens=2, temperature=1.3)
    engine = TransformersEngine(str(folder), max_batch_sequences=4000)
    counts: dict[tuple[int, ...], int] = {}
    for sample in engine.generate([Request(prompt_ids=[2, 3, 4], n=n, params=params)])[0]:
        key = tuple(sample.completion_ids)
        counts[key] = counts.get(key, 0) + 1
    expected: dict[tuple[int, ...], float] = {}
    with torch.no_grad():
        first = torch.softmax(model(torch.tensor([[2, 3, 4]])).logits[0, -1].double() / 1.3, -1)
        for a in range(12):
            if a == EOS:
                expected[(a,)] = float(first[a])
                continue
            second = torch.softmax(model(torch.tensor([[2, 3, 4, a]])).logits[0, -1].double() / 1.3, -1)
            for b in range(12):
                expected[(a, b)] = float(first[a] * second[b])
    assert sum(expected.values()) == pytest.approx(1.0)
    assert set(counts) <= set(expected)
    frequent = {k: p for k, p in expected.items() if n * p >= 5}
    chi = sum((counts.get(k, 0) - n * p) ** 2 / (n * p) for k, p in frequent.items())
    rest, rest_p = n - sum(counts.get(k, 0) for k in frequent), 1 - sum(frequent.values())
    chi += (rest - n * rest_p) ** 2 / (n * rest_p)
    degrees = len(frequent)
    assert chi < degrees + 4 * np.sqrt(2 * degrees), (chi, degrees)


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.6), (5, 0.5), (1, 1.0)])
def test_cuts_renormalise_what_is_left(top_k: int, top_p: float) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -3.0]])
    params = SamplingParams(top_k=top_k, top_p=top_p)
    got = processed_logprobs(logits, torch.tensor([[0.8]]), [params])[0].exp().tolist()
    p = np.exp(logits[0].numpy() / 0.8)
    p /= p.sum()
    keep = np.arange(6) < (top_k or 6)  # the logits are in order already
    p = np.where(keep, p, 0) / p[keep].sum()
    inside = [i for i in range(6) if i == 0 or p[:i].sum() < top_p]
    by_hand = np.array([p[i] if i in inside else 0.0 for i in range(6)])
    assert got == pytest.approx(by_hand / by_hand.sum(), abs=1e-6)


def test_cut_samples_carry_the_log_probs_of_the_cut_distribution(model: Any, folder: Path) -> None:
    params = SamplingParams(max_new_tokens=6, top_k=4, top_p=0.8, temperature=0.9)
    for answer in TransformersEngine(str(folder), deterministic=False).generate(requests(params)):
        for sample in answer:
            logits = forward(model, sample)
            logp = processed_logprobs(logits, torch.full((len(logits), 1), 0.9), [params] * len(logits))
            by_hand = logp.gather(1, torch.tensor(sample.completion_ids)[:, None])[:, 0].numpy()
            assert np.isfinite(by_hand).all()
            assert sample.logp_rollout == pytest.approx(by_hand, abs=2e-5)


def test_greedy_takes_the_best_and_is_certain(model: Any, folder: Path) -> None:
    greedy = SamplingParams(max_new_tokens=5, temperature=0)
    mixed = [*requests(greedy, n=1), *requests(SamplingParams(max_new_tokens=5), n=1)]
    for answer in TransformersEngine(str(folder), deterministic=False).generate(mixed)[:4]:
        sample = answer[0]
        assert sample.completion_ids == forward(model, sample).argmax(-1).tolist()
        assert not sample.logp_rollout.any()


def test_stop_tokens_and_top_log_probs(model: Any, folder: Path) -> None:
    params = SamplingParams(max_new_tokens=12, stop_ids=(2, 5))
    seen = set()
    for answer in TransformersEngine(str(folder)).generate(requests(params, n=8, top_logprobs=3)):
        for sample in answer:
            seen.add(sample.finish)
            assert not {2, 5} & set(sample.completion_ids[:-1])
            assert (sample.finish == "stop") == (sample.completion_ids[-1] in (2, 5))
            logp = torch.log_softmax(forward(model, sample), -1).topk(3)
            assert sample.streams["top_logprobs"] == pytest.approx(logp.values.numpy(), abs=2e-5)
            assert sample.streams["top_ids"].shape == (len(sample.completion_ids), 3)
    assert "stop" in seen


def test_captured_activations_are_the_module_s_outputs(model: Any, folder: Path) -> None:
    name = "model.layers.0"
    params = SamplingParams(max_new_tokens=6)
    sample = TransformersEngine(str(folder)).generate(requests(params, n=1, capture=(name,)))[1][0]
    ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
    with torch.no_grad():
        hidden = model.model(ids, output_hidden_states=True).hidden_states[1][0, len(sample.prompt_ids) :]
    assert sample.streams[f"capture/{name}"] == pytest.approx(hidden.numpy(), abs=1e-5)


@pytest.mark.parametrize("op", Edit.OPS)
def test_edits_change_the_module_s_output(model: Any, folder: Path, op: str) -> None:
    vector = np.linspace(-2, 2, 16).astype(np.float32)
    edit = Edit(module="model.layers.0", vector=vector, op=op)
    params = SamplingParams(max_new_tokens=6)
    engine = TransformersEngine(str(folder), deterministic=False)
    edited, plain = requests(params, n=2, edit=(edit,)), requests(params, n=2)
    answers = engine.generate([*edited, *plain])
    v = torch.from_numpy(vector)

    def by_hand(module: Any, args: Any, out: Any) -> Any:
        h = out[0] if isinstance(out, tuple) else out
        new = {"add": h + v, "set": v.expand_as(h), "remove": h - (h @ v)[..., None] * v / (v @ v)}[op]
        return (new, *out[1:]) if isinstance(out, tuple) else new

    for sample in itertools.chain(*answers[:4]):
        handle = model.model.layers[0].register_forward_hook(by_hand)
        logp = torch.log_softmax(forward(model, sample), -1)
        handle.remove()
        expected = logp.gather(1, torch.tensor(sample.completion_ids)[:, None])[:, 0].numpy()
        assert sample.logp_rollout == pytest.approx(expected, abs=2e-5)
    for a, b in zip(itertools.chain(*answers[4:]), itertools.chain(*engine.generate(plain)), strict=True):
        assert a.completion_ids == b.completion_ids


def test_new_weights_are_used_and_numbered(folder: Path, tmp_path: Path, model: Any) -> None:
    other = tiny_llama(tmp_path / "other", seed=1)
    engine = TransformersEngine(str(folder))
    engine.load_weights(pack(other.state_dict(), (0, 3)))
    for answer in engine.generate(requests(SamplingParams(max_new_tokens=5))):
        for sample in answer:
            assert sample.version == (0, 3)
            logp = torch.log_softmax(forward(other, sample), -1)
            expected = logp.gather(1, torch.tensor(sample.completion_ids)[:, None])[:, 0].numpy()
            assert sample.logp_rollout == pytest.approx(expected, abs=2e-5)


def test_adapters_are_the_merged_weights(folder: Path, model: Any) -> None:
    peft = pytest.importorskip("peft")
    from trainers.policy import lora_publication

    fresh = type(model).from_pretrained(folder)
    adapted = peft.get_peft_model(
        fresh, peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"])
    )
    torch.manual_seed(3)
    for name, p in adapted.named_parameters():
        if "lora_" in name:
            p.data.normal_(0, 0.3)
    named, kind, meta = lora_publication(adapted)
    engine = TransformersEngine(str(folder))
    for step in (1, 2):  # twice: the second must not be added to the first
        engine.load_weights(pack(named, (0, step), kind, meta))
    sample = engine.generate(requests(SamplingParams(max_new_tokens=6), n=1))[1][0]
    merged = adapted.merge_and_unload().eval()
    logp = torch.log_softmax(forward(merged, sample), -1)
    expected = logp.gather(1, torch.tensor(sample.completion_ids)[:, None])[:, 0].numpy()
    assert sample.logp_rollout == pytest.approx(expected, abs=2e-5)


def test_bad_requests_are_told(folder: Path, model: Any) -> None:
    engine = TransformersEngine(str(folder))
    few = SamplingParams(max_new_tokens=4)
    with pytest.raises(
        UserError, match=r"do not fit the model's window[\s\S]*60 prompt tokens \+ 8[\s\S]*64 tokens"
    ):
        engine.generate([Request(prompt_ids=[2] * 60, params=SamplingParams(max_new_tokens=8))])
    with pytest.raises(UserError, match="at least one token"):
        engine.generate([Request(prompt_ids=[])])
    with pytest.raises(UserError, match=r"no module 'model.layer.0'[\s\S]*model.layers.0"):
        engine.generate([Request(prompt_ids=[2], params=few, capture=("model.layer.0",))])
    with pytest.raises(UserError, match="outside the vocabulary"):
        engine.generate([Request(prompt_ids=[2, 12], params=few)])
    with pytest.raises(UserError, match="temperature"):
        engine.generate([Request(prompt_ids=[2], params=SamplingParams(temperature=-1))])
    with pytest.raises(WeightsError, match="'nobody'"):
        engine.load_weights(pack({"nobody": torch.zeros(2)}, (0, 1)))
    with pytest.raises(UserError, match=r"unknown engine 'transformer'[\s\S]*transformers"):
        make_engine(EngineSpec(model_path=str(folder), kind="transformer"))
