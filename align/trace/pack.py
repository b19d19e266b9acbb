"""Small records of many checkpoints in one tensor.

A step derives some hundred records of a few bytes each, and every tensor costs a hundred bytes of a file's header. So
records of one suffix, shape and dtype are stacked: ``@7#tok`` ``[n, T, 8]`` holds ``NAME#tok`` of the ``n`` names in
line 7 of ``packs.jsonl``. Nearly all steps share their lines. Values are never packed: other tools can read them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

PACKS_FILE = "packs.jsonl"
_MARK = "@"


class Packer:
    """Packs the steps of one rank.

    Args:
        announce: writes a line with names; called before anything refers to it.
    """

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce = announce
        self._lines: dict[tuple[str, ...], int] = {}

    def pack(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What is written instead of ``tensors``; :func:`unpacked` tells where each went."""
        groups: dict[tuple[str, torch.Size, torch.dtype], list[str]] = {}
        found: dict[str, torch.Tensor] = {}
        for key, tensor in tensors.items():
            name, mark, suffix = key.partition("#")
            if mark:
                groups.setdefault((suffix, tensor.shape, tensor.dtype), []).append(name)
            else:
                found[key] = tensor
        for (suffix, _, _), names in groups.items():
            if len(names) == 1:
                found[f"{names[0]}#{suffix}"] = tensors[f"{names[0]}#{suffix}"]
                continue
            found[f"{_MARK}{self._line(tuple(names))}#{suffix}"] = torch.stack(
                [tensors[f"{name}#{suffix}"] for name in names]
            )
        return found

    def _line(self, names: tuple[str, ...]) -> int:
        if names not in self._lines:
            self._announce(json.dumps(names))
            self._lines[names] = len(self._lines)
        return self._lines[names]


def read_lines(lines: Iterable[str]) -> list[tuple[str, ...]]:
    """The names of every line of ``packs.jsonl``; a last line that was cut does not count.

    Raises:
        ValueError: a line is no list of names.
    """
    found = []
    for line in lines:
        if not line.endswith("\n"):
            break
        names = json.loads(line)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("a line holds no list of names")
        found.append(tuple(names))
    return found


def unpacked(keys: Iterable[str], lines: Sequence[Sequence[str]]) -> dict[str, tuple[str, int | None]]:
    """Where every record of a file is.

    Args:
        keys: of the file.
        lines: see :func:`read_lines`.

    Returns:
        Record → key of the file, and its index there; ``None`` if it is all that the key holds.

    Raises:
        ValueError: a key refers to a line that does not exist.
    """
    found: dict[str, tuple[str, int | None]] = {}
    for key in keys:
        if not key.startswith(_MARK):
            found[key] = key, None
            continue
        number, _, suffix = key.removeprefix(_MARK).partition("#")
        if not number.isdecimal() or int(number) >= len(lines):
            raise ValueError(f"{key} refers to a line of {PACKS_FILE} that is not there")
        found.update({f"{name}#{suffix}": (key, index) for index, name in enumerate(lines[int(number)])})
    return found
