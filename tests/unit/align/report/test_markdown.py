"""Foreign text in Markdown, judged by a parser that is not ours."""

from __future__ import annotations

import html
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from align.report.markdown import Markdown, escape, fence, visible

PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
SPECIAL = "\\`*_{}[]()<>#|~&$@^!+-=.:\"' \t\n1a中"


def tokens(text: str) -> Iterator[Token]:
    for token in PARSER.parse(text):
        yield token
        yield from token.children or ()


def said(text: str) -> str:
    """What a reader sees."""
    return "".join(token.content for token in tokens(text) if token.type in ("text", "text_special"))


def kinds(text: str) -> set[str]:
    return {token.type for token in tokens(text)}


PLAIN = {"paragraph_open", "paragraph_close", "inline", "text", "text_special"}
NASTY = [
    "<script>alert(1)</script>",
    "[a](http://x) ![b](c)",
    "**bold** __b__ *i* _i_ ~~s~~ `code`",
    "# heading",
    "- item",
    "+ item",
    "1. item",
    "12) item",
    "> quoted",
    "---",
    "===",
    "a | b",
    "&lt;b&gt; &amp;",
    "\\*",
    "    indented",
    "<http://x.y>",
    "- [ ] task",
    "```\nfence",
]


@pytest.mark.parametrize("text", NASTY)
def test_a_text_stays_text(text: str) -> None:
    shown = escape(text)
    assert kinds(shown) <= PLAIN
    assert said(shown) == " ".join(text.split())


@given(st.text(alphabet=SPECIAL, max_size=40))
def test_any_text_stays_text(text: str) -> None:
    assert kinds(escape(text)) <= PLAIN
    assert said(escape(text)) == " ".join(text.split())


@given(st.lists(st.text(alphabet=SPECIAL, min_size=1, max_size=20), min_size=2, max_size=4))
def test_any_text_stays_in_its_cell(texts: list[str]) -> None:
    head, bar = "|" + " h |" * len(texts), "|" + "---|" * len(texts)
    table = f"{head}\n{bar}\n|{'|'.join(f' {escape(text)} ' for text in texts)}|\n"
    cells = [token for token in tokens(table) if token.type == "inline"]
    assert len(cells) == 2 * len(texts)
    assert "html_inline" not in kinds(table)
    for text, cell in zip(texts, cells[len(texts) :], strict=True):
        assert "".join(one.content for one in cell.children or ()) == " ".join(text.split())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see http://evil.example", "see http\\://evil.example"),
        ("www.evil.example", "www\\.evil.example"),
        (":smile:", "\\:smile:"),
        ("user@host", "user\\@host"),
        ("0.5", "0.5"),
        ("layers.1.mlp.gate", "layers.1.mlp.gate"),
        (None, "None"),
    ],
)
def test_what_hosts_of_markdown_make_of_plain_text(text: str | None, shown: str) -> None:
    assert escape(text) == shown


def test_what_cannot_be_seen_is_shown() -> None:
    assert visible("a\u202eb\x1b[31m\x00") == "a\\u202eb\\u001b[31m\\u0000"
    assert visible("𝒳\U000e0041") == "𝒳\\U000e0041"
    assert visible("中文 é") == "中文 é"
    assert said(escape("a\u202eb")) == "a\\u202eb"


def test_markdown_is_not_escaped_twice() -> None:
    assert escape("a_b") == "a_b"  # between two letters it is text
    once = escape("a_")
    assert once == "a\\_"
    assert escape(once) is once
    assert isinstance(once, Markdown)


@given(st.text(alphabet="`~ a\n$", max_size=30))
def test_code_cannot_leave_its_block(text: str) -> None:
    blocks = [token for token in PARSER.parse(f"before\n\n{fence(text, 'sh')}\n\nafter") if token.type == "fence"]
    assert [block.content for block in blocks] == [text + "\n"]
    assert html.unescape(said("after")) == "after"
