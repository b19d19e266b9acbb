"""Profiles: how the interpreter of an engine is found on a device.

``simnpu`` uses the environments that this package builds and puts the simulated ``torch_npu`` on their path.
``ascend`` uses interpreters that are already installed (in an image); nothing is installed into them, and the
repository is put on their path.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from envs.build import Builder, Progress
from envs.errors import EnvError
from envs.home import REPOSITORY

#: Engines that a profile can find.
ENGINES = ("lmdeploy", "vllm")

#: The directory that holds the simulated ``torch_npu``.
SIMNPU_PATH = REPOSITORY / "envs" / "simnpu" / "path"

#: Variables that name an installed interpreter, by engine.
PYTHON_VARIABLES = {"lmdeploy": "LMDEPLOY_PYTHON", "vllm": "VLLM_PYTHON"}

#: Seconds that the examination of an installed interpreter may take.
EXAMINATION_S = 120.0

#: Oldest Python that the engine-side code runs on.
MINIMUM_PYTHON = (3, 10)

_COMMON = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
_SIMNPU = {
    # torch_npu is loaded by torch itself, through its entry point.
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
}
_SIMNPU_BY_ENGINE = {
    "lmdeploy": {"LMDEPLOY_SKIP_WARMUP": "1"},
    "vllm": {
        "VLLM_VERSION": "0.23.0",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # The sampler would be compiled in spite of eager mode: 20 seconds instead of 0.1.
        "TORCHDYNAMO_DISABLE": "1",
    },
}
# Distributions and modules of an engine with its Ascend plugin.
_PACKAGES = {"lmdeploy": ("lmdeploy", "dlinfer-ascend"), "vllm": ("vllm", "vllm-ascend")}
_MODULES = {"lmdeploy": ("lmdeploy", "dlinfer"), "vllm": ("vllm", "vllm_ascend")}

# Runs in the foreign interpreter and prints one line of JSON; in old syntax, so that an old one can answer.
_EXAMINATION = """
import importlib, json, sys
answer = {"python": list(sys.version_info[:3]), "errors": {}, "versions": {}, "device": False}
modules, packages = json.loads(sys.argv[1]), json.loads(sys.argv[2])
try:
    if sys.version_info[:2] >= (3, 10):
        from importlib.metadata import PackageNotFoundError, version
        for name in ["torch", "torch_npu"] + modules:
            try:
                importlib.import_module(name)
            except BaseException as error:
                answer["errors"][name] = "%s: %s" % (type(error).__name__, error)
        for name in ["torch", "torch_npu"] + packages:
            try:
                answer["versions"][name] = version(name)
            except PackageNotFoundError:
                answer["versions"][name] = "unknown"
        if "torch_npu" not in answer["errors"]:
            answer["device"] = bool(sys.modules["torch_npu"].npu.is_available())
except Exception as error:
    answer["errors"]["device"] = "%s: %s" % (type(error).__name__, error)
