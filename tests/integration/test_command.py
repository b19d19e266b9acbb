"""The command as a user runs it: exit codes, repeatability, numerics, layouts, and every way to be interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.integration.support import (
    align_command,
    align_environment,
    processes_below,
    run_align,
    wait_until_gone,
)

#: Stated in the README: nothing of a run is left this many seconds after its command was killed.
GONE_SECONDS = 10.0


def test_a_run_is_aligned_and_its_case_repeats_it(tmp_path: Path) -> None:
    first = run_align("run", "--model", "qwen3", "--out", str(tmp_path / "first"))
    assert first.returncode == 0, first.stdout + first.stderr
    assert "aligned" in first.stdout
    assert "simulated" in first.stdout
    assert "\x1b[" not in first.stdout, "colour codes although the output is piped"
    again = run_align("run", "--case", str(tmp_path / "first" / "case.json"), "--out", str(tmp_path / "again"))
    assert again.returncode == 0, again.stdout + again.stderr
    runs = [json.loads((tmp_path / name / "tokens.json").read_text()) for name in ("first", "again")]
    assert runs[0] == runs[1]
    assert (tmp_path / "first" / "case.json").read_text() == (tmp_path / "again" / "case.json").read_text()


def test_the_other_soc_generation_runs(tmp_path: Path) -> None:
    """A2 is the default of every other test."""
    out = tmp_path / "out"
    done = run_align("run", "--no-tensors", "--max-new-tokens", "4", "--out", str(out), ALIGN_SIMNPU_SOC="A3")
    assert done.returncode == 0, done.stdout + done.stderr
    for side in json.loads((out / "run.json").read_text())["sides"].values():
        observed = {entry["name"]: entry["value"] for entry in side["observed"]}
        assert 250 <= observed["soc_version"] <= 255


def test_late_arrivals_and_text_prompts(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"text": "The capital of France is", "name": "capital"}\n'
        '{"messages": [{"role": "user", "content": "Name a colour."}], "name": "chat"}\n'
        '{"token_ids": [40, 41, 42], "name": "late", "arrival": 3}\n'
    )
    out = tmp_path / "out"
    done = run_align("run", "--model", "smollm2", "--prompts", str(prompts), "--max-new-tokens", "6", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "<|im_start|>" in done.stdout, "the chat template is not shown"
    steps = json.loads((out / "tokens.json").read_text())["free"]
    for role in ("candidate", "reference"):
        first_seen: dict[str, int] = {}
        for step in steps[role]["steps"]:
            for row in step["rows"]:
                first_seen.setdefault(row["request"], step["step"])
        assert first_seen["capital"] == first_seen["chat"] == 0
        assert first_seen["late"] == 3


def _start(out: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        align_command("run", "--model", "qwen3", "--max-new-tokens", "400", "--out", str(out), *arguments),
        env=align_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _wait_for_steps(out: Path, role: str, seconds: float = 200.0) -> None:
    log = out / role / "steps-rank0.jsonl"
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if log.exists() and log.read_text().count('"event": "step"') >= 5:
            return
        time.sleep(0.1)
    raise AssertionError(f"{role} made no steps within {seconds} s")


def _actor(pid: int) -> dict[str, int]:
    """Engine processes below the driver, by engine's side: the side is in the environment the actor was given."""
    found = {}
    for child in processes_below(pid):
        environ = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        for entry in environ:
            if entry.startswith(b"ALIGN_PROBE_DIR="):
                found[Path(entry.partition(b"=")[2].decode()).name] = child
    return found


@pytest.mark.parametrize("role", ["candidate", pytest.param("reference", marks=pytest.mark.extended)])
def test_a_killed_engine_ends_the_command(role: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = _start(out)
    try:
        _wait_for_steps(out, role)
        below = processes_below(process.pid)
        os.kill(_actor(process.pid)[role], signal.SIGKILL)
        killed = time.monotonic()
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 2, stdout + stderr
    assert time.monotonic() - killed < 40
    assert role in stderr
    assert "Traceback" not in stderr
    assert "next:" in stderr
    assert wait_until_gone(below, 1.0) == {}


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.extended),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_an_interrupted_command_leaves_nothing(number: signal.Signals, code: int, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = _start(out)
    try:
        _wait_for_steps(out, "candidate")
        below = processes_below(process.pid)
        assert len(below) > 3
        os.kill(process.pid, number)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code, stderr
    assert "Traceback" not in stderr
    assert wait_until_gone(below, GONE_SECONDS) == {}


def test_a_step_that_hangs_is_bounded(tmp_path: Path) -> None:
    """An engine stopped in the middle of a run is a hang: the watchdog ends it."""
    out = tmp_path / "out"
    process = _start(out, "--step-timeout", "8")
    try:
        _wait_for_steps(out, "candidate")
        below = processes_below(process.pid)
        os.kill(_actor(process.pid)["candidate"], signal.SIGSTOP)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 2, stdout + stderr
    assert "made no step for 8 s" in stderr
    assert wait_until_gone(below, 1.0) == {}


def test_ascend_without_a_device_says_how_to_name_one() -> None:
    done = run_align("run", "--device", "ascend")
    assert done.returncode == 2
    assert "LMDEPLOY_PYTHON" in done.stderr
    assert "Traceback" not in done.stderr
