"""Launching pairs and commands for the integration tests."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from adapters.base import SIDES, RunResult
from align.case.build import NewCase, new_case
from align.case.prompts import EncodedPrompt
from align.case.schema import Case, CaseLayout, CaseRequest
from align.models.info import ModelInfo
from align.models.resolve import resolve_model
from align.run.session import Session
from align.run.side import Limits
from envs.home import REPOSITORY
from envs.profiles import Interpreter, resolve

ENGINES = dict(zip(SIDES, ("lmdeploy", "vllm"), strict=True))


class Silent:
    def update(self, role: str, stage: str, detail: str) -> None:
        """Tests watch nothing."""


def interpreters(env: dict[str, dict[str, str]] | None = None) -> dict[str, Interpreter]:
    """Both sides on the simulated NPU; ``env`` adds environment variables by role."""
    found = {}
    for role, engine in ENGINES.items():
        interpreter = resolve("simnpu", engine)
        extra = {**interpreter.env, **(env or {}).get(role, {})}
        found[role] = Interpreter(
            engine=interpreter.engine,
            device=interpreter.device,
            python=interpreter.python,
            pythonpath=interpreter.pythonpath,
            env=extra,
            simulated=True,
        )
    return found


@contextmanager
def launched(
    case: Case, info: ModelInfo, directory: Path, env: dict[str, dict[str, str]] | None = None
) -> Iterator[Session]:
    """A running pair."""
    with Session(case, info, interpreters(env), directory, Limits(), Silent()) as session:
        session.launch()
        yield session


def default_case(model: str, dtype: str = "bfloat16", tp: int = 1, max_new_tokens: int = 16) -> tuple[ModelInfo, Case]:
    """The preset's four default prompts."""
    info = resolve_model(model)
    made: NewCase = new_case(info, dtype=dtype)
    case = made.case.model_copy(
        update={
            "layout": CaseLayout(tp=tp),
            "decoding": made.case.decoding.model_copy(update={"max_new_tokens": max_new_tokens}),
        }
    )
    case.check(info)
    return info, case


def with_requests(case: Case, prompts: list[EncodedPrompt] | list[CaseRequest]) -> Case:
    requests = tuple(
        prompt
        if isinstance(prompt, CaseRequest)
        else CaseRequest(name=prompt.name, token_ids=prompt.token_ids, text=prompt.rendered)
        for prompt in prompts
    )
    return case.model_copy(update={"requests": requests})


def tokens(result: RunResult | None) -> dict[str, tuple[int, ...]]:
    assert result is not None
    return {generation.request: generation.token_ids for generation in result.generations}


def align_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "align", *arguments]


def align_environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), **extra}


def run_align(*arguments: str, timeout: float = 280.0, **extra: str) -> subprocess.CompletedProcess[str]:
    """The command as a user runs it."""
    return subprocess.run(
        align_command(*arguments),
        env=align_environment(**extra),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def processes_below(pid: int) -> list[int]:
    """Live processes that descend from ``pid``."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def alive(pids: list[int]) -> dict[int, str]:
    """Those that still run, with their state and command line; zombies hold nothing and do not count."""
    found = {}
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                found[pid] = f"{process.status()} {' '.join(process.cmdline())[:200]}"
    return found


def wait_until_gone(pids: list[int], seconds: float) -> dict[int, str]:
    """Waits up to ``seconds``; returns what is left."""
    deadline = time.monotonic() + seconds
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    return alive(pids)
