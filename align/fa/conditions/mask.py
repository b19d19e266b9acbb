"""Sparse modes and masks."""

from __future__ import annotations

from align.fa.outcome import ABSENT, HOLDS, Outcome, fires, fires_if, unknown
from align.fa.text import short
from align.fa.view import COMPRESSED, UNLIMITED, View

#: Shapes of the compressed mask.
SHAPES = tuple((*lead, COMPRESSED, COMPRESSED) for lead in ((), (1,), (1, 1)))


def _ignored(view: View) -> bool:
    """One query a sequence, not packed, no rope: the operator does not look at the sparse mode."""
    return view.single is True and not view.packed and not view.has_rope and view.path != "mla_absorb"


def _compressed(view: View) -> bool:
    return view.mode in (2, 3, 4)


# ---------------------------------------------------------------------------------------------------- the mode


def mode_known(view: View) -> Outcome:
    if view.mode is None:
        return ABSENT
    allowed = tuple(range(9)) if view.operator.family == "training" else (0, 1, 2, 3, 4)
    return fires_if(view.mode not in (*allowed, *((9,) if view.operator.version == "v2" else ())), mode=view.mode)


def tree(view: View) -> Outcome:
    quantised = view.key is not None and view.key.dtype == "int8"
    return fires_if(not view.has_rope and not quantised) if view.mode == 9 else ABSENT


def decode_ignored(view: View) -> Outcome:
    if view.mode is None:
        return ABSENT
    if view.single is None and not view.packed:
        return unknown("the lengths of the queries")
    return fires_if(bool(view.mode), mode=view.mode) if _ignored(view) else ABSENT


def decode_absorbed(view: View) -> Outcome:
    if view.single is None:
        return unknown("the lengths of the queries")
    return fires_if(view.mode in (1, 3, 4), mode=view.mode) if view.single else ABSENT


def left_up(view: View) -> Outcome:
    """Mode 2 counts from the first key: with a history a query sees the wrong end."""
    if view.mode != 2 or _ignored(view):
        return ABSENT
    if view.q_each is None or view.kv_each is None:
        return unknown("the lengths of queries and keys")
    longer = [(q, kv) for q, kv in zip(view.q_each, view.kv_each, strict=False) if kv > q]
    return fires(q=longer[0][0], kv=longer[0][1]) if longer else HOLDS


def left_up_used(view: View) -> Outcome:
    return fires_if(view.mode == 2) if view.mode is not None else ABSENT


def prefill_mode(view: View) -> Outcome:
    if view.mode is None or view.causal is False or view.partial or view.mode == 2:
        return ABSENT
    if view.causal is True and view.mode == 0 and view.mask is None:
        return ABSENT  # nothing_hidden says more
    if view.token_rows:
        return ABSENT  # one query each: modes of the lower triangle do not apply, and token_rows looks at each row
    return fires_if(view.mode not in (3, 4), mode=view.mode)


def nothing_hidden(view: View) -> Outcome:
    """Causal attention of more than one token needs a mask."""
    if view.causal is not True or not (view.has("mode") or view.has("mask")) or view.mode not in (0, None):
        return ABSENT
    if view.mask is not None:
        return HOLDS
    if view.longest_q is None:
        return unknown("the lengths of the queries")
    return fires_if(view.longest_q > 1, q=view.longest_q)


# ---------------------------------------------------------------------------------------------------- its presence


def decode_given(view: View) -> Outcome:
    if view.mode != 0:
        return ABSENT
    return fires_if(view.mask is not None, shape="" if view.mask is None else short(view.mask))


def missing(view: View) -> Outcome:
    if view.mode not in (1, 2, 3, 4, 9) or _ignored(view):
        return ABSENT
    return fires_if(not view.passed("mask"), mode=view.mode)


def none_fits(view: View) -> Outcome:
    return fires() if view.mode == 0 and not view.passed("mask") else ABSENT


def dtype(view: View) -> Outcome:
    if view.mask is None:
        return ABSENT
    allowed = ("bool", "uint8") if view.operator.family == "training" else ("bool", "int8", "uint8")
    return fires_if(view.mask.dtype not in allowed, dtype=view.mask.dtype, allowed=", ".join(allowed))


def atb_dtype(view: View) -> Outcome:
    if view.mask is None or view.query is None:
        return ABSENT
    return fires_if(view.mask.dtype != view.query.dtype, dtype=view.mask.dtype, wanted=view.query.dtype)


# ---------------------------------------------------------------------------------------------------- its shape


