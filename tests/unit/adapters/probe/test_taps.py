"""Taps in a toy model: where each tensor is taken, what is left when they are removed, and that the engine never
notices them."""

from __future__ import annotations

import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters.probe.picking import picker
from adapters.probe.routing import RoutingReplay
from adapters.probe.taps import ENGINES, PSEUDO, Tap, Taps, load_taps, locate, signatures
from adapters.probe.transforms import TRANSFORMS
from adapters.probe.transplant import Transplant
from align.checkpoints.table import Structure, kinds, structure_of
from align.models import gemma2, qwen_moe
from tests.unit.adapters.probe import toy_engine
from tests.unit.adapters.probe.toy_engine import Attention, Inherits, Toy, linear

MODULE = toy_engine.__name__
QWEN3 = Structure(
    tags=("all", "gqa", "dense", "qwen3"),
    layers=2,
    hidden=4,
    heads=2,
    kv_heads=1,
    head_dim=2,
    intermediate=3,
    vocab=5,
    eps=1e-6,
    rope={},
    scale=1.0,
)


class Sink:
    """Copies what it is given, as the recorder does."""

    def __init__(self, unwanted: str = "") -> None:
        self.active = True
        self.transplant: Transplant | None = None
        self.routing: RoutingReplay | None = None
        self.unwanted = unwanted
        self.seen: dict[tuple[str, int | None], Any] = {}
        self.failures: dict[tuple[str, int | None], Exception] = {}

    def wants(self, checkpoint: str, layer: int | None) -> bool:
        return checkpoint != self.unwanted

    def put(self, checkpoint: str, layer: int | None, value: Any) -> None:
        assert (checkpoint, layer) not in self.seen
        self.seen[checkpoint, layer] = value.clone() if isinstance(value, Tensor) else value

    def fail(self, checkpoint: str, layer: int | None, error: Exception) -> None:
        self.failures[checkpoint, layer] = error


@pytest.fixture(autouse=True)
def _untouched() -> Iterator[None]:
    """Nothing of a test is left in the module or in its classes."""
    classes = [thing for thing in vars(toy_engine).values() if isinstance(thing, type)]
    before = dict(vars(toy_engine)), [dict(vars(cls)) for cls in classes]
    yield
    assert (dict(vars(toy_engine)), [dict(vars(cls)) for cls in classes]) == before


def tap(checkpoint: str, site: str, attribute: str, where: str, pick: str, transform: str) -> Tap:
    if attribute.count(">"):
        outer, _, inner = attribute.partition(">")
        attribute = f"{outer}>{MODULE}:{inner}"
    return Tap(checkpoint, site, attribute, where if where.startswith("*") else f"{MODULE}:{where}", pick, transform)


ATTENTION = "layers.{i}.self_attn"
TAPS = (
    tap("token_ids", "", "forward", "*:forward", "in.input_ids", "flat"),
    tap("block_in", "layers.{i}", "forward", "Layer.forward", "out.1|in.x", "rows"),
    tap("attn.q", f"{ATTENTION}.qkv_proj", "forward", "*:forward", "out", "qkv.q"),
    tap("attn.k", f"{ATTENTION}.qkv_proj", "forward", "*:forward", "out", "qkv.k"),
    tap("attn.v", f"{ATTENTION}.qkv_proj", "forward", "*:forward", "out", "qkv.v"),
    tap("attn.q_rope", f"{ATTENTION}.rotary_emb", "forward", "Rotary.forward", "out.0", "heads"),
    tap("attn.k_rope", f"{ATTENTION}.rotary_emb", "forward", "Rotary.forward", "out.1", "heads"),
    tap("attn.key_states", ATTENTION, "attend>Inherits.write", "Inherits.write", "in.key", "heads"),
    tap("attn.value_states", ATTENTION, "attend", "Attention.attend", "in.value", "heads"),
    tap("attn.o_partial", f"{ATTENTION}.o_proj", "forward>linear", "linear", "out", "rows"),
    tap("attn.o", f"{ATTENTION}.o_proj", "forward", "Output.forward", "out", "rows"),
)
TP2 = Structure(**{**QWEN3.__dict__, "tp": 2, "heads": 4, "kv_heads": 2, "intermediate": 6})


