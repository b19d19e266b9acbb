"""The files that the knowledge table sends a reader to are in the installed packages."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from align.knowledge import knowledge
from envs.profiles import ENGINES, resolve

#: The vendor that the installed packages were built for.
VENDOR = "ascend"


def test_every_file_is_in_one_of_the_engines() -> None:
    places = []
    for engine in ENGINES:
        python = str(resolve("simnpu", engine).python)
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        places.append(Path(done.stdout.strip()))
    lost = {}
    for name, group in knowledge().groups.items():
        for file in group.files:
            found = [path for place in places if (path := place / file.replace("<vendor>", VENDOR)).exists()]
            if not found or found[0].is_dir() != file.endswith("/"):
                lost[file] = name
    assert lost == {}


@pytest.mark.parametrize("vendor", ["camb", "maca"])
def test_lmdeploys_own_files_exist_for_the_other_vendors(vendor: str) -> None:
    """lmdeploy has them for all three; dlinfer installs the vendor it was built for."""
    python = str(resolve("simnpu", "lmdeploy").python)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    place = Path(done.stdout.strip())
    files = {file for group in knowledge().groups.values() for file in group.files if file.startswith("lmdeploy/")}
    with_vendor = [file for file in files if "<vendor>" in file]
    assert with_vendor
    assert all((place / file.replace("<vendor>", vendor)).exists() for file in with_vendor)
