"""Prompts files, tokenisation, special tokens and default prompts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from align.case import EncodedPrompt, default_prompts, encode_prompts, load_prompts, new_case
from align.errors import UserError
from align.layout import Layout
from align.models import ModelInfo, qwen3, read_info
from align.models.text import TEXTS, cut_to_lengths

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    """The tiny model as a stranger's checkpoint: nothing is known of it but its files."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    qwen3.build(folder, lambda line: None)
    return read_info(folder)


@pytest.fixture
def changed(info: ModelInfo, tmp_path: Path) -> ModelInfo:
    """A copy of the checkpoint whose tokenizer may be changed (the weights are linked)."""
    for file in info.path.iterdir():
        target = tmp_path / file.name
        if file.suffix == ".safetensors":
            target.symlink_to(file)
        else:
            target.write_bytes(file.read_bytes())
    return read_info(tmp_path)


def prompts_file(folder: Path, *lines: Any) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def encode(info: ModelInfo, folder: Path, *lines: Any) -> tuple[EncodedPrompt, ...]:
    return encode_prompts(load_prompts(prompts_file(folder, *lines)), info)


def add_bos(folder: Path) -> None:
    """Make the tokenizer add BOS by itself, as Llama's does."""
    file = folder / "tokenizer.json"
    settings = json.loads(file.read_text())
    settings["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [0], "tokens": ["<bos>"]}},
    }
    file.write_text(json.dumps(settings))


def test_ids_pass_untouched_and_need_no_tokenizer(info: ModelInfo, tmp_path: Path) -> None:
    from dataclasses import replace

    nowhere = replace(info, path=tmp_path / "absent")
    first, second = encode(nowhere, tmp_path, {"token_ids": [5, 6]}, "", {"token_ids": [0, 0, 5], "name": "x"})
    assert (first.name, first.token_ids, first.source, first.rendered) == ("r0", (5, 6), "token_ids", None)
    assert first.warnings == ()
    assert second.name == "x" and "double BOS" in second.warnings[0]


def test_text(info: ModelInfo, tmp_path: Path) -> None:
    line = {"text": "ab<eos> é", "name": "t", "max_new_tokens": 3, "arrival": 2, "dp_rank": 0}
    (prompt,) = encode(info, tmp_path, line)
    assert prompt.source == "text" and prompt.rendered == "ab<eos> é"
    assert (prompt.max_new_tokens, prompt.arrival, prompt.dp_rank) == (3, 2, 0)
    (special,) = prompt.special
    assert (special.index, special.token_id, special.token, special.added_by) == (
        1,
        qwen3.EOS,
        "<eos>",
        "text",
    )
    assert prompt.warnings == ()


def test_messages_show_the_rendered_template(info: ModelInfo, tmp_path: Path) -> None:
    (prompt,) = encode(info, tmp_path, {"messages": CHAT})
    assert prompt.source == "messages" and prompt.rendered == "<bos>user: hi\nassistant: "
    assert prompt.token_ids[0] == qwen3.BOS and qwen3.BOS not in prompt.token_ids[1:]
    assert [(token.index, token.added_by) for token in prompt.special] == [(0, "template")]
    assert prompt.warnings == ()


def test_bos_added_by_the_tokenizer_is_named(changed: ModelInfo, tmp_path: Path) -> None:
    add_bos(changed.path)
    (prompt,) = encode(changed, tmp_path, {"text": "ab"})
    assert prompt.token_ids[0] == qwen3.BOS and len(prompt.token_ids) == 2
    assert [(token.token, token.added_by) for token in prompt.special] == [("<bos>", "tokenizer")]
    assert prompt.warnings == ()


def test_double_bos_in_a_text(changed: ModelInfo, tmp_path: Path) -> None:
    add_bos(changed.path)
    (prompt,) = encode(changed, tmp_path, {"text": "<bos>ab"})
    assert prompt.token_ids[:2] == (qwen3.BOS, qwen3.BOS)
    assert "double BOS: the ids start with 0 twice" in prompt.warnings[0]
    assert [token.added_by for token in prompt.special] == ["tokenizer", "text"]


