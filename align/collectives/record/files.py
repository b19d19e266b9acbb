"""The files of the records: what workers append call by call, and what is read back.

::

    rank0.jsonl    lines of several kinds, see below
    rank0.bin      the tensors of the calls, one safetensors image after the other

Each line is an object whose first key says its kind:

* ``form``: what many calls have in common (function, group, shapes, call site), told once and then named by number;
* ``begin``: a call is about to be made; the ranks of its group read this line of each other while they run;
* ``end``: it came back, or failed; the line follows its tensors, so what a line names is whole;
* ``mark``: a forward has ended, with so many calls inside the model's functions in this group so far;
* ``run``: a run has begun, and into which recording its tensors go;
* ``fresh``: the engine has other patches from here on, so what stands before belongs to another experiment;
* ``note``: what could not be recorded.

A last line that was cut does not count. A call without an ``end`` never came back.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from align.collectives.record.types import CollectiveCall, Place
from align.trace.encode import encode

#: The directory of these files, in that of the probe and in a trace.
FOLDER = "collectives"
SCHEMA = 1
#: Fields of a call that are its own; all others make its form.
_OWN = (
    "at", "in_group", "place", "ended", "error", "checksum_in", "checksum_out", "values", "why", "sent", "received",
    "about",
)  # fmt: skip
#: Of these: what few calls have, in the line of a call.
_MORE = ("sent", "received", "about")

_encode = json.JSONEncoder(separators=(",", ":")).encode
#: What calls of one form have in common, quickly.
_form = attrgetter(*(one.name for one in fields(CollectiveCall) if one.name not in (*_OWN, "tensors")))

#: A group: its global ranks in order, and torch's name of it.
Group = tuple[tuple[int, ...], str]


def rank_file(directory: Path, rank: int) -> Path:
    """The lines of one rank."""
    return directory / f"rank{rank}.jsonl"


@dataclass(frozen=True)
class Begin:
    """A call is about to be made; of its fields those that are known before."""

    call: CollectiveCall


@dataclass(frozen=True)
class End:
    """The call numbered ``at`` is over."""

    at: int
    checksum_out: str = ""
    values: bool = False
    why: str = ""
    error: str = ""
    #: Where its tensors are in the other file, and how many bytes.
    start: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Mark:
    """The forward at ``place`` has ended; ``count`` calls of the group were made inside the model so far."""

    group: Group
    count: int
    place: Place


@dataclass(frozen=True)
class Run:
    """Run ``number`` of the launch has begun; ``recording``: name of its trace's directory, empty if it makes none."""

    number: int
    recording: str


@dataclass(frozen=True)
class Fresh:
    """Calls numbered below ``at`` are of another experiment in the same engine; their tensors are gone."""

    at: int


@dataclass(frozen=True)
class Note:
    """What could not be recorded, in words."""

    text: str


Event = Begin | End | Mark | Run | Fresh | Note


