"""Routing replay: the other side's choice of experts in the place of this side's own, inside the engine.

A choice of experts is discrete: where two scores are as near as rounding makes them, right engines choose differently,
and nothing behind such a token can be compared. So the driver leaves the other side's expert ids in a directory
(:func:`adapters.probe.transplant.write_tensors`), and nothing else. Where a router of this side chose other experts for
a token, their ids take the place of its own, and their weights are what the engine's own function gives for them
(:func:`weights_of`); ids and weights are overwritten in place, before anything reads them. Tokens that were chosen
alike stay as they are, bit by bit.

The record of ``moe.topk_ids`` stays the router's own choice; what was used is recorded as ``moe.topk_ids#used``.

``routers.tsv`` says of each function that chooses, by the ``where`` of its tap: which argument holds the logits, which
argument or attribute (``self.NAME``) says how many are chosen, and which one whether it makes the weights of the chosen
sum up to one (``-``: it never does; lmdeploy does so later, in the experts).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapters.base import RowSpan
from adapters.probe.spec import TransplantSpec
from adapters.probe.transplant import argument_of, read_tensors, rows_of, with_argument
from align.trace.format import USED

CHOICE = "moe.topk_ids"
#: By how much the logits of experts that are not to be chosen lie below all others: exp(-100) is 0 in float32.
_FAR = 100.0
#: The most experts that the gating operators choose (npu_moe_gating_top_k: 32). The experts of a near-tie are never far
#: from the best ones.
_MOST = 32


@dataclass(frozen=True)
class Call:
    """One call of a function that chooses experts.

    Attributes:
        function: as it was called.
        owner: the object whose attributes it reads; ``None`` for a function of a module.
        args, kwargs: what it was given.
        result: ``(weights, ids)``, ``[T, top_k]`` each.
    """

    function: Callable[..., Any]
    owner: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any


@dataclass(frozen=True)
class Router:
    """One row of ``routers.tsv``."""

    where: str
    logits: str
    top_k: str
    renormalize: str


@lru_cache(maxsize=1)
def routers() -> Mapping[str, Router]:
    """The table, by ``where``."""
    lines = Path(__file__).with_name("routers.tsv").read_text(encoding="utf-8").splitlines()
    assert lines[0].split("\t") == list(Router.__dataclass_fields__), lines[0]
    rows = [Router(*line.split("\t")) for line in lines[1:]]
    return {row.where: row for row in rows}


def weights_of(router: Router, call: Call, parameters: Sequence[str], ids: Tensor) -> Tensor:
    """The weights ``[T, top_k]`` that the engine's own function gives to experts ``ids`` (int64 ``[T, top_k]``).

    It is called once more. Where it does not renormalise, it is asked for more experts (:data:`_MOST` at most), whose
    scores do not depend on the choice; where it does, with the logits of the others so far down that it chooses these:
    weights that sum up to one depend on the logits of the chosen alone.

    Raises:
        ValueError: it was called without logits, or does not choose these experts even so.
    """
    args, kwargs = call.args, dict(call.kwargs)
    logits = argument_of(router.logits, parameters, args, kwargs)
    if not isinstance(logits, Tensor):
        raise ValueError(f"the router was called without {router.logits}")
    flat = logits.reshape(-1, logits.shape[-1])
    experts = flat.shape[-1]
    if argument_of(router.renormalize, parameters, args, kwargs):
        others = torch.ones_like(flat, dtype=torch.bool).scatter_(1, ids, False)
        low = max(float(flat.amin()) - _FAR, torch.finfo(flat.dtype).min)
        masked = flat.masked_fill(others, low).reshape(logits.shape)
        args, kwargs = with_argument(router.logits, masked, parameters, args, kwargs)
        weights, chosen = call.function(*args, **kwargs)[:2]
    else:
        weights, chosen = _of_more(router, call, parameters, min(experts, _MOST))
    weights, chosen = (one.reshape(-1, one.shape[-1]) for one in (weights, chosen))
    by_expert = torch.full((len(weights), experts), torch.nan, dtype=weights.dtype, device=weights.device)
    by_expert.scatter_(1, chosen.long(), weights)
    found = by_expert.gather(1, ids)
    if bool(found.isnan().any()):
        raise ValueError("the engine's router does not give these experts a weight")
    return found


def _of_more(router: Router, call: Call, parameters: Sequence[str], experts: int) -> tuple[Tensor, Tensor]:
    """Weights and ids of so many experts, ``[T, experts]``."""
    args, kwargs = call.args, dict(call.kwargs)
    attribute = router.top_k.removeprefix("self.")
    if attribute == router.top_k:
        args, kwargs = with_argument(router.top_k, experts, parameters, args, kwargs)
        weights, chosen = call.function(*args, **kwargs)[:2]
        return weights, chosen
    usual = getattr(call.owner, attribute)
    setattr(call.owner, attribute, experts)
    try:
        weights, chosen = call.function(*args, **kwargs)[:2]
    finally:
        setattr(call.owner, attribute, usual)
    return weights, chosen


class RoutingReplay:
    """The routing replay of one rank and run.

    Attributes:
        rows: spans of the running step in batch order; whoever runs the step sets them.
        used: experts that the step used, in rising order, by ``NAME#used``: int64 ``[T, top_k]``.
        failures: why a choice could not be replaced, by ``NAME#used``.
    """

    def __init__(self, spec: TransplantSpec) -> None:
        self.rows: tuple[RowSpan, ...] = ()
        self.used: dict[str, Tensor] = {}
        self.failures: dict[str, str] = {}
        self._given: dict[str, tuple[Tensor, dict[tuple[str, int, int], int]]] = {}
        self._unread: dict[str, str] = {}
        for name in spec.checkpoints:
            try:
                tensor, rows = read_tensors(Path(spec.directory), name)
                self._given[name] = tensor, {row: index for index, row in enumerate(rows)}
            except LookupError as error:  # the driver hears of it with the first step
                self._unread[name] = str(error)

    def begin(self, rows: tuple[RowSpan, ...]) -> None:
        """A step begins."""
        self.rows = rows
        self.used, self.failures = {}, {f"{name}{USED}": why for name, why in self._unread.items()}

    def at_choice(self, where: str, layer: int | None, call: Call, parameters: Sequence[str]) -> None:
        """Replace a choice; an error is kept for the driver and never stops the engine."""
        name = f"layers.{layer}.{CHOICE}"
        if name not in self._given:
            return
        try:
            router = routers().get(where)
            if router is None:
                raise ValueError(f"it is not known how {where} weighs the experts that it chooses")
            self.used[f"{name}{USED}"] = self._replace(name, router, call, parameters)
        except Exception as error:
            self.failures[f"{name}{USED}"] = (
                str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            )

    def _replace(self, name: str, router: Router, call: Call, parameters: Sequence[str]) -> Tensor:
        weights, ids = (one.view(-1, one.shape[-1]) for one in call.result[:2])  # views: what is written must be seen
        given, index = self._given[name]
        keys = rows_of(self.rows)
        if len(ids) != len(keys):  # other ranks' tokens, or a part of this rank's: which is which is not known here
            raise ValueError(f"{len(ids)} rows were chosen for, the step has {len(keys)}")
        if ids.shape[1] != given.shape[1]:
            raise ValueError(f"{ids.shape[1]} experts per token here, {given.shape[1]} on the other side")
        own = ids.long().sort(-1).values
        wanted = own.clone()
        for here, key in enumerate(keys):
            if key in index:
                wanted[here] = given[index[key]].to(wanted.device)
        apart = (own != wanted).any(1).nonzero()[:, 0]
        if len(apart):
            fed = torch.where((own != wanted).any(1, keepdim=True), wanted, ids.long())
            found = weights_of(router, call, parameters, fed)[apart]
            order = found.argsort(-1, descending=True)  # as a router leaves them
            weights[apart] = found.gather(1, order).to(weights.dtype)
            ids[apart] = fed[apart].gather(1, order).to(ids.dtype)
        used: Tensor = wanted.cpu()
        return used
