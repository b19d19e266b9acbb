"""Patches: what they replace comes back, and what is wrong with one is said by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from adapters.mistakes import Mistake, read_mistake
from adapters.probe import steplog
from adapters.probe.patch import PatchContext, Patches
from adapters.probe.spec import ProbeSpec, RequestSpec, write_spec


class Base:
    value = 1

    def method(self) -> str:
        return "base"

    @staticmethod
    def static(x: int) -> str:
        return f"static {x}"

    @classmethod
    def of_class(cls, x: int) -> str:
        return f"{cls.__name__} {x}"


class Derived(Base):
    """Has nothing of its own."""


@pytest.fixture(autouse=True)
def _untouched() -> Iterator[None]:
    before = dict(vars(Base)), dict(vars(Derived))
    yield
    assert (dict(vars(Base)), dict(vars(Derived))) == before


@pytest.fixture
def context() -> Iterator[PatchContext]:
    made = PatchContext("candidate", "lmdeploy", 3, 1, 1, 0, (2, 2, 1))
    yield made
    made.undo()


def test_replaced_and_put_back(context: PatchContext) -> None:
    context.replace(Base, "method", lambda self: "other")
    assert (Base().method(), Derived().method()) == ("other", "other")
    context.undo()
    assert Base().method() == "base"
    context.undo()
    assert Base().method() == "base"


def test_the_last_replacement_is_undone_first(context: PatchContext) -> None:
    original = Base.method
    context.replace(Base, "method", lambda self: "one")
    first = Base.method
    context.replace(Base, "method", lambda self: first(self) + " two")
    context.replace(Derived, "method", lambda self: "derived")
    assert (Base().method(), Derived().method()) == ("one two", "derived")
    context.undo()
    assert Base.method is original
    assert "method" not in vars(Derived), "what was inherited is inherited again"


def test_static_and_class_methods_keep_their_kind(context: PatchContext) -> None:
    context.replace(Base, "static", lambda x: f"new {x}")
    context.replace(Base, "of_class", lambda cls, x: f"new {cls.__name__} {x}")
    assert (Base.static(1), Base().static(2)) == ("new 1", "new 2")
    assert (Base.of_class(1), Derived().of_class(2)) == ("new Base 1", "new Derived 2")
    context.replace(Derived, "static", lambda x: f"inherited {x}")
    assert Derived().static(3) == "inherited 3"
    context.undo()
    assert (Base.static(1), Derived.of_class(2)) == ("static 1", "Derived 2")


def test_a_wrapped_function_is_taken_as_it_is(context: PatchContext) -> None:
    context.replace(Base, "static", staticmethod(lambda x: f"wrapped {x}"))
    assert Base().static(1) == "wrapped 1"


def test_objects_and_modules(context: PatchContext) -> None:
    one, other = Base(), Base()
    namespace = SimpleNamespace(function=len)
    context.replace(one, "method", lambda: "mine")
    context.replace(one, "static", lambda x: f"mine {x}")
    context.replace(namespace, "function", sum)
    assert (one.method(), one.static(1), other.method(), namespace.function([1, 2])) == ("mine", "mine 1", "base", 3)
    context.undo()
    assert (one.method(), vars(one), namespace.function([1, 2])) == ("base", {}, 2)


def test_a_parameter_of_a_torch_module_comes_back(context: PatchContext) -> None:
    """It is not in the object's own dictionary."""
    layer = nn.Linear(2, 2)
    weight, doubled = layer.weight, nn.Parameter(layer.weight.detach() * 2)
    context.replace(layer, "weight", doubled)
    assert layer.weight is doubled
    assert dict(layer.named_parameters())["weight"] is doubled
    context.undo()
    assert layer.weight is weight
    assert list(dict(layer.named_parameters())) == ["weight", "bias"]


@pytest.mark.parametrize("at", [..., 1, slice(0, 2), [0, 2], (slice(None), 1)])
def test_values_that_were_assigned_come_back(at: Any, context: PatchContext) -> None:
    weight = nn.Parameter(torch.arange(12.0).reshape(3, 4))
    before = weight.detach().clone()
    context.assign(weight, 7.5, at)
    wanted = before.clone()
    wanted[at] = 7.5
    assert torch.equal(weight, wanted) and not torch.equal(weight, before)
    context.assign(weight, -wanted[at], at)
    wanted[at] = -7.5
    assert torch.equal(weight, wanted)
    context.undo()
    assert torch.equal(weight, before) and weight.requires_grad


def test_values_are_assigned_in_the_dtype_of_the_weight(context: PatchContext) -> None:
    weight = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    context.assign(weight, torch.tensor([1.0009765625, 3.0]), 0)
    assert weight[0].tolist() == [1.0, 3.0]
    with pytest.raises(RuntimeError):
        context.assign(weight, torch.ones(3), 0)


