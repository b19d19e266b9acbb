"""Serves one page to whoever knows the token in its address.

It listens on 127.0.0.1 alone and reads, nothing else: every other address, method or host is refused. The ``Host`` of a
request must be this machine's, so that a page elsewhere cannot reach it under a name of its own (DNS rebinding).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

LOCAL = "127.0.0.1"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
#: Characters of a checkpoint's name and of a step's number that are looked at.
_LONGEST = 256
#: Reads values: name of a checkpoint, step or ``None``.
Read = Callable[[str, int | None], dict[str, Any]]


class PageServer(ThreadingHTTPServer):
    """The page at ``/TOKEN/`` and values at ``/TOKEN/values``.

    Args:
        port: 0 for any that is free.
        page: HTML.
        read: gives values; called by one thread at a time.

    Raises:
        OSError: the port is taken.
    """

    daemon_threads = True

    def __init__(self, port: int, page: str, read: Read) -> None:
        self.page, self.read, self.token = page.encode(), read, secrets.token_urlsafe(24)
        self.reading = Lock()
        super().__init__((LOCAL, port), _Handler)

    @property
    def url(self) -> str:
        """Of the page, token included."""
        return f"http://{LOCAL}:{self.server_port}/{self.token}/"

    @property
    def hosts(self) -> frozenset[str]:
        """What a request may call this machine."""
        return frozenset(f"{name}:{self.server_port}" for name in (LOCAL, "localhost"))


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "align", ""
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _refuse(self) -> None:
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain; charset=utf-8", b"read only\n", close=True)

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = _refuse  # noqa: N815

    def _answer(self, body: bool) -> None:
        if self.headers.get("Host") not in self.server.hosts:
            self._send(HTTPStatus.FORBIDDEN, "text/plain; charset=utf-8", b"another host\n", body)
            return
        asked = urlsplit(self.path)
        token, _, what = asked.path.removeprefix("/").partition("/")
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self._send(HTTPStatus.FORBIDDEN, "text/plain; charset=utf-8", b"the address lacks its token\n", body)
        elif what == "":
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page, body)
        elif what == "values":
            self._values(parse_qs(asked.query), body)
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", b"nothing here\n", body)

    def _values(self, asked: dict[str, list[str]], body: bool) -> None:
        name, step = (asked.get(key, [""])[0][:_LONGEST] for key in ("name", "step"))
        if not name or (step and not step.isdecimal()):
            self._json(HTTPStatus.BAD_REQUEST, {"error": "name=CHECKPOINT and step=NUMBER are wanted"}, body)
            return
        try:
            with self.server.reading:
                found = self.server.read(name, int(step) if step else None)
        except LookupError as error:
            self._json(HTTPStatus.NOT_FOUND, {"error": str(error.args[0])}, body)
        except ValueError as error:
            self._json(HTTPStatus.UNPROCESSABLE_ENTITY, {"error": str(error)}, body)
        else:
            self._json(HTTPStatus.OK, found, body)

    def _json(self, status: HTTPStatus, content: dict[str, Any], body: bool) -> None:
        text = json.dumps(content, allow_nan=False)
        self._send(status, "application/json; charset=utf-8", text.encode(), body)

    def _send(self, status: HTTPStatus, kind: str, content: bytes, body: bool = True, close: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if close:  # what such a request carries is not read
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: addresses hold the token."""