def test_double_bos_of_a_template_is_avoided_and_told(changed: ModelInfo, tmp_path: Path) -> None:
    add_bos(changed.path)
    (prompt,) = encode(changed, tmp_path, {"messages": CHAT})
    assert prompt.token_ids[0] == qwen3.BOS and prompt.token_ids[1] != qwen3.BOS
    assert "double BOS avoided" in prompt.warnings[0]


def test_messages_without_a_template(changed: ModelInfo, tmp_path: Path) -> None:
    file = changed.path / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["chat_template"]
    file.write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"prompt r0 has messages.*no chat template") as caught:
        encode(changed, tmp_path, {"messages": CHAT})
    assert "give text or token_ids" in caught.value.hint


def test_template_that_refuses(changed: ModelInfo, tmp_path: Path) -> None:
    file = changed.path / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings["chat_template"] = "{{ raise_exception('system role first') }}"
    file.write_text(json.dumps(settings))
    with pytest.raises(UserError, match="refuses the messages: system role first"):
        encode(changed, tmp_path, {"messages": CHAT})


def test_template_that_writes_nothing(changed: ModelInfo, tmp_path: Path) -> None:
    file = changed.path / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings["chat_template"] = "{% if false %}x{% endif %}"
    file.write_text(json.dumps(settings))
    with pytest.raises(UserError, match="no tokens after tokenisation"):
        encode(changed, tmp_path, {"messages": CHAT})


def test_no_tokenizer(changed: ModelInfo, tmp_path: Path) -> None:
    (changed.path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="cannot load the tokenizer"):
        encode(changed, tmp_path, {"text": "a"})
    (changed.path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="holds no tokenizer") as caught:
        encode(changed, tmp_path, {"text": "a"})
    assert "give token_ids" in caught.value.hint


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{", "not JSON"),
        ("hello", "not JSON"),
        ("[]", "should be an object"),
        ({}, "exactly one of text, messages and token_ids, found none"),
        ({"text": "a", "token_ids": [1]}, "found text and token_ids"),
        ({"text": ""}, "text: "),
        ({"token_ids": []}, "token_ids: "),
        ({"token_ids": [-1]}, "token_ids[0]: "),
        ({"token_ids": ["1"]}, "token_ids[0]: "),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "boss", "content": "a"}]}, "messages[0].role: "),
        ({"messages": [{"role": "user"}]}, "messages[0].content: "),
        ({"text": "a", "arrival": -1}, "arrival: "),
        ({"text": "a", "name": "a b"}, "name: "),
        ({"text": "a", "temperature": 1}, "there is no field 'temperature'"),
        ({"txt": "a"}, "there is no field 'txt'"),
        ('{"text": "a", "text": "b"}', "appears twice"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, line: Any, part: str) -> None:
    file = prompts_file(tmp_path, {"text": "fine"}, "", line)
    with pytest.raises(UserError) as caught:
        load_prompts(file)
    assert f"{file}:3: " in caught.value.message and part in caught.value.message


def test_unusable_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"PROMPTS file .* does not exist"):
        load_prompts(tmp_path / "absent.jsonl")
    with pytest.raises(UserError, match="holds no prompt"):
        load_prompts(prompts_file(tmp_path, "", "  "))
    (tmp_path / "binary").write_bytes(b"\x80\x81")
    with pytest.raises(UserError, match="not UTF-8"):
        load_prompts(tmp_path / "binary")


# ------------------------------------------------------------------------------------------- default prompts


def test_defaults_of_a_path_are_text_of_exact_lengths(info: ModelInfo) -> None:
    prompts = default_prompts(info)
    assert [len(prompt.token_ids) for prompt in prompts] == [1, 7, 33, 200]
    for prompt, text in zip(prompts, TEXTS.values(), strict=True):
        assert prompt.rendered and text.startswith(prompt.rendered)


def test_defaults_of_a_preset_are_stored(info: ModelInfo) -> None:
    from dataclasses import replace

    preset = replace(info, preset=True)
    assert tuple(prompt.token_ids for prompt in default_prompts(preset)) == qwen3.default_prompts()


