"""Mirrors the path checks that engines import."""

from __future__ import annotations


class PathManager:
    @classmethod
    def check_directory_path_readable(cls, path: str) -> None:
        """Real operator libraries are files; the simulation's operators are Python, so nothing is to be read."""
