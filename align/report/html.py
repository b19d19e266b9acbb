"""``report.html``: the page of a result as one file that asks the network for nothing.

Everything that came from a model, an engine or a file is text: the templates escape, sentences are read as Markdown in
which there are neither links nor HTML, and the script builds its elements from text alone. The policy in the page's
head forbids everything but the one style sheet and the one script whose hashes it names.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

from align.report.page import data_of, page_of
from align.report.words import TEMPLATES, words_of
from align.result.plain import plain
from align.result.schema import Result

#: The chart library, with its licence: uPlot, a canvas that draws lines, in 51 kB and without dependencies.
CHARTS = "uplot"
#: Where a name may be broken.
_SEPARATORS = re.compile(r"([._/])(?=\w)")
#: Emphasis, code and escapes; neither HTML nor links nor images.
_MARKDOWN = MarkdownIt("zero", {"html": False}).enable(["emphasis", "backticks", "escape"])


def render(result: Result, lang: str = "en", served: bool = False) -> str:
    """The page, which ends with a line break.

    Args:
        served: it comes from ``align open`` and may ask that server, and nobody else, for captured values.
    """
    return render_page(page_of(result, lang), lang, served)


def render_page(page: Mapping[str, Any], lang: str, served: bool = False) -> str:
    """The same of what :func:`align.report.page.page_of` made."""
    words = words_of(lang)
    style, script = _style(), _script()
    text = (
        _environment()
        .get_template("page.html.jinja")
        .render(
            p=page,
            w=words,
            policy=policy(script, style, served),
            served=served,
            style=Markup(style),
            script=Markup(script),
            data=Markup(embedded(data_of(page))),
        )
    )
    return text.rstrip("\n") + "\n"


def policy(script: str, style: str, served: bool = False) -> str:
    """What the page may do: run its own script and style, and where it is served ask that server for values."""
    found = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return f"{found}; connect-src 'self'" if served else found


def embedded(data: Any) -> str:
    """JSON that no text in it can leave, for a ``script`` element of type ``application/json``.

    Numbers that are not finite are texts, as in a result: one NaN of an engine must not cost the page.
    """
    text = json.dumps(plain(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def inline(text: Any) -> Markup:
    """A sentence of Markdown as HTML."""
    return Markup(_MARKDOWN.renderInline(str(text)))


def breakable(text: Markup) -> Markup:
    """HTML whose long names may be broken behind their own separators, and not within a word."""
    parts = re.split(r"(<[^>]*>)", str(text))
    return Markup("".join(part if part.startswith("<") else _SEPARATORS.sub(r"\1<wbr>", part) for part in parts))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=lambda value: "" if value is None else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["md"] = inline
    environment.filters["breakable"] = breakable
    return environment


@cache
def _style() -> str:
    return "".join(_read(name) for name in (f"{CHARTS}/uPlot.min.css", "page.css"))


@cache
def _script() -> str:
    return "\n".join(_read(name) for name in (f"{CHARTS}/uPlot.iife.min.js", "page.js"))


def _read(name: str) -> str:
    text = (TEMPLATES / name).read_text(encoding="utf-8")
    assert "</s" not in text.lower(), f"{name} would end its element"
    return text


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
