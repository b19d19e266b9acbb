"""Every row of the seeds' symptom tables is answered from what the run saw; what was found wins over the tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from adapters.base import Generation, TokenStep
from align.case.schema import Batch, CaseLayout
from align.compare.metrics import Metrics
from align.compare.noise import NoisePolicy
from align.compare.tokens import compare_tokens
from align.findings import Finding
from align.knowledge import knowledge
from align.report.claims import symptom as told
from align.result.ground import Ground
from align.result.symptom import symptom_of
from align.run.report import Report
from align.run.stability import Stability, Unstable
from tests.unit.align.compare.test_locate import comparison as tensors
from tests.unit.align.run import recordings

Ids = Mapping[str, tuple[int, ...]]
_ZERO: dict[str, Any] = {
    "equal": False, "max_abs": 0.5, "max_rel": 0.5, "rel_l2": 0.1, "cosine": 0.9, "worst_token": None,
    "worst_channel": None, "worst_head": None, "elements": 8, "nonfinite": 0,
}  # fmt: skip
LONG = tuple(range(1, 13))


def generation(
    name: str, ids: tuple[int, ...], prefer: tuple[int, ...] | None = None, drift: float = 0.0
) -> Generation:
    """Chosen ids, and the ids that the side prefers; ``drift`` is added to its logprobs step by step."""
    steps = []
    for at, (chosen, greedy) in enumerate(zip(ids, prefer or ids, strict=True)):
        top = ((greedy, -0.25 - drift * at), (greedy + 1, -2.5), (99, -3.0 - drift * at))
        steps.append(TokenStep(chosen, greedy, top, 7.0))
    return Generation(name, tuple(steps))


def seen(
    candidate: Ids | None = None,
    reference: Ids | None = None,
    *,
    prefer: Ids | None = None,
    drift: float = 0.0,
    ground: Mapping[str, Any] | None = None,
    **more: Any,
) -> tuple[Report, Ground]:
    """A run whose sides generated these ids; along the reference's, the candidate prefers ``prefer``."""
    report = Report(**more)
    policy = NoisePolicy.for_dtype("bfloat16")
    found: dict[str, Any] = {"source": "run", "case": recordings.case(), "info": recordings.info(), **(ground or {})}
    if candidate is not None:
        right = reference or dict.fromkeys(candidate, LONG)
        free = [[generation(name, ids) for name, ids in side.items()] for side in (candidate, right)]
        preferred = prefer or {}
        forced = [
            [generation(name, ids, preferred.get(name), drift) for name, ids in right.items()],
            [generation(name, ids) for name, ids in right.items()],
        ]
        report.comparisons = {
            "free": compare_tokens(*free, mode="free", policy=policy),
            "replay": compare_tokens(*forced, mode="replay", policy=policy),
        }
        sides = ("candidate", "reference")
        found |= {"free": dict(zip(sides, free, strict=True)), "replay": dict(zip(sides, forced, strict=True))}
    return report, Ground(**found)


def states(report: Report, ground: Ground) -> dict[str, str]:
    return {one.row: one.state for one in symptom_of(report, ground).rows}


def test_every_row_of_both_tables_is_answered() -> None:
    wanted = {row for row in knowledge().entries if row.startswith(("003-SY-", "003-S4-", "000-S2.1-"))}
    for one in (seen(), seen({"r0": LONG, "r1": LONG})):
        rows = symptom_of(*one).rows
        assert wanted <= {row.row for row in rows}
        assert all(row.why for row in rows)


def test_a_clean_run_shows_nothing() -> None:
    report, ground = seen({"r0": LONG, "r1": LONG}, verdict="aligned", tensors=tensors({}))
    found = symptom_of(report, ground)
    assert found.names == ["no difference"]
    assert [one.row for one in found.rows if one.state == "shown"] == []
    assert (found.suggested, found.found, found.agree) == ([], [], None)


def test_what_was_not_looked_at_is_not_observable() -> None:
    found = states(*seen())
    for row in ("003-SY-1", "003-SY-2", "003-SY-3", "003-SY-4", "000-S2.1-1", "000-S2.1-3", "000-S2.1-5", "003-TS-06"):
        assert found[row] == "not observable", row


