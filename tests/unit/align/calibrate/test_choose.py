"""Which floor judges: the named one, or one of the same circumstances; widened where they differ, and said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from align.calibrate.choose import HARDWARE, OTHER_MODEL, choose_floor
from align.errors import UserError
from tests.unit.align.calibrate import floors


def manifest(**changes: Any) -> dict[str, Any]:
    plain = {
        "dtype": "bfloat16",
        "simulated": True,
        "spec": {"device": "simnpu"},
        "model": {"architectures": ["LlamaForCausalLM"]},
        "model_info": {"fingerprint": "f" * 16},
    }
    return {**plain, **changes}


HARD = {"simulated": False, "spec": {"device": "ascend"}}


def choose(option: str, place: Path, **changes: Any) -> Any:
    return choose_floor(option, manifest(**changes), manifest(**changes), place=place)


def test_none_and_nothing_there(tmp_path: Path) -> None:
    floors.floor().save(tmp_path / "tiny.json")
    assert choose("none", tmp_path) is None
    assert choose("auto", tmp_path / "nowhere") is None


def test_auto_takes_one_of_the_same_circumstances(tmp_path: Path) -> None:
    floors.floor().save(tmp_path / "tiny.json")
    (tmp_path / "broken.json").write_text("{")
    found = choose("auto", tmp_path)
    assert (found.name, found.factor, found.wider, found.words) == (
        "tiny", 1.0, False, "calibrated floor tiny (simulated)",
    )  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float16"},
        HARD,
        {"simulated": None},
        {"spec": {}},
        {"model": {"architectures": ["Qwen2ForCausalLM"]}},
        {"model": None},
    ],
)
def test_auto_takes_no_other(tmp_path: Path, changes: dict[str, Any]) -> None:
    floors.floor().save(tmp_path / "tiny.json")
    assert choose("auto", tmp_path, **changes) is None


def test_sides_of_different_devices_have_no_floor(tmp_path: Path) -> None:
    floors.floor().save(tmp_path / "tiny.json")
    assert choose_floor("auto", manifest(), manifest(**HARD), place=tmp_path) is None


def test_auto_prefers_the_same_model_then_the_newest(tmp_path: Path) -> None:
    other = {"model_info": {"fingerprint": "0" * 16}}
    floors.floor("old").save(tmp_path / "old.json")
    floors.floor("other", fingerprint="1" * 16, created="2031").save(tmp_path / "other.json")
    assert choose("auto", tmp_path).name == "old"
    assert choose("auto", tmp_path, **other).name == "other"
    floors.floor("new", created="2030-06").save(tmp_path / "a.json")
    assert choose("auto", tmp_path).name == "new"


def test_another_models_floor_is_widened(tmp_path: Path) -> None:
    floors.floor().save(tmp_path / "tiny.json")
    found = choose("auto", tmp_path, model_info={"fingerprint": "0" * 16})
    assert (found.factor, found.wider) == (OTHER_MODEL, False)
    assert found.limit("attn.q", "whole") == pytest.approx(1.5 * OTHER_MODEL)
    assert "calibrated on tiny" in found.words


def test_a_simulated_floor_on_hardware_is_widened_and_marked(tmp_path: Path) -> None:
    floors.floor().save(tmp_path / "tiny.json")
    for option in ("tiny", str(tmp_path / "tiny.json")):
        found = choose(option, tmp_path, **HARD)
        assert (found.factor, found.wider) == (HARDWARE, True)
        assert found.words == "calibrated floor tiny (simulated, × 4: calibrated on a simulated device)"
    floors.floor("real", simulated=False, device="ascend").save(tmp_path / "real.json")
    found = choose("auto", tmp_path, **HARD)
    assert (found.name, found.factor, found.wider, found.words) == ("real", 1.0, False, "calibrated floor real")


def test_what_was_named_must_be_there_and_fit(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        choose("tiny", tmp_path)
    assert "there are none" in caught.value.hint
    floors.floor().save(tmp_path / "tiny.json")
    with pytest.raises(UserError) as caught:
        choose("tini", tmp_path)
    assert "floors: tiny;" in caught.value.hint
    with pytest.raises(UserError, match="is of bfloat16, the recordings are of float16"):
        choose("tiny", tmp_path, dtype="float16")
    (tmp_path / "tiny.json").write_text("{}")
    with pytest.raises(UserError, match=r"tiny\.json"):
        choose("tiny", tmp_path)
