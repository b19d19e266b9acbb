"""``result.json``: every kind of result is what the published schema says, and comes back as it was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from pydantic import ValidationError

from align.cli.leave import text_of
from align.result.build import Command, result_of
from align.result.ground import Ground
from align.result.schema import SCHEMA_VERSION, Result, json_schema
from align.run.plan import SideExtras
from align.run.report import Report
from tests.unit.align.result import made
from tests.unit.align.run import recordings

SCHEMA = json_schema()
#: What the issue names; a program may rely on each.
FIELDS = {
    "schema_version", "verdict", "reason", "findings", "tokens", "conditions", "coverage", "walk", "timing",
    "versions", "command", "facts", "simulated",
}  # fmt: skip
FINDING = {
    "path", "kind", "side", "checkpoint", "layer", "phase", "step", "requests", "positions", "ranks", "evidence",
    "next",
}  # fmt: skip


def valid(result: Result) -> dict[str, Any]:
    """The file's content after a look at it with the schema."""
    plain: dict[str, Any] = json.loads(text_of(result))
    jsonschema.Draft202012Validator(SCHEMA).validate(plain)
    assert Result.model_validate_json(text_of(result)) == result
    return plain


def test_the_schema_is_one_and_documents_everything() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["properties"].keys() >= FIELDS
    assert SCHEMA["$defs"]["Finding"]["properties"].keys() >= FINDING
    assert SCHEMA["properties"]["schema_version"]["const"] == SCHEMA_VERSION == 2
    for name, definition in {"Result": SCHEMA, **SCHEMA["$defs"]}.items():
        assert definition["additionalProperties"] is False, name
        for field, content in definition["properties"].items():
            assert content.get("description"), f"{name}.{field} says nothing"


def test_a_clean_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = valid(made.Run(tmp_path / "run", monkeypatch).go().result())
    assert (plain["verdict"], plain["reason"], plain["findings"], plain["simulated"]) == ("aligned", "", [], True)
    assert plain["coverage"]["paired"]["percent"] == 100
    assert plain["coverage"]["demanded"] == 100
    assert plain["tokens"]["verdict"] == "aligned"
    assert plain["tokens"]["total"] == 4
    assert plain["tensors"]["counts"] == {"equal": plain["coverage"]["paired"]["expected"]}
    assert plain["tensors"]["beyond"] == []
    assert plain["scope"]["checkpoints_beyond"] == 0
    assert plain["details"] is None


def test_a_diverged_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = valid(made.Run(tmp_path / "run", monkeypatch, made.wrong_up).go().result())
    assert plain["verdict"] == "diverged"
    assert plain["findings"][0]["checkpoint"] == "layers.1.mlp.up"
    assert plain["tensors"]["first_divergence"] == "layers.1.mlp.up"
    shown = {one["name"]: one for one in plain["tensors"]["shown"]}["layers.1.mlp.up"]
    assert shown["verdict"] == "beyond"
    assert shown["rel_l2"] == pytest.approx(1.0, abs=0.01)  # twice the value is off by the value
    assert shown["rel_l2"] > shown["rel_l2_bound"]
    assert shown["max_rel"] > shown["max_rel_bound"] == 1e-3
    assert shown["seed"] is False


def test_a_run_that_a_condition_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made.Run(tmp_path / "run", monkeypatch, conditions=(recordings.condition("false"),)).go()
    assert run.error is not None
    plain = valid(run.result())
    assert plain["verdict"] == "not comparable"
    assert "eager" in plain["reason"]
    assert plain["conditions"][0]["blocks"] is True
    assert (plain["tokens"], plain["tensors"], plain["coverage"]) == (None, None, None)


def test_a_command_that_found_no_case() -> None:
    plain = valid(result_of(Report(reason="no such model"), Ground("run"), Command()))
    assert (plain["verdict"], plain["reason"], plain["case"]) == ("not comparable", "no such model", None)
    assert {one["status"] for one in plain["facts"]} == {"unknown"}


def test_numbers_that_json_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def infinite(phase: str, step: int, tensors: dict[str, Any]) -> None:
        tensors["layers.0.mlp.down"] = tensors["layers.0.mlp.down"] * float("inf")

    plain = valid(made.Run(tmp_path / "run", monkeypatch, infinite).go().result())
    shown = {one["name"]: one for one in plain["tensors"]["shown"]}["layers.0.mlp.down"]
    assert shown["max_abs"] == "inf"


def test_what_is_no_result_is_refused() -> None:
    plain = json.loads(text_of(result_of(Report(), Ground("run"), Command())))
    for change in ({"schema_version": 1}, {"verdict": "perhaps"}, {"surprise": 1}):
        with pytest.raises(ValidationError):
            Result.model_validate({**plain, **change})
        assert list(jsonschema.Draft202012Validator(SCHEMA).iter_errors({**plain, **change})), change


def test_a_side_that_is_unstable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made.Run(tmp_path / "run", monkeypatch)
    run.session.runs["reference"]["again"] = recordings.generations({"r0": (1, 9), "r1": (3, 4)})
    plain = valid(run.go().result())
    assert plain["verdict"] == "not comparable"
    (side,) = (one for one in plain["stability"] if not one["stable"])
    assert side["side"] == "reference"
    assert side["first"] == {"request": "r0", "index": 1, "first": 2, "second": 9}


def test_options_of_one_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extras = {"candidate": SideExtras({"sampling.top_k": 5})}
    plain = valid(made.Run(tmp_path / "run", monkeypatch, extras=extras).go().result())
    (one,) = plain["measures"]
    assert (one["kind"], one["file"], one["value"]) == ("option", "sampling.top_k", 5)
