"""The commands about this machine, with their options: ``align doctor`` and ``align env``."""

from __future__ import annotations

from typing import Annotated

import typer

from align.cli.errors import guarded

Json = Annotated[bool, typer.Option("--json", help="Print an object on standard output, and nothing else there.")]
Debug = Annotated[bool, typer.Option(help="Show tracebacks.")]


def doctor_command(
    device: Annotated[str, typer.Option(help="simnpu (simulated, runs anywhere) or ascend.")] = "simnpu",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Say what is missing on this machine for a run, and the command that mends it.

    Looks at Python, disk, memory, limits, the environments and what is installed in them, models, sockets, and what
    earlier runs left. Nothing is changed. Exit code 0: nothing is missing (there may be warnings); 2: something is.

    Examples: `align doctor` · `align doctor --device ascend` · `align doctor --json` ·
    `align doctor | grep missing`
    """
    from align.cli import doctor as work

    raise typer.Exit(guarded(lambda: work.execute(device, json), debug, json))


env_app = typer.Typer(
    no_args_is_help=False,
    rich_markup_mode="markdown",
    help="List, build and remove the environments that the driver and the engines run in.",
    epilog=(
        "Examples: `align env` (lists them) · `align env build` · `align env build vllm --rebuild` · "
        "`align env clean --old`"
    ),
)


@env_app.callback(invoke_without_command=True)
def env_command(ctx: typer.Context, json: Json = False, debug: Debug = False) -> None:
    """List them, unless another command is named."""
    if ctx.invoked_subcommand is None:
        list_command(json, debug)
    elif json:
        raise typer.BadParameter(f"write it after {ctx.invoked_subcommand}", ctx, param_hint="--json")


@env_app.command("list")
def list_command(json: Json = False, debug: Debug = False) -> None:
    """Every environment: state, size, path, and the versions of its main packages.

    One of an old lock belongs to an older or to another checkout; `align env clean --old` removes those.

    Examples: `align env list` · `align env list --json`
    """
    from align.cli import env as work

    raise typer.Exit(guarded(lambda: work.list_all(json), debug, json))


@env_app.command("build")
def build_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="driver, lmdeploy, vllm or all.")] = "all",
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Build it anew, although it is built.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Build what is not built yet (minutes; needs a Python package index).

    A build that is stopped or killed is never taken for a finished one. Two builds of one environment wait for each
    other.

    Examples: `align env build` · `align env build lmdeploy` · `align env build vllm --rebuild`
    """
    from align.cli import env as work

    raise typer.Exit(guarded(lambda: work.build(name, rebuild, json), debug, json))


@env_app.command("clean")
def clean_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="lmdeploy, vllm, or a directory's name such as vllm-0123456789ab."),
    ] = None,
    old: Annotated[bool, typer.Option("--old", help="Those of other locks than this checkout's.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Remove environments. One that is being built, or that a process runs from, stays.

    Examples: `align env clean --old` · `align env clean vllm` · `align env clean vllm-0123456789ab`
    """
    from align.cli import env as work

    raise typer.Exit(guarded(lambda: work.clean(tuple(names or ()), old, json), debug, json))
