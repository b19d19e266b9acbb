"""Small results made by hand: a clean run of two engines, and what is changed of it."""

from __future__ import annotations

from typing import Any, get_args

from align.checklists.evaluate import evaluate
from align.checklists.fa import FaCalls, FaFacts
from align.checklists.table import items
from align.result.checklists import ChecklistItem
from align.result.parts import Fact
from align.result.schema import Result
from align.sentences import said

SIDES = ("candidate", "reference")


def condition(name: str, verdict: str = "ok", **more: Any) -> dict[str, Any]:
    return {
        "name": name, "requested": "x", "requested_from": "the case", "observed": dict.fromkeys(SIDES, "x"),
        "where": dict.fromkeys(SIDES, f"config.{name}"), "verdict": verdict, "why": f"{name} {verdict}", "mend": "",
        "source": "", "required": True, "allowed": verdict != "ok", "sides": [], "places": {}, "told": False,
        "blocks": False, **more,
    }  # fmt: skip


def conditions(**verdicts: str) -> list[dict[str, Any]]:
    """All that the items ask for; of the named ones another verdict, and ``absent`` leaves one out."""
    names = (
        "soc", "warmup", "eager", "tp", "dp", "ep", "greedy", "token_ids", "dtype", "attention_scale", "head_dim",
        "heads", "kv_heads",
    )  # fmt: skip
    return [condition(name, verdicts.get(name, "ok")) for name in names if verdicts.get(name) != "absent"]


def finding(path: str = "B", kind: str = "operator", **more: Any) -> dict[str, Any]:
    evidence = {"what": f"{kind} is wrong", **more.pop("evidence", {})}
    return {
        "path": path, "kind": kind, "side": "candidate", "checkpoint": "layers.1.mlp.up", "layer": 1,
        "evidence": evidence, "summary": f"Path {path}: {kind}.", **more,
    }  # fmt: skip


def fault(kind: str, phases: tuple[str, ...] = ("decode",), **detail: Any) -> dict[str, Any]:
    """A finding of path A."""
    evidence = {"fault": kind, "detail": detail, "scope": {"phases": list(phases)}}
    return finding("A", "slots", checkpoint="layers.0.attn.kv_start_indices", layer=0, evidence=evidence)


def looked(**more: Any) -> dict[str, Any]:
    counts = {
        "writes": 40, "tables": 10, "lengths": 10, "prefill_lengths": 2, "layer_lengths": 10,
        "table_dtypes": {"int32": 6}, "slot_dtypes": {"int32": 6}, "idle_rows": 0,
    }  # fmt: skip
    return {**counts, **more}


def ledger(faults: int = 0, observable: bool = True, **more: Any) -> dict[str, Any]:
    seen = {"unseen": [], "looked": looked(**more)} if observable else {"unseen": ["not asked for"], "looked": None}
    return {side: {"observable": observable, "records": 6, "faults": faults, **seen} for side in SIDES}


def layers(first: int = 4, total: int = 4, beyond: int = 0) -> list[dict[str, Any]]:
    """Two layers; of layer 0 ``first`` of ``total`` checkpoints were compared."""
    other = {"total": 4, "equal": 4, "within": 0, "beyond": 0}
    zero = {"layer": 0, "total": total, "equal": first - beyond, "within": 0, "beyond": beyond}
    return [zero, {"layer": 1, **other}, {"layer": None, **other}]


def tensors(**more: Any) -> dict[str, Any]:
    found = {
        "policy": "derived", "counts": {"equal": 12}, "layers": layers(), "rows": 9, "first_divergence": None,
        "beyond": [], "shown": [], "notes": [],
    }  # fmt: skip
    return {**found, **more}


def shown(name: str, inputs: str) -> dict[str, Any]:
    """A checkpoint's numbers."""
    return {
        "name": name, "verdict": "beyond", "inputs": inputs, "why": "", "rows": 9, "estimated": False, "max_abs": 1.0,
        "max_rel": 1.0, "max_rel_bound": 0.001, "seed": False, "cosine": 0.9, "rel_l2": 0.5, "rel_l2_bound": 0.01,
    }  # fmt: skip


