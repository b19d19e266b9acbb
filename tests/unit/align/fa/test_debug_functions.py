"""Seed 001's seven functions: their signatures, what they print, and where the published code slips."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from align import fa
from align.fa import debug

SIGNATURES = {
    "debug_atten_mask": "atten_mask, sparse_mode, q_seq_len, kv_seq_len, batch_size, is_prefill, has_rope, layer_idx=0",
    "debug_fa_version_params": "fa_call_kwargs, fa_version",
    "debug_fa_layout_shape": "query, key, value, input_layout, num_query_heads, num_kv_heads, block_table=None, "
    "layer_idx=0",
    "debug_actual_seq_lengths": "actual_seq_qlen, actual_seq_kvlen, input_layout, is_prefill, batch_size, q_seq_len, "
    "kv_seq_len, layer_idx=0",
    "debug_inner_precise": "atten_mask, inner_precise, q_seq_len, sparse_mode, layer_idx=0",
    "debug_mla_rope": "query, key, query_rope, key_rope, input_layout, sparse_mode, layer_idx=0",
    "debug_fa_all_params": "query, key, value, *, fa_version='v1', input_layout='BSH', sparse_mode=0, atten_mask=None, "
    "actual_seq_qlen=None, actual_seq_kvlen=None, num_heads=1, num_kv_heads=0, scale=1.0, block_table=None, "
    "query_rope=None, key_rope=None, inner_precise=0, is_prefill=True, layer_idx=0, **kwargs",
}
CAUSAL = torch.ones(2048, 2048, dtype=torch.int8).triu(1)
SCALE = 128**-0.5


def half(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.bfloat16)


def rules(report: fa.Report, *severities: str) -> set[str]:
    return {one.rule for one in report.of(*(severities or ("ERROR", "WARN")))}


def pages(**changes: Any) -> dict[str, Any]:
    """Decode of two sequences over pages, as the guide's table of sparse modes has it."""
    return {
        "query": half(2, 4, 128), "key": half(6, 128, 256), "value": half(6, 128, 256), "input_layout": "TND",
        "sparse_mode": 3, "atten_mask": CAUSAL, "actual_seq_qlen": [1, 2], "actual_seq_kvlen": [130, 7], "num_heads": 4,
        "num_kv_heads": 2, "scale": SCALE, "is_prefill": False,
        "block_table": torch.tensor([[1, 3], [2, 0]], dtype=torch.int32), **changes,
    }  # fmt: skip


def everything(**arguments: Any) -> fa.Report:
    return fa.debug_fa_all_params(arguments.pop("query"), arguments.pop("key"), arguments.pop("value"), **arguments)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_the_guide(name: str) -> None:
    signature = inspect.signature(getattr(fa, name))
    parameters = []
    for one in signature.parameters.values():
        if one.kind is one.KEYWORD_ONLY and "*" not in parameters:
            parameters.append("*")
        default = "" if one.default is one.empty else f"={one.default!r}"
        parameters.append(f"**{one.name}" if one.kind is one.VAR_KEYWORD else f"{one.name}{default}")
    assert ", ".join(parameters) == SIGNATURES[name]


# ---------------------------------------------------------------------------------------------------------------- F.1


def mask(
    given: torch.Tensor | None, mode: int, q: int = 8, kv: int = 8, prefill: bool = True, rope: bool = False
) -> Any:
    return fa.debug_atten_mask(given, mode, q, kv, 1, prefill, rope, 5)


def test_f1_decode_of_one_query_ignores_the_mode() -> None:
    assert rules(mask(CAUSAL, 3, q=1, prefill=False)) == {"fa.mask.decode-ignored"}
    assert rules(mask(CAUSAL, 3, q=1, prefill=False, rope=True)) == {"fa.mask.decode-absorbed"}
    assert rules(mask(CAUSAL, 2, q=2, kv=9, prefill=False)) == {"fa.mask.left-up", "fa.mask.left-up-used"}


