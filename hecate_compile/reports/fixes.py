"""What a user can do about what a pass left alone."""

from __future__ import annotations

from hecate.passes import Skip

# The first whose words are in the reason; the order is that of how exactly they say what is wrong.
_FIXES: tuple[tuple[str, str], ...] = (
    ("depends on attention_mask", "pass no attention_mask where nothing is padded"),
    ("keep rows apart", "what is computed between the expert matmuls must treat each row by itself: move it before "
     "or behind the experts"),
    ("own tokens", "compute it before the rows are sorted, and carry it as a column of each row; or apply it behind "
     "the experts"),
    ("another number of rows", "write -1 or x.shape[0] in place of a fixed number of rows"),
    ("in-place", "write the plain form: y = y + b in place of y += b, out.index_add_(0, rows, y) in place of "
     "out[rows] += y"),
    ("changed in place", "out.index_add_(0, rows, y) in place of out[rows] += y"),
    ("autocast", "Config(mixed_precision=...) in place of autocast"),
    ("gradients", "compute all of the experts with gradients on, or all of it with gradients off"),
    ("grouped matmul", "call torch.nn.functional.grouped_mm(rows, weight, offs=offsets) without bias and out_dtype"),
    ("no grouped form", "x @ w[e], torch.nn.functional.linear(x, w[e]) or one addition of a bias for each expert"),
    ("another way than expert", "compute every expert in the same way"),
    ("result of an earlier one", "let the turns of the loop not read what earlier turns wrote"),
    ("travel in one part", "Config(chunks=1) says the same, without this line"),
    ("travels each by itself", 'Config(dispatch="rows") says the same, without this line'),
    ("travel each by itself", 'Config(dispatch="rows") says the same, without this line'),
)  # fmt: skip
_OTHERWISE = "docs/models.md has the spellings that are rewritten; the program is right, but slower"


def fix_of(skip: Skip) -> str:
    """What to do about it."""
    return next((fix for words, fix in _FIXES if words in skip.reason), _OTHERWISE if skip.fallback else "")
