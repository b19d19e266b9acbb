"""Mistakes of the user, as the engine's side says them."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from adapters.mistakes import Mistake, leave_mistake, read_mistake, require_options


def test_left_and_read(tmp_path: Path) -> None:
    assert read_mistake(tmp_path) is None
    leave_mistake(tmp_path, Mistake("one", "first"))
    leave_mistake(tmp_path, Mistake("two", "second"))
    found = read_mistake(tmp_path)
    assert found is not None
    assert (str(found), found.hint) == ("two", "second")


def test_it_passes_between_processes() -> None:
    copy = pickle.loads(pickle.dumps(Mistake("what", "mend")))
    assert (str(copy), copy.hint) == ("what", "mend")


def test_known_options_pass() -> None:
    require_options("lmdeploy", "candidate", ["tp", "block_size"], {"block_size", "tp", "dtype"})


@pytest.mark.parametrize(
    ("given", "prefix", "message", "option"),
    [
        ("blok_size", "", "lmdeploy has no option blok_size; did you mean block_size?", "blok_size"),
        (
            "top_kk",
            "sampling.",
            "lmdeploy has no option sampling.top_kk; did you mean sampling.top_k?",
            "sampling.top_kk",
        ),
        ("xyz", "", "lmdeploy has no option xyz", "xyz"),
    ],
)
def test_unknown_options(given: str, prefix: str, message: str, option: str) -> None:
    with pytest.raises(Mistake) as caught:
        require_options("lmdeploy", "candidate", ["tp", given], {"block_size", "tp", "top_k", "top_p"}, prefix)
    assert str(caught.value) == message
    assert caught.value.hint == f"correct --set candidate.{option}, or leave it out"
