"""What the workers read back from their live engine, on its way to the driver.

One JSON file per kind and rank in the side's directory, replaced atomically:

* ``live-rank{r}.json``: the model and the cache as they were built, after any warm-up (:data:`LIVE`).
* ``start-rank{r}.json``: what must be true just before the first real step of a launch (:data:`START`).
* ``sampling-rank{r}.json``: how the batch of the first real step of each run is sampled (:data:`SAMPLING`).

A fact that cannot be read is an observation without a value that says why; it never stops the others, nor the engine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from adapters.base import Observation

LIVE, START, SAMPLING = "live", "start", "sampling"
#: ``why`` of a merged fact whose ranks say different things; its value is then ``{"rank 0": …, "rank 1": …}``.
RANKS_DIFFER = "the ranks differ"


class Facts:
    """Collects observations; what raises becomes an observation without a value."""

    def __init__(self) -> None:
        self.found: list[Observation] = []

    def read(self, name: str, where: str, get: Callable[[], Any]) -> None:
        """Record ``get()``, made of JSON-able values; ``None`` and an exception both mean that it could not be read."""
        try:
            value, why = get(), ""
        except Exception as error:
            value, why = None, f"{type(error).__name__}: {error}"
        if value is None and not why:
            why = f"{where} is not there"
        self.found.append(Observation(name, value, where, why))


def one_or_all(values: Iterable[Any]) -> Any:
    """The value that all share, or the sorted list of the distinct ones; ``None`` if there is none."""
    distinct = sorted(set(values))
    return distinct[0] if len(distinct) == 1 else distinct or None


def _path(directory: Path, kind: str, rank: int) -> Path:
    return directory / f"{kind}-rank{rank}.json"


def write_facts(directory: Path, kind: str, rank: int, facts: Iterable[Observation]) -> None:
    """Replace the facts of one kind and rank: a reader sees the old ones or the new ones."""
    path = _path(directory, kind, rank)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps([asdict(fact) for fact in facts]), encoding="utf-8")
    os.replace(temporary, path)


def read_facts(directory: Path, kind: str) -> dict[int, tuple[Observation, ...]]:
    """The facts of one kind, by rank; ranks that wrote none are absent."""
    found = {}
    for path in directory.glob(f"{kind}-rank*.json"):
        rank = path.stem.removeprefix(f"{kind}-rank")
        if rank.isdigit():
            found[int(rank)] = tuple(Observation(**row) for row in json.loads(path.read_text(encoding="utf-8")))
    return dict(sorted(found.items()))


def write_live(directory: Path, rank: int, facts: Iterable[Observation]) -> None:
    write_facts(directory, LIVE, rank, facts)


def read_live(directory: Path) -> dict[int, tuple[Observation, ...]]:
    return read_facts(directory, LIVE)


def merge_ranks(by_rank: Mapping[int, Sequence[Observation]], ranks: Collection[int]) -> list[Observation]:
    """One observation per fact: the value if all ``ranks`` agree; see :data:`RANKS_DIFFER` if they do not.

    A rank that did not report a fact makes it unreadable, for nobody knows what it does there.
    """
    names = dict.fromkeys(fact.name for facts in by_rank.values() for fact in facts)
    tables = {rank: {fact.name: fact for fact in facts} for rank, facts in by_rank.items()}
    merged = []
    for name in names:
        facts = {rank: tables.get(rank, {}).get(name) for rank in ranks}
        silent = [rank for rank, fact in facts.items() if fact is None]
        said = {rank: fact for rank, fact in facts.items() if fact is not None}
        known = list(said.values())
        unread = next((fact for fact in known if fact.value is None), None)
        where = known[0].where if known else "the workers"
        if silent:
            merged.append(Observation(name, None, where, f"rank {silent[0]} did not report it"))
        elif unread is not None:
            merged.append(unread)
        elif all(fact.value == known[0].value for fact in known):
            merged.append(known[0])
        else:
            value = {f"rank {rank}": fact.value for rank, fact in said.items()}
            merged.append(Observation(name, value, where, RANKS_DIFFER))
    return merged


def worker_observations(directory: Path, ranks: Collection[int]) -> list[Observation]:
    """All that the workers of one engine reported so far: of every rank, but for the sampling, which some engines do on
    one.

    Args:
        ranks: global, of this engine; the directory may hold facts of other data-parallel groups.
    """
    found = merge_ranks(read_facts(directory, LIVE), ranks)
    start = read_facts(directory, START)
    if start:
        found += merge_ranks(start, ranks)
    sampling = {rank: facts for rank, facts in read_facts(directory, SAMPLING).items() if rank in ranks}
    if sampling:
        found += merge_ranks(sampling, tuple(sampling))
    return found


class OncePerRun:
    """Lets the first real step of each run through: cheap enough to be asked at every step."""

    def __init__(self) -> None:
        self._generation: int | None = None

    def first(self, generation: int) -> bool:
        """Whether ``generation`` is asked about for the first time in a row."""
        new = generation != self._generation
        self._generation = generation
        return new
