"""``align env``: list, build and remove environments."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from align.cli.output import columns, print_json
from align.doctor.environments import MAIN_PACKAGES
from align.doctor.types import gb
from align.errors import EXIT_ALIGNED, EXIT_NOT_COMPARABLE, UserError
from envs import bootstrap, installed, survey
from envs.build import NAMES, Builder
from envs.home import REPOSITORY

_COLUMNS = ("name", "key", "state", "size", "packages", "path")


@dataclass(frozen=True)
class Row:
    """One environment in the list.

    Attributes:
        name, key: ``driver``, ``lmdeploy`` or ``vllm``, and what its directory's name ends in.
        state: ``built``, ``building``, ``unfinished`` or ``absent``.
        current: of this checkout's lock.
        size: bytes on the disk.
        versions: of the main packages that are really installed.
        used_by: processes that run from it.
    """

    name: str
    key: str
    state: str
    current: bool
    size: int
    versions: dict[str, str]
    used_by: tuple[int, ...]
    path: Path

    @property
    def shown_state(self) -> str:
        """For people."""
        return self.state if self.current else f"{self.state}, old lock"

    @property
    def shown_size(self) -> str:
        """For people."""
        return gb(self.size) if self.size else "-"

    @property
    def shown_versions(self) -> str:
        """For people."""
        return ", ".join(f"{package} {version}" for package, version in self.versions.items())


def rows(builder: Builder, proc: Path = survey.PROC) -> list[Row]:
    """Every environment that is there or should be."""
    found = survey.survey(builder)
    used = survey.users([one.path for one in found], proc)
    answer = []
    for one in found:
        packages = one.path / "lib"
        folder = next(iter(sorted(packages.glob("python3.*/site-packages"))), packages)
        versions = installed.versions(folder, MAIN_PACKAGES)
        size = survey.size(one.path)
        answer.append(Row(one.name, one.key, one.state, one.current, size, versions, used[one.path], one.path))
    return answer


def list_all(json: bool) -> int:
    """Print them all."""
    found = rows(Builder())
    if json:
        print_json({"environments": [_record(row) for row in found]})
    else:
        show(Console(emoji=False, highlight=False), found)
    return EXIT_ALIGNED


def _record(row: Row) -> dict[str, object]:
    return {**vars(row), "used_by": list(row.used_by), "path": str(row.path)}


def show(console: Console, found: Sequence[Row]) -> None:
    """One row a line; on a terminal packages that do not fit are broken into lines, and the folder is said once."""
    if not console.is_terminal:
        rows = [
            (row.name, row.key, row.shown_state, row.shown_size, row.shown_versions or "-", str(row.path))
            for row in found
        ]
        print(columns([_COLUMNS, *rows]))
        _say_next(console, found)
        return
    table = Table.grid(padding=(0, 2))
    for column in _COLUMNS[:4]:
        table.add_column(no_wrap=True, justify="right" if column == "size" else "left")
    table.add_column(overflow="fold")
    table.add_row(*(Text(column, "bold") for column in _COLUMNS[:5]))
    for row in found:
        style = "green" if row.state == "built" and row.current else "yellow"
        versions = Text(row.shown_versions or "-")
        table.add_row(row.name, row.key, Text(row.shown_state, style), row.shown_size, versions)
    console.print(table)
    folder = found[0].path.parent if found else None
    console.print(f"they are in {folder}, as name-key", style="dim", soft_wrap=True)
    _say_next(console, found)


def _say_next(console: Console, found: Sequence[Row]) -> None:
    """Built first, then tidied up."""
    if any(row.current and row.state in ("absent", "unfinished") for row in found):
        console.print("next: align env build", soft_wrap=True)
    older = [row for row in found if not row.current]
    if older:
        freed = gb(sum(row.size for row in older))
        what = f"next: align env clean --old  # frees {freed}, unless another checkout needs them"
        console.print(what, soft_wrap=True)


# ------------------------------------------------------------------------------------------------------------- build


def build(name: str, rebuild: bool, json: bool) -> int:
    """Build one environment, or all.

    Raises:
        UserError: an unknown name, a failed build, or one that is to be built anew while processes run from it.
    """
    if name not in (*NAMES, "all"):
        raise UserError(f"there is no environment called {name!r}", f"choose one of: {', '.join(NAMES)}, all")
    builder = Builder()
    names = list(NAMES if name == "all" else (name,))
    if rebuild:
        _refuse_in_use(builder, names)
    screen = bootstrap.Screen(quiet=False)
    if rebuild and "driver" in names and _runs_from(builder):
        names.remove("driver")
        _rebuild_own()
    bootstrap.build(builder, names, screen, rebuild)
    driver = builder.environment("driver")
    if driver.ready and not _runs_from(builder):
        bootstrap.write_launcher(builder, driver)  # the command of this checkout must not run in an older one
    if json:
        done = [row for row in rows(builder) if row.current and name in (row.name, "all")]
        print_json({"environments": [_record(row) for row in done]})
    else:
        print(f"ready: {', '.join(NAMES if name == 'all' else (name,))}")
    return EXIT_ALIGNED


def _runs_from(builder: Builder) -> bool:
    """Whether this command runs in the driver's environment."""
    return Path(sys.prefix).resolve() == builder.environment("driver").path.resolve()


