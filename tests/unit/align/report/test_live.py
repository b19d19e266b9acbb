"""Progress of both sides, on a terminal and piped."""

from __future__ import annotations

import io
import threading
from typing import Any

import pytest
from rich.console import Console

from align.report import live
from align.report.live import LiveProgress

ENGINES = {"candidate": "lmdeploy", "reference": "vllm"}


def console(terminal: bool = False) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=100, color_system="standard" if terminal else None), out


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in a list of one."""
    now = [1000.0]
    monkeypatch.setattr(live, "time", type("Clock", (), {"monotonic": staticmethod(lambda: now[0])}))
    return now


def test_piped_output_is_a_line_per_stage(clock: list[float]) -> None:
    screen, out = console()
    with LiveProgress(screen, ENGINES) as progress:
        for stage, detail in (("import", "lmdeploy"), ("generate", "step 1"), ("generate", "step 2"), ("ready", "")):
            progress.update("candidate", stage, detail)
            clock[0] += 1
    assert out.getvalue().splitlines() == [
        "[   0.0s] candidate lmdeploy import: lmdeploy",
        "[   1.0s] candidate lmdeploy generate: step 1",
        "[   3.0s] candidate lmdeploy ready",
    ]


def test_a_long_stage_shows_signs_of_life(clock: list[float]) -> None:
    screen, out = console()
    with LiveProgress(screen, ENGINES) as progress:
        progress.update("reference", "build", "layer 0")
        for number in range(1, 40):
            clock[0] += 1
            progress.update("reference", "build", f"layer {number}")
    assert [line.split()[-1] for line in out.getvalue().splitlines()] == ["0", "16", "32"]


def test_quiet_says_nothing(clock: list[float]) -> None:
    for terminal in (False, True):
        screen, out = console(terminal)
        with LiveProgress(screen, ENGINES, quiet=True) as progress:
            progress.update("candidate", "build", "")
        assert out.getvalue() == ""


def test_a_terminal_is_redrawn_and_left_clean() -> None:
    screen, out = console(terminal=True)
    with LiveProgress(screen, ENGINES) as progress:
        progress.update("candidate", "build", "model")
        progress.update("reference", "import", "vllm")
        progress._live.refresh()
        drawn = out.getvalue()
        assert "candidate lmdeploy build: model" in drawn
        assert "reference vllm     import: vllm" in drawn
    assert "\x1b[2K" in out.getvalue(), "the lines are erased at the end"


@pytest.mark.parametrize("terminal", [False, True])
def test_brackets_in_details_are_no_markup(terminal: bool, clock: list[float]) -> None:
    screen, out = console(terminal)
    with LiveProgress(screen, ENGINES) as progress:
        progress.update("candidate", "build", "[red]checkpoint[/red] [/nothing]")
        if terminal:
            progress._live.refresh()
    assert "[red]checkpoint[/red] [/nothing]" in out.getvalue()


def test_updates_come_from_several_threads() -> None:
    screen, out = console()
    with LiveProgress(screen, ENGINES) as progress:

        def work(role: str) -> None:
            for number in range(100):
                progress.update(role, f"stage {number}", "")

        threads: list[Any] = [threading.Thread(target=work, args=(role,)) for role in ENGINES]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = out.getvalue().splitlines()
    assert len(lines) == 200
    assert all(line.startswith("[") and "stage" in line for line in lines)


def drawn(progress: LiveProgress) -> list[str]:
    return [str(line) for line in progress._render().renderables[1:]]


def test_a_terminal_shows_steps_and_the_time_left(clock: list[float]) -> None:
    progress = LiveProgress(console(terminal=True)[0], ENGINES, steps=17)
    progress.update("candidate", "build", "qwen3 in bfloat16, tp 1")
    progress.update("reference", "generate", "step 0")
    clock[0] += 5
    progress.update("reference", "generate", "step 1")
    clock[0] += 2
    progress.update("reference", "generate", "step 5")
    assert drawn(progress) == [
        "  candidate lmdeploy build: qwen3 in bfloat16, tp 1  (7 s)",
        "  reference vllm     generate: step 5/17, about 6 s left  (7 s)",
    ]
    progress.update("reference", "compare", "1/84 embed")
    clock[0] += 10
    progress.update("reference", "compare", "2/84 layers.0.attn.q")
    assert drawn(progress)[1] == "  reference vllm     compare: 2/84 layers.0.attn.q, about 14 min left  (10 s)"


def test_what_a_stage_took_is_expected_of_the_next(clock: list[float]) -> None:
    progress = LiveProgress(console(terminal=True)[0], ENGINES, steps=16)
    for detail in ("step 1", "step 16", "step 17", "4 requests"):
        progress.update("candidate", "generate", detail)
    assert drawn(progress)[0] == "  candidate lmdeploy generate: 4 requests  (0 s)"
    progress.update("candidate", "generate again", "step 3")
    assert drawn(progress)[0] == "  candidate lmdeploy generate again: step 3/17  (0 s)"
    progress.update("candidate", "launch", "step 3")
    assert drawn(progress)[0] == "  candidate lmdeploy launch: step 3  (0 s)", "not a stage of engine steps"
    progress.update("reference", "record", "step 3")
    assert drawn(progress)[1] == "  reference vllm     record: step 3/16  (0 s)", "each side has its own"


def test_piped_lines_are_the_same_with_steps(clock: list[float]) -> None:
    screen, out = console()
    with LiveProgress(screen, ENGINES, steps=17) as progress:
        progress.update("candidate", "generate", "step 4")
    assert out.getvalue() == "[   0.0s] candidate lmdeploy generate: step 4\n"
