"""Engines that stay up between trials: each trial puts its own patches into their workers, and takes them off again."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from adapters.base import EngineSpec
from adapters.host import Launched
from align.case.schema import Case
from align.errors import SideError, UserError
from align.models.info import ModelInfo
from align.run.plan import SideExtras
from align.run.session import Session, Watcher
from align.run.side import Limits, Side
from align.run.transport import Hosts
from envs.profiles import Interpreter


class _Switch:
    """Passes on what the sides report to whoever listens now."""

    def __init__(self) -> None:
        self.to: Watcher | None = None

    def update(self, role: str, stage: str, detail: str) -> None:
        if self.to is not None:
            self.to.update(role, stage, detail)


@dataclass
class _Up:
    """A side that was launched."""

    side: Side
    spec: EngineSpec
    launched: Launched
    #: What the launch left in the side's directory; a trial's own recordings are not among it.
    kept: frozenset[str] = field(default_factory=frozenset)


class LivePair:
    """Both engines of a case, launched once without patches. A context manager: leaving it ends them.

    Args:
        case: its layout, block size, dtype and numerics are those of every trial; its requests bound theirs.
        directory: of the pair; each side has one of its own below it, in which every trial records.
        extras: by role, options of the engines.
    """

    def __init__(
        self,
        case: Case,
        info: ModelInfo,
        interpreters: Mapping[str, Interpreter],
        directory: Path,
        extras: Mapping[str, SideExtras] | None = None,
        limits: Limits | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        assert case.layout.dp == 1, "patches are changed by a step of one engine"
        self.case, self.info, self.interpreters = case, info, interpreters
        self.limits = limits or Limits()
        self._switch = _Switch()
        self._session = Session(case, info, interpreters, directory, self.limits, self._switch, extras, hosts=hosts)
        self.directories = self._session.directories
        self.ups: dict[str, _Up] = {}
        #: A side failed: nothing more can be asked of the pair.
        self.broken = False

    def __enter__(self) -> LivePair:
        self._session.__enter__()
        try:
            self._session.launch()
        except BaseException as error:
            self._session.__exit__(type(error), error, None)
            raise
        for role in self._session.roles:
            outcome = self._session.outcome.sides[role]
            assert outcome.spec is not None and outcome.launched is not None
            kept = frozenset(path.name for path in self.directories[role].iterdir())
            self.ups[role] = _Up(self._session.side(role), outcome.spec, outcome.launched, kept)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._session.__exit__(SideError if self.broken else kind, *rest)

    def trial(self, case: Case, extras: Mapping[str, SideExtras], watcher: Watcher) -> TrialSession:
        """A session of these engines, for one :class:`align.run.flow.Flow`.

        Args:
            case: other requests than the pair's, or the same; everything else is the pair's.
            extras: by role, the patches of this trial.
        """
        assert not self.broken
        return TrialSession(self, case, extras, watcher)

    def listen(self, watcher: Watcher | None) -> None:
        """Who hears from now on what the sides do."""
        self._switch.to = watcher

    @property
    def abort(self) -> threading.Event:
        """What stops all waiting for these sides."""
        return self._session.abort


class TrialSession(Session):
    """As :class:`align.run.session.Session`, in engines that are up already and stay so."""

    def __init__(self, pair: LivePair, case: Case, extras: Mapping[str, SideExtras], watcher: Watcher) -> None:
        super().__init__(
            case, pair.info, pair.interpreters, Path(), pair.limits, watcher, extras, directories=pair.directories
        )
        self._pair = pair
        self._abort = pair.abort
        self._sides = {role: up.side for role, up in pair.ups.items()}

    def __enter__(self) -> TrialSession:
        self._abort.clear()
        self._pair.listen(self._watcher)
        for up in self._pair.ups.values():
            _clear(up.side.directory, up.kept)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A run that is refused, because of a condition say, leaves engines that wait for the next one.
        refused = kind is not None and issubclass(kind, UserError) and not issubclass(kind, SideError)
        if kind is not None and not refused:
            self._abort.set()
            self._pair.broken = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._pair.listen(None)

    def _each(self, work: Callable[[str], None], names: Mapping[str, str] | None = None) -> None:
        try:
            super()._each(work, names)
        except SideError:  # whoever asked may go on without it; the next trial cannot
            self._pair.broken = True
            raise

    def launch(self) -> None:
        """Put the trial's patches in, and read the settings back.

        Raises:
            SideError: a patch fails, or the engine does with it.
        """

        def start(role: str) -> None:
            up, outcome = self._pair.ups[role], self.outcome.sides[role]
            files: Sequence[str] = outcome.extras.patches
            up.side.repatch(files)
            outcome.spec = up.spec
            outcome.launched = up.launched
            outcome.observations = up.side.observe()

        self._each(start)


def _clear(directory: Path, kept: frozenset[str]) -> None:
    """Remove what the trial before recorded; the workers' own files stay, for they are open."""
    for path in directory.iterdir():
        if path.is_dir() and path.name not in kept:
            shutil.rmtree(path)
