"""The table holds every row of the seeds' tables, says what they say, and is refused as soon as it is damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from align.errors import UserError
from align.findings import PATHS
from align.knowledge import PATHS_ZH, Entry, knowledge
from align.knowledge.load import FILES, PARTS, load
from envs.home import REPOSITORY

PACKAGE = REPOSITORY / "align" / "knowledge"
#: Sections of the seeds whose rows are knowledge, by seed.
TABLES = {
    "000": (
        "2.1 Symptom table",
        "5.1 Cache traps",
        "5.2 FA traps",
        "5.3 Quant traps",
        "5.4 Phase traps",
        "Known problems",
    ),
    "001": ("Ch.6 symptom table",),
    "002": ("6 Exceptions",),
    "003": ("Step 4 ", "Troubleshooting "),
}
#: Row → the path of its seed's table, where the seed gives one.
SEED_PATHS = {
    "003-SY-1": {"B"},
    "003-SY-2": {"A", "B"},
    "003-SY-3": {"A", "B"},
    "003-SY-4": {"B"},
    "003-SY-5": {"C"},
    "003-SY-6": {"A", "B"},
    "003-TS-01": {"B"},
    "003-S4-5": {"B"},
}
#: Row → what the seed names as cause, direction or treatment; all of it must be said, in English and in Chinese.
SAID = {
    "000-S2.1-1": ("slot_mapping", "scatter_update_"),
    "000-S2.1-2": ("kv_len",),
    "000-S2.1-3": ("sparse_mode",),
    "000-S2.1-4": ("scale", "dtype"),
    "000-S2.1-5": ("input_layout", "NZ"),
    "000-S2.1-6": ("block_table", "kv_len_offset"),
    "000-S2.1-7": ("dequant_scale", "antiquant_mode"),
    "000-T5.1-1": ("scatter_update_", "BSH", "TND"),
    "000-T5.1-2": ("kv_len_offset = arange(0, batch*max_seq_len, max_seq_len)",),
    "000-T5.1-3": ("kv_len",),
    "000-T5.1-4": ("cache_mode", "PA_NZ"),
    "000-T5.1-5": ("npu_kv_rmsnorm_rope_cache", "epsilon"),
    "000-T5.2-1": ("sparse_mode",),
    "000-T5.2-2": ("TND", "BSH", "model-infer-kvcache"),
    "000-T5.2-3": ("actual_seq_qlen", "cumsum([1"),
    "000-T5.2-4": ("cache_nope", "key", "value"),
    "000-T5.2-5": ("scale", "softmax_scale"),
    "000-T5.3-1": ("dequant_scale", "W8A8"),
    "000-T5.3-2": ("W8A8C8", "scale"),
    "000-T5.3-3": ("antiquant_mode", "antiquant_", "dequant_"),
    "000-T5.4-1": ("scatter_update_",),
    "000-T5.4-2": ("sparse_mode", "atten_mask"),
    "000-T5.4-3": ("kv_len += seq_len",),
    "000-T5.4-4": ("atten_mask=None", "sparse_mode"),
    "000-K-01": ("packed", "copy_", "EP rank"),
    "000-K-02": ("active_expert_range", "original_input * weight", "identity"),
    "000-K-03": ("dist.broadcast(next_token, src=0)", "all_to_all", "NaN"),
    "000-K-04": ("normali",),
    "001-SY-01": ("F.7", "F.1", "sparse_mode"),
    "001-SY-02": ("F.7", "F.2", "scale", "dtype"),
    "001-SY-03": ("F.4", "kv_len"),
    "001-SY-04": ("F.3", "F.1"),
    "001-SY-05": ("F.2", "dequant_", "antiquant_"),
    "001-SY-06": ("F.5", "inner_precise"),
    "001-SY-07": ("F.6", "query_rope", "64", "512"),
    "002-X-01": ("dump_path", "--enforce-eager"),
    "002-X-02": ("L0", "L1", "data_mode"),
    "002-X-03": ("logprobs",),
    "002-X-04": ("temperature",),
    "002-X-05": (),
    "003-SY-1": ("RMSNorm",),
    "003-SY-2": ("KV",),
    "003-SY-3": ("KV", "rope"),
    "003-SY-4": (),
    "003-SY-5": ("TP", "DP", "EP"),
    "003-SY-6": ("q_seq_len", "kv_seq_len", "kv_start_indices"),
    "003-S4-1": (),
    "003-S4-2": ("rope", "cos", "CPU", "LiveCodeBench"),
    "003-S4-3": (),
    "003-S4-4": ("TP",),
    "003-S4-5": (),
    "003-TS-01": ("kv_start_indices", "key_states", "RMSNorm", "CPU"),
    "003-TS-02": ("1", "token"),
    "003-TS-03": ("TP", "DP", "EP"),
    "003-TS-04": ("print", "logger", "torch.save"),
    "003-TS-05": ("warmup",),
    "003-TS-06": ("temperature", "top_k"),
    "003-TS-07": (),
    "003-TS-08": ("dtype", "shape"),
}


def rows() -> list[str]:
    """Ids of the seeds' symptom, trap, troubleshooting and known-problem rows, from the committed list."""
    found = []
    for line in (REPOSITORY / "tests" / "seed_rows.tsv").read_text().splitlines()[1:]:
        name, seed, section, _ = line.split("\t")
        if section.startswith(TABLES[seed]):
            found.append(name)
    return found


