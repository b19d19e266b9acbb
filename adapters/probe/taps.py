"""Where an engine yields each checkpoint: a table per engine, and what hangs it into a live model.

Each row of ``adapters/ENGINE/taps.tsv`` says: the checkpoint; the *site*, a path from the model's root to an object
(``{i}`` is the layer); the *attribute* of that object that is wrapped; *where* its code stands
(``module:Class.method``, ``*`` for the model's own class); what to *pick* of a call; and the *transform* to canonical
form; and *when*: ``gathered`` where data-parallel groups gather their tokens before the experts, ``apart`` where they
do not, a tag of the models that it is for (``!`` before it: of those that it is not for), nothing for always.

``pick`` is ``out``, ``out.1``, ``out.NAME`` or ``in.NAME`` with attributes behind it; ``a|b`` takes the first that is
there, ``a+b`` both, for a transform of two. What is picked of the arguments alone is taken before the call, because
kernels may write in place; ``late.NAME`` is an argument as the call leaves it. An attribute
``forward>module:name`` wraps the function ``name`` while the site's ``forward`` runs: what is computed inside.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from adapters.probe.callbook import Tapped
from adapters.probe.callsite import definition
from adapters.probe.picking import picker
from adapters.probe.routing import CHOICE, Call, RoutingReplay
from adapters.probe.transforms import TRANSFORMS, Dims
from adapters.probe.transplant import Transplant
from align.checkpoints.table import Structure, kinds

#: Rows that are no checkpoints but say what the rows of a step are.
PSEUDO = ("token_ids", "positions", "block_tables")
ENGINES = ("lmdeploy", "vllm")
_GATHERING = ("gathered", "apart")
_FIELDS = ("checkpoint", "site", "attribute", "where", "pick", "transform", "when")


@dataclass(frozen=True)
class Tap:
    """One row of an engine's table; ``inverse`` is how the native tensor is rebuilt, in words."""

    checkpoint: str
    site: str
    attribute: str
    where: str
    pick: str
    transform: str
    when: str = ""

    def holds(self, structure: Structure) -> bool:
        """Whether the engine yields it here, of this model in this layout."""
        if self.when in _GATHERING:
            return self.when == _GATHERING[0 if structure.gathers_experts else 1]
        return structure.tagged(self.when)

    @property
    def inverse(self) -> str:
        return TRANSFORMS[self.transform].undo

    @property
    def before(self) -> bool:
        """Whether it is taken before the call."""
        return all(choice.startswith("in.") for choice in self.pick.split("|"))

    @property
    def of_sum(self) -> bool:
        """Whether it is the sum of a fused add and norm."""
        return self.pick.partition("|")[0] == "out.1" and kinds()[self.checkpoint].stage == "residual"


def load_taps(engine: str) -> tuple[Tap, ...]:
    """The table of an engine.

    Raises:
        ValueError: an engine without one.
    """
    if engine not in ENGINES:
        raise ValueError(f"there are no taps for {engine!r}; valid: {', '.join(ENGINES)}")
    path = Path(__file__).resolve().parents[1] / engine / "taps.tsv"
    lines = path.read_text(encoding="utf-8").splitlines()
    assert tuple(lines[0].split("\t")) == _FIELDS, path
    return tuple(Tap(*line.split("\t")) for line in lines[1:])


class Sink(Protocol):
    """What taps give their tensors to; see :class:`adapters.probe.recorder.Recorder`."""

    @property
    def active(self) -> bool: ...

    @property
    def transplant(self) -> Transplant | None: ...

    @property
    def routing(self) -> RoutingReplay | None: ...

    def wants(self, checkpoint: str, layer: int | None) -> bool: ...

    def put(self, checkpoint: str, layer: int | None, value: Any) -> None: ...

    def fail(self, checkpoint: str, layer: int | None, error: Exception) -> None: ...


class Calls(Protocol):
    """What hears of the tapped calls themselves; see :class:`adapters.probe.recorder.Recorder`."""

    @property
    def listening(self) -> bool: ...

    def enter(self, tapped: Tapped, layer: int | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None: ...

    def leave(self) -> None: ...


def locate(where: str) -> Any:
    """The function at ``module:Class.method``.

    Raises:
        ImportError, AttributeError: the installed engine has no such thing.
    """
    module, _, path = where.partition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(module))


def parameters_of(function: Any) -> list[str]:
    """Names of a function's parameters, without the object's own."""
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def signatures(taps: Iterable[Tap]) -> dict[str, list[str]]:
    """Parameters of every function that the taps name, by ``where``; what the engine does not have is left out.

    To be read before patches are applied: a patch may put ``(*args, **kwargs)`` in a function's place.
    """
    found = {}
    for where in {tap.where for tap in taps if not tap.where.startswith("*:")}:
        with contextlib.suppress(AttributeError, ImportError, TypeError, ValueError):  # hanging it up says why
            found[where] = parameters_of(locate(where))
    return found


