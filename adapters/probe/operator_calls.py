"""Records every call of an attention or cache operator, as its arguments are, before the operator runs.

The rules about them (:mod:`align.fa`) are applied by the driver. A call is described where it is made, for the
operator may raise or change what it was given. Calls that differ in their layer alone are written once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from adapters.base import RowSpan
from adapters.probe.cache_calls import CacheCalls
from adapters.probe.callsite import frames
from align.fa.call import Call
from align.fa.describe import Describer
from align.fa.files import CallWriter, Row, Step

#: Frames that are kept of a call.
_DEPTH = 6


class CallRecorder:
    """Of one rank; :meth:`begin` and :meth:`end` bracket a step, :meth:`attention` the attention of a layer in it.

    Forwards without requests (warm-up, a rank in lockstep) are left out: nobody uses what they compute.
    """

    def __init__(self, writer: CallWriter, rank: int) -> None:
        self._writer, self._rank = writer, rank
        self._describer = Describer()
        #: Key of a call → its number.
        self._numbers: dict[Any, int] = {}
        self._step: Step | None = None
        self._layer = 0
        #: Number of a call → layers of this step that made it.
        self._made: dict[int, list[int]] = {}
        self._failed: set[str] = set()
        self._mode = CacheCalls(None, self)

    @property
    def active(self) -> bool:
        """Whether a step is being recorded."""
        return self._step is not None

    def begin(self, run: int, step: int, phase: str, rows: Sequence[RowSpan]) -> None:
        """A forward over ``rows`` is about to run."""
        self.end()
        self._step = Step(self._rank, run, step, phase, tuple(Row(row.request, row.start, row.count) for row in rows))

    def reorder(self, requests: Sequence[str]) -> None:
        """The engine batches the step's spans in this order."""
        step = self._step
        if step is not None:
            rows = {row.request: row for row in step.rows}
            order = tuple(rows[request] for request in requests if request in rows)
            self._step = Step(step.rank, step.run, step.step, step.phase, order)

    def idle(self) -> None:
        """A forward without requests is about to run."""
        self.end()

    def end(self) -> None:
        """The forward is over."""
        step, self._step = self._step, None
        if step is not None and self._made:
            self._writer.seen(self._made, step)
        self._made = {}

    def close(self) -> None:
        """Nothing more will be recorded."""
        self.end()
        self._writer.close()

    def at(self, layer: int) -> None:
        """The attention of a layer runs from now on."""
        self._layer = layer

    @contextmanager
    def attention(self, layer: int, metadata: Any) -> Iterator[None]:
        """The attention of a layer runs meanwhile; for a worker in which nobody else listens to it."""
        if self._step is None:
            yield
            return
        self.at(layer)
        with self._mode:
            yield

    def before(self, operator: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """An operator of :func:`align.fa.operators.operators` is about to be called."""
        if self._step is None:
            return
        call = self._describer.describe(operator, args, kwargs)
        key = call.key()
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._numbers)
            self._write(number, call)
        self._made.setdefault(number, []).append(self._layer)

    def _write(self, number: int, call: Call) -> None:
        assert self._step is not None
        self._writer.call(number, call, self._layer, frames(_DEPTH), self._step)

    def fail(self, what: str, error: Exception) -> None:
        """A call could not be described."""
        if what not in self._failed:
            self._failed.add(what)
            self._writer.failure(what, f"{type(error).__name__}: {error}")
