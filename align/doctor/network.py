"""Sockets: the loopback interface, and a Ray cluster that the user named."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from align.doctor.types import Check, Machine, Needs

_SECONDS = 5.0


def examine_loopback(machine: Machine, needs: Needs) -> Iterator[Check]:
    """Ray and the engines' ranks talk over 127.0.0.1, on ports that the kernel chooses."""
    yield loopback()


def loopback(address: str = "127.0.0.1") -> Check:
    """Listen there, connect, and send a byte."""
    try:
        with socket.socket() as server:
            server.bind((address, 0))
            server.listen()
            server.settimeout(_SECONDS)
            port = server.getsockname()[1]
            with socket.create_connection((address, port), timeout=_SECONDS) as client, server.accept()[0] as accepted:
                client.sendall(b"x")
                accepted.settimeout(_SECONDS)
                accepted.recv(1)
    except OSError as error:
        reason = error.strerror or str(error)
        return Check("loopback", "missing", f"no connection over {address}: {reason}", "ip link set lo up")
    return Check("loopback", "ok", f"{address} connects")


def examine_ray_address(machine: Machine, needs: Needs) -> Iterator[Check]:
    """Only if it is set: the run joins that cluster then."""
    address = machine.environ.get("RAY_ADDRESS", "")
    if address:
        yield ray_address(address)


def ray_address(address: str) -> Check:
    """Args: ``host:port``, or one of Ray's other forms, which only Ray can try."""
    name, mend = "RAY_ADDRESS", "unset RAY_ADDRESS  # a run starts a cluster of its own then"
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in address:
        return Check(name, "unknown", f"{address} is not host:port; it is tried by the run", mend)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return Check(name, "missing", f"nothing answers at {address}: {reason}", mend)
    return Check(name, "ok", f"something listens at {address}")
