"""Experts that a checkpoint holds packed: one tensor for all experts of a layer.

Files name experts one by one (``mlp.experts.3.gate_proj.weight``), or pack them, gate and up in one:
``mlp.experts.gate_up_proj`` ``[experts, 2 inner, hidden]`` and ``mlp.experts.down_proj`` ``[experts, hidden, inner]``,
as transformers 5 does, or each matrix transposed, as Llama 4 and gpt-oss do. The shapes tell which. A loader that maps
experts one by one copies nothing of a packed file (seed 000, known problems).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

_PACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(\.weight)?")


class PackedExpert:
    """One expert's matrix in a packed tensor; asked for its usual name, it answers as an open safetensors file does.

    Attributes:
        tensor: the packed tensor's own name.
    """

    def __init__(self, file: Any, tensor: str, expert: int, rows: slice, transposed: bool) -> None:
        self.tensor = tensor
        self._file, self._expert, self._rows, self._transposed = file, expert, rows, transposed

    def get_tensor(self, name: str) -> Tensor:
        """The whole matrix ``[out, in]``."""
        return self[:]

    def get_slice(self, name: str) -> PackedExpert:
        """Rows and columns are read when they are asked for."""
        return self

    def get_shape(self) -> list[int]:
        """``[out, in]``; nothing is read."""
        shape = list(self._file.get_slice(self.tensor).get_shape())[1:]
        width = shape[0] if self._transposed else shape[1]
        return [self._rows.stop - self._rows.start, width]

    def __getitem__(self, index: Any) -> Tensor:
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        low, high, _ = rows.indices(self._rows.stop - self._rows.start)
        here = slice(self._rows.start + low, self._rows.start + max(low, high))
        packed = self._file.get_slice(self.tensor)
        if self._transposed:
            turned: Tensor = packed[self._expert, columns, here]
            return turned.T
        found: Tensor = packed[self._expert, here, columns]
        return found


def unpacked(files: Mapping[str, Any]) -> dict[str, PackedExpert]:
    """The usual names of experts that open files hold packed; shapes that fit neither form are left out.

    Args:
        files: tensor's name → the open file that holds it.
    """
    layers: dict[str, dict[str, str]] = {}
    for name in files:
        match = _PACKED.fullmatch(name)
        if match is not None and len(files[name].get_slice(name).get_shape()) == 3:
            layers.setdefault(match[1], {})[match[2]] = name
    found: dict[str, PackedExpert] = {}
    for prefix, names in layers.items():
        if len(names) == 2:
            found |= _layer(prefix, names["gate_up_proj"], names["down_proj"], files)
    return found


def _layer(prefix: str, both: str, down: str, files: Mapping[str, Any]) -> dict[str, PackedExpert]:
    experts, first, second = files[both].get_slice(both).get_shape()
    _, high, wide = files[down].get_slice(down).get_shape()
    if (first, second) == (2 * wide, high):
        turned, inner, hidden = False, wide, high
    elif (first, second) == (wide, 2 * high):
        turned, inner, hidden = True, high, wide
    else:
        return {}
    parts = (
        ("gate_proj", both, slice(0, inner)),
        ("up_proj", both, slice(inner, 2 * inner)),
        ("down_proj", down, slice(0, hidden)),
    )
    return {
        f"{prefix}.{expert}.{part}.weight": PackedExpert(files[tensor], tensor, expert, rows, turned)
        for expert in range(experts)
        for part, tensor, rows in parts
    }
