"""The checkpoint's own tokenizer; transformers is imported only when a prompt needs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from align.errors import UserError


@dataclass(frozen=True)
class SpecialToken:
    """A special token among a prompt's ids.

    Attributes:
        index: where in the ids.
        token_id: its id.
        token: its text.
        added_by: ``tokenizer`` (not in the text), ``template`` or ``text``.
    """

    index: int
    token_id: int
    token: str
    added_by: str


@dataclass(frozen=True)
class Encoded:
    """Ids of one prompt, the text they were made from, and what is worth saying about them."""

    token_ids: tuple[int, ...]
    rendered: str
    special: tuple[SpecialToken, ...]
    warnings: tuple[str, ...]


class PromptTokenizer:
    """Tokenises prompts with the files of one checkpoint directory; nothing is downloaded, no remote code
    runs.

    Raises:
        UserError: the directory has no tokenizer that transformers can load.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        hint = "put tokenizer.json and tokenizer_config.json beside the weights, or give token_ids in PROMPTS="
        if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            raise UserError(f"{path} holds no tokenizer", hint)
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(path), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # loaders of many formats, each with its own errors
            raise UserError(f"cannot load the tokenizer of {path}: {_first_line(error)}", hint) from error

    @property
    def bos_id(self) -> int | None:
        """Id that opens a sequence, if the tokenizer names one."""
        value = self._tokenizer.bos_token_id
        return None if value is None else int(value)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``, special tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def encode_text(self, text: str, name: str) -> Encoded:
        """Ids as the tokenizer gives them by default, with whatever special tokens it adds."""
        return self._encoded(self._ids(text, special=True), self._ids(text, special=False), text, name, "text", ())

    def encode_messages(self, messages: list[dict[str, str]], name: str) -> Encoded:
        """Ids of a conversation after the chat template, which writes all special tokens itself.

        Raises:
            UserError: no chat template, or one that refuses the messages.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise UserError(
                f"prompt {name} has messages, but the tokenizer of {self.path} has no chat template",
                "give text or token_ids, or add chat_template to tokenizer_config.json",
            )
        try:
            rendered = str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # templates raise through jinja, with any type
            raise UserError(
                f"prompt {name}: the chat template refuses the messages: {_first_line(error)}",
                "change the roles or their order as the model's template demands",
            ) from error
        ids = self._ids(rendered, special=False)
        again = self._ids(rendered, special=True)
        warnings: tuple[str, ...] = ()
        if self.bos_id is not None and again[:2] == (self.bos_id, self.bos_id) != ids[:2]:
            warnings = (
                "double BOS avoided: the template writes BOS and the tokenizer would add another; "
                "a server that tokenises the rendered text with special tokens gets two",
            )
        return self._encoded(ids, ids, rendered, name, "template", warnings)

    def _ids(self, text: str, *, special: bool) -> tuple[int, ...]:
        return tuple(int(token) for token in self._tokenizer.encode(text, add_special_tokens=special))

    def _encoded(
        self,
        ids: tuple[int, ...],
        plain: tuple[int, ...],
        rendered: str,
        name: str,
        written_by: str,
        warnings: tuple[str, ...],
    ) -> Encoded:
        if not ids:
            raise UserError(f"prompt {name} has no tokens after tokenisation", "write a longer text")
        # The tokenizer adds specials around the plain ids, so these are one contiguous piece.
        offset = next((at for at in range(len(ids) - len(plain) + 1) if ids[at : at + len(plain)] == plain), 0)
        known = set(map(int, self._tokenizer.all_special_ids)) | _added_specials(self._tokenizer)
        special = tuple(
            SpecialToken(
                index,
                token,
                str(self._tokenizer.convert_ids_to_tokens(token)),
                written_by if offset <= index < offset + len(plain) else "tokenizer",
            )
            for index, token in enumerate(ids)
            if token in known
        )
        return Encoded(ids, rendered, special, warnings)


def _added_specials(tokenizer: Any) -> set[int]:
    decoder = getattr(tokenizer, "added_tokens_decoder", {})
    return {int(index) for index, token in decoder.items() if token.special}


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
