"""The README's picture: what a command really prints on a terminal, as SVG.

    python -m tests.terminal_picture .readme/terminal.svg 'align run --model qwen3' COMMAND…

COMMAND runs on a pseudo-terminal of 100 columns; what its progress display erases is not in the picture.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 100, 50
#: A control sequence: parameters and final letter.
_CONTROL = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")


def printed(command: list[str]) -> str:
    """Everything that a command writes to a terminal, control sequences included."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        parts = []
        with contextlib.suppress(OSError):  # the other end is closed
            while part := os.read(ours, 1 << 16):
                parts.append(part)
        process.wait()
    os.close(ours)
    return b"".join(parts).decode(errors="replace")


def shown(text: str) -> list[str]:
    """The lines that stay on the screen, with their colours: what the progress display erases is gone."""
    lines, row = [""], 0
    place = 0
    while place < len(text):
        match = _CONTROL.match(text, place)
        if match is not None:
            numbers, letter = match.groups()
            if letter == "A":
                row = max(0, row - int(numbers or 1))
            elif letter == "K":
                lines[row] = ""
            elif letter == "m":
                lines[row] += match[0]
            place = match.end()
            continue
        character = text[place]
        if character == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
        elif character == "\r":
            if text[place + 1 : place + 2] != "\n" and not text.startswith("\x1b[2K", place + 1):
                lines[row] = ""
        else:
            lines[row] += character
        place += 1
    return lines


def main() -> None:
    target, title, *command = sys.argv[1:]
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))  # noqa: SIM115 - lives as long as this
    console.print(f"$ {title}", highlight=False)
    for line in shown(printed(command)):
        console.print(
            Text.from_ansi(line.replace(f"{Path.cwd()}/", "").replace(str(Path.home()), "~")), overflow="fold"
        )
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    picture = console.export_svg(title="align")
    # The picture must not load anything: viewers take their own monospaced font.
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
    Path(target).write_text(picture.replace("Fira Code", "ui-monospace, Menlo, Consolas"), encoding="utf-8")


if __name__ == "__main__":
    main()
