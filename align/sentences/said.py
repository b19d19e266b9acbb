"""One sentence: made as a key with values, read in a language.

Places of a sentence are those of :meth:`str.format`, and beyond them:

* a value that is there in each language (``{"en": …, "zh": …}``) is read in this one;
* a value that is a sentence itself is read in the same language, and a list is joined by what stands behind the colon
  (``{reasons:; }``; without it by a comma);
* ``{side!w}`` is looked up among the language's words: ``candidate`` is 候选侧 in Chinese;
* ``{rows:n row}`` is ``1 row`` or ``4 rows``;
* a number that JSON could not hold is text (``inf``) and stays so whatever format is asked for; ``None`` is ``?``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from string import Formatter
from typing import Any

from align.sentences.table import Sentences, sentences

#: ``{"say": KEY, NAME: VALUE, …}``, JSON-able.
Said = dict[str, Any]
_KEY = "say"
#: ``{rows:n row}``.
_COUNTED = "n "
#: Chinese has a space beside a name or a number that was filled in, and none between its own characters.
_BETWEEN = re.compile(r"(?<=[\u4e00-\u9fff]) (?=[\u4e00-\u9fff])")


def said(key: str, /, **values: Any) -> Said:
    """A sentence of the tables."""
    assert key in sentences("en").keyed, key
    return {_KEY: key, **values}


def raw(text: str) -> Said:
    """Text that nobody took apart: read as it is, and marked as a quotation in other languages."""
    return said("raw.text", text=text)


def in_both(texts: Mapping[str, str]) -> Said:
    """Text that is there in each language: ``{"en": …, "zh": …}``."""
    assert set(texts) == {"en", "zh"}, texts
    return said("raw.both", text=dict(texts))


def told(text: Said | str) -> Said:
    """A sentence as it is; text becomes one that nobody took apart."""
    return raw(text) if isinstance(text, str) else text


def counted(value: Any, noun: str) -> str:
    """A number with its noun: ``1 row``, ``4 rows``."""
    return f"{value} {noun}{'' if str(value) == '1' else 's'}"


def is_said(value: Any) -> bool:
    """Whether a value is a sentence."""
    return isinstance(value, Mapping) and isinstance(value.get(_KEY), str)


def text_of(sentence: Mapping[str, Any], language: str = "en") -> str:
    """A sentence in ``en`` or ``zh``.

    Raises:
        KeyError: no such sentence, or a value that it needs is not there, as in a result of another version.
    """
    table = sentences(language)
    text = _Filler(table, language).vformat(table.keyed[sentence[_KEY]], (), sentence)
    return text if language == "en" else _BETWEEN.sub("", text)


class _Filler(Formatter):
    def __init__(self, table: Sentences, language: str) -> None:
        self._table, self._language = table, language

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion != "w":
            return super().convert_field(value, conversion)
        return [self._word(one) for one in value] if isinstance(value, (list, tuple)) else self._word(value)

    def _word(self, value: Any) -> str:
        return self._table.words.get(str(value), str(value))

    def format_field(self, value: Any, format_spec: str) -> Any:
        if format_spec.startswith(_COUNTED):
            return counted("?" if value is None else value, format_spec.removeprefix(_COUNTED))
        if is_said(value):
            return text_of(value, self._language)
        if isinstance(value, Mapping) and self._language in value:
            return str(value[self._language])
        if isinstance(value, (list, tuple)):
            return (format_spec or ", ").join(str(self.format_field(one, "")) for one in value)
        if value is None:
            return "?"
        return str(value) if isinstance(value, str) else super().format_field(value, format_spec)
