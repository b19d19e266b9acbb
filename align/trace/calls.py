"""What a trace says about calls: arguments of the engine's calls at the taps, and floats that came from the host.

Two files per rank, one JSON object a line, compressed (``zcat`` shows them)::

    rank0/calls.jsonl.gz    of the first step of each phase: one call per tap, and which operators made floats
    rank0/host.jsonl.gz     float tensors that were moved from the host to the device during a forward

Places in the code are ``file:line function``, the innermost first; files as their package names them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

CALLS_FILE, HOST_FILE = "calls.jsonl.gz", "host.jsonl.gz"


@dataclass(frozen=True)
class Argument:
    """One argument as it was given.

    Attributes:
        name: by the signature; of a part of a list or an object with its place, ``attn_metadata.block_offsets``.
        type: ``Tensor``, or the Python type.
        dtype: ``bfloat16``; empty for what is no tensor.
        shape, strides: of a tensor, in elements.
        device: type of the device of a tensor.
        format: storage format number of a tensor on an NPU; ``None`` if the device does not say it.
        value: of what is no tensor, as text.
    """

    name: str
    type: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    device: str = ""
    format: int | None = None
    value: str = ""

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Argument:
        """The inverse of :func:`dataclasses.asdict`."""
        return cls(**{**plain, "shape": tuple(plain["shape"]), "strides": tuple(plain["strides"])})


@dataclass(frozen=True)
class OperatorCall:
    """One operator that ran inside a tapped call.

    Attributes:
        name: ``npu::npu_rms_norm``.
        at: where it was called.
        arguments: in the order of the operator's schema, those that were given.
    """

    name: str
    at: tuple[str, ...]
    arguments: tuple[Argument, ...]

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> OperatorCall:
        """The inverse of :func:`dataclasses.asdict`."""
        return cls(plain["name"], tuple(plain["at"]), tuple(map(Argument.from_dict, plain["arguments"])))


@dataclass(frozen=True)
class Call:
    """The call of one tapped function in the first step of a phase.

    Attributes:
        where: the function, as the engine's tap table names it.
        place: ``file:line`` of its definition as it ran, that of a patch included; empty if it has none.
        kinds: what is tapped of it, ``attn_norm``; with ``layers`` these are the checkpoints.
        layers: layers whose calls were alike in everything; ``None`` stands for what exists once.
        phase, step: of the step.
        rows: tokens of the step, which is what a first axis of that size means.
        arguments: in the order of the signature, those that were given.
        operators: device operators that ran inside, in order.
    """

    where: str
    place: str
    kinds: tuple[str, ...]
    layers: tuple[int | None, ...]
    phase: str
    step: int
    rows: int
    arguments: tuple[Argument, ...]
    operators: tuple[OperatorCall, ...] = ()

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Call:
        """The inverse of :func:`dataclasses.asdict`."""
        return cls(
            plain["where"],
            plain["place"],
            tuple(plain["kinds"]),
            tuple(plain["layers"]),
            plain["phase"],
            plain["step"],
            plain["rows"],
            tuple(map(Argument.from_dict, plain["arguments"])),
            tuple(map(OperatorCall.from_dict, plain["operators"])),
        )


@dataclass(frozen=True)
class FloatOperator:
    """The first use of an operator that made a float tensor on the device, in the first step of a phase."""

    name: str
    phase: str
    step: int
    at: tuple[str, ...]
    inside: tuple[str, ...] = ()
    after: str | None = None

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> FloatOperator:
        """The inverse of :func:`dataclasses.asdict`."""
        return cls(**{**plain, "at": tuple(plain["at"]), "inside": tuple(plain["inside"])})


@dataclass(frozen=True)
class HostMove:
    """Float tensors that one place moved from the host to the device during one forward.

    Attributes:
        computed: whether they were computed on the host in the same forward; otherwise they were there before.
        made_by, made_at: the host operator that computed them last, and where; empty if not computed.
        moved_by, moved_at: the operator that moved them, and where.
        shape, dtype: of the first.
        count: how many, in this step.
        inside: checkpoints of the tapped call that was running.
        after: the last checkpoint that was seen before.
        feeds: checkpoint and argument name of tapped calls that were given it.
    """

    step: int
    phase: str
    computed: bool
    made_by: str
    made_at: tuple[str, ...]
    moved_by: str
    moved_at: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    count: int = 1
    inside: tuple[str, ...] = ()
    after: str | None = None
    feeds: tuple[tuple[str, str], ...] = field(default=())

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> HostMove:
        """The inverse of :func:`dataclasses.asdict`."""
        tuples = {key: tuple(plain[key]) for key in ("made_at", "moved_at", "shape", "inside")}
        feeds = tuple((str(name), str(argument)) for name, argument in plain["feeds"])
        return cls(**{**plain, **tuples, "feeds": feeds})


@dataclass(frozen=True)
class CallRecords:
    """Everything that a rank left about its calls; ``failures``: what could not be looked at, and why."""

    calls: tuple[Call, ...] = ()
    operators: tuple[FloatOperator, ...] = ()
    moves: tuple[HostMove, ...] = ()
    failures: tuple[tuple[str, str], ...] = ()

    def call(self, kind: str, layer: int | None, phase: str | None = None) -> Call | None:
        """The call that yields a checkpoint, of that phase or else of the first one that there is."""
        found = [one for one in self.calls if kind in one.kinds and layer in one.layers]
        return next((one for one in found if one.phase == phase), found[0] if found else None)


def call_lines(
    calls: Sequence[Call], operators: Sequence[FloatOperator], failures: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Objects of ``calls.jsonl``."""
    return [
        *({"event": "call", **asdict(one)} for one in calls),
        *({"event": "operator", **asdict(one)} for one in operators),
        *({"event": "failure", "what": what, "why": why} for what, why in (failures or {}).items()),
    ]


def parse_calls(lines: Sequence[Mapping[str, Any]], moves: Sequence[Mapping[str, Any]]) -> CallRecords:
    """From the objects of both files.

    Raises:
        KeyError, TypeError: they are malformed.
    """
    plain = [(line["event"], {key: value for key, value in line.items() if key != "event"}) for line in lines]
    return CallRecords(
        tuple(Call.from_dict(one) for event, one in plain if event == "call"),
        tuple(FloatOperator.from_dict(one) for event, one in plain if event == "operator"),
        tuple(map(HostMove.from_dict, moves)),
        tuple((str(one["what"]), str(one["why"])) for event, one in plain if event == "failure"),
    )
