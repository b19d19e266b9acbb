"""Faults of the released engines with experts or groups on several ranks, as the smallest run that shows them.

Where a change mends one, it is a patch file in ``mends`` and a paired run shows it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.support import run_align

pytestmark = [pytest.mark.timeout(900), pytest.mark.extended]
GIVEN = ("--max-new-tokens", "5", "--no-ladder", "--no-confirm")
MENDS = Path(__file__).parent / "mends"
A2 = ("--set", "candidate.env.ALIGN_SIMNPU_SOC=A2", "--set", "reference.env.ALIGN_SIMNPU_SOC=A2")


def run(directory: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    out = directory / "run"
    done = run_align("run", "--quiet", "--out", str(out), *GIVEN, *arguments, timeout=580)
    result = json.loads((out / "result.json").read_text()) if (out / "result.json").is_file() else {}
    return done.returncode, result, done.stdout + done.stderr


def refused(output: str, *reasons: str) -> None:
    """One message that says why and what to do next, and no traceback of this tool."""
    said = output[output.rindex("error: ") :]
    assert "\nnext: " in said and "Traceback" not in said, output
    for reason in reasons:
        assert reason in said, output


def test_lmdeploy_adds_the_routed_result_once_for_each_rank(tmp_path: Path) -> None:
    """qwen2_moe with tp 2, ep 2: behind the exchange each rank holds all of it, and the block sums it up once more."""
    code, result, output = run(tmp_path, "--model", "qwen2-moe", "--tp", "2", "--ep", "2")
    assert code == 1, output
    first = result["findings"][0]
    assert (first["path"], first["kind"], first["side"]) == ("C", "doubled_reduce", "candidate"), first["summary"]
    assert (first["checkpoint"], first["ranks"]) == ("layers.0.moe.out", [0, 1])
    found = first["evidence"]
    assert (found["part"], found["ratio"]) == ("routed", pytest.approx(2, rel=0.02))
    assert found["shared"] == pytest.approx(1, rel=0.02)
    # transformers computes what the other engine does.
    done = run_align("golden", str(tmp_path / "run"), timeout=280)
    assert "first departure from golden: layers.0.moe.out: candidate further" in done.stdout, done.stdout + done.stderr
    # The mend is all that differs between the two runs.
    mended = tmp_path / "mended"
    given = ("--quiet", "--out", str(mended), "--patch", f"candidate={MENDS / 'routed_once.py'}")
    done = run_align("replay", str(tmp_path / "run"), *given, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    paired = json.loads((mended / "result.json").read_text())["paired"]
    assert (paired["outcome"], paired["conclusive"]) == ("mended", True), paired


def test_experts_over_few_ranks_of_an_a2_end_with_the_reason(tmp_path: Path) -> None:
    """Below 16 ranks dlinfer exchanges no tokens on an A2: global ids are looked for among a rank's own experts."""
    code, _, output = run(tmp_path, "--model", "qwen3-moe", "--tp", "2", "--ep", "2", *A2)
    assert code == 2, output
    refused(output, "the candidate (lmdeploy)", "ep needs an A3 below 16 ranks")


def test_a_dense_mlp_over_all_groups_ends_with_the_reason(tmp_path: Path) -> None:
    """lmdeploy's own default for groups, which this tool leaves out: dlinfer's linear layer scatters nothing."""
    given = ("--model", "qwen3", "--dp", "2", "--set", "candidate.mlp_tp_size=2", "--no-tensors")
    (tmp_path / "plain").mkdir()
    code, _, output = run(tmp_path / "plain", *given)
    assert code == 2, output
    refused(output, "the candidate (lmdeploy)", "mlp_tp_size")
    code, result, output = run(tmp_path, *given, "--patch", f"candidate={MENDS / 'scattered.py'}")
    assert (code, result["verdict"]) == (0, "aligned"), output


def test_a_group_that_prefills_beside_one_that_decodes_aligns(tmp_path: Path) -> None:
    """lmdeploy 0.12.2 makes it a prefill of all ranks, so that they agree on how tokens reach the experts."""
    prompts = tmp_path / "late.jsonl"
    given = [
        {"name": "first", "token_ids": [752, 26, 598, 428, 509, 149, 128], "dp_rank": 0},
        {"name": "second", "token_ids": [211, 864, 178, 219], "dp_rank": 0},
        {"name": "late", "token_ids": [127, 712, 39, 559, 798, 133, 324], "dp_rank": 1, "arrival": 2},
    ]
    prompts.write_text("".join(json.dumps(one) + "\n" for one in given))
    code, result, output = run(
        tmp_path, "--model", "qwen3-moe", "--dp", "2", "--ep", "2", "--prompts", str(prompts), "--max-new-tokens", "6"
    )
    assert (code, result["verdict"], result["findings"]) == (0, "aligned", []), output
