"""Argument checks of the simulated operators, after the hardware's documentation.

Every failed check raises RuntimeError that names the operator, the argument, what was given and what is
accepted. Only metadata is read unless a function says otherwise, so that a check costs little beside the
operator itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn

import torch

OPERATORS_FOLDER = "envs/simnpu/path/torch_npu/_sim/ops/"
SIGNATURES_FOLDER = "envs/simnpu/path/torch_npu/_sim/signatures/"

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
HALVES = (torch.float16, torch.bfloat16)
INDICES = (torch.int32, torch.int64)
MASKS = (torch.bool, torch.int8, torch.uint8)

TEMPLATE_SIZE = 2048
"""Side of the compressed causal mask that sparse modes 2, 3 and 4 take."""

IntList = Sequence[int] | torch.Tensor


class UnsimulatedOperator(NotImplementedError):  # noqa: N818  (reads as what it says)
    """The simulated NPU has no numerics for this operator, or not for this use of it."""


def unsimulated(operator: str, use: str) -> NoReturn:
    """Raise UnsimulatedOperator for a documented use of a simulated operator that is left out here."""
    raise UnsimulatedOperator(
        f"{operator}: {use} is not simulated; add it to {operator} in {OPERATORS_FOLDER} with a float64 test"
    )


def fail(operator: str, argument: str, given: object, accepted: str) -> NoReturn:
    """Raise the RuntimeError of a refused argument."""
    raise RuntimeError(f"{operator}: {argument} is {given}; accepted: {accepted}")


def shape(tensor: torch.Tensor) -> str:
    """Spell a tensor's shape for a message."""
    return f"shape {tuple(tensor.shape)}"


def dtype(operator: str, argument: str, tensor: torch.Tensor, accepted: Sequence[torch.dtype]) -> None:
    """Check that `tensor` has one of the `accepted` dtypes."""
    if tensor.dtype not in accepted:
        fail(operator, argument, tensor.dtype, ", ".join(str(one) for one in accepted))


def same_dtype(operator: str, argument: str, tensor: torch.Tensor, other: str, reference: torch.Tensor) -> None:
    """Check that `tensor` has the dtype of the argument called `other`."""
    if tensor.dtype != reference.dtype:
        fail(operator, argument, tensor.dtype, f"{reference.dtype}, the dtype of {other}")


def rank(operator: str, argument: str, tensor: torch.Tensor, accepted: Sequence[int]) -> None:
    """Check that `tensor` has one of the `accepted` numbers of dimensions."""
    if tensor.dim() not in accepted:
        fail(operator, argument, shape(tensor), f"{' or '.join(str(one) for one in accepted)} dimensions")


def exact_shape(operator: str, argument: str, tensor: torch.Tensor, expected: Sequence[int], why: str) -> None:
    """Check that `tensor` has exactly the `expected` shape; `why` says where that shape comes from."""
    if tuple(tensor.shape) != tuple(expected):
        fail(operator, argument, shape(tensor), f"shape {tuple(expected)}, {why}")


def not_empty(operator: str, argument: str, tensor: torch.Tensor) -> None:
    """Check that `tensor` has at least one element."""
    if tensor.numel() == 0:
        fail(operator, argument, f"empty, {shape(tensor)}", "a tensor with at least one element")


def choice(operator: str, argument: str, value: str | int, accepted: Sequence[str | int]) -> None:
    """Check that `value` is one of `accepted`."""
    if value not in accepted:
        fail(operator, argument, repr(value), ", ".join(repr(one) for one in accepted))


def epsilon(operator: str, value: float) -> None:
    """Check the epsilon of a norm: finite and not negative."""
    if not (math.isfinite(value) and value >= 0.0):
        fail(operator, "epsilon", value, "a finite number >= 0")


def scale(operator: str, argument: str, value: float) -> None:
    """Check the factor of the attention scores: finite and not zero."""
    if not math.isfinite(value) or value == 0.0:
        fail(operator, argument, value, "a finite number other than 0, usually 1/sqrt(head_dim)")


def heads(operator: str, query_argument: str, num_heads: int, kv_argument: str, num_kv_heads: int) -> int:
    """Check head counts and return the number of key/value heads (0 stands for `num_heads`)."""
    if num_heads < 1 or num_heads > 256:
        fail(operator, query_argument, num_heads, "1 to 256")
    kv = num_kv_heads or num_heads
    if kv < 1 or num_heads % kv or num_heads // kv > 64:
        fail(
            operator,
            kv_argument,
            num_kv_heads,
            f"a divisor of {query_argument}={num_heads}, at least 1/64 of it",
        )
    return kv


def head_dim(operator: str, argument: str, size: int) -> None:
    """Check a head dimension of attention: a multiple of 16 (32 bytes of a half dtype), at most 512."""
    if size < 16 or size > 512 or size % 16:
        fail(operator, f"head_dim of {argument}", size, "a multiple of 16, at most 512")


def block_size(operator: str, argument: str, size: int, multiple: int, largest: int) -> None:
    """Check the number of tokens in one block of a paged cache."""
    if size < multiple or size > largest or size % multiple:
        fail(operator, argument, size, f"a multiple of {multiple}, at most {largest}")


