"""Runs check scripts in processes of their own: importing torch there installs the npu device for the whole process.

A script defines functions named ``check_…`` without arguments, and may define ``more()``, which returns further checks
by name. A check passes when it returns. One process runs all checks of a script, so that torch is imported once.
"""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[4]
SIMNPU = REPOSITORY / "envs" / "simnpu" / "path"
_MARK = "REPORT "


def names(*scripts: Path) -> list[str]:
    """The checks that scripts define by name, without running them."""
    body = [node for script in scripts for node in ast.parse(script.read_text(encoding="utf-8")).body]
    return [node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")]


def refused(kind: type[Exception], words: str) -> Any:
    """``pytest.raises`` for a message that holds these words."""
    return pytest.raises(kind, match=re.escape(words))


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """Of a process that has the simulated device."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ALIGN_")}
    path = os.pathsep.join([str(REPOSITORY), str(SIMNPU)])
    return {**inherited, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(extra or {})}


def python(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run this interpreter with the simulated device."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment(env), capture_output=True, text=True, timeout=180, check=False)


def run(*scripts: Path, env: dict[str, str] | None = None) -> dict[str, str]:
    """Run all checks of scripts in one process; answers the empty string or a traceback for each."""
    return run_together(*scripts, envs=[env or {}])[0]


def run_together(*scripts: Path, envs: list[dict[str, str]]) -> list[dict[str, str]]:
    """The same scripts in several processes at once, which may talk to each other."""
    command = [sys.executable, str(Path(__file__)), *map(str, scripts)]
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(command, env=environment(env), stdout=pipe, stderr=subprocess.STDOUT, text=True)
        for env in envs
    ]
    reports = []
    try:
        for process in processes:
            output, _ = process.communicate(timeout=180)
            lines = [line for line in output.splitlines() if line.startswith(_MARK)]
            assert lines, f"exit code {process.returncode}\n{output}"
            reports.append(json.loads(lines[-1].removeprefix(_MARK)))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return reports


def main() -> None:
    """Run the checks of the scripts that are named on the command line."""
    checks: dict[str, Callable[[], None]] = {}
    for script in sys.argv[1:]:
        found = runpy.run_path(script)
        checks |= {name: check for name, check in found.items() if name.startswith("check_")}
        if "more" in found:
            checks |= found["more"]()
    report = {}
    for name, check in checks.items():
        try:
            check()
            report[name] = ""
        except BaseException:
            report[name] = traceback.format_exc()
    print(_MARK + json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
