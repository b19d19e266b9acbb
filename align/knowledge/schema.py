"""The form of an entry: symptom, causes, checks, treatment and files to read, in English and Chinese."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from align.findings import PATHS, Path

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = get_args(Language)

#: Chinese names of :data:`align.findings.PATHS`.
PATHS_ZH: dict[str, str] = {
    "A": "KV 缓存索引",
    "B": "算子精度",
    "C": "通信与并行",
    "FA": "FlashAttention 入参",
    "QUANT": "量化",
    "INPUT": "输入",
    "ENV": "环境",
    "UNLOCATED": "未定位",
}


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Text(_Strict):
    """One text in both languages; a file has it as ``[English, 中文]``."""

    en: str = Field(min_length=1)
    zh: str = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _pair(cls, value: Any) -> Any:
        if isinstance(value, list):
            if len(value) != 2:
                raise ValueError("a text is a pair: [English, 中文]")
            return {"en": value[0], "zh": value[1]}
        return value

    def of(self, language: Language) -> str:
        """In that language."""
        return self.en if language == "en" else self.zh


def _as_tuple(value: Any) -> Any:
    """TOML has lists only, and a strict tuple takes none."""
    return tuple(value) if isinstance(value, list) else value


Texts = Annotated[tuple[Text, ...], BeforeValidator(_as_tuple), Field(min_length=1)]
Names = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]


class FileGroup(_Strict):
    """Files that are read together.

    Attributes:
        what: what they hold.
        files: paths in the installed packages; ``<vendor>`` is ascend, camb or maca, a trailing ``/`` marks a folder.
        needs: what a model must have for them to be its code; ``None`` for every model.
    """

    needs: Literal["experts"] | None = None
    what: Text
    files: Annotated[tuple[str, ...], BeforeValidator(_as_tuple), Field(min_length=1)]


class Entry(_Strict):
    """What is known about one kind of fault.

    Attributes:
        id: the kind of a finding, as in ``weights``, or the id of a seed's row, as in ``003-SY-1``.
        paths: keys of :data:`align.findings.PATHS`, the likeliest first.
        source: the document and section it comes from.
        title, symptom, treatment: texts.
        causes, checks: likely causes, and what to check, the likeliest first.
        note: where it does not hold, or what it may be confused with.
        read: names of :class:`FileGroup`.
        see: ids of other entries.
    """

    id: str = Field(min_length=1)
    paths: Annotated[tuple[Path, ...], BeforeValidator(_as_tuple), Field(min_length=1)]
    source: str = Field(min_length=1)
    title: Text
    symptom: Text
    causes: Texts
    checks: Texts
    treatment: Text
    note: Text | None = None
    read: Names = ()
    see: Names = ()

    @property
    def of_a_seed(self) -> bool:
        """Whether it is a row of a seed's table, and not a kind that this tool reports."""
        return self.id[:3].isdigit()

    def path_text(self, language: Language) -> str:
        """``A (KV-cache indices), B (operator precision)``."""
        names = PATHS if language == "en" else PATHS_ZH
        return ", ".join(f"{path} ({names[path]})" for path in self.paths)

    def texts(self) -> tuple[Text, ...]:
        """All that it says."""
        note = () if self.note is None else (self.note,)
        return (self.title, self.symptom, *self.causes, *self.checks, self.treatment, *note)