def everything(entry: Entry, language: str) -> str:
    return "\n".join(getattr(text, language) for text in entry.texts())


def test_every_row_of_the_seeds_tables_is_there_and_no_other() -> None:
    here = [name for name, entry in knowledge().entries.items() if entry.of_a_seed]
    assert sorted(here) == sorted(rows())
    assert len(here) == 59
    assert set(SAID) == set(here)


@pytest.mark.parametrize("name", SAID)
def test_a_row_says_what_its_seed_says(name: str) -> None:
    entry = knowledge().entries[name]
    for language in ("en", "zh"):
        for words in SAID[name]:
            assert words in everything(entry, language), (language, words)
    if name in SEED_PATHS:
        assert set(entry.paths) == SEED_PATHS[name]
    assert entry.source.startswith(f"seed {name[:3]}")


@pytest.mark.parametrize("entry", knowledge().entries.values(), ids=list(knowledge().entries))
def test_both_languages_are_what_they_claim(entry: Entry) -> None:
    def chinese(text: str) -> bool:
        return any("\u4e00" <= letter <= "\u9fff" for letter in text)

    for text in entry.texts():
        assert not chinese(text.en), text.en
    assert all(chinese(text.zh) for text in (entry.title, entry.symptom))
    assert entry.title.en != entry.title.zh
    for text in (entry.symptom, entry.treatment):
        assert text.en.endswith(".")
        assert text.zh.endswith("。")


def test_every_path_is_named_in_both_languages() -> None:
    assert PATHS_ZH.keys() == PATHS.keys()
    assert knowledge().entries["003-SY-2"].path_text("en") == "A (KV-cache indices), B (operator precision)"
    assert knowledge().entries["003-SY-5"].path_text("zh") == "C (通信与并行)"
    for path in PATHS:
        assert knowledge().of_path(path), f"nothing is known about path {path}"


def test_the_files_that_the_seed_names_are_what_is_read() -> None:
    """Seed 003: the pointers of paths A, B and C."""
    known = knowledge()
    cache = known.files(known.entries["slots"])
    assert "lmdeploy/pytorch/kernels/dlinfer/fill_kv_cache.py" in cache
    assert "lmdeploy/pytorch/kernels/dlinfer/pagedattention.py" in cache
    operator = known.files(known.entries["operator"])
    for folder in (
        "lmdeploy/pytorch/backends/dlinfer/",
        "lmdeploy/pytorch/kernels/dlinfer/",
        "dlinfer/vendor/<vendor>/",
    ):
        assert folder in operator
    patches = "dlinfer/framework/lmdeploy_ext/device/<vendor>.py"
    assert patches in known.files(known.entries["003-SY-5"])
    assert patches in known.files(known.entries["000-K-01"])
    assert "AscendMoEForwardDPTP" in known.groups["experts"].what.en


def test_what_ends_a_run_is_explained() -> None:
    """A crash is no precision problem: seed 000 sends it to another skill."""
    entries = knowledge().entries
    failed = entries["failed"]
    assert failed.paths == ("ENV",)
    for language in ("en", "zh"):
        assert "model-infer-runtime-debug" in everything(failed, language)
    assert "--allow" in entries["condition"].treatment.en
    assert {"003-TS-05", "003-TS-06"} <= set(entries["unstable"].see)


def test_a_file_of_two_groups_is_read_once() -> None:
    known = knowledge()
    files = known.files(known.entries["003-SY-2"])  # reads the groups cache and attention
    assert len(set(files)) == len(files)
    assert len(files) < sum(len(known.groups[name].files) for name in known.entries["003-SY-2"].read)


# ------------------------------------------------------------------------------------------------------------- search


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("slots", ["slots"]),
        ("SLOTS", ["slots"]),
        ("003-ts-05", ["003-TS-05"]),
        ("  inner_precise ", ["001-SY-06"]),
        ("首个 token 就错误", ["003-SY-1"]),
        ("silence cpu", ["003-S4-2"]),
    ],
)
def test_what_a_user_types_is_found(typed: str, found: list[str]) -> None:
    assert [entry.id for entry in knowledge().find(typed)] == found


def test_a_path_gives_all_that_name_it_the_first_before_the_others() -> None:
    found = knowledge().find("a")
    names = [entry.id for entry in found]
    assert {"slots", "003-SY-2", "003-TS-05", "000-T5.1-1"} <= set(names)
    assert "operator" not in names
    first = [entry.paths[0] == "A" for entry in found]
    assert first == sorted(first, reverse=True)