print("\\nALIGN" + json.dumps(answer))
"""


@dataclass(frozen=True)
class Interpreter:
    """Where and how one engine runs.

    Attributes:
        engine: ``lmdeploy`` or ``vllm``.
        device: name of the profile.
        python: absolute path of the interpreter.
        pythonpath: entries for ``PYTHONPATH``, absolute, in order.
        env: further environment variables; they must be set before the interpreter starts.
        simulated: numbers come from the simulated device and not from hardware.
        versions: version by distribution, as far as known.
    """

    engine: str
    device: str
    python: Path
    pythonpath: tuple[str, ...]
    env: Mapping[str, str]
    simulated: bool
    versions: Mapping[str, str] = field(default_factory=dict)


#: Finds the interpreter of an engine: engine, progress.
Finder = Callable[[str, Progress | None], Interpreter]


@dataclass(frozen=True)
class Profile:
    """One device: its name, what it is, and how the interpreter of an engine is found on it.

    Attributes:
        name: value of ``DEVICE``.
        summary: one line for users.
        find: None if the device is known but not supported yet.
    """

    name: str
    summary: str
    find: Finder | None


def resolve(device: str, engine: str, progress: Progress | None = None) -> Interpreter:
    """Return the interpreter of ``engine`` on ``device``; on ``simnpu`` it is built if necessary.

    Args:
        device: ``simnpu`` or ``ascend``.
        engine: ``lmdeploy`` or ``vllm``.
        progress: receives lines for the user while an environment is being built.

    Raises:
        EnvError: unknown or unsupported device, no usable interpreter, or a failed build.
        ValueError: unknown engine.
    """
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}; known: {', '.join(ENGINES)}")
    profile = PROFILES.get(device)
    if profile is None:
        raise EnvError(f"unknown device {device!r}", _devices_hint())
    if profile.find is None:
        raise EnvError(f"the device {device} ({profile.summary}) is not supported yet", _devices_hint())
    return profile.find(engine, progress)


def _devices_hint() -> str:
    works = [f"{profile.name} ({profile.summary})" for profile in PROFILES.values() if profile.find is not None]
    return f"devices that work: {', '.join(works)}; for example: make align DEVICE=simnpu"


def _common_env() -> dict[str, str]:
    # One thread by default: both engines share the machine with each other and with their own workers.
    return {**_COMMON, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or "1"}


def _find_simnpu(engine: str, progress: Progress | None) -> Interpreter:
    environment = Builder().ensure(engine, progress)
    names = ("torch", "transformers", "ray", *_PACKAGES[engine])
    return Interpreter(
        engine=engine,
        device="simnpu",
        python=environment.python,
        pythonpath=(str(REPOSITORY), str(SIMNPU_PATH)),
        env={**_common_env(), **_SIMNPU, **_SIMNPU_BY_ENGINE[engine]},
        simulated=True,
        versions={name: environment.versions[name] for name in names},
    )


def _find_ascend(engine: str, progress: Progress | None) -> Interpreter:
    variable = PYTHON_VARIABLES[engine]
    named = os.environ.get(variable, "")
    if not named:
        device = "no /dev/davinci*" if not _has_device_node() else "/dev/davinci* is there"
        _no_ascend(f"{variable} is not set, {device}")
    python = Path(os.path.abspath(os.path.expanduser(named)))
    if not python.is_file():
        _no_ascend(f"{variable}={named} is not a file")
    if not os.access(python, os.X_OK):
        _no_ascend(f"{variable}={named} is not executable")
    if progress:
        progress(f"examining {python} (it imports {' and '.join(_MODULES[engine])})")
    answer = _examine(python, _MODULES[engine], _PACKAGES[engine], variable)
    version = ".".join(map(str, answer.python))
    if answer.python[:2] < MINIMUM_PYTHON:
        _no_ascend(f"{variable}={named} is Python {version}, and 3.10 or later is needed")
    if answer.errors:
        name, reason = next(iter(answer.errors.items()))
        _no_ascend(f"{variable}={named} cannot import {name}: {reason}")
    if not answer.device:
        _no_ascend(f"torch_npu of {variable}={named} sees no device")
    return Interpreter(
        engine=engine,
        device="ascend",
        python=python,
        pythonpath=(str(REPOSITORY),),
        env=_common_env(),
        simulated=False,
        versions={"python": version, **answer.versions},
    )


def _has_device_node() -> bool:
    return any(Path("/dev").glob("davinci[0-9]*"))


@dataclass(frozen=True)
class _Answer:
    python: tuple[int, ...]
    errors: Mapping[str, str]
    versions: Mapping[str, str]
    device: bool


def _examine(python: Path, modules: Sequence[str], packages: Sequence[str], variable: str) -> _Answer:
    """Ask an installed interpreter what it is and what it can import."""
    argv = [str(python), "-c", _EXAMINATION, json.dumps(modules), json.dumps(packages)]
    # The driver's own path must not decide what the other interpreter finds.
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        done = subprocess.run(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=EXAMINATION_S,
            cwd="/",
        )
    except subprocess.TimeoutExpired:
        _no_ascend(f"{variable}={python} did not answer within {EXAMINATION_S:.0f} s")
    except OSError as error:
        _no_ascend(f"{variable}={python} cannot be started: {error.strerror}")
    answers = [line for line in done.stdout.splitlines() if line.startswith("ALIGN{")]
    if not answers:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        _no_ascend(f"{variable}={python} is no working Python: {last[:200]}")
    found = json.loads(answers[-1].removeprefix("ALIGN"))
    return _Answer(tuple(found["python"]), found["errors"], found["versions"], found["device"])


def _no_ascend(reason: str) -> NoReturn:
    raise EnvError(
        f"no Ascend device or interpreter found: {reason}",
        "name the interpreters that have torch_npu and the engines: LMDEPLOY_PYTHON=/path/to/python "
        "VLLM_PYTHON=/path/to/python make align DEVICE=ascend MODEL=…; or simulate the device: DEVICE=simnpu",
    )


#: Every known device by name.
PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile("simnpu", "simulated NPU on a CPU", _find_simnpu),
        Profile("ascend", "Ascend NPU, engines installed in an image", _find_ascend),
        Profile("camb", "Cambricon MLU", None),
        Profile("maca", "MetaX GPU", None),
        Profile("cpu", "the engines' own CPU builds", None),
    )
}
