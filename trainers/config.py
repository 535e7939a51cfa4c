"""A run's settings as typed objects: which dataclasses they are, and back again from a run's saved config.

Composing them from YAML files and a command line is `launch.config`'s work; this module reads no files.
An algorithm is named by its class path (`module.Class`). Its class says which dataclass holds its own
settings (`Config`) and which module trains it (`engine`); the engine says which further sections it has.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from envs.errors import UserError, nearest
from envs.make import EnvConfig
from trainers.run import RunConfig


@dataclasses.dataclass(kw_only=True)
class AlgorithmConfig:
    """The class of an algorithm, and other names for it. Fixed by the YAML file that `algo=` selects."""

    class_path: str = "???"
    aliases: list[str] = dataclasses.field(default_factory=list)


class TrainConfig(SimpleNamespace):
    """What an engine is given: one typed member per section of the config.

    algorithm: the class; run, env, algo: `RunConfig`, the engine's kind of environment (`EnvConfig` if it
    names none) and the algorithm's own `Config`; size: of the recipe; and each section of the engine.
    """

    algorithm: Any  # a class
    run: RunConfig
    env: Any
    algo: Any
    size: str


def load_class(path: str) -> Any:
    """The class at `module.Class`."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def engine_of(algorithm: Any) -> ModuleType:
    """The module that trains and evaluates `algorithm`."""
    return importlib.import_module(algorithm.engine)


def evaluator_of(algorithm: Any) -> ModuleType | None:
    """The module that evaluates its runs: the algorithm's own `evaluator`, else its engine's; None if it says
    that there is nothing to evaluate."""
    path = getattr(algorithm, "evaluator", engine_of(algorithm).EVALUATOR)
    return None if path is None else importlib.import_module(path)


def schema(class_path: str) -> dict[str, Any]:
    """Every section of an algorithm's config by name, each a dataclass; `size` is a string."""
    algorithm = load_class(class_path)
    sections = {"run": RunConfig, "env": EnvConfig, "algo": algorithm.Config, **engine_of(algorithm).SECTIONS}
    return {"algorithm": AlgorithmConfig, "size": "default", **sections}


def typed(resolved: Mapping[str, Any]) -> TrainConfig:
    """The typed config of a resolved one (plain nested dicts, as saved in a run's directory).

    A key that is missing takes its default. Raises UserError for a key or value the dataclasses don't know.
    """
    class_path = resolved["algorithm"]["class_path"]
    try:
        algorithm = load_class(class_path)
    except (ImportError, AttributeError) as error:
        raise UserError(f"the algorithm {class_path} of this config can't be loaded: {error}") from error
    nodes = schema(class_path)
    for section in resolved:
        if section not in nodes:
            raise UserError(f"unknown section '{section}' in the config", allowed=nearest(section, nodes))
    members: dict[str, Any] = {}
    for section, node in nodes.items():
        if section != "algorithm":
            members[section] = _member(section, node, resolved.get(section))
    return TrainConfig(algorithm=algorithm, **members)


def _member(section: str, node: Any, values: Any) -> Any:
    if not isinstance(node, type):
        return node if values is None else values
    try:
        merged = OmegaConf.merge(OmegaConf.structured(node), values or {})
    except OmegaConfBaseException as error:
        known = [field.name for field in dataclasses.fields(node)]
        what = f"section '{section}' of the config: {str(error).splitlines()[0]}"
        raise UserError(what, allowed=known) from error
    assert isinstance(merged, DictConfig)
    return OmegaConf.to_object(merged)
