"""Fixes that were tried, as their files tell them; no file is run."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from align.result.measures import describe, measures_of
from align.run.plan import SideExtras


def test_a_patch_tells_file_change_and_reason(tmp_path: Path) -> None:
    file = tmp_path / "fix.py"
    file.write_text(
        '"""Adds epsilon.\n\nFile: a/norm.py\nReason: it was\n  left out.\n"""\nraise SystemExit("was run")\n'
    )
    (one,) = measures_of({"candidate": SideExtras(patches=(str(file),))})
    assert (one.side, one.kind, one.file) == ("candidate", "patch", "a/norm.py")
    assert (one.change, one.reason) == ("Adds epsilon.", "it was left out.")
    assert one.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("content", [None, "def broken(:", "x = 1\x00", "(" * 5000, "\xff\xfe"])
def test_a_patch_that_cannot_be_read_is_named_all_the_same(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "fix.py"
    if content is not None:
        file.write_bytes(content.encode("latin-1"))
    (one,) = measures_of({"reference": SideExtras(patches=(str(file),))})
    assert (one.side, one.file, one.change, one.reason, one.sha256) == ("reference", "fix.py", None, None, None)


def test_options_follow_the_patches(tmp_path: Path) -> None:
    extras = {"candidate": SideExtras({"a": True, "env.B": None}, (str(tmp_path / "no.py"),))}
    assert [(one.kind, one.change) for one in measures_of(extras)] == [
        ("patch", None), ("option", "a = true"), ("option", "env.B = null"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("docstring", "fields"),
    [
        ("", {}),
        ("One line.", {"change": "One line."}),
        ("Change\nover lines.\n\nBecause of this.", {"change": "Change over lines.", "reason": "Because of this."}),
        ("reason: r\nCHANGE: c\nFile: f", {"change": "c", "reason": "r", "file": "f"}),
        ("Change: c\n\nFree text.", {"change": "c"}),
        ("File:", {}),
    ],
)
def test_docstrings(docstring: str, fields: dict[str, str]) -> None:
    assert describe(docstring) == fields
