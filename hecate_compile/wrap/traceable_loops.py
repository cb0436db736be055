"""Loops over experts as a graph can have them: a turn for every expert, and counts of a known length.

Model code likes to leave out experts that no token has chosen. How many turns are left then depends on the routing:

    hit = mask.sum(dim=(-1, -2)).greater(0).nonzero()          for expert in range(num_experts):
    for expert in hit:                                             choice, token = torch.where(mask[expert])
        choice, token = torch.where(mask[expert[0]])               if token.numel() == 0:
        out.index_add_(0, token, ...)                                  continue
                                                                   out.index_add_(0, token, ...)

The left becomes a loop over ``range(mask.shape[0])``; from the right ``continue`` goes. Only loops in these few
spellings are changed, and only where a turn without rows changes nothing: all that a turn leaves behind is written to
rows that it has found by its expert (``out.index_add_(0, token, y)``, ``out[token] += y``, ``out[token] = y``), and
these are none. Everything else stays as it is. A mask is taken to have no negative entries, and an expert that is
called with no rows to do nothing.

``torch.bincount(ids, minlength=E)`` has more than E elements if an id is larger, so no graph knows how many. It
becomes ``index_add``, which counts the same and raises for such an id.
"""

from __future__ import annotations

import ast
import copy
import inspect
import logging
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any, TypeGuard

from torch import nn

from hecate.wrap.find_experts import ExpertsModule
from hecate.wrap.swapped_class import swap_class

log = logging.getLogger("hecate")


class _Left(Exception):
    """The loop stays as it is; the message says why."""


def make_loops_traceable(model: nn.Module, found: Sequence[ExpertsModule]) -> tuple[str, ...]:
    """Change such code in the methods of experts modules and of those that they are in.

    Returns:
        Where they are, as ``file:line``.
    """
    near = {name for experts in found for name in (experts.name, experts.name.rpartition(".")[0])}
    done: dict[tuple[FunctionType, bool], tuple[FunctionType, list[int]] | None] = {}
    places: dict[str, None] = {}
    for name, module in list(model.named_modules()):
        if name not in near:
            continue
        changed = {}
        for key, function in _methods(module):
            listed = isinstance(module._modules.get("experts"), (nn.ModuleList, nn.ModuleDict))
            if (function, listed) not in done:
                try:
                    done[function, listed] = _rewritten(function, listed)
                except Exception:
                    # What is not changed is traced as it is, or named when that fails.
                    log.warning("hecate: could not look at the loops of %s", function.__qualname__, exc_info=True)
                    done[function, listed] = None
            rewritten = done[function, listed]
            if rewritten is not None:
                changed[key], lines = rewritten
                file = inspect.unwrap(function).__code__.co_filename
                places |= dict.fromkeys(f"{file}:{line}" for line in lines)
        if changed:
            swap_class(module, changed)
    return tuple(places)


def _methods(module: nn.Module) -> Iterator[tuple[str, FunctionType]]:
    seen: set[str] = set()
    for cls in type(module).__mro__:
        if cls.__module__.partition(".")[0] == "torch":
            return
        for key, value in vars(cls).items():
            if isinstance(value, FunctionType) and key not in seen:
                yield key, value
            seen.add(key)


# --- functions ---


def _rewritten(function: FunctionType, listed: bool) -> tuple[FunctionType, list[int]] | None:
    """The function with its loops changed, and their lines; None if there are none.

    Args:
        listed: whether ``self.experts`` is a list of modules.
    """
    inner = vars(function).get("__wrapped__")
    if isinstance(inner, FunctionType):
        found = _rewritten(inner, listed)
        again = None if found is None else _wrapped_again(function, inner, found[0])
        return None if found is None or again is None else (again, found[1])
    try:
        source, start = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(source)))
    except (OSError, TypeError, SyntaxError):
        return None
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        return None
    ast.increment_lineno(tree, start - 1)
    loops = _Loops(definition, listed)
    definition = _Counts(loops.lines).visit(loops.visit(definition))
    if not loops.lines or _has_private_names(definition):
        return None
    return _compiled(definition, function), loops.lines


