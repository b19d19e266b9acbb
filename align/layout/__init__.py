"""How a model is spread over devices: triples, the ranks of their groups, and the engines' spellings and rules."""

from align.layout.flags import engine_flags, layout_of_flags
from align.layout.groups import DIMENSIONS, Dimension, RankPlace, dp_groups, ep_groups, groups, place_of, tp_groups
from align.layout.rules import RULES, Rule, expert_rules
from align.layout.triple import EXPERT_KEYS, Layout, parse_layout

__all__ = [
    "DIMENSIONS",
    "EXPERT_KEYS",
    "RULES",
    "Dimension",
    "Layout",
    "RankPlace",
    "Rule",
    "dp_groups",
    "engine_flags",
    "ep_groups",
    "expert_rules",
    "groups",
    "layout_of_flags",
    "parse_layout",
    "place_of",
    "tp_groups",
]
