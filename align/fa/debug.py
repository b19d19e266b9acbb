"""Seven functions to paste in front of an attention call; names and signatures are those of seed 001, F.1 to F.7.

They print what the rules say and return it. What differs from the published code: the one-shot function checks the
names of the version as well; ``NTD_TND`` is checked by its input part; lengths are read from the axis that the layout
gives them (queries of BNSD from axis 2, keys of TND from axis 0); decode over pages with sparse_mode 3 or 4 is allowed
where the guide's own table allows it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod
from typing import Any

import torch

from align.fa.call import Call, Context, TensorFacts, Value
from align.fa.check import check_call
from align.fa.conditions.version import OLD_SCALE
from align.fa.describe import Describer
from align.fa.operators import AXES, operators
from align.fa.outcome import Report
from align.fa.rules import FAMILIES, rule

#: Of what is printed: ``en`` or ``zh``.
language = "en"

_FIA = {"v1": "npu_fused_infer_attention_score", "v2": "npu_fused_infer_attention_score_v2"}
#: Parameter of the one-shot function → role.
_ROLES = {
    "actual_seq_qlen": "q_lengths",
    "actual_seq_kvlen": "kv_lengths",
    "num_heads": "heads",
    "num_kv_heads": "kv_heads",
    "scale": "scale",
}
_Lengths = Any  # a list, a tensor or None


def debug_atten_mask(
    atten_mask: torch.Tensor | None,
    sparse_mode: int,
    q_seq_len: int,
    kv_seq_len: int,
    batch_size: int,
    is_prefill: bool,
    has_rope: bool,
    layer_idx: int = 0,
) -> Report:
    """F.1: ``sparse_mode`` and ``atten_mask`` together; lengths are those of the longest sequence."""
    path = "mla_absorb" if has_rope else ""
    context = Context(
        phase=_phase(is_prefill), layer=layer_idx, path=path, q_len=q_seq_len, kv_len=kv_seq_len, batch=batch_size
    )
    report = _check("v1", {"sparse_mode": sparse_mode, "atten_mask": atten_mask}, context, ("mask",))
    facts = [
        f"sparse_mode: {sparse_mode}",
        f"is_prefill: {is_prefill}, q_seq_len: {q_seq_len}, kv_seq_len: {kv_seq_len}",
    ]
    if atten_mask is not None:
        facts.append(f"mask shape: {tuple(atten_mask.shape)}, dtype: {atten_mask.dtype}")
    return _say(f"--- Layer {layer_idx} atten_mask Debug ---", facts, report)


def debug_fa_version_params(fa_call_kwargs: Mapping[str, Any], fa_version: str) -> Report:
    """F.2: names of the other version, and scale or head count left out. ``fa_version`` is ``v1`` or ``v2``."""
    report = _check(fa_version, dict(fa_call_kwargs), Context(), ("version",), keep_none=True)
    return _say(f"--- FA {fa_version} parameter names ---", [], report)


def debug_fa_layout_shape(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    input_layout: str,
    num_query_heads: int,
    num_kv_heads: int,
    block_table: torch.Tensor | None = None,
    layer_idx: int = 0,
) -> Report:
    """F.3: ``input_layout`` against the shapes of query, key and value."""
    arguments = {
        "query": query, "key": key, "value": value, "input_layout": input_layout, "block_table": block_table,
        "num_heads": num_query_heads, "num_key_value_heads": num_kv_heads,
    }  # fmt: skip
    report = _check("v1", arguments, Context(layer=layer_idx), ("layout",))
    facts = [f"input_layout: {input_layout}", _shapes(query, key, value)]
    return _say(f"--- Layer {layer_idx} FA Layout Debug ---", facts, report)


def debug_actual_seq_lengths(
    actual_seq_qlen: _Lengths,
    actual_seq_kvlen: _Lengths,
    input_layout: str,
    is_prefill: bool,
    batch_size: int,
    q_seq_len: int,
    kv_seq_len: int,
    layer_idx: int = 0,
) -> Report:
    """F.4: the form of the lengths. In packed layouts ``q_seq_len`` counts all tokens of the query.

    Whether packed keys lie in pages is not said here, and the form of their lengths depends on it: the one-shot
    function checks that.
    """
    context = Context(phase=_phase(is_prefill), layer=layer_idx)
    arguments: dict[str, Any] = {"input_layout": input_layout, "actual_seq_lengths": actual_seq_qlen}
    arguments["query"] = _stand_in(input_layout, batch_size, q_seq_len)
    arguments["actual_seq_lengths_kv"] = actual_seq_kvlen
    packed = "T" in AXES.get(input_layout.split("_")[0], "")
    if packed and actual_seq_kvlen is not None:
        arguments["actual_seq_lengths_kv"] = TensorFacts((len(actual_seq_kvlen),), "int64")
    elif not packed:
        arguments["key"] = _stand_in(input_layout, batch_size, kv_seq_len)
    report = _check("v1", arguments, context, ("lengths",))
    facts = [f"input_layout: {input_layout}, q: {_list(actual_seq_qlen)}, kv: {_list(actual_seq_kvlen)}"]
    return _say(f"--- Layer {layer_idx} actual_seq_lengths Debug ---", facts, report)


def debug_inner_precise(
    atten_mask: torch.Tensor | None, inner_precise: int, q_seq_len: int, sparse_mode: int, layer_idx: int = 0
) -> Report:
    """F.5: rows that are hidden whole need the correction of ``inner_precise`` 2 or 3."""
    width = None if atten_mask is None or atten_mask.dim() < 2 else atten_mask.shape[-1]
    batch = None if atten_mask is None or atten_mask.dim() < 2 else prod(atten_mask.shape[:-2])
    context = Context(layer=layer_idx, q_len=q_seq_len, kv_len=width, batch=batch)
    arguments = {"atten_mask": atten_mask, "inner_precise": inner_precise, "sparse_mode": sparse_mode}
    report = _check("v1", arguments, context, ("precision",))
    return _say(f"--- Layer {layer_idx} inner_precise Debug ---", [f"inner_precise: {inner_precise}"], report)


def debug_mla_rope(
    query: torch.Tensor,
    key: torch.Tensor,
    query_rope: torch.Tensor | None,
    key_rope: torch.Tensor | None,
    input_layout: str,
    sparse_mode: int,
    layer_idx: int = 0,
) -> Report:
    """F.6: what latent attention asks of its rope parts."""
    arguments = {
        "query": query, "key": key, "query_rope": query_rope, "key_rope": key_rope, "input_layout": input_layout,
        "sparse_mode": sparse_mode,
    }  # fmt: skip
    known = ("fa.mla.one-kv-head", "fa.mla.head-count")  # head counts are not among the parameters
    report = _check("v1", arguments, Context(layer=layer_idx), ("mla",), without=known)
    return _say(f"--- Layer {layer_idx} MLA rope Debug ---", [f"input_layout: {input_layout}"], report)


def debug_fa_all_params(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    fa_version: str = "v1",
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    atten_mask: torch.Tensor | None = None,
    actual_seq_qlen: _Lengths = None,
    actual_seq_kvlen: _Lengths = None,
    num_heads: int = 1,
    num_kv_heads: int = 0,
    scale: float = 1.0,
    block_table: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    inner_precise: int = 0,
    is_prefill: bool = True,
    layer_idx: int = 0,
    **kwargs: Any,
) -> Report:
    """F.7: everything at once. ``kwargs`` are further arguments of the call; its own names for the ones above win.

    Raises:
        ValueError: ``fa_version`` is neither ``v1`` nor ``v2``.
    """
    own = {
        "input_layout": input_layout, "sparse_mode": sparse_mode, "atten_mask": atten_mask, "block_table": block_table,
        "query_rope": query_rope, "key_rope": key_rope, "inner_precise": inner_precise,
    }  # fmt: skip
    named = {
        "actual_seq_qlen": actual_seq_qlen, "actual_seq_kvlen": actual_seq_kvlen, "num_heads": num_heads,
        "num_kv_heads": num_kv_heads, "scale": scale,
    }  # fmt: skip
    operator = operators()[_operator(fa_version)]
    arguments = {"query": query, "key": key, "value": value, **own}
    arguments.update({operator.roles[_ROLES[name]]: given for name, given in named.items()})
    of_either = set().union(*(operators()[name].arguments for name in _FIA.values()), {OLD_SCALE})
    arguments.update({name: given for name, given in kwargs.items() if name in of_either})
    if block_table is not None and arguments.get("block_size") is None:
        arguments["block_size"] = _block(
            key, arguments[operator.roles["kv_heads"]] or arguments[operator.roles["heads"]]
        )
    context = Context(phase=_phase(is_prefill), layer=layer_idx)
    report = _check(fa_version, arguments, context, [one for one in FAMILIES if one != "write"])
    frame = "=" * 60
    title = f"\n{frame}\nFA {fa_version} check - Layer {layer_idx} ({'Prefill' if is_prefill else 'Decode'})\n{frame}"
    facts = [f"input_layout: {input_layout}", _shapes(query, key, value)]
    verdict = f"{len(report.errors)} ERROR, {len(report.of('WARN'))} WARN, {len(report.held)} rules hold"
    return _say(title, facts, report, f"{verdict}\n{frame}")


# ---------------------------------------------------------------------------------------------------- parts


def _operator(version: str) -> str:
    if version not in _FIA:
        raise ValueError(f"fa_version {version!r} is neither v1 nor v2")
    return _FIA[version]


def _phase(is_prefill: bool) -> str:
    return "prefill" if is_prefill else "decode"


def _check(
    version: str,
    arguments: Mapping[str, Any],
    context: Context,
    families: Collection[str],
    without: Collection[str] = (),
    keep_none: bool = False,
) -> Report:
    """Check what is known; facts that stand for a tensor pass through."""
    facts: dict[str, Value] = {name: one for name, one in arguments.items() if isinstance(one, TensorFacts)}
    live = {name: one for name, one in arguments.items() if name not in facts and (keep_none or one is not None)}
    call = Describer().describe(_operator(version), (), live, context)
    report = check_call(Call(call.operator, {**call.arguments, **facts}, context), families)
    kept = tuple(one for one in report.findings if one.rule not in without)
    return Report(report.call, kept, report.held, report.unknown)


def _stand_in(layout: str, batch: int, length: int) -> TensorFacts | None:
    """A tensor of which only the lengths are known."""
    axes = AXES.get(layout.split("_")[0])
    sizes = {"B": batch, "S": length, "T": length}
    return None if axes is None else TensorFacts(tuple(sizes.get(one, 1) for one in axes), "")


def _block(key: torch.Tensor, kv_heads: Any) -> int:
    """Block size of a cache ``[blocks, size, H]``, ``[blocks, size, heads, dim]`` or ``[blocks, heads, size, dim]``."""
    heads_first = key.dim() == 4 and key.shape[1] == kv_heads and key.shape[2] != kv_heads
    return int(key.shape[2 if heads_first else 1])


def _shapes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str:
    return f"Q: {tuple(query.shape)}, K: {tuple(key.shape)}, V: {tuple(value.shape)}"


def _list(lengths: _Lengths) -> Any:
    return lengths.tolist() if isinstance(lengths, torch.Tensor) else lengths


def _say(title: str, facts: Collection[str], report: Report, end: str = "") -> Report:
    """Print in the order of the families, so that what belongs together stands together."""
    order = {one: place for place, one in enumerate(FAMILIES)}
    lines = [title, *(f"  {one}" for one in facts)]
    ordered = sorted(report.findings, key=lambda one: order[_family(one.rule)])
    lines += [f"  [{one.severity}] {one.said[language]} ({one.rule})" for one in ordered]
    print("\n".join([*lines, *([end] if end else [])]))
    return report


def _family(name: str) -> str:
    found = rule(name)
    assert found is not None, name
    return found.family
