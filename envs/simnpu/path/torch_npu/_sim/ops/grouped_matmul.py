"""Products of groups of rows with a matrix each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import checks
from ..matmul import mm_out
from ..numerics import internal
from ..registry import operator

Tensor = torch.Tensor

ALONG_ROWS = 0
CUMULATIVE, COUNTS, KEY_VALUE = 0, 1, 2
#: Dtype of the bias for each dtype of x (op-plugin docs, npu_grouped_matmul, without quantisation).
_BIAS = {torch.float16: torch.float16, torch.bfloat16: torch.float32, torch.float32: torch.float32}


def _spans(name: str, given: Tensor | Sequence[int], kind: int, groups: int, rows: int) -> list[tuple[int, int, int]]:
    """(group, first row, end) of each group; reads the values of `given`."""
    checks.choice(name, "group_list_type", kind, (CUMULATIVE, COUNTS, KEY_VALUE))
    if isinstance(given, torch.Tensor):
        checks.dtype(name, "group_list", given, (torch.int64,))
        expected = (groups, 2) if kind == KEY_VALUE else (groups,)
        checks.exact_shape(name, "group_list", given, expected, "one entry for each matrix of weight")
        values = given.tolist()
    else:
        values = list(given)
        if len(values) != groups:
            checks.fail(name, "group_list", f"{len(values)} long", f"{groups} entries, one for each matrix of weight")
    if kind == KEY_VALUE:
        numbered = [(int(group), int(count)) for group, count in values]
    else:
        before = [0, *values[:-1]] if kind == CUMULATIVE else [0] * groups
        numbered = [(at, int(end) - int(start)) for at, (start, end) in enumerate(zip(before, values, strict=True))]
    spans: list[tuple[int, int, int]] = []
    first = 0
    for group, count in numbered:
        if count < 0 or first + count > rows or not 0 <= group < groups:
            meaning = {CUMULATIVE: "cumulative numbers of rows", COUNTS: "numbers of rows"}.get(kind, "group, rows")
            checks.fail(name, "group_list", values, f"{meaning} that are not negative and at most {rows} together")
        spans.append((group, first, first + count))
        first += count
    return spans


def _matrices(name: str, x: Tensor, weight: Sequence[Tensor]) -> list[Tensor]:
    """The matrices [K, N] of all groups."""
    if len(weight) == 1 and weight[0].dim() == 3:
        found = list(weight[0].unbind(0))
    else:
        for matrix in weight:
            checks.rank(name, "weight", matrix, (2,))
        found = list(weight)
    if not found:
        checks.fail(name, "weight", "empty", "at least one matrix")
    for matrix in found:
        checks.same_dtype(name, "weight", matrix, "x", x)
        if matrix.shape[0] != x.shape[1]:
            checks.fail(name, "weight", checks.shape(matrix), f"{x.shape[1]} rows a matrix, the columns of x")
        if matrix.shape[1] != found[0].shape[1]:
            checks.fail(name, "weight", checks.shape(matrix), f"{found[0].shape[1]} columns in every matrix")
    return found


def _biases(name: str, x: Tensor, bias: Sequence[Tensor] | None, groups: int, columns: int) -> list[Tensor] | None:
    if not bias:
        return None
    found = list(bias[0].unbind(0)) if len(bias) == 1 and bias[0].dim() == 2 else list(bias)
    if len(found) != groups:
        checks.fail(name, "bias", f"for {len(found)} groups", f"one for each of {groups} matrices of weight")
    for one in found:
        checks.dtype(name, "bias", one, (_BIAS[x.dtype],))
        checks.exact_shape(name, "bias", one, (columns,), "one number for each column of weight")
    return found


def _grouped(
    name: str,
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    bias: Sequence[Tensor] | None,
    group_list: Tensor | Sequence[int] | None,
    split_item: int | None,
    group_type: int | None,
    group_list_type: int | None,
    act_type: int | None,
    quantised: Sequence[object],
) -> list[Tensor]:
    if any(one is not None and (not isinstance(one, (list, tuple)) or len(one)) for one in quantised):
        checks.unsimulated(name, "quantisation, another output dtype or an activation's input")
    checks.choice(name, "split_item", split_item or 0, (0, 1, 2, 3))
    if (split_item or 0) < 2 or len(x) != 1 or group_type != ALONG_ROWS:
        checks.unsimulated(name, "anything but one x and one output, split along its rows (split_item 2, group_type 0)")
    if act_type:
        checks.unsimulated(name, f"an activation (act_type={act_type})")
    (rows,) = x
    checks.dtype(name, "x", rows, checks.FLOATS)
    checks.rank(name, "x", rows, (2,))
    matrices = _matrices(name, rows, weight)
    columns = matrices[0].shape[1]
    biases = _biases(name, rows, bias, len(matrices), columns)
    if group_list is None:
        checks.fail(name, "group_list", None, "the rows of each group, with one x for all groups")
    # Rows behind the last group stay undefined on hardware; here they are zero, so that a run repeats itself.
    out = rows.new_zeros(rows.shape[0], columns)
    for group, first, end in _spans(name, group_list, group_list_type or 0, len(matrices), rows.shape[0]):
        if first == end:
            continue
        if biases is None:
            mm_out(rows[first:end], matrices[group], out=out[first:end])
        else:
            product = internal(rows[first:end]) @ internal(matrices[group])
            out[first:end] = (product + biases[group].to(product.dtype)).to(out.dtype)
    return [out]


@operator("npu::npu_grouped_matmul", source="op-plugin docs, npu_grouped_matmul")
def npu_grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    bias: Sequence[Tensor] | None = None,
    scale: Sequence[Tensor] | None = None,
    offset: Sequence[Tensor] | None = None,
    antiquant_scale: Sequence[Tensor] | None = None,
    antiquant_offset: Sequence[Tensor] | None = None,
    per_token_scale: Sequence[Tensor] | None = None,
    group_list: Tensor | None = None,
    activation_input: Sequence[Tensor] | None = None,
    activation_quant_scale: Sequence[Tensor] | None = None,
    activation_quant_offset: Sequence[Tensor] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    tuning_config: Sequence[int] | None = None,
    output_dtype: int | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    scale_dtype: int | None = None,
    per_token_scale_dtype: int | None = None,
) -> list[Tensor]:
    """Return [y] with y[rows of group g] = x[0][rows of group g] @ weight of g + bias of g.

    x [rows, K]; weight one tensor [groups, K, N] or a matrix [K, N] for each group. group_list is int64 [groups]:
    ends of the groups' rows (group_list_type 0) or their numbers (1), or [groups, 2] of group and number (2).
    Only this use (split_item 2 or 3, group_type 0, no quantisation) is simulated. Rows behind the last group are
    zero.
    """
    quantised = (
        scale, offset, antiquant_scale, antiquant_offset, per_token_scale, activation_input, activation_quant_scale,
        activation_quant_offset, output_dtype, x_dtype, weight_dtype, scale_dtype, per_token_scale_dtype,
    )  # fmt: skip
    return _grouped(
        "npu::npu_grouped_matmul", x, weight, bias, group_list, split_item, group_type, group_list_type, act_type,
        quantised,
    )  # fmt: skip


@operator("npu::npu_grouped_matmul.List", source="op-plugin docs, npu_grouped_matmul")
def npu_grouped_matmul_list(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    bias: Sequence[Tensor] | None = None,
    scale: Sequence[Tensor] | None = None,
    offset: Sequence[Tensor] | None = None,
    antiquant_scale: Sequence[Tensor] | None = None,
    antiquant_offset: Sequence[Tensor] | None = None,
    per_token_scale: Sequence[Tensor] | None = None,
    group_list: Sequence[int] | None = None,
    activation_input: Sequence[Tensor] | None = None,
    activation_quant_scale: Sequence[Tensor] | None = None,
    activation_quant_offset: Sequence[Tensor] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    output_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Return what `npu_grouped_matmul` returns, with a group list of Python ints."""
    quantised = (
        scale, offset, antiquant_scale, antiquant_offset, per_token_scale, activation_input, activation_quant_scale,
        activation_quant_offset, output_dtype,
    )  # fmt: skip
    return _grouped(
        "npu::npu_grouped_matmul.List", x, weight, bias, group_list, split_item, group_type, group_list_type, act_type,
        quantised,
    )  # fmt: skip
