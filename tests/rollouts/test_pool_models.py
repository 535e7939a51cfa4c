"""The pool with models: workers in Ray give the samples that the engine itself gives, bit for bit."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="needs the extra 'language'")

import torch

from rollouts.engine import EngineSpec
from rollouts.engine_transformers import TransformersEngine
from rollouts.pool import RolloutPool
from rollouts.samples import Request, Sample, SamplingParams
from rollouts.store import send
from rollouts.weights import pack
from tests.rollouts.tiny_model import tiny_llama

LONG = SamplingParams(max_new_tokens=50)


def requests(n: int, params: SamplingParams = LONG) -> list[Request]:
    prompts = ([2, 3, 4], [5, 6, 7, 8, 9], [10], [3, 3, 3, 3])
    return [Request(prompt_ids=p, n=n, seed=(1, i), group=i, params=params) for i, p in enumerate(prompts)]


def assert_same(a: list[Sample], b: list[Sample]) -> None:
    for x, y in zip(a, b, strict=True):
        assert (x.id, x.completion_ids, x.finish, x.version) == (
            y.id,
            y.completion_ids,
            y.finish,
            y.version,
        )
        assert np.array_equal(x.logp_rollout, y.logp_rollout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(folder, vocabulary=40, eos_token_id=None, initializer_range=0.2)
    return folder


@pytest.fixture(scope="module")
def pool(ray: Any, folder: Path) -> Iterator[RolloutPool]:
    pool = RolloutPool(EngineSpec(model_path=str(folder)), num_workers=2, cpus_per_worker=0)
    yield pool
    pool.close()


def test_workers_give_the_engine_s_own_samples(pool: RolloutPool, folder: Path, tmp_path: Path) -> None:
    engine = TransformersEngine(str(folder))
    own = [sample for answer in engine.generate(requests(2)) for sample in answer]
    assert_same(pool.sample(requests(2)), own)
    other = tiny_llama(tmp_path / "other", vocabulary=40, seed=5, eos_token_id=None)
    pool.publish(send(other.state_dict(), (0, 1)))
    engine.load_weights(pack(other.state_dict(), (0, 1)))
    changed = [sample for answer in engine.generate(requests(2)) for sample in answer]
    assert_same(pool.sample(requests(2)), changed)
    assert [s.completion_ids for s in own] != [s.completion_ids for s in changed]


def test_what_a_killed_worker_was_writing_is_written_again_the_same(pool: RolloutPool, ray: Any) -> None:
    many = requests(64)
    pool.sample(many)
    started = time.monotonic()
    undisturbed = pool.sample(many)
    took = time.monotonic() - started
    pid = ray.get(pool.workers[1].pid.remote())
    before = pool.metrics()["redrawn"]
    dead = []

    def kill() -> None:
        time.sleep(took / 4)
        os.kill(pid, signal.SIGKILL)
        dead.append(time.monotonic())

    killer = threading.Thread(target=kill)
    killer.start()
    again = pool.sample(many)
    assert dead
    assert pool.metrics()["redrawn"] == before + 1
    assert ray.get(pool.workers[1].pid.remote()) != pid
    assert_same(again, undisturbed)
    killer.join()


def test_tied_weights_are_sent_once_and_reach_both_places(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "a", tie_word_embeddings=True)
    other = tiny_llama(tmp_path / "b", seed=1, tie_word_embeddings=True)
    engine = TransformersEngine(str(tmp_path / "a"))
    named = {k: v for k, v in other.state_dict().items() if k != "lm_head.weight"}
    engine.load_weights(pack(named, (0, 1)))
    head, embedding = engine.model.lm_head.weight, engine.model.model.embed_tokens.weight
    assert head.data_ptr() == embedding.data_ptr()
    assert torch.equal(head, other.lm_head.weight)


def test_an_engine_of_less_precision_rounds_what_arrives(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path)
    engine = TransformersEngine(str(tmp_path), dtype="bfloat16")
    engine.load_weights(pack(model.state_dict(), (0, 1)))
    for name, value in engine.model.state_dict().items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, model.state_dict()[name].to(torch.bfloat16)), name


def test_new_weights_are_taken_over_without_a_copy_and_the_old_ones_are_not_touched(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path)
    engine = TransformersEngine(str(tmp_path))
    first, second = pack(model.state_dict(), (0, 1)), pack(model.state_dict(), (0, 2))
    for chunk in (*first.chunks, *second.chunks):
        chunk.flags.writeable = False
    for packed in (first, second):
        engine.load_weights(packed)
        at = engine.model.model.embed_tokens.weight.data_ptr()
        assert 0 <= at - packed.chunks[0].ctypes.data < packed.chunks[0].nbytes
    first.verify()


def test_an_adapter_is_taken_off_again_by_the_next_publication(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path)
    engine = TransformersEngine(str(tmp_path))
    q, v = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"
    clean = {name: value.clone() for name, value in model.state_dict().items()}

    def publish(module: str, step: int) -> dict[str, torch.Tensor]:
        out, width = clean[f"{module}.weight"].shape
        adapter = {f"{module}.lora_A": torch.ones(1, width), f"{module}.lora_B": torch.ones(out, 1)}
        engine.load_weights(pack(adapter, (0, step), "lora", {"scaling": {module: 0.5}}))
        return engine.model.state_dict()

    assert torch.equal(publish(q, 1)[f"{q}.weight"], clean[f"{q}.weight"] + 0.5)
    now = publish(v, 2)
    assert torch.equal(now[f"{v}.weight"], clean[f"{v}.weight"] + 0.5)
    assert torch.equal(now[f"{q}.weight"], clean[f"{q}.weight"])
    engine.load_weights(pack({n: 2 * t for n, t in clean.items()}, (0, 3)))
    assert torch.equal(publish(q, 4)[f"{q}.weight"], 2 * clean[f"{q}.weight"] + 0.5)
    assert torch.equal(engine.model.state_dict()[f"{v}.weight"], 2 * clean[f"{v}.weight"])
