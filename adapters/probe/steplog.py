"""The log of engine steps that every worker keeps: one JSON line per event, one file per rank.

Events:

* ``step``: a forward with its rows, ``[name, start, count, occurrence]`` each; written before the forward runs.
* ``tokens``: what was said about the next token of each request in that step, before anything was forced.
* ``dummy``: a forward without requests.
* ``note``: something that a person should know, in words.

Appending lines keeps what is known when a worker is killed; a cut last line is dropped by the reader.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from adapters.base import Generation, RowSpan, StepRecord, TokenStep
from adapters.probe.spec import ProbeSpec, RequestSpec, SpecReader

if TYPE_CHECKING:
    from adapters.probe.indices import IndexRecorder
    from adapters.probe.recorder import Recorder


class StepLog:
    """Writes the events of one rank and chooses what to force.

    Row identity is computed here and not by the engine: the position of a row, and how often an earlier step of this
    run already computed it (preemption, a prefix computed twice).
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.rank = rank
        #: Records the tensors of a step, once the model is there.
        self.recorder: Recorder | None = None
        #: Records the indices into the cache, once that is there.
        self.indices: IndexRecorder | None = None
        self._reader = SpecReader(directory)
        self._path = directory / f"steps-rank{rank}.jsonl"
        self._file = self._path.open("a", encoding="utf-8")
        self._generation = 0
        self._spec: ProbeSpec | None = None
        self._step = -1
        self._spans: dict[str, list[tuple[int, int]]] = {}
        self._current: dict[str, tuple[RequestSpec, RowSpan]] = {}
        #: A step was begun, and has not ended.
        self._open = False

    @property
    def generation(self) -> int:
        """Number of the run that the last step belonged to; 0 before the first."""
        return self._generation

    @property
    def in_step(self) -> bool:
        """Whether the forward that runs is a real one."""
        return bool(self._current)

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()

    def _enter(self, spec: ProbeSpec) -> None:
        if spec.generation != self._generation:
            self._generation = spec.generation
            self._spec = spec
            self._step = -1
            self._spans = {}

    def dummy(self) -> None:
        """A forward without requests is about to run."""
        self._current = {}
        if self.recorder is not None:
            self.recorder.dummy()
        if self.indices is not None:
            self.indices.dummy()
        self._write({"event": "dummy", "generation": self._generation})

    def note(self, text: str) -> None:
        """Leave a remark."""
        self._write({"event": "note", "generation": self._generation, "text": text})

    def step(self, rows: Iterable[tuple[str, int, int]]) -> None:
        """A forward is about to run over ``(request key, first position, count)`` rows."""
        spec = self._reader.read()
        if spec is None:
            return
        rows = list(rows)
        if self._spec is not None and not any(key in spec.requests for key, _, _ in rows):
            # An engine that looks ahead may still make the surplus step of the run before.
            spec = self._spec
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
            }
        )
        self._open = True
        spans_now = [span for _, span in self._current.values()]
        if self.indices is not None:
            self.indices.begin(self._generation, self._step, phase, spans_now)
        if self.recorder is not None and spec.capture is not None:
            self.recorder.begin(spec.capture, self._generation, self._step, phase, spans_now, self._is_last(spec))

    def _is_last(self, spec: ProbeSpec) -> bool:
        """Whether every request has its last token after this step."""
        reached = {name: max(start + count for start, count in spans) for name, spans in self._spans.items()}
        return all(
            reached.get(request.name, 0) >= request.prompt_len + request.max_new_tokens - 1
            for request in spec.requests.values()
        )

    def order(self, keys: Sequence[str]) -> None:
        """The engine batches the requests of this step in this order."""
        order = [self._current[key][1].request for key in keys if key in self._current]
        for one in (self.recorder, self.indices):
            if one is not None:
                one.reorder(order)

    def watching(self) -> AbstractContextManager[None]:
        """Around the synchronous parts of a step's forward, for what is computed on the host meanwhile."""
        return nullcontext() if self.recorder is None else self.recorder.watching()

    def end_step(self) -> None:
        """The forward is over and its logits are known."""
        if self.recorder is not None:
            self.recorder.end()
        if self.indices is not None:
            self.indices.end()
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


_log: StepLog | None = None


def process_log(rank: int | None = None) -> StepLog | None:
    """The log of this process; made by the first caller that knows the rank."""
    global _log
    if _log is None and rank is not None:
        _log = StepLog(Path(os.environ["ALIGN_PROBE_DIR"]), rank)
    return _log


# ------------------------------------------------------------------------------------------------------- reading


def _events(path: Path, generation: int) -> list[dict[str, Any]]:
    events = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if not line.endswith("\n"):
                break  # the worker was killed while it wrote
            event = json.loads(line)
            if event["generation"] == generation:
                events.append(event)
    return events


def wait_for_ranks(directory: Path, generation: int, seconds: float = 30.0) -> bool:
    """Wait until every rank has ended the steps of a run that any rank has begun; whether they have.

    The rank that samples answers for all, and another may still be writing what it recorded.
    """
    deadline = time.monotonic() + seconds
    while True:
        counts = [
            Counter(event["event"] for event in _events(path, generation))
            for path in directory.glob("steps-rank*.jsonl")
        ]
        begun = max((one["step"] for one in counts), default=0)
        if all(one["end"] == begun for one in counts) or not any(one["end"] for one in counts):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)


def read_steps(directory: Path, generation: int) -> tuple[StepRecord, ...]:
    """All real steps of one run, of every rank, ranks in order."""
    records = []
    for path in sorted(directory.glob("steps-rank*.jsonl"), key=lambda p: int(p.stem.removeprefix("steps-rank"))):
        rank = int(path.stem.removeprefix("steps-rank"))
        events = _events(path, generation)
        tokens = {event["step"]: event["tokens"] for event in events if event["event"] == "tokens"}
        for event in events:
            if event["event"] != "step":
                continue
            said = tokens.get(event["step"], {})
            records.append(
                StepRecord(
                    step=event["step"],
                    phase=event["phase"],
                    rows=tuple(RowSpan(*row) for row in event["rows"]),
                    forced={name: token["chosen"] for name, token in said.items() if token["forced"]},
                    rank=rank,
                )
            )
    return tuple(records)


def read_generations(
    directory: Path,
    generation: int,
    names: Iterable[str],
    rank: int = 0,
    returned: Mapping[str, Sequence[int]] | None = None,
) -> tuple[Generation, ...]:
    """What was generated in one run, by request, as the sampling rank saw it.

    Args:
        returned: request → ids that the engine returned. They decide between answers to one place: an engine that
            prepares a step while another runs may evict a request whose answer is still to come, drop that, and ask
            again after the request was computed anew.
    """
    steps: dict[str, dict[int, list[TokenStep]]] = {name: {} for name in names}
    for event in _events(directory / f"steps-rank{rank}.jsonl", generation):
        if event["event"] != "tokens":
            continue
        for name, token in event["tokens"].items():
            top = tuple((int(i), float(v)) for i, v in token["top"])
            step = TokenStep(token["chosen"], token["greedy"], top, token["peak"])
            steps[name].setdefault(token["index"], []).append(step)
    return tuple(
        Generation(
            name, tuple(_answer(by_index[index], index, (returned or {}).get(name, ())) for index in sorted(by_index))
        )
        for name, by_index in steps.items()
    )


def _answer(answers: Sequence[TokenStep], index: int, returned: Sequence[int]) -> TokenStep:
    """The one that was appended: the last that the engine returned; the first if that is not known."""
    wanted = returned[index] if index < len(returned) else None
    return next((one for one in reversed(answers) if one.chosen == wanted), answers[0])
