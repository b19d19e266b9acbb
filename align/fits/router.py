"""Weights of chosen experts: not renormalised, not scaled, or of another function."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from align.fits.fit import Proposal
from align.fits.measured import Measured
from align.sentences import said

Tensor = torch.Tensor


def propose(measured: Measured) -> Iterator[Proposal]:
    """Each way of making weights from the logits ``[T, experts]``, at the experts that are expected."""
    case = measured.case
    if not case.has("logits") or case.inputs["logits"].shape != case.bad.shape:
        return
    logits = case.inputs["logits"].to(torch.float64)
    chosen = case.ref.to(torch.float64) != 0
    scaling = case.number("routed_scaling_factor") or 1.0
    functions = {"softmax": torch.softmax(logits, -1), "sigmoid": torch.sigmoid(logits), "logits": logits}
    functions["softmax over the chosen"] = torch.softmax(logits.masked_fill(~chosen, -torch.inf), -1)
    for name, scores in functions.items():
        kept = torch.where(chosen, scores, 0.0)
        total = kept.sum(-1, keepdim=True)
        for normal, value in (("renormalised", kept / torch.where(total == 0, 1.0, total)), ("not renormalised", kept)):
            for factor in dict.fromkeys((1.0, scaling, scaling**2)):
                made = measured.whole(value * factor)
                words = said("fit.router", function=name, normal=normal)
                if factor != 1.0:
                    words = said("fit.router_scaled", function=name, normal=normal, factor=factor)
                parameters = {"function": name, "renormalised": normal == "renormalised", "scaling": factor}
                yield Proposal("router_weights", made, measured.typical_bound(made), words, parameters)
