"""Nights over a real SQLite store and a runner that starts nothing: going on, and what is new, known and fixed."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from align.errors import UserError
from align.history.changes import Change
from align.history.night import GOES_ON, open_night, remove_old, run_night
from align.history.plan import Plan
from align.history.policy import exit_code, fail_on
from align.history.store import Night, Outcome, SqlStore, without_times
from align.result.schema import Result
from tests.unit.align.history.nights import DEEPER, NORM, SLOT, Runner, found, plan_of, result, states

NOW = datetime(2024, 5, 1, 2, 0).astimezone()
Results = dict[str, Result | str]


@pytest.fixture
def store(tmp_path: Path) -> SqlStore:
    return SqlStore.at(tmp_path / "made" / "nights.sqlite")


def run(store: SqlStore, folder: Path, results: Results, plan: Plan | None = None, day: int = 0) -> tuple[Outcome, ...]:
    plan = plan or plan_of(*results)
    night = open_night(plan, store, NOW + timedelta(days=day))
    return run_night(plan, night, store, folder / str(night.number), Runner(results), lambda line: None)


def test_new_known_fixed(store: SqlStore, tmp_path: Path) -> None:
    nights: list[Results] = [{"a": result(), "b": result(NORM)}, {"a": result(NORM), "b": result(NORM, number=2.0)}]
    nights += [{"a": result(), "b": result(DEEPER)}]
    told = [run(store, tmp_path, one, day=day) for day, one in enumerate(nights)]
    assert [[states(one.changed) for one in night] for night in told] == [
        [[], ["new"]],
        [["new"], ["known"]],
        [["fixed"], ["moved"]],
    ]
    assert [exit_code(night, "new") for night in told] == [1, 1, 1]
    assert exit_code(run(store, tmp_path, nights[2], day=3), "new") == 0, "nothing is new"
    assert [night.number for night in store.nights("nightly")] == [1, 2, 3, 4]


def test_a_case_that_fails_leaves_the_others_and_keeps_what_is_known(store: SqlStore, tmp_path: Path) -> None:
    run(store, tmp_path, {"a": result(NORM), "b": result()})
    night = run(store, tmp_path, {"a": "killed by the kernel", "b": result()}, day=1)
    assert [(one.verdict, one.reason) for one in night] == [("not comparable", "killed by the kernel"), ("aligned", "")]
    assert night[0].changed == () and exit_code(night, "new") == 2
    again = run(store, tmp_path, {"a": result(verdict="not comparable", reason="no"), "b": result()}, day=2)
    assert again[0].failed_before and exit_code(again, "new") == 0 and exit_code(again, "any") == 2
    back = run(store, tmp_path, {"a": result(NORM), "b": result()}, day=3)
    assert (states(back[0].changed), back[0].earlier) == (["known"], 1), "beside the last night that could tell"


def test_policies() -> None:
    new, known = (
        Outcome("a", "diverged", changed=(one,))
        for one in (Change("new", None, found(NORM)), Change("known", found(NORM), found(NORM)))
    )
    failed = Outcome("b", "not comparable", "no")
    for outcomes, codes in (
        ([new], (1, 1, 0)),
        ([known], (0, 1, 0)),
        ([failed], (2, 2, 0)),
        ([known, failed], (2, 1, 0)),
        ([], (0, 0, 0)),
    ):
        assert tuple(exit_code(outcomes, one) for one in ("new", "any", "never")) == codes
    with pytest.raises(UserError, match="--fail-on old is not known"):
        fail_on("old")


@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kills=st.lists(st.integers(0, 4), max_size=4))
def test_a_night_that_is_killed_anywhere_ends_in_the_same_store(
    kills: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("night")
    results: Results = {name: result(*faults) for name, faults in _FAULTS.items()} | {"e": "it died"}
    plan = plan_of(*results)
    stores = [SqlStore.at(folder / name / "nights.sqlite") for name in ("whole", "killed")]
    for store in stores:  # a night before
        run(store, folder / "earlier" / str(id(store)), {**results, "a": result(), "b": result(SLOT)}, plan)
    later = NOW + timedelta(days=1)
    nights = [open_night(plan, store, later) for store in stores]
    run_night(plan, nights[0], stores[0], folder / "w", Runner(results), lambda line: None)
    places: list[Path] = []
    for stops in [*kills, 1 << 20]:
        night = open_night(plan, stores[1], later)
        assert night == nights[1], "the same night goes on"
        runner = Runner(results, stops)
        try:
            run_night(plan, night, stores[1], folder / "k", runner, lambda line: None)
            break
        except KeyboardInterrupt:
            continue
        finally:
            places += runner.places
    assert len(places) == len(set(places)), "a directory is used once"
    texts = [without_times(store, store.nights("nightly")[1]) for store in stores]
    assert texts[0] == texts[1] and '"moved"' in texts[0] and '"new"' in texts[0]
    assert stores[1].nights("nightly")[1].ended
    for store in stores:
        store.close()


_FAULTS = {"a": (NORM,), "b": (replace(SLOT, checkpoint="layers.3.attn.k_cache"),), "c": (DEEPER, SLOT), "d": ()}


def test_which_night_goes_on(store: SqlStore, tmp_path: Path) -> None:
    plan, other = plan_of("a", "b"), plan_of("a")
    first = open_night(plan, store, NOW)
    assert open_night(plan, store, NOW + GOES_ON / 2) == first
    assert open_night(plan, store, NOW + GOES_ON * 2).number == 2, "too long ago"
    assert open_night(plan, store, NOW + GOES_ON * 2, fresh=True).number == 3
    assert open_night(other, store, NOW + GOES_ON * 2).number == 4, "the plan was changed"
    ended = store.end(store.nights("nightly")[-1], NOW)
    assert open_night(other, store, NOW + GOES_ON * 2).number == 5 and ended.ended


def test_a_done_case_is_not_kept_twice(store: SqlStore, tmp_path: Path) -> None:
    night = open_night(plan_of("a"), store, NOW)
    store.add(night, Outcome("a", "aligned"))
    with pytest.raises(Exception, match="UNIQUE"):
        store.add(night, Outcome("a", "diverged"))
    assert store.outcomes(night) == (Outcome("a", "aligned"),)


def test_runs_of_old_nights_are_removed_and_their_results_stay(store: SqlStore, tmp_path: Path) -> None:
    plan = plan_of("a", keep=2)

    def place(night: Night) -> Path:
        return tmp_path / str(night.number)

    for day in range(4):
        run(store, tmp_path, {"a": result(NORM)}, plan, day)
    assert [one.number for one in remove_old(plan, store, place)] == [1, 2]
    assert [(place(night) / "cases").is_dir() for night in store.nights("nightly")] == [False, False, True, True]
    assert [len(store.outcomes(night)) for night in store.nights("nightly")] == [1, 1, 1, 1]


def test_a_store_that_is_no_database(tmp_path: Path) -> None:
    file = tmp_path / "nights.sqlite"
    file.write_text(
        "this is a letter to somebody, and longer than a hundred bytes, so that it is looked at as a file " * 4
    )
    with pytest.raises(UserError, match="cannot be used as the store of nights"):
        SqlStore.at(file)


def test_a_night_that_was_given_up_hides_no_earlier_one(store: SqlStore, tmp_path: Path) -> None:
    """Killed before the case ran, and not gone on with: what is known of it is what the night before that said."""
    run(store, tmp_path, {"a": result(NORM), "b": "no memory"})
    other = store.begin("another plan", "00", NOW)
    store.add(other, Outcome("a", "aligned"))
    open_night(plan_of("a", "b"), store, NOW + timedelta(days=1))
    night = run(store, tmp_path, {"a": result(NORM), "b": "no memory"}, day=3)
    assert (states(night[0].changed), night[0].earlier) == (["known"], 1)
    assert night[1].failed_before and exit_code(night, "new") == 0
