"""The operators that write and read the paged cache, seen as they are called: with the indices that they really get,
and attention and cache operators of any kind with all their arguments.

Whatever engine, backend or patch hands an index on, the operator is its last stop. A dispatch mode sees it there, on
the simulated device and on hardware alike. It is on while an attention runs, for a handful of operators per layer.
``cache_operators.tsv`` names the arguments that hold indices; :mod:`align.fa.operators` knows the operators whose
arguments are recorded as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from align.fa.operators import operators

_FIELDS = ("operator", "role", "key", "value", "key_cache", "value_cache", "index", "q_lengths", "kv_lengths")


@dataclass(frozen=True)
class CacheOperator:
    """A row of the table: which argument is what; empty if the operator has no such one.

    ``role`` is ``write`` or ``read``; ``index`` are the slots of a write and the block table of a read.
    """

    operator: str
    role: str
    key: str
    value: str
    key_cache: str
    value_cache: str
    index: str
    q_lengths: str
    kv_lengths: str


@lru_cache(maxsize=1)
def cache_operators() -> Mapping[str, CacheOperator]:
    """By name, ``atb::_npu_reshape_and_cache``."""
    lines = Path(__file__).with_name("cache_operators.tsv").read_text(encoding="utf-8").splitlines()
    assert tuple(lines[0].split("\t")) == _FIELDS
    rows = [CacheOperator(*line.split("\t")) for line in lines[1:]]
    return {row.operator: row for row in rows}


@dataclass(frozen=True)
class Write:
    """A call that writes the cache.

    Attributes:
        key, value: rows ``[N, heads, dim]``.
        key_cache, value_cache: ``[blocks, block_size, heads, dim]``.
        slots: as handed over.
    """

    key: Tensor
    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    slots: Tensor


@dataclass(frozen=True)
class Read:
    """A call of attention.

    Attributes:
        keys, values: the cache ``[blocks, block_size, …]`` where there is a table, else the rows themselves.
        tables: as handed over; ``None``: the cache is not read.
        q_lens, kv_lens: int64 ``[B]`` on the CPU, of each row of the batch as the operator sees it.
        q_starts: int64 ``[B + 1]`` where the operator takes cumulative ends.
        block_size: tokens in one block as the operator takes the cache; ``None`` without a table.
    """

    keys: Tensor
    values: Tensor
    tables: Tensor | None
    q_lens: Tensor
    kv_lens: Tensor
    q_starts: Tensor | None = None
    block_size: int | None = None


class CacheListener(Protocol):
    """What hears of the calls; see :class:`adapters.probe.indices.IndexRecorder`."""

    def before_write(self, call: Write) -> None: ...

    def after_write(self, call: Write) -> None: ...

    def before_read(self, call: Read) -> None: ...

    def fail(self, what: str, error: Exception) -> None: ...


class CallListener(Protocol):
    """What hears of whole calls; see :class:`adapters.probe.operator_calls.CallRecorder`."""

    def at(self, layer: int) -> None: ...

    def before(self, operator: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None: ...

    def fail(self, what: str, error: Exception) -> None: ...


class CacheCalls(TorchDispatchMode):
    """Tells listeners of the operators that run meanwhile.

    Args:
        listener: hears of the operators of the cache.
        calls: hears of attention and cache operators, of each before it runs.
    """

    def __init__(self, listener: CacheListener | None, calls: CallListener | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._listener, self._calls = listener, calls
        #: Operator → its name, if its arguments are recorded. Most are ATen's.
        self._names: dict[Any, str | None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if self._calls is not None:
            self._hear(self._calls, func, args, given)
        listener = self._listener
        known = None if listener is None else cache_operators().get(func._schema.name)
        if listener is None or known is None:
            return func(*args, **given)
        written: Write | None = None
        try:
            values = arguments(func._schema, args, given)
            # Our own computing is nobody else's business, above all not that of the watch for host computing.
            with _disable_current_modes():
                if known.role == "write":
                    written = write_of(known, values)
                    listener.before_write(written)
                else:
                    listener.before_read(read_of(known, values))
        except Exception as error:  # an observer must not stop the engine; what it missed is reported
            listener.fail(known.operator, error)
        result = func(*args, **given)
        if written is not None:
            try:
                with _disable_current_modes():
                    listener.after_write(written)
            except Exception as error:
                listener.fail(known.operator, error)
        return result

    def _hear(self, calls: CallListener, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Before the operator runs: it may raise."""
        name = self._names.get(func, "")
        if name == "":
            name = self._names[func] = known_operator(func._schema.name)
        if name is None:
            return
        try:
            with _disable_current_modes():
                calls.before(name, args, kwargs)
        except Exception as error:
            calls.fail(name, error)


