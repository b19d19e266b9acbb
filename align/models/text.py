"""English text of the default prompts, for checkpoints that speak it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

#: One text for each default prompt length in tokens; no prompt is the beginning of another. They are chosen so that
#: smollm2 goes on without close calls: wording changes which tokens nearly tie.
TEXTS: dict[int, str] = {
    1: "My grandmother lived in a small house at the edge of the forest.",
    7: "The capital city of France is called Paris, and it lies on the river Seine.",
    33: (
        "Water boils at one hundred degrees at sea level, but on a high mountain the air is thinner and it boils "
        "at a lower temperature. This is why it takes longer to cook rice or potatoes in the mountains, and"
    ),
    200: (
        "Anna grew up in a lighthouse. Every evening her father wrote the weather into a heavy green book, and she"
        " learned to read from it. She knew which winters had been hard and on which night the fishing boats had "
        "not come home. When she was ten she asked why anybody should write down the wind, since it was gone "
        "before the ink was dry. Her father said that a single line meant nothing, but that a thousand lines "
        "together told you what the sea usually did, and that only then could you notice when it did something "
        "else. Many years later, when Anna worked as an engineer in the city and a machine gave a result that "
        "nobody expected, she remembered the green book. She did not look at the strange result first. She opened "
        "the records of all the ordinary days, because they showed how much the numbers moved when nothing was "
        "wrong. Then she placed the new number beside them, and it was easy to see that the difference was far too"
        " large to be noise. The fault was in a small valve which had been replaced in spring. After that the "
        "young people in her office began to keep records too, and they called them the green book, although none "
        "of them had ever seen a lighthouse."
    ),
}


def cut_to_lengths(encode: Callable[[str], Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """The default texts as ids, cut to exactly the table's lengths.

    Args:
        encode: the tokenizer, text to ids. A text that yields too few ids is repeated.

    Raises:
        ValueError: the tokenizer yields no ids at all.
    """
    prompts = {}
    for length, text in TEXTS.items():
        ids = tuple(encode(text))
        if not ids:
            raise ValueError("the tokenizer turns English text into no ids")
        if len(ids) < length:
            ids = tuple(encode(" ".join([text] * (-(-length // len(ids)) + 1))))
        if len(ids) < length:  # a text that encodes to ever fewer ids per word
            raise ValueError(f"the tokenizer yields {len(ids)} ids for a text that should give {length}")
        prompts[length] = ids[:length]
    return prompts
