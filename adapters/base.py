"""The contract between the driver and one engine.

These types cross the border between interpreters, so they are plain dataclasses made of JSON-able values: the driver's
environment and the engine's share nothing but the standard library. An :class:`Adapter` lives inside the engine's own
interpreter and is driven through a Ray actor (:mod:`adapters.host`).

A run of one side is ``launch → observe → generate | replay (any number of times, the engine stays up) → close``.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from adapters.mistakes import Mistake

#: Sides of a comparison; any engine may take either role.
SIDES = ("candidate", "reference")


@dataclass(frozen=True)
class EngineSpec:
    """Everything an engine needs before it is built. All lengths are in tokens.

    Attributes:
        engine: ``lmdeploy`` or ``vllm``.
        side: role in the comparison, ``candidate`` or ``reference``.
        model_path: directory of a Hugging Face checkpoint.
        dtype: ``bfloat16`` or ``float16``, requested from the engine.
        tp, dp, ep: layout triple; tp is the attention tensor-parallel size inside one data-parallel group.
        block_size: tokens in one KV-cache block.
        max_model_len: longest sequence (prompt and generated) that must fit.
        max_batch: number of requests that may run in one step.
        max_prefill_tokens: prompt tokens that must fit into one prefill step, so that a group is never split.
        num_blocks: KV-cache blocks per layer.
        hold_arrivals: requests of one arrival wait for each other, so that one step admits them all.
        seed: engine seed; greedy decoding does not use it, but engines record it.
        work_dir: directory owned by this side: step logs, spec of the worker hooks, engine logs.
        device: ``simnpu`` or ``ascend``.
        options: what overrides the settings above, see :func:`split_options`.
        patches: files that run in every worker of this side, see :mod:`adapters.probe.patch`.
        audit: record every index into the cache, in every run, see :mod:`align.ledger`.
        fa: record the arguments of every attention and cache operator, in every run, see :mod:`align.fa`.
        collectives: record every collective of every rank, and stop at ranks that do not make the same one, see
            :mod:`align.collectives`; nothing is done where there is one rank.
        dp_rank: the data-parallel group that this engine serves; its global ranks are ``dp_rank * tp`` and the next.
        master_port: of 127.0.0.1, free, where the engines of several groups find each other; 0 for one group.
    """

    engine: str
    side: str
    model_path: str
    dtype: str
    work_dir: str
    tp: int = 1
    dp: int = 1
    ep: int = 1
    block_size: int = 128
    max_model_len: int = 512
    max_batch: int = 8
    max_prefill_tokens: int = 512
    num_blocks: int = 64
    hold_arrivals: bool = True
    seed: int = 0
    device: str = "simnpu"
    options: dict[str, Any] = field(default_factory=dict)
    patches: tuple[str, ...] = ()
    audit: bool = True
    fa: bool = True
    collectives: bool = True
    dp_rank: int = 0
    master_port: int = 0

    @property
    def ranks(self) -> range:
        """Global ranks of this engine's workers."""
        return range(self.dp_rank * self.tp, (self.dp_rank + 1) * self.tp)


@dataclass(frozen=True)
class Options:
    """The options of a side by what they change.

    Attributes:
        engine: arguments of the engine's own configuration, which win over ours.
        sampling: parameters of every request's sampling, which win over greedy decoding.
        env: environment variables, set before the engine is imported; ``None`` removes one.
    """

    engine: dict[str, Any]
    sampling: dict[str, Any]
    env: dict[str, str | None]

    def export(self) -> None:
        """Put the environment variables into this process; its children inherit them."""
        for name, value in self.env.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


#: Prefixes of option names, each a namespace of its own.
SAMPLING_PREFIX, ENV_PREFIX = "sampling.", "env."


def split_options(options: Mapping[str, Any]) -> Options:
    """``{"block_size": 64, "sampling.top_k": 5, "env.LMDEPLOY_SKIP_WARMUP": "0"}`` by namespace.

    Raises:
        ValueError: a namespace without a name.
    """
    found = Options({}, {}, {})
    for name, value in options.items():
        if name in ("", SAMPLING_PREFIX, ENV_PREFIX):
            raise ValueError(f"option {name!r} has no name; valid: NAME, {SAMPLING_PREFIX}NAME, {ENV_PREFIX}NAME")
        if name.startswith(SAMPLING_PREFIX):
            found.sampling[name.removeprefix(SAMPLING_PREFIX)] = value
        elif name.startswith(ENV_PREFIX):
            text = str(int(value)) if isinstance(value, bool) else value
            found.env[name.removeprefix(ENV_PREFIX)] = None if text is None else str(text)
        else:
            found.engine[name] = value
    return found