def known_operator(schema_name: str) -> str | None:
    """The name of an operator whose arguments are recorded, of ``npu::npu_fused_infer_attention_score``."""
    name = schema_name.rpartition("::")[2]
    return name if name in operators() else None


def arguments(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a call by name, defaults included."""
    found = {one.name: one.default_value for one in schema.arguments if one.has_default_value()}
    found.update(zip((one.name for one in schema.arguments), args, strict=False))
    found.update(kwargs)
    return found


def write_of(known: CacheOperator, values: Mapping[str, Any]) -> Write:
    """The call in common terms.

    Raises:
        KeyError: an argument is missing.
    """
    names = (known.key, known.value, known.key_cache, known.value_cache, known.index)
    return Write(*(values[name] for name in names))


def read_of(known: CacheOperator, values: Mapping[str, Any]) -> Read:
    """The call in common terms; see :func:`_read_of`."""
    found = _read_of(known, values)
    size = None if found.tables is None else int(values.get("block_size") or found.keys.shape[1])
    return replace(found, block_size=size)


def _read_of(known: CacheOperator, values: Mapping[str, Any]) -> Read:
    """The call in common terms.

    Layouts, from the operators' documentation: in TND lengths of queries are cumulative ends, and those of keys too
    unless there is a block table; in the others both are lengths, and queries without lengths are all as long as the
    tensor. Paged attention has one query per row.

    Raises:
        KeyError, ValueError: an argument is missing, or a layout is not known.
    """
    keys, held = values[known.key_cache], values[known.value_cache]
    tables = values.get(known.index) if known.index else None
    kv = _lengths(values[known.kv_lengths])
    layout = values.get("input_layout")
    if layout == "TND":
        ends = _lengths(values[known.q_lengths])
        assert ends is not None, "TND without lengths"
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
        if tables is None:
            kv = starts.diff() if kv is None else kv.diff(prepend=torch.zeros(1, dtype=torch.int64))
        assert kv is not None, "a block table without lengths"
        return Read(keys, held, tables, starts.diff(), kv, starts)
    if not known.q_lengths:
        assert kv is not None, "paged attention without lengths"
        return Read(keys, held, tables, torch.ones_like(kv), kv)
    q = _lengths(values[known.q_lengths])
    if q is None:
        shape = values["query"].shape
        axis = {"BSH": 1, "BSND": 1, "BNSD": 2}.get(str(layout))
        if axis is None:
            raise ValueError(f"layout {layout} without lengths of the queries")
        q = torch.full((shape[0],), shape[axis], dtype=torch.int64)
    if kv is None:
        raise ValueError(f"{known.operator} without lengths of the keys")
    return Read(keys, held, tables, q, kv)


def _lengths(value: Any) -> Tensor | None:
    if value is None:
        return None
    found = value if isinstance(value, Tensor) else torch.tensor([int(one) for one in value])
    # A copy: a layer that changes lengths in place must not change what the layers before it were handed.
    return found.detach().to("cpu", torch.int64, copy=True).reshape(-1)
