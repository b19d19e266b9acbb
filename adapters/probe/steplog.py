"""The log of engine steps that every worker keeps: one JSON line per event, one file per rank.

Events:

* ``step``: a forward with its rows, ``[name, start, count, occurrence]`` each; written before the forward runs.
* ``tokens``: what was said about the next token of each request in that step, before anything was forced.
* ``dummy``: a forward without requests, with the tokens that it computes where that is known.
* ``note``: something that a person should know, in words.

Appending lines keeps what is known when a worker is killed; a cut last line is dropped by the reader.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from adapters.base import RowSpan
from adapters.probe.spec import CaptureSpec, ProbeSpec, RequestSpec, SpecReader
from align.collectives.record.types import Place

if TYPE_CHECKING:
    from adapters.probe.collective_calls import CollectiveRecorder
    from adapters.probe.dispatch import Dispatch
    from adapters.probe.indices import IndexRecorder
    from adapters.probe.operator_calls import CallRecorder
    from adapters.probe.recorder import Recorder


class StepLog:
    """Writes the events of one rank and chooses what to force.

    Row identity is computed here and not by the engine: the position of a row, and how often an earlier step of this
    run already computed it (preemption, a prefix computed twice).
    """

    def __init__(self, directory: Path, rank: int, dp_rank: int = 0) -> None:
        self.rank, self.dp_rank = rank, dp_rank
        #: Records the tensors of a step, once the model is there.
        self.recorder: Recorder | None = None
        #: Records the indices into the cache, once that is there.
        self.indices: IndexRecorder | None = None
        #: Records the arguments of attention and cache operators, once the cache is there.
        self.calls: CallRecorder | None = None
        #: Records the collectives, once there was one.
        self.collectives: CollectiveRecorder | None = None
        #: Puts other patches in the place of those that are applied, once the cache is there.
        self.repatch: Callable[[Sequence[str]], None] | None = None
        self._reader = SpecReader(directory)
        self._path = directory / f"steps-rank{rank}.jsonl"
        self._file = self._path.open("a", encoding="utf-8")
        self._generation = 0
        self._spec: ProbeSpec | None = None
        self._step = -1
        self._spans: dict[str, list[tuple[int, int]]] = {}
        self._current: dict[str, tuple[RequestSpec, RowSpan]] = {}
        #: The run before the one that was entered: spec, last step, spans.
        self._before: tuple[ProbeSpec, int, dict[str, list[tuple[int, int]]]] | None = None
        #: Requests that ended early → positions that were computed of them by then.
        self._stopped: dict[str, int] = {}
        #: A step was begun, and has not ended.
        self._open = False
        self._dummy = False

    @property
    def generation(self) -> int:
        """Number of the run that the last step belonged to; 0 before the first."""
        return self._generation

    @property
    def in_step(self) -> bool:
        """Whether the forward that runs is a real one."""
        return bool(self._current)

    @property
    def spans(self) -> tuple[RowSpan, ...]:
        """The rows of the forward that runs, in the order in which the engine batches them."""
        return tuple(span for _, span in self._current.values())

    @property
    def place(self) -> Place:
        """Where in the run the forward stands that runs or ran last."""
        return Place(self._generation, self._step, self._dummy)

    @property
    def capture(self) -> CaptureSpec | None:
        """What is recorded of the run of the last step."""
        return None if self._spec is None else self._spec.capture

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()

    @property
    def spec(self) -> ProbeSpec | None:
        """The run that was announced last, whether or not a step of it ran."""
        return self._reader.read()

    def served(self, request: RequestSpec) -> bool:
        """Whether a request of this rank's group has its last token, or will have it after the step that runs."""
        return request.name in self._stopped or self._reached(request) >= _needed(request)

    def overran(self, request: RequestSpec) -> bool:
        """Whether a step behind its last token was computed, or is being: an engine that looks ahead makes one."""
        return self._reached(request) > self._stopped.get(request.name, _needed(request))

    def _reached(self, request: RequestSpec) -> int:
        return max((start + count for start, count in self._spans.get(request.name, ())), default=0)

    def _enter(self, spec: ProbeSpec) -> None:
        if spec.generation != self._generation:
            self._before = None if self._spec is None else (self._spec, self._step, self._spans)
            self._generation = spec.generation
            self._spec = spec
            self._step = -1
            self._spans = {}
            self._stopped = {}
            if spec.patches is not None and self.repatch is not None:
                self.repatch(spec.patches)

    def enter_announced(self, spec: ProbeSpec | None = None) -> int:
        """Begin the run that was announced last, or this one, also on a rank that serves none of its requests.

        Returns:
            Its number; 0 if none was announced.
        """
        spec = self._reader.read() if spec is None else spec
        if spec is None:
            return 0
        self._enter(spec)
        return spec.generation

    def dummy(self, tokens: int = 0, idle: bool = False, **lockstep: Any) -> None:
        """A forward without requests is about to run.

        Args:
            tokens: that it computes; 0 if that is not known.
            idle: it keeps a data-parallel rank in lockstep with the others.
            lockstep: ``cycle`` and ``mode`` of the forward, see :class:`adapters.base.StepRecord`.
        """
        self._current = {}
        self._begin_forward(dummy=True)
        if self.recorder is not None:
            capture = None if self._spec is None else self._spec.capture
            if idle and capture is not None:  # a rank without requests leaves a trace of that
                self.recorder.start(capture, self._generation)
            self.recorder.dummy(tokens)
        if self.indices is not None:
            self.indices.dummy(idle, self._generation)
        if self.calls is not None:
            self.calls.idle()
        self._write({"event": "dummy", "generation": self._generation, "tokens": tokens, "idle": idle, **lockstep})

    def note(self, text: str) -> None:
        """Leave a remark."""
        self._write({"event": "note", "generation": self._generation, "text": text})

    def step(self, rows: Iterable[tuple[str, int, int]], **lockstep: Any) -> None:
        """A forward is about to run over ``(request key, first position, count)`` rows.

        ``lockstep``: its ``cycle`` and ``mode``, see :class:`adapters.base.StepRecord`.
        """
        spec = self._reader.read()
        if spec is None:
            return
        rows = list(rows)
        surplus = False
        if not any(key in spec.requests for key, _, _ in rows):
            # An engine that looks ahead may still make the surplus step of the run before.
            if self._spec is not None and any(key in self._spec.requests for key, _, _ in rows):
                spec = self._spec
            elif self._before is not None and any(key in self._before[0].requests for key, _, _ in rows):
                surplus = True
                spec, self._step, self._spans = self._before
                self._spec, self._generation = spec, spec.generation
        self._begin_forward(dummy=False)
        self._enter(spec)
        self._step += 1
        self._current = {}
        phases = set()
        for key, start, count in rows:
            request = spec.requests.get(key)
            if request is None:
                raise RuntimeError(f"a step holds request {key!r}, which is not in the spec of run {spec.generation}")
            earlier = self._spans.setdefault(request.name, [])
            occurrence = sum(1 for first, length in earlier if first <= start < first + length)
            earlier.append((start, count))
            self._current[key] = (request, RowSpan(request.name, start, count, occurrence))
            phases.add("decode" if start >= request.prompt_len else "prefill")
        phase = phases.pop() if len(phases) == 1 else "mixed"
        self._write(
            {
                "event": "step",
                "generation": self._generation,
                "step": self._step,
                "phase": phase,
                "rows": [[span.request, span.start, span.count, span.occurrence] for _, span in self._current.values()],
                **lockstep,
            }
        )
        self._open = True
        spans_now = [span for _, span in self._current.values()]
        if self.indices is not None:
            self.indices.begin(self._generation, self._step, phase, spans_now)
        if self.calls is not None:
            self.calls.begin(self._generation, self._step, phase, spans_now)
        # A trace that is closed is not opened again for what nobody asked for.
        if self.recorder is not None and spec.capture is not None and not surplus:
            self.recorder.begin(spec.capture, self._generation, self._step, phase, spans_now, self._is_last(spec))

    def _begin_forward(self, dummy: bool) -> None:
        if self.collectives is not None:
            self.collectives.begin_forward()
        self._dummy = dummy

    def _is_last(self, spec: ProbeSpec) -> bool:
        """Whether every request of this rank's group has its last token after this step."""
        return all(self.served(request) for request in spec.requests.values() if request.dp_rank == self.dp_rank)

    def order(self, keys: Sequence[str]) -> None:
        """The engine batches the requests of this step in this order."""
        self._current = {key: self._current[key] for key in [*keys, *self._current] if key in self._current}
        order = [span.request for span in self.spans]
        for one in (self.recorder, self.indices, self.calls):
            if one is not None:
                one.reorder(order)

    @property
    def own_rows(self) -> int | None:
        """Tokens among the rows that this rank sends to experts in the running forward; ``None`` if nobody knows."""
        return None if self.recorder is None or not self.in_step else self.recorder.own_rows

    def sent(self, dispatch: Dispatch) -> None:
        """It is known how the tokens of the running forward reach the experts."""
        if self.recorder is not None:
            self.recorder.sent(dispatch)

    def watching(self) -> AbstractContextManager[None]:
        """Around the synchronous parts of a step's forward, for what is computed on the host meanwhile."""
        return nullcontext() if self.recorder is None else self.recorder.watching()

    def end_step(self) -> None:
        """The forward is over and its logits are known.

        Raises:
            CollectiveMismatch: another rank makes a collective in it that this one does not.
        """
        if self.collectives is not None:
            self.collectives.end_forward()
        if self.recorder is not None:
            self.recorder.end()
        if self.indices is not None:
            self.indices.end()
        if self.calls is not None:
            self.calls.end()
        if self._open:  # whatever was recorded of it is on disk
            self._write({"event": "end", "generation": self._generation, "step": self._step})
            self._open = False

    def choose(self, logits: torch.Tensor, keys: Sequence[str]) -> list[int | None]:
        """Record the next token of every row and answer what to force.

        Args:
            logits: raw logits ``[num_requests, vocab]``, any float dtype.
            keys: the request of each row of ``logits``.

        Returns:
            For each row the id to append instead of the engine's choice, or ``None`` to leave it.
        """
        spec = self._reader.read()
        if spec is None or not self._current:
            return [None] * logits.shape[0]
        if len(keys) != logits.shape[0] or any(key not in self._current for key in keys):
            raise RuntimeError(
                f"step {self._step}: {logits.shape[0]} rows of logits for requests {', '.join(keys)}, "
                f"but the step computes {', '.join(self._current)}"
            )
        scores = logits.float().log_softmax(-1)
        best = scores.topk(min(spec.top_k, scores.shape[-1]), dim=-1)
        values, ids = best.values.tolist(), best.indices.tolist()
        peaks = logits.float().gather(-1, best.indices).abs().amax(-1).tolist()
        greedy = logits.argmax(-1).tolist()
        tokens: dict[str, Any] = {}
        forced: list[int | None] = []
        for row, key in enumerate(keys):
            request, span = self._current[key]
            index = span.start + span.count - request.prompt_len
            if not 0 <= index < request.max_new_tokens:
                forced.append(None)  # inside the prompt, or the surplus step after the last token
                continue
            wanted = None if request.forced is None else request.forced[index]
            forced.append(wanted)
            if (greedy[row] if wanted is None else wanted) in request.stop_ids:
                self._stopped[request.name] = span.start + span.count
            tokens[request.name] = {
                "index": index,
                "greedy": greedy[row],
                "chosen": greedy[row] if wanted is None else wanted,
                "forced": wanted is not None,
                "top": list(zip(ids[row], values[row], strict=True)),
                "peak": peaks[row],
            }
        self._write({"event": "tokens", "generation": self._generation, "step": self._step, "tokens": tokens})
        return forced


def _needed(request: RequestSpec) -> int:
    """Positions that are computed for all of its tokens: the last one is computed of none."""
    return request.prompt_len + request.max_new_tokens - 1


_log: StepLog | None = None


def process_log(rank: int | None = None, dp_rank: int = 0) -> StepLog | None:
    """The log of this process; made by the first caller that knows the global rank, and the group that it is of."""
    global _log
    if _log is None and rank is not None:
        _log = StepLog(Path(os.environ["ALIGN_PROBE_DIR"]), rank, dp_rank)
    return _log
