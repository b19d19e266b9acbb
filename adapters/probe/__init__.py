"""What all adapters share inside an engine's workers: arrival of the hooks, the spec they read, the log they write."""

from pathlib import Path

#: Belongs on the engine's PYTHONPATH: its entry points bring the hooks into every process.
PATH = Path(__file__).resolve().parent / "path"
