"""The interpreters of an image with an NPU; only with ``--device ascend``."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from align.doctor import python
from align.doctor.types import Check, Machine, Needs
from envs import profiles
from envs.errors import EnvError

_SECONDS = 60.0
_CANN = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"

# Runs in the foreign interpreter; in old syntax.
_RAY = """
import json, sys
from importlib.metadata import version
print("\\nALIGN" + json.dumps([list(sys.version_info[:2]), version("ray")]))
"""


def examine(machine: Machine, needs: Needs) -> Iterator[Check]:
    """Device nodes, then each engine's interpreter: what :mod:`envs.profiles` asks of it, and its Ray."""
    if machine.device != "ascend":
        return
    yield device_nodes(Path("/dev"))
    for engine in profiles.ENGINES:
        found = interpreter(engine)
        yield found
        if found.state == "ok":
            yield same_ray(engine, Path(os.path.expanduser(os.environ[profiles.PYTHON_VARIABLES[engine]])))


def device_nodes(dev: Path) -> Check:
    """Args: directory of device nodes."""
    found = sorted(path.name for path in dev.glob("davinci[0-9]*"))
    if found:
        return Check("NPU", "ok", f"{len(found)} in {dev}: {', '.join(found)}")
    mend = f"docker run --device={dev}/davinci0 --device={dev}/davinci_manager --device={dev}/hisi_hdc …"
    return Check("NPU", "missing", f"no {dev}/davinci*", mend)


def interpreter(engine: str) -> Check:
    """Whether an engine's interpreter is named, starts, imports the engine and sees a device (up to two minutes)."""
    name, variable = f"{engine} interpreter", profiles.PYTHON_VARIABLES[engine]
    try:
        found = profiles.resolve("ascend", engine)
    except EnvError as error:
        reason = error.message.partition(": ")[2] or error.message
        return Check(name, "missing", reason, _mend(variable, reason))
    versions = ", ".join(f"{package} {number}" for package, number in found.versions.items())
    return Check(name, "ok", f"{found.python}: {versions}")


def _mend(variable: str, reason: str) -> str:
    if "cannot import" in reason:
        return f"{_CANN}  # then: align doctor --device ascend"
    if "sees no device" in reason:
        return "npu-smi info  # shows whether the driver sees it"
    return f"export {variable}=/path/to/python"


def same_ray(engine: str, executable: Path) -> Check:
    """Ray connects interpreters of one minor version of Python and one version of Ray only."""
    name = f"Ray of {engine}"
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [executable, "-c", _RAY], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS,
        cwd="/",
    )  # fmt: skip
    wanted = f"{version('ray')} in Python {python.VERSION[0]}.{python.VERSION[1]}"
    command = shlex.join([str(executable), "-m", "pip", "install", f"ray=={version('ray')}"])
    alone = "align capture works without"
    answers = [line for line in done.stdout.splitlines() if line.startswith("ALIGN[")]
    if not answers:
        return Check(name, "missing", f"not installed, a joint run needs {wanted}; {alone}", command)
    numbers, ray = json.loads(answers[-1].removeprefix("ALIGN"))
    if tuple(numbers) != python.VERSION:
        found = f"Python {numbers[0]}.{numbers[1]}, a joint run needs {wanted}; {alone}"
        return Check(name, "missing", found, f"align capture {engine} --device ascend --help")
    if ray != version("ray"):
        return Check(name, "missing", f"{ray}, a joint run needs {wanted}; {alone}", command)
    return Check(name, "ok", wanted)
