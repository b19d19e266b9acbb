"""``align --version``: the versions of this checkout and of what its locks pin; nothing has to be built."""

from __future__ import annotations

import tomllib

from align.cli.output import print_json
from align.doctor.environments import MAIN_PACKAGES
from align.errors import EXIT_ALIGNED
from envs import lockfile
from envs.build import NAMES
from envs.home import REPOSITORY


def pinned() -> tuple[str, dict[str, dict[str, str]]]:
    """The version of this checkout, and by environment those of the main packages that its lock pins.

    Raises:
        EnvError: a damaged lock.
    """
    own: str = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    every = {name: lockfile.load(name).versions for name in NAMES}
    return own, {name: {one: of[one] for one in MAIN_PACKAGES if one in of} for name, of in every.items()}


def execute(json: bool) -> int:
    """Print them.

    Raises:
        EnvError: a damaged lock.
    """
    own, main = pinned()
    if json:
        print_json({"align": own, "environments": main})
        return EXIT_ALIGNED
    print(f"align {own}")
    for name, versions in main.items():
        ordered = sorted(versions.items(), key=lambda one: not one[0].startswith(name))  # the engine itself first
        print(f"{name} environment: {', '.join(f'{package} {version}' for package, version in ordered)}")
    return EXIT_ALIGNED
