"""Every kind of finding that the code can make has an entry under its own name, with the path it is reported on."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from align.collectives.explain import NEXT
from align.knowledge import knowledge
from align.trace.format import POSITIONS, TOKEN_IDS
from envs.home import REPOSITORY

#: Function that takes a finding's kind from a variable → the kinds it can be given. A new one needs a line here.
VARIABLE = {
    "align/compare/locate.py:_input_finding": (TOKEN_IDS, POSITIONS),
    "align/collectives/explain.py:told_by": tuple(dict.fromkeys(key.partition(" ")[0] for key in NEXT)),
    "align/drill/executor.py:refused": (TOKEN_IDS,),
}
#: Kinds of the table that are no findings: what ends a run with exit code 2, and what several runs say together.
NO_FINDINGS = {"condition", "unstable", "failed", "ladder"}


def findings(source: str, name: str) -> Iterator[tuple[str, str | None, str | None]]:
    """``(where, path, kind)`` of each ``Finding(…)`` in a module; ``None`` for what is no literal."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.Module)]
    for function in functions:
        where = f"{name}:{function.name}" if isinstance(function, ast.FunctionDef) else name
        for node in _own(function):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "Finding":
                given = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
                given.update(zip(("path", "kind"), node.args, strict=False))
                yield where, _literal(given.get("path")), _literal(given.get("kind"))


def _own(function: ast.AST) -> Iterator[ast.AST]:
    """Nodes below, without those of functions inside."""
    pending = list(ast.iter_child_nodes(function))
    while pending:
        node = pending.pop()
        if not isinstance(node, ast.FunctionDef):
            yield node
            pending += ast.iter_child_nodes(node)


def _literal(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def made() -> list[tuple[str, str | None, str]]:
    """Every ``(where, path, kind)`` of the package."""
    found = []
    for file in sorted((REPOSITORY / "align").rglob("*.py")):
        if file.is_relative_to(REPOSITORY / "align" / "fa"):
            continue  # findings there are of rules, which have a table of their own (align fa rules)
        name = str(Path(file).relative_to(REPOSITORY))
        for where, path, kind in findings(file.read_text(), name):
            kinds = VARIABLE.get(where, ()) if kind is None else (kind,)
            assert kinds, f"{where} takes the kind of a finding from a variable: name its kinds in VARIABLE"
            found += [(where, path, one) for one in kinds]
    return found


def test_the_reader_of_findings_sees_them_all() -> None:
    source = """
x = Finding("B", "one")
def outer():
    def inner(kind): return [findings.Finding(path="C", kind=kind)]
    class Local:
        def method(self): return Finding(*both) if y else Finding("A", kind="two", side=None)
"""
    assert sorted(findings(source, "m"), key=str) == sorted(
        [("m", "B", "one"), ("m:inner", "C", None), ("m:method", None, None), ("m:method", "A", "two")], key=str
    )


@pytest.mark.parametrize(("where", "path", "kind"), made(), ids=lambda part: str(part).rpartition("/")[2])
def test_a_kind_of_finding_has_an_entry(where: str, path: str | None, kind: str) -> None:
    entries = knowledge().entries
    assert kind in entries, f"{where} reports {kind!r}: describe it in align/knowledge/kinds.toml"
    if path is not None:
        assert path in entries[kind].paths, f"{where} reports {kind} on path {path}"


def test_no_entry_is_left_of_a_kind_that_nobody_reports() -> None:
    reported = {kind for _, _, kind in made()}
    assert {"weights", "operator", "unexplained", "slots", "tokens"} <= reported
    described = {name for name, entry in knowledge().entries.items() if not entry.of_a_seed}
    assert described == reported | NO_FINDINGS


def test_variables_are_given_the_kinds_that_are_declared() -> None:
    """What an input difference can be called, from the only module that makes them."""
    tree = ast.parse((REPOSITORY / "align" / "compare" / "histories.py").read_text())
    keys = {
        ast.unparse(node.args[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("InputDifference", "_difference")
    }
    assert keys == {"TOKEN_IDS", "POSITIONS", "key"}, "key is the argument that _difference hands on"
