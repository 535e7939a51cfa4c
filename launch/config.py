"""Composing a run's config: YAML groups under conf/, dataclasses for every section, Hydra in between.

Precedence: dataclass defaults < conf/algo < conf/env < conf/recipe/<algorithm>/<size> < command line.
Checking what a user typed is `launch.arguments`'s work; what the sections are, `trainers.config`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import AnyNode, BooleanNode, DictConfig, OmegaConf, StringNode
from omegaconf.errors import OmegaConfBaseException

from envs.errors import UserError, nearest
from trainers.config import AlgorithmConfig, engine_of, load_class, schema

CONF = Path(__file__).resolve().parent / "conf"
GROUPS = ("algo", "env", "size")
FIXED = ("algorithm", "algo.name")  # what algo= selects
LAUNCH_KEYS = ("dry", "resume", "phases")  # they belong to the command, not to the run
# What may differ in a resumed run: how it is watched, saved and spread, never what is computed.
RESUMABLE = (
    "run.max_steps",
    "run.display",
    "run.tensorboard",
    "run.loggers",
    "run.project",
    "run.checkpoint_every",
    "run.keep_checkpoints",
    "rollout.num_env_runners",
    "rollout.timeout_s",
    "rollout.max_restarts",
    "rollout.num_workers",
    "rollout.deadline_s",
    "learner.max_restarts",
    "learner.timeout_s",
)


def options(group: str) -> list[str]:
    """The names that `group=` takes, in alphabetical order."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def default(group: str) -> str:
    """The choice in `group` when the command line makes none."""
    defaults = OmegaConf.to_container(OmegaConf.load(CONF / "train.yaml").defaults)
    assert isinstance(defaults, list)
    return next(str(entry[group]) for entry in defaults if isinstance(entry, dict) and group in entry)


def algorithm(name: str) -> AlgorithmConfig:
    """What conf/algo/<name>.yaml says under `algorithm`: class_path and aliases."""
    return AlgorithmConfig(**OmegaConf.load(CONF / "algo" / f"{name}.yaml").algorithm)


def envs(name: str) -> tuple[str, ...]:
    """The environments that an algorithm's engine trains in, the default first. Imports its module."""
    return engine_of(load_class(algorithm(name).class_path)).ENVS


def aliases() -> dict[str, str]:
    """Other names of algorithms: {alias: name}."""
    return {alias: name for name in options("algo") for alias in algorithm(name).aliases}


def sizes(name: str) -> list[str]:
    """The sizes that an algorithm has; `default` is its dataclasses' defaults."""
    return ["default", *options(f"recipe/{name}")]


def check_size(name: str, size: str) -> None:
    """Raises UserError when the algorithm has no such size."""
    if size not in sizes(name):
        raise UserError(f"algo={name} has no size '{size}'", given=f"size={size}", allowed=sizes(name))


def register(names: Sequence[str]) -> None:
    """Make the dataclasses of these algorithms known to Hydra; imports their modules, no others."""
    for name in names:
        command = {"dry": BooleanNode(False), "resume": StringNode(None), "phases": AnyNode(None)}
        node = {**schema(algorithm(name).class_path), **command}
        ConfigStore.instance().store(name=f"schema-{name}", node=node)


def compose(overrides: Sequence[str]) -> DictConfig:
    """The config of one run; the algorithm's schema must be registered. Raises UserError."""
    try:
        with initialize_config_dir(str(CONF), version_base=None):
            return hydra_compose("train", list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(message(error)) from error


def message(error: BaseException) -> str:
    """Hydra's message and that of its cause, without OmegaConf's trailer of internal names."""
    lines = [line for e in (error, error.__cause__) if e for line in str(e).splitlines()]
    return "\n".join(line for line in lines if line.strip() and not line.startswith("    "))


def resolved(cfg: DictConfig) -> dict[str, Any]:
    """What is saved with a run: nested dicts, interpolations resolved, without the command's own keys."""
    try:
        plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(message(error)) from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items() if key not in LAUNCH_KEYS}


def resumed(stored: Mapping[str, Any], cfg: DictConfig, given: Iterable[str]) -> dict[str, Any]:
    """The stored config of a run with the settings in RESUMABLE that were given again (dotted keys of `cfg`).

    Raises UserError for any other setting that was given and differs.
    """
    merged = OmegaConf.create(dict(stored))
    for key in given:
        if key in LAUNCH_KEYS or key == "run.dir":
            continue
        where = {"algo": "algo.name", "env": "env.kind"}.get(key, key)
        old, new = _plain(merged, where), _plain(cfg, where)
        if old == new:
            continue
        if key not in RESUMABLE:
            raise UserError(
                f"{key} can't change when a run is resumed",
                given=f"{key}={new}, the run has {old}",
                allowed=RESUMABLE,
                fix="leave it out, or start a new run",
            )
        OmegaConf.update(merged, key, new)
    return resolved(merged)


def _plain(cfg: DictConfig, key: str) -> Any:
    value = OmegaConf.select(cfg, key)
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def keys(cfg: DictConfig, prefix: str = "") -> list[str]:
    """Dotted names of every setting, those of sections too, that a command line may set."""
    found = []
    for key in map(str, cfg):
        name = f"{prefix}{key}"
        if name in FIXED:
            continue
        node = cfg._get_node(key)
        found.append(name)
        if isinstance(node, DictConfig) and not node._is_none():
            found += keys(node, f"{name}.")
    return found


def nearest_keys(key: str, known: Sequence[str]) -> list[str]:
    """The settings that were probably meant: the same name in another section, else similar ones."""
    section, _, leaf = key.rpartition(".")
    same = [name for name in known if name.rpartition(".")[2] == leaf]
    within = [name for name in known if name.startswith(f"{section}.")] if section else []
    return same or nearest(key, within or known)