def compressed_shape(view: View) -> Outcome:
    if view.mask is None or not _compressed(view):
        return ABSENT
    return fires_if(view.mask.shape not in SHAPES, shape=short(view.mask), mode=view.mode)


def compressed_fits(view: View) -> Outcome:
    if view.mask is None or not _compressed(view) or view.mask.shape not in SHAPES:
        return ABSENT
    return fires(shape=short(view.mask), mode=view.mode)


def _full(view: View) -> bool:
    """A mask of queries by keys."""
    return view.mask is not None and view.mode in (0, 1) and len(view.mask.shape) >= 2


def token_rows(view: View) -> Outcome:
    """Where each token is a sequence of its own, its row of the mask shows its own history and nothing after it."""
    if not view.token_rows or view.mode != 0 or view.causal is not True:
        return ABSENT
    if view.mask is None:
        return fires(token=0, given="all", wanted=tokens_see(view)[0])
    if view.masking is None or view.masking.visible is None:
        return unknown("how many keys each row of the mask shows")
    for token, (given, wanted) in enumerate(zip(view.masking.visible, tokens_see(view), strict=False)):
        if given != wanted:
            return fires(token=token, given=given, wanted=wanted)
    return HOLDS


def tokens_see(view: View) -> tuple[int, ...]:
    """Keys that each token of the step sees, itself included."""
    lengths = zip(view.context.q_lens or (), view.context.kv_lens or (), strict=False)
    return tuple(kv - q + at + 1 for q, kv in lengths for at in range(q))


def rows(view: View) -> Outcome:
    if not _full(view) or view.mask is None:
        return ABSENT
    if view.longest_q is None:
        return unknown("the lengths of the queries")
    if view.single and len(view.mask.shape) == 2 and not view.packed:
        return ABSENT  # [batch, keys]
    return fires_if(view.mask.shape[-2] < view.longest_q, size=view.mask.shape[-2], q=view.longest_q)


def columns(view: View) -> Outcome:
    if not _full(view) or view.mask is None:
        return ABSENT
    if view.longest_kv is None:
        return unknown("the lengths of the keys")
    return fires_if(view.mask.shape[-1] < view.longest_kv, size=view.mask.shape[-1], kv=view.longest_kv)


def under_ranked(view: View) -> Outcome:
    """Two axes are documented for the padded layouts without rope alone."""
    if not _full(view) or view.mask is None:
        return ABSENT
    return fires_if(
        len(view.mask.shape) == 2 and (view.packed or view.has_rope), shape=short(view.mask), layout=view.layout
    )


def lead(view: View) -> Outcome:
    """Axes ahead of queries and keys: 1, or the batch first."""
    if not _full(view) or view.mask is None or len(view.mask.shape) == 2:
        return ABSENT
    ahead = view.mask.shape[:-2]
    right = len(ahead) <= 2 and all(size == 1 for size in ahead[1:]) and ahead[0] in (1, view.batch or ahead[0])
    return fires_if(not right, shape=short(view.mask))


def paged_width(view: View) -> Outcome:
    if not _full(view) or view.mask is None or not view.paged:
        return ABSENT
    if view.reach is None:
        return unknown("block table and block size")
    return fires_if(view.mask.shape[-1] < view.reach, size=view.mask.shape[-1], reach=view.reach)


def paged_remind(view: View) -> Outcome:
    """Where the table is not part of what was described."""
    return fires_if(view.key is None and not view.paged) if _full(view) else ABSENT


def atb_size(view: View) -> Outcome:
    if view.mask is None or len(view.mask.shape) < 2:
        return ABSENT
    if view.longest_q is None:
        return unknown("the lengths of the queries")
    return fires_if(min(view.mask.shape[-2:]) < view.longest_q, shape=short(view.mask), q=view.longest_q)


# ---------------------------------------------------------------------------------------------------- its content


def _pattern(view: View, pattern: str) -> Outcome:
    if view.mask is None or view.causal is False:
        return ABSENT
    if view.masking is None:
        return unknown("the mask's content")
    return fires_if(view.masking.pattern == pattern)


def transposed(view: View) -> Outcome:
    return _pattern(view, "past")


def inverted(view: View) -> Outcome:
    return _pattern(view, "past and diagonal")


def diagonal(view: View) -> Outcome:
    return _pattern(view, "causal and diagonal")


def all_hidden(view: View) -> Outcome:
    if view.single and not _compressed(view):
        return ABSENT
    return _pattern(view, "all")


