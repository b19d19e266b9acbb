"""Where in the engine's own code something happens: the Python frames, without those of torch and of this probe."""

from __future__ import annotations

import inspect
import os
import sys
from functools import lru_cache
from types import FrameType
from typing import Any

import torch

#: Frames of one place that are kept, the innermost first.
DEPTH = 4
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
#: Packages of this repository that are no engine's code; a patch of the user is as good as the engine's.
_PROBE = tuple(os.path.join(_OURS, folder) + os.sep for folder in ("adapters", "align", "envs"))
_STANDARD = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_SITE = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)


@lru_cache(maxsize=4096)
def _foreign(filename: str) -> bool:
    """Whether a file is neither the engine's nor the user's."""
    if filename.startswith("<") or filename.startswith(_PROBE):
        return True
    if any(part in filename for part in _SITE):
        return filename.startswith(_packages())
    return filename.startswith(_STANDARD)


def _packages() -> tuple[str, ...]:
    """Folders of torch and of the device's package."""
    found = [os.path.dirname(os.path.abspath(torch.__file__)) + os.sep]
    device = getattr(sys.modules.get("torch_npu"), "__file__", None)
    if device:
        found.append(os.path.dirname(os.path.abspath(device)) + os.sep)
    return tuple(found)


@lru_cache(maxsize=4096)
def _shown(filename: str) -> str:
    """The file as its package names it, ``lmdeploy/pytorch/nn/norm.py``; the whole path of what is in no package."""
    for part in _SITE:
        if part in filename:
            return filename.rpartition(part)[2]
    roots = (root for root in sys.path if root and filename.startswith(os.path.join(root, "")))
    longest = max(roots, key=len, default="")
    inside = filename[len(longest) :].lstrip(os.sep) if longest else ""
    return inside if os.sep in inside else filename


def definition(function: Any) -> str:
    """``file:line`` where a function is defined, behind its decorators; empty if it is not Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f"{_shown(code.co_filename)}:{code.co_firstlineno}"


def frames(depth: int = DEPTH) -> tuple[str, ...]:
    """``file:line function`` of the caller's engine frames, the innermost first; empty if there are none."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < depth:
        code = frame.f_code
        if not _foreign(code.co_filename):
            found.append(f"{_shown(code.co_filename)}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return tuple(found)
