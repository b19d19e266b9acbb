"""The section ``paired`` of a result: whole, documented, and made of two results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from align.cli.leave import text_of
from align.result.pair import Asked, Earlier, fault_said, paired_with, ran_of
from align.result.paired import PairedFault
from align.result.schema import Result, json_schema
from align.run.plan import SideExtras
from align.sentences import said
from align.sentences import text_of as words
from align.walk.paired import Fault
from tests.unit.align.result import made
from tests.unit.align.run import recordings


@pytest.fixture
def wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Result:
    return made.Run(tmp_path / "wrong", monkeypatch, made.wrong_up).go().result()


@pytest.fixture
def right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Result:
    fix = tmp_path / "fix.py"
    fix.write_text('"""Mends it.\n\nFile: a/norm.py\n"""\n')
    extras = {"candidate": SideExtras({"x": 1}, (str(fix),))}
    return made.Run(tmp_path / "right", monkeypatch, extras=extras).go().result()


def changed(result: Result, **fields: Any) -> Result:
    return Result.model_validate({**result.model_dump(mode="json"), **fields})


def test_it_is_what_the_schema_says_and_comes_back(wrong: Result, right: Result) -> None:
    for earlier in (Earlier("one", wrong), Earlier("one", None, said("paired.no_result")), Earlier("one", right)):
        for now in (wrong, right):
            result = now.model_copy(update={"paired": paired_with(earlier, now)})
            plain = json.loads(text_of(result))
            jsonschema.Draft202012Validator(json_schema()).validate(plain)
            assert Result.model_validate_json(text_of(result)) == result
            assert result.paired is not None and words(result.paired.told) == result.paired.what


def test_a_result_of_an_earlier_version_has_none(wrong: Result) -> None:
    plain = wrong.model_dump(mode="json")
    plain.pop("paired")
    assert Result.model_validate(plain).paired is None


def test_measures_are_those_of_the_result(wrong: Result, right: Result) -> None:
    paired = paired_with(Earlier("one", wrong), right)
    assert paired.added == right.measures and paired.changes == 2
    assert "a patch on the candidate: fix.py, an option of the candidate: x" in paired.what
    assert paired_with(Earlier("one", right), right).added == []
    back = paired_with(Earlier("one", right), wrong)
    assert back.removed == right.measures and "changed: without a patch on the candidate: fix.py" in back.what


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"versions": {"candidate": {"torch": "9"}}}, "version"),
        ({"case": None}, None),
        ({"tensors": None}, None),
    ],
)
def test_what_differs_besides(wrong: Result, changes: dict[str, Any], what: str | None) -> None:
    found = paired_with(Earlier("one", changed(wrong, **changes)), wrong)
    assert {one.what for one in found.confounded} == ({what} if what else set())


def test_each_control_is_seen_by_itself(wrong: Result) -> None:
    assert wrong.case is not None and wrong.tensors is not None
    case, tensors = wrong.case.model_dump(mode="json"), wrong.tensors.model_dump(mode="json")
    hardware = [
        {**one.model_dump(mode="json"), **({"value": "ascend"} if one.name == "hardware" else {})}
        for one in wrong.facts
    ]
    condition = {**wrong.conditions[0].model_dump(mode="json"), "verdict": "unknown"}
    told = {**condition, "verdict": "false", "told": True}
    for changes, names in (
        ({"case": {**case, "fingerprint": "ff"}}, {("model", "fingerprint")}),
        ({"case": {**case, "sha256": "00", "dtype": "float16"}}, {("case", "dtype"), ("case", "sha256")}),
        ({"case": {**case, "sha256": "00"}}, {("case", "sha256")}),
        ({"facts": hardware}, {("device", "hardware")}),
        ({"conditions": [condition]}, {("condition", "eager")}),
        ({"conditions": [told]}, set()),
        ({"tensors": {**tensors, "policy": "seed"}}, {("recording", "policy")}),
    ):
        found = paired_with(Earlier("one", changed(wrong, **changes)), wrong)
        assert {(one.what, one.name) for one in found.confounded} == names
        assert found.conclusive is not bool(names)


def test_a_condition_that_is_read_from_the_recording_is_not_held_against_a_run_that_has_none(wrong: Result) -> None:
    unknown = recordings.condition("unknown", "token_ids").to_dict()
    unread = {**wrong.conditions[0].model_dump(mode="json"), **{key: unknown[key] for key in ("name", "verdict")}}
    read = {**unread, "verdict": "ok"}
    early, late = changed(wrong, conditions=[unread], tensors=None), changed(wrong, conditions=[read])
    assert paired_with(Earlier("one", early), late).confounded == []
    assert paired_with(Earlier("one", changed(early, tensors=wrong.model_dump()["tensors"])), late).confounded != []


def test_how_the_runs_were_asked_for(wrong: Result) -> None:
    ids = {"r0": (1, 2), "r1": (3,)}
    earlier = Earlier("one", wrong, asked=Asked(ids, True))
    assert paired_with(earlier, wrong, Asked(ids, True)).confounded == []
    assert paired_with(earlier, wrong).confounded == [], "what is not known is not held against it"
    (one,) = paired_with(earlier, wrong, Asked({**ids, "r1": (3, 4)}, True)).confounded
    assert (one.name, one.before, one.after) == ("r1", "token 1: none", "token 1: 4")
    (one,) = paired_with(earlier, wrong, Asked(ids, False)).confounded
    assert (one.what, one.name) == ("recording", "tensors")


def test_many_differences_are_counted_in_words(wrong: Result) -> None:
    versions = {"candidate": {f"p{number}": "1" for number in range(9)}}
    paired = paired_with(Earlier("one", changed(wrong, versions=versions)), wrong)
    assert len(paired.confounded) > 9
    assert f"{len(paired.confounded) - 4} more" in paired.what


def test_a_wrong_index_is_known_by_its_kind(wrong: Result) -> None:
    finding = {**wrong.findings[0].model_dump(mode="json"), "path": "A", "kind": "slots", "side": "reference"}
    index = changed(wrong, findings=[{**finding, "evidence": {"fault": "wrong_slot"}}])
    assert ran_of(index).headline == Fault("A", "slots", "reference", "layers.1.mlp.up", "wrong_slot")
    other = changed(wrong, findings=[{**finding, "evidence": {"fault": "stale_table"}}])
    assert paired_with(Earlier("one", index), other).outcome == "moved"


@pytest.mark.parametrize(
    ("fault", "english", "chinese"),
    [
        (("A", "slots", "candidate", "layers.0.attn.out", "wrong_slot"),
         "path A: slots of the candidate at layers.0.attn.out (wrong_slot)",
         "路径 A：候选侧的 layers.0.attn.out 处的缓存槽位错误（wrong_slot）"),
        (("UNLOCATED", "residue", "reference", None, None),
         "not located: residue of the reference", "未定位：参考侧的运行之间的残留"),
        (("INPUT", "token_ids", None, None, None), "inputs: token_ids", "输入：token id 不同"),
    ],
)  # fmt: skip
def test_a_fault_in_words(fault: tuple[Any, ...], english: str, chinese: str) -> None:
    names = dict(zip(("path", "kind", "side", "checkpoint", "fault"), fault, strict=True))
    told = fault_said(PairedFault.model_validate(names))
    assert (words(told), words(told, "zh")) == (english, chinese)
