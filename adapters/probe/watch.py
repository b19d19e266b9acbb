"""Sees float tensors that are computed on the host inside a forward and moved to the device.

A dispatch mode that is active while a recorded step's forward runs. It tells host from device by the tensors' own
device, which the simulated NPU has as hardware does. What counts as computed: the result of any operator on host
tensors that does more than move, cast or reshape. Constants that were there before the step, integers, and what only
came back from the device do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from adapters.probe.callbook import CallBook
from adapters.probe.callsite import frames
from align.trace.calls import HostMove

#: Operators whose result holds the values of their arguments: moved, cast, joined, or picked from.
_MOVES = frozenset({
    "_to_copy", "to", "copy_", "copy", "clone", "contiguous", "cat", "concat", "concatenate", "stack", "hstack",
    "vstack", "index", "index_select", "gather", "take", "index_put", "index_put_", "_index_put_impl_", "index_copy",
    "index_copy_", "scatter", "scatter_", "slice_scatter", "select_scatter", "repeat", "repeat_interleave", "expand",
    "reshape", "flatten", "pad", "constant_pad_nd", "masked_select", "masked_fill", "masked_fill_", "where", "roll",
    "flip", "pin_memory", "_pin_memory", "lift", "lift_fresh", "lift_fresh_copy", "detach", "alias", "type_as",
    "fill_", "zero_", "split", "chunk", "tile", "narrow_copy", "_copy_from", "_copy_from_and_resize", "resolve_conj",
    "resolve_neg",
})  # fmt: skip
#: Those that leave nothing of what was there.
_OVERWRITES = ("copy_", "fill_", "zero_")
#: Namespaces of the engines' own operators, whose Python code is looked into.
_ENGINES = ("vllm", "vllm_ascend", "lmdeploy", "dlinfer", "llm")
_FEEDS = 4
#: Steps of each phase and run that are looked at: what an engine computes on the host it computes in every step, and
#: looking costs some 15 µs per operator.
WATCHED = 1


@dataclass(frozen=True)
class _Made:
    """Where a host tensor was computed."""

    operator: str
    at: tuple[str, ...]


class _Storages:
    """Storages with something known about each; one that is gone is forgotten, also when its address is reused."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def get(self, tensor: Tensor) -> Any:
        held = self._known.get(tensor.untyped_storage()._cdata)
        return None if held is None or held[0].expired() else held[1]

    def set(self, tensor: Tensor, about: Any) -> None:
        storage = tensor.untyped_storage()
        # A weak reference keeps the address from being given to another storage.
        self._known[storage._cdata] = (StorageWeakRef(storage), about)

    def drop(self, tensor: Tensor) -> None:
        self._known.pop(tensor.untyped_storage()._cdata, None)

    def clear(self) -> None:
        self._known.clear()


def tensors_of(*values: Any) -> Iterator[Tensor]:
    """Tensors among arguments and in the lists among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_of(*value)


def _whole(tensor: Tensor) -> bool:
    """Whether it is all of its storage."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


