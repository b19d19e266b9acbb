"""What an oracle pass and a capture cost, computed from the shapes alone: to be told before anything runs.

Sizes are exact where shapes decide them; memory and time are estimates. All numbers are for one side.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from math import ceil, prod
from typing import Any

import torch

from align.checkpoints.table import Name, Structure
from align.oracle.attention import SCORES
from align.oracle.operators import CHUNK, MIN_ROWS
from align.oracle.weights import PIECE

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
#: Float64 numbers that live at once for each element of a chunk: result, magnitude, and what is folded from them.
_PER_ELEMENT = 14
#: Float64 numbers that live at once for each score of attention.
_PER_SCORE = 8
#: Arithmetic on every element of a result beside its products: magnitude, error, sums, rounding.
_ELEMENT_WORK = 60
#: Products of attention: scores, output, and two for the magnitude.
_ATTENTION_PRODUCTS = 4
#: Float32 numbers that are always kept of a row: 8 projections and a sum of squares, and 3 sums of the residual.
_KEPT_PER_ROW = 12
#: Of those, a digest's.
_KEPT_PER_DIGEST = 9
#: Float32 numbers that are kept of a step: its worst element.
_KEPT_PER_STEP = 4
#: Of a phase, in a lean recording: 8 channels and 5 rows with what names them; there are two phases.
_KEPT_PER_PHASE, _PHASES = 8 * 4 + 5 * 5, 2


@dataclass(frozen=True)
class Rates:
    """What a machine does in a second.

    Attributes:
        products: floating-point operations of float64 matrix products.
        elements: operations on float64 elements outside of products.
        bytes: read from files.
        record: seconds that one checkpoint of one step takes beside all that, whatever its size.
    """

    products: float = 2.0e10
    elements: float = 1.0e9
    bytes: float = 5.0e8
    record: float = 3.0e-3


@dataclass(frozen=True)
class Cost:
    """What a pass takes.

    Attributes:
        what: in a few words.
        weight_bytes: of the checkpoint's files that are read, each counted once.
        record_bytes: of the trace that are read (oracle) or written (capture).
        memory: bytes at the peak, beside the process itself.
        flops: of matrix products.
        element_work: operations outside of products.
        seconds: at the given rates.
    """

    what: str
    weight_bytes: int
    record_bytes: int
    memory: int
    flops: int
    element_work: int
    seconds: float

    @property
    def bytes_read(self) -> int:
        """Files and records together."""
        return self.weight_bytes + self.record_bytes

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)


def measured_rates(seconds: float = 0.3) -> Rates:
    """Measure this machine's arithmetic, as many threads as torch uses; the rate of files keeps its default."""
    a, b = torch.rand(256, 1024, dtype=torch.float64), torch.rand(1024, 1024, dtype=torch.float64)
    products = _per_second(lambda: a @ b, 2.0 * 256 * 1024 * 1024, seconds / 2)
    x = torch.rand(1 << 20, dtype=torch.float64)
    return Rates(products=products, elements=_per_second(lambda: x * x, float(x.numel()), seconds / 2))


def _per_second(work: Callable[[], object], size: float, seconds: float) -> float:
    work()
    began, count = time.perf_counter(), 0
    while count < 3 or time.perf_counter() - began < seconds:
        work()
        count += 1
    return count * size / (time.perf_counter() - began)


