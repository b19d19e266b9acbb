"""The known problems of seed 000's last table, each answered from what a run saw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from align.checkpoints.table import parse
from align.compare.dp_tokens import parted, twins
from align.findings import Finding
from align.result.symptom_rows import HIDDEN, NOT_SHOWN, SHOWN, Answer, Seen
from align.sentences import said

#: Kinds of checkpoints that experts produce.
_EXPERTS = ("moe.routed", "moe.shared")
#: What config.json calls a factor that a model was trained with (MiniCPM, Granite, Gemma and others).
SCALES = (
    "embedding_multiplier", "embedding_scale", "scale_emb", "scale_embeddings", "residual_multiplier", "scale_depth",
    "dim_model_base", "logits_scaling",
)  # fmt: skip
#: Kinds of fits that are one number on everything, or one number per token.
_FACTORS = ("factor", "factor_tokens")
_SCALED_STAGES = ("embedding", "norm")


def known_problems(seen: Seen) -> list[tuple[str, Answer]]:
    """Row and answer, in the table's order."""
    table: tuple[tuple[str, Callable[[Seen], Answer]], ...] = (
        ("000-K-01", experts_not_loaded),
        ("000-K-02", zero_experts),
        ("000-K-03", ranks_that_part),
        ("000-K-04", scale_left_out),
    )
    return [(row, answer(seen)) for row, answer in table]


def _config(seen: Seen) -> Mapping[str, Any]:
    return {} if seen.ground.info is None else seen.ground.info.config


def _has_experts(seen: Seen) -> bool:
    config = _config(seen)
    return any(config.get(name) for name in ("num_experts", "n_routed_experts", "num_local_experts"))


def experts_not_loaded(seen: Seen) -> Answer:
    """Weights of experts, expert by expert, against the files, packed or not."""
    if seen.ground.info is None:
        return HIDDEN, "the model is not known"
    if not _has_experts(seen):
        return NOT_SHOWN, "the model has no experts"
    wrong = [one for one in seen.report.findings if one.kind == "weights" and _kind(one) in _EXPERTS]
    if wrong:
        first = wrong[0]
        about = {"side": first.side, "parameter": first.evidence.get("parameter", "?")}
        total = 1 + int(first.evidence.get("others_total", len(first.evidence.get("others", ()))))
        key = "symptom.experts_packed" if first.evidence.get("remark") else "symptom.experts_wrong"
        return SHOWN, said(key, **about, total=total)
    records: Sequence[Mapping[str, Any]] = [
        one for audit in seen.ground.audits.values() for one in audit if one.get("kind") in _EXPERTS
    ]
    hidden = next((one for one in records if one.get("status") == "not observable"), None)
    if not records or hidden is not None:
        return HIDDEN, "the weights of the experts were not audited" if hidden is None else str(hidden.get("why"))
    return NOT_SHOWN, "the weights of every expert equal the files"


def _kind(finding: Finding) -> str:
    return "" if finding.checkpoint is None else parse(finding.checkpoint).kind.name


def zero_experts(seen: Seen) -> Answer:
    """Zero experts hand their token on: where the model has some, and experts or their sum are wrong."""
    if seen.ground.info is None:
        return HIDDEN, "the model is not known"
    count = int(_config(seen).get("zero_expert_num") or 0)
    if not count:
        return NOT_SHOWN, "the model has no zero experts"
    wrong = next((one for one in seen.report.findings if _kind(one).startswith("moe.")), None)
    if wrong is not None:
        return SHOWN, said("symptom.zero_experts", count=count, side=wrong.side or "?", checkpoint=wrong.checkpoint)
    if seen.report.tensors is None:
        return HIDDEN, "no tensors were compared"
    return NOT_SHOWN, "the experts' results agree"


def ranks_that_part(seen: Seen) -> Answer:
    """Next tokens of data-parallel ranks that serve the same prompt."""
    case = seen.ground.case
    if case is None:
        return HIDDEN, "the case is not known"
    if case.layout.dp == 1:
        return NOT_SHOWN, "there is one data-parallel group"
    if not twins(case.requests):
        return NOT_SHOWN, "every data-parallel group serves prompts of its own: they need no common token"
    if seen.free is None or not seen.ground.free:
        return HIDDEN, "no tokens were compared"
    for side, generations in seen.ground.free.items():
        for one in parted(case.requests, {each.request: each for each in generations}, seen.free.policy):
            about = {"one": one.requests[0], "other": one.requests[1], "first": one.ranks[0], "second": one.ranks[1]}
            tokens = {"mine": one.tokens[0], "theirs": one.tokens[1]}
            key = "symptom.ranks_part_tie" if one.near_tie else "symptom.ranks_part"
            return SHOWN, said(key, side=side, step=one.step, **about, **tokens)
    return NOT_SHOWN, "equal prompts on different data-parallel groups generate the same tokens"


def scale_left_out(seen: Seen) -> Answer:
    """A constant factor on embeddings or norms, and factors that config.json names."""
    found = seen.report.diagnosis
    fit = found.fits[0] if found is not None and found.fits else None
    if found is not None and fit is not None and fit.kind in _FACTORS and _scaled(found.checkpoint):
        return SHOWN, said("symptom.scale", checkpoint=found.checkpoint, what=fit.told)
    named = [name for name in SCALES if _config(seen).get(name) not in (None, 1, 1.0)]
    if seen.report.tensors is None:
        return HIDDEN, "no tensors were compared"
    if named:  # both sides may leave it out alike
        return HIDDEN, f"config.json names {', '.join(named)}: align golden compares both sides with transformers"
    return NOT_SHOWN, "neither embeddings nor norms are off by a factor, and config.json names none"


def _scaled(checkpoint: str) -> bool:
    return parse(checkpoint).kind.stage in _SCALED_STAGES