class CollectiveWriter:
    """Appends the records of one rank. Every line is in the file when the method returns.

    Args:
        directory: made if need be; an earlier launch's records of this rank are replaced.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._lines = rank_file(directory, rank).open("wb", buffering=0)
        self._data = (directory / f"rank{rank}.bin").open("wb", buffering=0)
        self._at = 0
        self._forms: dict[tuple[Any, ...], int] = {}

    def begin(self, call: CollectiveCall) -> None:
        """A call is about to be made."""
        form = _form(call)
        text = ""
        number = self._forms.get(form)
        if number is None:
            number = self._forms[form] = len(self._forms)
            plain = call.to_dict()
            text = _line({"form": number, "call": {key: plain[key] for key in plain if key not in _OWN}})
        line: dict[str, Any] = {"begin": call.at, "in": call.in_group, "form": number, "place": _short(call.place)}
        if call.checksum_in:
            line["sum"] = call.checksum_in
        line |= {key: value for key in _MORE if (value := getattr(call, key))}
        self._put(text + _line(line))

    def end(self, end: End, tensors: Mapping[str, Tensor] | None = None) -> int:
        """The call is over; returns the bytes of its tensors, which are kept if there are any."""
        size = 0
        line: dict[str, Any] = {"end": end.at}
        if tensors:
            image = b"".join(encode(tensors, {"schema": str(SCHEMA)}))
            self._data.write(image)
            size = len(image)
            line |= {"start": self._at, "bytes": size, "values": True}
            self._at += size
        said = {"sum": end.checksum_out, "why": end.why, "error": end.error}
        line |= {key: value for key, value in said.items() if value}
        self._put(_line(line))
        return size

    def mark(self, mark: Mark) -> None:
        """A forward has ended."""
        group = [list(mark.group[0]), mark.group[1]]
        self._put(_line({"mark": mark.count, "group": group, "place": _short(mark.place)}))

    def run(self, run: Run) -> None:
        """Another run of this launch has begun."""
        self._put(_line({"run": run.number, "recording": run.recording}))

    def fresh(self, fresh: Fresh) -> None:
        """Another experiment begins. Lines stay, for other ranks are reading them; tensors are needed no more."""
        self._data.truncate(0)
        self._data.seek(0)
        self._at = 0
        self._put(_line({"fresh": fresh.at}))

    def note(self, text: str) -> None:
        """Something could not be recorded."""
        self._put(_line({"note": text}))

    def close(self) -> None:
        self._lines.close()
        self._data.close()

    def _put(self, text: str) -> None:
        self._lines.write(text.encode())


def _line(plain: Mapping[str, Any]) -> str:
    return _encode(plain) + "\n"


def _short(place: Place) -> list[Any]:
    return [place.generation, place.step, int(place.dummy), list(place.inside), place.after]


def _long(short: list[Any]) -> Place:
    generation, step, dummy, inside, after = short
    return Place(generation, step, bool(dummy), tuple(inside), after)


def wait_for_calls(directory: Path, seconds: float = 1.0) -> None:
    """Wait until every call that any rank has begun is over, so that what is copied next is whole, but not for long.

    The rank that answers for all may be done while another one still records what its last call gave.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        files = [path.read_bytes() for path in directory.glob("rank*.jsonl")]
        if all(data.count(b'{"begin":') == data.count(b'{"end":') for data in files):
            return
        time.sleep(0.005)


class Lines:
    """Understands the lines of one rank, one after the other."""

    def __init__(self) -> None:
        self._forms: dict[int, CollectiveCall] = {}

    def take(self, line: str | bytes) -> Event | None:
        """What a line says; ``None`` for one that only prepares others.

        Raises:
            KeyError, TypeError, ValueError: it is no line of these files.
        """
        plain = json.loads(line)
        kind = next(iter(plain), "")
        if kind == "form":
            rest = {"at": 0, "in_group": 0, "place": asdict(Place(0, -1)), "ended": False}
            self._forms[plain["form"]] = CollectiveCall.from_dict({**plain["call"], **rest})
            return None
        if kind == "begin":
            own = {"at": plain["begin"], "in_group": plain["in"], "checksum_in": plain.get("sum", "")}
            own |= {"sent": tuple(plain.get("sent", ())), "received": tuple(plain.get("received", ()))}
            own["about"] = plain.get("about", {})
            return Begin(replace(self._forms[plain["form"]], place=_long(plain["place"]), **own))
        if kind == "end":
            return End(
                plain["end"], plain.get("sum", ""), plain.get("values", False), plain.get("why", ""),
                plain.get("error", ""), plain.get("start", 0), plain.get("bytes", 0),
            )  # fmt: skip
        if kind == "mark":
            ranks, name = plain["group"]
            return Mark((tuple(ranks), name), plain["mark"], _long(plain["place"]))
        if kind == "run":
            return Run(plain["run"], plain["recording"])
        if kind == "fresh":
            return Fresh(plain["fresh"])
        if kind == "note":
            return Note(plain["note"])
        raise ValueError(f"a line of an unknown kind: {kind}")