# ---------------------------------------------------------------------------------------------------- installing


def resolve(root: Any, path: str) -> Any:
    """What is at ``layers.0.attn`` below ``root``.

    Raises:
        AttributeError, LookupError: there is no such thing.
    """
    for part in path.split(".") if path else ():
        root = root[int(part)] if part.isdigit() else getattr(root, part)
    return root


@dataclass
class _Armed:
    """A tap at one layer (``None``: exists once), ready to be called."""

    tap: Tap
    layer: int | None
    pick: Callable[[tuple[Any, ...], dict[str, Any], Any], Any]
    #: Of the tapped function's signature.
    parameters: Sequence[str] = ()
    #: Where that is defined.
    place: str = ""
    #: The site serves several layers; the layer is that of whatever ran last.
    shared: bool = False


class Taps:
    """The taps of one live model.

    Args:
        root: the causal language model.
        sink: where tensors go.
        known: parameters by ``where``, see :func:`signatures`; what is not in it is looked at as it is now.
        calls: hears which tapped call begins, with its arguments, and when it ends.
    """

    def __init__(
        self,
        taps: Sequence[Tap],
        root: Any,
        structure: Structure,
        tp_rank: int,
        sink: Sink,
        known: Mapping[str, list[str]] | None = None,
        calls: Calls | None = None,
    ) -> None:
        self._calls = calls
        self._known = known or {}
        self._dims = Dims.of(structure, tp_rank)
        self._sink = sink
        self._layer: int | None = None
        #: Taps of functions inside a site, of the sites that are running, innermost last.
        self._inside: list[dict[str, list[_Armed]]] = []
        #: Checkpoints that could not be hung up, with the reason.
        self.missing: dict[str, str] = {}
        self._undo: list[Callable[[], None]] = []
        sites: dict[tuple[int, str], tuple[Any, str, list[_Armed]]] = {}
        for tap in taps:
            if tap.checkpoint not in PSEUDO and not structure.has(kinds()[tap.checkpoint]):
                continue
            if not tap.holds(structure):
                continue
            once = "{i}" not in tap.site
            for layer in (None,) if once else range(1 if tap.checkpoint in PSEUDO else structure.layers):
                attribute, _, inner_where = tap.attribute.partition(">")
                try:
                    target = resolve(root, tap.site.replace("{i}", str(layer)))
                    getattr(target, attribute)
                    if inner_where:
                        locate(inner_where)
                    parameters = self._signature(tap, target)
                    armed = _Armed(tap, layer, picker(tap.pick, parameters), parameters, self._place(tap, target))
                except (AttributeError, ImportError, LookupError, TypeError, ValueError) as error:
                    name = tap.checkpoint if layer is None else f"layers.{layer}.{tap.checkpoint}"
                    self.missing[name] = f"{tap.site or 'model'} · {tap.where}: {error}"
                    continue
                sites.setdefault((id(target), attribute), (target, attribute, []))[2].append(armed)
        inner: set[str] = set()
        for target, attribute, armed_taps in sites.values():
            for one in armed_taps:
                one.shared = any(other.layer != one.layer and other.tap is one.tap for other in armed_taps)
            inner |= {one.tap.attribute.partition(">")[2] for one in armed_taps}
            self._wrap_site(target, attribute, armed_taps)
        for where in sorted(inner - {""}):
            self._wrap_inside(where)

    def _signature(self, tap: Tap, target: Any) -> list[str]:
        if tap.where.startswith("*:"):
            return parameters_of(getattr(target, tap.where[2:]))
        present = parameters_of(locate(tap.where))
        return self._known.get(tap.where, present)

    def _place(self, tap: Tap, target: Any) -> str:
        return definition(getattr(target, tap.where[2:]) if tap.where.startswith("*:") else locate(tap.where))

    def remove(self) -> None:
        """Take all taps off again, in reverse order."""
        while self._undo:
            self._undo.pop()()

    # ------------------------------------------------------------------------------------------------- wrapping

    def _take(self, one: _Armed, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        layer = self._layer if one.shared else one.layer
        checkpoint = one.tap.checkpoint
        transplant = self._sink.transplant
        name = None if transplant is None else transplant.name(checkpoint, layer)
        if transplant is not None and name is not None:
            try:
                transplant.at_tap(name, one.pick(args, kwargs, result), one.tap.transform)
            except LookupError as error:
                transplant.fail(name, error)
        if not self._sink.wants(checkpoint, layer):
            return
        try:
            value = one.pick(args, kwargs, result)
            given = value if isinstance(value, tuple) else (value,)
            if all(isinstance(part, Tensor) for part in given):
                value = TRANSFORMS[one.tap.transform].forward(*given, self._dims)
            self._sink.put(checkpoint, layer if checkpoint not in PSEUDO else None, value)
        except Exception as error:  # an observer must not stop the engine; what it missed is reported
            self._sink.fail(checkpoint, layer, error)

    def _reroute(self, one: _Armed, call: Call) -> None:
        """Put the other side's experts in the place of those that a call chose, once its own choice is recorded."""
        routing = self._sink.routing
        if routing is not None and one.tap.checkpoint == CHOICE:
            routing.at_choice(one.tap.where, self._layer if one.shared else one.layer, call, one.parameters)

    @contextlib.contextmanager
    def _called(self, armed: Sequence[_Armed], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Tell who wants to know that a function with these taps runs meanwhile."""
        listening = self._calls is not None and self._calls.listening
        tapped = [one for one in armed if one.tap.checkpoint not in PSEUDO] if listening else []
        if self._calls is None or not tapped:
            yield
            return
        first, names = tapped[0], tuple(one.tap.checkpoint for one in tapped)
        layer = self._layer if first.shared else first.layer
        self._calls.enter(Tapped(first.tap.where, first.place, names, tuple(first.parameters)), layer, args, kwargs)
        try:
            yield
        finally:
            self._calls.leave()

    def _enter(
        self, taps: Sequence[_Armed], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, with the summands of a residual that is to be replaced."""
        transplant = self._sink.transplant
        if transplant is not None:
            for one in taps:
                name = transplant.name(one.tap.checkpoint, self._layer if one.shared else one.layer)
                if name is not None and one.tap.of_sum:
                    args, kwargs = transplant.into_sum(name, one.parameters, args, kwargs, one.tap.transform)
        return args, kwargs

    def _wrap_site(self, target: Any, attribute: str, armed: list[_Armed]) -> None:
        original = getattr(target, attribute)
        outer = [one for one in armed if ">" not in one.tap.attribute]
        if any(one.shared for one in outer):  # one call serves whichever layer runs
            outer = list({one.tap: one for one in outer}.values())
        before = [one for one in outer if one.tap.before]
        after = [one for one in outer if not one.tap.before]
        inside: dict[str, list[_Armed]] = {}
        for one in armed:
            where = one.tap.attribute.partition(">")[2]
            if where:
                inside.setdefault(where, []).append(one)
        own = next((one.layer for one in armed if not one.shared), None)
        sink, take, enter, reroute = self._sink, self._take, self._enter, self._reroute

        @functools.wraps(original)
        def tapped(*args: Any, **kwargs: Any) -> Any:
            if not sink.active:
                return original(*args, **kwargs)
            if own is not None:
                self._layer = own
            for one in before:
                take(one, args, kwargs, None)
            args, kwargs = enter(after, args, kwargs)
            with self._called(outer, args, kwargs):
                if not inside:
                    result = original(*args, **kwargs)
                else:
                    self._inside.append(inside)
                    try:
                        result = original(*args, **kwargs)
                    finally:
                        self._inside.pop()
            for one in after:
                take(one, args, kwargs, result)
                reroute(one, Call(original, target, args, kwargs, result))
            return result

        had = attribute in vars(target)
        setattr(target, attribute, tapped)
        self._undo.append(lambda: setattr(target, attribute, original) if had else delattr(target, attribute))

    def _wrap_inside(self, where: str) -> None:
        module, _, path = where.partition(":")
        *owners, name = path.split(".")
        owner: Any = functools.reduce(getattr, owners, importlib.import_module(module))
        had = name in vars(owner)
        raw = vars(owner).get(name)
        original = getattr(owner, name)
        # A static or class method of a class is bound already, any other function of it takes the object first.
        method = inspect.isclass(owner) and inspect.isfunction(inspect.getattr_static(owner, name))
        sink, take, reroute = self._sink, self._take, self._reroute

        @functools.wraps(original)
        def tapped(*args: Any, **kwargs: Any) -> Any:
            armed = self._inside[-1].get(where, ()) if self._inside and sink.active else ()
            given = args[1:] if method else args
            for one in armed:
                if one.tap.before:
                    take(one, given, kwargs, None)
            with self._called(armed, given, kwargs):
                result = original(*args, **kwargs)
            for one in armed:
                if not one.tap.before:
                    take(one, given, kwargs, result)
                    reroute(one, Call(original, None, args, kwargs, result))
            return result

        setattr(owner, name, staticmethod(tapped) if inspect.isclass(owner) and not method else tapped)
        self._undo.append(lambda: setattr(owner, name, raw) if had else delattr(owner, name))
