"""Registration of the simulated operators with torch.

The signature tables beside this file list every operator of torch_npu (`npu::`, `atb::`) and of vllm-ascend
(`_C_ascend::`). `install` defines all of them with their true schemas, so that `torch.ops.npu.npu_rms_norm`
exists as it does on an NPU. Operators with numerics are plain functions on CPU tensors, below `ops/`, marked
with `@operator`; all others raise `UnsimulatedOperator` when they are called.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from .checks import OPERATORS_FOLDER, SIGNATURES_FOLDER, UnsimulatedOperator

__all__ = [
    "FAULT_ENVIRONMENT_NAME",
    "OPERATORS",
    "Operator",
    "Signature",
    "UnsimulatedOperator",
    "calls",
    "install",
    "load_operators",
    "load_signatures",
    "missing",
    "operator",
    "python_attributes",
    "refused_signatures",
]

FAULT_ENVIRONMENT_NAME = "ALIGN_SIMNPU_FAULT"

TABLES = {"npu": "npu.txt", "atb": "atb.txt", "_C_ascend": "c_ascend.txt"}

RawFunction = Callable[..., Any]


class DeviceModule(Protocol):
    """What `install` needs of the module that implements the device."""

    def host_view(self, tensor: torch.Tensor, /) -> torch.Tensor:
        """Return a CPU tensor on the memory of a device tensor."""

    def to_device(self, tensor: torch.Tensor, /) -> torch.Tensor:
        """Copy a CPU tensor into a new device tensor."""

    def is_device(self, tensor: torch.Tensor, /) -> bool:
        """Say whether a tensor lies on the device."""


@dataclass(frozen=True)
class Signature:
    """One line of a signature table."""

    namespace: str
    name: str
    """Name without namespace; with overload, as in `npu_max.names_dim`."""
    text: str
    """The schema without namespace, normalised so that torch's parser reads it."""

    @property
    def qualified(self) -> str:
        """Namespace and name, as in `npu::npu_rms_norm`."""
        return f"{self.namespace}::{self.name}"


@dataclass(frozen=True)
class Operator:
    """An operator with numerics."""

    qualified: str
    function: RawFunction
    schema: torch.FunctionSchema
    host: frozenset[str]
    """Arguments that may be CPU tensors on hardware too."""
    source: str
    """Where its behaviour is documented."""
    faulted_input: str | None
    """The argument that the fault switch scales, for an operator that writes only a part of its output."""


OPERATORS: dict[str, Operator] = {}
"""Qualified name (with overload, if any) -> operator with numerics. Filled by `load_operators`."""

calls: Counter[str] = Counter()
"""How often each operator was called in this process, by qualified name."""


@functools.cache
def load_signatures() -> dict[str, Signature]:
    """Read the signature tables: qualified name -> signature."""
    folder = Path(__file__).with_name("signatures")
    found: dict[str, Signature] = {}
    for namespace, table in TABLES.items():
        for line in (folder / table).read_text(encoding="utf-8").splitlines():
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            text = _normalised(text)
            signature = Signature(namespace, text[: text.index("(")].strip(), text)
            assert signature.qualified not in found, f"{table} lists {signature.qualified} twice"
            found[signature.qualified] = signature
    return found


def _normalised(text: str) -> str:
    # The tables keep what stands in the sources: quotes escaped for C, a blank before '?', a comma before
    # ')'.
    return text.replace('\\"', '"').replace(" ?", "?").replace(", )", ")").replace(",)", ")")


def _parsed(signature: Signature) -> torch.FunctionSchema:
    return torch._C.parse_schema(f"{signature.namespace}::{signature.text}")


def refused_signatures() -> list[tuple[Signature, str]]:
    """List the signatures that torch's parser refuses, each with the reason.

    They name types that torch does not know without torch_npu's compiled code (`Dimname`, process group
    classes).
    """
    refused: list[tuple[Signature, str]] = []
    for signature in load_signatures().values():
        try:
            _parsed(signature)
        except RuntimeError as error:
            refused.append((signature, str(error).strip().splitlines()[0]))
    return refused


