"""Where summaries are printed: whole lines in a pipe, tables that fit on a terminal."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from rich.table import Table
from rich.text import Text

from align.cli.screen import Screen, screen

HEADS = ("where", "equal", "beyond", "worst", "verdict")
ROWS = [
    ("layer 0", "20", "-", "-", "equal"),
    ("final_norm", "1", "-", "-", "within (estimated)"),
]
LONG = "a sentence that is longer than any terminal is wide " * 10


def table(rows: Sequence[Sequence[str]] = ROWS, heads: Sequence[str] = HEADS) -> Table:
    made = Table(title="tensors, worst of each layer", title_justify="left", box=None, pad_edge=False)
    for head in heads:
        made.add_column(head)
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return made


def shown(made: Table, width: int) -> list[str]:
    """What a terminal of a width gets."""
    text = io.StringIO()
    Screen(file=text, force_terminal=True, color_system=None, width=width).print(made)
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_a_pipe_gets_whole_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    console = screen()
    console.print(table())
    console.print(LONG, highlight=False)
    console.say("[not markup] :smile: " + LONG)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "tensors, worst of each layer",
        "where       equal  beyond  worst  verdict",
        "layer 0     20     -       -      equal",
        "final_norm  1      -       -      within (estimated)",
        LONG.rstrip(),
        "[not markup] :smile: " + LONG.rstrip(),
    ]


def test_standard_error_and_silence(capsys: pytest.CaptureFixture[str]) -> None:
    screen(stderr=True).print("told")
    screen(quiet=True).print("never")
    assert capsys.readouterr() == ("", "told\n")


def test_a_table_that_fits_is_as_it_is() -> None:
    assert shown(table(), 80)[1].split() == list(HEADS)


def test_columns_that_say_nothing_go_first() -> None:
    lines = shown(table(), 40)
    assert lines[-3:] == [
        "where       equal  verdict",
        "layer 0     20     equal",
        "final_norm  1      within (estimated)",
    ]


def test_then_rows_are_stacked() -> None:
    rows = [(f"layers.{layer}.attn.key_states", "20", "1", "mlp.down", "beyond, accused") for layer in range(2)]
    assert shown(table(rows), 60) == [
        "tensors, worst of each layer",
        "layers.0.attn.key_states",
        "  equal 20 · beyond 1 · worst mlp.down · verdict beyond,",
        "  accused",
        "layers.1.attn.key_states",
        "  equal 20 · beyond 1 · worst mlp.down · verdict beyond,",
        "  accused",
    ]


@pytest.mark.parametrize("width", range(24, 90, 6))
def test_no_word_is_cut_at_any_width(width: int) -> None:
    """Each cell's words are there, whole and in their order."""
    rows = [(f"layers.{layer}.mid", "20", "-", "-", "within (partly estimated)") for layer in range(3)]
    text = " ".join(shown(table(rows), width))
    assert "…" not in text
    for layer in range(3):
        assert f"layers.{layer}.mid" in text
    assert text.split().count("estimated)") == 3


def test_long_cells_are_folded_and_markup_is_measured_without_itself() -> None:
    made = Table(box=None, pad_edge=False)
    for head in ("request", "ids"):
        made.add_column(head)
    made.add_row("[green]r0[/green]", " ".join(map(str, range(100, 130))))
    lines = shown(made, 40)
    assert lines[0].split() == ["request", "ids"]
    assert " ".join(" ".join(lines[1:]).split()) == "r0 " + " ".join(map(str, range(100, 130)))