def test_words_of_titles_win_over_words_of_texts() -> None:
    titles = knowledge().find("first token")
    assert all("first token" in entry.title.en.casefold() for entry in titles)
    assert len(titles) >= 4


@pytest.mark.parametrize(
    ("typed", "closest"),
    [("slotz", "slots"), ("operater", "operator"), ("003-TS-09", "003-TS-0"), ("giberish", "gibberish")],
)
def test_what_is_unknown_names_what_is_close(typed: str, closest: str) -> None:
    with pytest.raises(UserError) as caught:
        knowledge().find(typed)
    assert repr(typed) in caught.value.message
    assert closest in caught.value.hint
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("typed", ["", "   ", "xyzzyqqq"])
def test_what_is_like_nothing_names_the_list(typed: str) -> None:
    with pytest.raises(UserError) as caught:
        knowledge().find(typed)
    assert caught.value.hint == "align explain lists everything"


# --------------------------------------------------------------------------------------------------------- strictness

GOOD = """
[one]
paths = ["B"]
source = "here"
title = ["Title", "题目"]
symptom = ["It is wrong.", "有误。"]
causes = [["a cause", "原因"]]
checks = [["a check", "检查"]]
treatment = ["Mend it.", "修正。"]
"""


def folder(tmp_path: Path, text: str, files: str = "") -> Path:
    for part in PARTS:
        (tmp_path / part).write_text("")
    (tmp_path / PARTS[0]).write_text(text)
    (tmp_path / FILES).write_text(files)
    return tmp_path


def test_a_good_entry_is_read(tmp_path: Path) -> None:
    entry = load(folder(tmp_path, GOOD)).entries["one"]
    assert (entry.id, entry.paths, entry.title.of("zh"), entry.causes[0].of("en")) == ("one", ("B",), "题目", "a cause")
    assert (entry.note, entry.read, entry.see, entry.of_a_seed) == (None, (), (), False)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('paths = ["B"]', 'paths = ["D"]', "paths"),
        ('paths = ["B"]', "paths = []", "paths"),
        ('paths = ["B"]', "", "paths"),
        ('["Title", "题目"]', '["Title"]', "pair"),
        ('["Title", "题目"]', '"Title"', "title"),
        ('["Title", "题目"]', '["Title", ""]', "title.zh"),
        ('["Title", "题目"]', '["Title", 1]', "title.zh"),
        ('[["a cause", "原因"]]', "[]", "causes"),
        ('[["a cause", "原因"]]', '["a cause", "原因"]', "causes"),
        ('source = "here"', "", "source"),
        ('source = "here"', 'source = "here"\nsymptoms = 1', "symptoms"),
        ('source = "here"', 'source = "here"\nread = ["nothing"]', "nothing is called nothing"),
        ('source = "here"', 'source = "here"\nsee = ["two"]', "nothing is called two"),
        ('source = "here"', 'source = "here"\nsee = ["one"]', "refers to itself"),
        ("[one]", '["003-SY-1"]', "has its source in its id"),
        ("[one]", "[one", PARTS[0]),
        ("[one]", "loose = 1\n[one]", "loose is no table"),
    ],
)
def test_a_damaged_entry_is_refused(old: str, new: str, words: str, tmp_path: Path) -> None:
    assert old in GOOD
    with pytest.raises(ValueError, match=words.replace(".", r"\.")):
        load(folder(tmp_path, GOOD.replace(old, new, 1)))


def test_an_id_is_there_once(tmp_path: Path) -> None:
    folder(tmp_path, GOOD)
    (tmp_path / PARTS[1]).write_text(GOOD)
    with pytest.raises(ValueError, match="one is there already"):
        load(tmp_path)


def test_a_group_of_files_has_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"files\.toml: cache: files"):
        load(folder(tmp_path, GOOD, '[cache]\nwhat = ["the cache", "缓存"]\nfiles = []\n'))


def test_every_group_of_files_is_used_and_every_part_is_read(tmp_path: Path) -> None:
    known = knowledge()
    assert {name for entry in known.entries.values() for name in entry.read} == set(known.groups)
    assert sorted(path.name for path in PACKAGE.glob("*.toml")) == sorted((FILES, *PARTS))
    for part in (FILES, *PARTS):
        shutil.copy(PACKAGE / part, tmp_path / part)
    (tmp_path / PARTS[1]).unlink()
    with pytest.raises(FileNotFoundError):
        load(tmp_path)


def test_a_model_without_experts_has_none_of_their_files_to_read() -> None:
    known = knowledge()
    entry = known.entries["ladder"]
    theirs = {file for name in entry.read if known.groups[name].needs == "experts" for file in known.groups[name].files}
    assert "vllm_ascend/ops/fused_moe/" in theirs and theirs <= set(known.files(entry))
    left = known.files(entry, ("experts",))
    assert left == tuple(file for file in known.groups["parallel"].files)
    assert known.files(known.entries["expert_map"], ("experts",)) == ()