def operator(
    qualified: str, *, host: Sequence[str] = (), source: str = "", faulted_input: str | None = None
) -> Callable[[RawFunction], RawFunction]:
    """Mark a function on CPU tensors as the numerics of the operator `qualified` (with overload, if any).

    The function takes the arguments of the schema. It returns what the schema returns, or an argument itself
    where the output aliases it. `host` names the arguments that may lie on the CPU on hardware too, `source`
    says where the behaviour is documented, `faulted_input` see `Operator`.
    """

    def register(function: RawFunction) -> RawFunction:
        signature = load_signatures().get(qualified)
        if signature is None:
            raise KeyError(f"{qualified} is in none of the tables in {SIGNATURES_FOLDER}")
        assert qualified not in OPERATORS, f"{qualified} has two simulations"
        schema = _parsed(signature)
        known = {argument.name for argument in schema.arguments}
        assert known.issuperset(host), f"{qualified} has no argument {sorted(set(host) - known)}"
        OPERATORS[qualified] = Operator(qualified, function, schema, frozenset(host), source, faulted_input)
        return function

    return register


def load_operators() -> dict[str, Operator]:
    """Import every module below `ops/` and return `OPERATORS`."""
    package = f"{__package__}.ops"
    for path in sorted((Path(__file__).parent / "ops").glob("*.py")):
        if path.stem != "__init__":
            importlib.import_module(f"{package}.{path.stem}")
    return OPERATORS


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


