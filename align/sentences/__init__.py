"""Sentences as data: what a sentence says, apart from the language in which it is read.

Whoever finds something out makes the sentence as a key with numbers and names (:func:`said`); it is kept in results as
plain JSON, and :func:`text_of` reads it in English or Chinese from ``en.toml`` and ``zh.toml``. So a number is never
taken out of a text again, and a report in another language is not a translation of one.
"""

from align.sentences.said import Said, counted, in_both, is_said, raw, said, text_of, told
from align.sentences.table import LANGUAGES, sentences

__all__ = ["LANGUAGES", "Said", "counted", "in_both", "is_said", "raw", "said", "sentences", "text_of", "told"]
