"""``--patch``: what can be known of a patch file without running it, which its imports allow in the engine only."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from pathlib import Path

from align.errors import UserError

_REMEDY = "correct the patch"
_FUNCTION = "apply"


def checked_patch(file: str) -> str:
    """The absolute path of a patch that compiles and defines ``apply``.

    Raises:
        UserError: it does not; names the file, and the line where there is one.
    """
    path = Path(file)
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise UserError(f"--patch file {file} {what}", "give a Python file that defines apply(ctx)")
    if path.suffix != ".py":
        raise UserError(f"--patch file {file} is not a Python file", "give a file whose name ends in .py")
    try:
        source = path.read_bytes()
    except OSError as error:
        raise UserError(f"--patch file {file} cannot be read: {error.strerror}", "make it readable") from error
    try:
        tree = ast.parse(source, file)
        compile(tree, file, "exec")  # finds what parsing alone lets pass, such as `return` outside of a function
    except SyntaxError as error:
        line = "" if error.lineno is None else f", line {error.lineno}"
        raise UserError(f"patch {file}{line}: {error.msg}", _REMEDY) from error
    except ValueError as error:  # null bytes, before Python 3.12
        raise UserError(f"patch {file}: {error}", _REMEDY) from error
    _require_apply(file, tree)
    return str(path.resolve())


def _require_apply(file: str, tree: ast.Module) -> None:
    lines: dict[str, int] = {}
    for node in _top_level(tree):
        if isinstance(node, ast.AsyncFunctionDef) and node.name == _FUNCTION:
            # Called, it would do nothing but make a coroutine.
            raise UserError(f"patch {file}, line {node.lineno}: apply(ctx) is asynchronous", "write `def apply(ctx):`")
        for name in _bound(node):
            lines.setdefault(name, getattr(node, "lineno", 1))
    if _FUNCTION in lines or "*" in lines:  # what a star brings is known only in the worker
        return
    near = difflib.get_close_matches(_FUNCTION, lines, n=1)
    guess = f"; line {lines[near[0]]} defines {near[0]}" if near else ""
    raise UserError(
        f"patch {file} defines no apply(ctx){guess}",
        f"{_REMEDY}: write `def apply(ctx):` at its top level, empty if only after_load is needed",
    )


def _top_level(tree: ast.AST) -> Iterator[ast.AST]:
    """Everything that runs when the file is loaded, so also below ``if`` and ``try``."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _top_level(node)


def _bound(node: ast.AST) -> tuple[str, ...]:
    """Names that one node gives a meaning in the file."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return (node.name,)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return (node.id,)
    if isinstance(node, ast.alias):
        return (node.asname or node.name,)
    return ()
