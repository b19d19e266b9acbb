"""The smallest case that still shows a finding, on both real engines: found, written, shown again by its command."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from align.drill.library import FOLDER
from tests.integration.support import align_command, align_environment, run_align

pytestmark = [pytest.mark.extended, pytest.mark.timeout(2400)]
#: Requests, and the tokens that each generates.
REQUESTS, TOKENS = 8, 64


def test_a_batch_of_eight_becomes_two_requests_and_three_steps(tmp_path: Path) -> None:
    """A decode of the second row writes one place too far, from the first decode on: path A at the same checkpoint."""
    prompts = tmp_path / "prompts.jsonl"
    lengths = [5 + 9 * number for number in range(REQUESTS)]
    ids = [[(7 * number + 11 * at) % 800 + 3 for at in range(length)] for number, length in enumerate(lengths)]
    prompts.write_text("".join(json.dumps({"token_ids": one}) + "\n" for one in ids))
    whole, small = tmp_path / "whole", tmp_path / "small"
    given = ("--prompts", str(prompts), "--max-new-tokens", str(TOKENS), "--no-confirm", "--no-ladder")
    patch = f"candidate={FOLDER / 'slot_too_far.py'}"
    done = run_align("run", "--quiet", "--model", "qwen3", *given, "--patch", patch, "--out", str(whole), timeout=580)
    assert done.returncode == 1, done.stdout + done.stderr
    first = json.loads((whole / "result.json").read_text())["findings"][0]
    assert (first["path"], first["side"], first["evidence"]["fault"]) == ("A", "candidate", "wrong_slot")

    done = run_align("reduce", str(whole), "--out", str(small), "--quiet", timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    case = json.loads((small / "case.json").read_text())
    steps = [one.get("max_new_tokens") or case["decoding"]["max_new_tokens"] for one in case["requests"]]
    assert len(case["requests"]) <= 2 and max(steps) <= 3, case["requests"]

    command = tmp_path / "align"
    command.write_text(f'#!/bin/sh\nexec {shlex.join(align_command())} "$@"\n')
    command.chmod(0o755)
    again = subprocess.run(
        ["sh", str(small / "reproduce.sh"), "--quiet", "--out", str(tmp_path / "again")],
        env=align_environment(ALIGN=str(command)), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert again.returncode == 1, again.stdout + again.stderr
    shown = json.loads((tmp_path / "again" / "result.json").read_text())["findings"][0]
    for name in ("path", "kind", "side", "checkpoint"):
        assert shown[name] == first[name], name