def tokens(outcome: str = "equal", total: int = 8) -> dict[str, Any]:
    requests = [
        {"request": name, "outcome": outcome, "equal": 4, "compared": 4, "total": total // 2} for name in ("r0", "r1")
    ]
    verdict = "diverged" if outcome == "diverged" else "aligned"
    run = {
        "verdict": verdict, "noise": 0.0, "floor": 0.1, "cap": 0.3, "noise_above_cap": False, "requests": requests,
        "differences": [],
    }  # fmt: skip
    return {"verdict": verdict, "total": total, "first": None, "free": run}


def symptom(state: str, **values: Any) -> dict[str, Any]:
    told = said("symptom.grows", early=0.0, late=1.0)
    rows = [{"row": "003-SY-3", "state": state, "why": "growth", "told": told}]
    return {"names": [], "rows": rows, "suggested": [], "found": [], "agree": None, **values}


def case(layout: str = "tp1 dp1 ep1", requests: int = 2) -> dict[str, Any]:
    return {
        "model": "toy", "fingerprint": "00", "sha256": "00", "dtype": "bfloat16", "layout": layout,
        "max_new_tokens": 4, "block_size": 16, "numerics": {},
        "requests": [{"name": f"r{number}", "prompt_tokens": 3} for number in range(requests)],
    }  # fmt: skip


def model(**about: Any) -> list[dict[str, Any]]:
    known = {"architecture": "Qwen3ForCausalLM", "latent_attention": False, "quantised_cache": False, **about}
    others = [{"name": name, "status": "unknown"} for name in get_args(Fact.model_fields["name"].annotation)[1:]]
    return [{"name": "model", "status": "derived", "value": "toy", "about": known}, *others]


def recordings(damaged: tuple[str, ...] = (), steps: int = 5, dummies: int = 0) -> dict[str, Any]:
    one = {"ranks": [0], "steps": steps, "dummies": dummies, "damaged": list(damaged)}
    return dict.fromkeys(SIDES, one)


def stability(stable: bool = True, count: int = 8) -> list[dict[str, Any]]:
    first = None if stable else {"request": "r1", "index": 2}
    return [
        {"side": "candidate", "stable": stable, "tokens": count, "noise": 0.0, "first": first},
        {"side": "reference", "stable": True, "tokens": count, "noise": 0.0},
    ]


def result(**changes: Any) -> Result:
    """A clean run, with changes; findings make it diverge."""
    clean: dict[str, Any] = {
        "source": "run", "verdict": "diverged" if changes.get("findings") else "aligned",
        "engines": {"candidate": "lmdeploy", "reference": "vllm"}, "case": case(), "facts": model(),
        "symptom": symptom("not shown"), "findings": [], "scope": {}, "tokens": tokens(), "conditions": conditions(),
        "stability": stability(), "tensors": tensors(), "weights": {}, "ledger": ledger(), "recordings": recordings(),
        "measures": [], "walk": [], "versions": {}, "command": [],
    }  # fmt: skip
    return Result.model_validate({**clean, **changes})


def stopped(**changes: Any) -> Result:
    """A run that a condition stopped before anything was compared."""
    nothing: dict[str, Any] = {
        "verdict": "not comparable", "reason": "stopped here", "tokens": None, "tensors": None, "ledger": {},
        "recordings": {}, "stability": [], "symptom": None, "conditions": [],
    }  # fmt: skip
    return result(**{**nothing, **changes})


def ladder(state: str | None, dimension: str | None = None, verdict: str = "diverged") -> dict[str, Any]:
    rungs = [{"layout": "tp1 dp1 ep1", "verdict": "aligned"}, {"layout": "tp2 dp2 ep1", "verdict": verdict}]
    conclusion = None if state is None else {"state": state, "dimension": dimension, "sentence": f"{dimension} it is"}
    return {
        "target": "tp2 dp2 ep1", "planned": ["tp1 dp1 ep1", "tp2 dp2 ep1"], "rungs": rungs, "conclusion": conclusion
    }  # fmt: skip


def paired(outcome: str, conclusive: bool = True) -> dict[str, Any]:
    return {
        "earlier": "before", "verdict": "diverged", "added": [], "removed": [], "changes": 1, "confounded": [],
        "outcome": outcome, "conclusive": conclusive, "gone": [], "appeared": [], "what": outcome,
    }  # fmt: skip


def alone(reproduced: bool = True) -> dict[str, Any]:
    return {
        "request": "r1", "checkpoint": "layers.1.mlp.up", "reproduced": reproduced, "values": [], "verified": {}
    }  # fmt: skip


def diagnosis(side: str | None, verdict: str = "beyond") -> dict[str, Any]:
    oracle = {
        "verdict": verdict, "why": "", "ratio": 9.0, "roundings": 9.0, "allowed": 2.0, "bit_equal": False, "rows": 7
    }  # fmt: skip
    return {
        "checkpoint": "layers.1.mlp.up", "operator": "linear", "side": side, "why": "it errs",
        "sides": {"candidate": oracle}, "fits": [], "channels": [], "channels_total": 0, "heads": [],
    }  # fmt: skip


def fa(item: str, **more: Any) -> FaFacts:
    """Calls of both sides in both phases, on which the item's rules were evaluated."""
    rules = frozenset(items()[item].rules)
    calls = tuple(FaCalls(side, phase, 4, rules) for side in SIDES for phase in ("prefill", "decode"))
    return FaFacts(**{"calls": calls, **more})


def came(item: str, found: Result, recorded: FaFacts | None = None) -> ChecklistItem:
    """What came of one item."""
    return next(one for each in evaluate(found, recorded) for one in each.items if one.id == item)
