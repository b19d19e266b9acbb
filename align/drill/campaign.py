"""A drill: which trials, in which order, what is done already, and what all of it comes to."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from align.drill.benign import benign
from align.drill.library import Fault
from align.drill.score import Rate, Score, rates
from align.drill.settings import ANY, DIFFERENT, Setting, batches
from align.drill.trials import Trial, generator
from align.errors import UserError

TRIALS, SUMMARY, PLAN, REPORT = "trials.jsonl", "drill.json", "plan.json", "drill.md"
#: One control in so many has two ranks; no multiple of what models take turns by, so that it is not always the same.
_SPREAD = 13
#: What a report of the library must reach (issue 10).
GOALS: Mapping[str, float] = {"found": 0.98, "path": 0.98, "checkpoint": 0.95, "side": 1.0}


def setting_of(fault: Fault, model: str) -> Setting:
    """What a fault's trials launch."""
    said = fault.said
    options = tuple((engine, tuple(texts)) for engine, texts in sorted(said.options.items()))
    return Setting(model, said.batch, tp=said.tp, options=options, allow=said.allow, live=said.live)


def control_settings(
    models: Sequence[str], seed: int, count: int, spreads: Callable[[str], bool] = lambda model: True
) -> tuple[Setting, ...]:
    """Clean pairs of models over batches, dtypes, layouts and numerics, always different on the two sides, and swapped.

    The first model has half of them, the others share the rest. Two ranks take two or three
    times as long, so one in thirteen has them. Blocks have 128 tokens: vllm-ascend takes no others for dense models
    (:mod:`align.run.plan`).

    Args:
        spreads: whether a model can have two ranks; where it cannot, the first that can takes its turn.
    """
    chance = generator(seed, "controls")
    grids = {model: _grid(model) for model in models}
    for grid in grids.values():
        for part in grid:
            chance.shuffle(part)
    turns = [models[0], *models[1:]] if len(models) < 2 else [one for other in models[1:] for one in (models[0], other)]
    counts: Counter[tuple[str, bool]] = Counter()
    found = []
    for at in range(count):
        model, spread = turns[at % len(turns)], at % _SPREAD == _SPREAD - 1
        if spread and not spreads(model):
            model = next((one for one in models if spreads(one)), model)
            spread = spreads(model)
        part = grids[model][spread]
        found.append(part[counts[model, spread] % len(part)])
        counts[model, spread] += 1
    return tuple(found)


def _grid(model: str) -> tuple[list[Setting], list[Setting]]:
    """With one rank, and with two."""
    alone, spread = (
        [
            Setting(model, batch, dtype, tp=tp, numerics=numerics)
            for batch in batches()
            for dtype in ("bfloat16", "float16")
            for numerics in (DIFFERENT, DIFFERENT[::-1])
        ]
        for tp in (1, 2)
    )
    return alone, spread


def controls(settings: Sequence[Setting]) -> list[tuple[Setting, Trial]]:
    """A trial without a fault for each; equal settings are numbered."""
    seen: Counter[str] = Counter()
    found = []
    for setting in settings:
        found.append((setting, Trial("", seen[setting.name], "none", "", {}, None, setting.name)))
        seen[setting.name] += 1
    return found


#: A trial, and what its case is made of.
Work = tuple[Setting, Trial]


def launch_of(setting: Setting, trial: Trial) -> Setting:
    """What engines are launched with for a trial: all batches of clean runs share one.

    What is named has its own: a fault's batch decides how large the cache is, and so which blocks there are to be wrong
    about.
    """
    return replace(setting, batch=ANY) if setting.live and not trial.fault and not trial.benign else setting


def by_launch(work: Iterable[Work]) -> dict[Setting, list[Work]]:
    """Trials that share a launch, together: the most first."""
    groups: dict[Setting, list[Work]] = {}
    for setting, trial in work:
        groups.setdefault(launch_of(setting, trial), []).append((setting, trial))
    return dict(sorted(groups.items(), key=lambda item: (-len(item[1]), item[0].name)))


