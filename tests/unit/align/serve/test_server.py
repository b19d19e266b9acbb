"""The page over HTTP: to whoever has the address, on this machine alone, and nothing is ever written."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from align.serve.server import LOCAL, PageServer


def values(name: str, step: int | None) -> dict[str, Any]:
    if name == "damaged":
        raise ValueError("rank0/step1 cannot be read")
    if name == "digests":
        raise LookupError("no values of digests were kept")
    return {"name": name, "step": step}


@pytest.fixture
def server() -> Iterator[PageServer]:
    with PageServer(0, "<p>page é</p>", values) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def ask(server: PageServer, path: str, method: str = "GET", **headers: str) -> tuple[int, http.client.HTTPMessage, str]:
    connection = http.client.HTTPConnection(LOCAL, server.server_port, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


def test_the_page_is_at_its_token_alone(server: PageServer) -> None:
    status, headers, text = ask(server, f"/{server.token}/")
    assert (status, text) == (200, "<p>page é</p>")
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert (headers["Cache-Control"], headers["X-Content-Type-Options"]) == ("no-store", "nosniff")
    assert headers["Referrer-Policy"] == "no-referrer"
    assert len(server.token) >= 32 and server.url == f"http://127.0.0.1:{server.server_port}/{server.token}/"
    for path in ("/", "/favicon.ico", "/values?name=x", f"/{server.token}x/", f"/{server.token[:-1]}/", "//"):
        assert ask(server, path)[0] == 403, path
    assert ask(server, f"/{server.token}/../etc/passwd")[0] == 404
    assert ask(server, f"/{server.token}/", "HEAD")[0::2] == (200, "")


def test_another_host_is_refused(server: PageServer) -> None:
    path = f"/{server.token}/"
    assert ask(server, path, Host=f"localhost:{server.server_port}")[0] == 200
    for host in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1", "localhost:1", ""):
        assert ask(server, path, Host=host)[0] == 403, host


def test_nothing_can_be_changed(server: PageServer) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        assert ask(server, f"/{server.token}/", method)[0] == 405, method


def test_values_are_asked_for_by_name_and_step(server: PageServer) -> None:
    base = f"/{server.token}/values"
    status, headers, text = ask(server, f"{base}?name=layers.0.mid&step=3")
    assert (status, json.loads(text)) == (200, {"name": "layers.0.mid", "step": 3})
    assert headers["Content-Type"].startswith("application/json")
    assert json.loads(ask(server, f"{base}?name=embed")[2]) == {"name": "embed", "step": None}
    for asked, code, words in (
        ("", 400, "wanted"),
        ("?name=x&step=-1", 400, "wanted"),
        ("?name=digests", 404, "no values of digests"),
        ("?name=damaged", 422, "cannot be read"),
    ):
        status, _, text = ask(server, base + asked)
        assert status == code and words in json.loads(text)["error"], asked


def test_it_listens_on_this_machine_alone(server: PageServer) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"
    with pytest.raises(OSError, match="in use"):
        PageServer(server.server_port, "", values)
    with socket.create_connection((LOCAL, server.server_port), timeout=10) as raw:
        raw.sendall(b"nonsense\r\n\r\n")
        assert b"400" in raw.recv(200)
