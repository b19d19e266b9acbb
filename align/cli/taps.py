"""``align taps``: where an engine yields each checkpoint."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from adapters.probe.taps import load_taps
from align.cli.output import print_json
from align.errors import EXIT_ALIGNED, UserError

_COLUMNS = ("checkpoint", "where", "pick", "transform", "inverse")


def execute(engine: str, json: bool = False) -> int:
    """Print the engine's table of taps.

    Raises:
        UserError: an engine without taps.
    """
    try:
        taps = load_taps(engine)
    except ValueError as error:
        raise UserError(str(error), "align taps lmdeploy, or align taps vllm") from None
    if json:
        rows = [{column: getattr(tap, column) for column in _COLUMNS} for tap in taps]
        print_json({"engine": engine, "taps": rows})
        return EXIT_ALIGNED
    console = Console(soft_wrap=False, emoji=False)
    if not console.is_terminal:  # for a file or another program: one row a line, tabs between
        print("\t".join(_COLUMNS))
        for tap in taps:
            print("\t".join(str(getattr(tap, column)) for column in _COLUMNS))
        return EXIT_ALIGNED
    table = Table(box=None, pad_edge=False)
    for column in _COLUMNS:
        table.add_column(column, overflow="fold")
    for tap in taps:
        table.add_row(*(Text(str(getattr(tap, column))) for column in _COLUMNS))
    console.print(table)
    return EXIT_ALIGNED
