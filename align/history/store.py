"""What is kept of nights, behind one small interface; SQLite through SQLAlchemy.

SQLAlchemy, so that a store of a whole cluster can follow with another URL and the same code. A case is one row that is
written whole when its run has ended, so a night that is killed goes on with the cases that have none.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import sqlalchemy as sql
from sqlalchemy.exc import SQLAlchemyError

from align.errors import UserError
from align.history.changes import Change, Found, State

NOT_COMPARABLE = "not comparable"
VERDICTS = ("aligned", "diverged", NOT_COMPARABLE)


@dataclass(frozen=True)
class Night:
    """One night.

    Attributes:
        number: from 1, in order.
        plan: name of the plan.
        sha256: of the plan's cases and limits.
        started, ended: ISO 8601; ``ended`` is empty while it runs, or after it was killed.
    """

    number: int
    plan: str
    sha256: str
    started: str
    ended: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a case came to in a night.

    Attributes:
        case: its name in the plan.
        verdict: one of :data:`VERDICTS`.
        reason: why it is not comparable; empty otherwise.
        case_sha256: of the case that was run; empty if it did not come to one.
        seconds: it took.
        directory: of its run.
        versions: packages by side, as in a result.
        findings: the headline first.
        changed: what became of findings since the last night in which the case was comparable.
        earlier: number of that night; 0 if there is none.
        failed_before: whether the case was not comparable the last time that it ran before.
    """

    case: str
    verdict: str
    reason: str = ""
    case_sha256: str = ""
    seconds: float = 0.0
    directory: str = ""
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    findings: tuple[Found, ...] = ()
    changed: tuple[Change, ...] = ()
    earlier: int = 0
    failed_before: bool = False

    def of(self, *states: State) -> tuple[Change, ...]:
        """Findings in these states."""
        return tuple(one for one in self.changed if one.state in states)

    @property
    def comparable(self) -> bool:
        return self.verdict != NOT_COMPARABLE


class Store(Protocol):
    """Where nights are kept."""

    def begin(self, plan: str, sha256: str, started: datetime) -> Night:
        """Begin a night."""

    def end(self, night: Night, ended: datetime) -> Night:
        """All cases of a night are done."""

    def nights(self, plan: str) -> tuple[Night, ...]:
        """All nights of a plan, in order."""

    def add(self, night: Night, outcome: Outcome) -> None:
        """Keep what a case came to; a second one of the same case is refused."""

    def outcomes(self, night: Night) -> tuple[Outcome, ...]:
        """Of a night, in the order in which they were added."""

    def last(self, night: Night, case: str, comparable: bool = False) -> tuple[int, Outcome] | None:
        """What a case came to the last time before a night of its plan, and the number of that night.

        Args:
            comparable: the last time that it could be compared.
        """

    def close(self) -> None:
        """Let go of the store."""


_TABLES = sql.MetaData()
_NIGHTS = sql.Table(
    "nights",
    _TABLES,
    sql.Column("number", sql.Integer, primary_key=True),
    sql.Column("plan", sql.String, nullable=False, index=True),
    sql.Column("sha256", sql.String, nullable=False),
    sql.Column("started", sql.String, nullable=False),
    sql.Column("ended", sql.String, nullable=False, default=""),
)
_CASES = sql.Table(
    "cases",
    _TABLES,
    sql.Column("id", sql.Integer, primary_key=True),
    sql.Column("night", sql.ForeignKey("nights.number"), nullable=False),
    sql.Column("name", sql.String, nullable=False),
    sql.Column("verdict", sql.String, nullable=False),
    sql.Column("reason", sql.String, nullable=False),
    sql.Column("case_sha256", sql.String, nullable=False),
    sql.Column("seconds", sql.Float, nullable=False),
    sql.Column("directory", sql.String, nullable=False),
    sql.Column("versions", sql.JSON, nullable=False),
    sql.Column("earlier", sql.Integer, nullable=False),
    sql.Column("failed_before", sql.Boolean, nullable=False),
    sql.UniqueConstraint("night", "name"),
)
_FINDINGS = sql.Table(
    "findings",
    _TABLES,
    sql.Column("id", sql.Integer, primary_key=True),
    sql.Column("case", sql.ForeignKey("cases.id"), nullable=False, index=True),
    sql.Column("state", sql.String, nullable=False),
    sql.Column("fingerprint", sql.String, nullable=False, index=True),
    sql.Column("before", sql.JSON),
    sql.Column("after", sql.JSON),
)


