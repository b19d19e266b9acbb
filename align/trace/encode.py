"""Writes the safetensors format.

A step has many small tensors: the library's own writer takes 15 ms for 600 of them, which is a tenth of a step, and its
faster interface changes between versions. The format is short (eight bytes of header length, a JSON header, the data);
reading is left to the library.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

#: Names of the format's element types.
DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
#: The header is padded so that the data begin at a multiple of this.
_ALIGNMENT = 8


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """The pieces of a safetensors file.

    Args:
        tensors: on the CPU; made contiguous if need be.
        metadata: of the file.

    Raises:
        ValueError: an element type that :data:`DTYPES` does not have.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    pieces: list[memoryview] = []
    end = 0
    # Wide elements first, so that each tensor lies at a multiple of its element's size.
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} has dtype {tensor.dtype}, which is not written")
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        if end > start:
            pieces.append(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little")
    yield text
    yield from pieces