class _Call:
    """Carries the tensors of one call between device and host."""

    def __init__(self, simulated: Operator, device: DeviceModule) -> None:
        self.simulated = simulated
        self.device = device
        self.originals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def to_host(self, name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if self.device.is_device(value):
                view = self.device.host_view(value)
                self.originals[id(view)] = (view, value)
                return view
            self.require_host(name, value)
            return value
        if isinstance(value, (list, tuple)):
            return [self.to_host(name, one) for one in value]
        return value

    def require_host(self, name: str, value: torch.Tensor) -> None:
        if name not in self.simulated.host:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but argument '{name}' of "
                f"{self.simulated.qualified} is on {value.device}; move it to the npu device"
            )

    def to_device(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            known = self.originals.get(id(value))
            return self.device.to_device(value) if known is None else known[1]
        if isinstance(value, (list, tuple)):
            return type(value)(self.to_device(one) for one in value)
        return value


def _kernel(simulated: Operator, device: DeviceModule, fault: float | None) -> RawFunction:
    names = [argument.name for argument in simulated.schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        calls[simulated.qualified] += 1
        call = _Call(simulated, device)
        given = dict(zip(names, args, strict=False))
        given.update(kwargs)
        hosted = {name: call.to_host(name, value) for name, value in given.items()}
        if fault is not None and simulated.faulted_input is not None:
            hosted[simulated.faulted_input] = hosted[simulated.faulted_input] * fault
        result = simulated.function(**hosted)
        if fault is not None and simulated.faulted_input is None:
            _scale_first_output(simulated, hosted, result, fault)
        return call.to_device(result)

    return kernel


def _unsimulated_kernel(signature: Signature) -> RawFunction:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        calls[signature.qualified] += 1
        raise UnsimulatedOperator(
            f"the simulated NPU has no numerics for {signature.qualified}, signature "
            f"{signature.namespace}::{signature.text}; write it as a function below {OPERATORS_FOLDER}, "
            f'mark it with @operator("{signature.qualified}") and give it a float64 test'
        )

    return kernel


# --- test switch --- ALIGN_SIMNPU_FAULT=npu_swiglu:scale=1.5 makes an operator wrong on purpose: a comparison
# that does not notice proves nothing. It exists for tests only and says so loudly on stderr.


def _parse_faults(text: str, simulated: dict[str, Operator]) -> dict[str, float]:
    """Parse `name:scale=factor[,...]` into qualified name -> factor; ValueError for anything else."""
    faults: dict[str, float] = {}
    for item in filter(None, (one.strip() for one in text.split(","))):
        name, separator, factor = item.partition(":scale=")
        matching = [one for one in simulated if one == name or one.partition("::")[2] == name]
        if not matching:
            known = ", ".join(sorted(simulated))
            raise ValueError(f"{FAULT_ENVIRONMENT_NAME} names {name!r}, which is not simulated; name one of: {known}")
        try:
            value = float(factor)
        except ValueError:
            separator = ""
        if not separator:
            raise ValueError(f"{FAULT_ENVIRONMENT_NAME}={item!r} is not of the form operator:scale=factor")
        faults.update(dict.fromkeys(matching, value))
    return faults


def _announce(faults: dict[str, float]) -> None:
    if faults:
        listed = ", ".join(f"{name} * {factor}" for name, factor in faults.items())
        print(
            f"!!! simnpu: {FAULT_ENVIRONMENT_NAME} is set, results are WRONG ON PURPOSE: {listed}",
            file=sys.stderr,
        )


def _scale_first_output(simulated: Operator, hosted: dict[str, Any], result: Any, factor: float) -> None:
    outputs = list(_tensors(result))
    if not outputs:
        written = [one.name for one in simulated.schema.arguments if one.alias_info and one.alias_info.is_write]
        outputs = [hosted[name] for name in written if isinstance(hosted.get(name), torch.Tensor)]
    assert outputs, f"{simulated.qualified} has no output to scale"
    outputs[0].mul_(factor)


# --- installation ---

_libraries: dict[str, Any] = {}
_defined: set[str] = set()


def install(device: DeviceModule, dispatch_key: str = "PrivateUse1") -> None:
    """Define every operator of the tables and implement it for the device. A second call does nothing.

    Names that somebody has defined before are only implemented; whoever defines one of them in Python
    afterwards is ignored. Raises ValueError if the fault switch names an unknown operator.
    """
    if _libraries:
        return
    simulated = load_operators()
    faults = _parse_faults(os.environ.get(FAULT_ENVIRONMENT_NAME, ""), simulated)
    _announce(faults)
    refused = {signature.qualified for signature, _ in refused_signatures()}
    library_class: Any = torch.library.Library
    for namespace in TABLES:
        _libraries[namespace] = library_class(namespace, "FRAGMENT")
    for qualified, signature in load_signatures().items():
        if qualified in refused:
            continue
        library = _libraries[signature.namespace]
        if not _exists(qualified):
            library.define(signature.text)
        _defined.add(qualified)
        known = simulated.get(qualified)
        if known is not None:
            library.impl(signature.name, _kernel(known, device, faults.get(qualified)), dispatch_key)
        elif _takes_tensors(_parsed(signature)):
            library.impl(signature.name, _unsimulated_kernel(signature), dispatch_key)
        else:
            # Nothing in its arguments would lead the dispatcher to the device.
            library.impl(signature.name, _unsimulated_kernel(signature), "CompositeExplicitAutograd")
    _ignore_later_definitions()


def _exists(qualified: str) -> bool:
    name, _, overload = qualified.partition(".")
    try:
        torch._C._dispatch_find_schema_or_throw(name, overload)
    except RuntimeError:
        return False
    return True


def _takes_tensors(schema: torch.FunctionSchema) -> bool:
    return any("Tensor" in str(argument.type) for argument in schema.arguments)


def _ignore_later_definitions() -> None:
    library_class: Any = torch.library.Library
    define = library_class.define

    @functools.wraps(define)
    def tolerant(library: Any, schema: str, *args: Any, **kwargs: Any) -> Any:
        name = schema[: schema.find("(")].strip()
        if f"{library.ns}::{name}" in _defined:
            return name
        return define(library, schema, *args, **kwargs)

    library_class.define = tolerant


def python_attributes() -> dict[str, Callable[..., Any]]:
    """Return what torch_npu offers as attributes: `npu_rms_norm`, `_npu_reshape_and_cache`, ... -> callable.

    They are the overload packets of `torch.ops`, so keyword arguments, defaults and `.out` work as they do
    there. Left out are the `_C_ascend` operators, which are no attributes of torch_npu, and operators without
    tensor arguments (`empty_with_format`), which nothing would lead to the device. Needs `install`.
    """
    attributes: dict[str, Callable[..., Any]] = {}
    for qualified in sorted(_defined):
        signature = load_signatures()[qualified]
        if signature.namespace != "_C_ascend" and _takes_tensors(_parsed(signature)):
            packet = signature.name.partition(".")[0]
            attributes[packet] = getattr(getattr(torch.ops, signature.namespace), packet)
    return attributes


def missing(name: str) -> Callable[..., Any]:
    """Return a stand-in for an attribute of torch_npu that no signature table has; it raises when it is
    called.

    Libraries fetch such functions on import without ever calling them.
    """

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        raise UnsimulatedOperator(
            f"torch_npu.{name} is in none of the signature tables of torch_npu 2.11; if the operator exists, "
            f"add its schema to {SIGNATURES_FOLDER} and its numerics below {OPERATORS_FOLDER}"
        )

    stand_in.__name__ = name
    return stand_in
