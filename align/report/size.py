"""Sizes in words."""

from __future__ import annotations


def size_text(count: int) -> str:
    """Bytes for people, in powers of ten."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"
