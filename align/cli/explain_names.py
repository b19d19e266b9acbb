"""``align explain`` of a name that findings print: a checkpoint, an operator, or a kind of error that was fitted."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from align.checklists.table import Item, items
from align.checklists.table import lists as checklists
from align.checkpoints.bounds import bounds
from align.checkpoints.table import Kind, kinds, parse
from align.cli.output import columns
from align.fits.table import FaultKind
from align.fits.table import kinds as faults
from align.knowledge import Entry, Knowledge, Language
from align.sentences import said, text_of
from align.trace.pt_names import read_file_name

#: ``layers.2.``, and as the table has it ``layers.{i}.``.
_LAYER = re.compile(r"layers?\.(?P<layer>\d+|\{?i\}?)(?:\.(?P<rest>.+))?")
#: Ids of rules about attention arguments begin so.
RULES = "fa."
#: Ids of items of the checklists; troubleshooting has entries of its own in the table of knowledge.
_ITEMS = re.compile(r"000-q\d+|003-ck-\d+")
#: That of :class:`align.compare.residual.ResidualPolicy`, which imports torch.
SLACK = 1.02
#: Between the steps of a derivation.
_PARTS = re.compile(r"(?<=\)), |; ")
#: Groups of files that are read for an operator; what else is known about these files is known about the operator.
_READ = {"attention": "attention", "slots": "cache", "rope": "rope", "experts": "experts", "all_reduce": "parallel"}
_WEIGHTED = ("embedding", "rms_norm", "linear")
_LABELS: dict[str, str] = {
    "operator": "算子",
    "rounding": "允许的舍入",
    "shape": "形状",
    "reads": "输入",
    "read by": "被谁读取",
    "exists": "何时存在",
    "makes": "产生",
    "findings": "发现类型",
    "errors": "可识别的错误",
    "check": "检查",
    "known": "已知问题",
    "read": "阅读",
    "next": "下一步",
    "about": "范围",
    "decided by": "判定依据",
    "observable by": "可观测条件",
    "message": "提示",
    "example": "示例",
    "source": "来源",
}


@dataclass(frozen=True)
class Told:
    """What is known about a name.

    Attributes:
        name, title: as asked for, and one sentence.
        parts: labels with their lines, in English.
        entries: of the table of knowledge, the kinds of findings first.
        record: for programs.
    """

    name: str
    title: str
    parts: tuple[tuple[str, tuple[str, ...]], ...]
    entries: tuple[Entry, ...]
    record: dict[str, Any]

    def labelled(self, language: Language) -> list[tuple[str, tuple[str, ...]]]:
        """The parts that say something, with labels in a language."""
        return [(label if language == "en" else _LABELS.get(label, label), said) for label, said in self.parts if said]


def told(word: str, known: Knowledge, language: Language) -> Told | None:
    """What a name stands for; ``None`` if it is no checkpoint, group of checkpoints, operator, fitted error or rule.

    Accepts ``layers.2.mlp_norm``, ``mlp_norm``, ``mlp_up``, ``layer0_attn_out_output_rank0.pt``, ``attn``,
    ``rms_norm``, ``eps`` and ``fa.mask.missing``.
    """
    word = word.strip().casefold().removesuffix(".pt")
    if word.startswith(RULES):
        from align.cli import fa_rules  # needs torch, which the rest does without

        return fa_rules.told(word)
    if _ITEMS.fullmatch(word) and (item := items().get(word.upper())) is not None:
        return _item(item, language)
    layer, rest = _split(word)
    kind = kinds().get(rest) or {name.replace(".", "_"): one for name, one in kinds().items()}.get(rest)
    if kind is not None:
        return _checkpoint(kind, layer if kind.per_layer else None, known, language)
    group = [one for one in kinds().values() if one.name.startswith(f"{rest}.") or (not rest and one.per_layer)]
    if group:
        return _group(rest or "layers", layer, group)
    if rest == word:
        if word in _operators():
            return _operator(word, known, language)
        if word in faults():
            return _fault(faults()[word], known, language)
    return None


def closest(word: str, known: Knowledge) -> list[str]:
    """Names that look like one that was typed: kinds of findings, checkpoints, operators and fitted errors."""
    layer, rest = _split(word.strip().casefold())
    ids = {entry.casefold(): entry for entry in known.entries}
    lower = {one.casefold(): one for one in items()}
    names = {**lower, **ids, **{one: one for one in (*kinds(), *_operators(), *faults())}}
    found = [names[match] for match in get_close_matches(rest, names, n=4, cutoff=0.6)]
    return [kinds()[one].at(layer) if layer is not None and one in kinds() and kinds()[one].per_layer else one
            for one in found]  # fmt: skip


def _split(word: str) -> tuple[int | None, str]:
    """Layer and the rest of a checkpoint's name, also of a file's."""
    match = _LAYER.fullmatch(word)
    if match is not None:
        return (int(match["layer"]) if match["layer"].isdigit() else None), match["rest"] or ""
    name, _ = read_file_name(word)
    try:
        found = parse(name)
    except ValueError:
        return None, word
    return found.layer, found.kind.name


def _operators() -> list[str]:
    return list(dict.fromkeys((*(name for kind in kinds().values() for name in kind.operators), *bounds())))


# ------------------------------------------------------------------------------------------------------- what is said


def _checkpoint(kind: Kind, layer: int | None, known: Knowledge, language: Language) -> Told:
    name = _at(kind, layer)
    entries = _entries(kind.operators, kind.integer, known)
    reads = [" or ".join(_input(kind, one, layer) for one in alternatives) for alternatives in kind.inputs]
    if kind.name == "block_in" and layer == 0:
        reads = ["embed"]
    by = [_at(other, layer) for other in kinds().values() if _reads(other, kind)]
    shape = f"[{', '.join(kind.axes)}]" + (f", tensor parallelism splits {kind.shard}" if kind.shard else "")
    exists = "" if kind.exists_when == "always" else kind.exists_when
    families = "" if "all" in kind.families else f"models: {', '.join(kind.families)}"
    taps = list(_taps(kind, layer))
    record = {
        "kind": kind.name, "layer": layer, "operators": list(kind.operators), "axes": list(kind.axes),
        "reads": reads, "read_by": by, "exists_when": kind.exists_when, "meaning": kind.meaning,
        "taps": {engine: "; ".join(said for one, said in taps if one == engine) for engine, _ in taps},
    }  # fmt: skip
    return Told(
        name,
        kind.meaning,
        (
            ("operator", tuple(kind.operators)),
            ("rounding", tuple(line for operator in kind.operators for line in _bound(operator))),
            ("shape", (shape,)),
            ("reads", tuple(reads)),
            ("read by", tuple(by)),
            ("exists", tuple(one for one in (exists, families) if one)),
            *((engine, (said,)) for engine, said in taps),
            *_known(kind.operators, kind.integer, entries, known, language),
            ("next", (_next_of(kind), "align taps lmdeploy", *(f"align explain {one}" for one in kind.operators[:1]))),
        ),
        entries,
        {"name": name, "checkpoint": record},
    )


def _operator(name: str, known: Knowledge, language: Language) -> Told:
    entries = _entries((name,), False, known)
    made = [_at(kind, None) for kind in kinds().values() if name in kind.operators]
    return Told(
        name,
        f"an operator: what it makes is recomputed from its own inputs{'' if name in bounds() else ' where it can be'}",
        (
            ("rounding", _bound(name)),
            ("makes", tuple(made)),
            *_known((name,), False, entries, known, language),
            ("next", tuple(f"align explain {one.rpartition('}.')[2]}" for one in (*made[:1], "operator"))),
        ),
        entries,
        {"name": name, "operator": {"checkpoints": made}},
    )


def _fault(fault: FaultKind, known: Knowledge, language: Language) -> Told:
    entry = known.entries["operator"]
    return Told(
        fault.name,
        fault.sentence(language),
        (
            ("check", (fault.check(language),)),
            ("findings", (f"{entry.id}: {entry.title.of(language)}",)),
            ("next", ("align explain operator",)),
        ),
        (entry,),
        {"name": fault.name, "error": {"path": fault.path, "check": fault.check(language)}},
    )


def _item(item: Item, language: Language) -> Told:
    found = checklists()[item.list]
    return Told(
        item.id,
        item.text.of(language),
        (
            ("about", (f"{found.title.of(language)}, {item.number}; {found.about.of(language)}",)),
            ("decided by", (*item.decides, *item.rules)),
            ("observable by", (text_of(said(item.mend), language),)),
            ("source", (found.source,)),
            ("next", ("align checklist RUN", *(f"align explain {one}" for one in item.rules[:1]))),
        ),
        (),
        {"name": item.id, "checklist": record(item)},
    )


def record(item: Item) -> dict[str, Any]:
    """An item of a checklist for programs."""
    return {
        "id": item.id,
        "list": item.list,
        "number": item.number,
        "en": item.text.en,
        "zh": item.text.zh,
        "decided_by": list(item.decides),
        "rules": list(item.rules),
        "observable_by": text_of(said(item.mend)),
        "source": checklists()[item.list].source,
    }


def _group(name: str, layer: int | None, group: Sequence[Kind]) -> Told:
    rows = [(_at(kind, layer), " or ".join(kind.operators), kind.meaning.partition(",")[0]) for kind in group]
    first = rows[0][0] if layer is not None else group[0].name
    named = name if layer is None else f"layers.{layer}" if name == "layers" else f"layers.{layer}.{name}"
    return Told(
        named,
        f"{len(rows)} checkpoints, in the order of computation",
        (("", tuple(columns(rows).splitlines())), ("next", (f"align explain {first}", "align taps lmdeploy"))),
        (),
        {"name": named, "checkpoints": [{"name": row[0], "operators": row[1], "meaning": row[2]} for row in rows]},
    )


def _known(
    operators: Sequence[str], integer: bool, entries: Sequence[Entry], known: Knowledge, language: Language
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What goes wrong there."""
    yield "findings", tuple(f"{one.id}: {one.title.of(language)}" for one in entries if not one.of_a_seed)
    own = [one for name in operators for one in _faults_of(name)]
    yield "errors", () if integer else tuple(f"{one.name}: {one.sentence(language)}" for one in own)
    yield "known", tuple(f"{one.id}: {one.title.of(language)}" for one in entries if one.of_a_seed)
    groups = [_READ.get(name, "operator") for name in operators]
    yield "read", tuple(dict.fromkeys(file for group in groups for file in known.groups[group].files))