def estimate(
    structure: Structure,
    dtype: str,
    rows: int,
    steps: int,
    *,
    requests: int = 1,
    span: int | None = None,
    names: Iterable[str] | None = None,
    rates: Rates | None = None,
) -> Cost:
    """What :meth:`align.oracle.Oracle.judge` takes for a dense model.

    Args:
        rows: of all steps together: prompt tokens and generated ones.
        steps: engine steps; each has one row of logits per request.
        span: longest history of a row in tokens, all rows by default; attention is counted as if every row had it.
        names: checkpoints; all by default.
        rates: of this machine; :func:`measured_rates` measures them.

    Raises:
        ValueError: an unknown dtype, or a checkpoint whose shape the structure does not tell.
    """
    size = _size_of(dtype)
    rates, span = rates or Rates(), rows if span is None else span
    wanted = None if names is None else set(names)
    weights = records = flops = work = memory = judged = 0
    for name in structure.names():
        if wanted is not None and str(name) not in wanted:
            continue
        judged += 1
        out, count = _width(structure, name), steps * requests if name.kind.axes[0] == "requests" else rows
        inner = sum(_width(structure, one) for one in structure.inputs(name))
        operator = structure.operator(name.kind)
        records += count * (out + inner) * size
        work += count * out * _ELEMENT_WORK
        weight, product, more = 0, 0, 0
        if operator == "embedding":
            weight = min(rows, structure.vocab) * structure.hidden
        elif operator == "rms_norm":
            weight = structure.head_dim if "head_dim" in name.kind.axes else structure.hidden
        elif operator == "linear":
            weight, product = out * inner, 2 * count * out * inner
            more = min(weight, PIECE) * (size + 8) + min(count, max(MIN_ROWS, CHUNK // out)) * inner * 8
            work += weight * ceil(count / max(MIN_ROWS, CHUNK // out))  # widened once for each pass
        elif operator == "attention":
            product = _ATTENTION_PRODUCTS * 2 * rows * span * out
            more = min(SCORES, rows * structure.heads * span) * 8 * _PER_SCORE
            work += rows * structure.heads * span * _PER_SCORE
        weights, flops = weights + weight, flops + product
        chunk = min(count, max(MIN_ROWS if operator == "linear" else 1, CHUNK // out))
        memory = max(memory, count * (out + inner) * size + chunk * out * 8 * _PER_ELEMENT + more)
    seconds = flops / rates.products + work / rates.elements + (weights * size + records) / rates.bytes
    seconds += judged * steps * rates.record
    what = (
        "oracle, every checkpoint"
        if wanted is None
        else f"oracle, {len(wanted)} checkpoint{'' if len(wanted) == 1 else 's'}"
    )
    return Cost(what, weights * size, records, memory, flops, work, seconds)


def capture_cost(
    structure: Structure,
    dtype: str,
    rows: int,
    steps: int,
    *,
    requests: int = 1,
    values: Sequence[str] = ("*",),
    largest_step: int | None = None,
    sample_rows: int = 64,
    digested: int | None = None,
    rates: Rates | None = None,
) -> Cost:
    """What a capture leaves and takes inside the worker: digests and residuals of everything, ``values`` of some.

    Args:
        rows, steps, requests: as in :func:`estimate`.
        values: patterns of the checkpoints whose values are kept.
        largest_step: rows of the largest step, all by default; its tensors are held until it ends.
        sample_rows: rows of a step whose operators are recomputed at most. They are computed in float32, which is at
            least as fast as the float64 of the rates.
        digested: of a lean recording: rows whose digests are kept.

    Raises:
        ValueError: an unknown dtype, or a checkpoint whose shape the structure does not tell.
    """
    size = _size_of(dtype)
    rates = rates or Rates()
    held = min(rows, largest_step or rows)
    recomputed = min(rows, steps * sample_rows)
    written = flops = work = memory = 0
    for name in structure.names():
        width = _width(structure, name)
        logits = name.kind.axes[0] == "requests"
        count, most = (steps * requests, requests) if logits else (rows, held)
        each = 8 if name.kind.integer else size
        memory += most * width * each
        if any(fnmatchcase(str(name), pattern) for pattern in values):
            written += count * width * each
        if name.kind.integer:
            continue
        if digested is None:
            written += 4 * (count * _KEPT_PER_ROW + steps * _KEPT_PER_STEP)
        else:
            heads = structure.size(name.kind.axes[1]) if len(name.kind.axes) > 2 else 1
            phase = _KEPT_PER_PHASE + 3 * heads
            written += 4 * (digested * _KEPT_PER_DIGEST + steps * _KEPT_PER_STEP + _PHASES * phase)
        work += count * width * 8
        if structure.operator(name.kind) == "linear":
            inner = sum(_width(structure, one) for one in structure.inputs(name))
            flops += 2 * (count if logits else recomputed) * width * inner
    kept = "every value" if "*" in values else f"values of {', '.join(values)}" if values else "no values"
    seconds = flops / rates.products + work / rates.elements + written / rates.bytes
    return Cost(f"capture, {kept}", 0, written, memory, flops, work, seconds)


def _size_of(dtype: str) -> int:
    if dtype not in _BYTES:
        raise ValueError(f"unknown dtype {dtype!r}; valid: {', '.join(_BYTES)}")
    return _BYTES[dtype]


def _width(structure: Structure, name: Name) -> int:
    try:
        return prod(structure.size(axis) for axis in name.kind.axes[1:])
    except KeyError as error:
        raise ValueError(f"the structure does not tell the size of {name}: no axis {error}") from error


def cost_table(costs: Sequence[Cost]) -> str:
    """The costs as a text table, sizes in decimal units."""
    head: tuple[str, ...] = ("", "weights read", "records", "memory", "float64 products", "time")
    lines = [head]
    for cost in costs:
        sizes = (_bytes(one) for one in (cost.weight_bytes, cost.record_bytes, cost.memory))
        lines.append((cost.what, *sizes, f"{cost.flops / 1e12:.3g} TFLOP", _time(cost.seconds)))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _bytes(count: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} B"


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