def wrong_from(index: int) -> tuple[int, ...]:
    return (*LONG[:index], *(one + 40 for one in LONG[index:]))


@pytest.mark.parametrize(
    ("candidate", "name", "shown", "path"),
    [
        ({"r0": wrong_from(0), "r1": wrong_from(0)}, "first token wrong", "003-SY-1", "B"),
        ({"r0": wrong_from(3), "r1": wrong_from(5)}, "wrong after 3 right tokens", "003-SY-2", "A"),
        ({"r0": LONG, "r1": wrong_from(5)}, "wrong for some requests of a batch only", "000-S2.1-6", "A"),
    ],
)
def test_where_tokens_part(candidate: Ids, name: str, shown: str, path: str) -> None:
    report, ground = seen(candidate)
    found = symptom_of(report, ground)
    assert name in found.names
    assert shown in [one.row for one in found.rows if one.state == "shown"]
    assert found.suggested[0] == path


def test_first_token_and_later_tokens_exclude_each_other_per_request() -> None:
    found = {one.row: one for one in symptom_of(*seen({"r0": wrong_from(0), "r1": wrong_from(4)})).rows}
    assert (found["003-SY-1"].state, found["003-SY-2"].state) == ("shown", "shown")
    assert "r0" in found["003-SY-1"].why and "r1" not in found["003-SY-1"].why
    assert "r1 differs after 4" in found["003-SY-2"].why


@pytest.mark.parametrize("pattern", [(7,), (7, 8), (7, 8, 9)])
def test_a_side_that_repeats_itself(pattern: tuple[int, ...]) -> None:
    ids = (LONG[0], *(pattern * 11)[:11])
    found = symptom_of(*seen({"r0": ids, "r1": ids}))
    assert found.names[0] == "one token or a short pattern over and over"
    assert states(*seen({"r0": ids, "r1": ids}))["000-S2.1-1"] == "shown"


def test_both_sides_that_repeat_themselves_show_nothing() -> None:
    ids = (7,) * 12
    assert states(*seen({"r0": ids}, {"r0": ids}))["000-S2.1-1"] == "not shown"


def test_garbled_is_another_text_along_the_same_tokens() -> None:
    other = tuple(one + 40 for one in LONG)
    report, ground = seen({"r0": wrong_from(0), "r1": wrong_from(0)}, prefer={"r0": other, "r1": other})
    found = symptom_of(report, ground)
    assert "garbled" in found.names
    assert states(report, ground)["000-S2.1-1"] == "shown"


def test_decode_alone_far_off() -> None:
    other = (LONG[0], *(one + 40 for one in LONG[1:]))
    one = seen({"r0": wrong_from(1), "r1": wrong_from(1)}, prefer={"r0": other, "r1": other})
    assert states(*one)["000-S2.1-3"] == "shown"
    assert "FA" in symptom_of(*one).suggested
    prefill = tuple(one + 40 for one in LONG)
    both = seen({"r0": wrong_from(0), "r1": wrong_from(0)}, prefer={"r0": prefill, "r1": prefill})
    assert states(*both)["000-S2.1-3"] == "not shown"


def test_growth_needs_the_same_tokens_and_a_difference() -> None:
    growing = seen({"r0": wrong_from(3), "r1": LONG}, drift=0.2)
    assert states(*growing)["003-SY-3"] == "shown"
    assert states(*growing)["003-S4-1"] == "shown"
    assert states(*seen({"r0": wrong_from(3), "r1": LONG}))["003-SY-3"] == "not shown"


def test_a_side_that_ends_early() -> None:
    found = symptom_of(*seen({"r0": LONG[:5], "r1": LONG}, {"r0": LONG, "r1": LONG}))
    assert "the candidate ends before the reference" in found.names


def test_no_number() -> None:
    clean = tensors({})
    first = clean.checkpoints[3]
    bad = replace(first, metrics=Metrics(**{**_ZERO, "nonfinite": 2}))
    found = symptom_of(*seen(tensors=replace(clean, checkpoints=(*clean.checkpoints[:3], bad))))
    assert found.names[0] == "NaN or infinite results"
    assert {one.row: one.state for one in found.rows}["000-S2.1-4"] == "shown"
    assert "FA" in found.suggested


