"""Mirrors the registration of the ATB operators."""

from __future__ import annotations


def _register_atb_extensions() -> None:
    """The simulated ATB operators are registered with the package."""
