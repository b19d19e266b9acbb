"""``--quiet``: the verdict, and a line that says where the rest is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.unit.align.cli import test_run
from tests.unit.align.cli.test_run import IDS, TOKENS, FakeSession, steps

align, checkpoint = test_run.align, test_run.checkpoint


def test_quiet_says_where_the_rest_is(align: Callable[..., Any], checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, text, err = align(*TOKENS, "--model", str(checkpoint), "--quiet", "--out", str(out))
    assert (code, err) == (0, "")
    verdict, place = text.splitlines()
    assert verdict == "aligned (simulated): lmdeploy and vllm generate the same 12 greedy tokens for 4 requests"
    assert place.startswith(f"run directory: {out} · next: score the model with ")
    FakeSession.free = {"candidate": steps(4, 50, 6), "reference": steps(*IDS)}
    FakeSession.forced = {"candidate": steps(4, 50, 6, chosen=IDS), "reference": steps(*IDS)}
    code, text, _ = align(*TOKENS, "--model", str(checkpoint), "--quiet", "--out", str(tmp_path / "wrong"))
    assert (code, len(text.splitlines())) == (1, 2)
    assert f"\nrun directory: {tmp_path / 'wrong'} · next: repeat it with CASE=" in text
