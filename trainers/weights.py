"""Numbered weights on their way to the env runners: what arrives is what was sent, or an error."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollouts.collect import CostModel, GaussianPolicy


def checksum(arrays: Iterable[np.ndarray]) -> int:
    """CRC-32 over the bytes and shapes of the arrays, in order."""
    value = 0
    for array in arrays:
        value = zlib.crc32(repr((array.shape, array.dtype.str)).encode(), value)
        value = zlib.crc32(np.ascontiguousarray(array).tobytes(), value)
    return value


@dataclass(kw_only=True)
class Weights:
    """One version of everything a runner acts with; `version` is (attempt, step)."""

    version: tuple[int, int]
    policy: GaussianPolicy
    cost_model: CostModel
    sum: int | None = None

    def _arrays(self) -> list[np.ndarray]:
        found: list[np.ndarray] = [np.array(self.version)]
        for part in (self.policy, self.cost_model):
            _gather(vars(part), found)
        return found

    def seal(self) -> Weights:
        """Note the checksum before sending."""
        self.sum = checksum(self._arrays())
        return self

    def verify(self) -> None:
        """Raises RuntimeError when what arrived is not what was sent."""
        if checksum(self._arrays()) != self.sum:
            raise RuntimeError(
                f"weights {self.version} arrived with another checksum than they were sent with"
            )


def _gather(value: Any, found: list[np.ndarray]) -> None:
    """All arrays and plain settings inside nested dicts, lists and tuples, in a fixed order."""
    if isinstance(value, np.ndarray | np.generic | bool | int | float | str):
        found.append(np.asarray(value))
    elif isinstance(value, dict):
        for key in sorted(value):
            _gather(value[key], found)
    elif isinstance(value, list | tuple):
        for item in value:
            _gather(item, found)