@pytest.mark.parametrize("mode", [3, 4])
def test_f1_unified_decode_over_pages_is_allowed(mode: int) -> None:
    extra = {} if mode == 3 else {"pre_tokens": 127, "next_tokens": 0}
    assert rules(everything(**pages(sparse_mode=mode, **extra))) == set()


def test_f1_a_mask_in_decode() -> None:
    assert "fa.mask.decode-given" in rules(mask(torch.zeros(1, 1, 8, dtype=torch.bool), 0, q=1, prefill=False))
    assert "fa.mask.decode-given" not in rules(everything(**pages()))


def test_f1_modes_of_prefill() -> None:
    assert rules(mask(CAUSAL, 3)) == set()
    assert rules(mask(CAUSAL, 2)) == {"fa.mask.left-up-used"}
    assert "fa.mask.prefill-mode" in rules(mask(None, 0))
    assert "fa.mask.prefill-mode" not in rules(mask(CAUSAL, 4))


@pytest.mark.parametrize("mode", [1, 2, 3, 4])
def test_f1_a_missing_mask(mode: int) -> None:
    assert "fa.mask.missing" in rules(mask(None, mode), "ERROR")


def test_f1_no_mask_in_mode_0_is_said_to_be_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert rules(mask(None, 0), "OK") == {"fa.mask.none-fits"}
    assert rules(mask(None, 7), "OK") == set()
    assert "[OK] sparse_mode 0 and no mask" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint8, torch.float16])
def test_f1_dtypes_of_a_mask(dtype: torch.dtype) -> None:
    assert ("fa.mask.dtype" in rules(mask(CAUSAL.to(dtype), 3), "ERROR")) == (dtype == torch.float16)


@pytest.mark.parametrize("mode", [2, 3, 4])
def test_f1_shapes_of_a_compressed_mask(mode: int) -> None:
    for lead in ((), (1,), (1, 1)):
        assert "fa.mask.compressed-fits" in rules(mask(CAUSAL.view(*lead, 2048, 2048), mode), "OK")
    for wrong in (CAUSAL[:1024, :1024], torch.stack([CAUSAL, CAUSAL])):
        assert "fa.mask.compressed-shape" in rules(mask(wrong, mode), "ERROR")


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint8])
def test_f1_content_of_a_compressed_mask_in_each_dtype(dtype: torch.dtype) -> None:
    open_ = CAUSAL.clone()
    open_[3, 9] = 0
    assert rules(mask(open_.to(dtype), 3)) == {"fa.mask.upper-open"}
    closed = CAUSAL.clone()
    closed[9, 3] = 1
    assert rules(mask(closed.to(dtype), 3)) == {"fa.mask.lower-hidden"}
    assert rules(mask(torch.ones_like(CAUSAL).to(dtype), 3)) == {"fa.mask.all-hidden"}


@pytest.mark.parametrize("mode", [0, 1])
def test_f1_a_full_mask_is_as_long_as_queries_and_keys(mode: int) -> None:
    full = torch.zeros(1, 8, 8, dtype=torch.bool)
    assert not rules(mask(full, mode, q=8, kv=8), "ERROR")
    assert rules(mask(full, mode, q=9, kv=8), "ERROR") == {"fa.mask.rows"}
    assert rules(mask(full, mode, q=8, kv=9), "ERROR") == {"fa.mask.columns"}


def test_f1_pages_are_reminded_of_or_checked() -> None:
    assert "fa.mask.paged-remind" in rules(mask(torch.zeros(1, 8, 8, dtype=torch.bool), 0), "REMIND")
    assert "fa.mask.paged-remind" not in rules(mask(CAUSAL, 3), "REMIND")  # 2048 is fixed there
    wide = {"sparse_mode": 0, "is_prefill": True}
    narrow = everything(**pages(atten_mask=torch.zeros(2, 1, 1, 130, dtype=torch.bool), **wide))
    assert "fa.mask.paged-width" in rules(narrow, "ERROR")
    enough = everything(**pages(atten_mask=torch.zeros(2, 1, 1, 256, dtype=torch.bool), **wide))
    assert "fa.mask.paged-width" in enough.held


