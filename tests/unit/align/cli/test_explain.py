"""`align explain`: one entry, a list, both languages, plain text when piped, exit code 2 for what is unknown."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from align.cli import explain, main
from align.findings import PATHS
from align.knowledge import knowledge
from envs.home import REPOSITORY


@pytest.fixture
def align(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs ``align explain``, piped; answers ``(exit code, output, errors)``."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["align", "explain", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return call


def terminal(monkeypatch: pytest.MonkeyPatch, width: int = 100) -> io.StringIO:
    """What the command sees as a terminal."""
    screen = io.StringIO()

    def console(**options: Any) -> Console:
        return Console(file=screen, force_terminal=True, color_system="standard", width=width, **options)

    monkeypatch.setattr(explain, "Console", console)
    return screen


def test_an_entry_is_told_whole(align: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = align("003-TS-08")
    assert (code, err) == (0, "")
    entry = knowledge().entries["003-TS-08"]
    lines = out.splitlines()
    assert lines[0] == f"003-TS-08: {entry.title.en}"
    assert "path: B (operator precision)" in lines
    for text in entry.texts():
        assert text.en in out
    assert "read: dlinfer/vendor/<vendor>/" in lines
    assert f"see: operator: {knowledge().entries['operator'].title.en}" in lines
    assert lines[-1] == "source: seed 003, troubleshooting"


def test_chinese(align: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = align("000-T5.1-1", "--lang", "zh")
    assert code == 0
    assert out.splitlines()[0] == "000-T5.1-1: 缓存写入位置偏移"
    assert "路径: A (KV 缓存索引)" in out
    assert "处理: BSH 用 axis=1，TND 用 axis=0。" in out
    assert "symptom" not in out


def test_without_a_word_everything_is_listed(align: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = align()
    assert code == 0
    rows = [line.split("\t") for line in out.splitlines()]
    assert [row[1] for row in rows] == list(knowledge().entries)
    assert {path for row in rows for path in row[0].split(",")} == set(PATHS)
    assert all(len(row) == 3 and row[2] for row in rows)


def test_words_that_fit_several_entries_list_them(align: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = align("first", "token")
    assert code == 0
    assert {"000-S2.1-2", "003-SY-1", "003-SY-2"} <= {line.split("\t")[1] for line in out.splitlines()}


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["slotz"], "error: nothing is known about 'slotz'", "next: closest: slots; align explain lists everything"),
        (["slots", "--lang", "fr"], "error: no language 'fr'", "next: use one of: en, zh"),
    ],
)
def test_what_is_unknown(
    align: Callable[..., tuple[int, str, str]], arguments: list[str], error: str, hint: str
) -> None:
    code, out, err = align(*arguments)
    assert (code, out) == (2, "")
    assert err.splitlines() == [error, hint]


def test_a_terminal_gets_a_table(monkeypatch: pytest.MonkeyPatch, align: Callable[..., tuple[int, str, str]]) -> None:
    screen = terminal(monkeypatch, width=60)
    assert align("slots")[:2] == (0, "")
    shown = screen.getvalue()
    assert "\x1b[" in shown
    assert "fill_kv_cache.py" in shown
    assert "• " in shown


def test_a_terminal_lists_by_path(monkeypatch: pytest.MonkeyPatch, align: Callable[..., tuple[int, str, str]]) -> None:
    screen = terminal(monkeypatch)
    align()
    text = screen.getvalue()
    headings = [text.index(f"\x1b[1m{path}\x1b[0m  {name}") for path, name in PATHS.items()]
    assert headings == sorted(headings)
    for name in knowledge().entries:
        assert text.count(name) >= 1
    screen.truncate(0)
    align("A")
    only = screen.getvalue()
    assert PATHS["A"] in only
    assert PATHS["B"] not in only
    assert "003-TS-05" in only, "it names ENV first and A as well"


def test_brackets_are_no_markup(monkeypatch: pytest.MonkeyPatch, align: Callable[..., tuple[int, str, str]]) -> None:
    screen = terminal(monkeypatch)
    align("000-T5.2-3")
    assert "cumsum([1, ...])" in screen.getvalue()


def test_help_teaches_and_imports_nothing_heavy() -> None:
    probe = (
        "import sys\nfrom align.cli import main\nsys.argv = ['align', 'explain', '--help']\n"
        "try:\n    main()\nfinally:\n"
        "    print([name for name in ('torch', 'numpy', 'align.knowledge') if name in sys.modules],"
        " file=sys.stderr)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-c", probe], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert done.stderr.strip() == "[]"
    assert "align explain slots" in " ".join(done.stdout.split())
    assert "--lang" in done.stdout
