"""Text for Markdown: whatever came from a model, a file or an engine appears as it is and never as markup.

Holds for CommonMark with the extensions of GitHub and GitLab: tables, bare links, mentions, emoji, formulas.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any

#: Characters that mean something anywhere in a line.
_SPECIAL = re.compile(r"([\\`*{}\[\]<>#|~&$@^])")
#: Underscores between two letters or digits are always text: ``rms_norm`` stays legible as it is.
_UNDERSCORES = re.compile(r"(?<![A-Za-z0-9_])_+|_+(?![A-Za-z0-9_])")
#: What would open a list, a heading's underline or a quotation at the beginning of a line.
_OPENING = re.compile(r"^()([-+=])")
_NUMBERED = re.compile(r"^(\d+)([.)])(?!\d)")
#: Bare links (http://, www.) and emoji (:name:).
_LINK = re.compile(r"(?i)\b(https?|ftp|mailto|xmpp|file)(:)")
_WWW = re.compile(r"(?i)\b(www)(\.)")
_EMOJI = re.compile(r":(?=[\w+-]+:)")


class Markdown(str):
    """Text that is Markdown already."""

    __slots__ = ()


def escape(value: Any) -> Markdown:
    """One line of Markdown that reads as ``value`` does. Line breaks become spaces; control characters, and those that
    turn the direction of the text, become visible.
    """
    if isinstance(value, Markdown):
        return value
    text = visible(" ".join(str(value).split()))
    text = _UNDERSCORES.sub(lambda run: r"\_" * len(run[0]), _SPECIAL.sub(r"\\\1", text))
    for pattern in (_OPENING, _NUMBERED, _LINK, _WWW):
        text = pattern.sub(r"\1\\\2", text)
    return Markdown(_EMOJI.sub(r"\\:", text))


def visible(text: str, keep: str = "") -> str:
    """The text with what cannot be seen written as ``\\u….``, but for ``keep``."""
    return "".join(
        one if one in keep or unicodedata.category(one) not in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") else _code(one)
        for one in text
    )


def _code(character: str) -> str:
    point = ord(character)
    return f"\\u{point:04x}" if point <= 0xFFFF else f"\\U{point:08x}"


def code(text: str) -> Markdown:
    """Code within a line that its text cannot leave; not for cells of tables, which a ``|`` ends even in code."""
    text = visible(" ".join(text.split()))
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    bar, space = "`" * (longest + 1), " " if longest else ""
    return Markdown(f"{bar}{space}{text}{space}{bar}")


def fence(text: str, language: str = "") -> Markdown:
    """A block of code that its text cannot leave."""
    text = visible(text, keep="\n\t")
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    bar = "`" * max(3, longest + 1)
    return Markdown(f"{bar}{language}\n{text}\n{bar}")
