"""Launching both sides, keeping watch over them, and ending everything that was started."""
