"""The case file: exact round trip, strictness, and messages that name the field."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.base import Request
from align.case import Batch, Case, CaseLayout, CaseRequest, Decoding, capacity, load_case, parse_case
from align.errors import UserError
from align.layout import Layout
from align.models import ModelInfo, qwen3

INFO = ModelInfo(
    name="tiny", path=Path("/models/tiny"), preset=False, config=qwen3.CONFIG,
    vocab_size=1024, max_positions=4096, heads=4, kv_heads=2, head_dim=128, layers=4, hidden=256,
    intermediate=512, bos_id=0, eos_ids=(1,),
    fingerprint="0" * 16,
)  # fmt: skip


def case(*requests: CaseRequest, **settings_: Any) -> Case:
    return Case(model="qwen3", requests=requests or (CaseRequest(name="r0", token_ids=(5, 6)),), **settings_)


def content(**changes: Any) -> str:
    return json.dumps({"model": "qwen3", "requests": [{"name": "r0", "token_ids": [5, 6]}], **changes})


names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tp, dp = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    requests = [
        CaseRequest(
            name=name,
            token_ids=tuple(draw(st.lists(st.integers(0, 2**40), min_size=1, max_size=5))),
            max_new_tokens=draw(st.none() | st.integers(1, 99)),
            arrival=0 if index == 0 else draw(st.integers(0, 5)),
            dp_rank=draw(st.integers(0, dp - 1)),
            text=draw(st.none() | st.text(max_size=20)),
        )
        for index, name in enumerate(draw(st.lists(names, min_size=1, max_size=4, unique=True)))
    ]
    return Case(
        model=draw(st.text(min_size=1, max_size=20)),
        dtype=draw(st.sampled_from(["bfloat16", "float16"])),
        candidate=draw(st.sampled_from(["lmdeploy", "vllm", "transformers"])),
        reference=draw(st.sampled_from(["lmdeploy", "vllm", "transformers"])),
        layout=CaseLayout(tp=tp, dp=dp, ep=draw(st.sampled_from([1, tp * dp]))),
        decoding=Decoding(
            max_new_tokens=draw(st.integers(1, 64)),
            top_logprobs=draw(st.integers(1, 20)),
            ignore_eos=draw(st.booleans()),
        ),
        batch=Batch(
            block_size=draw(st.integers(1, 256)),
            max_batch=draw(st.none() | st.integers(4, 9)),
            together=draw(st.booleans()),
        ),
        requests=tuple(requests),
    )


@given(cases())
@settings(deadline=None)
def test_written_cases_read_back_equal(original: Case) -> None:
    text = original.to_text()
    assert parse_case(text) == original
    assert parse_case(text).to_text() == text
    # One line per request, each a JSON object of its own.
    lines = [line.strip().rstrip(",") for line in text.split("\n") if line.startswith("    {")]
    assert [json.loads(line)["name"] for line in lines] == [request.name for request in original.requests]


def test_file_round_trip(tmp_path: Path) -> None:
    file = tmp_path / "case.json"
    original = case(CaseRequest(name="r0", token_ids=(5,), text="ünïcode\n\u2028"))
    original.save(file)
    assert load_case(file) == original
    assert [entry.name for entry in tmp_path.iterdir()] == ["case.json"]


def test_save_into_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write"):
        case().save(tmp_path / "absent" / "case.json")


@pytest.mark.parametrize(
    ("alias", "dtype"),
    [("bf16", "bfloat16"), ("fp16", "float16"), ("half", "float16"), ("bfloat16", "bfloat16")],
)
def test_dtype_aliases(alias: str, dtype: str) -> None:
    assert parse_case(content(dtype=alias)).dtype == dtype


def test_defaults() -> None:
    plain = parse_case(content())
    assert (plain.candidate, plain.reference, plain.dtype) == ("lmdeploy", "vllm", "bfloat16")
    assert plain.decoding == Decoding(max_new_tokens=16, top_logprobs=5, ignore_eos=True)
    assert plain.batch == Batch(block_size=128, max_batch=None, together=True)


REQUEST = {"name": "a", "token_ids": [5]}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model": ""}, ["model: "]),
        ({"model": 3}, ["model: ", "string", "got 3"]),
        ({"schema_version": 2}, ["schema_version: ", "got 2"]),
        ({"dtype": "int8"}, ["dtype: ", "'bfloat16' or 'float16'", "got 'int8'"]),
        ({"surprise": 1}, ["surprise: ", "not permitted"]),
        ({"requests": []}, ["requests: ", "at least 1 item"]),
        ({"requests": [{**REQUEST, "token_ids": []}]}, ["requests[0].token_ids: ", "at least 1 item"]),
        ({"requests": [{**REQUEST, "token_ids": [1, -1]}]}, ["requests[0].token_ids[1]: ", "got -1"]),
        ({"requests": [{**REQUEST, "token_ids": [1.0]}]}, ["requests[0].token_ids[0]: ", "integer"]),
        ({"requests": [{**REQUEST, "token_ids": [True]}]}, ["requests[0].token_ids[0]: "]),
        ({"requests": [{**REQUEST, "arrival": -1}]}, ["requests[0].arrival: ", "got -1"]),
        ({"requests": [{**REQUEST, "arrival": 1}]}, ["no request has arrival 0"]),
        ({"requests": [{**REQUEST, "name": "a/b"}]}, ["requests[0].name: ", "got 'a/b'"]),
        ({"requests": [{**REQUEST, "max_new_tokens": 0}]}, ["requests[0].max_new_tokens: "]),
        ({"requests": [REQUEST, REQUEST]}, ["names must differ, a appears"]),
        ({"requests": [{**REQUEST, "dp_rank": 1}]}, ["dp_rank 1", "dp=1: valid are 0 … 0"]),
        ({"layout": {"tp": 2, "dp": 1, "ep": 3}}, ["layout: ep must be 1 or tp*dp", "valid: 1 or 2"]),
        ({"layout": {"tp": 0}}, ["layout: tp must be a positive integer"]),
        ({"decoding": {"top_logprobs": 0}}, ["decoding.top_logprobs: "]),
        ({"batch": {"block_size": 0}}, ["batch.block_size: "]),
        (
            {"batch": {"max_batch": 1}, "requests": [REQUEST, {**REQUEST, "name": "b"}]},
            ["2 requests arrive", "is 1"],
        ),
        ({"candidate": "sglang"}, ["candidate: ", "got 'sglang'"]),
    ],
)
def test_wrong_fields_are_named(changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse_case(content(**changes), "my-case.json")
    assert caught.value.message.startswith("my-case.json: ") and "\n" not in caught.value.message
    for part in parts:
        assert part in caught.value.message
    assert caught.value.hint


def test_a_refused_item_is_one_line() -> None:
    with pytest.raises(UserError) as caught:
        parse_case(content(requests=[{**REQUEST, "token_ids": ["3"]}]))
    assert caught.value.message.count(";") == 0


def test_many_problems_are_counted() -> None:
    with pytest.raises(UserError, match=r"; and 3 more\n"):
        parse_case(content(requests=[{**REQUEST, "token_ids": [-1] * 8}]))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[]", "should be an object"),
        ('{"model": "a", "model": "b"}', "'model' appears twice"),
        ("[" * 100_000, "is not JSON"),
        ('{"model": "\\ud800", "requests": [{"name": "a", "token_ids": [1]}]}', "invalid JSON"),
        ('{"model": "q", "requests": [{"name": "a", "token_ids": [' + "9" * 5000 + "]}]}", "is not JSON"),
        (content(dtype=float("nan")), "dtype"),
    ],
)
def test_malformed_files(text: str, part: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_case(text)
    assert part in caught.value.message


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_case(tmp_path / "absent.json")
    with pytest.raises(UserError, match="cannot read CASE file"):
        load_case(tmp_path)
    (tmp_path / "latin1").write_bytes(b"\xe4")
    with pytest.raises(UserError, match="not UTF-8"):
        load_case(tmp_path / "latin1")
    (tmp_path / "bom.json").write_bytes(b"\xef\xbb\xbf" + content().encode())
    assert load_case(tmp_path / "bom.json").model == "qwen3"


def test_to_requests() -> None:
    written = case(
        CaseRequest(name="a", token_ids=(5, 6)),
        CaseRequest(name="b", token_ids=(7,), max_new_tokens=3, arrival=2, dp_rank=1, text="x"),
        layout=CaseLayout(dp=2),
    )
    assert written.to_requests() == (Request("a", (5, 6), 16), Request("b", (7,), 3, arrival=2, dp_rank=1))
    assert written.to_requests((1,)) == written.to_requests(), "EOS is ignored by default"
    obeying = case(decoding=Decoding(ignore_eos=False))
    assert obeying.to_requests((1, 2))[0].stop_ids == (1, 2)
    with pytest.raises(ValueError, match="eos_ids are needed"):
        obeying.to_requests()


@pytest.mark.parametrize(
    ("wrong", "message", "hint"),
    [
        (case(CaseRequest(name="a", token_ids=(5, 1024))), "token_ids[1] is 1024, outside", "tokenizer"),
        (
            case(CaseRequest(name="a", token_ids=(5,) * 4081)),
            "4081 prompt tokens and 16 new",
            "to 4080 tokens",
        ),
        (case(CaseRequest(name="a", token_ids=(5,), max_new_tokens=5000)), "exceed", "below 4096"),
        (case(layout=CaseLayout(tp=3)), "tp must divide num_attention_heads (4)", "use valid tp: 1, 2, 4"),
    ],
)
def test_case_is_checked_against_the_model(wrong: Case, message: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        wrong.check(INFO)
    assert message in caught.value.message and hint in caught.value.hint


def test_limits_themselves_are_allowed() -> None:
    case(CaseRequest(name="a", token_ids=(0, 1023)), CaseRequest(name="b", token_ids=(5,) * 4080)).check(INFO)


def test_obeying_eos_needs_an_eos() -> None:
    from dataclasses import replace

    obeying = case(decoding=Decoding(ignore_eos=False))
    obeying.check(INFO)
    with pytest.raises(UserError, match="names no eos_token_id"):
        obeying.check(replace(INFO, eos_ids=()))


def test_capacity_by_hand() -> None:
    written = case(
        CaseRequest(name="a", token_ids=(5,) * 100),
        CaseRequest(name="b", token_ids=(5,) * 120),
        CaseRequest(name="c", token_ids=(5,) * 30, arrival=4, max_new_tokens=200),
        CaseRequest(name="d", token_ids=(5,) * 90, dp_rank=1),
        layout=CaseLayout(dp=2),
    )
    need = capacity(written)
    assert (need.max_model_len, need.max_batch, need.max_prefill_tokens) == (230, 3, 220)
    # Rank 0: 116, 136 and 230 tokens take 1, 2 and 2 blocks of 128; one spare each, and one.
    assert need.num_blocks == 5 + 3 + 1


def test_capacity_without_control_over_arrivals() -> None:
    written = case(
        CaseRequest(name="a", token_ids=(5,) * 100),
        CaseRequest(name="c", token_ids=(5,) * 30, arrival=4),
        batch=Batch(together=False, max_batch=1),
    )
    assert (capacity(written).max_prefill_tokens, capacity(written).max_batch) == (130, 1)


def test_import_is_light() -> None:
    heavy = ("torch", "transformers", "tokenizers", "numpy", "safetensors", "gguf")
    script = f"import align.case, align.models, sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --------------------------------------------------------------------------------------------- layouts of the sides


def dealt(found: Case) -> list[int]:
    return [request.dp_rank for request in found.requests]


def test_a_case_at_another_layout_keeps_everything_else() -> None:
    requests = [CaseRequest(name=f"r{index}", token_ids=(5, 6), dp_rank=index % 2) for index in range(4)]
    whole = case(*requests, layout=CaseLayout(tp=2, dp=2), batch=Batch(max_batch=2))
    assert dealt(whole.with_layout(Layout(2, 2))) == [0, 1, 0, 1]
    one = whole.with_layout(Layout())
    assert dealt(one) == [0, 0, 0, 0] and one.layout == CaseLayout()
    assert one.batch.max_batch == 4, "groups that became one arrive together all the same"
    assert [request.token_ids for request in one.requests] == [request.token_ids for request in whole.requests]
    assert parse_case(one.to_text()) == one


def test_each_side_has_its_own_layout() -> None:
    requests = [CaseRequest(name=f"r{index}", token_ids=(5, 6), dp_rank=index) for index in range(2)]
    both = case(*requests, layout=CaseLayout(tp=2, dp=2), reference_layout=CaseLayout(tp=2))
    assert both.at("candidate").layout == CaseLayout(tp=2, dp=2) and dealt(both.at("candidate")) == [0, 1]
    assert both.at("reference").layout == CaseLayout(tp=2) and dealt(both.at("reference")) == [0, 0]
    assert parse_case(both.to_text()) == both
    alone = case()
    assert alone.at("reference") is alone and "reference_layout" not in alone.to_text()


def test_the_references_own_layout_is_checked_too() -> None:
    with pytest.raises(UserError, match="layout tp3 dp1 ep1 does not fit tiny"):
        case(reference_layout=CaseLayout(tp=3)).check(INFO)
