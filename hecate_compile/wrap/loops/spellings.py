"""Recognize how model code writes the experts that were hit, the rows of one, and the question if there are any."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Literal, TypeGuard

# Methods that change what they are called on, and those that have no value for a tensor without rows.
CHANGES = {"append", "extend", "insert", "update", "setdefault", "pop", "remove", "clear", "add_module"}


REDUCES = {"mean", "max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "kthvalue", "item", "tolist"}


REDUCES |= {"var", "std", "median", "quantile", "mode", "norm"}

# Methods whose result shares the memory of the tensor that they are called on.
VIEWS = {"detach", "expand", "flatten", "narrow", "permute", "reshape", "select", "squeeze", "unsqueeze", "view"}


VIEWS |= {"t", "transpose"}


class LeftAlone(Exception):
    """A loop cannot be changed; the message says why."""


def text_of(node: ast.AST) -> str:
    return ast.unparse(node)


def is_comment(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def given_to(node: ast.Call) -> list[str]:
    """Return the arguments of a call, as text."""
    return [text_of(one) for one in node.args] + [f"{one.arg}={text_of(one.value)}" for one in node.keywords]


def is_load(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


class Method(ast.Call):
    func: ast.Attribute


def is_method(node: ast.AST) -> TypeGuard[Method]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)


def names_assigned(node: ast.AST) -> list[str]:
    """Return the names that a statement gives values to; none if it writes anything else, too."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
        targets = [node.target]
    flat = [one for t in targets for one in (t.elts if isinstance(t, ast.Tuple) else [t])]
    return [t.id for t in flat if isinstance(t, ast.Name)] if all(isinstance(t, ast.Name) for t in flat) else []


@dataclass(frozen=True)
class Hits:
    """The experts of ``mask``, in its first dimension, that have any token in its ``depth`` others."""

    mask: str
    depth: int
    numbers: bool  # a loop gets numbers, not rows of one number each


_DIMS = {"(-1, -2)": 2, "(-2, -1)": 2, "(1, 2)": 2, "[-1, -2]": 2, "[1, 2]": 2, "-1": 1, "1": 1}


# Calls that make one dimension of rows with one number each.
_FLAT = [["flatten"], ["squeeze", "-1"], ["squeeze", "1"], ["view", "-1"], ["reshape", "-1"]]


def hits_of(node: ast.expr) -> Hits | None:
    """Recognize ``mask.sum(dims).greater(0).nonzero()`` and its kin; None for anything else."""
    if is_method(node) and node.func.attr == "tolist" and not given_to(node):
        node = node.func.value
    numbers, wanted = False, [[], ["as_tuple=False"]]
    if is_method(node) and [node.func.attr, *given_to(node)] in _FLAT:
        node, numbers = node.func.value, True
    elif isinstance(node, ast.Subscript) and text_of(node.slice) == "0":
        node, numbers, wanted = node.value, True, [["as_tuple=True"]]
    if not is_method(node) or node.func.attr != "nonzero":
        return None
    inner, given = node.func.value, given_to(node)
    if text_of(inner) == "torch" and node.args:
        inner, given = node.args[0], given[1:]
    if given not in wanted:
        return None
    return _any_token(inner, numbers)


