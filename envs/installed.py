"""What is really installed in an environment, read from its files without starting its interpreter."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Departure:
    """One package that is not what the lock says.

    Attributes:
        package: as the lock spells it.
        pinned: version in the lock.
        found: version that is installed; empty if the package is not there.
        file: first of its files that is gone or has another size than when it was installed; empty if none.
    """

    package: str
    pinned: str
    found: str
    file: str = ""

    def __str__(self) -> str:
        if not self.found:
            return f"{self.package} is not installed"
        if self.file:
            return f"{self.package}: {self.file} is gone or was changed"
        return f"{self.package} is {self.found}, the lock says {self.pinned}"


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _dist_infos(site_packages: Path) -> dict[str, Path]:
    """Directory of the metadata by canonical name, which is what PEP 427 puts before the version."""
    return {_canonical(path.name.partition("-")[0]): path for path in sorted(site_packages.glob("*.dist-info"))}


def _version(dist_info: Path) -> str:
    """The version in the metadata; empty if there is none to read, so that pip would not see the package either."""
    with suppress(OSError), open(dist_info / "METADATA", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("Version:"):
                return line.partition(":")[2].strip()
            if not line.strip():  # end of the header
                break
    return ""


def versions(site_packages: Path, names: Sequence[str]) -> dict[str, str]:
    """Installed version of each of ``names``; what is not installed is left out."""
    found = _dist_infos(site_packages)
    known = {name: _version(found[_canonical(name)]) for name in names if _canonical(name) in found}
    return {name: version for name, version in known.items() if version}


def _recorded(dist_info: Path) -> Iterator[tuple[str, int]]:
    """Files below site-packages with their sizes when they were installed, from pip's RECORD."""
    try:
        with open(dist_info / "RECORD", encoding="utf-8", newline="") as file:
            for row in csv.reader(file):
                # Compiled modules have no size there: Python makes them again.
                if len(row) == 3 and row[2].isdecimal() and not row[0].startswith(("..", "/")):
                    yield row[0], int(row[2])
    except (OSError, UnicodeDecodeError, csv.Error):
        yield f"{dist_info.name}/RECORD", -1


def _changed_file(site_packages: Path, dist_info: Path, removed: tuple[str, ...]) -> str:
    for name, size in _recorded(dist_info):
        if name.startswith(removed):
            continue
        try:
            same = os.stat(site_packages / name).st_size == size
        except OSError:
            same = False
        if not same:
            return name
    return ""


def departures(
    site_packages: Path, pinned: Mapping[str, str], removed: Sequence[str] = (), files: bool = True
) -> tuple[Departure, ...]:
    """Packages that are not what the lock says, in its order.

    Args:
        site_packages: of the environment.
        pinned: version by package. A local version label that is installed (``2.13.0+cpu``) counts as the same.
        removed: paths below ``site_packages`` that the build deletes, so that their absence is right.
        files: look at every file of the packages too (its existence and size, not its content; a second or so).
    """
    found = _dist_infos(site_packages)
    gone = tuple(f"{path.rstrip('/')}/" for path in removed)
    answer = []
    for package, version in pinned.items():
        dist_info = found.get(_canonical(package))
        installed = "" if dist_info is None else _version(dist_info)
        file = ""
        if files and dist_info is not None and _same(installed, version):
            file = _changed_file(site_packages, dist_info, gone)
        if file or not _same(installed, version):
            answer.append(Departure(package, version, installed, file))
    return tuple(answer)


def _same(installed: str, pinned: str) -> bool:
    return pinned in (installed, installed.partition("+")[0])
