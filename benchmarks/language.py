"""Language training's parts against what they are made of, each pair in one run.

    python benchmarks/language.py pool [--repeats 9]    # the pool against its engine called directly
    python benchmarks/language.py sync [--repeats 7]    # 1 GB of weights to a worker against a memcpy of 1 GB

The arms of a pair take turns, so that a slow minute of the machine hits both; reported are medians, of ratios
within a turn, and CPU time beside wall time. Results are printed as one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path[:] = [str(CHECKOUT), *(p for p in sys.path if Path(p).resolve() != CHECKOUT / "benchmarks")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

GB = 1 << 30
WARM_UPS = 4  # publications until the object store's pages have all been touched


def pool(repeats: int) -> dict[str, Any]:
    """Tokens a second of a pool with one worker, and of its engine called directly, at steps of about 1 s."""
    import ray

    from rollouts.engine import EngineSpec, make_engine
    from rollouts.pool import RolloutPool
    from rollouts.samples import Request, SamplingParams
    from trainers.ray_cluster import local_cluster

    params = SamplingParams(max_new_tokens=48)
    requests = [Request(prompt_ids=list(range(2, 34)), n=8, seed=(0, i), params=params) for i in range(4)]
    with tempfile.TemporaryDirectory() as folder, local_cluster(1):
        random_llama(folder, hidden=256, layers=4, vocabulary=2048)
        spec = EngineSpec(model_path=folder)
        engine, shared = make_engine(spec), RolloutPool(spec, num_workers=1)
        pid = ray.get(shared.workers[0].pid.remote())
        direct, pooled = Times(), Times()
        for _ in range(repeats + 1):
            answers = direct.measure(lambda: engine.generate(requests), os.getpid())
            samples = pooled.measure(lambda: shared.sample(requests), os.getpid(), pid)
            tokens = [sample.completion_ids for answer in answers for sample in answer]
            assert tokens == [sample.completion_ids for sample in samples]
        shared.close()
    direct.forget(1)
    pooled.forget(1)
    count = sum(map(len, tokens))
    return {
        "tokens": count,
        "direct": direct.summary(),
        "pool": pooled.summary(),
        "pool_tokens_per_s": count / statistics.median(pooled.wall),
        "tokens_per_s_ratio": statistics.median(a / b for a, b in zip(direct.wall, pooled.wall)),
        "tokens_per_cpu_s_ratio": sum(direct.cpu) / sum(pooled.cpu),
    }


def sync(repeats: int) -> dict[str, Any]:
    """1 GB from a learner's tensors to a verified, active version in a worker: few tensors, thousands."""
    from trainers.ray_cluster import local_cluster

    with local_cluster(1, int(3.5 * GB)):
        return {
            "few large tensors": sync_one(repeats, hidden=4096, layers=2),
            "thousands of small ones": sync_one(repeats, hidden=256, layers=585),
        }


def sync_one(repeats: int, hidden: int, layers: int) -> dict[str, Any]:
    """Milliseconds a GB of a memcpy between touched pages, and of `send` and `publish`."""
    import numpy as np
    import ray

    from rollouts.engine import EngineSpec
    from rollouts.pool import RolloutPool
    from rollouts.store import send

    source, target = np.ones(GB, np.uint8), np.zeros(GB, np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        named = random_llama(folder, hidden=hidden, layers=layers, vocabulary=64)
        shared = RolloutPool(EngineSpec(model_path=folder), num_workers=1)
        pid = ray.get(shared.workers[0].pid.remote())
        size = sum(tensor.nbytes for tensor in named.values())
        copied, synced = Times(), Times(GB / size)
        versions = iter(range(1, WARM_UPS + repeats + 1))
        for _ in range(WARM_UPS + repeats):
            copied.measure(lambda: np.copyto(target, source), os.getpid())
            synced.measure(lambda: shared.publish(send(named, (0, next(versions)))), os.getpid(), pid)
        shared.close()
    first = synced.wall[0]
    copied.forget(WARM_UPS)
    synced.forget(WARM_UPS)
    return {
        "tensors": len(named),
        "bytes": size,
        "memcpy": copied.summary(),
        "sync": synced.summary(),
        "first_sync_ms": 1e3 * first,
        "ratio": statistics.median(s / c for s, c in zip(synced.wall, copied.wall)),
        "cpu_ratio": sum(synced.cpu) / sum(copied.cpu),
    }


def random_llama(folder: str, hidden: int, layers: int, vocabulary: int) -> dict[str, Any]:
    """Save a Llama with random weights and no end token; its tensors by name."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return dict(model.state_dict())


class Times:
    """Wall and CPU seconds of repeated work, the latter of all processes that take part."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def measure(self, work: Callable[[], Any], *pids: int) -> Any:
        """Do it and note its times; what it returns."""
        import psutil

        processes = [psutil.Process(pid) for pid in pids]
        before, started = [p.cpu_times() for p in processes], time.perf_counter()
        result = work()
        self.wall.append(self.scale * (time.perf_counter() - started))
        after = [p.cpu_times() for p in processes]
        used = sum(b.user + b.system - a.user - a.system for a, b in zip(before, after))
        self.cpu.append(self.scale * used)
        return result

    def forget(self, count: int) -> None:
        """Leave the first measurements out."""
        del self.wall[:count], self.cpu[:count]

    def summary(self) -> dict[str, float]:
        """Milliseconds."""
        return {
            "wall_ms": 1e3 * statistics.median(self.wall),
            "best_wall_ms": 1e3 * min(self.wall),
            "cpu_ms": 1e3 * statistics.mean(self.cpu),
        }


COMMANDS: dict[str, Callable[[int], dict[str, Any]]] = {"pool": pool, "sync": sync}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    result = COMMANDS[args.command](args.repeats)
    print(json.dumps({args.command: result}, indent=1))


if __name__ == "__main__":
    main()