def test_f1_says_what_it_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    mask(CAUSAL, 3, q=8, kv=9)
    said = capsys.readouterr().out
    assert "--- Layer 5 atten_mask Debug ---" in said
    for text in ("sparse_mode: 3", "is_prefill: True, q_seq_len: 8, kv_seq_len: 9", "(2048, 2048)", "torch.int8"):
        assert text in said


# ---------------------------------------------------------------------------------------------------------------- F.2


def test_f2_names_of_the_other_version() -> None:
    v2 = fa.debug_fa_version_params({"scale": SCALE, "actual_seq_lengths_kv": [1], "num_query_heads": 4}, "v2")
    found = {one.rule: one for one in v2.findings}
    assert set(found) == {"fa.version.v1-name-in-v2", "fa.version.scale-omitted"}
    assert found["fa.version.v1-name-in-v2"].facts["names"] == "actual_seq_lengths_kv, scale"
    assert (
        "FA v1" in found["fa.version.v1-name-in-v2"].said["en"]
        and "v2 call" in found["fa.version.v1-name-in-v2"].said["en"]
    )
    v1 = fa.debug_fa_version_params({"softmax_scale": SCALE, "num_query_heads": 4}, "v1")
    assert rules(v1) == {"fa.version.v2-name-in-v1", "fa.version.scale-omitted", "fa.version.heads-omitted"}


@pytest.mark.parametrize(
    ("version", "scale", "heads"), [("v1", "scale", "num_heads"), ("v2", "softmax_scale", "num_query_heads")]
)
def test_f2_silent_defaults(version: str, scale: str, heads: str) -> None:
    assert rules(fa.debug_fa_version_params({heads: 4}, version)) == {"fa.version.scale-omitted"}
    assert rules(fa.debug_fa_version_params({scale: SCALE}, version)) == {"fa.version.heads-omitted"}
    assert rules(fa.debug_fa_version_params({scale: SCALE, heads: 4}, version)) == set()


def test_f2_the_old_name_of_the_scale_is_no_omission() -> None:
    report = fa.debug_fa_version_params({"scale_value": SCALE, "num_heads": 4}, "v1")
    assert rules(report, "ERROR", "WARN", "INFO") == {"fa.version.old-scale-name"}


def test_f2_a_version_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="v3"):
        fa.debug_fa_version_params({}, "v3")


# ---------------------------------------------------------------------------------------------------------------- F.3


def layout(query: torch.Tensor, name: str, heads: int = 4, kv: int = 4, **more: Any) -> fa.Report:
    key = query[..., : query.shape[-1]] if kv == heads else query
    return fa.debug_fa_layout_shape(query, key, key, name, heads, kv, **more)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("BSH", (2, 16, 512), (2, 16, 4, 128)),
        ("BNSD", (2, 4, 16, 128), (2, 16, 512)),
        ("BSND", (2, 16, 4, 128), (2, 16, 512)),
        ("TND", (16, 4, 128), (2, 4, 16, 128)),
        ("NTD_TND", (4, 16, 128), (2, 4, 16, 128)),
        ("TND_NTD", (16, 4, 128), (2, 4, 16, 128)),
    ],
)
def test_f3_ranks_by_the_input_part(name: str, right: tuple[int, ...], wrong: tuple[int, ...]) -> None:
    assert rules(layout(half(*right), name)) == set()
    assert "fa.layout.fits" in rules(layout(half(*right), name), "OK")
    assert "fa.layout.query-rank" in rules(layout(half(*wrong), name), "ERROR")


@pytest.mark.parametrize(
    ("name", "shape"),
    [("BNSD", (2, 16, 4, 128)), ("TND", (4, 16, 128)), ("NTD_TND", (16, 4, 128)), ("BSND", (2, 4, 16, 128))],
)
def test_f3_heads_are_on_their_axis(name: str, shape: tuple[int, ...]) -> None:
    assert "fa.layout.query-heads" in rules(layout(half(*shape), name), "ERROR")


