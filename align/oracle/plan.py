"""Which operator makes each checkpoint, from what, and what is known to be impossible: a pure function."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from align.checkpoints.bounds import OperatorBound, bounds
from align.checkpoints.recompute import ACTIVATIONS
from align.checkpoints.table import Name, Structure, parse
from align.oracle.facts import Facts

#: Row of ``operators.tsv`` by kind, where the table's operator is not its name.
_BY_KIND = {
    "moe.topk_ids": "topk_ids",
    "moe.topk_weights": "topk_weights",
    "moe.routed": "expert_mix",
    "moe.shared": "gated_mlp",
}
#: Kinds that an operator reads although the table does not list them.
_ALSO = {"moe.topk_weights": ("moe.topk_ids",)}
_EXPERTS = ("moe.shared", "moe.routed")


@dataclass(frozen=True)
class Task:
    """One checkpoint to recompute.

    Attributes:
        name: the checkpoint.
        operator: row of ``operators.tsv``, ``all_reduce``, or the table's word for what is not recomputed.
        inputs: checkpoints that it reads, in the operator's order.
        partial: every rank's summand is judged by itself.
        why: not empty if it cannot be recomputed whatever was recorded.
    """

    name: Name
    operator: str
    inputs: tuple[Name, ...] = ()
    partial: bool = False
    why: str = ""


def plan(structure: Structure, facts: Facts, names: Iterable[str]) -> tuple[Task, ...]:
    """Tasks for names, in the order in which the model computes them, each name once.

    Raises:
        ValueError: a name that is no checkpoint, or not one of this model.
    """
    wanted = {}
    for text in names:
        name = parse(text)
        if not structure.has(name.kind) or (name.layer is not None and name.layer >= structure.layers):
            raise ValueError(f"the model has no checkpoint {text}")
        wanted[text] = name
    return tuple(_task(structure, facts, name) for name in sorted(wanted.values(), key=lambda one: one.order))


def _task(structure: Structure, facts: Facts, name: Name) -> Task:
    operator = structure.operator(name.kind)
    inputs = structure.inputs(name)
    operator = _BY_KIND.get(name.kind.name, operator)
    if operator == "add" and len(inputs) == 1:  # layer 0
        operator = "identity" if structure.embed_scale == 1.0 else "scale"
    also = tuple(Name(parse(f"layers.0.{kind}").kind, name.layer) for kind in _ALSO.get(name.kind.name, ()))
    # Of experts the sum over the ranks is judged: how a rank comes by its part is a matter of the engine's method.
    partial = name.kind.shard == "partial" and structure.tp > 1 and name.kind.name not in _EXPERTS
    return Task(name, operator, (*inputs, *also), partial, _impossible(structure, facts, name, operator))


def _impossible(structure: Structure, facts: Facts, name: Name, operator: str) -> str:
    if operator == "slots":
        return "cache slots are indices: they are compared, not recomputed"
    if operator not in bounds() and operator != "all_reduce":
        return f"the operator {operator} is not recomputed"
    if operator in ("gelu_mul", "expert_mix", "gated_mlp") and facts.activation not in ACTIVATIONS:
        return f"the activation {facts.activation} is not recomputed"
    if operator == "rope" and facts.rope_why:
        return facts.rope_why
    if operator == "attention" and name.layer is not None:
        window = facts.windows[name.layer]
        return window.why if window.why and window.size is None else ""
    if operator in ("topk_ids", "topk_weights", "expert_mix") and facts.routing is None:
        return "the configuration does not say how experts are chosen"
    return ""


def bound_of(task: Task, structure: Structure) -> OperatorBound:
    """What rounding may do; the sum over ranks rounds once for each of its additions."""
    if task.name.kind.name in _EXPERTS and max(structure.tp, structure.expert_tp) > 1:
        one, ranks = bounds()[task.operator], max(structure.tp, structure.expert_tp)
        why = f"{one.derivation}; each rank's summand rounds by itself, and each addition once"
        return OperatorBound(task.operator, one.max_roundings + 2.0 * ranks, one.gain_roundings + 1, why)
    if task.operator != "all_reduce":
        return bounds()[task.operator]
    count = float(structure.tp - 1)
    why = "magnitude sum |summand|: tp - 1 additions in the model dtype, each rounded (1)"
    return OperatorBound("all_reduce", count, 0.25, why)
