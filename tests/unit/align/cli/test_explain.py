"""`align explain`: one entry, a list, both languages, plain text when piped, exit code 2 for what is unknown."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from align.checklists.table import items
from align.checkpoints.table import kinds
from align.cli import explain, explain_names, main
from align.compare.residual import ResidualPolicy
from align.findings import PATHS
from align.fits.table import kinds as faults
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
    assert lines[-1] == "guide: seed 003, troubleshooting"


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
    assert "\t" not in out
    head, *lines = out.splitlines()
    assert head.split() == ["path", "name", "what", "it", "is"]
    count = len(knowledge().entries)
    rows = [re.split(" {2,}", line) for line in lines[:count]]
    legend, checkpoints, groups, operators, errors, listed = lines[count:]
    assert legend.startswith("path: A KV-cache indices, B operator precision, C ")
    assert all(name in legend for name in PATHS.values())
    assert checkpoints == "checkpoints: " + ", ".join(
        f"layers.{{i}}.{kind.name}" if kind.per_layer else kind.name for kind in kinds().values()
    )
    assert groups == "groups of checkpoints: attn, mlp, moe, layers"
    assert "rms_norm" in operators.removeprefix("operators: ").split(", ")
    assert errors.removeprefix("errors that are fitted: ").split(", ") == list(faults())
    assert listed == "items of checklists: " + ", ".join(one for one in items() if one not in knowledge().entries)
    assert [row[1] for row in rows] == list(knowledge().entries)
    assert {path for row in rows for path in row[0].split(",")} == set(PATHS)
    assert all(len(row) == 3 and row[2] for row in rows)


def test_words_that_fit_several_entries_list_them(align: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = align("first", "token")
    assert code == 0
    *rows, legend = out.splitlines()
    assert {"000-S2.1-2", "003-SY-1", "003-SY-2"} <= {re.split(" {2,}", line)[1] for line in rows}
    assert legend.startswith("path: "), "and no names that were not asked for"


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


@pytest.mark.parametrize(
    "word",
    ["layers.2.mlp_norm", "layers.2.mlp_norm ", "layer2_mlp_norm_output_rank0.pt", "LAYERS.2.MLP_NORM"],
)
def test_a_checkpoint_as_findings_print_it(align: Callable[..., tuple[int, str, str]], word: str) -> None:
    code, out, err = align(word)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "layers.2.mlp_norm: second norm's output"
    assert {"operator: rms_norm", "shape: [tokens, hidden]", "reads: layers.2.mid"} <= set(lines)
    assert {"read by: layers.2.mlp.gate", "read by: layers.2.mlp.up"} <= set(lines)
    for engine, name in (("lmdeploy", "DlinferRMSNormImpl.forward"), ("vllm", "AscendRMSNorm.forward_oot")):
        tap, sandwich = (line for line in lines if line.startswith(f"{engine}: "))
        assert name in tap and "model.layers.2.post_attention_layernorm" in tap and tap.endswith(" (!sandwich)")
        assert "model.layers.2.pre_feedforward_layernorm" in sandwich and sandwich.endswith(" (sandwich)")
    assert f"findings: weights: {knowledge().entries['weights'].title.en}" in lines
    assert "errors: eps: The norm uses another epsilon." in lines
    assert f"known: 003-TS-08: {knowledge().entries['003-TS-08'].title.en}" in lines
    assert "next: align taps lmdeploy" in lines


@pytest.mark.parametrize(
    ("word", "first"),
    [
        ("mlp_norm", "layers.{i}.mlp_norm: second norm's output"),
        ("mlp_up", "layers.{i}.mlp.up: up half"),
        ("layers.{i}.mlp.up", "layers.{i}.mlp.up: up half"),
        ("logits", "logits: one row per request"),
        ("layers.0.attn.kv_start_indices", "layers.0.attn.kv_start_indices: flat cache slots"),
        ("rms_norm", "rms_norm: an operator: "),
        ("all_reduce", "all_reduce: an operator: "),
        ("attn", "attn: 14 checkpoints"),
        ("layers.1.mlp", "layers.1.mlp: 6 checkpoints"),
        ("rope_base", "rope_base: Rotary frequencies have another base."),
        ("slots", "slots: The cache is written or read by wrong indices"),
        ("collective", "collective: A reduce over ranks"),
    ],
)
def test_other_names(align: Callable[..., tuple[int, str, str]], word: str, first: str) -> None:
    code, out, _ = align(word)
    assert code == 0
    assert out.startswith(first)


def test_every_name_that_is_printed_is_explained(align: Callable[..., tuple[int, str, str]]) -> None:
    for kind in kinds().values():
        assert align(kind.at(1 if kind.per_layer else None))[0] == 0
        for operator in kind.operators:
            assert align(operator)[0] == 0
    for fault in faults():
        assert align(fault)[0] == 0


def test_every_name_that_is_listed_is_explained(align: Callable[..., tuple[int, str, str]]) -> None:
    for line in align()[1].splitlines()[-4:]:
        for name in line.partition(": ")[2].split(", "):
            assert align(name)[0] == 0


def test_rounding_is_told_as_findings_tell_it(align: Callable[..., tuple[int, str, str]]) -> None:
    assert ResidualPolicy.slack == explain_names.SLACK
    lines = align("rms_norm")[1].splitlines()
    assert "rounding: rms_norm: an element is off by 4 roundings at most" in lines
    assert "rounding: rms_norm: findings say 4.08, with a slack of 1.02 for float32 arithmetic" in lines
    assert "rounding: rms_norm: a token's common factor is off by 1.25 at most" in lines
    told = [line for line in lines if line.startswith("rounding: why: ")]
    assert "".join(told).count("(1)") == 4 and max(map(len, told)) < 130


def test_layer_0_reads_the_embedding(align: Callable[..., tuple[int, str, str]]) -> None:
    assert "reads: embed" in align("layers.0.block_in")[1].splitlines()
    out = align("layers.3.block_in")[1].splitlines()
    assert {"reads: layers.2.mid", "reads: layers.2.mlp.post_norm or layers.2.mlp.down or layers.2.moe.out"} <= set(out)


def test_slots_are_indices_and_no_floats(align: Callable[..., tuple[int, str, str]]) -> None:
    lines = align("attn.kv_start_indices")[1].splitlines()
    assert [line for line in lines if line.startswith("findings: ")] == [
        f"findings: slots: {knowledge().entries['slots'].title.en}"
    ]


@pytest.mark.parametrize(
    ("word", "closest"),
    [
        ("layers.2.mlp_nrom", "layers.2.mlp_norm"),
        ("rms_nrom", "rms_norm"),
        ("wieghts", "weights"),
        ("mlp.dwon", "mlp.down"),
    ],
)
def test_a_misspelt_name(align: Callable[..., tuple[int, str, str]], word: str, closest: str) -> None:
    code, _, err = align(word)
    assert code == 2
    assert f"next: closest: {closest}" in err


def test_names_for_programs_and_in_chinese(align: Callable[..., tuple[int, str, str]]) -> None:
    found = json.loads(align("layers.2.mlp_norm", "--json")[1])
    named = found["named"]
    assert (named["name"], named["checkpoint"]["operators"]) == ("layers.2.mlp_norm", ["rms_norm"])
    assert set(named["checkpoint"]["taps"]) == {"lmdeploy", "vllm"}
    assert [entry["id"] for entry in found["entries"]][:2] == ["operator", "weights"]
    assert json.loads(align("mlp", "--json")[1])["named"]["checkpoints"][0]["name"] == "layers.{i}.mlp.gate"
    out = align("rms_norm", "--lang", "zh")[1]
    assert "可识别的错误: eps: 归一化使用了另一个 epsilon。" in out


def test_names_on_a_terminal(monkeypatch: pytest.MonkeyPatch, align: Callable[..., tuple[int, str, str]]) -> None:
    screen = terminal(monkeypatch, width=80)
    assert align("layers.2.attn.out")[0] == 0
    assert align("attn")[0] == 0
    assert "layers.{i}.attn.o_partial" in screen.getvalue()