@dataclass(frozen=True)
class Request:
    """One request of a batch.

    Attributes:
        name: identity of the request in every record (``r0``, ``r1``, …).
        token_ids: the prompt, ``[prompt_len]`` ids.
        max_new_tokens: how many tokens to generate; EOS does not end a request unless ``stop_ids`` says so.
        arrival: engine step before which the request is admitted; 0 joins the first group.
        dp_rank: data-parallel rank that serves the request.
        forced: ids that replace the engine's own choice, one per generated token; ``None`` generates freely.
        stop_ids: ids that end the request early.
    """

    name: str
    token_ids: tuple[int, ...]
    max_new_tokens: int
    arrival: int = 0
    dp_rank: int = 0
    forced: tuple[int, ...] | None = None
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class TokenStep:
    """What an engine said about one generated token.

    Attributes:
        chosen: id that was appended to the sequence (the forced one in a replay).
        greedy: id the engine itself preferred (argmax of its raw logits).
        top: ``((id, logprob), …)`` of the k best ids, best first; log-softmax of the raw logits, natural log.
        peak: largest absolute raw logit among them, which says how coarse the dtype is there; 0 if not recorded.
    """

    chosen: int
    greedy: int
    top: tuple[tuple[int, float], ...]
    peak: float = 0.0


@dataclass(frozen=True)
class Generation:
    """All tokens of one request, in order."""

    request: str
    steps: tuple[TokenStep, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(step.chosen for step in self.steps)

    @property
    def greedy_ids(self) -> tuple[int, ...]:
        return tuple(step.greedy for step in self.steps)


@dataclass(frozen=True)
class RowSpan:
    """The rows of one request in one engine step: positions ``start … start + count - 1``.

    ``occurrence`` counts earlier steps that already computed position ``start`` of this request (0 at first; more
    after preemption or a re-computed prefix).
    """

    request: str
    start: int
    count: int
    occurrence: int = 0


@dataclass(frozen=True)
class StepRecord:
    """One engine forward as one rank saw it.

    Attributes:
        step: counts the real (not dummy) forwards of this engine run, from 0.
        phase: ``prefill``, ``decode`` or ``mixed``.
        rows: spans in batch order; never a key, only provenance.
        forced: ``{request: id}`` of the ids forced after this step.
        rank: global rank of the worker.
        dummy: a forward without requests (profile run, warm-up, idle data-parallel rank).
        tokens: that a dummy computes; 0 where it was not seen, and of real steps.
        cycle: of engines whose groups run in lockstep: which of the run's common forwards it was; ``None`` elsewhere.
        mode: ``prefill`` or ``decode``, as the engine ran the forward; empty where the engine has no such mode.
    """

    step: int
    phase: str
    rows: tuple[RowSpan, ...]
    forced: dict[str, int]
    rank: int = 0
    dummy: bool = False
    tokens: int = 0
    cycle: int | None = None
    mode: str = ""


@dataclass(frozen=True)
class RunResult:
    """Outcome of one ``generate`` or ``replay``.

    Attributes:
        generations: in request order.
        steps: the real steps of every rank.
        seconds: from the first submission to the last answer.
        run: its number within the launch, from 1.
        dummies: forwards without requests that ranks made meanwhile.
    """

    generations: tuple[Generation, ...]
    steps: tuple[StepRecord, ...]
    seconds: float
    run: int = 0
    dummies: tuple[StepRecord, ...] = ()


#: Value of a setting that this engine does not have at all.
NO_SUCH_MODE = "no such mode"


@dataclass(frozen=True)
class Observation:
    """A setting read back from the live engine; ``value`` is ``None`` when it could not be read (``why`` says so)."""

    name: str
    value: Any
    where: str
    why: str = ""


class Progress(Protocol):
    """Where an adapter reports what it is doing; cheap, may be called from any thread."""

    def __call__(self, stage: str, detail: str = "") -> None: ...


class Adapter(ABC):
    """One engine behind a narrow, synchronous interface.

    Implementations raise ``ValueError`` for a specification the engine cannot honour and let the engine's own errors
    pass: the host turns them into text with the engine's last log lines.
    """

    name: str

    @abstractmethod
    def launch(self, spec: EngineSpec, progress: Progress) -> None:
        """Build the engine. Returns when it can take requests."""

    @abstractmethod
    def observe(self) -> Sequence[Observation]:
        """Read settings back from the live engine."""

    @abstractmethod
    def generate(self, requests: Sequence[Request], top_k: int) -> RunResult:
        """Generate greedily; every request's ``forced`` must be ``None``."""

    @abstractmethod
    def replay(self, requests: Sequence[Request], top_k: int) -> RunResult:
        """Generate in the true decode phase while each token is replaced by the request's ``forced`` id."""

    def repatch(self, files: Sequence[str]) -> None:
        """Put other patches in the place of those that the engine was launched with.

        Raises:
            Mistake: this engine cannot, or a patch fails.
        """
        raise Mistake("its patches cannot be changed while it lives", "launch it again with the others")

    @abstractmethod
    def close(self) -> None:
        """Stop the engine and everything it started. Safe to call twice."""