def run(taps: tuple[Tap, ...] = TAPS, sink: Sink | None = None, structure: Structure = TP2) -> tuple[Sink, Taps, Toy]:
    sink, model = sink or Sink(), Toy()
    hung = Taps(taps, model, structure, 0, sink)
    model(torch.tensor([1, 2, 3]))
    hung.remove()
    return sink, hung, model


def test_every_tensor_is_taken_where_it_is_made() -> None:
    sink, hung, model = run()
    assert (hung.missing, sink.failures) == ({}, {})
    x = torch.tensor([1.0, 2.0, 3.0])[:, None].repeat(1, 4)
    assert torch.equal(sink.seen["token_ids", None], torch.tensor([1, 2, 3]))
    for layer in (0, 1):
        weight = model.attention(layer).qkv_proj.weight.detach()
        q, k, v = (x @ weight.T).split([4, 2, 2], dim=-1)
        expected = {
            "block_in": x if layer == 0 else 2 * x,
            "attn.q": q.reshape(3, 2, 2),
            "attn.k": k.reshape(3, 1, 2),
            "attn.v": v.reshape(3, 1, 2),
            "attn.q_rope": q.reshape(3, 2, 2) + 100,
            "attn.k_rope": k.reshape(3, 1, 2) + 200,
            "attn.key_states": k.reshape(3, 1, 2) + 200,
            "attn.value_states": v.reshape(3, 1, 2),
            "attn.o_partial": (q + 100) * 2,
            "attn.o": (q + 100) * 2 + 5,
        }
        for name, value in expected.items():
            assert torch.allclose(sink.seen[name, layer], value, atol=1e-5), f"{name} of layer {layer}"
    assert {layer for _, layer in sink.seen} == {None, 0, 1}


def test_a_patch_without_a_signature_hides_no_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters are those of the engine's own function, read before a patch took its place."""
    written = tap("attn.key_states", ATTENTION, "attend", "Attention.attend", "in.query", "heads")
    known = signatures((written,))
    original = toy_engine.Attention.attend
    with monkeypatch.context() as patched:
        patched.setattr(toy_engine.Attention, "attend", lambda self, *args, **kwargs: original(self, *args, **kwargs))
        for given, seen in ((None, False), (known, True)):
            sink, model = Sink(), Toy()
            hung = Taps((written,), model, TP2, 0, sink, given)
            model(torch.tensor([1, 2, 3]))
            hung.remove()
            assert (("attn.key_states", 0) in sink.seen) is seen


def test_removal_leaves_nothing() -> None:
    model = Toy()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    reference = model(torch.tensor([1, 2]))
    sink = Sink()
    hung = Taps(TAPS, model, TP2, 0, sink)
    assert toy_engine.linear is not linear
    hung.remove()
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert torch.equal(model(torch.tensor([1, 2])), reference)
    assert sink.seen == {}


def test_an_attribute_of_the_object_itself_is_put_back() -> None:
    model = Toy()
    own = model.layers[0].forward
    model.layers[0].forward = own
    hung = Taps(TAPS, model, TP2, 0, Sink())
    assert vars(model.layers[0])["forward"] is not own
    hung.remove()
    assert vars(model.layers[0])["forward"] is own
    assert "forward" not in vars(model.layers[1])


def test_nothing_is_taken_between_steps() -> None:
    sink = Sink()
    sink.active = False
    run(sink=sink)
    assert sink.seen == {}


def test_what_nobody_wants_is_not_taken() -> None:
    sink, _, _ = run(sink=Sink(unwanted="attn.k"))
    assert ("attn.k", 0) not in sink.seen
    assert ("attn.v", 0) in sink.seen


def test_checkpoints_that_the_model_does_not_have_are_not_hung_up() -> None:
    sink, hung, _ = run(structure=QWEN3)
    assert hung.missing == {}
    assert not any(name == "attn.o_partial" for name, _ in sink.seen), "there is none without tensor parallelism"


