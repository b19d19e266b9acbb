"""Functions that talk to other ranks are found where they are defined, also behind patches and inside others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from adapters.probe.parallel_code import talking

SOURCE = """
import functools
import torch.distributed as dist


def quiet(x):
    return x


def reduced(x):
    dist.all_reduce(x)


class Moe:
    def forward(self, x):
        def inner():
            return dist.reduce_scatter_tensor(x, x)
        return inner()

    @staticmethod
    def gather(x):
        return dist.all_gather(x, x)

    def plain(self, x):
        return x.gather(0, x).scatter_(0, x)
"""


def test_what_talks_is_told_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "vendor_ext" / "device"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("")
    (package / "invented.py").write_text(SOURCE)
    (package / "borrowed.py").write_text("from vendor_ext.device.invented import reduced\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import importlib

    importlib.import_module("vendor_ext.device.borrowed")
    try:
        found = talking(("vendor_ext.device",))
    finally:
        for name in [one for one in sys.modules if one.startswith("vendor_ext")]:
            del sys.modules[name]
    assert found == [
        "vendor_ext/device/invented.py:10 reduced",
        "vendor_ext/device/invented.py:15 Moe.forward",
        "vendor_ext/device/invented.py:20 Moe.gather",
    ]
    assert talking(("nothing.of.the.kind",)) == []
