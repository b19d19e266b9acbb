"""The ``align`` command."""

from align.cli.app import main

__all__ = ["main"]