def test_an_error_inside_a_tap_never_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(Sink):
        def put(self, checkpoint: str, layer: int | None, value: Any) -> None:
            raise MemoryError("no room")

    sink = Full()
    _, _, model = run(sink=sink)
    assert {name for name, _ in sink.failures} == {one.checkpoint for one in TAPS}
    assert all(str(error) == "no room" for error in sink.failures.values())
    assert torch.equal(model(torch.tensor([1])), torch.ones(1, 4))


def test_a_tensor_of_another_shape_is_a_failure() -> None:
    wrong = tap("attn.q", ATTENTION, "forward", "Attention.forward", "out", "qkv.q")
    sink, _, _ = run((wrong,))
    assert isinstance(sink.failures["attn.q", 1], RuntimeError)
    assert sink.seen == {}


def test_an_error_of_the_engine_passes_and_the_next_step_is_taken() -> None:
    model, sink = Toy(), Sink()
    hung = Taps(TAPS, model, TP2, 0, sink)
    model.fails = True
    with pytest.raises(LookupError, match="of the engine"):
        model(torch.tensor([1, 2]))
    model.fails = False
    sink.seen.clear()
    model(torch.tensor([4]))
    hung.remove()
    assert sink.seen["token_ids", None].tolist() == [4]
    assert len(sink.seen) == 1 + 2 * (len(TAPS) - 1)


def test_an_error_inside_a_site_leaves_no_inner_tap_armed() -> None:
    """A function that failed inside one site must not be tapped when something else calls it."""
    model, sink = Toy(), Sink()
    hung = Taps(TAPS, model, TP2, 0, sink)
    with pytest.raises(RuntimeError):
        model.attention(0).o_proj(torch.zeros(2, 3))
    toy_engine.linear(torch.zeros(2, 4), torch.zeros(4, 4))
    hung.remove()
    assert ("attn.o_partial", 0) not in sink.seen


def test_inner_functions_are_tapped_inside_their_site_alone() -> None:
    model, sink = Toy(), Sink()
    hung = Taps(TAPS, model, TP2, 0, sink)
    toy_engine.linear(torch.zeros(2, 4), torch.zeros(4, 4))
    Inherits.write(torch.ones(1), torch.ones(1))
    hung.remove()
    assert sink.seen == {}


@pytest.mark.parametrize("method", ["write", "write_class", "write_object"])
def test_functions_of_a_class_keep_their_kind(method: str) -> None:
    """Static, of the class, of the object: called as before, arguments found by name."""
    inner = tap("attn.key_states", ATTENTION, f"attend>Inherits.{method}", f"Inherits.{method}", "in.key", "heads")
    model, sink = Toy(), Sink()
    hung = Taps((inner,), model, TP2, 0, sink)
    assert Inherits.write_class(torch.ones(3)) == "Inherits 3"
    assert Inherits().write_object(torch.ones(1)).tolist() == [2.0]
    model(torch.tensor([1, 2, 3]))
    hung.remove()
    assert sink.failures == {}
    assert sink.seen["attn.key_states", 1].shape == (3, 1, 2)
    assert Inherits.write_class(torch.ones(3)) == "Inherits 3"


@pytest.mark.parametrize(
    "broken",
    [
        tap("attn.q", "layers.{i}.attention", "forward", "Attention.forward", "out", "qkv.q"),
        tap("attn.q", "layers.{i}.self_attn.qkv_proj.3", "forward", "Attention.forward", "out", "qkv.q"),
        tap("attn.q", ATTENTION, "forwards", "Attention.forward", "out", "qkv.q"),
        tap("attn.q", ATTENTION, "forward", "Attention.invented", "out", "qkv.q"),
        tap("attn.q", ATTENTION, "forward>invented", "linear", "out", "qkv.q"),
        Tap("attn.q", ATTENTION, "forward", "no_such_module:f", "out", "qkv.q"),
    ],
)
def test_what_cannot_be_hung_up_is_named_and_costs_nothing_else(broken: Tap) -> None:
    sink, hung, _ = run((broken, *(one for one in TAPS if one.checkpoint != "attn.q")))
    assert set(hung.missing) == {"layers.0.attn.q", "layers.1.attn.q"}
    assert broken.where in hung.missing["layers.1.attn.q"]
    assert ("attn.k", 1) in sink.seen
    assert not any(name == "attn.q" for name, _ in sink.seen)


