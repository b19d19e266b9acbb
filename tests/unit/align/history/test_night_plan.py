"""Plans: what they cross, what they refuse, and the one that comes with the project."""

from __future__ import annotations

from pathlib import Path

import pytest

from align.errors import UserError
from align.history.plan import DEFAULT, read_plan
from align.models.presets import PRESETS


def written(folder: Path, text: str) -> Path:
    path = folder / "plan.toml"
    path.write_text(text)
    return path


def test_presets_layouts_and_dtypes_are_crossed(tmp_path: Path) -> None:
    text = """
presets = ["qwen3", "smollm2"]
layouts = ["tp1", "tp2 dp2"]
dtypes = ["bfloat16", "float16"]
options = ["--max-new-tokens", "8"]
skip = ["smollm2 tp2* float16"]
[[case]]
name = "long"
model = "qwen3"
options = ["--prompts", "long.jsonl"]
"""
    plan = read_plan(written(tmp_path, text))
    assert [one.name for one in plan.cases][:2] == ["qwen3 tp1 bfloat16", "qwen3 tp1 float16"]
    assert len(plan.cases) == 2 * 2 * 2 - 1 + 1 and plan.directory == tmp_path
    spread = next(one for one in plan.cases if one.name == "qwen3 tp2 dp2 float16")
    expected = "--model qwen3 --tp 2 --dp 2 --ep 1 --dtype float16 --max-new-tokens 8"
    assert (" ".join(spread.arguments), spread.folder) == (expected, "qwen3_tp2_dp2_float16")
    assert plan.cases[-1].arguments[-4:] == ("--max-new-tokens", "8", "--prompts", "long.jsonl")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("presets = [", "is no TOML file"),
        ("", "names no case"),
        ('presets = ["qwen3"]\nskip = ["*"]', "names no case"),
        ('preset = ["qwen3"]', "preset: Extra inputs are not permitted"),
        ('presets = ["qwen3"]\nlayouts = ["2"]', "layouts: '2' is no layout"),
        ('presets = ["qwen3"]\noptions = ["--out", "x"]', "options: --out is decided by the night itself"),
        ('presets = ["qwen3"]\noptions = ["--out=x"]', "is decided by the night itself"),
        ('presets = ["qwen3", "qwen3"]', "two cases are called 'qwen3 tp1 bfloat16'"),
        ('[[case]]\nname = "a b"\nmodel = "x"\n[[case]]\nname = "a_b"\nmodel = "x"', "or too much alike"),
        ('presets = ["qwen3"]\nminutes = 0', "minutes: Input should be greater than 0"),
        ('presets = ["qwen3"]\nkeep = 0', "keep: Input should be greater than or equal to 1"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read_plan(written(tmp_path, text))
    assert words in caught.value.message and caught.value.hint


def test_a_plan_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_plan(tmp_path / "none.toml")


def test_the_projects_own_plan_has_twelve_cases_of_its_presets() -> None:
    plan = read_plan(DEFAULT)
    assert len(plan.cases) == 12 and {one.model for one in plan.cases} <= set(PRESETS)