def test_f3_pages() -> None:
    key = half(6, 128, 512)
    table = torch.zeros(2, 2, dtype=torch.int32)
    report = fa.debug_fa_layout_shape(half(2, 4, 128), key, key, "TND", 4, 4, table)
    assert rules(report) == set() and "fa.layout.paged" in rules(report, "INFO")  # no rule of unpaged keys
    report = fa.debug_fa_layout_shape(half(2, 4, 128), key, key, "TND", 4, 4, table.view(-1))
    assert rules(report, "ERROR") == {"fa.layout.table-rank"}


def test_f3_a_cache_is_viewed_for_the_call() -> None:
    stored = half(6, 128, 2, 128)
    assert "fa.paged.cache-view" in rules(everything(**pages(key=stored, value=stored)), "ERROR")
    wide = half(6, 128, 512)
    assert "fa.paged.cache-width" in rules(everything(**pages(key=wide, value=wide)), "ERROR")


def test_f3_says_what_it_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    layout(half(16, 4, 128), "TND", layer_idx=7)
    said = capsys.readouterr().out
    assert "--- Layer 7 FA Layout Debug ---" in said and "input_layout: TND" in said
    assert "Q: (16, 4, 128), K: (16, 4, 128), V: (16, 4, 128)" in said


# ---------------------------------------------------------------------------------------------------------------- F.4


def lengths(q: Any, kv: Any, name: str, q_len: int, kv_len: int, prefill: bool = True, batch: int = 2) -> fa.Report:
    return fa.debug_actual_seq_lengths(q, kv, name, prefill, batch, q_len, kv_len)


@pytest.mark.parametrize("name", ["TND", "TND_NTD", "NTD_TND"])
def test_f4_packed_lengths(name: str) -> None:
    assert rules(lengths([3, 8], [3, 8], name, 8, 8)) == set()
    assert rules(lengths(torch.tensor([3, 8]), torch.tensor([3, 8]), name, 8, 8)) == set()
    assert "fa.lengths.q-missing" in rules(lengths(None, [3, 8], name, 8, 8), "ERROR")
    falling = lengths([5, 3], [3, 8], name, 8, 8)
    assert "fa.lengths.q-decreasing" in rules(falling, "ERROR")
    assert "3" in falling.errors[0].said["en"] and "5" in falling.errors[0].said["en"]
    assert "fa.lengths.q-raw" in rules(lengths([3, 5], [3, 8], name, 8, 8), "ERROR")
    assert "fa.lengths.q-end" in rules(lengths([3, 9], [3, 8], name, 8, 8), "ERROR")


@pytest.mark.parametrize("name", ["BSH", "BNSD", "BSND"])
def test_f4_padded_lengths(name: str) -> None:
    assert rules(lengths([16, 9], [20, 20], name, 16, 20)) == set()
    assert rules(lengths([16, 9], [20, 21], name, 16, 20), "ERROR") == {"fa.lengths.kv-within"}
    assert rules(lengths([16, 25], [20, 20], name, 16, 20), "ERROR") == {"fa.lengths.q-within"}


def test_f4_axes_of_the_one_shot_function() -> None:
    """Queries of BNSD lie on axis 2, keys of TND on axis 0: axis 1 holds heads."""
    call: dict[str, Any] = {"query": half(1, 4, 16, 128), "key": half(1, 2, 16, 128), "value": half(1, 2, 16, 128)}
    call |= {"input_layout": "BNSD", "num_heads": 4, "num_kv_heads": 2, "scale": SCALE, "sparse_mode": 3}
    call |= {"atten_mask": CAUSAL}
    assert rules(everything(**call, actual_seq_qlen=[16], actual_seq_kvlen=[16])) == set()
    assert "fa.lengths.kv-within" in rules(everything(**call, actual_seq_kvlen=[17]), "ERROR")
    packed = {"query": half(16, 4, 128), "key": half(16, 2, 128), "value": half(16, 2, 128), "input_layout": "TND"}
    call |= packed
    assert rules(everything(**call, actual_seq_qlen=[16], actual_seq_kvlen=[16])) == set()
    assert "fa.lengths.kv-end" in rules(everything(**call, actual_seq_qlen=[16], actual_seq_kvlen=[17]), "ERROR")