def _wrapped_again(wrapper: FunctionType, old: FunctionType, new: FunctionType) -> FunctionType | None:
    """A decorated function around another one; None if it is not known how the decorator keeps it."""
    cells = wrapper.__closure__ or ()
    if not any(cell.cell_contents is old for cell in cells):
        return None
    closure = tuple(CellType(new) if cell.cell_contents is old else cell for cell in cells)
    made = _function(wrapper, wrapper.__code__, closure)
    made.__dict__["__wrapped__"] = new
    return made


def _has_private_names(definition: ast.FunctionDef) -> bool:
    """Names that mean something else outside of their class."""
    attributes = (node.attr for node in ast.walk(definition) if isinstance(node, ast.Attribute))
    return any(name.startswith("__") and not name.endswith("__") for name in attributes)


def _compiled(definition: ast.FunctionDef, function: FunctionType) -> FunctionType:
    """The function of a changed definition, in the place of ``function``."""
    definition.decorator_list, definition.returns = [], None
    given = definition.args
    for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if argument is not None:
            argument.annotation = None
    # Only that there are defaults matters here.
    given.defaults = [ast.Constant(None) for _ in given.defaults]
    given.kw_defaults = [None if default is None else ast.Constant(None) for default in given.kw_defaults]
    # What it closes over, __class__ of super() among it, are arguments of a function around it.
    free = function.__code__.co_freevars
    around = ast.parse(f"def around({', '.join(free)}):\n    return {definition.name}")
    outer = around.body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body.insert(0, definition)
    ast.fix_missing_locations(around)
    namespace: dict[str, Any] = {}
    exec(compile(around, function.__code__.co_filename, "exec", dont_inherit=True), namespace)
    code = namespace["around"](*(None for _ in free)).__code__
    cells = dict(zip(free, function.__closure__ or (), strict=True))
    return _function(function, code, tuple(cells[name] for name in code.co_freevars))


def _function(like: FunctionType, code: Any, closure: tuple[CellType, ...]) -> FunctionType:
    made = FunctionType(code, like.__globals__, like.__name__, like.__defaults__, closure)
    made.__kwdefaults__ = like.__kwdefaults__
    made.__qualname__, made.__module__, made.__doc__ = like.__qualname__, like.__module__, like.__doc__
    made.__annotations__ = dict(like.__annotations__)
    made.__dict__.update(like.__dict__)
    return made


# --- loops ---


