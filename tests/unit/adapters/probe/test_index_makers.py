"""Where indices are made: live places of functions, and what stands in their place."""

from __future__ import annotations

import pytest

from adapters.probe import index_makers
from adapters.probe.index_makers import made_at
from adapters.probe.taps import ENGINES
from tests.unit.adapters.probe import toy_engine

MODULE = "tests.unit.adapters.probe.toy_engine"
ROWS = (
    ("toy", "slots", f"{MODULE}:Attention.attend"),
    ("toy", "slots", f"{MODULE}:Attention.invented"),
    ("toy", "tables", "no_such_module:f"),
    ("toy", "tables", f"{MODULE}:Attention.forward"),
    ("other", "slots", f"{MODULE}:Attention.forward"),
)


def test_every_engine_says_where_it_makes_each_index() -> None:
    for engine in ENGINES:
        assert {index for name, index, _ in index_makers.index_makers() if name == engine} == {"slots", "tables"}


def test_what_is_there_is_named_and_what_is_not_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_makers, "index_makers", lambda: ROWS)
    found = made_at("toy")
    assert list(found) == ["slots", "tables"]
    line = toy_engine.Attention.attend.__code__.co_firstlineno
    assert found["slots"].endswith(f"toy_engine.py:{line} Attention.attend") and ", " not in found["slots"]
    assert made_at("unknown") == {}


def test_a_patch_is_named_instead_of_what_it_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_makers, "index_makers", lambda: ROWS)

    def patched(self: object) -> None:
        pass

    monkeypatch.setattr(toy_engine.Attention, "attend", patched)
    assert f"test_index_makers.py:{patched.__code__.co_firstlineno} Attention.attend" in made_at("toy")["slots"]
