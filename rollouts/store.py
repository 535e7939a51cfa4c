"""Weights in Ray's object store: one copy into it, none out of it on the same node."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rollouts.samples import Version
from rollouts.weights import PackedWeights, aligned, pack

if TYPE_CHECKING:
    import torch

# Each chunk costs a put some 50 microseconds, so smaller tensors share one; larger ones save a copy.
VIEWS_FROM = 4 << 20


@dataclass(frozen=True)
class StoredWeights:
    """A version in the object store; picklable and small. It is gone when the process that sent it dies."""

    version: Version
    nbytes: int
    ref: list[Any]  # of one ObjectRef, so that handing it on does not fetch it

    def fetch(self, timeout_s: float) -> PackedWeights:
        """The weights themselves; on the sender's node their chunks are the store's own memory."""
        import ray

        return ray.get(self.ref[0], timeout=timeout_s)


def send(
    named: Mapping[str, torch.Tensor],
    version: Version,
    kind: str = "full",
    meta: dict[str, Any] | None = None,
) -> PackedWeights | StoredWeights:
    """Snapshot named tensors for `RolloutPool.publish`: in the object store if Ray is up, else in memory.

    When it returns the tensors may change.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return pack(named, version, kind, meta)
    with _scratch.lock:
        return store(pack(named, version, kind, meta, memory=_scratch, views_from=VIEWS_FROM))


def store(packed: PackedWeights) -> StoredWeights:
    """Put packed weights into the object store."""
    import ray

    return StoredWeights(packed.version, packed.nbytes, [ray.put(packed)])


class _Scratch:
    """Memory for small tensors on their way, kept because fresh memory costs more than the copy."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._memory = aligned(0)

    def __call__(self, nbytes: int) -> np.ndarray:
        if len(self._memory) < nbytes:
            self._memory = aligned(nbytes)
        return self._memory


_scratch = _Scratch()
