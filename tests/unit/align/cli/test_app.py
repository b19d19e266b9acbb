"""From errors to messages and exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from align.cli import main
from align.cli import run as run_module
from align.cli.errors import EXIT_INTERRUPTED, note_next
from align.errors import SideError, UserError
from envs.errors import EnvError
from envs.home import REPOSITORY


@pytest.fixture
def align(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Any]]:
    """Runs the command with ``execute`` replaced; answers ``(exit code, output, errors)``."""
    before = signal.getsignal(signal.SIGTERM)

    def call(work: Any, *arguments: str) -> tuple[int, str, str]:
        def execute(settings: Any) -> int:
            if isinstance(work, BaseException):
                raise work
            return int(work(settings) if callable(work) else work)

        monkeypatch.setattr(run_module, "execute", execute)
        monkeypatch.setattr(sys, "argv", ["align", "run", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    yield call
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("code", [0, 1])
def test_the_verdict_is_the_exit_code(align: Callable[..., Any], code: int) -> None:
    assert align(code) == (code, "", "")


@pytest.mark.parametrize(
    "error", [UserError("no such thing", "name another"), EnvError("no such thing", "name another")]
)
def test_user_errors(align: Callable[..., Any], error: UserError) -> None:
    assert align(error) == (2, "", "error: no such thing\nnext: name another\n")


def test_debug_shows_the_traceback_and_the_message(align: Callable[..., Any]) -> None:
    code, _, err = align(UserError("no such thing", "name another"), "--debug")
    assert code == 2
    assert err.startswith("Traceback (most recent call last):")
    assert err.endswith("error: no such thing\nnext: name another\n")


def test_a_defect_is_no_verdict(align: Callable[..., Any]) -> None:
    code, _, err = align(ZeroDivisionError("division [by] zero"))
    assert code == 2, "1 would say that the engines diverge"
    assert "Traceback" not in err
    assert "this is a defect of align: ZeroDivisionError: division [by] zero" in err
    assert err.splitlines()[-1].startswith("next: run it again with --debug")


def test_debug_shows_where_a_defect_is(align: Callable[..., Any]) -> None:
    code, _, err = align(ZeroDivisionError("division by zero"), "--debug")
    assert code == 2
    assert "Traceback" in err
    assert "raise work" in err
    assert err.splitlines()[-1] == "next: report it with the traceback above"


def test_the_log_of_a_failed_side_comes_first(align: Callable[..., Any]) -> None:
    tail = ("[red]loading[/red] :smile:", "ValueError: no [/] such file")
    code, _, err = align(SideError("candidate", "the candidate died", "read its log", tail))
    assert code == 2
    assert err.splitlines() == [
        "last lines of the candidate's log:",
        "  [red]loading[/red] :smile:",
        "  ValueError: no [/] such file",
        "error: the candidate died",
        "next: read its log",
    ]


def test_long_messages_are_not_broken(align: Callable[..., Any]) -> None:
    path = "/" + "long/" * 60
    assert f"error: {path}\n" in align(UserError(path, "x"))[2]


def test_an_interrupt(align: Callable[..., Any]) -> None:
    said = "interrupted; everything that was started has been ended\nnext: run the same command again\n"
    assert align(KeyboardInterrupt()) == (130, "", said)
    there = KeyboardInterrupt()
    note_next(there, "align resume RUN")
    assert align(there)[2].splitlines()[1:] == ["next: align resume RUN"]


def test_sigterm_goes_through_the_clean_up(align: Callable[..., Any]) -> None:
    cleaned = []

    def work(settings: Any) -> int:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            cleaned.append(True)
        return 0

    code, _, err = align(work)
    assert (code, cleaned) == (143, [True])
    assert err == "terminated; everything that was started has been ended\nnext: run the same command again\n"


def test_options_arrive_as_they_were_given(align: Callable[..., Any]) -> None:
    seen: list[Any] = []

    def keep(settings: Any) -> int:
        seen.append(settings)
        return 0

    align(keep)
    align(
        keep, "--model", "m", "--tp", "2", "--numerics", "candidate=native",
        "--numerics", "reference=native", "--dtype", "fp16", "--out", "x", "-q", "-v", "--max-new-tokens", "3",
    )  # fmt: skip
    default, given = seen
    assert (default.model, default.case_file, default.layout, default.numerics) == (None, None, (None, None, None), ())
    assert (default.device, default.replay, default.quiet, default.verbose) == ("simnpu", "auto", False, False)
    assert (given.model, given.layout, given.numerics) == (
        "m", (2, None, None), ("candidate=native", "reference=native"),
    )  # fmt: skip
    assert (given.dtype, str(given.out), given.max_new_tokens) == ("fp16", "x", 3)
    assert given.quiet
    assert given.verbose


def test_help_is_no_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["align", "run", "--help"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert not caught.value.code
    assert "Usage" in capsys.readouterr().out
    assert EXIT_INTERRUPTED == 128 + signal.SIGINT


@pytest.mark.parametrize("given", [("explain",), ("explain", "--json"), ("explain", "slots"), ("schema",)])
def test_a_reader_that_leaves_is_no_verdict_and_no_defect(given: tuple[str, ...]) -> None:
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-P", "-m", "align", *given]
    ours, theirs = os.pipe()
    os.close(ours)  # before anything is written
    with os.fdopen(theirs, "w") as closed:
        done = subprocess.run(command, env=env, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    "given", [("explain", "nobody knows"), ("compare", "/nowhere", "/nowhere"), ("run", "--tp", "x")]
)
def test_an_error_that_nobody_reads_is_still_one(given: tuple[str, ...]) -> None:
    """As in ``align compare A B 2>&1 | head -0``: 1 would say that the engines diverge."""
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "align", *given], env=env, stdout=closed, stderr=closed, timeout=60
        )
    assert done.returncode in (2, 141)


def test_rich_says_otherwise_that_nobody_reads(align: Callable[..., Any]) -> None:
    assert align(SystemExit(1))[0] == 141, "1 would say that the engines diverge"


def test_another_broken_pipe_is_a_defect(align: Callable[..., Any]) -> None:
    code, _, err = align(BrokenPipeError("to the engine"))
    assert code == 2
    assert "this is a defect of align: BrokenPipeError: to the engine" in err
