"""Wraps the collectives of ``torch.distributed``, so that every call of every rank is recorded and checked.

``collective_functions.tsv`` says which function is which operation, and which of its arguments are the tensors that a
rank gives and gets. The functions are replaced at the end of ``import torch``, so ``from torch.distributed import
all_reduce`` in an engine takes the wrapper. A call that such a function makes of another one is part of it and is not
recorded again; those for Python objects are made of them and are recorded as the calls for bytes that they make.

Not seen: what goes around these functions, that is methods of a process group, functional collectives of compiled
graphs, and kernels that compute and communicate at once.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from adapters.probe.collective_calls import CollectiveRecorder

_FIELDS = ("function", "operation", "given", "got", "root", "sent", "received")
_MARK = "_align_collective"


@dataclass(frozen=True)
class Function:
    """A row of the table; all but the first two are names of arguments, empty for none."""

    function: str
    operation: str
    given: str
    got: str
    root: str
    sent: str = ""
    received: str = ""


@dataclass(frozen=True)
class Asked:
    """The arguments of one call.

    Attributes:
        given, got: tensors that the rank gives and gets, one per rank for lists; both the same where it is in place.
        group: the process group.
        reduce: ``sum``, …; empty where nothing is reduced.
        root: global rank; ``None`` where there is none.
        sent, received: rows to and from each rank, where one tensor holds those of all in parts of their own.
        about: arguments that are no tensors, JSON-able.
    """

    function: Function
    given: tuple[Tensor, ...]
    got: tuple[Tensor, ...]
    group: Any
    reduce: str
    root: int | None
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)


def load_functions() -> tuple[Function, ...]:
    """The table."""
    path = Path(__file__).with_name("collective_functions.tsv")
    lines = path.read_text(encoding="utf-8").splitlines()
    assert tuple(lines[0].split("\t")) == _FIELDS, path
    return tuple(Function(*line.split("\t")) for line in lines[1:])


def wrap_functions() -> None:
    """Wrap what is not wrapped yet. Does nothing where torch was built without distributed support."""
    if not dist.is_available():
        return
    for row in load_functions():
        for module in (dist.distributed_c10d, dist):
            original = getattr(module, row.function, None)
            if original is None or hasattr(original, _MARK):
                continue
            same = getattr(dist.distributed_c10d, row.function, None)
            # One wrapper for both names of one function.
            wrapped = same if getattr(same, "__wrapped__", None) is original else _wrapped(row, original)
            setattr(module, row.function, wrapped)


class _Nested(threading.local):
    deep = False


_nested = _Nested()


@contextmanager
def unrecorded() -> Iterator[None]:
    """Around collectives that are none of the engine's."""
    before, _nested.deep = _nested.deep, True
    try:
        yield
    finally:
        _nested.deep = before


def _wrapped(row: Function, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if _nested.deep:
            return original(*args, **kwargs)
        recorder = process_recorder()
        begun = None if recorder is None else recorder.begin(functools.partial(_asked, row, signature, args, kwargs))
        if recorder is None or begun is None:
            return original(*args, **kwargs)
        try:
            with unrecorded():  # what it is made of is no call of its own
                result = original(*args, **kwargs)
        except BaseException as error:
            recorder.end(begun, error=f"{type(error).__name__}: {error}")
            raise
        if hasattr(result, "wait"):
            return recorder.handle(begun, result)
        recorder.end(begun)
        return result

    setattr(collective, _MARK, True)
    return collective


def _asked(row: Function, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Asked:
    """What a call was given.

    Raises:
        TypeError: arguments that the function does not have.
    """
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    group: Any = given.get("group")
    group = dist.group.WORLD if group is None else group
    root = given.get(row.root) if row.root else None
    if row.root and root is None:
        inside = given.get(f"group_{row.root}")
        root = dist.get_global_rank(group, inside or 0)
    reduce = _reduce_name(given["op"]) if "op" in given else ""
    sent, received = (_sizes(given.get(name)) if name else () for name in (row.sent, row.received))
    return Asked(row, _tensors(given.get(row.given)), _tensors(given.get(row.got)), group, reduce, root, sent, received)


def _sizes(value: Any) -> tuple[int, ...]:
    return () if value is None else tuple(int(one) for one in value)


def _tensors(value: Any) -> tuple[Tensor, ...]:
    if isinstance(value, Tensor):
        return (value,)
    return tuple(value) if isinstance(value, (list, tuple)) else ()


def _reduce_name(op: Any) -> str:
    known = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
    return next((name.lower() for name in known if op == getattr(dist.ReduceOp, name)), str(op))


# ---------------------------------------------------------------------------------------------------- the process

_recorder: CollectiveRecorder | None = None
_world: Any = None


def process_recorder() -> CollectiveRecorder | None:
    """The recorder of this process; ``None`` before it belongs to a group of several ranks, or if none is wanted."""
    global _recorder, _world
    if not dist.is_initialized():
        return None
    if _world is not dist.group.WORLD:
        _world = dist.group.WORLD
        if _recorder is None:
            # Here, because torch itself is still being imported when this module is.
            from adapters.probe.collective_calls import CollectiveRecorder

            _recorder = CollectiveRecorder.of_process()
    return _recorder