def test_runs_that_differ() -> None:
    stability = (Stability("candidate", 4, Unstable("r0", 1, 5, 6), 0.0), Stability("reference", 4, None, 0.0))
    found = symptom_of(*seen(stability=stability))
    assert found.names == ["differs between runs"]
    assert found.suggested == ["ENV"]


def test_layers_that_are_further_off_each_time() -> None:
    clean = tensors({})
    checkpoints = [
        replace(one, verdict="beyond", metrics=Metrics(**{**_ZERO, "rel_l2": 0.1 * (1 + (one.layer or 0))}))
        if one.kind == "block_in"
        else one
        for one in clean.checkpoints
    ]
    assert states(*seen(tensors=replace(clean, checkpoints=tuple(checkpoints))))["000-S2.1-5"] == "shown"
    assert states(*seen(tensors=clean))["000-S2.1-5"] == "not shown"


def test_layouts_batches_and_quantisation() -> None:
    wrong = {"r0": wrong_from(0), "r1": wrong_from(0)}
    alone = states(*seen(wrong))
    assert (alone["003-SY-5"], alone["003-SY-6"], alone["000-S2.1-7"]) == ("not shown", "not observable", "not shown")
    split = recordings.case().model_copy(update={"layout": CaseLayout(tp=2)})
    assert states(*seen(wrong, ground={"case": split}))["003-SY-5"] == "not observable"
    collective = Finding("C", "collective", side="candidate", checkpoint="layers.0.attn.o", layer=0)
    assert states(*seen(wrong, ground={"case": split}, findings=(collective,)))["003-SY-5"] == "shown"
    one_by_one = recordings.case().model_copy(update={"batch": Batch(max_batch=1)})
    assert states(*seen(wrong, ground={"case": one_by_one}))["003-SY-6"] == "not shown"
    info = recordings.info()
    quantised = replace(info, config={**info.config, "quantization_config": {"quant_method": "w8a8"}})
    assert states(*seen(wrong, ground={"info": quantised}))["000-S2.1-7"] == "not observable"


def test_a_fault_without_a_path_asks_for_less() -> None:
    nowhere = Finding("UNLOCATED", "tokens")
    wrong = {"r0": wrong_from(3), "r1": wrong_from(3)}
    assert states(*seen(wrong, findings=(nowhere,)))["003-S4-3"] == "shown"
    one = recordings.case().model_copy(update={"requests": recordings.case().requests[:1]})
    found = states(*seen({"r0": wrong_from(3)}, findings=(nowhere,), ground={"case": one}))
    assert (found["003-S4-3"], found["003-S4-5"]) == ("not shown", "shown")


def test_the_silent_fallback_of_seed_003() -> None:
    host = Finding(
        "B", "host fallback", "candidate", "layers.0.attn.q_rope", 0, evidence={"moved_at": ["rotary.py:10 forward"]}
    )
    report, ground = seen({"r0": LONG, "r1": LONG}, findings=(host,), tensors=tensors({}))
    found = symptom_of(report, ground)
    assert found.names == ["tokens agree, something else does not"]
    row = next(one for one in found.rows if one.row == "003-S4-2")
    assert row.state == "shown"
    assert "rotary.py:10" in row.why


@pytest.mark.parametrize(("path", "agree"), [("A", True), ("C", False)])
def test_what_was_found_wins_and_the_report_says_so(path: Any, agree: bool) -> None:
    finding = Finding(path, "slots" if agree else "collective", "candidate", "layers.1.attn.out", 1)
    report, ground = seen({"r0": wrong_from(3), "r1": wrong_from(3)}, findings=(finding,))
    found = symptom_of(report, ground)
    assert (found.found, found.agree) == ([path], agree)
    assert found.suggested[0] == "A"
    keys = [key for key, _ in told(_Result(found))]  # type: ignore[arg-type]
    assert ("symptom.agree" if agree else "symptom.disagree") in keys


class _Result:
    verdict = "diverged"

    def __init__(self, symptom: Any) -> None:
        self.symptom = symptom