def upper_open(view: View) -> Outcome:
    """Of a compressed mask; patterns that have rules of their own are left to these."""
    if not _compressed(view) or view.mask is None or view.mask.shape not in SHAPES:
        return ABSENT
    if view.masking is None:
        return unknown("the mask's content")
    if view.masking.pattern in ("past", "past and diagonal"):
        return ABSENT
    return fires_if(view.masking.upper_open > 0, count=view.masking.upper_open)


def lower_hidden(view: View) -> Outcome:
    if not _compressed(view) or view.mask is None or view.mask.shape not in SHAPES:
        return ABSENT
    if view.masking is None:
        return unknown("the mask's content")
    if view.masking.pattern != "other":
        return ABSENT if view.masking.lower_hidden else HOLDS
    return fires_if(view.masking.lower_hidden > 0, count=view.masking.lower_hidden)


def full_shifted(view: View) -> Outcome:
    """A causal mask of queries by keys must end at the last key where there is a history."""
    if not _full(view) or view.mask is None or view.causal is False:
        return ABSENT
    if view.masking is None:
        return unknown("the mask's content")
    if view.masking.pattern != "causal" or view.q_each is None or view.kv_each is None:
        return ABSENT
    behind = [(q, kv) for q, kv in zip(view.q_each, view.kv_each, strict=False) if kv > q]
    return fires(q=behind[0][0], kv=behind[0][1]) if behind else HOLDS


# ---------------------------------------------------------------------------------------------------- the window


def band_future(view: View) -> Outcome:
    if view.mode != 4 or view.causal is False:
        return ABSENT
    after = view.whole("after")
    return unknown("the tokens after") if after is None else fires_if(after > 0, name=view.name("after"), after=after)


def band_unbounded(view: View) -> Outcome:
    if view.mode != 4:
        return ABSENT
    before = view.whole("before")
    return fires_if(before is not None and before >= UNLIMITED, name=view.name("before"))


def band_negative(view: View) -> Outcome:
    if view.mode != 4:
        return ABSENT
    before = view.whole("before")
    return fires_if(before is not None and before < 0, name=view.name("before"), before=before)


def band_window(view: View) -> Outcome:
    before, window = view.whole("before"), view.context.window
    if view.mode != 4 or not window or before is None:
        return ABSENT
    return fires_if(before not in (window - 1, window), before=before, window=window, name=view.name("before"))


def band_inclusive(view: View) -> Outcome:
    before, window = view.whole("before"), view.context.window
    if view.mode != 4 or not window or before is None:
        return ABSENT
    return fires_if(before == window, before=before, window=window, name=view.name("before"))


def band_single(view: View) -> Outcome:
    """With one query the operator does not look at the tokens before it."""
    if view.mode != 4 or view.packed or not view.single:
        return ABSENT
    window = view.context.window or (view.whole("before") or UNLIMITED) + 1
    if view.longest_kv is None:
        return unknown("the lengths of the keys")
    return fires_if(view.longest_kv > window, kv=view.longest_kv, window=window)


def band_ignored(view: View) -> Outcome:
    if view.mode not in (1, 2, 3):
        return ABSENT
    given = [view.name(role) for role in ("before", "after") if _limits(view, role)]
    return fires_if(bool(given), names=", ".join(given), mode=view.mode)


def _limits(view: View, role: str) -> bool:
    value = view.whole(role) if view.passed(role) else None
    return value is not None and value < UNLIMITED


def window_ignored(view: View) -> Outcome:
    """A window that the model has and the call does not."""
    window = view.context.window
    if not window or view.mode == 4 or not view.has("mode") or view.partial:
        return ABSENT
    if view.mode in (0, 1) and view.mask is not None:
        return ABSENT  # the mask may have it
    if view.longest_kv is None:
        return unknown("the lengths of the keys")
    return fires_if(view.longest_kv > window, window=window, kv=view.longest_kv, mode=view.mode)


def atb_window(view: View) -> Outcome:
    """These operators take no window: it has to be in the mask, or older keys must not be given."""
    window = view.context.window
    if not window:
        return ABSENT
    if view.longest_kv is None:
        return unknown("the lengths of the keys")
    if view.longest_kv <= window:
        return HOLDS
    if view.mask is not None:
        if view.masking is None:
            return unknown("the mask's content")
        if view.masking.pattern not in ("none", "causal", "causal right"):
            return ABSENT  # the mask may have it
    return fires(window=window, kv=view.longest_kv)