def _entries(operators: Sequence[str], integer: bool, known: Knowledge) -> tuple[Entry, ...]:
    """Kinds of findings that may name it, then what the seeds know of the files that are read for it."""
    names = ["slots"] if "slots" in operators else [] if integer else ["operator"]
    names += ["weights"] if set(_WEIGHTED) & set(operators) else []
    names += ["collective"] if "all_reduce" in operators else []
    names += ["positions", "host fallback"] if "rope" in operators else []
    names += ["slots"] if "attention" in operators else []
    groups = {_READ.get(name, "operator") for name in operators}
    traps = [one.id for one in known.entries.values() if one.of_a_seed and groups & set(one.read)]
    return tuple(known.entries[name] for name in dict.fromkeys((*names, *traps)))


def _faults_of(operator: str) -> list[FaultKind]:
    """Those that this operator alone may have; a constant factor and the like fit any."""
    own = {
        "rms_norm": ("eps", "norm_"),
        "rope": ("rope_",),
        "attention": ("attention_",),
        "silu_mul": ("activation", "up_missing"),
        "linear": ("wrong_weight", "weight_transposed"),
        "all_reduce": ("partial_sum",),
        "add": ("term_",),
        "topk": ("router_",),
    }.get(operator, ())
    return [fault for fault in faults().values() if fault.name.startswith(own)] if own else []