class _Loops(ast.NodeTransformer):
    """Changes the loops of one function."""

    def __init__(self, definition: ast.FunctionDef, listed: bool) -> None:
        self.definition, self.listed = definition, listed
        self.lines: list[int] = []

    def visit_For(self, node: ast.For) -> ast.AST:
        try:
            changed = self._over_hits(node) or self._with_guard(node)
        except _Left as why:
            log.debug("loop in line %d of %s left alone: %s", node.lineno, self.definition.name, why)
            changed = None
        if changed is None:
            self.generic_visit(node)
            return node
        self.lines.append(node.lineno)
        return changed

    def _over_hits(self, node: ast.For) -> ast.For | None:
        """A loop over the experts of a mask that has any token, as one over all of them."""
        if not isinstance(node.target, ast.Name) or node.orelse:
            return None
        hits = self._hits(node)
        if hits is None:
            return None
        turn = node.target.id
        index = _Index(turn, hits.mask, hits.numbers, self.listed)
        body = [made for old in node.body for made in index.statement(copy.deepcopy(old))]
        rows = _Rows(hits.mask, turn, hits.depth)
        body = self._checked(node, body, rows, {turn})
        changed = ast.For(target=node.target, iter=_expression(f"range({hits.mask}.shape[0])"), body=body, orelse=[])
        return ast.fix_missing_locations(ast.copy_location(changed, node))

    def _hits(self, node: ast.For) -> _Hits | None:
        """What is iterated over, if it is all experts of a mask that have tokens."""
        if not isinstance(node.iter, ast.Name):
            return _hits_of(node.iter)
        name = node.iter.id
        everything = list(ast.walk(self.definition))
        stores = [n for n in everything if isinstance(n, ast.Name) and n.id == name and not _is_load(n)]
        loads = [n for n in everything if _is_load(n) and n.id == name]
        made = [n for n in everything if isinstance(n, ast.Assign) and _assigned(n) == [name]]
        given = [a for a in everything if isinstance(a, ast.arg) and a.arg == name]
        if len(stores) != 1 or len(loads) != 1 or len(made) != 1 or given or len(made[0].targets) != 1:
            return None
        hits = _hits_of(made[0].value)
        if hits is None:
            return None
        for other in everything:
            if getattr(other, "lineno", 0) <= made[0].lineno:
                continue
            stored = isinstance(other, ast.Name) and other.id == hits.mask and not _is_load(other)
            inside = (
                isinstance(other, (ast.Subscript, ast.Attribute))
                and not isinstance(other.ctx, ast.Load)
                and _text(other.value) == hits.mask
            )
            changed = _is_method(other) and other.func.attr.endswith("_") and _text(other.func.value) == hits.mask
            if stored or changed or inside:
                raise _Left(f"{hits.mask} changes between the hits and the loop")
        return hits

    def _with_guard(self, node: ast.For) -> ast.For | None:
        """A loop that leaves out turns without rows, as one that does not."""
        turn = {n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)}
        rows = _Rows(None, None, 0)
        for number, statement in enumerate(node.body):
            guard = _guard_of(statement)
            if guard is None:
                rows.learn(statement)
                continue
            if not rows.starts_from(guard.name, guard.mask):
                return None
            kept = [copy.deepcopy(n) for n in (*guard.body, *node.body[number + 1 :])]
            rest = self._checked(node, kept, rows, turn)
            changed = ast.For(
                target=node.target, iter=node.iter, body=[*node.body[:number], *rest], orelse=node.orelse
            )
            return ast.fix_missing_locations(ast.copy_location(changed, node))
        return None

    def _checked(self, node: ast.For, body: list[ast.stmt], rows: _Rows, turn: set[str]) -> list[ast.stmt]:
        """``body`` without further guards, if a turn without rows changes nothing; or this raises."""
        inside = {id(n) for statement in node.body for n in ast.walk(statement)} | {
            id(n) for n in ast.walk(node.target)
        }
        outside = {n.id for n in ast.walk(self.definition) if isinstance(n, ast.Name) and id(n) not in inside}
        if rows.turn in outside:
            raise _Left("the loop's variable is used elsewhere")
        return _Effects(outside, rows, body, turn).check(body)


@dataclass(frozen=True)
class _Hits:
    """The experts of ``mask``, in its first dimension, that have any token in its ``depth`` others.

    Attributes:
        numbers: they are iterated over as numbers, not as rows of one.
    """

    mask: str
    depth: int
    numbers: bool


_DIMS = {"(-1, -2)": 2, "(-2, -1)": 2, "(1, 2)": 2, "[-1, -2]": 2, "[1, 2]": 2, "-1": 1, "1": 1}


def _hits_of(node: ast.expr) -> _Hits | None:
    """``mask.sum(dims).greater(0).nonzero()`` and its kin; None for anything else."""
    numbers = False
    if _is_method(node) and node.func.attr == "tolist" and not _given(node):
        node = node.func.value
    if _is_method(node) and [node.func.attr, *_given(node)] in (
        ["flatten"], ["squeeze", "-1"], ["squeeze", "1"], ["view", "-1"], ["reshape", "-1"]
    ):  # fmt: skip
        node, numbers = node.func.value, True
    elif isinstance(node, ast.Subscript) and _text(node.slice) == "0":
        node, numbers = node.value, True
        if not _text(node).endswith("as_tuple=True)"):
            return None
    if not _is_method(node) or node.func.attr != "nonzero":
        return None
    given = _given(node)
    inner = node.func.value
    if _text(inner) == "torch" and given:
        inner, given = node.args[0], given[1:]
    if given != (["as_tuple=True"] if numbers and "as_tuple=True" in _text(node) else []) and given != [
        "as_tuple=False"
    ]:
        return None
    return _any_token(inner, numbers)


