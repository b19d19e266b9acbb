"""Command that builds the environments: ``python3 -m envs.bootstrap driver|lmdeploy|vllm|all|clean``.

It runs with the system's Python and the standard library alone, because it creates everything else.
"""

import sys

# First of all, and in syntax that older interpreters parse: the other modules need 3.11.
if not (3, 11) <= sys.version_info[:2] < (3, 12):
    sys.stderr.write(
        "align: Python 3.11 is needed, and {} is {}.{}: the engines' packages are published for 3.11\n"
        "→ install it (Debian: apt-get install python3.11 python3.11-venv) and name it: "
        "PYTHON=/path/to/python3.11 make env\n".format(sys.executable, *sys.version_info[:2])
    )
    raise SystemExit(2)

import argparse
import shlex
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import FrameType

from envs import run
from envs.build import NAMES, Builder, Environment
from envs.errors import EnvError
from envs.home import REPOSITORY, make_directory, os_error, write_atomically

#: Engines are built two at a time, after the driver has filled pip's cache with what they share.
_PARALLEL = 2


class Screen:
    """Progress lines of all builds on standard error, each with the name of its environment."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self._lock = threading.Lock()

    def say(self, name: str, line: str) -> None:
        """Print one line of the build of ``name``."""
        if not self.quiet:
            with self._lock:
                sys.stderr.write(f"[{name}] {line}\n")
                sys.stderr.flush()


def build(builder: Builder, names: Sequence[str], screen: Screen, rebuild: bool = False) -> dict[str, Environment]:
    """Return the finished environments ``names``; the driver is built first, the engines side by side.

    Raises:
        EnvError: at least one could not be built; the others were finished nevertheless.
    """
    done = {name: builder.environment(name) for name in names}
    missing = [name for name in names if rebuild or not done[name].ready]
    if not missing:
        return done
    start = time.monotonic()
    make_directory(builder.home)
    builder.check_space(missing)
    screen.say("align", f"building {', '.join(missing)} in {builder.home} (once; later runs start at once)")

    def one(name: str) -> Environment:
        return builder.ensure(name, lambda line: screen.say(name, line), rebuild=rebuild)

    if "driver" in missing:
        done["driver"] = one("driver")
        missing.remove("driver")
    errors: list[EnvError] = []
    with ThreadPoolExecutor(_PARALLEL) as pool:
        futures: dict[Future[Environment], str] = {pool.submit(one, name): name for name in missing}
        pending = set(futures)
        try:
            while pending:
                finished, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in finished:
                    try:
                        done[futures[future]] = future.result()
                    except EnvError as error:
                        errors.append(error)
                        if pending:
                            screen.say(futures[future], f"{error.message} (the other builds go on)")
        except BaseException:
            for future in pending:
                future.cancel()
            run.kill_all()
            raise
    if errors:
        message = "\n".join(str(error) for error in errors[:-1])
        raise EnvError(f"{message}\n{errors[-1].message}".strip(), errors[-1].hint)
    screen.say("align", f"all built after {time.monotonic() - start:.0f} s")
    return done


def write_launcher(builder: Builder, driver: Environment, checkout: Path = REPOSITORY) -> Path:
    """Write the command ``align`` of this checkout and return its path.

    Environments are shared by all checkouts, so the checkout is put on the path here and not installed.
    """
    import hashlib

    name = hashlib.sha256(str(checkout).encode()).hexdigest()[:12]
    path = builder.home / "bin" / name / "align"
    home, python, root = (shlex.quote(str(value)) for value in (builder.home, driver.python, checkout))
    # -P: a file in the current directory must not hide a module.
    text = (
        "#!/bin/sh\n"
        f'[ -n "$ALIGN_HOME" ] || ALIGN_HOME={home}\n'
        f"PYTHONPATH={root}\n"
        "export ALIGN_HOME PYTHONPATH\n"
        f'exec {python} -P -m align "$@"\n'
    )
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        make_directory(path.parent)
        try:
            write_atomically(path, text, mode=0o755)
        except OSError as error:
            raise os_error(error, path, "write the launcher") from error
    return path


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="envs.bootstrap", description="Build the environments that align and its engines run in."
    )
    parser.add_argument("what", choices=[*NAMES, "all", "clean"], help="environment to build, or clean: remove them")
    parser.add_argument("--print-python", action="store_true", help="print its interpreter (all: the driver's)")
    parser.add_argument("--print-launcher", action="store_true", help="print the path of this checkout's align command")
    parser.add_argument("--rebuild", action="store_true", help="build even if it is finished")
    parser.add_argument("--quiet", action="store_true", help="print errors alone")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 2 after an error, 128 + the signal that stopped it."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    screen = Screen(options.quiet)
    try:
        builder = Builder()
        if options.what == "clean":
            if builder.clean(lambda line: screen.say("align", line)) == 0:
                screen.say("align", f"nothing to remove in {builder.home}")
            return 0
        names = NAMES if options.what == "all" else (options.what,)
        done = build(builder, names, screen, options.rebuild)
        if options.print_python:
            print(done[names[0]].python)
        if options.print_launcher:
            print(write_launcher(builder, done.get("driver") or builder.ensure("driver")))
    except EnvError as error:
        if options.debug:
            raise
        sys.stderr.write(f"align: {error}\n")
        return error.exit_code
    except KeyboardInterrupt as stop:
        sys.stderr.write("align: interrupted; the unfinished environment is built anew next time\n→ make env\n")
        return 128 + int(stop.args[0] if stop.args else signal.SIGINT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
