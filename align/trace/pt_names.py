"""Names of `.pt` files, in the naming of seed 003: ``{layer}_{op}_{input|output}_rank{rank}.pt``.

``op`` is the checkpoint without its layer, dots as underscores. ``input`` is what is named after the operator that
reads it (:data:`INPUTS`), all else is ``output``::

    layer0_attn_out_output_rank0.pt      layers.0.attn.out
    layer0_block_in_input_rank0.pt       layers.0.block_in
    final_norm_output_rank0.pt           final_norm
    token_ids_input_rank0.pt             what the engine was fed
"""

from __future__ import annotations

import re

from align.checkpoints.table import kinds, parse
from align.trace.format import POSITIONS, TOKEN_IDS

#: Checkpoints that are dumped in front of the operator that reads them.
INPUTS = frozenset(
    ("block_in", "final_in", "attn.key_states", "attn.value_states", "attn.kv_start_indices", TOKEN_IDS, POSITIONS)
)
_FILE = re.compile(
    r"(?:(?:layers?[._]?)?(?P<layer>\d+)[._])?(?P<op>.+?)(?:_(?P<io>input|output))?(?:_rank(?P<rank>\d+))?"
)


def _operators() -> dict[str, str]:
    names = [*kinds(), TOKEN_IDS, POSITIONS]
    found = {name.replace(".", "_"): name for name in names}
    assert len(found) == len(names), "two checkpoints have one file name"
    return found


def kind_and_layer(name: str) -> tuple[str, int | None]:
    """``layers.3.attn.q`` → ``attn.q`` and 3; token ids and positions count as kinds without a layer.

    Raises:
        ValueError: no checkpoint has this name.
    """
    if name in (TOKEN_IDS, POSITIONS):
        return name, None
    parsed = parse(name)
    return parsed.kind.name, parsed.layer


def file_name(name: str, rank: int) -> str:
    """``layers.0.attn.out`` → ``layer0_attn_out_output_rank0.pt``.

    Raises:
        ValueError: no checkpoint has this name.
    """
    return file_of(*kind_and_layer(name), rank)


def file_of(kind: str, layer: int | None, rank: int) -> str:
    """The same of a kind at a layer, which need not be in the table: ``attn.qkv``."""
    prefix = "" if layer is None else f"layer{layer}_"
    return f"{prefix}{kind.replace('.', '_')}_{'input' if kind in INPUTS else 'output'}_rank{rank}.pt"


def read_file_name(stem: str) -> tuple[str, int]:
    """The inverse of :func:`file_name`, without ``.pt``; an operator that is not in the table keeps its own name."""
    match = _FILE.fullmatch(stem)
    assert match is not None, stem  # `op` takes whatever the rest leaves
    rank = int(match["rank"] or 0)
    layer, direction = match["layer"], match["io"]
    kind = _operators().get(match["op"])
    if kind is not None and direction in (None, "input" if kind in INPUTS else "output"):
        per_layer = kind in kinds() and kinds()[kind].per_layer
        if per_layer == (layer is not None):
            return (kind if layer is None else f"layers.{int(layer)}.{kind}"), rank
    prefix = "" if layer is None else f"layer{int(layer)}_"
    return f"{prefix}{match['op']}_{direction or 'output'}", rank
