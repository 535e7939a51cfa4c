"""Language training's parts against what they are made of, each pair in one run.

    python benchmarks/language.py pool [--repeats 9]       # the pool against its engine called directly
    python benchmarks/language.py sync [--repeats 7]       # 1 GB of weights to a worker against a memcpy
    python benchmarks/language.py step [--repeats 3]       # a GRPO run against TRL's own trainer
    python benchmarks/language.py staleness [--repeats 3]  # generation during the update, or after it

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
from itertools import pairwise
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path[:] = [str(CHECKOUT), *(p for p in sys.path if Path(p).resolve() != CHECKOUT / "benchmarks")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

GB = 1 << 30
WARM_UPS = 4  # publications until the object store's pages have all been touched
PROMPTS, SAMPLES, NEW_TOKENS, MICRO, STEPS, SKIPPED = 8, 8, 48, 16, 10, 2  # of the runs that are timed


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


def step(repeats: int) -> dict[str, Any]:
    """Seconds a step of `algo=grpo` as a user runs it and of a TRL script, with the same model, prompts,
    completions of the same length and reward; peak memory of both."""
    with tempfile.TemporaryDirectory() as folder:
        model = step_model(folder)
        arms = {
            "seedbed": [*our_run(folder, model)],
            "seedbed, deterministic=false": [*our_run(folder, model), "run.deterministic=false"],
            "TRL": [__file__, "trl", "--folder", model],
        }
        turns = take_turns(arms, repeats, folder)
    report: dict[str, Any] = {name: summary_of_runs(runs) for name, runs in turns.items()}
    for name in list(arms)[:2]:
        pairs = zip(turns[name], turns["TRL"])
        report[f"{name} / TRL"] = statistics.median(a["step_s"] / b["step_s"] for a, b in pairs)
    return report


def staleness(repeats: int) -> dict[str, Any]:
    """Seconds a step with one rollout worker: in turn with the learner, and beside it."""
    with tempfile.TemporaryDirectory() as folder:
        model = step_model(folder)
        base = [*our_run(folder, model), "rollout.num_workers=1", "run.deterministic=false"]
        arms = {f"staleness={k}": [*base, f"rollout.staleness={k}"] for k in (0, 1)}
        turns = take_turns(arms, repeats, folder)
    report: dict[str, Any] = {name: summary_of_runs(runs) for name, runs in turns.items()}
    pairs = zip(turns["staleness=1"], turns["staleness=0"])
    report["ratio"] = statistics.median(a["step_s"] / b["step_s"] for a, b in pairs)
    return report


def our_run(folder: str, model: str) -> list[str]:
    """Arguments of the run that is timed."""
    return [
        str(CHECKOUT / "launch" / "train.py"),
        "algo=grpo",
        "env=chained-arithmetic",
        f"model.name={model}",
        f"run.dir={folder}/runs",
        "run.checkpoint_every=1000",
        "run.tensorboard=false",
        f"learner.steps={STEPS}",
        f"learner.samples_per_device_batch={MICRO}",
        f"rollout.prompts_per_step={PROMPTS}",
        f"rollout.samples_per_prompt={SAMPLES}",
        f"rollout.max_new_tokens={NEW_TOKENS}",
        "rollout.temperature=1.0",
    ]


def take_turns(arms: dict[str, list[str]], repeats: int, folder: str) -> dict[str, list[dict[str, float]]]:
    """Every arm as a process of its own, `repeats` times in turn."""
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for turn in range(repeats):
        for number, (name, arguments) in enumerate(arms.items()):
            file = Path(folder) / f"{turn}-{number}.jsonl"
            if name == "TRL":
                arguments = [*arguments, "--out", str(file)]
            else:
                run = f"{turn}-{number}"
                arguments = [*arguments, f"run.name={run}"]
                file = Path(folder) / "runs" / run / "metrics.jsonl"
            peaks = watched(arguments)
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            at = [line["seconds"] for line in lines][SKIPPED:]
            turns[name].append(
                {
                    "step_s": statistics.median(b - a for a, b in pairwise(at)),
                    "completion_length": statistics.mean(
                        line.get("completion_length", line.get("completions/mean_length")) for line in lines
                    ),
                    **peaks,
                }
            )
    return turns


def watched(arguments: list[str]) -> dict[str, float]:
    """Run a Python process to its end; peak resident memory of it and of its whole tree, MiB."""
    import subprocess

    import psutil

    environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            [sys.executable, *arguments], stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        root, alone, tree = psutil.Process(child.pid), 0, 0
        while child.poll() is None:
            try:
                own = root.memory_info().rss
                others = [p.memory_info().rss for p in root.children(recursive=True)]
            except psutil.Error:
                continue
            alone, tree = max(alone, own), max(tree, own + sum(others))
            time.sleep(0.1)
        if child.returncode:
            output.seek(0)
            raise SystemExit(output.read().decode()[-4000:])
    return {"peak_mib": alone / 2**20, "peak_tree_mib": tree / 2**20}


def summary_of_runs(runs: list[dict[str, float]]) -> dict[str, float]:
    """The median over the turns of everything that was noted."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def step_model(folder: str) -> str:
    """A random Llama with the task's words and 2,000 more, so that the end token is rarely drawn."""
    from trainers.tiny_model import word_tokenizer

    path = f"{folder}/model"
    tokenizer = word_tokenizer([*(step_task().vocabulary() or []), *(f"w{i}" for i in range(2000))])
    random_llama(path, hidden=256, layers=4, vocabulary=len(tokenizer))
    tokenizer.save_pretrained(path)
    return path


def step_task() -> Any:
    """The task whose prompts both trainers see."""
    from envs.text_tasks import TextTaskConfig, make_task

    return make_task(TextTaskConfig())


def trl_arm(folder: str, out: str) -> None:
    """TRL's GRPO trainer alone, one line of JSON a step into `out`."""
    import transformers
    import trl
    from datasets import Dataset

    from trainers.models import load_tokenizer

    task = step_task()
    rows = [{"prompt": task.train(i).text, "row": i} for i in range(PROMPTS * STEPS)]
    args = trl.GRPOConfig(
        output_dir=f"{out}.trl",
        max_steps=STEPS,
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=PROMPTS * SAMPLES // MICRO,
        num_generations=SAMPLES,
        max_completion_length=NEW_TOKENS,
        temperature=1.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        seed=0,
    )

    def reward(completions: list[str], row: list[int], **columns: Any) -> list[float | None]:
        return [task.check(task.train(i).meta, text) for i, text in zip(row, completions)]

    class Clock(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                with open(out, "a") as file:
                    file.write(json.dumps({**logs, "seconds": time.perf_counter()}) + "\n")

    trl.GRPOTrainer(
        model=transformers.LlamaForCausalLM.from_pretrained(folder),
        args=args,
        train_dataset=Dataset.from_list(rows),
        reward_funcs=reward,
        processing_class=load_tokenizer(folder),
        callbacks=[Clock()],
    ).train()


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


COMMANDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "pool": pool,
    "sync": sync,
    "step": step,
    "staleness": staleness,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=[*COMMANDS, "trl"], metavar=" | ".join(COMMANDS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    if args.command == "trl":
        trl_arm(args.folder, args.out)
        return
    result = COMMANDS[args.command](args.repeats)
    print(json.dumps({args.command: result}, indent=1))


if __name__ == "__main__":
    main()
