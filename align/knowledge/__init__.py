"""What is known about faults, as data: the kinds of findings, and every symptom, trap and exception of the seeds."""

from __future__ import annotations

from align.knowledge.load import Knowledge, knowledge
from align.knowledge.schema import LANGUAGES, PATHS_ZH, Entry, FileGroup, Language, Text

__all__ = ["LANGUAGES", "PATHS_ZH", "Entry", "FileGroup", "Knowledge", "Language", "Text", "knowledge"]