def test_f4_keys_over_pages_are_plain_and_packed_keys_are_cumulative() -> None:
    assert rules(everything(**pages(actual_seq_kvlen=[130, 7]))) == set()
    packed = pages(
        query=half(8, 4, 128), key=half(8, 2, 128), value=half(8, 2, 128), block_table=None, is_prefill=True,
        actual_seq_qlen=[3, 8], actual_seq_kvlen=[5, 3],
    )  # fmt: skip
    assert "fa.lengths.kv-decreasing" in rules(everything(**packed), "ERROR")


@pytest.mark.parametrize(
    ("ends", "found"),
    [([1, 2], set()), ([0, 2], {"fa.lengths.zero-q", "fa.lengths.decode-long"}), ([2, 4], {"fa.lengths.decode-long"})],
)
def test_f4_queries_in_decode(ends: list[int], found: set[str]) -> None:
    assert rules(lengths(ends, [130, 7], "TND", ends[-1], 8, prefill=False)) == found


# ---------------------------------------------------------------------------------------------------------------- F.5


def test_f5_rows_that_are_hidden_whole() -> None:
    rows = torch.zeros(2, 1, 8, 8, dtype=torch.bool)
    rows[1, 0, :3] = True
    for dtype in (torch.bool, torch.int8):
        report = fa.debug_inner_precise(rows.to(dtype), 0, 8, 0)
        assert rules(report) == {"fa.precision.invalid-rows"}
        assert report.findings[0].facts["count"] == 3 and "2, or 3" in report.findings[0].said["en"]
    for quiet in (
        (rows, 2, 8, 0),
        (rows, 3, 8, 1),
        (rows, 0, 1, 0),
        (CAUSAL, 0, 8, 3),
        (None, 0, 8, 0),
        (~rows, 2, 8, 0),
    ):
        assert rules(fa.debug_inner_precise(*quiet)) == set()
    assert "fa.precision.inner-known" in rules(fa.debug_inner_precise(rows, 4, 8, 0))


def test_f5_padding_of_a_mask_is_no_hidden_row() -> None:
    """The published code counts every row of the mask."""
    full = torch.zeros(1, 1, 16, 8, dtype=torch.bool)
    full[..., 8:, :] = True  # behind the queries
    assert rules(fa.debug_inner_precise(full, 0, 8, 0)) == set()


# ---------------------------------------------------------------------------------------------------------------- F.6


def rope(q: int, q_rope: int | None, k_rope: int | None, mode: int = 3) -> set[str]:
    query, key = half(8, 16, q), half(8, 16, q)
    first, second = (None if width is None else half(8, 16, width) for width in (q_rope, k_rope))
    return rules(fa.debug_mla_rope(query, key, first, second, "TND", mode))


def test_f6_rope() -> None:
    assert rope(128, 64, 64) == rope(512, 64, 64) == rope(512, 64, 64, mode=0) == rope(512, 64, 64, mode=4) == set()
    assert rope(192, None, None) == set()
    assert rope(128, 64, None) == rope(128, None, 64) == {"fa.mla.pair"}
    assert rope(192, 64, 64) == {"fa.mla.query-dim"}
    assert rope(128, 32, 64) == rope(128, 64, 32) == {"fa.mla.rope-dim"}
    for mode in (1, 2):
        assert rope(512, 64, 64, mode) == {"fa.mla.mode"}
    assert rules(fa.debug_mla_rope(half(8, 16, 128), half(8, 16, 128), None, None, "TND", 3), *fa.SEVERITIES) == set()


# ---------------------------------------------------------------------------------------------------------------- F.7


def test_f7_checks_everything_with_the_version_too() -> None:
    call = pages(
        scale=1.0, atten_mask=None, actual_seq_qlen=[1, 1], num_heads=8, query_rope=half(2, 4, 64), softmax_scale=SCALE
    )
    families = {one.rule.split(".")[1] for one in everything(**call).of("ERROR", "WARN")}
    assert families == {"version", "scale", "layout", "mask", "lengths", "mla"}