class Follower:
    """Reads what another rank goes on writing.

    Args:
        path: of its lines; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lines = path, Lines()
        self._file: int | None = None
        self._at = 0
        self._rest = b""

    def news(self) -> Iterator[Event]:
        """What was written since the last time."""
        if self._file is None:
            try:
                self._file = os.open(self._path, os.O_RDONLY)
            except FileNotFoundError:
                return
        while piece := os.pread(self._file, 1 << 16, self._at):
            self._at += len(piece)
            *whole, self._rest = (self._rest + piece).split(b"\n")
            for line in whole:
                event = self._lines.take(line)
                if event is not None:
                    yield event

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)


class _Stored(Mapping[str, Tensor]):
    """The tensors of one call, which are read when they are asked for."""

    def __init__(self, path: Path, start: int, size: int) -> None:
        self._path, self._start, self._size = path, start, size

    def _load(self) -> dict[str, Tensor]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._start)
                return dict(safetensors.torch.load(file.read(self._size)))
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise ValueError(f"{self._path} cannot be read: {type(error).__name__}: {error}") from error

    def __getitem__(self, name: str) -> Tensor:
        return self._load()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._load())

    def __len__(self) -> int:
        return len(self._load())

    def items(self) -> Any:
        """All of them, read at once."""
        return self._load().items()

    def values(self) -> Any:
        """All of them, read at once."""
        return self._load().values()


@dataclass(frozen=True)
class Records:
    """What the workers of one side recorded.

    Attributes:
        calls: rank after rank, each in its own order; their tensors are read from the file when they are asked for.
        ranks: global ranks that recorded anything.
        recordings: number of a run → name of its trace's directory, empty if it made none.
        notes: what could not be recorded, each once.
        bytes: of the files.
    """

    calls: tuple[CollectiveCall, ...] = ()
    ranks: tuple[int, ...] = ()
    recordings: Mapping[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    bytes: int = 0


def read_records(directory: Path) -> Records | None:
    """The records in a directory, of the last experiment in their engine; ``None`` if there are none.

    Raises:
        ValueError: a file is damaged; names it. A damaged tensor raises it when it is read.
    """
    paths = sorted(directory.glob("rank*.jsonl"), key=lambda path: int(path.stem.removeprefix("rank")))
    if not paths:
        return None
    calls: list[CollectiveCall] = []
    recordings: dict[int, str] = {}
    notes: dict[str, None] = {}
    size = 0
    for path in paths:
        found: dict[int, CollectiveCall] = {}
        first = 0
        for event in _events(path):
            if isinstance(event, Begin):
                found[event.call.at] = event.call
            elif isinstance(event, End):
                if event.at < first:
                    continue
                if event.at not in found:
                    raise ValueError(f"{path} cannot be read: call {event.at} ends and was never begun")
                found[event.at] = _ended(found[event.at], event, path.with_suffix(".bin"))
            elif isinstance(event, Run):
                recordings[event.number] = event.recording
            elif isinstance(event, Fresh):
                first = event.at
                found.clear()
            elif isinstance(event, Note):
                notes[event.text] = None
        calls += (found[at] for at in sorted(found))
        size += path.stat().st_size + path.with_suffix(".bin").stat().st_size
    ranks = tuple(int(path.stem.removeprefix("rank")) for path in paths)
    return Records(tuple(calls), ranks, recordings, tuple(notes), size)


def _ended(call: CollectiveCall, end: End, data: Path) -> CollectiveCall:
    stored = _Stored(data, end.start, end.bytes) if end.values else {}
    return replace(
        call, ended=not end.error, error=end.error, checksum_out=end.checksum_out, values=end.values, why=end.why,
        tensors=stored,
    )  # fmt: skip


def _events(path: Path) -> Iterator[Event]:
    lines = Lines()
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                if not line.endswith("\n"):
                    break  # the worker was killed while it wrote
                event = lines.take(line)
                if event is not None:
                    yield event
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
