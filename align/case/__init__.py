"""What is run: the case file, prompts and their ids. Importing this loads neither torch nor transformers."""

from align.case.build import NewCase, new_case
from align.case.capacity import Capacity, capacity
from align.case.prompts import EncodedPrompt, Prompt, default_prompts, encode_prompts, load_prompts
from align.case.schema import Batch, Case, CaseLayout, CaseRequest, Decoding, load_case, parse_case
from align.case.tokenizer import SpecialToken

__all__ = [
    "Batch",
    "Capacity",
    "Case",
    "CaseLayout",
    "CaseRequest",
    "Decoding",
    "EncodedPrompt",
    "NewCase",
    "Prompt",
    "SpecialToken",
    "capacity",
    "default_prompts",
    "encode_prompts",
    "load_case",
    "load_prompts",
    "new_case",
    "parse_case",
]