def _bound(operator: str) -> tuple[str, ...]:
    """What rounding may do to an operator's result, and why; nothing for one that is not recomputed."""
    one = bounds().get(operator)
    if one is None:
        return ()
    if not one.max_roundings:
        return (f"{operator}: none, {one.derivation}",)
    return (
        f"{operator}: an element is off by {one.max_roundings:g} roundings at most",
        f"{operator}: findings say {one.max_roundings * SLACK:.3g}, with a slack of {SLACK:g} for float32 arithmetic",
        f"{operator}: a token's common factor is off by {one.gain_roundings:g} at most",
        *(f"why: {part}" for part in _PARTS.split(one.derivation)),
    )


def lists() -> dict[str, tuple[str, ...]]:
    """All names that are explained besides the entries of the table of knowledge, by what they are."""
    groups = dict.fromkeys(name.partition(".")[0] for name in kinds() if "." in name)
    return {
        "checkpoints": tuple(_at(kind, None) for kind in kinds().values()),
        "groups": (*groups, "layers"),
        "operators": tuple(_operators()),
        "fits": tuple(faults()),
        "checklists": tuple(one for one in items() if _ITEMS.fullmatch(one.casefold())),
    }


def _taps(kind: Kind, layer: int | None) -> Iterator[tuple[str, str]]:
    """Engine, and where it yields the checkpoint; behind it for which models, as the table of taps says."""
    from adapters.probe.taps import ENGINES, load_taps

    for engine in ENGINES:
        for tap in load_taps(engine):
            if tap.checkpoint == kind.name:
                site = tap.site if layer is None else tap.site.replace("{i}", str(layer))
                when = f" ({tap.when})" if tap.when else ""
                yield engine, f"{tap.where}, {tap.pick}{f' at {site}' if site else ''}, as {tap.transform}{when}"


def _next_of(kind: Kind) -> str:
    pattern = _at(kind, None).replace("{i}", "*")
    return f"align run --capture '{pattern}'  # keeps its values"


def _at(kind: Kind, layer: int | None) -> str:
    return kind.at(layer) if layer is not None or not kind.per_layer else f"layers.{{i}}.{kind.name}"


def _input(kind: Kind, text: str, layer: int | None) -> str:
    """``prev.mid`` of layer 2 → ``layers.1.mid``."""
    step, _, rest = text.partition(".")
    if step == "prev":
        return f"layers.{'{i-1}' if layer is None else layer - 1}.{rest}"
    if step == "last":
        return f"{rest} of the last layer"
    other = kinds().get(text)
    return text if other is None else _at(other, layer if kind.per_layer else None)


def _reads(reader: Kind, kind: Kind) -> bool:
    return any(kind.name in alternatives for alternatives in reader.inputs)
