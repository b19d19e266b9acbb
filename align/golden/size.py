"""Whether golden fits into this machine's memory, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from pathlib import Path

import psutil
from safetensors import safe_open

from align.checkpoints.table import Structure
from align.doctor import cgroup
from align.errors import UserError
from align.models.info import ModelInfo, check_weights

_BYTES = 4
#: On the weights: one tensor of the file while it is widened, buffers of the library.
OVERHEAD = 1.3
#: Scores of one layer's heads that live at once: the product, the masked sum, the softmax.
_SCORES = 3


class TooLargeError(UserError):
    """Golden does not fit into memory."""


def parameter_count(info: ModelInfo) -> int:
    """Numbers in the checkpoint's files; a head that shares the embedding's weight is stored, and counted, once."""
    total = 0
    for file in check_weights(info.path):
        with safe_open(file, framework="np") as weights:
            total += sum(prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    return total


def needed_bytes(parameters: int, structure: Structure, lengths: Iterable[int]) -> int:
    """Bytes of float32 weights, of one layer's attention scores, and of the checkpoints of the longest sequence.

    Args:
        lengths: of the sequences, in tokens.
    """
    longest = max(lengths)
    scores = _SCORES * structure.heads * longest * longest
    row = sum(prod(structure.size(axis) for axis in name.kind.axes[1:]) for name in structure.names())
    return round(_BYTES * (OVERHEAD * parameters + scores + row * longest))


def available_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """What the machine has left, or the container if that is less."""
    limit = cgroup.memory(proc, groups)
    free = int(psutil.virtual_memory().available)
    return free if limit is None else min(free, limit.left)


def refuse_too_large(needed: int, available: int, parameters: int) -> None:
    """Stop before the machine starts to swap.

    Raises:
        TooLargeError: it does not fit; says both numbers.
    """
    if needed > available:
        raise TooLargeError(
            f"golden needs about {needed / 1e9:.2f} GB for {parameters / 1e6:.0f} million parameters in float32, and "
            f"{available / 1e9:.2f} GB of memory are available",
            "take a smaller model of the same architecture, or a machine with more memory: the run directory can be "
            "copied there",
        )
