"""What a user typed, checked against the config it is about before Hydra sees it.

Aliases become names; an unknown setting, choice or type is a UserError that says what was probably meant.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import types
import typing
from collections.abc import Sequence
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from envs.errors import UserError, nearest
from launch import config
from trainers.run import Run

T = typing.TypeVar("T")
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


@dataclasses.dataclass
class Arguments:
    """A checked command line. argv: for Hydra; given: the settings that the user typed, key to value."""

    argv: list[str]
    given: dict[str, str]


def read(argv: Sequence[str]) -> Arguments:
    """Checks a command line of launch/train.py and rewrites it for Hydra. Raises UserError."""
    flags, tokens, multirun = _split(argv)
    overrides = [parse(_full_name(token)) for token in tokens]
    groups = [o for o in overrides if o.key_or_group in config.GROUPS]
    settings = [o for o in overrides if o.key_or_group not in config.GROUPS]
    choices = {o.key_or_group: _choices(o, multirun) for o in groups}
    resume = next((o.value() for o in settings if o.key_or_group == "resume"), None)
    if resume is not None:
        if multirun:
            raise UserError("one run is resumed at a time", given=f"resume={resume} with --multirun")
        choices = _stored_choices(str(resume), settings) | choices
    algorithms = choices.get("algo", [config.default("algo")])
    for name in algorithms:
        for size in choices.get("size", []):
            config.check_size(name, size)
    environments = _environments(algorithms, choices.get("env"))
    if "env" in choices or environments != [config.default("env")]:
        choices["env"] = environments
    sweeps_algorithms = len(algorithms) > 1
    # Hydra composes a sweep's own config without the swept values, so with the default algorithm.
    config.register([*algorithms, *([config.default("algo")] if sweeps_algorithms else [])])
    others = [f"{group}={values[0]}" for group, values in choices.items() if group != "algo"]
    trees = [config.compose([f"algo={name}", *others]) for name in algorithms]
    checked = [
        str(o.input_line) if o.is_hydra_override() else _check_setting(trees, o, multirun) for o in settings
    ]
    if sweeps_algorithms:
        checked = [_only_in_jobs(token) if token.startswith("algo.") else token for token in checked]
    chosen = [f"{group}={','.join(values)}" for group, values in choices.items()]
    given = {o.key_or_group: o.get_value_string() for o in overrides}
    return Arguments(flags + chosen + checked, given)


def _environments(algorithms: Sequence[str], given: list[str] | None) -> list[str]:
    """The environments that were asked for, or the algorithms' default. Raises UserError for a wrong pair."""
    allowed = {name: config.envs(name) for name in algorithms}
    if given is None:
        defaults = {envs[0] for envs in allowed.values()}
        if len(defaults) > 1:
            raise UserError(
                "these algorithms train in different kinds of environments",
                given=", ".join(f"algo={name}: {envs[0]}" for name, envs in allowed.items()),
                fix="sweep over algorithms of one kind at a time",
            )
        return [defaults.pop()]
    for name, envs in allowed.items():
        for env in given:
            if env not in envs:
                raise UserError(
                    f"algo={name} does not train in env={env}",
                    given=f"env={env}",
                    allowed=envs,
                    fix=f"env={envs[0]}",
                )
    return given


def algorithm(name: str) -> str:
    """The name of an algorithm, an alias resolved. Raises UserError with the nearest ones."""
    return _choices(parse(f"algo={name}"), multirun=False)[0]


def owner(token: str) -> str | None:
    """The algorithm whose phases alone have a setting: `sft` of `sft.learner.lr=1e-4`; None: all."""
    first, dot, _ = token.partition("=")[0].partition(".")
    known = config.aliases() | {name: name for name in config.options("algo")}
    return known.get(first) if dot else None


def read_into(kind: type[T], argv: Sequence[str]) -> T:
    """A dataclass filled from key=value tokens, for commands without YAML groups. Raises UserError."""
    tree = OmegaConf.structured(kind)
    for override in map(parse, argv):
        _check_setting([tree], override, multirun=False)
        OmegaConf.update(tree, override.key_or_group, override.value())
    filled = OmegaConf.to_object(tree)
    assert isinstance(filled, kind)
    return filled


def _split(argv: Sequence[str]) -> tuple[list[str], list[str], bool]:
    """(Hydra's flags with their values, key=value tokens, whether several runs are asked for)."""
    parser = get_args_parser()

    def refuse(message: str) -> typing.NoReturn:
        raise UserError(
            f"the command line can't be read: {message}",
            fix="settings are written key=value, without dashes, for example dry=true",
        )

    parser.error = refuse  # type: ignore[method-assign]
    args = parser.parse_intermixed_args(list(argv))
    tokens, flags = list(args.overrides), []
    remaining = list(tokens)
    for token in argv:
        if remaining and token == remaining[0]:
            remaining.pop(0)
        else:
            flags.append(token)
    return flags, tokens, args.multirun


def parse(token: str) -> Override:
    """One key=value token by Hydra's grammar. Raises UserError."""
    if "=" not in token and not token.startswith("~"):
        names = config.aliases() | {name: name for name in config.options("algo")}
        fix = f"algo={token}" if token in names else f"{token}=true, for example"
        raise UserError(f"'{token}' is not of the form key=value", fix=fix)
    try:
        return OverridesParser.create().parse_override(token)
    except HydraException as error:
        raise UserError(
            f"'{token}' can't be read: {str(error).splitlines()[-1]}",
            fix="quote values with special characters twice: 'key=\"value\"'",
        ) from error


