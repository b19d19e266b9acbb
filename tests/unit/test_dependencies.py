"""Who may import whom, read from the sources: the rule that keeps engines out of the driver and the driver out of them.

The interpreter of an engine is not ours. Code that runs there uses the standard library, torch, numpy and safetensors,
and in the engine's own folder the engine; it is written for Python 3.10.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from envs.home import REPOSITORY

SIMNPU = REPOSITORY / "envs" / "simnpu" / "path"
ENGINES = {"lmdeploy", "vllm", "vllm_ascend", "dlinfer", "torch_npu", "acl"}
DRIVER_ONLY = {"pydantic", "typer", "rich", "sqlalchemy", "structlog", "ray", "psutil", "gguf", "jinja2", "tokenizers"}
ENGINE_SIDE = {"torch", "numpy", "safetensors"} | sys.stdlib_module_names
#: Folder → what its modules may import beyond :data:`ENGINE_SIDE` and ``adapters``.
OWN = {
    "adapters/lmdeploy": {"lmdeploy", "dlinfer"},
    "adapters/vllm": {"vllm", "vllm_ascend"},
    "adapters/transformers": {"transformers"},
    # Faults change what the engines do; each runs inside of one.
    "adapters/drill": {"lmdeploy", "dlinfer", "vllm", "vllm_ascend", "torch_npu"},
}
#: Of ``align``, what engines' interpreters may import.
SHARED = ("align.trace", "align.checkpoints", "align.ledger.record", "align.collectives.record", "align.fa")


def sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((REPOSITORY / folder).rglob("*.py"))]
    assert found, folders
    return found


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever the statement stands; relative imports resolved."""
    parts = path.relative_to(SIMNPU if path.is_relative_to(SIMNPU) else REPOSITORY).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parts[: len(parts) - node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def top(module: str) -> str:
    return module.partition(".")[0]


def name(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def own(path: Path) -> set[str]:
    return next((allowed for folder, allowed in OWN.items() if path.is_relative_to(REPOSITORY / folder)), set())


def test_the_reader_of_imports_sees_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    path = REPOSITORY / "adapters" / "lmdeploy" / "invented.py"
    source = "import a.b as c\nfrom d import e\nfrom . import gate\nfrom ..probe import spec\ndef f():\n    import g\n"
    monkeypatch.setattr(Path, "read_text", lambda self, **_: source)
    assert set(imports(path)) == {
        "a.b",
        "d",
        "d.e",
        "adapters.lmdeploy",
        "adapters.lmdeploy.gate",
        "adapters.probe",
        "adapters.probe.spec",
        "g",
    }


@pytest.mark.parametrize("path", sources("align"), ids=name)
def test_align_never_imports_an_engine(path: Path) -> None:
    assert not {module for module in imports(path) if top(module) in ENGINES}
    inside = ("adapters.lmdeploy", "adapters.vllm")
    assert not {module for module in imports(path) if module.startswith(inside)}


@pytest.mark.parametrize("path", sources("adapters"), ids=name)
def test_adapters_import_what_every_interpreter_has(path: Path) -> None:
    allowed = ENGINE_SIDE | {"adapters"} | own(path)
    strangers = {module for module in imports(path) if top(module) not in allowed and not module.startswith(SHARED)}
    assert not strangers


@pytest.mark.parametrize("path", sources("adapters"), ids=name)
def test_an_engines_folder_is_its_own(path: Path) -> None:
    others = {folder.replace("/", ".") for folder in OWN if not path.is_relative_to(REPOSITORY / folder)}
    assert not {module for module in imports(path) if module.startswith(tuple(others))}


@pytest.mark.parametrize("path", sources("envs/simnpu"), ids=name)
def test_the_simulation_stands_alone(path: Path) -> None:
    allowed = {"torch", "numpy", "torch_npu", "acl"} | sys.stdlib_module_names
    assert not {module for module in imports(path) if top(module) not in allowed}


def engine_side() -> list[Path]:
    shared = [REPOSITORY.joinpath(*module.split(".")) for module in SHARED]
    later = [path for folder in shared for path in sorted(folder.rglob("*.py"))]
    return [*sources("adapters", "envs/simnpu"), *later]


@pytest.mark.parametrize("path", engine_side(), ids=name)
def test_engine_side_code_is_python_3_10(path: Path) -> None:
    ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))


@pytest.mark.parametrize("path", engine_side(), ids=name)
def test_engine_side_code_needs_nothing_of_the_driver(path: Path) -> None:
    assert not {module for module in imports(path) if top(module) in DRIVER_ONLY}
    assert not {module for module in imports(path) if top(module) == "align" and not module.startswith(SHARED)}


@pytest.mark.parametrize("path", sources("align", "adapters", "envs"), ids=name)
def test_nothing_imports_the_command(path: Path) -> None:
    if path.is_relative_to(REPOSITORY / "align" / "cli") or path == REPOSITORY / "align" / "__main__.py":
        return
    assert not {module for module in imports(path) if module == "align.cli" or module.startswith("align.cli.")}


def test_the_guardian_imports_the_standard_library_alone() -> None:
    """It must start fast and work when all else is broken."""
    found = {top(module) for module in imports(REPOSITORY / "align" / "run" / "guardian.py")}
    assert found <= sys.stdlib_module_names
