"""Patches: a user's file that runs in every worker of one side, to try a fix or to inject a fault.

::

    def apply(ctx):        # after the engine is imported, before the model is built
        from lmdeploy.pytorch.backends.dlinfer.norm import DlinferRMSNormImpl
        original = DlinferRMSNormImpl.forward
        ctx.replace(DlinferRMSNormImpl, "forward", lambda self, *args: original(self, *args))

    def after_load(ctx):   # optional; ctx.model is the loaded model
        ctx.model.lm_head.weight.data[0] *= 2
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from adapters.base import RowSpan
from adapters.mistakes import Mistake, leave_mistake
from adapters.probe.steplog import process_log

_REMEDY = "correct the patch"


@dataclass
class PatchContext:
    """What a patch knows of the worker it runs in.

    Attributes:
        side: ``candidate`` or ``reference``.
        engine: ``lmdeploy`` or ``vllm``.
        rank, tp_rank, dp_rank, ep_rank: of this worker.
        layout: ``(tp, dp, ep)``.
        model: the loaded model, in ``after_load``; ``None`` before.

    A patch whose changes all go through :meth:`replace` and :meth:`assign` can be taken off again while the engine
    lives (``align drill``).
    """

    side: str
    engine: str
    rank: int
    tp_rank: int
    dp_rank: int
    ep_rank: int
    layout: tuple[int, int, int]
    model: Any = None
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    @property
    def step(self) -> int:
        """Number of the engine step that runs, from 0 in each run; -1 in warm-up, in dummies and between steps."""
        log = process_log()
        return log.place.step if log is not None and log.in_step else -1

    @property
    def rows(self) -> tuple[RowSpan, ...]:
        """Requests of the step that runs, in batch order; their token rows follow each other in tensors of the step."""
        log = process_log()
        return () if log is None else log.spans

    def replace(self, obj: Any, name: str, fn: Any) -> None:
        """Set ``obj.name`` to ``fn`` until the patch is removed.

        Static and class methods keep their kind.

        Raises:
            AttributeError: ``obj`` has no such attribute; a misspelt patch must not pass for one that had no effect.
        """
        present = getattr(obj, name)
        try:
            found = inspect.getattr_static(obj, name)
            own, raw = name in vars(obj), vars(obj).get(name)
        except AttributeError:  # held elsewhere, as a torch module holds its parameters
            found, own, raw = None, True, present
        if inspect.isclass(obj) and isinstance(found, (staticmethod, classmethod)):
            fn = fn if isinstance(fn, (staticmethod, classmethod)) else type(found)(fn)
        setattr(obj, name, fn)
        self._undo.append((lambda: setattr(obj, name, raw)) if own else (lambda: delattr(obj, name)))

    def assign(self, tensor: Tensor, values: Tensor | float, at: Any = ...) -> None:
        """Write ``tensor[at] = values``, such as rows of a weight, until the patch is removed.

        Args:
            tensor: a parameter or buffer, as the model holds it.
            values: a number, or of the shape of ``tensor[at]``.
            at: any index that torch takes; everything by default.
        """
        held = tensor.detach()
        before = held[at].clone()
        held[at] = values.to(held.dtype) if isinstance(values, Tensor) else values

        def put_back() -> None:
            held[at] = before

        self._undo.append(put_back)

    def undo(self) -> None:
        """Put everything that was replaced or assigned back, the last first."""
        while self._undo:
            self._undo.pop()()


class Patches:
    """The patches of one worker, in the order in which they were given.

    Raises:
        Mistake: a file that cannot be loaded, or has no ``apply``; says which.

    A mistake is also left for the driver, see :mod:`adapters.mistakes`.
    """

    def __init__(self, files: Sequence[str], context: PatchContext) -> None:
        self.context = context
        self._modules = [_load(Path(file)) for file in files]

    def apply(self) -> None:
        """Run every ``apply``; if one fails, what was replaced is put back.

        Raises:
            Mistake: names the file, the error and the patch's own line.
        """
        self._run("apply")

    def after_load(self, model: Any) -> None:
        """Run every ``after_load`` that there is.

        Raises:
            Mistake: names the file, the error and the patch's own line.
        """
        self.context.model = model
        self._run("after_load")

    def _run(self, function: str) -> None:
        for module in self._modules:
            call = getattr(module, function, None)
            if call is None:
                continue
            try:
                call(self.context)
            except Exception as error:
                self.context.undo()
                assert module.__file__ is not None
                raise _mistake(
                    f"patch {module.__file__}: {function}(ctx) failed: {_said(error, module.__file__)}"
                ) from error

    def remove(self) -> None:
        """Undo every replacement. What a patch changed by other means stays."""
        self.context.undo()


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"align_patch_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise _mistake(f"patch {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _mistake(f"patch {path} cannot be loaded: {_said(error, str(path))}") from error
    if not callable(getattr(module, "apply", None)):
        raise _mistake(f"patch {path} has no apply(ctx); write `def apply(ctx):`, empty if only after_load is needed")
    return module


def _said(error: Exception, file: str) -> str:
    """The error, and the last line of the patch that led to it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    # The text of a syntax error says where it is.
    where = f" (line {lines[-1]})" if lines and not isinstance(error, SyntaxError) else ""
    return f"{type(error).__name__}: {error}{where}"


def _mistake(message: str) -> Mistake:
    mistake = Mistake(message, _REMEDY)
    directory = os.environ.get("ALIGN_PROBE_DIR")
    if directory:
        leave_mistake(Path(directory), mistake)
    return mistake
