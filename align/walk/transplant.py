"""Confirmation by transplant: what is put in the accused side's place. :mod:`align.walk.recovery` judges the outcome.

Two replays of the accused side along the same tokens. In the first the accused operator is given the other side's
*inputs*; in the second its *output* as well is the other side's. Between the two only that output differs. So the
operator is where the sides part if the first does not repair what comes behind it and the second does.

What comes behind is read at two points: the logits, and the residual stream that enters the next block.

A transplant shows where the sides part, not which of them is right: the operator's residual and the audit of weights
say that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from adapters.base import SIDES
from adapters.probe.transplant import no_inverse
from align.checkpoints.table import Name, Structure, kinds, parse
from align.compare.tensors import TensorComparison
from align.errors import UserError
from align.findings import Finding

LOGITS = "logits"
#: Kinds of findings of path B that a transplant can confirm.
ACCUSED = ("operator", "weights")


@dataclass(frozen=True)
class Accusation:
    """Somebody says that this operator of this side is wrong.

    Attributes:
        known: it is known to err on its own inputs, or its weights to differ from the checkpoint; ``False``: its
            residual is within rounding; ``None``: neither was looked at.
        also: what is accused besides, in the same layer and neither before nor behind it: two exchanged tensors, query
            and key. One of them alone repairs nothing.
    """

    side: str
    checkpoint: str
    known: bool | None = None
    also: tuple[str, ...] = ()


def accusation_of(text: str) -> Accusation:
    """``candidate:layers.1.mlp.up``.

    Raises:
        UserError: not a side and a checkpoint.
    """
    side, colon, checkpoint = text.partition(":")
    hint = "give a side and a checkpoint, as in --confirm candidate:layers.1.mlp.up; align taps ENGINE lists them"
    if not colon or side not in SIDES:
        raise UserError(f"--confirm {text} does not begin with a side ({', '.join(SIDES)}) and a colon", hint)
    try:
        return Accusation(side, str(parse(checkpoint)))
    except ValueError:
        raise UserError(f"--confirm {text}: {checkpoint or 'nothing'} is not a checkpoint", hint) from None


def accusation_in(findings: Sequence[Finding], structure: Structure | None = None) -> Accusation | None:
    """What the headline says, if it accuses an operator or a weight of one side."""
    if not findings:
        return None
    first = findings[0]
    if first.path != "B" or first.kind not in ACCUSED or first.side is None or first.checkpoint is None:
        return None
    also = () if structure is None else _beside(first.checkpoint, first.side, findings, structure)
    return Accusation(first.side, first.checkpoint, also=also)


def _beside(checkpoint: str, side: str, findings: Sequence[Finding], structure: Structure) -> tuple[str, ...]:
    """Checkpoints of the same layer and side that are accused too, and that are neither before nor behind it."""
    chosen = [parse(checkpoint)]
    for one in findings:
        if one.kind not in ACCUSED or one.side != side or one.checkpoint is None:
            continue
        name = parse(one.checkpoint)
        if name.layer != chosen[0].layer or name.layer is None or name.kind.shard == "partial" or name in chosen:
            continue
        if not any(structure.behind(a, b) for other in chosen for a, b in ((name, other), (other, name))):
            chosen.append(name)
    return tuple(map(str, chosen[1:]))


def known_of(accusation: Accusation, tensors: TensorComparison | None, findings: Sequence[Finding]) -> bool | None:
    """What :attr:`Accusation.known` is, after a run has judged weights and operators."""
    side, name = accusation.side, accusation.checkpoint
    if any(one.side == side and one.checkpoint == name and one.kind in ACCUSED for one in findings):
        return True
    compared = None if tensors is None else tensors.get(name)
    added = None if compared is None else compared.added.get(side)
    return None if added is None else {"beyond": True, "within": False}.get(added.verdict)


class NotPossibleError(ValueError):
    """A transplant that cannot be made; the message says why."""


@dataclass(frozen=True)
class Plan:
    """What is replaced, and where the outcome is read.

    Attributes:
        inputs: checkpoints that the accused operator reads; empty for the embedding, which reads token ids.
        output: what it produces; of a rank's summand the sum over ranks.
        also: what is replaced together with the output.
        points: where the outcome is read, the deciding one first.
        summands: of what is replaced, by residual: the stream and what is added to it.
        notes: what one should know about it.
    """

    side: str
    checkpoint: str
    inputs: tuple[str, ...]
    output: str
    points: tuple[str, ...]
    summands: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    also: tuple[str, ...] = ()

    @property
    def outputs(self) -> tuple[str, ...]:
        """All that takes the accused side's place in the second replay, besides the inputs."""
        return (self.output, *self.also)

    @property
    def names(self) -> tuple[str, ...]:
        """Everything whose values are needed of both sides."""
        return tuple(dict.fromkeys((*self.inputs, *self.outputs, *sum(self.summands.values(), ()), *self.points)))


def plan_transplant(structure: Structure, accusation: Accusation) -> Plan:
    """What a transplant of an accused checkpoint takes.

    Raises:
        NotPossibleError: the model has no such checkpoint, or a tensor that cannot be replaced is needed.
    """
    try:
        name = parse(accusation.checkpoint)
    except ValueError as error:
        raise NotPossibleError(str(error)) from None
    if name not in set(structure.names()):
        raise NotPossibleError(f"{name} does not exist in this model and layout")
    output, notes = name, []
    if name.kind.shard == "partial":
        whole = kinds()[name.kind.name.removesuffix("_partial")]
        output = Name(whole, name.layer)
        notes.append(f"{no_inverse(name.kind)}; {output} was replaced")
    also = tuple(map(parse, accusation.also))
    inputs = tuple(dict.fromkeys(one for each in (name, *also) for one in structure.inputs(each)))
    if also:
        notes.append(f"replaced together with {', '.join(map(str, also))}, which is accused too")
    for one in (output, *also, *inputs):
        why = no_inverse(one.kind)
        if why is not None:
            raise NotPossibleError(why)
    points = [LOGITS]
    block = _next_block(structure, name)
    if block is not None and str(block) != str(output):
        points.append(str(block))
    summands = {}
    for one in (*inputs, output, *also):
        parts = structure.inputs(one)
        if one.kind.stage == "residual" and len(parts) == 2:
            summands[str(one)] = (str(parts[0]), str(parts[1]))
    return Plan(
        accusation.side, str(name), tuple(map(str, inputs)), str(output), tuple(points), summands, tuple(notes),
        tuple(map(str, also)),
    )  # fmt: skip


def _next_block(structure: Structure, name: Name) -> Name | None:
    """The residual stream behind the accused block."""
    layer = 0 if name.kind.name == "embed" else name.layer
    if layer is None:
        return None
    kind = kinds()["block_in"] if layer + 1 < structure.layers else kinds()["final_in"]
    return Name(kind, layer + 1 if kind.per_layer else None)