def _full_name(token: str) -> str:
    """`model=<name>` names a model, not a group of settings; a folder may begin with `~`."""
    key, sign, value = token.partition("=")
    if key not in ("model", "model.name") or not sign:
        return token
    return f"model.name='{value}'" if value.startswith("~") else f"model.name={value}"


def _values(override: Override, multirun: bool) -> list[str]:
    """The value as typed, or each value of a sweep."""
    if not override.is_sweep_override():
        return [override.get_value_string()]
    if not multirun:
        key, value = override.key_or_group, override.get_value_string()
        raise UserError(
            f"{key} was given several values",
            given=value,
            fix=f"add -m for one run per value; a list is written {key}=[{value}]",
        )
    if not override.is_discrete_sweep():
        raise UserError(
            f"{override.key_or_group} needs values that can be enumerated", allowed="a,b,c or range(1,4)"
        )
    return list(override.sweep_string_iterator())


def _choices(override: Override, multirun: bool) -> list[str]:
    """The options chosen in a group, by name."""
    group = override.key_or_group
    names = config.options(group)
    known = {name: name for name in names} | (config.aliases() if group == "algo" else {})
    _refuse_grammar(override)
    values = _values(override, multirun)
    for value in values:
        if value not in known:
            close = difflib.get_close_matches(value, known, n=1) or nearest(value, known, n=1)
            fix = f"{group}={known[close[0]]}"
            if group == "env":
                fix += f", and env.id={value} if that is the id of a task"
            raise UserError(
                f"unknown {group} '{value}'", given=f"{group}={value}", allowed=sorted(known), fix=fix
            )
    return [known[value] for value in values]


def _stored_choices(resume: str, settings: Sequence[Override]) -> dict[str, list[str]]:
    """What the run to resume was started with, so that its own settings are the ones that are known."""
    runs_dir = next((str(o.value()) for o in settings if o.key_or_group == "run.dir"), "runs")
    stored = Run.open(resume, runs_dir).config
    try:
        return {"algo": [stored["algo"]["name"]], "env": [stored["env"]["kind"]], "size": [stored["size"]]}
    except KeyError as error:
        raise UserError(
            f"the config of run '{resume}' has no {error}: launch/train.py did not write it"
        ) from error


def _refuse_grammar(override: Override) -> None:
    if override.is_delete() or override.package is not None:
        raise UserError(
            "settings can be changed, not removed or moved",
            given=override.input_line,
            fix=f"{override.key_or_group}=<value>",
        )


def _check_setting(trees: Sequence[DictConfig], override: Override, multirun: bool) -> str:
    """Checks key and type against the config of every algorithm asked for; the token for Hydra."""
    _refuse_grammar(override)
    key = override.key_or_group
    values = _values(override, multirun)
    added = False
    for tree in trees:
        known = config.keys(tree)
        added = _in_free_dict(tree, key)
        if key not in known and not added:
            near = config.nearest_keys(key, known)
            alike = difflib.SequenceMatcher(None, key, near[0]).ratio() > 0.6 or near[0].endswith(f".{key}")
            raise UserError(
                f"unknown setting '{key}'",
                given=override.input_line,
                allowed=f"nearest: {', '.join(near)}",
                fix=f"{near[0]}={override.get_value_string()}" if alike else None,
            )
        for value in values:
            check_value(tree, key, parse(f"{key}={value}").value())
    return f"{'++' if added else ''}{key}={override.get_value_string()}"


def _only_in_jobs(token: str) -> str:
    """A setting as a sweep over one value, which Hydra leaves out of the sweep's own config."""
    key, _, value = token.partition("=")
    return token if parse(token).is_sweep_override() else f"{key}=choice({value})"


def _in_free_dict(tree: DictConfig, key: str) -> bool:
    """Whether `key` is or lies in a dict that takes any key, like env.options."""
    places = [key, *([key.rpartition(".")[0]] if "." in key else [])]
    nodes = [OmegaConf.select(tree, place) for place in places]
    return any(OmegaConf.is_dict(node) and OmegaConf.get_type(node) is dict for node in nodes)


def check_value(tree: DictConfig, key: str, value: Any) -> None:
    """Raises UserError when `key` can't hold `value`."""
    trial = copy.deepcopy(tree)
    try:
        OmegaConf.update(trial, key, value, force_add=_in_free_dict(tree, key))
    except OmegaConfBaseException as error:
        if isinstance(value, dict):
            raise UserError(f"{key}: {config.message(error)}", given=value) from error
        wanted = _wanted(tree, key)
        whole = isinstance(value, float) and value.is_integer() and "whole" in wanted
        raise UserError(
            f"{key} has a value of the wrong type",
            given=_yaml(value),
            allowed=wanted,
            fix=f"{key}={int(value)}" if whole else None,
        ) from error


def _wanted(tree: DictConfig, key: str) -> str:
    """In words, what the dataclass says that `key` holds."""
    section, _, leaf = key.rpartition(".")
    holder = OmegaConf.get_type(tree, section or None)
    hint = typing.get_type_hints(holder)[leaf] if dataclasses.is_dataclass(holder) else type(tree[key])
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    words = [
        WORDS.get(kind, "a list" if typing.get_origin(kind) in (list, tuple) else "a mapping")
        for kind in kinds
    ]
    return f"{' or '.join(words)}, for example {_yaml(OmegaConf.select(tree, key))}"


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