def _any_token(node: ast.expr, numbers: bool) -> Hits | None:
    """Recognize ``mask.sum(dims) > 0`` and ``mask.any(-1).any(-1)``; None for anything else."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and text_of(node.comparators[0]) == "0":
        if not isinstance(node.ops[0], (ast.Gt, ast.NotEq)):
            return None
        node = node.left
    elif is_method(node) and node.func.attr in ("greater", "gt", "ne") and given_to(node)[-1:] == ["0"]:
        node = node.args[0] if text_of(node.func.value) == "torch" else node.func.value
    depth = 0
    while is_method(node) and node.func.attr in ("sum", "any") and len(given_to(node)) == 1:
        dims = given_to(node)[0].removeprefix("dim=")
        if dims not in _DIMS or (node.func.attr == "sum" and depth):
            return None
        depth, node = depth + _DIMS[dims], node.func.value
    return Hits(node.id, depth, numbers) if isinstance(node, ast.Name) and depth in (1, 2) else None


def searched_by(value: ast.expr) -> ast.expr | None:
    """Return the mask that ``torch.where(mask)``, ``mask.nonzero(as_tuple=True)`` and the like search for rows."""
    if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant):
        value = value.value
        if "as_tuple=True" not in text_of(value) and not text_of(value).startswith("torch.where("):
            return None
    elif is_method(value) and [value.func.attr, *given_to(value)] in _FLAT:
        value = value.func.value
        if not is_method(value) or value.func.attr != "nonzero":
            return None
    elif not is_method(value) or (value.func.attr == "nonzero" and "as_tuple=True" not in text_of(value)):
        return None
    if not is_method(value) or value.func.attr not in ("where", "nonzero"):
        return None
    given = [argument for argument in given_to(value) if not argument.startswith("as_tuple=")]
    if text_of(value.func.value) == "torch":
        return value.args[0] if len(given) == 1 else None
    return value.func.value if value.func.attr == "nonzero" and not given else None


@dataclass(frozen=True)
class Guard:
    """A statement's question if there are rows: what it asks, and what follows if so.

    It asks rows (``if rows.numel() == 0: continue``), a mask (``if mask.any()``), a number of rows (``if n == 0``) or
    the bounds between which they are (``if start == end``).
    """

    name: str
    kind: Literal["rows", "mask", "number", "bounds"]
    body: list[ast.stmt]
    other: str = ""  # the second of two bounds
    negative: bool = False  # a number below 0 is as none


def guard_of(node: ast.stmt) -> Guard | None:
    """Recognize ``if rows.numel() == 0: continue`` or ``if mask.any(): ...``; None for anything else."""
    if not isinstance(node, ast.If) or node.orelse:
        return None
    text, test = text_of(node.test), node.test
    leaves = len(node.body) == 1 and isinstance(node.body[0], ast.Continue)
    body = [] if leaves else node.body
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq if leaves else ast.NotEq):
        first, *others = [test.left, *test.comparators]
        if is_load(first) and len(others) == 1 and is_load(others[0]):
            return Guard(first.id, "bounds", body, others[0].id)
    for name in sorted({n.id for n in ast.walk(node.test) if is_load(n)}):
        counts = {f"{name}.numel()", f"{name}.nelement()", f"{name}.shape[0]", f"{name}.size(0)", f"len({name})"}
        masks = {
            f"torch.any({name})",
            *(f"{name}.{end}" for end in ("any()", "sum()", "any().item()", "sum().item()")),
        }
        for count in sorted(counts | masks):
            if text in (_without_rows(count) if leaves else _with_rows(count)):
                return Guard(name, "mask" if count in masks else "rows", body)
        if text in (_without_rows(name) if leaves else _with_rows(name)):
            return Guard(name, "number", body, negative="<" in text or ">" in text)
    return None


def _without_rows(count: str) -> tuple[str, ...]:
    return f"{count} == 0", f"not {count}", f"{count} < 1", f"{count} <= 0"


def _with_rows(count: str) -> tuple[str, ...]:
    return f"{count} > 0", f"{count} != 0", count, f"{count} >= 1"


_ON_HOST, _EXACT = "dtype=torch.int64, device='cpu'", "dtype=torch.float64, device='cpu'"
_CHOSEN_END = re.compile(
    rf"int\(torch\.where\(torch\.scalar_tensor\((\w+), .* torch\.scalar_tensor\((\w+), {re.escape(_ON_HOST)}\)\)\)"
)


def chosen_end(number: str, end: ast.expr, start: str) -> ast.expr:
    """Write ``end if number else start``, without a branch, as one number more that is not known while tracing."""
    chosen, other = (f"torch.scalar_tensor({one}, {_ON_HOST})" for one in (text_of(end), start))
    return expression(f"int(torch.where(torch.scalar_tensor({number}, {_EXACT}) != 0, {chosen}, {other}))")


def sum_of(node: ast.expr) -> tuple[str, str] | None:
    """Return start and number of ``start + number``, and of what :func:`chosen_end` writes: start if number is 0."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and is_load(node.left) and is_load(node.right):
        return node.left.id, node.right.id
    written = _CHOSEN_END.fullmatch(text_of(node))
    return (written[2], written[1]) if written is not None else None


def gives_a_value(node: ast.AST, name: str) -> bool:
    """Return whether a node gives a name another value, or changes the one that it has."""
    if isinstance(node, ast.Name):
        return node.id == name and not is_load(node)
    if isinstance(node, (ast.Subscript, ast.Attribute)):
        return not isinstance(node.ctx, ast.Load) and text_of(node.value) == name
    return is_method(node) and node.func.attr.endswith("_") and text_of(node.func.value) == name
