"""What recordings say of themselves, and what they leave unknown."""

from __future__ import annotations

from typing import Any

import pytest

from align.cli.leave import text_of
from align.result.build import Command, result_of
from align.result.ground import ground_of_manifests
from align.result.schema import Result
from align.run.report import Report


@pytest.mark.parametrize(
    "manifest",
    [
        {},
        {"engine": "vllm", "case": {"model": 3}, "model_info": None, "versions": [], "spec": "x", "weights": {"a": 1}},
        {"spec": {"options": 7, "patches": 7, "device": None}, "weights": [1, None], "capture": 3, "python": 3.11},
    ],
)
def test_a_manifest_that_says_nothing_useful(manifest: dict[str, Any]) -> None:
    ground = ground_of_manifests({"candidate": manifest, "reference": manifest})
    assert (ground.case, ground.info, ground.simulated, ground.device) == (None, None, None, None)
    result = result_of(Report(reason="damaged"), ground, Command())
    assert Result.model_validate_json(text_of(result)) == result
    assert result.measures == []


def test_a_manifest_that_says_all() -> None:
    side = {
        "engine": "vllm", "versions": {"vllm": "0.1"}, "python": "3.11", "simulated": False,
        "spec": {"device": "ascend", "options": {"x": 1}, "patches": ["/gone/fix.py"]},
        "weights": [{"parameter": "p", "status": "equal"}], "capture": {"values": ["layers.0.*"]},
    }  # fmt: skip
    ground = ground_of_manifests({"candidate": {}, "reference": side})
    assert (ground.engines, ground.device, ground.simulated) == ({"reference": "vllm"}, "ascend", False)
    assert ground.versions == {"reference": {"vllm": "0.1", "python": "3.11"}}
    assert ground.values["reference"] == ("layers.0.*",)
    result = result_of(Report(), ground, Command())
    assert [one.file for one in result.measures] == ["fix.py", "x"]
    assert result.weights["reference"].equal == 1
