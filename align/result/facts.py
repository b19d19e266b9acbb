"""What seeds 003 and 000 ask first (step 1 of both): answered by the user, derived by the run, or unknown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from align.case.schema import Case
from align.compare.tokens import Difference
from align.conditions import Condition
from align.models.info import ModelInfo
from align.models.shapes import architecture
from align.result.ground import Ground
from align.result.parts import Fact
from align.result.plain import plain
from align.result.tokens import first_difference
from align.run.report import Report

#: Option → value of the fact.
ONSETS = {"first": "first token", "later": "later token"}
BATCHINGS = {"single": "a single request shows it", "multi": "only several requests show it"}
NO_DIFFERENCE = "no token differs"


@dataclass(frozen=True)
class Answers:
    """What the user said. Empty is no answer.

    Attributes:
        symptom: in the user's words.
        onset: a key of :data:`ONSETS`: the first token is wrong, or a later one.
        batching: a key of :data:`BATCHINGS`.
        stage: what was done to the model last: the optimisation that broke it.
        baseline: what the output is compared with.
        model, layout: whether the command or the case named them.
    """

    symptom: str = ""
    onset: str = ""
    batching: str = ""
    stage: str = ""
    baseline: str = ""
    model: bool = False
    layout: bool = False


NO_ANSWERS = Answers()
#: Value, and what it rests on; a value of ``None`` is unknown.
Derived = tuple[str | None, dict[str, Any]]


def facts_of(report: Report, ground: Ground, answers: Answers) -> list[Fact]:
    """All of them, in the order in which the seeds ask."""
    names: tuple[tuple[str, str, Derived], ...] = (
        ("symptom", answers.symptom, _symptom(report)),
        ("onset", ONSETS.get(answers.onset, ""), _onset(report)),
        ("batching", BATCHINGS.get(answers.batching, ""), _batching(report, ground.case)),
        ("optimisation_stage", answers.stage, (None, {})),
        ("execution_mode", "", _execution_mode(report)),
        ("quantisation", "", _quantisation(ground)),
        ("baseline", answers.baseline, _baseline(ground)),
    )
    return [
        _given("model", answers.model, _model(ground)),
        _given("hardware", False, _hardware(report, ground)),
        _given("layout", answers.layout, _layout(ground)),
        *(_fact(name, answer, derived) for name, answer, derived in names),
    ]


def _given(name: str, answered: bool, derived: Derived) -> Fact:
    """A fact that the command itself decides."""
    value, about = derived
    status = "unknown" if value is None else "answered" if answered else "derived"
    return Fact.model_validate({"name": name, "status": status, "value": value, "about": about})


def _fact(name: str, answer: str, derived: Derived) -> Fact:
    value, about = derived
    if answer:
        found = {"name": name, "status": "answered", "value": answer, "observed": value, "about": about}
    else:
        found = {"name": name, "status": "unknown" if value is None else "derived", "value": value, "about": about}
    return Fact.model_validate(found)


# ------------------------------------------------------------------------------------------------ decided by the case


def _model(ground: Ground) -> Derived:
    info = ground.info
    if info is None:
        return (None, {}) if ground.case is None else (ground.case.model, {})
    return info.name, {"architecture": architecture(info), "layers": info.layers, "hidden": info.hidden, **_kinds(info)}


def _kinds(info: ModelInfo) -> dict[str, bool]:
    """What the checklists ask of a model: latent attention, and a quantised KV cache."""
    quantised = info.config.get("quantization_config")
    scheme = quantised.get("kv_cache_scheme") if isinstance(quantised, dict) else None
    return {"latent_attention": bool(info.config.get("kv_lora_rank")), "quantised_cache": bool(scheme)}


def _hardware(report: Report, ground: Ground) -> Derived:
    observed = _observed(report, "soc")
    about = {"device": ground.device, **({} if observed is None else {"soc": plain(observed.observed)})}
    if ground.device is None and observed is None:
        return None, {}
    seen = {str(value) for value in (observed.observed.values() if observed is not None else ()) if value is not None}
    return ", ".join([*([ground.device] if ground.device else []), *sorted(seen)]), about


def _layout(ground: Ground) -> Derived:
    if ground.case is None:
        return None, {}
    layout = ground.case.layout
    return f"tp{layout.tp} dp{layout.dp} ep{layout.ep}", {"tp": layout.tp, "dp": layout.dp, "ep": layout.ep}


def _quantisation(ground: Ground) -> Derived:
    if ground.info is None:
        return None, {}
    found = ground.info.config.get("quantization_config")
    if not found:
        return "none", {}
    return str(found.get("quant_method", "unknown method") if isinstance(found, dict) else found), {}


def _baseline(ground: Ground) -> Derived:
    engine = ground.engines.get("reference")
    if engine is None:
        return None, {}
    version = ground.versions.get("reference", {}).get(engine)
    return (engine if version is None else f"{engine} {version}"), {"side": "reference"}


# ------------------------------------------------------------------------------------------------------ seen by the run


def _observed(report: Report, name: str) -> Condition | None:
    return next((one for one in report.conditions if one.name == name), None)


def _execution_mode(report: Report) -> Derived:
    """Of seed 000: eager or graph."""
    condition = _observed(report, "eager")
    if condition is None:
        return None, {}
    words = {True: "eager", False: "graph"}
    modes = {side: words.get(value) for side, value in condition.observed.items()}
    if None in modes.values() or not modes:
        return None, plain(modes)
    if len(set(modes.values())) == 1:
        return next(iter(modes.values())), {}
    return ", ".join(f"{side} {mode}" for side, mode in modes.items()), plain(modes)


def _place(difference: Difference) -> dict[str, Any]:
    return {"request": difference.request, "index": difference.index, "position": difference.position}


def _symptom(report: Report) -> Derived:
    if "free" not in report.comparisons:
        return None, {}
    first = first_difference(report.comparisons)
    if first is not None:
        return ("first token wrong" if first.index == 0 else "wrong after some tokens"), _place(first)
    return ("tokens agree, something else does not" if report.findings else "no difference"), _ties(report)


def _ties(report: Report) -> dict[str, Any]:
    """How many tokens differ by near-ties, which are no difference; empty if none do."""
    count = len(report.comparisons["free"].near_ties)
    return {"near_ties": count} if count else {}


def _onset(report: Report) -> Derived:
    """Of seed 003: the first token comes from prefill, later ones from decode and the KV cache."""
    if "free" not in report.comparisons:
        return None, {}
    first = first_difference(report.comparisons)
    if first is None:
        tokens = sum(request.total for request in report.comparisons["free"].requests)
        return NO_DIFFERENCE, {"tokens": tokens, **_ties(report)}
    return (ONSETS["first"] if first.index == 0 else ONSETS["later"]), _place(first)


def _batching(report: Report, case: Case | None) -> Derived:
    """Whether one request alone shows it is known only if requests ran alone."""
    if case is None:
        return None, {}
    about = {"requests": len(case.requests), "max_batch": case.batch.max_batch}
    if "free" not in report.comparisons:
        return None, about
    if first_difference(report.comparisons) is None and not report.findings:
        return "nothing to show", about
    if report.alone is not None:
        return BATCHINGS["single" if report.alone.reproduced else "multi"], {**about, "alone": report.alone.request}
    alone = len(case.requests) == 1 or case.batch.max_batch == 1
    return (BATCHINGS["single"] if alone else None), about
