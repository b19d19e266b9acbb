"""``align open``: the page of a run in a browser, with captured values on demand."""

from __future__ import annotations

import sys
import webbrowser
from contextlib import closing
from pathlib import Path

from align.errors import EXIT_ALIGNED, UserError
from align.report import html
from align.report.document import language
from align.report.read import read_result
from align.run.directory import RESULT
from align.serve.server import LOCAL, PageServer
from align.serve.values import Values


def execute(run: Path, lang: str, port: int, browser: bool) -> int:
    """Serve until Ctrl-C or ``kill``.

    Raises:
        UserError: there is no result, or the port cannot be had.
    """
    lang = language(lang)
    if not 0 <= port <= 65535:
        raise UserError(f"--port {port} is no port", "give a number from 1 to 65535, or 0 for any that is free")
    file = run / RESULT if run.is_dir() else run
    page = html.render(read_result(file), lang, served=True)
    with closing(Values(file.absolute().parent)) as values:
        try:
            server = PageServer(port, page, values.read)
        except OSError as error:
            hint = "choose another --port, or leave it out for any that is free"
            raise UserError(f"{LOCAL}:{port} cannot be used: {error.strerror or error}", hint) from error
        with server:
            print(f"open: {server.url}")
            print("for this machine alone, whoever has the address; Ctrl-C ends it")
            sys.stdout.flush()
            if browser:
                webbrowser.open(server.url)
            try:
                server.serve_forever(poll_interval=0.1)
            except KeyboardInterrupt:
                print("closed")
    return EXIT_ALIGNED
