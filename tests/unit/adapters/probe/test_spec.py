"""The spec between the driver's side and the workers: round trip, atomic replacement, change of generation."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.probe.spec import CaptureSpec, ProbeSpec, RequestSpec, SpecReader, write_spec

ids = st.lists(st.integers(0, 2**31), max_size=5).map(tuple)
requests = st.builds(RequestSpec, st.text(max_size=8), st.integers(1, 9), st.integers(1, 9), st.one_of(st.none(), ids))
captures = st.builds(
    CaptureSpec,
    st.text(max_size=8),
    st.lists(st.text(max_size=6), max_size=3).map(tuple),
    st.booleans(),
    st.booleans(),
    st.integers(1, 99),
    st.integers(0, 2**40),
)
specs = st.builds(
    ProbeSpec,
    st.integers(1, 9),
    st.integers(1, 20),
    st.dictionaries(st.text(max_size=6), requests),
    st.one_of(st.none(), captures),
)


def spec(generation: int, *names: str, forced: tuple[int, ...] | None = None) -> ProbeSpec:
    return ProbeSpec(generation, 5, {name: RequestSpec(name, 3, 4, forced) for name in names})


@given(specs)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, written: ProbeSpec) -> None:
    directory = tmp_path_factory.mktemp("spec")
    write_spec(directory, written)
    assert SpecReader(directory).read() == written


def test_no_file_is_no_spec(tmp_path: Path) -> None:
    reader = SpecReader(tmp_path)
    assert reader.read() is None
    write_spec(tmp_path, spec(1, "a"))
    assert reader.read() == spec(1, "a")


def test_a_new_generation_is_seen_by_a_running_reader(tmp_path: Path) -> None:
    reader = SpecReader(tmp_path)
    for generation in range(1, 30):  # far faster than the clock of the file system
        written = spec(generation, f"r{generation}", forced=(generation,) * 4)
        write_spec(tmp_path, written)
        assert reader.read() == written


def test_an_unchanged_file_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_spec(tmp_path, spec(1, "a"))
    reader = SpecReader(tmp_path)
    first = reader.read()
    monkeypatch.setattr(json, "loads", lambda text: pytest.fail("the file was read again"))
    assert reader.read() is first


def test_nothing_but_the_spec_is_left(tmp_path: Path) -> None:
    write_spec(tmp_path, spec(1, "a"))
    write_spec(tmp_path, spec(2, "b"))
    assert [path.name for path in tmp_path.iterdir()] == ["spec.json"]


def test_a_write_that_fails_leaves_the_old_spec(tmp_path: Path) -> None:
    write_spec(tmp_path, spec(1, "a"))
    unwritable = ProbeSpec(2, 5, {"b": RequestSpec("b", 3, 4, (object(),))})  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        write_spec(tmp_path, unwritable)
    assert SpecReader(tmp_path).read() == spec(1, "a")


def test_a_reader_sees_whole_specs_while_they_are_replaced(tmp_path: Path) -> None:
    write_spec(tmp_path, spec(1, *map(str, range(50))))
    done = threading.Event()

    def write() -> None:
        for generation in range(2, 150):
            write_spec(tmp_path, spec(generation, *map(str, range(generation))))
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    last = 0
    while not done.is_set():
        seen = SpecReader(tmp_path).read()
        assert seen is not None
        assert seen.generation >= last
        assert len(seen.requests) == (50 if seen.generation == 1 else seen.generation)
        last = seen.generation
    writer.join()
