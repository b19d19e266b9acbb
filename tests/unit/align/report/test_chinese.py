"""What findings, fits and transplants say is Chinese in the Chinese report, and what is not kept as data is marked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from align.conditions.told import configuration_findings
from align.errors import SideError
from align.report.document import render
from align.result.schema import Result
from align.result.walked import AloneTried, Diagnosed, FaultFit, OracleSide
from align.sentences import said, text_of
from tests.unit.align.conditions.condition_sides import FALSE, judged
from tests.unit.align.conditions.condition_sides import side as side_of
from tests.unit.align.result import made
from tests.unit.align.run import recordings

#: Three English words in a row are a sentence.
ENGLISH = re.compile(r"\b[a-z]{2,} [a-z]{2,} [a-z]{2,}\b")
EVIDENCE = said(
    "operator.finding",
    operator="rms_norm",
    reasons=[
        said("operator.element", ratio=5.1, allowed=4.08, at=said("place.at", place=said("place.unnamed"), channel=3)),
        said("operator.gain", subject=said("operator.whole"), factor=1.0097, limit=1.0066),
    ],
)
TRANSPLANT = {
    "verdict": "confirmed", "side": "candidate", "checkpoint": "layers.1.mlp.up", "why": "the output repairs it",
    "sentence": said("transplant.bit_by_bit", numbers=""),
}  # fmt: skip


def side(verdict: str) -> OracleSide:
    return OracleSide(verdict=verdict, why="", ratio=1.25, roundings=5.0, allowed=4.08, bit_equal=False, rows=3)


def diagnosis(**changes: Any) -> Diagnosed:
    told = said("oracle.one", side="candidate", other=said("oracle.other_within"))
    text = said("fit.factor", subject=said("fit.everything"), ratio=said("fit.number", value=1.01))
    fit = FaultFit(
        kind="factor", explains=True, text="everything is 1.01 times", told=text,
        sentence={"en": "Everything is off by one constant factor.", "zh": "全部结果相差一个常数因子。"},
    )  # fmt: skip
    plain: dict[str, Any] = {
        "checkpoint": "layers.1.mlp.up", "operator": "linear", "side": "candidate", "why": "it errs there",
        "told": told, "sides": {"candidate": side("beyond"), "reference": side("within")}, "fits": [fit],
        "channels": [4, 2], "channels_total": 2, "channels_of": 64, "heads": [],
    }  # fmt: skip
    return Diagnosed(**{**plain, **changes})


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Result:
    """A diverged run whose headline has all that a headline may have."""
    found = made.Run(tmp_path / "run", monkeypatch, made.wrong_up).go().result()
    first = found.findings[0]
    evidence = {**first.evidence, "what": "rms_norm: an element is off", "sentence": EVIDENCE, "operator": "rms_norm"}
    read = {"candidate": [{"what": "Impl class", "place": "a.py:3 f"}]}
    evidence |= {"ratio": 5.1, "allowed": 4.08, "rows": 3, "read": read}
    head = first.model_copy(update={"kind": "operator", "side": "candidate", "evidence": evidence})
    alone = AloneTried(request="r0", checkpoint="x", reproduced=True, values=[], verified={"0": "within"})
    walk = [one for one in found.walk if one.stage != "diagnose"]  # of another diagnosis
    return found.model_copy(
        update={"findings": [head], "transplants": [TRANSPLANT], "diagnosis": diagnosis(), "alone": alone, "walk": walk}
    )


def cause(text: str) -> str:
    return text.split("## 根因分析\n", 1)[1].split("\n## ", 1)[0]


def test_no_sentence_of_the_cause_is_english(result: Result) -> None:
    text = render(result, "zh")
    assert not ENGLISH.search(cause(text).replace("align explain operator", ""))
    assert "rms_norm：单个元素的误差为其量级的 5.1 次舍入，最多可能 4.08 次（某一行（未记名），通道 3）；" in text
    assert "整个结果为精确结果的 1.0097 倍" in text
    assert "**已证实**：换上另一侧的输入后，其输出与另一侧逐位相同" in text
    assert "float64 重算：以其自身输入计算，候选侧的算子有误；另一侧在界限之内。" in text
    assert "候选侧 1.25（超出），参考侧 1.25（允许范围内）" in text
    assert "故障类型：全部结果相差一个常数因子；全部结果为期望值的 1.01 倍。" in text
    assert "第 0 层：允许范围内" in text
    assert "原文" not in cause(text)


def test_the_next_step_begins_at_a_line(result: Result) -> None:
    told = "阅读候选侧在 layers.1.mlp.up 处如何调用 rms_norm：入参、顺序、dtype 与 shape；从 a.py:3 f 开始阅读。"
    assert render(result, "zh").count(f"下一步：{told}") == 2
    assert "arguments, order, dtype and shape; begin at a.py:3 f." in render(result)


@pytest.mark.parametrize(
    ("kind", "checkpoint", "english", "chinese"),
    [
        ("permuted_rows", "layers.1.moe.routed", "sends rows to the experts", "把各行送往专家"),
        ("missing_reduce", "layers.1.moe.routed", "what other ranks' experts made", "其他 rank 的专家结果"),
        ("collective", "layers.1.moe.routed", "the exchange with the experts", "交给专家交换的内容"),
        ("expert_map", "layers.1.moe.routed", "maps experts to ranks", "专家"),
        ("permuted_rows", "layers.1.attn.o", "reads the buffer of the reduce", "归约"),
    ],
)
def test_next_is_the_exchange_where_experts_rows_are_exchanged(
    result: Result, kind: str, checkpoint: str, english: str, chinese: str
) -> None:
    changes = {"path": "C", "kind": kind, "checkpoint": checkpoint}
    told = result.model_copy(update={"findings": [result.findings[0].model_copy(update=changes)]})
    for language, words, other in (("en", english, "reduce at"), ("zh", chinese, "归约的缓冲")):
        following = [line for line in render(told, language).splitlines() if line.startswith(("Next:", "下一步："))]
        assert words in following[0]
        assert checkpoint.endswith("attn.o") or other not in following[0]
        assert "a.py:3 f" in following[0]


def test_what_an_earlier_version_wrote_is_quoted(result: Result) -> None:
    first = result.findings[0]
    evidence = {key: value for key, value in first.evidence.items() if key != "sentence"}
    old = result.model_copy(
        update={
            "findings": [first.model_copy(update={"evidence": evidence})],
            "transplants": [{key: value for key, value in TRANSPLANT.items() if key != "sentence"}],
            "diagnosis": diagnosis(told={}),
        }
    )
    text = render(old, "zh")
    assert "证据：原文：rms_norm: an element is off" in text
    assert "原文：the output repairs it" in text
    assert "float64 重算：原文：it errs there。" in text
    assert "原文" not in render(old)
    assert "Evidence: rms_norm: an element is off" in render(old)
    strange = result.model_copy(update={"diagnosis": diagnosis(told={"say": "oracle.of_the_future"})})
    assert "float64 重算：" in render(strange, "zh")


@pytest.mark.parametrize(
    ("total", "every", "listed", "words"),
    [
        (64, 64, list(range(64)), "all 64."),
        (255, 256, list(range(64)), "255 of 256."),
        (2, 64, [4, 2], "4, 2 (2 of 64)."),
        (2, None, [4, 2], "4, 2 (2 in all)."),
        (255, None, list(range(64)), "255."),
    ],
)
def test_channels_are_listed_while_that_says_something(
    result: Result, total: int, every: int | None, listed: list[int], words: str
) -> None:
    told = diagnosis(channels=listed, channels_total=total, channels_of=every)
    text = render(result.model_copy(update={"diagnosis": told}))
    assert f"* Channels beyond their bound: {words}\n" in text
    assert "通道" in render(result.model_copy(update={"diagnosis": told}), "zh")


def test_heads_are_told_where_there_are_some(result: Result) -> None:
    assert "Heads beyond" not in render(result)
    assert "* Heads beyond their bound: 3, 5.\n" in render(
        result.model_copy(update={"diagnosis": diagnosis(heads=[3, 5])})
    )


def test_an_accused_row_that_is_within_is_explained(result: Result) -> None:
    assert result.tensors is not None
    shown = [one.model_copy(update={"verdict": "within"}) for one in result.tensors.shown]
    name = result.findings[0].checkpoint
    within = result.model_copy(update={"tensors": result.tensors.model_copy(update={"shown": shown})})
    assert f"| {name} | within, **accused** (candidate) |" in render(within)
    assert "for there are two tests" in render(within)
    assert f"| {name} | beyond, **accused** (candidate) |" in render(result)
    assert "for there are two tests" not in render(result)
    assert "**被指出**（候选侧）" in render(within, "zh")


def test_a_host_fallback_beside_the_headline(result: Result) -> None:
    numbers = said("host.own", side="candidate", value=0.5)
    evidence = {"phases": ["decode", "prefill"], "numbers": numbers, "made_at": ["a.py:1"]}
    fallback = result.findings[0].model_copy(update={"kind": "host fallback", "evidence": evidence})
    text = render(result.model_copy(update={"findings": [result.findings[0], fallback]}), "zh")
    assert "候选侧在该处自身的误差为相对 L2 0.5" in text
    assert "改在设备上以另一侧的精度计算：a.py:1。" in text


def test_one_phase_is_told_everywhere(result: Result) -> None:
    states = {"prefill": "beyond", "decode 1": "beyond", "decode N": "within"}
    evidence = {**result.findings[0].evidence, "phases": {"states": states, "onset": "prefill"}}
    first = result.findings[0].model_copy(update={"evidence": evidence})
    lines = [line.strip() for line in render(result.model_copy(update={"findings": [first]})).splitlines()]
    phases = {line.partition(": ")[2] for line in lines if line.startswith(("* Phase:", "* Phases:"))}
    assert phases == {"prefill and decode, from the prefill on"}
    assert any("It is wrong in the prefill already" in line for line in lines)


def test_conditions_and_reasons_are_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made.Run(tmp_path / "run", monkeypatch, conditions=(recordings.condition("false"),)).go()
    text = render(run.result(), "zh")
    assert "原因：以下条件不成立：eager\n" in text
    assert "下一步：按“根因分析”一节的处理方法修正这些条件，或不顾它们继续：\\--allow eager" in text
    assert "原文：because" in text, "made as text, as in an earlier version"
    assert "处理：原文：switch it on" in text


def test_a_condition_that_is_judged_is_told_in_chinese(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = judged(reference=side_of("vllm", {"chunked_prefill": True}))
    run = made.Run(tmp_path / "run", monkeypatch, conditions=(found["chunked_prefill"],)).go()
    text = cause(render(run.result(), "zh"))
    assert "条件 chunked_prefill" in text
    assert "参考侧：处于开启状态。处理：vllm：enable_chunked_prefill False；" in text
    assert "原文" not in text


def test_why_a_side_failed_is_told_in_chinese(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made.Run(tmp_path / "run", monkeypatch)
    told = said(
        "stopped.side", side="candidate", engine="lmdeploy", what=said("stopped.lost", pid=7, method="generate")
    )
    run.session.failure = SideError("candidate", text_of(told), "correct the patch", told=told)
    result = run.go().result()
    assert result.reason == "the candidate (lmdeploy) lost its worker process 7 during generate"
    text = render(result.model_copy(update={"next": "correct the patch"}), "zh")
    assert "原因：候选侧（lmdeploy）出错：在生成期间失去工作进程 7\n" in text
    assert "下一步：修正补丁\n" in text
    assert "下一步：原文：go\n" in render(result, "zh")


def test_a_configuration_that_differs_is_told_in_chinese(result: Result) -> None:
    (finding,) = configuration_findings(judged(reference=side_of("vllm", FALSE["norm_eps"])).values())
    plain = result.findings[0].model_validate(finding.to_dict())
    text = cause(render(result.model_copy(update={"findings": [plain], "transplants": [], "diagnosis": None}), "zh"))
    assert "参考侧运行中的引擎所用配置与 checkpoint 的 config.json 不同：norm_eps。" in text
    assert "证据：运行中引擎的 norm_eps 与 config.json 不同：参考侧：norm_eps 为 0.001" in text
    assert "下一步：阅读参考侧如何由配置设定 " in text
    assert "种子文档 003 路径 B；设计文档第 5 节" in text
    assert "原文" not in text and "configuration，" not in text


def test_no_half_width_marks_between_chinese(result: Result) -> None:
    assert result.symptom is not None
    seen = result.symptom.model_copy(update={"suggested": ["B"], "found": ["B", "FA"], "agree": True})
    read = [{"what": "Impl class", "place": "a.py:3"}, {"what": "vendor operator", "place": "b.py:4"}]
    evidence = {**result.findings[0].evidence, "read": {"candidate": read}}
    first = result.findings[0].model_copy(update={"evidence": evidence})
    text = render(result.model_copy(update={"symptom": seen, "findings": [first]}), "zh")
    assert "实际定位到路径 B、FA，两者一致" in text
    assert "Impl 类 a.py:3；厂商算子 b.py:4\n" in text
    assert "（0.001，超出种子文档阈值）" in text


def test_what_a_seed_is_is_said_before_the_word_is_used(result: Result) -> None:
    text = render(result)
    assert text.index("Seed: a part of the project's own alignment guide") < text.index("seeds")
    assert "种子文档：本项目自带的对齐指南" in render(result, "zh")