def _rebuild_own() -> None:
    """A process cannot build what it runs from: its interpreter is removed first."""
    base = getattr(sys, "_base_executable", sys.executable)
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    # -P: the current directory is not searched for modules.
    done = subprocess.run([base, "-P", "-m", "envs.bootstrap", "driver", "--rebuild"], env=env, check=False)
    if done.returncode:
        raise UserError("the driver's environment was not built again", "see the reason above, then: make env")


def _refuse_in_use(builder: Builder, names: Sequence[str]) -> None:
    paths = {builder.environment(name).path: name for name in names}
    for path, pids in survey.users(paths).items():
        strangers = [pid for pid in pids if pid not in (os.getpid(), os.getppid())]
        if strangers:
            shown = " ".join(map(str, strangers))
            raise UserError(
                f"the {paths[path]} environment is in use by process {shown}",
                f"wait until it has ended, or: kill {shown}",
            )


# ------------------------------------------------------------------------------------------------------------- clean


def clean(names: tuple[str, ...], old: bool, json: bool) -> int:
    """Remove environments by name, or those of other locks.

    Returns:
        0, also if there was nothing to remove; 2 if one that was named stays.

    Raises:
        UserError: neither names nor ``--old``, both, or a name that is not there.
    """
    if bool(names) == old:
        what = "both names and --old were given" if old else "nothing was named"
        raise UserError(
            what, "align env clean --old, or names such as: align env clean vllm; make clean-env removes all"
        )
    builder = Builder()
    wanted = _named(builder, names) if names else {found.path for found in survey.others(builder)}
    reasons: dict[Path, str] = {}
    size = {path: survey.size(path) for path in wanted}

    def keep(path: Path) -> str:
        users = survey.users([path])[path] if path in wanted else ()
        if users:
            own = " (this command)" if os.getpid() in users else ""
            reasons[path] = f"is in use by process {' '.join(map(str, users))}{own}"
        return reasons.get(path, "" if path in wanted else "was not named")

    builder.clean(keep=keep)
    removed = sorted(path for path in wanted if not path.exists())
    stays = {path.name: reasons.get(path, "is being built") for path in sorted(wanted) if path.exists()}
    freed = sum(size[path] for path in removed)
    if json:
        print_json({"removed": [str(path) for path in removed], "bytes": freed, "kept": stays})
    else:
        for path in removed:
            print(f"removed {path}: {gb(size[path])}")
        for name, why in stays.items():
            print(f"kept {name}: it {why}")
        if not wanted:
            print("nothing to remove: there is no environment of another lock")
    return EXIT_NOT_COMPARABLE if names and stays else EXIT_ALIGNED


def _named(builder: Builder, names: Sequence[str]) -> set[Path]:
    """Directories by their own names, or all of ``driver``, ``lmdeploy`` or ``vllm``."""
    wanted: set[Path] = set()
    there = builder.directories()
    for name in names:
        found = [path for path in there if name in (path.name, path.name.rpartition("-")[0])]
        if not found:
            known = ", ".join(path.name for path in there) or "none is built"
            raise UserError(f"there is no environment called {name!r}", f"see align env list: {known}")
        wanted.update(found)
    return wanted
