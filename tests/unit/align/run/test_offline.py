"""Two recordings by themselves: what may be compared, and what is refused with a remedy."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.base import SIDES
from adapters.probe.spec import CaptureSpec
from align.errors import UserError
from align.run import certify, offline
from align.run.complete import require_rows
from align.run.flow import Flow, Wishes
from align.run.manifest import generations_of, model_info_of
from align.run.offline import Offline
from align.run.traces import find_trace, open_trace, trace_bytes
from align.trace.pt_export import export_pt
from align.trace.reader import Trace
from tests.unit.align.compare import traces
from tests.unit.align.run import recordings
from tests.unit.align.run.recordings import Scripted

Edit = Callable[[dict[str, Any]], Any]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run."""
    for module in (certify, offline):
        monkeypatch.setattr(module, "evaluate", lambda *_, **__: (recordings.condition(),))
    monkeypatch.setattr(certify, "file_hashes", lambda path: {"model.safetensors": "00"})
    session: Any = Scripted(tmp_path / "run")
    Flow(session, recordings.case(), recordings.info(), Wishes()).run()
    return tmp_path / "run"


def compare(candidate: Path, reference: Path) -> offline.Compared:
    return Offline((), "derived").run({"candidate": candidate, "reference": reference})


def edit_manifest(run: Path, role: str, edit: Edit) -> None:
    file = run / role / "trace" / "trace.json"
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


def test_side_directories_and_traces(run: Path) -> None:
    compared = compare(run / "candidate", run / "reference" / "trace")
    assert compared.report.verdict == "aligned"
    assert compared.engines == ("lmdeploy", "vllm")
    assert compared.simulated
    assert compared.generated["candidate"] == traces.GENERATED


def test_an_exported_trace_is_as_good(run: Path, tmp_path: Path) -> None:
    for role in SIDES:
        trace = open_trace(run / role / "trace")
        export_pt(trace, tmp_path / "pt" / role)
        trace.close()
    compared = compare(tmp_path / "pt" / "candidate", tmp_path / "pt" / "reference")
    assert compared.report.verdict == "aligned"
    assert set(compared.report.comparisons) == {"free", "replay"}
    assert compared.report.bytes["candidate"] > 0
    mixed = compare(tmp_path / "pt" / "candidate", run / "reference")
    assert mixed.report.verdict == "aligned"


def dump(directory: Path, **tensors: torch.Tensor) -> Path:
    directory.mkdir(parents=True)
    for name, tensor in tensors.items():
        torch.save(tensor, directory / f"{name}.pt")
    return directory