def test_defaults_of_a_preset_need_no_tokenizer(info: ModelInfo) -> None:
    script = (
        "import sys\nfrom dataclasses import replace\nfrom pathlib import Path\n"
        "from align.case import new_case\nfrom align.models import read_info\n"
        "new_case(read_info(Path(sys.argv[1]), preset=True))\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(info.path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_text_table() -> None:
    assert list(TEXTS) == [1, 7, 33, 200]
    assert all(len(text.split()) >= (length * 4) // 5 for length, text in TEXTS.items())


def test_short_texts_are_repeated() -> None:
    prompts = cut_to_lengths(lambda text: [len(word) for word in text.split()[::3]])
    assert [len(ids) for ids in prompts.values()] == [1, 7, 33, 200]


@pytest.mark.parametrize("ids", [[], [1]])
def test_tokenizers_that_yield_too_little(ids: list[int]) -> None:
    with pytest.raises(ValueError, match=r"no ids|yields 1 ids"):
        cut_to_lengths(lambda text: ids)


# ------------------------------------------------------------------------------------------------- new cases


def test_new_case_of_a_path(info: ModelInfo, tmp_path: Path) -> None:
    file = prompts_file(tmp_path, {"text": "ab", "arrival": 0}, {"messages": CHAT, "max_new_tokens": 2, "arrival": 3})
    made = new_case(info, prompts_file=file, dtype="fp16", candidate="vllm")
    assert made.case.model == str(info.path)
    assert (made.case.dtype, made.case.candidate, made.case.reference) == ("float16", "vllm", "vllm")
    assert [request.name for request in made.case.requests] == ["r0", "r1"]
    assert made.case.requests[1].text == "<bos>user: hi\nassistant: "
    assert (made.case.requests[1].max_new_tokens, made.case.requests[1].arrival) == (2, 3)
    assert [prompt.token_ids for prompt in made.prompts] == [request.token_ids for request in made.case.requests]


def test_default_prompts_are_dealt_to_the_ranks(info: ModelInfo) -> None:
    made = new_case(info, layout=Layout(1, 2, 1))
    assert [request.dp_rank for request in made.case.requests] == [0, 1, 0, 1]


def test_prompts_of_a_file_are_dealt_unless_one_of_them_names_its_rank(info: ModelInfo, tmp_path: Path) -> None:
    silent = prompts_file(tmp_path, {"token_ids": [5]}, {"token_ids": [6]}, {"token_ids": [7]})
    made = new_case(info, layout=Layout(1, 2, 1), prompts_file=silent)
    assert [request.dp_rank for request in made.case.requests] == [0, 1, 0]
    told = prompts_file(tmp_path, {"token_ids": [5], "dp_rank": 0}, {"token_ids": [6]}, {"token_ids": [7]})
    made = new_case(info, layout=Layout(1, 2, 1), prompts_file=told)
    assert [request.dp_rank for request in made.case.requests] == [0, 0, 0], "the other rank is idle"


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ({"token_ids": [5000]}, "outside the vocabulary"),
        ({"token_ids": [5], "dp_rank": 1}, "dp_rank 1"),
        ({"token_ids": [5], "max_new_tokens": 4096}, "exceed"),
    ],
)
def test_new_case_is_checked(info: ModelInfo, tmp_path: Path, line: Any, part: str) -> None:
    with pytest.raises(UserError) as caught:
        new_case(info, prompts_file=prompts_file(tmp_path, line))
    assert part in caught.value.message


def test_new_case_names_wrong_settings(info: ModelInfo) -> None:
    with pytest.raises(UserError, match="dtype: input should be"):
        new_case(info, dtype="int4")
    with pytest.raises(UserError, match="tp must divide"):
        new_case(info, layout=Layout(3))


def test_a_misspelt_field_is_named_with_the_one_that_was_meant(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_prompts(prompts_file(tmp_path, {"txt": "a"}))
    assert caught.value.hint.startswith("did you mean 'text'? the fields are text, messages, token_ids, ")
    with pytest.raises(UserError) as caught:
        load_prompts(prompts_file(tmp_path, {"zzz": "a"}))
    assert caught.value.hint.startswith("the fields are text, ")
