"""A tiny lock and a runner that plays pip without a network."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from envs.run import Beat, Outcome

LOCK = """
name = "tiny"
torch_build = "cpu"
disk_mb = 1
imports = ["json"]

[[step]]
name = "first"
packages = ["one==1.0"]

[[step]]
name = "second"
packages = ["two==2.0", "three==3.0"]
env = { COLOUR = "blue" }
remove = ["two/lib"]
"""


def write_lock(directory: Path, text: str = LOCK, name: str = "tiny") -> Path:
    """Write a lock and return the directory of locks."""
    directory.mkdir(exist_ok=True)
    (directory / f"{name}.toml").write_text(text)
    return directory


@dataclass
class FakePip:
    """Creates what a real build would create, in milliseconds; keeps every call.

    Attributes:
        before: called with the arguments of each command, may raise or return an outcome to answer instead.
        seconds: how long each command takes.
        journal: file that gets one line for each virtual environment created, for builds in other processes.
    """

    before: Callable[[Sequence[str]], Outcome | None] = lambda argv: None
    seconds: float = 0.0
    journal: Path | None = None
    calls: list[tuple[tuple[str, ...], dict[str, str]]] = field(default_factory=list)

    def __call__(
        self, argv: Sequence[str], *, env: Mapping[str, str], log: Path, beat: Beat, keep_fds: tuple[int, ...]
    ) -> Outcome:
        """Play one command."""
        self.calls.append((tuple(argv), dict(env)))
        time.sleep(self.seconds)
        answer = self.before(argv)
        if answer is not None:
            return answer
        if "venv" in argv:
            root = Path(argv[-1])
            (root / "bin").mkdir(parents=True)
            (root / "bin" / "python").symlink_to(sys.executable)
            packages = root / "lib" / "python{}.{}".format(*sys.version_info[:2]) / "site-packages"
            (packages / "two" / "lib").mkdir(parents=True)
            if self.journal:
                with open(self.journal, "a") as file:
                    file.write("built\n")
        return Outcome(0, ())