def host_integers(operator: str, argument: str, values: IntList) -> list[int]:
    """Return `values` (ints, or an integer tensor of one dimension) as a list of Python ints."""
    if isinstance(values, torch.Tensor):
        dtype(operator, argument, values, INDICES)
        rank(operator, argument, values, (1,))
        return [int(one) for one in values.tolist()]
    return [int(one) for one in values]


def cumulative_lengths(operator: str, argument: str, ends: Sequence[int], total: int, of: str) -> None:
    """Check cumulative lengths: at least one, not negative, not falling, the last equal to `total`."""
    if not ends:
        fail(operator, argument, "empty", "one end per sequence")
    previous = 0
    for index, end in enumerate(ends):
        if end < previous:
            fail(operator, f"{argument}[{index}]", end, f"cumulative lengths, so at least {previous}")
        previous = end
    if previous != total:
        fail(operator, f"the last of {argument}", previous, f"{total}, the number of tokens of {of}")


def raw_lengths(operator: str, argument: str, lengths: Sequence[int], smallest: int, largest: int, why: str) -> None:
    """Check lengths of single sequences: each from `smallest` to `largest`; `why` says what `largest` is."""
    for index, length in enumerate(lengths):
        if length < smallest or length > largest:
            fail(operator, f"{argument}[{index}]", length, f"{smallest} to {largest}, {why}")


def slots(operator: str, argument: str, indices: torch.Tensor, rows: int, capacity: int) -> None:
    """Check cache slots: one per row, each below `capacity`, or -1 (skipped). Reads the values."""
    rank(operator, argument, indices, (1,))
    if indices.shape[0] != rows:
        fail(operator, argument, shape(indices), f"shape ({rows},), one slot for each token")
    if rows:
        low, high = (int(one) for one in torch.aminmax(indices))
        if low < -1 or high >= capacity:
            fail(
                operator,
                argument,
                f"from {low} to {high}",
                f"0 to {capacity - 1} (blocks * block size), or -1",
            )


def block_table(
    operator: str,
    argument: str,
    table: torch.Tensor,
    lengths: Sequence[int],
    tokens_per_block: int,
    num_blocks: int,
) -> list[list[int]]:
    """Check a block table and return the block ids that each sequence of `lengths` needs. Reads the values.

    `table` is int32 [rows, blocks per sequence], with a row for each sequence and perhaps padding rows after
    them. Entries behind a sequence's last block are never read.
    """
    dtype(operator, argument, table, (torch.int32,))
    rank(operator, argument, table, (2,))
    if table.shape[0] < len(lengths):
        fail(operator, argument, shape(table), f"at least {len(lengths)} rows, one for each sequence")
    width = table.shape[1]
    rows: list[list[int]] = table[: len(lengths)].tolist()
    needed: list[list[int]] = []
    for index, length in enumerate(lengths):
        count = -(-length // tokens_per_block)
        if count > width:
            given = f"{width} blocks of {tokens_per_block} wide, while sequence {index} has {length} tokens"
            fail(operator, argument, given, f"at least {count} blocks per sequence")
        ids = rows[index][:count]
        for one in ids:
            if one < 0 or one >= num_blocks:
                fail(
                    operator,
                    f"{argument}[{index}]",
                    f"block {one}",
                    f"0 to {num_blocks - 1}, a block of the cache",
                )
        needed.append(ids)
    return needed


_whole_templates: dict[tuple[int, torch.dtype], bool] = {}


def causal_template(operator: str, argument: str, mask: torch.Tensor | None, sparse_mode: int) -> None:
    """Check the compressed causal mask of sparse modes 2, 3 and 4. Reads the values.

    It is [2048, 2048] (perhaps with leading dimensions of 1), bool, int8 or uint8, 1 above the diagonal and 0
    elsewhere. The whole content is compared once for each storage, later calls compare a sample of rows: the
    engines pass the same mask to every layer of every step.
    """
    if mask is None:
        fail(operator, argument, None, f"a causal mask of 2048 x 2048, which sparse_mode={sparse_mode} needs")
    dtype(operator, argument, mask, MASKS)
    leading = mask.shape[:-2]
    if mask.dim() not in (2, 3, 4) or tuple(mask.shape[-2:]) != (TEMPLATE_SIZE,) * 2 or any(n != 1 for n in leading):
        accepted = f"shape (2048, 2048), (1, 2048, 2048) or (1, 1, 2048, 2048) with sparse_mode={sparse_mode}"
        fail(operator, argument, shape(mask), accepted)
    square = mask.reshape(TEMPLATE_SIZE, TEMPLATE_SIZE)
    key = (square.data_ptr(), square.dtype)
    step = 1 if key not in _whole_templates else TEMPLATE_SIZE // 8 - 1
    rows = torch.arange(0, TEMPLATE_SIZE, step)
    expected = torch.arange(TEMPLATE_SIZE) > rows[:, None]
    if not torch.equal(square[::step].bool(), expected):
        fail(
            operator,
            argument,
            "not causal",
            f"1 above the diagonal, 0 elsewhere, with sparse_mode={sparse_mode}",
        )
    _whole_templates[key] = True
