"""What is computed on the host is named with its call site, and an accused call is shown with its arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from envs.profiles import resolve
from tests.integration.faults import patch
from tests.integration.support import run_align

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run: cos and sin on the candidate's host, the activation on the reference's, and one norm 1 % too large."""
    directory = tmp_path_factory.mktemp("host")
    patches = [
        f"candidate={patch('host_rope', directory)}",
        f"candidate={patch('norm', directory)}",
        f"reference={patch('host_activation', directory)}",
    ]
    given = [word for one in patches for word in ("--patch", one)]
    done = run_align("run", "--model", "qwen3", "--quiet", "--out", str(directory / "run"), *given, timeout=600)
    assert done.returncode == 1, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((directory / "run" / "result.json").read_text())
    found["report"] = (directory / "run" / "report.md").read_text()
    return found


def findings(result: dict[str, Any], kind: str, side: str) -> list[dict[str, Any]]:
    return [one for one in result["findings"] if (one["kind"], one["side"]) == (kind, side)]


def test_cos_and_sin_on_the_host_are_named(result: dict[str, Any]) -> None:
    (found,) = findings(result, "host fallback", "candidate")
    assert (found["path"], found["checkpoint"], found["layer"]) == ("B", "layers.0.attn.q_rope", 0)
    evidence = found["evidence"]
    assert evidence["arguments"] == ["cos", "sin"]
    assert evidence["made"] == ["aten::cos", "aten::sin"]
    (site,) = evidence["moved_at"]
    assert "host_rope.py:" in site
    assert site.endswith(" forward")
    number = int(site.split("host_rope.py:")[1].split()[0])
    source = Path(site.partition(":")[0]).read_text().splitlines()[number - 1]
    assert ".to(x.device)" in source
    assert evidence["stack"][1].startswith("lmdeploy/pytorch/models/qwen3.py:")
    assert evidence["seen_in"] == ["decode", "prefill"]
    # The simulated device computes as the host does: it is a finding by its place, and the numbers say so.
    assert evidence["affected"] is False
    assert evidence["difference"]["verdict"] == "equal"
    assert evidence["residuals"]["candidate"]["verdict"] == "within"


def test_an_activation_on_the_references_host_is_named(result: dict[str, Any]) -> None:
    (found,) = findings(result, "host fallback", "reference")
    assert found["checkpoint"] == "layers.0.mlp.act"
    assert "host_activation.py:" in found["evidence"]["moved_at"][0]
    assert found["evidence"]["made"] == ["aten::mul"]


def test_the_accused_call_has_its_arguments_and_what_to_read(result: dict[str, Any]) -> None:
    (found,) = findings(result, "operator", "candidate")
    assert found["checkpoint"] == "layers.2.mlp_norm"
    calls = found["evidence"]["calls"]
    names = {side: [one["name"] for one in call["arguments"]] for side, call in calls.items()}
    assert names == {"candidate": ["x", "weight", "residual"], "reference": ["x", "residual"]}
    forms = {one["name"]: one["form"] for one in calls["candidate"]["arguments"]}
    assert forms == {"x": "T×256", "weight": "256", "residual": "T×256"}
    assert [one["name"] for one in calls["candidate"]["operators"]] == ["npu::npu_add_rms_norm"]
    assert found["evidence"]["call_differences"] == []
    read = found["evidence"]["read"]["candidate"]
    assert [one["what"] for one in read if one.get("operator")] == ["Impl class", "kernel wrapper", "vendor operator"]
    packages = next(Path(resolve("simnpu", "lmdeploy").python).parents[1].glob("lib/python*/site-packages"))
    for one in read:
        if one.get("operator"):
            file, _, rest = one["place"].partition(":")
            line = (packages / file).read_text().splitlines()[int(rest.split()[0]) - 1]
            assert "rms_norm" in line, one


def test_the_report_says_both(result: dict[str, Any]) -> None:
    text = result["report"].replace("\\", "")  # names are escaped as Markdown
    assert "host_rope.py:" in text
    assert "| candidate | 0 | x | bfloat16 | 1×T×256 |" in text
    assert "dlinfer/vendor/ascend/torch_npu_ops.py:" in text
    symptom = result["symptom"]
    rows = {one["row"]: one["state"] for one in symptom["rows"]}
    assert rows["003-S4-2"] == "shown"
    assert symptom["found"] == ["B"]