class SqlStore:
    """Of a SQLAlchemy URL, ``sqlite:///FILE``; tables are made if need be.

    Raises:
        UserError: the database cannot be opened or written.
    """

    def __init__(self, url: str) -> None:
        self._engine = sql.create_engine(url)
        try:
            _TABLES.create_all(self._engine)
        except SQLAlchemyError as error:
            raise UserError(
                f"{url} cannot be used as the store of nights: {error.__cause__ or error}",
                "choose another --out, or move that file away",
            ) from error

    @classmethod
    def at(cls, file: Path) -> SqlStore:
        """In a file, whose directory is made."""
        file.parent.mkdir(parents=True, exist_ok=True)
        return cls(f"sqlite:///{file}")

    def begin(self, plan: str, sha256: str, started: datetime) -> Night:
        row = {"plan": plan, "sha256": sha256, "started": _iso(started), "ended": ""}
        with self._engine.begin() as connection:
            number = _key(connection.execute(sql.insert(_NIGHTS).values(**row)))
        return Night(number, **row)

    def end(self, night: Night, ended: datetime) -> Night:
        done = replace(night, ended=_iso(ended))
        change = sql.update(_NIGHTS).where(_NIGHTS.c.number == night.number).values(ended=done.ended)
        with self._engine.begin() as connection:
            connection.execute(change)
        return done

    def nights(self, plan: str) -> tuple[Night, ...]:
        query = sql.select(_NIGHTS).where(_NIGHTS.c.plan == plan).order_by(_NIGHTS.c.number)
        with self._engine.connect() as connection:
            return tuple(Night(**row) for row in connection.execute(query).mappings())

    def add(self, night: Night, outcome: Outcome) -> None:
        row = {
            "night": night.number,
            "name": outcome.case,
            "verdict": outcome.verdict,
            "reason": outcome.reason,
            "case_sha256": outcome.case_sha256,
            "seconds": outcome.seconds,
            "directory": outcome.directory,
            "versions": outcome.versions,
            "earlier": outcome.earlier,
            "failed_before": outcome.failed_before,
        }
        with self._engine.begin() as connection:  # all of it or nothing
            case = _key(connection.execute(sql.insert(_CASES).values(**row)))
            for one in outcome.changed:
                plain = one.to_dict()
                connection.execute(sql.insert(_FINDINGS).values(case=case, fingerprint=one.found.fingerprint, **plain))

    def outcomes(self, night: Night) -> tuple[Outcome, ...]:
        cases = sql.select(_CASES).where(_CASES.c.night == night.number).order_by(_CASES.c.id)
        with self._engine.connect() as connection:
            return tuple(self._outcome(connection, dict(row)) for row in connection.execute(cases).mappings())

    def last(self, night: Night, case: str, comparable: bool = False) -> tuple[int, Outcome] | None:
        query = (
            sql.select(_CASES)
            .join(_NIGHTS, _NIGHTS.c.number == _CASES.c.night)
            .where(_NIGHTS.c.plan == night.plan, _NIGHTS.c.number < night.number, _CASES.c.name == case)
            .order_by(_CASES.c.night.desc())
            .limit(1)
        )
        if comparable:
            query = query.where(_CASES.c.verdict != NOT_COMPARABLE)
        with self._engine.connect() as connection:
            row = connection.execute(query).mappings().first()
            return None if row is None else (int(row["night"]), self._outcome(connection, dict(row)))

    def _outcome(self, connection: sql.Connection, row: dict[str, Any]) -> Outcome:
        query = sql.select(_FINDINGS).where(_FINDINGS.c.case == row.pop("id")).order_by(_FINDINGS.c.id)
        changed = tuple(
            Change(
                one["state"], *(None if one[key] is None else Found.from_dict(one[key]) for key in ("before", "after"))
            )
            for one in connection.execute(query).mappings()
        )
        row.pop("night")
        findings = tuple(one.after for one in changed if one.after is not None)
        return Outcome(case=row.pop("name"), findings=findings, changed=changed, **row)

    def close(self) -> None:
        self._engine.dispose()


def without_times(store: Store, night: Night) -> str:
    """Everything of a night that is the same when it is run again, as JSON: no times and no directories."""
    plain = [
        {
            "case": one.case,
            "verdict": one.verdict,
            "reason": one.reason,
            "sha256": one.case_sha256,
            "changed": [change.to_dict() for change in one.changed],
            "earlier": one.earlier,
            "failed_before": one.failed_before,
        }
        for one in store.outcomes(night)
    ]
    return json.dumps(plain, indent=1, sort_keys=True)


def _key(inserted: sql.CursorResult[Any]) -> int:
    key = inserted.inserted_primary_key
    assert key is not None, "a row was inserted"
    return int(key[0])


def _iso(moment: datetime) -> str:
    return moment.astimezone().isoformat(timespec="seconds")