def test_outside_of_a_step_there_is_none(
    context: PatchContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(steplog, "_log", None)
    assert (context.step, context.rows) == (-1, ())
    log = steplog.StepLog(tmp_path, 0)
    monkeypatch.setattr(steplog, "_log", log)
    write_spec(tmp_path, ProbeSpec(1, 1, {"k": RequestSpec("a", 3, 4), "l": RequestSpec("b", 2, 4)}))
    assert context.step == -1
    log.step([("k", 0, 3), ("l", 0, 2)])
    log.step([("k", 3, 1), ("l", 2, 1)])
    log.order(["l", "k"])
    assert context.step == 1
    assert [(row.request, row.start, row.count) for row in context.rows] == [("b", 2, 1), ("a", 3, 1)]
    log.dummy()
    assert (context.step, context.rows) == (-1, ())


def test_a_misspelt_attribute_is_an_error(context: PatchContext) -> None:
    with pytest.raises(AttributeError, match="metod"):
        context.replace(Base, "metod", lambda self: "other")
    assert not hasattr(Base, "metod")


def test_what_cannot_be_replaced_does_not_stop_the_undoing(context: PatchContext) -> None:
    context.replace(Base, "method", lambda self: "other")
    with pytest.raises(TypeError):
        context.replace(int, "bit_length", lambda self: 0)
    context.undo()
    assert Base().method() == "base"


# --------------------------------------------------------------------------------------------------------- files


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> type[Base]:
    """The class where patch files can import it from."""
    module: Any = SimpleNamespace(Base=Base)
    monkeypatch.setitem(__import__("sys").modules, "patched_by_a_test", module)
    return Base


HEADER = "from patched_by_a_test import Base\n"
REPLACE = HEADER + (
    "def apply(ctx):\n    original = Base.method\n    ctx.replace(Base, 'method', lambda self: original(self) + '{}')\n"
)


def write(directory: Path, **texts: str) -> list[str]:
    paths = []
    for name, text in texts.items():
        path = directory / f"{name}.py"
        path.write_text(text)
        paths.append(str(path))
    return paths


def test_files_apply_in_order_and_are_removed(tmp_path: Path, base: type[Base], context: PatchContext) -> None:
    patches = Patches(write(tmp_path, one=REPLACE.format(" one"), two=REPLACE.format(" two")), context)
    assert base().method() == "base", "loading changes nothing"
    patches.apply()
    assert base().method() == "base one two"
    patches.remove()
    assert base().method() == "base"


def test_what_a_patch_knows(tmp_path: Path, context: PatchContext) -> None:
    text = (
        "def apply(ctx):\n"
        "    global before\n"
        "    before = (ctx.side, ctx.engine, ctx.rank, ctx.tp_rank, ctx.dp_rank, ctx.ep_rank, ctx.layout, ctx.model)\n"
        "def after_load(ctx):\n"
        "    ctx.model.weight.data[0] *= 2\n"
        "    ctx.model.seen = before\n"
    )
    patches = Patches(write(tmp_path, knows=text, other="def apply(ctx):\n    pass\n"), context)
    model = nn.Linear(2, 2)
    row = model.weight.detach()[0].clone()
    patches.apply()
    patches.after_load(model)
    assert model.seen == ("candidate", "lmdeploy", 3, 1, 1, 0, (2, 2, 1), None)
    assert torch.equal(model.weight[0], 2 * row)


def test_an_apply_that_fails_is_undone_and_named(tmp_path: Path, base: type[Base], context: PatchContext) -> None:
    bad = HEADER + "def apply(ctx):\n    ctx.replace(Base, 'value', 2)\n    ctx.replace(Base, 'invented', 3)\n"
    patches = Patches(write(tmp_path, good=REPLACE.format(" good"), bad=bad), context)
    with pytest.raises(ValueError, match=r"bad\.py: apply\(ctx\) failed: AttributeError: .*invented.* \(line 4\)$"):
        patches.apply()
    assert (base().method(), base.value) == ("base", 1)


def test_the_line_is_the_patchs_own_however_deep_the_error(tmp_path: Path, context: PatchContext) -> None:
    text = "import json\n\ndef inner():\n    json.loads('{')\n\ndef apply(ctx):\n    inner()\n"
    patches = Patches(write(tmp_path, deep=text), context)
    with pytest.raises(Mistake, match=r"JSONDecodeError: .* \(line 4\)$"):
        patches.apply()


def test_a_mistake_is_left_where_the_driver_looks(
    tmp_path: Path, context: PatchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine may keep a worker's exception to itself."""
    monkeypatch.setenv("ALIGN_PROBE_DIR", str(tmp_path))
    patches = Patches(write(tmp_path, bad="def apply(ctx):\n    1 / 0\n"), context)
    assert read_mistake(tmp_path) is None
    with pytest.raises(Mistake) as caught:
        patches.apply()
    left = read_mistake(tmp_path)
    assert left is not None
    assert (str(left), left.hint) == (str(caught.value), "correct the patch")
    assert [path.name for path in tmp_path.glob("mistake*")] == ["mistake.json"]


def test_an_after_load_that_fails_is_undone_and_named(tmp_path: Path, base: type[Base], context: PatchContext) -> None:
    text = REPLACE.format(" x") + "def after_load(ctx):\n    ctx.model.layers[7]\n"
    patches = Patches(write(tmp_path, late=text), context)
    patches.apply()
    with pytest.raises(ValueError, match=r"late\.py: after_load\(ctx\) failed: AttributeError"):
        patches.after_load(nn.Linear(2, 2))
    assert base().method() == "base"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def aply(ctx):\n    pass\n", r"has no apply\(ctx\)"),
        ("apply = 3\n", r"has no apply\(ctx\)"),
        ("def apply(ctx:\n", "cannot be loaded: SyntaxError"),
        ("import no_such_module\n", "cannot be loaded: ModuleNotFoundError"),
    ],
)
def test_files_that_are_no_patches(tmp_path: Path, context: PatchContext, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=rf"patch .*wrong\.py {words}"):
        Patches(write(tmp_path, wrong=text), context)


def test_files_that_cannot_be_read(tmp_path: Path, context: PatchContext) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.py cannot be loaded: FileNotFoundError"):
        Patches([str(tmp_path / "nowhere.py")], context)
    with pytest.raises(ValueError, match=r"notes\.txt is not a Python file"):
        Patches([str(tmp_path / "notes.txt")], context)
