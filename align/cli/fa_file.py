"""Descriptions of calls from files: JSON as users write it, with types that are checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from align.errors import UserError
from align.fa.call import Call, Context, TensorFacts, Value, call_record, read_call
from align.fa.operators import Operator, resolve
from align.fa.text import parse_tensor

_TENSOR = TypeAdapter(TensorFacts)
_CONTEXT = TypeAdapter(Context)
_HINT = "align fa check --help says what a call is; align.fa.call_record writes one from a live call"


def load(path: Path) -> list[Call]:
    """The calls of a file: one object, or a list of them.

    Raises:
        UserError: no such file, no JSON, or not a call; says where.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}", "name a file with a call in JSON") from None
    except ValueError as error:
        raise UserError(f"{path} is no JSON: {error}", _HINT) from None
    records = content if isinstance(content, list) else [content]
    if not records:
        raise UserError(f"{path} has no call", _HINT)
    return [_call(f"{path}: call {place}" if len(records) > 1 else str(path), one)
            for place, one in enumerate(records)]  # fmt: skip


def _call(where: str, record: Any) -> Call:
    try:
        if not isinstance(record, Mapping):
            raise ValueError("a call is an object with operator and arguments")
        call = read_call(_with_tensors(record))
        arguments = {name: _typed(value) for name, value in call.arguments.items()}
        context = _CONTEXT.validate_python(call_record(call)["context"])
        return Call(call.operator, arguments, context)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{where}: {at}: {first['msg']}", _HINT) from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{where}: {error}", _HINT) from None


def _with_tensors(record: Mapping[str, Any]) -> dict[str, Any]:
    """Short forms of tensors, where the operator takes a tensor, written out."""
    name, given = record.get("operator"), record.get("arguments")
    if not isinstance(name, str) or not isinstance(given, Mapping):
        raise ValueError("a call has an operator and arguments")
    operator = resolve(name)
    written = {argument: _written(operator, argument, value) for argument, value in given.items()}
    return {**record, "operator": operator.name, "arguments": written}


def _written(operator: Operator, argument: str, value: Any) -> Any:
    known = operator.arguments.get(argument)
    lengths = known is not None and known.type.startswith("int[")
    if isinstance(value, str) and (lengths or (known is not None and known.tensor)):
        record = call_record(Call("", {argument: parse_tensor(value)}))
        return record["arguments"][argument]
    return value


def _typed(value: Value) -> Value:
    if isinstance(value, TensorFacts):
        plain = call_record(Call("", {"tensor": value}))["arguments"]["tensor"]["tensor"]
        checked: TensorFacts = _TENSOR.validate_python(plain)
        return checked
    return tuple(_typed(one) for one in value) if isinstance(value, tuple) else value
