"""Control training against plain RLlib PPO and against bare environment stepping, all in one run.

    python benchmarks/control.py [--repeats 5] [--iterations 3] [--out benchmarks/control.json]

Every arm runs in a process of its own, one after the other, and the arms take turns, so that a slow minute of
the machine hits all alike. An arm trains one warm-up iteration and then measures; reported are medians over
repeats, ratios within a repeat, and the memory of the whole process tree. Same environment, env steps,
minibatch size and passes for both learners; target KL is off: it would stop them apart.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path[:] = [str(CHECKOUT), *(p for p in sys.path if Path(p).resolve() != CHECKOUT / "benchmarks")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

ENV, HORIZON, STEPS, NUM_ENVS, HIDDEN = "SafetyHopperVelocity-v1", 250, 10_000, 40, [64, 64]
# Name -> (passes over the batch, env steps a minibatch).
SETTINGS = {"10 epochs of 500": (10, 500), "40 epochs of 64": (40, 64)}
ARMS = ("seedbed", "rllib", "seedbed, 1 runner", "seedbed, 2 runners")


def bare_steps_per_second() -> float:
    """The environment alone with random actions and its resets: what no learner can exceed in one process."""
    import numpy as np

    from envs.make import EnvConfig, make_env

    env = make_env(EnvConfig(id=ENV, horizon=HORIZON))
    actions = np.random.default_rng(0).uniform(-1, 1, (STEPS, *env.action_space.shape)).astype(np.float32)
    env.reset(seed=0)
    started = time.perf_counter()
    for action in actions:
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
    return STEPS / (time.perf_counter() - started)


class SeedbedArm:
    """`algo=ppo` through its own engine."""

    def __init__(self, epochs: int, minibatch: int, runners: int):
        from algos.ppo import PPO, PPOConfig
        from envs.make import EnvConfig
        from trainers.config import TrainConfig
        from trainers.control import LearnerConfig, RolloutConfig, env_spec
        from trainers.ray_cluster import local_cluster
        from trainers.run import RunConfig

        cfg = TrainConfig(
            algorithm=PPO,
            algo=PPOConfig(),
            run=RunConfig(),
            size="default",
            env=EnvConfig(id=ENV, horizon=HORIZON),
            rollout=RolloutConfig(
                num_envs=NUM_ENVS, steps_per_env=STEPS // NUM_ENVS, num_env_runners=runners
            ),
            learner=LearnerConfig(
                hidden_sizes=HIDDEN, epochs=epochs, minibatch_steps=minibatch, target_kl=None, lr=3e-4
            ),
        )
        spec = env_spec(cfg)
        self.cluster = local_cluster(runners)
        self.cluster.__enter__()
        from trainers.control_rllib import build_engine

        self.engine = build_engine(cfg, spec, PPO(cfg.algo, spec, seed=0))

    def iteration(self) -> dict[str, float]:
        self.engine.train()
        report = self.engine.last_report
        return {
            "gradient_steps": report["gradient_steps"],
            "sampling_s": report["seconds_sampling"],
            "learning_s": report["seconds_update"],
        }

    def stop(self) -> None:
        self.engine.stop()
        self.cluster.__exit__(None, None, None)


class RLlibArm:
    """RLlib's own PPO on its new API stack, sampling in the driver, settings chosen for speed."""

    def __init__(self, epochs: int, minibatch: int):
        import ray
        import torch
        from ray.rllib.algorithms.ppo import PPOConfig
        from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
        from ray.tune.registry import register_env

        from envs.make import EnvConfig, make_env

        torch.set_num_threads(1)
        ray.init(
            num_cpus=1,
            include_dashboard=False,
            object_store_memory=256 * 1024**2,
            log_to_driver=False,
            logging_level="ERROR",
        )
        register_env("peer", lambda _: make_env(EnvConfig(id=ENV, horizon=HORIZON)))
        config = (
            PPOConfig()
            .environment("peer")
            .env_runners(
                num_env_runners=0,
                num_envs_per_env_runner=NUM_ENVS,
                rollout_fragment_length=STEPS // NUM_ENVS,
                batch_mode="truncate_episodes",
            )
            .training(
                train_batch_size=STEPS,
                minibatch_size=minibatch,
                num_epochs=epochs,
                lr=3e-4,
                lambda_=0.95,
                gamma=0.99,
                clip_param=0.2,
                vf_clip_param=1e6,
                use_kl_loss=False,
                entropy_coeff=0.0,
                grad_clip=0.5,
            )
            .rl_module(
                model_config=DefaultModelConfig(
                    fcnet_hiddens=HIDDEN, fcnet_activation="tanh", vf_share_layers=False
                )
            )
            .reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=0)
            .debugging(seed=0, log_level="ERROR")
        )
        self.algorithm = config.build_algo()
        self.gradient_steps, self.sampling_s, self.learning_s = 0, 0.0, 0.0
        runner, learner = self.algorithm.env_runner_group.local_env_runner, self.algorithm.learner_group
        # Its own timers are moving averages that still hold the warm-up.
        runner.sample = self._timed("sampling_s", runner.sample)
        learner.update = self._timed("learning_s", learner.update)
        ((_, optimizer),) = learner._learner.get_optimizers_for_module("default_policy")
        optimizer.register_step_post_hook(lambda *_: self._add("gradient_steps", 1))

    def _add(self, name: str, value: float) -> None:
        setattr(self, name, getattr(self, name) + value)

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = function(*args, **kwargs)
            self._add(name, time.perf_counter() - started)
            return result

        return call

    def iteration(self) -> dict[str, float]:
        names = ("gradient_steps", "sampling_s", "learning_s")
        before = [getattr(self, name) for name in names]
        self.algorithm.train()
        return {name: getattr(self, name) - b for name, b in zip(names, before)}

    def stop(self) -> None:
        import ray

        self.algorithm.stop()
        ray.shutdown()