def test_a_layer_that_is_built_otherwise_is_missing_alone() -> None:
    model = Toy()
    del model.attention(1).qkv_proj
    hung = Taps(TAPS, model, TP2, 0, Sink())
    hung.remove()
    assert set(hung.missing) == {"layers.1.attn.q", "layers.1.attn.k", "layers.1.attn.v"}


# ------------------------------------------------------------------------------------------------------- picking


@pytest.mark.parametrize(
    ("pick", "result", "expected"),
    [
        ("out", 7, 7),
        ("out.1", (7, 8), 8),
        ("in.a", None, "first"),
        ("in.b", None, "second"),
        ("in.c.inner.value", None, 3),
        ("out.1|in.a", (7, 8), 8),
        ("out.1|in.a", 7, "first"),
        ("out.1|in.a", (7, None), "first"),
        ("out.0|out", (7, 8), 7),
        ("out.0|out", 9, 9),
    ],
)
def test_what_is_picked(pick: str, result: Any, expected: Any) -> None:
    inner = SimpleNamespace(inner=SimpleNamespace(value=3))
    assert picker(pick, ("a", "b", "c"))(("first",), {"b": "second", "c": inner}, result) == expected


@pytest.mark.parametrize("pick", ["out", "out.2", "in.unknown", "in.c", "in.a.value", "out.1|in.b.value"])
def test_what_is_not_there(pick: str) -> None:
    with pytest.raises(LookupError, match="the call has no"):
        picker(pick, ("a", "b", "c"))(("first", "second"), {}, ())


def test_locate() -> None:
    assert locate(f"{MODULE}:Attention.attend") is Attention.attend
    with pytest.raises(AttributeError):
        locate(f"{MODULE}:Attention.invented")
    with pytest.raises(ImportError):
        locate("no_such_module:f")


# -------------------------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize("engine", ENGINES)
def test_a_table_has_every_checkpoint_once(engine: str) -> None:
    gemma = structure_of(gemma2.CONFIG)
    grouped = [structure_of(qwen_moe.QWEN3_MOE_CONFIG, 1, dp) for dp in (1, 2)]  # two gather before the experts
    for structure in (gemma, *grouped):
        names = [one.checkpoint for one in load_taps(engine) if one.holds(structure)]
        assert len(names) == len(set(names))
    assert set(names) == {*PSEUDO, *kinds()}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_table_is_well_formed(engine: str) -> None:
    for one in load_taps(engine):
        assert one.transform in TRANSFORMS
        per_layer = one.checkpoint in kinds() and kinds()[one.checkpoint].per_layer
        assert ("{i}" in one.site) >= per_layer, one
        choices = one.pick.replace("+", "|").split("|")
        assert all(choice.split(".")[0] in ("in", "out", "late") for choice in choices)
        inner = one.attribute.partition(">")[2]
        assert not inner or inner == one.where, "what is picked are the arguments of what is wrapped"


def test_an_engine_without_a_table() -> None:
    with pytest.raises(ValueError, match="there are no taps for 'other'; valid: lmdeploy, vllm"):
        load_taps("other")


def test_two_things_of_one_call_and_a_field_of_its_result() -> None:
    """Weights of experts mean nothing without their ids; some engines return their results as a dataclass."""
    parts = picker("late.b+out.1", ("a", "b"))
    assert parts(("first", "second"), {}, ("x", "y")) == ("second", "y")
    with pytest.raises(LookupError, match=r"no late.b\+out.1"):
        parts(("first",), {}, ("x", "y"))
    result = types.SimpleNamespace(routed=types.SimpleNamespace(rows=7))
    assert picker("out.routed.rows", ())((), {}, result) == 7
    with pytest.raises(LookupError):
        picker("out.absent", ())((), {}, result)
    assert not tap("moe.topk_weights", "layers.{i}", "forward", "Layer.forward", "late.x", "rows").before