def test_f7_order_and_frame(capsys: pytest.CaptureFixture[str]) -> None:
    everything(**pages(scale=1.0, atten_mask=None, actual_seq_qlen=[1, 1], num_heads=8, key_rope=half(2, 4, 64)))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == lines[3] == lines[-1] == "=" * 60
    assert lines[2] == "FA v1 check - Layer 0 (Decode)"
    said = [line.rpartition("(fa.")[2].split(".")[0] for line in lines if "(fa." in line]
    order = ["scale", "layout", "mask", "lengths", "mla"]
    assert [name for name in dict.fromkeys(said) if name in order] == order
    assert "ERROR" in lines[-2] and "rules hold" in lines[-2]


def test_f7_names_of_version_2_are_its_own() -> None:
    """The published code drops them: no head count, a scale of 1.0."""
    named = pages(fa_version="v2", softmax_scale=SCALE, num_query_heads=4, num_key_value_heads=2)
    del named["scale"], named["num_heads"], named["num_kv_heads"]
    assert rules(everything(**named)) == set()
    assert rules(everything(**pages(fa_version="v2"))) == set()
    assert "fa.version.v2-name-in-v1" in rules(everything(**pages(softmax_scale=SCALE)), "ERROR")
    assert "fa.version.v1-name-in-v2" in rules(everything(**pages(fa_version="v2", antiquant_mode=0)), "ERROR")


def test_f7_other_names_are_taken_without_an_error() -> None:
    assert rules(everything(**pages(model_name="deepseek", hidden=3))) == set()
    with pytest.raises(TypeError):
        fa.debug_fa_all_params(half(2, 4, 128), half(2, 4, 128), half(2, 4, 128), "v1")  # type: ignore[call-arg]


def test_f7_a_scale_of_one() -> None:
    assert rules(everything(**pages(scale=1.0))) == {"fa.scale.one"}
    assert rules(everything(**pages(scale=0.1))) == {"fa.scale.head-dim"}


def test_the_guides_own_example() -> None:
    """DeepSeek prefill and decode: NTD_TND with 3 and a mask, and 0 without one over the latent cache."""
    call = {
        "query": half(16, 8, 128), "key": half(16, 8, 128), "value": half(16, 8, 128), "query_rope": half(16, 8, 64),
        "key_rope": half(16, 8, 64), "input_layout": "NTD_TND", "sparse_mode": 3, "atten_mask": CAUSAL,
        "actual_seq_qlen": [3, 8], "actual_seq_kvlen": [3, 8], "num_heads": 16, "num_kv_heads": 16,
        "scale": 192**-0.5, "antiquant_mode": 0,
    }  # fmt: skip
    assert rules(everything(**call)) == set()
    raw = everything(**{**call, "actual_seq_qlen": [3, 5], "num_heads": 8})
    assert rules(raw, "ERROR") >= {"fa.lengths.q-raw", "fa.layout.query-heads"}
    cache = half(6, 1, 128, 512)
    decode = {
        "query": half(2, 16, 1, 512), "key": cache, "value": cache, "query_rope": half(2, 16, 1, 64),
        "key_rope": half(6, 1, 128, 64), "input_layout": "BNSD", "sparse_mode": 0, "actual_seq_kvlen": [130, 7],
        "num_heads": 16, "num_kv_heads": 1, "scale": 192**-0.5, "is_prefill": False,
        "block_table": torch.tensor([[1, 3], [2, 0]], dtype=torch.int32),
    }  # fmt: skip
    assert rules(everything(**decode)) == set()
    shared = {**decode, "sparse_mode": 3, "atten_mask": CAUSAL}  # prefill's arguments in decode
    assert rules(everything(**shared)) == {"fa.mask.decode-absorbed"}
    assert "fa.mla.latent-twice" in rules(everything(**{**decode, "value": cache.clone()}))


def test_messages_are_there_in_chinese(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(debug, "language", "zh")
    mask(None, 3)
    assert "要求必须传入 atten_mask" in capsys.readouterr().out