def _any_token(node: ast.expr, numbers: bool) -> _Hits | None:
    """``mask.sum(dims) > 0``, ``mask.any(-1).any(-1)``."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and _text(node.comparators[0]) == "0":
        if not isinstance(node.ops[0], (ast.Gt, ast.NotEq)):
            return None
        node = node.left
    elif _is_method(node) and node.func.attr in ("greater", "gt", "ne") and _given(node)[-1:] == ["0"]:
        node = node.args[0] if _text(node.func.value) == "torch" else node.func.value
    depth = 0
    while _is_method(node) and node.func.attr in ("sum", "any") and len(_given(node)) == 1:
        dims = _given(node)[0].removeprefix("dim=")
        if dims not in _DIMS or (node.func.attr == "sum" and depth):
            return None
        depth, node = depth + _DIMS[dims], node.func.value
    return _Hits(node.id, depth, numbers) if isinstance(node, ast.Name) and depth in (1, 2) else None


class _Index(ast.NodeTransformer):
    """Uses of the loop's variable, a tensor of one expert's number, as uses of the number itself."""

    def __init__(self, name: str, mask: str, is_number: bool, listed: bool) -> None:
        self.name, self.mask, self.is_number, self.listed = name, mask, is_number, listed
        self._known: set[int] = set()

    def statement(self, node: ast.stmt) -> list[ast.stmt]:
        """The statement, rewritten; none for ``expert = expert[0]``."""
        changed = self.visit(node)
        for inner in ast.walk(changed):
            if self._is_it(inner) and id(inner) not in self._known:
                raise _Left(f"{self.name} is used in {_text(changed)}")
        if any(isinstance(n, ast.Name) and n.id == self.name and not _is_load(n) for n in ast.walk(changed)):
            if (
                not isinstance(changed, ast.Assign)
                or _assigned(changed) != [self.name]
                or not self._is_it(changed.value)
            ):
                raise _Left(f"{self.name} becomes something else in {_text(changed)}")
            self.is_number = True
            return []
        return [changed]

    def _is_it(self, node: ast.AST) -> bool:
        return _is_load(node) and node.id == self.name

    def _number(self, at: ast.AST) -> ast.Name:
        name = ast.copy_location(ast.Name(self.name, ast.Load()), at)
        self._known.add(id(name))
        return name

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if self._is_it(node.value):
            if _text(node.slice) != "0" or self.is_number:
                raise _Left(f"{_text(node)} is no number")
            return self._number(node)
        self.generic_visit(node)
        # A list takes either; what else is indexed with a row of one number has a dimension more.
        if self._is_it(node.slice) and (self.is_number or (self.listed and _text(node.value) == "self.experts")):
            node.slice = self._number(node.slice)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if self._is_it(node.left):
            node.left = self._number(node.left)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        function = node.func
        if isinstance(function, ast.Attribute) and self._is_it(function.value):
            if function.attr not in ("item", "tolist") and (function.attr != "squeeze" or self.is_number):
                raise _Left(f"{_text(node)} is no number")
            if _given(node) or (function.attr == "tolist" and not self.is_number):
                raise _Left(f"{_text(node)} is no number")
            return self._number(node)
        if isinstance(function, ast.Attribute) and function.attr == "squeeze" and _given(node) == ["0"]:
            owner = function.value
            if isinstance(owner, ast.Subscript) and self._is_it(owner.slice) and not self.is_number:
                # mask[[3]] has a first dimension more than mask[3].
                owner.slice = self._number(owner.slice)
                return owner
        self.generic_visit(node)
        if _text(function) == "int" and len(node.args) == 1 and self._is_it(node.args[0]):
            return self._number(node)
        return node

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.AST:
        self.generic_visit(node)
        if self._is_it(node.value) and self.is_number:
            node.value = self._number(node.value)
        return node


class _Rows:
    """Names that have nothing in them in a turn without rows: numbers of rows, and masks that are all False.

    Args:
        mask, turn, depth: of a loop over hits: numbers of rows are what ``torch.where(mask[turn])`` finds, one for
            each of the mask's ``depth`` further dimensions.
    """

    def __init__(self, mask: str | None, turn: str | None, depth: int) -> None:
        self.mask, self.turn, self.depth = mask, turn, depth
        self.turns = {turn} if turn is not None else set()
        self.numbers: set[str] = set()
        self.masks: set[str] = set()
        # Of a loop with a guard: what is known before it, by what was found with what.
        self._found: list[tuple[str | None, list[str]]] = []
        self._masks: set[str] = set()
        self._rows: dict[str, str] = {}

    def has(self, index: ast.expr) -> bool:
        """Whether nothing is written by this index."""
        first = index.elts[0] if isinstance(index, ast.Tuple) and index.elts else index
        return isinstance(first, ast.Name) and first.id in self.numbers | self.masks

    def learn(self, node: ast.stmt) -> None:
        """What an assignment of one value tells."""
        if isinstance(node, ast.With):
            for inner in node.body:
                self.learn(inner)
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            return
        names, value = _assigned(node), node.value
        # Whatever had the names before is gone.
        for known in (self.numbers, self.masks, self._masks):
            known.difference_update(names)
        self._found = [(source, those) for source, those in self._found if not {source, *those} & {*names}]
        self._rows = {rows: index for rows, index in self._rows.items() if not {rows, index} & {*names}}
        if isinstance(value, ast.Name) and value.id in self.turns:
            self.turns |= set(names)
        searched = _searched(value)
        if searched is not None:
            source = searched.id if isinstance(searched, ast.Name) else None
            if source in self.masks or (self._is_of_turn(searched) and len(names) == self.depth):
                self.numbers |= set(names)
            self._found.append((source, names))
        elif len(names) == 1 and not isinstance(node.targets[0], ast.Tuple):
            if isinstance(value, ast.Compare) or (_is_method(value) and value.func.attr == "any" and _given(value)):
                self._masks |= set(names)
            if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Name):
                self._rows[names[0]] = value.slice.id

    def _is_of_turn(self, node: ast.expr) -> bool:
        """``mask[turn]``."""
        if _is_method(node) and node.func.attr == "squeeze" and _given(node) == ["0"]:
            node = node.func.value
        return isinstance(node, ast.Subscript) and _text(node.value) == self.mask and _text(node.slice) in self.turns

    def starts_from(self, guard: str, mask: bool) -> bool:
        """Take what is empty when ``guard`` is; False if it is not known to be of rows."""
        if mask:
            self.masks = {guard} & self._masks
            self.numbers = {name for source, names in self._found if source == guard and self.masks for name in names}
            return bool(self.masks)
        guard = self._rows.get(guard, guard)
        for source, names in self._found:
            if guard in names:
                self.numbers |= set(names)
                self.masks |= {source} & self._masks if source is not None else set()
        return guard in self.numbers


def _searched(value: ast.expr) -> ast.expr | None:
    """The mask whose rows ``torch.where(mask)``, ``mask.nonzero(as_tuple=True)`` and the like give numbers of."""
    if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant):
        value = value.value
        if "as_tuple=True" not in _text(value) and not _text(value).startswith("torch.where("):
            return None
    elif _is_method(value) and [value.func.attr, *_given(value)] in (["squeeze", "-1"], ["flatten"], ["view", "-1"]):
        value = value.func.value
        if not _is_method(value) or value.func.attr != "nonzero":
            return None
    elif not _is_method(value) or (value.func.attr == "nonzero" and "as_tuple=True" not in _text(value)):
        return None
    if not _is_method(value) or value.func.attr not in ("where", "nonzero"):
        return None
    given = [argument for argument in _given(value) if not argument.startswith("as_tuple=")]
    if _text(value.func.value) == "torch":
        return value.args[0] if len(given) == 1 else None
    return value.func.value if value.func.attr == "nonzero" and not given else None


class _Effects:
    """Checks that a turn leaves nothing behind but what it writes to its own rows, and does not mind to have none."""

    def __init__(self, outside: set[str], rows: _Rows, body: list[ast.stmt], turn: set[str]) -> None:
        self.outside, self.rows, self.turn = outside, rows, turn
        self.later = {name for statement in body for n in ast.walk(statement) for name in _assigned(n)}
        self.assigned: set[str] = set()
        # What a turn has made itself, and is no view of anything else.
        self.own: set[str] = set()

    def check(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """The statements without guards."""
        kept: list[ast.stmt] = []
        for node in body:
            guard = _guard_of(node)
            if guard is not None:
                if guard.name not in (self.rows.masks if guard.mask else self.rows.numbers):
                    raise _Left(f"{guard.name} may be empty where the turn has rows")
                kept += self.check(guard.body)
                continue
            self._statement(node)
            kept.append(node)
        return kept

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.If):
            loaded = {n.id for n in ast.walk(node.test) if _is_load(n)}
            if loaded & (self.later - self.turn - self.rows.turns):
                raise _Left(f"`if {_text(node.test)}` depends on a turn's rows")
            before, after = self.own, []
            for branch in (node.body, node.orelse):
                self.own = before
                for inner in branch:
                    self._statement(inner)
                after.append(self.own)
            self.own = after[0] & after[1]
        elif isinstance(node, ast.With):
            for inner in node.body:
                self._statement(inner)
        elif isinstance(node, (ast.Continue, ast.Pass)) or _is_comment(node) or self._writes_rows(node):
            return
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id in self.own:
            self._value(node.value)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            self._assignment(node)
        else:
            raise _Left(f"{_text(node)} may do something in a turn without rows")

    def _assignment(self, node: ast.Assign) -> None:
        self._value(node.value)
        carried = {n.id for n in ast.walk(node.value) if _is_load(n)} & (self.later - self.assigned)
        names = set(_assigned(node))
        if carried or not names or names & self.outside:
            raise _Left(f"{_text(node)} reaches beyond a turn")
        self.assigned |= names
        self.own = (self.own | names) if isinstance(node.value, ast.BinOp) else self.own - names
        self.rows.learn(node)

    def _writes_rows(self, node: ast.stmt) -> bool:
        """``out.index_add_(0, rows, y)``, ``out = out.index_add(0, rows, y)``, ``out[rows] += y``, ``= y``."""
        if isinstance(node, ast.Expr) and self._adds_rows(node.value, "index_add_"):
            return True
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Name) and self._adds_rows(node.value, "index_add"):
                assert _is_method(node.value)
                return _text(node.value.func.value) == target.id
        elif isinstance(node, ast.AugAssign):
            target = node.target
        else:
            return False
        if not isinstance(target, ast.Subscript) or not isinstance(target.value, ast.Name):
            return False
        if not self.rows.has(target.slice):
            return False
        self._value(node.value)
        return True

    def _adds_rows(self, node: ast.expr, method: str) -> bool:
        if not (_is_method(node) and node.func.attr == method and isinstance(node.func.value, ast.Name)):
            return False
        if node.func.value.id in self.later and method == "index_add_" and node.func.value.id not in self.outside:
            return False
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        if len(given) < 3 or _text(given[0]) != "0" or not self.rows.has(given[1]):
            return False
        self._value(given[2])
        return True

    def _value(self, value: ast.expr) -> None:
        """Raise for what changes something, or minds if there are no rows."""
        for node in ast.walk(value):
            if isinstance(node, (ast.NamedExpr, ast.Lambda, ast.Await, ast.Yield, ast.YieldFrom)):
                raise _Left(f"{_text(node)} may do something in a turn without rows")
            base = node.value if isinstance(node, ast.Subscript) else None
            picked = isinstance(node, ast.Subscript) and isinstance(node.slice, (ast.Constant, ast.UnaryOp))
            if picked and isinstance(base, ast.Name) and base.id in self.later:
                raise _Left(f"{_text(node)} is not there in a turn without rows")
            if not _is_method(node):
                continue
            name, given = node.func.attr, _given(node)
            if (name.endswith("_") and not name.endswith("__")) or name in _CHANGES:
                raise _Left(f"{_text(node)} may do something in a turn without rows")
            if name in _REDUCES and not {"-1", "dim=-1"} & set(given[:2]):
                raise _Left(f"{_text(node)} is not defined without rows")
            if name in ("reshape", "view") and "-1" in given[1:]:
                raise _Left(f"{_text(node)} is not defined without rows")


_CHANGES = {"append", "extend", "insert", "update", "setdefault", "pop", "remove", "clear", "add_module"}
_REDUCES = {
    "mean", "max", "min", "amax", "amin", "aminmax", "var", "std", "median", "argmax", "argmin", "quantile", "mode",
    "norm", "kthvalue", "item", "tolist",
}  # fmt: skip


@dataclass(frozen=True)
class _Guard:
    """What a statement asks of rows: which name, whether it is a mask; and what is done if there are any."""

    name: str
    mask: bool
    body: list[ast.stmt]


def _guard_of(node: ast.stmt) -> _Guard | None:
    """``if rows.numel() == 0: continue`` or ``if mask.any(): ...``; None for anything else."""
    if not isinstance(node, ast.If) or node.orelse:
        return None
    text = _text(node.test)
    leaves = len(node.body) == 1 and isinstance(node.body[0], ast.Continue)
    for name in sorted({n.id for n in ast.walk(node.test) if _is_load(n)}):
        counts = {f"{name}.numel()", f"{name}.nelement()", f"{name}.shape[0]", f"{name}.size(0)", f"len({name})"}
        masks = {
            f"{name}.any()",
            f"torch.any({name})",
            f"{name}.sum()",
            f"{name}.any().item()",
            f"{name}.sum().item()",
        }
        for count in sorted(counts | masks):
            if text in (f"{count} == 0", f"not {count}", f"{count} < 1") and leaves:
                return _Guard(name, count in masks, [])
            if text in (f"{count} > 0", f"{count} != 0", count, f"{count} >= 1") and not leaves:
                return _Guard(name, count in masks, node.body)
    return None


class _Counts(ast.NodeTransformer):
    """Gives ``torch.bincount(ids, minlength=E)`` its E elements."""

    def __init__(self, lines: list[int]) -> None:
        self.lines = lines

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        # bincount(...)[:E] knows ids beyond E, of tokens that were dropped.
        return node if isinstance(node.slice, ast.Slice) else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not _is_method(node) or node.func.attr != "bincount":
            return node
        given = [*node.args] if _text(node.func.value) == "torch" else [node.func.value, *node.args]
        length = [keyword.value for keyword in node.keywords if keyword.arg == "minlength"]
        if len(given) != 1 or len(length) != 1 or len(node.keywords) != 1:
            return node
        self.lines.append(node.lineno)
        count = _expression(
            "(lambda ids, size: ids.new_zeros(size).index_add(0, ids, ids.new_ones(ids.shape)))(0, 0)"
        )
        assert isinstance(count, ast.Call)
        # In int64, as bincount counts.
        number = ast.Call(func=ast.Attribute(value=given[0], attr="long", ctx=ast.Load()), args=[], keywords=[])
        count.args = [number, length[0]]
        return ast.copy_location(count, node)


# --- syntax ---


def _text(node: ast.AST) -> str:
    return ast.unparse(node)


def _is_comment(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _given(node: ast.Call) -> list[str]:
    """The arguments of a call, as text."""
    return [_text(one) for one in node.args] + [f"{one.arg}={_text(one.value)}" for one in node.keywords]


def _is_load(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


class _Method(ast.Call):
    func: ast.Attribute


def _is_method(node: ast.AST) -> TypeGuard[_Method]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)


def _assigned(node: ast.AST) -> list[str]:
    """The names that a statement gives values to; none if it writes anything else too."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
        targets = [node.target]
    flat = [one for t in targets for one in (t.elts if isinstance(t, ast.Tuple) else [t])]
    return [t.id for t in flat if isinstance(t, ast.Name)] if all(isinstance(t, ast.Name) for t in flat) else []