def run_arm(arm: str, epochs: int, minibatch: int, iterations: int) -> dict[str, Any]:
    """In a child process: one warm-up iteration, then `iterations` measured ones."""
    if arm == "rllib":
        trainer: Any = RLlibArm(epochs, minibatch)
    else:
        trainer = SeedbedArm(epochs, minibatch, int(arm.split()[1]) if "runner" in arm else 0)
    trainer.iteration()
    found = []
    for _ in range(iterations):
        wall, cpu = time.perf_counter(), time.process_time()
        row = trainer.iteration()
        wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
        found.append({**row, "iteration_s": wall_s, "driver_cpu_s": cpu_s})
    trainer.stop()
    result = {key: statistics.median(row[key] for row in found) for key in found[0]}
    return {**result, "steps_per_second": STEPS / result["iteration_s"]}


def tree_mib(root: int) -> tuple[float, float]:
    """(RSS, PSS) in MiB of a process and all its descendants; PSS counts shared pages once."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    todo, rss, pss = [root], 0, 0
    while todo:
        pid = todo.pop()
        todo += parents.get(pid, [])
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        sizes = {line.split(":")[0]: line.split()[1] for line in rollup.splitlines()[1:]}
        rss, pss = rss + int(sizes["Rss"]), pss + int(sizes["Pss"])
    return rss / 1024, pss / 1024


def measure(arm: str, setting: str, iterations: int) -> dict[str, Any]:
    """Start an arm's process, watch the memory of its tree, and read what it measured."""
    command = [sys.executable, str(Path(__file__).resolve()), "--arm", arm, "--setting", setting]
    child = subprocess.Popen(
        [*command, "--iterations", str(iterations)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=CHECKOUT,
    )
    peak = (0.0, 0.0)
    while True:
        try:
            out, errors = child.communicate(timeout=0.5)
            break
        except subprocess.TimeoutExpired:
            peak = max(peak, tree_mib(child.pid))
    if child.returncode:
        raise SystemExit(f"{arm}, {setting} failed:\n{errors[-3000:]}")
    return {**json.loads(out.splitlines()[-1]), "peak_rss_mib": peak[0], "peak_pss_mib": peak[1]}


def summarize(rows: list[dict[str, Any]], bare: list[float], arms: list[str]) -> dict[str, Any]:
    """Medians of one setting's repeats; ratios are medians of the ratios within a repeat."""
    arm = {
        a: {key: round(statistics.median(row[a][key] for row in rows), 3) for key in rows[0][a]} for a in arms
    }

    def ratio(a: str, b: str, key: str = "steps_per_second") -> float:
        return round(statistics.median(row[a][key] / row[b][key] for row in rows), 3)

    ratios: dict[str, float] = {}
    if {"seedbed", "rllib"} <= set(arms):
        ratios["seedbed / rllib"] = ratio("seedbed", "rllib")
        ratios["rllib CPU / seedbed CPU"] = ratio("rllib", "seedbed", "driver_cpu_s")
    if {"seedbed, 1 runner", "seedbed, 2 runners"} <= set(arms):
        ratios["2 runners / 1 runner"] = ratio("seedbed, 2 runners", "seedbed, 1 runner")
        ratios["2 runners / 1 runner, sampling alone"] = round(
            1 / ratio("seedbed, 2 runners", "seedbed, 1 runner", "sampling_s"), 3
        )
    for a in arms:
        fractions = [row[a]["steps_per_second"] / b for row, b in zip(rows, bare)]
        ratios[f"{a} / bare environment"] = round(statistics.median(fractions), 3)
    return {"arms": arm, "ratios": ratios}


def table(setting: str, summary: dict[str, Any]) -> str:
    """One setting as Markdown."""
    names = {
        "steps_per_second": "env steps/s",
        "iteration_s": "iteration s",
        "sampling_s": "sampling s",
        "learning_s": "learning s",
        "gradient_steps": "gradient steps",
        "driver_cpu_s": "driver CPU s",
        "peak_rss_mib": "peak RSS MiB",
        "peak_pss_mib": "peak PSS MiB",
    }
    lines = [f"### {setting}", "", f"| | {' | '.join(names.values())} |", "| --- |" + " ---: |" * len(names)]
    for arm, row in summary["arms"].items():
        cells = [f"{row[key]:.2f}" if key.endswith("_s") else f"{row[key]:,.0f}" for key in names]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    lines += ["", *(f"- {name}: {value:.2f}" for name, value in summary["ratios"].items()), ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        print(json.dumps(run_arm(args.arm, *SETTINGS[args.setting], args.iterations)))
        return
    rows: dict[str, list[dict[str, Any]]] = {setting: [] for setting in args.settings}
    bare: dict[str, list[float]] = {setting: [] for setting in args.settings}
    for repeat in range(args.repeats):
        for setting in args.settings:
            bare[setting].append(bare_steps_per_second())
            # Every other repeat runs the arms backwards.
            order = args.arms if repeat % 2 == 0 else args.arms[::-1]
            rows[setting].append({arm: measure(arm, setting, args.iterations) for arm in order})
            seen = ", ".join(f"{a} {rows[setting][-1][a]['steps_per_second']:,.0f}" for a in args.arms)
            print(
                f"repeat {repeat + 1}, {setting}: bare {bare[setting][-1]:,.0f}, {seen} steps/s", flush=True
            )
    report: dict[str, Any] = {
        "env": ENV,
        "horizon": HORIZON,
        "env_steps_per_iteration": STEPS,
        "repeats": args.repeats,
        "iterations": args.iterations,
        "cpus": os.cpu_count(),
        "settings": {},
    }
    for setting in args.settings:
        summary = summarize(rows[setting], bare[setting], args.arms)
        summary["bare_steps_per_second"] = round(statistics.median(bare[setting]))
        report["settings"][setting] = summary
        print("\n" + table(setting, summary))
        print(f"bare environment: {summary['bare_steps_per_second']:,} steps/s")
    if args.out:
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