class Watch(TorchDispatchMode):
    """Of one rank; :meth:`begin` and :meth:`end` bracket a step, :meth:`watching` its synchronous parts.

    Args:
        book: knows which tapped call is running, and hears of device operators.
        device: type of the engine's device.
    """

    def __init__(self, book: CallBook, device: str = "npu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._book, self._device = book, device
        self._computed, self._moved = _Storages(), _Storages()
        self._found: dict[tuple[Any, ...], HostMove] = {}
        self._step, self._phase = -1, ""
        self._on = False
        self._steps: Counter[str] = Counter()
        #: What could not be looked at, by operator.
        self.failures: dict[str, str] = {}

    def begin(self, step: int, phase: str) -> None:
        """A step is about to run; it is looked at if it is among the first :data:`WATCHED` of its phase."""
        self._steps[phase] += 1
        self._step, self._phase, self._on = step, phase, self._steps[phase] <= WATCHED
        self._forget()

    @property
    def on(self) -> bool:
        """Whether this step is looked at."""
        return self._on

    def end(self) -> tuple[HostMove, ...]:
        """What was moved during the step."""
        found = tuple(self._found.values())
        self._on = False
        self._forget()
        return found

    def _forget(self) -> None:
        self._computed.clear()
        self._moved.clear()
        self._found = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at every operator meanwhile, unless no step is being recorded. No coroutine may be awaited inside."""
        if not self._on:
            yield
            return
        with self:
            yield

    # --------------------------------------------------------------------------------------------------- operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        result = self._run(func, args, given)
        try:
            self._look(func, args, given, result)
        except Exception as error:  # an observer must not stop the engine; what it missed is reported
            self.failures.setdefault(str(func), f"{type(error).__name__}: {error}")
        return result

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func.namespace not in _ENGINES:
            return func(*args, **kwargs)
        on_device = any(one.device.type == self._device for one in tensors_of(*args, *kwargs.values()))
        key = torch._C.DispatchKey.PrivateUse1 if on_device else torch._C.DispatchKey.CPU
        with self:  # the operator is the engine's own Python code
            return func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)

    def _look(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        outs = list(tensors_of(result))
        # An operator that only writes in place returns nothing.
        first = outs[0] if outs else next(tensors_of(*args, *kwargs.values()), None)
        if first is None:
            return
        if first.device.type != "cpu":
            if self._book.noting and func.namespace not in _ENGINES:
                self._book.operator(func, args, kwargs, outs)
            self._on_device(func, args, kwargs, outs)
        elif any(out.is_floating_point() or out.is_complex() for out in outs):
            self._on_host(func, args, kwargs, outs)

    def _on_host(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outs: Sequence[Tensor]) -> None:
        given = list(tensors_of(*args, *kwargs.values()))
        name = func.overloadpacket.__name__
        if not given:
            for out in outs:  # filled from nothing: a constant
                self._computed.drop(out)
            return
        if name in _MOVES:
            sources = given[1:] if name in _OVERWRITES and _whole(given[0]) else given
            made = next((about for one in sources if (about := self._known(one)) is not None), None)
            for out in outs:
                if made is not None:
                    self._computed.set(out, made)
                elif func._schema.is_mutable:
                    self._computed.drop(out)
            return
        inputs = {one.untyped_storage()._cdata for one in given}
        for out in outs:
            if not out.is_floating_point() and not out.is_complex():
                continue
            if out.untyped_storage()._cdata in inputs and not func._schema.is_mutable:
                continue  # a view
            if given[0].device.type == "cpu":
                self._computed.set(out, _Made(f"{func.namespace}::{name}", frames()))

    def _known(self, tensor: Tensor) -> _Made | None:
        found: _Made | None = self._computed.get(tensor) if tensor.device.type == "cpu" else None
        return found

    def _on_device(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outs: Sequence[Tensor]) -> None:
        key: tuple[Any, ...] | None = None
        for one in tensors_of(*args, *kwargs.values()):
            if one.device.type == "cpu":
                if (one.is_floating_point() or one.is_complex()) and (one.dim() or self._computed.get(one) is not None):
                    key = self._move(func, one)
            elif self._moved and func.overloadpacket.__name__ in _MOVES:
                key = key or self._moved.get(one)
        if key is not None:
            for out in outs:
                self._moved.set(out, key)

    def _move(self, func: Any, tensor: Tensor) -> tuple[Any, ...]:
        made, at = self._known(tensor), frames()
        name = f"{func.namespace}::{func.overloadpacket.__name__}"
        about = _Made("", ()) if made is None else made
        key = (made is not None, about, name, at, self._book.inside)
        before = self._found.get(key)
        if before is None:
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._found[key] = HostMove(
                self._step, self._phase, made is not None, about.operator, about.at, name, at, tuple(tensor.shape),
                dtype, 1, self._book.inside, self._book.after,
            )  # fmt: skip
        else:
            self._found[key] = replace(before, count=before.count + 1)
        return key

    # ------------------------------------------------------------------------------------------------------- calls

    def given(self, parameters: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The tapped call that runs now was given these arguments: what of them came from the host feeds it."""
        if not self._moved:
            return
        named = [(parameters[at] if at < len(parameters) else str(at), value) for at, value in enumerate(args)]
        for name, value in (*named, *kwargs.items()):
            for tensor in tensors_of(value):
                key = self._moved.get(tensor) if tensor.device.type != "cpu" else None
                before = None if key is None else self._found.get(key)
                if key is None or before is None:
                    continue
                added = [(checkpoint, name) for checkpoint in self._book.inside]
                self._found[key] = replace(before, feeds=tuple(dict.fromkeys((*before.feeds, *added)))[:_FEEDS])
