"""The checkpoint's weights, read by name when they are needed and dropped afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from align.checkpoints.packed import unpacked
from align.checkpoints.parameters import parameters
from align.checkpoints.table import Structure
from align.models.info import check_weights
from align.oracle.types import NotObservableError

Tensor = torch.Tensor
#: Elements of a weight that are widened to float64 at a time (64 MB).
PIECE = 1 << 23
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_EMBEDDING = "model.embed_tokens.weight"
#: Router, experts and shared experts: names of the families, the first that exists counts. ``{e}`` is the expert.
_MOE = {
    "moe.shared_gate": ("mlp.shared_expert_gate.weight",),
    "moe.router_logits": ("mlp.gate.weight", "block_sparse_moe.gate.weight", "mlp.router.weight"),
    "router_bias": ("mlp.gate.e_score_correction_bias",),
    "gate": ("mlp.experts.{e}.gate_proj.weight", "block_sparse_moe.experts.{e}.w1.weight"),
    "up": ("mlp.experts.{e}.up_proj.weight", "block_sparse_moe.experts.{e}.w3.weight"),
    "down": ("mlp.experts.{e}.down_proj.weight", "block_sparse_moe.experts.{e}.w2.weight"),
    "shared_gate": ("mlp.shared_experts.gate_proj.weight", "mlp.shared_expert.gate_proj.weight"),
    "shared_up": ("mlp.shared_experts.up_proj.weight", "mlp.shared_expert.up_proj.weight"),
    "shared_down": ("mlp.shared_experts.down_proj.weight", "mlp.shared_expert.down_proj.weight"),
    "attn.sinks": ("self_attn.sinks",),
}


class CheckpointWeights:
    """The safetensors files of a model.

    Args:
        directory: a Hugging Face checkpoint.
        dtype: the model's; engines convert what they load, and so does this.

    Raises:
        UserError: files are missing or cut.
    """

    def __init__(self, directory: Path, structure: Structure, dtype: torch.dtype) -> None:
        self._stack = ExitStack()
        self._structure, self._dtype = structure, dtype
        self._files: dict[str, Any] = {}
        for path in check_weights(directory):
            handle = self._stack.enter_context(safe_open(path, framework="pt"))
            self._files.update(dict.fromkeys(handle.keys(), handle))
        self._files.update(unpacked(self._files))
        self._names = {(one.kind, one.layer, one.bias): one.tensor for one in parameters(structure) if one.sole}
        #: Bytes read so far, as the files hold them.
        self.bytes_read = 0

    def close(self) -> None:
        """Close the files."""
        self._files.clear()
        self._stack.close()

    def name(self, kind: str, layer: int | None, *, bias: bool = False) -> str | None:
        """The tensor of the operator that produces a checkpoint; ``None`` if the files have none."""
        kind = kind.removesuffix("_partial")
        if kind == "logits" and self._structure.tied and not bias:
            return _EMBEDDING if _EMBEDDING in self._files else None
        found = self._names.get((kind, layer, bias))
        if found not in self._files and not bias and kind in _MOE:
            return self.of_experts(kind, layer)
        return found if found in self._files else None

    def of_experts(self, part: str, layer: int | None, expert: int = 0) -> str | None:
        """A tensor of an expert layer, see :data:`_MOE`; ``None`` if the files have none."""
        names = (f"model.layers.{layer}.{one.replace('{e}', str(expert))}" for one in _MOE.get(part, ()))
        return next((one for one in names if one in self._files), None)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor; nothing is read."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def read(
        self, name: str, rows: slice = slice(None), columns: slice | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Rows (and columns) of a tensor in ``dtype``, by default the model's.

        Raises:
            NotObservableError: quantised, or the file cannot be read.
        """
        try:
            part = self._files[name].get_slice(name)
            found: Tensor = part[rows] if columns is None else part[rows, columns]
        except (SafetensorError, OSError) as error:
            raise NotObservableError(f"{name} cannot be read from the checkpoint: {error}") from error
        if found.dtype not in _FLOATS:
            raise NotObservableError(f"{name} is stored as {found.dtype}: quantised weights are not recomputed")
        self.bytes_read += found.nbytes
        return found.to(dtype or self._dtype)

    def pieces(self, name: str, columns: slice | None = None) -> Iterator[tuple[int, Tensor]]:
        """``(first row, rows)`` of a matrix in pieces of at most :data:`PIECE` elements."""
        rows, width = self.shape(name)[0], self.shape(name)[1]
        each = max(1, PIECE // width)
        for start in range(0, rows, each):
            yield start, self.read(name, slice(start, min(rows, start + each)), columns)