def test_hand_written_files_have_tensors_alone(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    right = torch.randn(5, 16, generator=generator)
    wrong = right.clone()
    wrong[3] *= 3
    reference = dump(tmp_path / "b", layer0_attn_out_rank0=right, layer0_other_output_rank0=right)
    mine = dump(tmp_path / "a", layer0_attn_out_rank0=right)
    with pytest.raises(UserError, match=r"50 % .* 100 % .*layer0_other_output_rank0\.pt \(on the reference alone\)"):
        compare(mine, reference)
    same = Offline((), "derived", 50.0).run({"candidate": mine, "reference": reference})
    assert same.report.verdict == "aligned"
    assert (same.report.comparisons, same.report.conditions, same.simulated) == ({}, (), False)
    assert same.report.tensors is not None
    assert same.report.tensors.coverage["paired"].percent == 50.0
    assert same.report.min_coverage == 50.0
    apart = compare(dump(tmp_path / "c", layer0_attn_out_rank0=wrong), reference)
    assert apart.report.verdict == "diverged"
    assert apart.report.findings[0].checkpoint == "layers.0.attn.out"


class Evil:
    """Its pickle asks for a call."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("executed",)


def write_garbage(file: Path) -> None:
    file.write_bytes(b"no archive")


UNREADABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "garbage": (write_garbage, "cannot be read"),
    "empty": (lambda file: file.write_bytes(b""), "is empty"),
    "code": (lambda file: torch.save(Evil(), file), "could run code"),
    "dict": (lambda file: torch.save({"a": torch.ones(2)}, file), "holds a dict, not a tensor"),
}


@pytest.mark.parametrize("how", UNREADABLE)
@pytest.mark.parametrize("broken", SIDES)
@pytest.mark.parametrize("exported", [False, True])
def test_a_file_that_cannot_be_read_is_no_pass(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, broken: str, exported: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = {role: tmp_path / "pt" / role for role in SIDES}
    for role, path in paths.items():
        if exported:
            export_pt(open_trace(run / role / "trace"), path)
        else:
            dump(path / "step00000", layer0_attn_out_output_rank0=torch.ones(3, 4), embed_rank0=torch.ones(3, 4))
    write, words = UNREADABLE[how]
    write(paths[broken] / "step00000" / "layer0_attn_out_output_rank0.pt")
    with pytest.raises(UserError, match=f"could not compare: .*layer0_attn_out_output_rank0.pt {words}|{words}"):
        Offline((), "derived", 1.0).run(paths)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("other", ["shape", "name", "rank", "step"])
def test_files_without_a_partner_count_against_coverage(tmp_path: Path, other: str) -> None:
    same = {"embed_rank0": torch.ones(3, 4), "layer0_attn_out_rank0": torch.ones(3, 4)}
    reference = dump(tmp_path / "b" / "step0", **same).parent
    candidate = dump(tmp_path / "a" / "step0", **same).parent
    if other == "shape":
        torch.save(torch.ones(2, 4), candidate / "step0" / "embed_rank0.pt")
        words, percent = r"embed \(shapes differ: \[2, 4\] and \[3, 4\]\)", 50.0
    elif other == "step":
        dump(candidate / "step1", **same)
        words, percent = r"step1 \(a step of the candidate alone\)", 50.0
    else:
        name = "embed_rank1" if other == "rank" else "layer9_odd_rank0"
        torch.save(torch.ones(3, 4), candidate / "step0" / f"{name}.pt")
        words, percent = rf"step0/{name}\.pt \(on the candidate alone\)", 66.66
    paths = {"candidate": candidate, "reference": reference}
    with pytest.raises(UserError, match=words) as caught:
        Offline((), "derived").run(paths)
    assert caught.value.hint.endswith(f"--min-coverage {percent:g}"), "what is offered is accepted"
    assert Offline((), "derived", percent).run(paths).report.verdict == "aligned"


def test_at_most_five_files_are_named(tmp_path: Path) -> None:
    tensors = {f"layer{layer}_attn_out_rank0": torch.ones(2, 2) for layer in range(8)}
    with pytest.raises(UserError) as caught:
        compare(dump(tmp_path / "a", layer0_attn_out_rank0=torch.ones(2, 2)), dump(tmp_path / "b", **tensors))
    assert caught.value.message.count("on the reference alone") == 5
    assert caught.value.message.endswith("; and 2 more")


def test_files_without_a_common_name(tmp_path: Path) -> None:
    left, right = (dump(tmp_path / side, **{f"layer0_{side}_rank0": torch.ones(2, 2)}) for side in "ab")
    with pytest.raises(UserError, match="no tensor is on both sides") as caught:
        compare(left, right)
    assert "alike" in caught.value.hint


# ------------------------------------------------------------------------------------------------------- refusals


def test_paths_that_are_no_trace(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, words, hint in (
        (tmp_path / "nowhere", "nowhere does not exist", "--out"),
        (tmp_path / "empty", r"neither trace\.json nor \.pt files", "RUN/candidate"),
        (run, "is a whole run", str(run / "candidate")),
    ):
        with pytest.raises(UserError, match=words) as caught:
            find_trace(path)
        assert hint in caught.value.hint


MANIFESTS: list[tuple[Edit, str]] = [
    (lambda content: content.update(schema=99), "schema 99"),
    (lambda content: content["requests"][1].update(token_ids=[1]), "different prompts: request r1"),
    (lambda content: content["requests"].pop(), "different prompts: request r1"),
    (lambda content: content["generations"].pop("replay"), "holds no tokens of its replay run"),
    (lambda content: content.pop("stability"), "no 'stability'"),
    (lambda content: content["generations"]["free"][0].pop("steps"), "a generation in trace.json is malformed"),
    (
        lambda content: content["generations"]["replay"][0]["steps"][1].update(chosen=30),
        "the traces follow different tokens",
    ),
    (
        lambda content: content["stability"].update(unstable={"request": "r0", "index": 1, "first": 2, "second": 9}),
        "the candidate does not repeat itself: request r0, token 1 was 2, then 9",
    ),
]


@pytest.mark.parametrize(("edit", "words"), MANIFESTS, ids=[words[:30] for _, words in MANIFESTS])
def test_manifests_that_do_not_belong_together(run: Path, edit: Edit, words: str) -> None:
    edit_manifest(run, "candidate", edit)
    session = Offline((), "derived")
    with pytest.raises(UserError, match=words) as caught:
        session.run({role: run / role for role in SIDES})
    assert caught.value.hint
    assert session.report.verdict == "not comparable"
    assert words.split(":")[0] in session.report.reason


@pytest.mark.parametrize("damage", ["trace.json", "rank0/rank.json", "rank0/step00000.safetensors"])
def test_a_damaged_trace(run: Path, damage: str) -> None:
    (run / "candidate" / "trace" / damage).write_bytes(b"{")
    with pytest.raises(UserError, match=damage) as caught:
        compare(run / "candidate", run / "reference")
    assert ("a recorded file is damaged" in caught.value.message) == damage.endswith("safetensors")
    assert "manifest cannot be used" not in caught.value.message


@pytest.mark.parametrize("exported", [False, True])
def test_a_rank_that_is_absent_is_named(run: Path, tmp_path: Path, exported: bool) -> None:
    edit_manifest(run, "candidate", lambda content: content["layout"].update(tp=2))
    candidate = run / "candidate" / "trace"
    if exported:
        export_pt(Trace(candidate), tmp_path / "pt")
        candidate = tmp_path / "pt"
    with pytest.raises(UserError, match=r"lacks rank1: its layout has 2 ranks, and 1 left records"):
        compare(candidate, run / "reference")


def test_ranks_of_a_layout(tmp_path: Path) -> None:
    whole = traces.write(tmp_path, tp=2)
    assert (whole.expected_ranks, whole.absent_ranks) == (2, ())
    whole.manifest["layout"]["dp"] = 2
    assert (whole.expected_ranks, whole.absent_ranks) == (4, (2, 3))


@pytest.mark.parametrize("side", SIDES)
def test_a_record_that_broke_off_is_refused(run: Path, side: str) -> None:
    steps = run / side / "trace" / "rank0" / "steps.jsonl"
    steps.write_text("".join(steps.read_text().splitlines(keepends=True)[:1]))
    with pytest.raises(UserError, match=rf"the {side} recorded 5 of 7 rows: its record broke off \(steps\.jsonl"):
        compare(run / "candidate", run / "reference")


def test_rows_that_may_be_absent_or_more(tmp_path: Path) -> None:
    one = [{"chosen": 1, "greedy": 1, "top": []}]

    def about(tokens: int, cached: bool = False) -> dict[str, Any]:
        replay = [{"request": name, "steps": one * tokens} for name in traces.PROMPTS]
        observed = [{"name": "prefix_caching", "value": cached, "where": "config", "why": ""}]
        return {"generations": {"replay": replay}, "observations": observed}

    assert require_rows("candidate", traces.write(tmp_path / "same", about=about(2))) == 0
    assert require_rows("candidate", traces.write(tmp_path / "ahead", about=about(1))) == 2
    decode = [step for step in traces.STEPS if step[0] == "decode"]
    with pytest.raises(UserError, match="recorded 2 of 7 rows"):
        require_rows("candidate", traces.write(tmp_path / "cut", steps=decode, about=about(2)))
    assert require_rows("candidate", traces.write(tmp_path / "cached", steps=decode, about=about(2, True))) == 0


def test_a_recording_is_not_compared_with_itself(run: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run / "candidate")
    files = dump(tmp_path / "pt", embed_rank0=torch.ones(2, 2))
    for one, other in ((run / "candidate", tmp_path / "link" / "trace"), (files, run / ".." / "pt")):
        with pytest.raises(UserError, match="both sides are the same recording"):
            compare(one, other)


def test_recordings_of_other_roles_are_remarked(run: Path, tmp_path: Path) -> None:
    assert compare(run / "candidate", run / "reference").report.remarks == ()
    swapped = compare(run / "reference", run / "candidate")
    assert swapped.engines == ("vllm", "lmdeploy"), "the first path is the candidate, whatever it was"
    (told,) = swapped.report.remarks
    assert told.startswith(f"the sides are swapped: {run / 'reference'} was recorded as the reference")
    assert told.endswith(f": align compare {run / 'candidate'} {run / 'reference'}")
    copy = shutil.copytree(run / "candidate", tmp_path / "copy")
    (remark,) = compare(run / "candidate", copy).report.remarks
    assert remark.startswith(f"{copy} was recorded as the candidate and is called the reference here")


def test_differing_requests_are_all_named_or_counted(run: Path) -> None:
    more = [{"name": f"x{index}", "prompt_len": 1, "token_ids": [1]} for index in range(7)]
    edit_manifest(run, "candidate", lambda content: content["requests"].extend(more))
    with pytest.raises(UserError, match=r"request x0, x1, x2, x3, x4 and 2 more"):
        compare(run / "candidate", run / "reference")


def test_conditions_are_judged_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def evaluate(case: Any, info: Any, structure: Any, sides: Any, *, stage: str, allow: Any) -> Any:
        seen.update(case=case, info=info, sides=sides, stage=stage)
        return (recordings.condition("false", allowed="eager" in allow),)

    monkeypatch.setattr(offline, "evaluate", evaluate)
    with pytest.raises(UserError, match="eager is false"):
        compare(run / "candidate", run / "reference")
    assert (seen["case"], seen["stage"]) == (recordings.case(), "run")
    assert seen["info"] == recordings.info()
    for side in seen["sides"].values():
        assert side.token_ids == traces.PROMPTS
        assert [one.name for one in side.observations] == ["tp"]
        assert [step.phase for step in side.steps if not step.dummy] == ["prefill", "decode"]
    paths = {role: run / role for role in SIDES}
    assert Offline(("eager",), "derived").run(paths).report.tainted


# ------------------------------------------------------------------------------------------------------- manifest


def test_what_a_manifest_gives_back(run: Path) -> None:
    content = json.loads((run / "reference" / "trace" / "trace.json").read_text())
    assert generations_of(content, "free") == recordings.generations()
    assert generations_of(content, "nothing") is None
    assert model_info_of(content) == recordings.info()
    content["model_info"].pop("heads")
    with pytest.raises(ValueError, match=r"model_info in .* is malformed"):
        model_info_of(content)


def test_prompts_as_the_workers_saw_them(tmp_path: Path) -> None:
    def other(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        if step == 0:
            tensors["token_ids"][1] = 30

    trace = traces.write(tmp_path, edit=other)
    assert certify.recorded_prompts(trace) == {"r0": (5, 30, 7), "r1": (8, 9)}


def test_prompts_that_were_not_recorded(tmp_path: Path) -> None:
    def without(phase: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        del tensors["token_ids"]

    trace = traces.write(tmp_path, edit=without)
    assert certify.recorded_prompts(trace) is None


def test_bytes_of_a_trace(tmp_path: Path) -> None:
    recordings.write_trace(tmp_path, CaptureSpec(str(tmp_path)))
    files = [path for path in (tmp_path / "rank0").iterdir() if path.is_file()]
    assert trace_bytes(tmp_path) == sum(path.stat().st_size for path in files) > 0


def test_what_a_recording_was_made_with_is_known(run: Path) -> None:
    def patched(content: dict[str, Any]) -> None:
        content["spec"] = {**content["spec"], "patches": ["/p/fix.py"], "options": {"x": 5}}

    edit_manifest(run, "candidate", patched)
    extras = compare(run / "candidate", run / "reference").report.extras
    assert (extras["candidate"].patches, dict(extras["candidate"].options)) == (("/p/fix.py",), {"x": 5})
    assert not extras["reference"].patches
