"""A layout in each engine's own spelling, in both directions.

lmdeploy counts the data-parallel groups inside its ``--tp`` unless experts are parallel; vllm counts them apart, and
spreads the experts over all ranks or over none.
"""

from __future__ import annotations

from collections.abc import Sequence

from align.layout.triple import Layout

#: Engine → its spellings → what each says.
_SPELLINGS = {
    "lmdeploy": {"--tp": "tp", "--dp": "dp", "--ep": "ep"},
    "vllm": {
        "--tensor-parallel-size": "tp",
        "-tp": "tp",
        "--data-parallel-size": "dp",
        "-dp": "dp",
        "--enable-expert-parallel": "experts",
        "-ep": "experts",
    },
}
_SWITCHES = ("experts",)


def engine_flags(layout: Layout, engine: str) -> tuple[str, ...]:
    """Command-line flags by which ``engine`` is asked for ``layout``.

    Raises:
        ValueError: the engine has no parallel layouts here.
    """
    _spellings(engine)
    if engine == "lmdeploy":
        if layout.ep == 1:
            return ("--tp", str(layout.world), "--dp", str(layout.dp))
        return ("--tp", str(layout.tp), "--dp", str(layout.dp), "--ep", str(layout.ep))
    flags = ("--tensor-parallel-size", str(layout.tp), "--data-parallel-size", str(layout.dp))
    return (*flags, "--enable-expert-parallel") if layout.ep > 1 else flags


def layout_of_flags(flags: Sequence[str], engine: str) -> Layout:
    """The layout that an engine makes of its flags; other flags are passed over.

    Args:
        flags: words of a command line, ``--tp 4`` or ``--tp=4``; what is not given is 1.

    Raises:
        ValueError: the engine has no parallel layouts here, or would not do what the flags say; names the rule.
    """
    given = _given(flags, _spellings(engine))
    tp, dp = given.get("tp", 1), given.get("dp", 1)
    if engine == "vllm":
        return Layout(tp, dp, tp * dp if given.get("experts") else 1)
    ep = given.get("ep", 1)
    if ep > 1:  # world = ep, attention's share = world / dp (lmdeploy's DistConfig)
        if ep != tp * dp:
            raise ValueError(f"lmdeploy: with --ep its value is tp × dp, got --tp {tp} --dp {dp} --ep {ep}")
        return Layout(tp, dp, ep)
    if dp > 1 and tp == 1:
        raise ValueError(
            f"lmdeploy drops --dp {dp} silently where --tp is 1: --tp counts all devices; valid: --tp {dp} --dp {dp}"
        )
    if tp % dp:
        raise ValueError(f"lmdeploy: --tp counts all devices, so --dp must divide it, got --tp {tp} --dp {dp}")
    return Layout(tp // dp, dp, 1)


def _spellings(engine: str) -> dict[str, str]:
    if engine not in _SPELLINGS:
        raise ValueError(f"engine {engine!r} takes no layout; valid: {', '.join(_SPELLINGS)}")
    return _SPELLINGS[engine]


def _given(flags: Sequence[str], spellings: dict[str, str]) -> dict[str, int]:
    found: dict[str, int] = {}
    words = iter(flags)
    for word in words:
        flag, equals, value = word.partition("=")
        name = spellings.get(flag)
        if name is None:
            continue
        if name in _SWITCHES:
            found[name] = 1
            continue
        value = value if equals else next(words, "")
        if not value.isdecimal():
            raise ValueError(f"{flag} {value or 'without a value'} is no size; valid: 1, 2, 4, …")
        found[name] = int(value)
    return found
