"""Runs check scripts in processes of their own: importing torch there installs the npu device for the whole process.

A script defines functions named ``check_…`` without arguments, and may define ``more()``, which returns further checks
by name. A check passes when it returns. One process runs all checks of a script, so that torch is imported once.
"""

from __future__ import annotations

import ast
import json
import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[4]
SIMNPU = REPOSITORY / "envs" / "simnpu" / "path"
_MARK = "REPORT "


def names(script: Path) -> list[str]:
    """The checks that a script defines by name, without running it."""
    body = ast.parse(script.read_text(encoding="utf-8")).body
    return [node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")]


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """Of a process that has the simulated device."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ALIGN_")}
    path = os.pathsep.join([str(REPOSITORY), str(SIMNPU)])
    return {**inherited, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(extra or {})}


def python(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run this interpreter with the simulated device."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment(env), capture_output=True, text=True, timeout=180, check=False)


def run(script: Path, env: dict[str, str] | None = None) -> dict[str, str]:
    """Run all checks of a script; answers the empty string or a traceback for each."""
    return run_together(script, [env or {}])[0]


def run_together(script: Path, envs: list[dict[str, str]]) -> list[dict[str, str]]:
    """The same script in several processes at once, which may talk to each other."""
    command = [sys.executable, str(Path(__file__)), str(script)]
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(command, env=environment(env), stdout=pipe, stderr=subprocess.STDOUT, text=True) for env in envs
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
    """Run the checks of the script that is named on the command line."""
    found = runpy.run_path(sys.argv[1])
    checks = {name: check for name, check in found.items() if name.startswith("check_")}
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