class Journal:
    """The trials that are done, one line each; a line that was cut does not count.

    Args:
        directory: of the drill.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / TRIALS
        self.done: dict[str, dict[str, Any]] = {}
        if self._path.is_file():
            whole = self._path.read_text(encoding="utf-8")
            lines = whole.split("\n")
            for line in lines[:-1]:
                record = json.loads(line)
                self.done[record["id"]] = record
            if lines[-1]:  # it was cut: the next one begins on a line of its own
                self._path.write_text(whole[: -len(lines[-1])], encoding="utf-8")

    def add(self, record: Mapping[str, Any]) -> None:
        """Keep the result of a trial."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self.done[record["id"]] = dict(record)


def check_same(directory: Path, plan: Mapping[str, Any]) -> None:
    """Write the plan of a drill, or see that it is the one that was begun there.

    Raises:
        UserError: it is another one.
    """
    path = directory / PLAN
    text = json.dumps(plan, indent=1, sort_keys=True) + "\n"
    if not path.is_file():
        path.write_text(text, encoding="utf-8")
    elif path.read_text(encoding="utf-8") != text:
        raise UserError(f"{directory} holds another drill", "give the same options to go on with it, or another --out")


@dataclass(frozen=True)
class Group:
    """Scores of trials that belong together, such as all of path A."""

    name: str
    scores: tuple[Score, ...]

    def rates(self) -> dict[str, Rate]:
        return rates(self.scores)


def score_of(record: Mapping[str, Any]) -> Score:
    """The score in a journal's line."""
    plain = dict(record["score"])
    plain.pop("right")
    return Score(**plain)


def summary(records: Iterable[Mapping[str, Any]], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Rates of all and of each path and fault, misses one by one, false alarms, and whether the goals are met.

    Args:
        facts: of the drill: seed, model, engines, versions.
    """
    all_ = list(records)
    faults = [one for one in all_ if one["fault"]]
    clean = [one for one in all_ if not one["fault"]]

    def of(part: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        return {name: rate.to_dict() for name, rate in rates([score_of(one) for one in part]).items()}

    paths = sorted({one["expected"]["path"] for one in faults})
    names = sorted({one["fault"] for one in faults})
    overall = of(faults)
    alarms = [one for one in clean if one["alarm"]]
    goals = {name: (rate := overall[name]["share"]) is not None and rate >= goal for name, goal in GOALS.items()}
    return {
        **facts,
        "trials": len(faults),
        "controls": len(clean),
        "rates": overall,
        "by_path": {path: of(one for one in faults if one["expected"]["path"] == path) for path in paths},
        "by_fault": {name: of(one for one in faults if one["fault"] == name) for name in names},
        "false_alarms": Rate(len(alarms), len(clean)).to_dict(),
        "differences": _differences(clean),
        "wanted": {name: f"≥ {100 * goal:.0f} %" if goal < 1 else "100 %" for name, goal in GOALS.items()},
        "goals": {**goals, "false_alarms": not alarms if clean else None},
        "misses": [_miss(one) for one in faults if not one["score"]["right"]],
        "alarms": [_alarm(one) for one in alarms],
        "seconds": round(sum(one["seconds"] for one in all_), 1),
    }


def _differences(clean: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of controls whose sides differ and may: how many, and how many false alarms."""
    found = {}
    for name, one in benign().items():
        of_it = [record for record in clean if record.get("benign") == name]
        if of_it:
            alarms = sum(bool(record["alarm"]) for record in of_it)
            found[name] = {"source": one.source, "why": one.why, "trials": len(of_it), "alarms": alarms}
    return found


def _miss(record: Mapping[str, Any]) -> dict[str, Any]:
    first = record["findings"][0] if record["findings"] else None
    return {
        "id": record["id"],
        "drawn": record["drawn"],
        "why": record["score"]["why"],
        "verdict": record["verdict"],
        "said": "" if first is None else first["summary"],
        "reason": record["reason"],
    }


def _alarm(record: Mapping[str, Any]) -> dict[str, Any]:
    first = record["findings"][0] if record["findings"] else None
    return {
        "id": record["id"],
        "verdict": record["verdict"],
        "said": "" if first is None else first["summary"],
        "reason": record["reason"],
    }
