"""What is found in a patch file before any engine starts; the file itself is never run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from align.cli.patch_file import checked_patch
from align.errors import UserError


@pytest.mark.parametrize(
    "text",
    [
        "def apply(ctx):\n    pass\n",
        "apply = lambda ctx: None\n",
        "from somewhere import change as apply\n",
        "from somewhere import *\n",
        "try:\n    import fast\n    def apply(ctx): ...\nexcept ImportError:\n    apply = print\n",
        "raise SystemExit('it was run')\ndef apply(ctx): ...\n",
    ],
)
def test_patches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "fix.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert checked_patch("fix.py") == str(tmp_path / "fix.py")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\ndef apply(ctx:\n    pass\n", r"fix\.py, line 2: "),
        ("def apply(ctx): ...\n\nreturn 3\n", r"fix\.py, line 3: 'return' outside function"),
        ("x = 1\ndef aply(ctx):\n    pass\n", r"fix\.py defines no apply\(ctx\); line 2 defines aply"),
        ("", r"fix\.py defines no apply\(ctx\)$"),
        ("class Fix:\n    def apply(self): ...\n", r"defines no apply"),
        ("def outer():\n    def apply(ctx): ...\n", r"defines no apply"),
        ("async def apply(ctx): ...\n", r"fix\.py, line 1: apply\(ctx\) is asynchronous"),
        ("def apply(ctx): ...\0", r"fix\.py.*null bytes"),
    ],
)
def test_no_patches(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "fix.py"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        checked_patch(str(file))
    assert re.search(words, caught.value.message), caught.value.message
    assert caught.value.hint


def test_another_kind_of_file(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("def apply(ctx): ...")
    with pytest.raises(UserError, match="is not a Python file"):
        checked_patch(str(file))
