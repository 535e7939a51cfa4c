"""What d2's likelihoods and samplers cost, as ratios in one run; and what StepMerge leaves out.

    python benchmarks/d2.py [--repeats 5]

A Llama of random weights in one thread. `scoring`: Exact's T passes against AnyOrder's one. `merging`: time
and memory of a forward and backward pass over the number of segments, each in a process of its own.
`sampling`: the any-order sampler with and without its key-value cache. `divergence`: E[log pi - log pi_N] per
completion of model=tiny on 4x4 Sudoku, mean and standard error over trajectories that it sampled.
"""

from __future__ import annotations

import argparse
import functools
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path[:] = [str(CHECKOUT), *(p for p in sys.path if Path(p).resolve() != CHECKOUT / "benchmarks")]

from algos.d2 import AnyOrder, Exact, StepMerge
from envs.text_tasks import TextTaskConfig, make_task
from rollouts.decoding import Decoding
from rollouts.masked_diffusion import decode
from trainers.models import ModelConfig, load_model, load_tokenizer, prepare_model

VOCABULARY, PROMPT = 128, 32
# glibc gives freed memory back at once: otherwise the peak is that of its fragments. It costs time.
TIGHT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def model_of(width: int = 128) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=4,
        num_attention_heads=4, max_position_embeddings=2048, pad_token_id=0, eos_token_id=1,
        bos_token_id=None,
    )  # fmt: skip
    config.mask_token_id = VOCABULARY - 1
    return transformers.LlamaForCausalLM(config).eval()


def rows_of(rows: int, length: int, steps: int) -> dict[str, torch.Tensor]:
    """Random prompts and completions, decoded in random order, length / steps tokens a step."""
    rng = np.random.default_rng(0)
    order = np.stack([rng.permutation(length) // (length // steps) for _ in range(rows)])
    return {
        "prompt_ids": torch.from_numpy(rng.integers(2, VOCABULARY - 1, (rows, PROMPT))),
        "prompt_mask": torch.ones(rows, PROMPT, dtype=torch.long),
        "completion_ids": torch.from_numpy(rng.integers(2, VOCABULARY - 1, (rows, length))),
        "decode_step": torch.from_numpy(order),
    }


def seconds(arms: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median time of each, taking turns after one warm-up."""
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(repeats + 1):
        for name, arm in arms.items():
            started = time.perf_counter()
            arm()
            if turn:
                taken[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in taken.items()}


def scoring(repeats: int) -> None:
    model = model_of()
    print("| T = tokens | Exact ms | AnyOrder ms | ratio | T/3 |\n| ---: | ---: | ---: | ---: | ---: |")
    for steps in (8, 16, 32, 64):
        inputs = rows_of(8, steps, steps)
        arms: dict[str, Callable[[], Any]] = {
            "exact": functools.partial(Exact(steps).log_probs, model, inputs),
            "any": functools.partial(AnyOrder(steps).log_probs, model, inputs),
        }
        with torch.no_grad():
            took = seconds(arms, repeats)
        exact, one = 1e3 * took["exact"], 1e3 * took["any"]
        print(f"| {steps} | {exact:.0f} | {one:.1f} | {exact / one:.1f} | {steps / 3:.1f} |")


def merge_once(segments: int) -> None:
    """For a child process: seconds of a second pass, and MiB above what was there before the first."""
    model, steps = model_of(), 32
    inputs, likelihood = rows_of(32, 64, steps), StepMerge(steps, segments)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):
        model.zero_grad()
        started = time.perf_counter()
        likelihood.log_probs(model, inputs)[0].mean().backward()
        took = time.perf_counter() - started
    print(took, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def measured(command: list[str], more: dict[str, str]) -> list[float]:
    """What `merge_once` prints, with more environment variables."""
    env = os.environ | more
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
    return [float(word) for word in said.split()]


def merging(repeats: int) -> None:
    print("| N | seconds | seconds / N | peak above start, MiB |\n| ---: | ---: | ---: | ---: |")
    for segments in (1, 2, 4, 8, 16, 32):
        command = [sys.executable, __file__, "--merge", str(segments)]
        said = [measured(command, {}) for _ in range(max(1, repeats // 2))]
        took, peak = statistics.median(line[0] for line in said), measured(command, TIGHT)[1]
        print(f"| {segments} | {took:.2f} | {took / segments:.3f} | {peak:.0f} |")


def sampling(repeats: int) -> None:
    model = model_of()
    print("| tokens | plain s | cached s | plain / cached |\n| ---: | ---: | ---: | ---: |")
    for length in (64, 128, 256):
        inputs = rows_of(4, length, length)

        def draw(cache: bool, length: int = length, inputs: Any = inputs) -> None:
            how = Decoding(selection="random", any_order=True, cache=cache)
            noise = [np.random.default_rng(i) for i in range(4)]
            prompt = inputs["prompt_ids"], inputs["prompt_mask"]
            decode(model, *prompt, length=length, decoding=how, temperature=1.0, generators=noise)

        took = seconds({"plain": lambda: draw(False), "cached": lambda: draw(True)}, max(1, repeats // 2))
        ratio = took["plain"] / took["cached"]
        print(f"| {length} | {took['plain']:.2f} | {took['cached']:.2f} | {ratio:.2f} |")


def divergence(rows: int = 512) -> None:
    task = make_task(TextTaskConfig(task="sudoku4"))
    cfg = ModelConfig(tiny_objective="masked", tiny_completion=16)
    path = prepare_model(cfg, task)
    model, tokenizer = load_model(path, cfg).eval(), load_tokenizer(path)
    prompts = torch.tensor([tokenizer(task.train(i).text)["input_ids"] for i in range(rows)])
    there = torch.ones_like(prompts)
    noise = [np.random.default_rng(i) for i in range(rows)]
    how = Decoding(selection="random")
    done = decode(model, prompts, there, length=16, decoding=how, temperature=1.0, generators=noise)
    inputs = {
        "prompt_ids": prompts,
        "prompt_mask": there,
        "completion_ids": done.ids,
        "decode_step": done.step,
    }
    print("| N | E[log pi - log pi_N], nats | standard error |\n| ---: | ---: | ---: |")
    with torch.no_grad():
        exact = Exact(16).log_probs(model, inputs)[0].sum(1)
        for segments in (1, 2, 4, 8, 16):
            gap = exact - StepMerge(16, segments).log_probs(model, inputs)[0].sum(1)
            print(f"| {segments} | {gap.mean():.3f} | {gap.std() / rows**0.5:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--merge", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.merge:
        merge_once(args.merge)
        return
    for part in (scoring, merging, sampling):
        print(f"\n{part.__name__}")
        part(args.repeats)
    print("\ndivergence")
    divergence()


if __name__ == "__main__":
    main()
