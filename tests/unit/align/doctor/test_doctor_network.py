"""Loopback and a named Ray cluster, with real sockets."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from align.doctor.network import examine_loopback, examine_ray_address, loopback, ray_address
from align.doctor.types import Needs
from tests.unit.align.doctor.fakes import machine


def test_loopback(tmp_path: Path) -> None:
    (found,) = examine_loopback(machine(tmp_path), Needs())
    assert found.state == "ok"


def test_an_interface_that_is_not_there() -> None:
    found = loopback("192.0.2.1")  # reserved for documentation, so no machine has it
    assert (found.state, "Cannot assign requested address" in found.found) == ("missing", True)


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_a_cluster_that_answers(port: int) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
        server.listen()
        assert ray_address(f"127.0.0.1:{port}").state == "ok"


def test_a_cluster_that_does_not_answer(tmp_path: Path, port: int) -> None:
    (found,) = examine_ray_address(machine(tmp_path, environ={"RAY_ADDRESS": f"127.0.0.1:{port}"}), Needs())
    assert (found.state, found.mend.startswith("unset RAY_ADDRESS")) == ("missing", True)


@pytest.mark.parametrize(
    ("address", "state"), [("127.0.0.1:99999", "missing"), ("auto", "unknown"), ("ray://a:1", "unknown")]
)
def test_addresses_that_cannot_be_tried(address: str, state: str) -> None:
    assert ray_address(address).state == state


def test_without_an_address_nothing_is_said(tmp_path: Path) -> None:
    assert list(examine_ray_address(machine(tmp_path), Needs())) == []
