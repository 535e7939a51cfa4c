"""Numbered weights on their way from a learner to engines: one flat buffer, a manifest and a checksum.

`pack` fills the buffer, `PackedWeights.verify` proves that what arrived is what was sent, `tensors` are
views of it. `Transfer` is the state machine of one publication. Knows no process and no transport.
"""

from __future__ import annotations

import time
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rollouts.samples import Version

if TYPE_CHECKING:
    import torch

ALIGN = 64  # bytes; every tensor starts at a multiple
WORDS = 512  # 64-bit words in a row of the checksum's table
BLOCK = 1 << 22  # bytes that are summed at a time, so that they stay in the cache


class WeightsError(RuntimeError):
    """A publication that did not arrive as it was sent."""


@dataclass(frozen=True)
class Entry:
    """One tensor in the buffer: dtype as torch names it ("float32"), offset and nbytes in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass
class PackedWeights:
    """A version's tensors in one buffer of bytes. `kind`: full | lora; `meta`: what the kind needs more."""

    version: Version
    entries: list[Entry]
    buffer: np.ndarray  # (nbytes,) uint8
    sum: int
    kind: str = "full"
    meta: dict[str, Any] = field(default_factory=dict)

    def verify(self) -> None:
        """Raise WeightsError when buffer or manifest are not what was packed."""
        if _seal(self) != self.sum:
            raise WeightsError(
                f"weights {self.version} arrived with another checksum than they were sent with"
            )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Views of the buffer by name, without a copy. They must not be written to."""
        import torch

        found = {}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            for entry in self.entries:
                dtype = getattr(torch, entry.dtype)
                if entry.nbytes:
                    flat = self.buffer[entry.offset : entry.offset + entry.nbytes]
                    found[entry.name] = torch.frombuffer(flat, dtype=dtype).reshape(entry.shape)
                else:
                    found[entry.name] = torch.empty(entry.shape, dtype=dtype)
        return found


def pack(
    named: Mapping[str, torch.Tensor],
    version: Version,
    kind: str = "full",
    meta: dict[str, Any] | None = None,
) -> PackedWeights:
    """Copy named tensors (any device, any dtype) into one buffer and note its checksum."""
    import torch

    entries, offset = [], 0
    for name, tensor in named.items():
        nbytes = tensor.numel() * tensor.element_size()
        entries.append(
            Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset, nbytes)
        )
        offset += -(-nbytes // ALIGN) * ALIGN
    buffer = np.zeros(offset, np.uint8)
    for entry, tensor in zip(entries, named.values()):
        if entry.nbytes:
            flat = torch.from_numpy(buffer[entry.offset : entry.offset + entry.nbytes])
            flat.view(tensor.dtype).reshape(entry.shape).copy_(tensor.detach())
    packed = PackedWeights(version, entries, buffer, 0, kind, meta or {})
    packed.sum = _seal(packed)
    return packed


def _seal(packed: PackedWeights) -> int:
    """Checksum over version, manifest and bytes."""
    manifest = repr((packed.version, packed.entries, packed.kind, sorted(packed.meta.items())))
    return zlib.crc32(manifest.encode(), checksum(packed.buffer))


def checksum(buffer: np.ndarray) -> int:
    """Checksum of uint8 bytes at the speed of memory.

    The bytes are a table of 64-bit words, WORDS a row; the sums of every row and every column, modulo 2**64,
    go through CRC-32. One changed word changes its row's sum, and two that change places change the sums
    of their rows or of their columns.
    """
    whole = len(buffer) // (8 * WORDS) * (8 * WORDS)
    table = buffer[:whole].view(np.uint64).reshape(-1, WORDS)
    columns, value = np.zeros(WORDS, np.uint64), len(buffer)
    rows_at_once = BLOCK // (8 * WORDS)
    for start in range(0, len(table), rows_at_once):
        block = table[start : start + rows_at_once]
        value = zlib.crc32(block.sum(axis=1).tobytes(), value)
        columns += block.sum(axis=0)
    value = zlib.crc32(columns.tobytes(), value)
    return zlib.crc32(buffer[whole:].tobytes(), value)


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
        self.state = "announced"

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
            self.fail("deadline")
            raise WeightsError(
                f"weights {self.version}: {self.receiver} stayed '{self.state}' for {waited:.0f} s "
                f"(deadline {self.deadline_s:.0f} s)"
            )


def accept(packed: PackedWeights, engine: Any, transfer: Transfer) -> None:
    """Verify what was received and let the engine take it over. Raises WeightsError; then nothing changed."""
    transfer.advance("received")
    try:
        packed.verify()
    except WeightsError as error:
        transfer.fail(str(error))
        raise
    transfer.advance("verified")
    engine.load_weights(packed)
    transfer.advance("active")


def lora_delta(tensors: Mapping[str, torch.Tensor], scaling: Mapping[str, float]) -> dict[str, torch.Tensor]:
    """What adapters add to the weights they sit on: {weight name: scaling * B @ A}, in float32.

    `tensors` hold "<module>.lora_A" (r, in) and "<module>.lora_B" (out, r); `scaling` is by module.
    """
    return {
        f"{module}.weight": factor
        * (tensors[f"{module}.lora_B"].float() @ tensors[f"{module}.lora_A"].float())
        for module, factor in scaling.items()
    }
