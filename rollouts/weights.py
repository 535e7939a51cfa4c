"""Numbered weights on their way from a learner to engines: bytes in a few chunks, a manifest and a hash.

`pack` fills the chunks, `PackedWeights.verify` proves that what arrived is what was sent, `tensors` are
views of it. `Transfer` is the state machine of one publication. Knows no process and no transport.
"""

from __future__ import annotations

import json
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rollouts.samples import Version

if TYPE_CHECKING:
    import torch

ALIGN = 64  # bytes; every tensor starts at a multiple, as torch's own memory does
RUN = 1 << 20  # bytes of small tensors that are copied and hashed together: they stay in the cache meanwhile


class WeightsError(RuntimeError):
    """A publication that did not arrive as it was sent, or that an engine cannot take."""


class Entry(NamedTuple):
    """Where a tensor lies: dtype as torch names it ("float32"), `offset` in bytes from its chunk's start."""

    name: str
    dtype: str
    shape: list[int]
    chunk: int
    offset: int


@dataclass
class PackedWeights:
    """A version's tensors. `kind`: full | lora; `meta`: what the kind needs more.

    manifest: JSON, a list of entries; chunks: (nbytes,) uint8 each; sum: XXH3 over all of it.
    """

    version: Version
    manifest: bytes
    chunks: list[np.ndarray]
    sum: int = 0
    kind: str = "full"
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes in all chunks."""
        return sum(chunk.nbytes for chunk in self.chunks)

    def verify(self) -> None:
        """Raise WeightsError when bytes, manifest or number are not what was packed."""
        found = self.hash_of_head()
        for chunk in self.chunks:
            found.update(chunk)
        if found.intdigest() != self.sum:
            raise WeightsError(
                f"weights {self.version} arrived with another checksum than they were sent with"
            )

    def hash_of_head(self) -> Any:
        """An XXH3 state over everything but the chunks, to be updated with them in their order."""
        import xxhash

        head = repr((tuple(self.version), self.kind, sorted(self.meta.items())))
        found = xxhash.xxh3_64(head.encode())
        found.update(self.manifest)
        return found

    def entries(self) -> list[Entry]:
        """The manifest's list."""
        return [Entry(*entry) for entry in json.loads(self.manifest)]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Views of the chunks by name, without a copy. They may be read-only memory: never write to them."""
        import torch

        found = {}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            for name, dtype, shape, chunk, offset in self.entries():
                kind, count = getattr(torch, dtype), math.prod(shape)
                if count:
                    flat = torch.frombuffer(self.chunks[chunk], dtype=kind, count=count, offset=offset)
                    found[name] = flat.view(shape)
                else:
                    found[name] = torch.empty(shape, dtype=kind)
        return found


def pack(
    named: Mapping[str, torch.Tensor],
    version: Version,
    kind: str = "full",
    meta: dict[str, Any] | None = None,
    *,
    memory: Callable[[int], np.ndarray] | None = None,
    views_from: float = math.inf,
) -> PackedWeights:
    """Copy named tensors (any device, any dtype) into one chunk and hash them on the way.

    Who copies the result at once anyhow may lend `memory` (bytes -> uint8, at least as many) for that chunk
    and leave tensors of at least `views_from` bytes where they are, each a chunk of its own.
    """
    import torch

    entries: list[Entry] = []
    small: list[tuple[int, int, torch.Tensor]] = []  # offset, nbytes
    large: list[np.ndarray] = []
    offset = 0
    for name, tensor in named.items():
        nbytes = tensor.numel() * tensor.element_size()
        dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        if nbytes >= views_from:
            large.append(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
            entries.append(Entry(name, dtype, shape, len(large), 0))
        else:
            entries.append(Entry(name, dtype, shape, 0, offset))
            small.append((offset, nbytes, tensor.detach()))
            offset += -(-nbytes // ALIGN) * ALIGN
    flat = (memory or aligned)(offset)[:offset]
    packed = PackedWeights(version, json.dumps(entries).encode(), [flat, *large], 0, kind, meta or {})
    found = packed.hash_of_head()
    target = torch.from_numpy(flat)
    for run in _runs(small):
        start, end = run[0][0], run[-1][0] + run[-1][1]
        tensors = [tensor for _, _, tensor in run]
        place = target[start:end].view(tensors[0].dtype)
        if len(run) == 1:
            place.view(tensors[0].shape).copy_(tensors[0])
        else:
            torch.cat([tensor.reshape(-1) for tensor in tensors], out=place)
        flat[end : -(-end // ALIGN) * ALIGN] = 0
        found.update(flat[start : -(-end // ALIGN) * ALIGN])  # while it is in the cache
    for chunk in large:
        found.update(chunk)
    packed.sum = found.intdigest()
    return packed


def _runs(
    small: list[tuple[int, int, torch.Tensor]],
) -> Iterator[list[tuple[int, int, torch.Tensor]]]:
    """Neighbours that one `torch.cat` can copy: on the CPU, of one dtype, without a gap, up to RUN bytes."""
    run: list[tuple[int, int, torch.Tensor]] = []
    for entry in small:
        start, nbytes, tensor = entry
        if run:
            first, (before, size, last) = run[0], run[-1]
            same = tensor.dtype == last.dtype and {tensor.device.type, last.device.type} == {"cpu"}
            if not same or before + size != start or start + nbytes - first[0] > RUN:
                yield run
                run = []
        run.append(entry)
    if run:
        yield run


def aligned(nbytes: int) -> np.ndarray:
    """Fresh memory (nbytes,) uint8 that starts at a multiple of ALIGN."""
    memory = np.empty(nbytes + ALIGN, np.uint8)
    start = -memory.ctypes.data % ALIGN
    return memory[start : start + nbytes]


class Transfer:
    """One publication seen from one receiver: announced -> received -> verified -> active, or failed.

    Every state but the last two has a deadline; `check` raises WeightsError when it has passed, saying who
    waits for whom. Steps out of order raise too: nothing unverified can become active.
    """

    ORDER = ("announced", "received", "verified", "active")

    def __init__(
        self, version: Version, receiver: str, deadline_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.version, self.receiver, self.deadline_s = version, receiver, deadline_s
        self._clock = clock
        self._since = clock()
        self.state, self.reason = "announced", ""

    def advance(self, state: str) -> None:
        """Go to the next state."""
        if self.state == "failed" or state not in self.ORDER:
            raise WeightsError(f"weights {self.version} for {self.receiver}: {self.state} -> {state}")
        if self.ORDER.index(state) != self.ORDER.index(self.state) + 1:
            raise WeightsError(f"weights {self.version} for {self.receiver}: {self.state} -> {state}")
        self.check()
        self.state, self._since = state, self._clock()

    def fail(self, reason: str) -> None:
        """Give the publication up."""
        self.state, self.reason = "failed", reason

    def check(self) -> None:
        """Raise WeightsError when the present state has lasted longer than its deadline."""
        waited = self._clock() - self._since
        if self.state not in ("active", "failed") and waited > self.deadline_s:
            reason = (
                f"weights {self.version}: {self.receiver} stayed '{self.state}' for {waited:.0f} s "
                f"(deadline {self.deadline_s:.0f} s)"
            )
            self.fail(reason)
            raise WeightsError(reason)


def accept(packed: PackedWeights, engine: Any, transfer: Transfer, busy: threading.Lock) -> None:
    """Verify what was received, wait until the engine is not `busy`, and let it take the weights over.

    Raises WeightsError; then the engine has the weights that it had.
    """
    try:
        transfer.advance("received")
        packed.verify()
        transfer.advance("verified")
        if not busy.acquire(timeout=transfer.deadline_s):
            raise WeightsError(
                f"weights {packed.version}: {transfer.receiver} was busy for {transfer.deadline_s:g} s"
            )
        try:
            engine.load_weights(packed)
        finally:
            busy.release()
        transfer.advance("active")
    except WeightsError as error:
        transfer.fail(str(error))
        raise


def lora_delta(tensors: Mapping[str, torch.Tensor], scaling: Mapping[str, float]) -> dict[str, torch.Tensor]:
    """What adapters add to the weights they sit on: {weight name: scaling * B @ A}, in float32.

    `tensors` hold "<module>.lora_A" (r, in) and "<module>.lora_B" (out, r); `scaling` is by module.
    """
    return {
        f"{module}.weight": factor
        * (tensors[f"{module}.lora_B"].float() @ tensors[f"{module}.lora_A"].float())
        for module, factor in scaling.items()
    }
