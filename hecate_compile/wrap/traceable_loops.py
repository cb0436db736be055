"""Loops over experts as a graph can have them: a turn for every expert, and counts of a known length.

Model code likes to leave out experts that no token has chosen. How many turns are left then depends on the routing:

    hit = mask.sum(dim=(-1, -2)).greater(0).nonzero()          for expert in range(num_experts):
    for expert in hit:                                             choice, token = torch.where(mask[expert])
        choice, token = torch.where(mask[expert[0]])               if token.numel() == 0:
        out.index_add_(0, token, ...)                                  continue
                                                                   out.index_add_(0, token, ...)

The left becomes a loop over ``range(mask.shape[0])``; from the right ``continue`` goes. That is done only where a
turn without rows changes nothing: all that a turn leaves behind is written to rows that it has found by its expert
(``out.index_add_(0, token, y)``, ``out[token] += y``, ``out[token] = y``), and these are none. A mask is taken to
have no negative entries.

``torch.bincount(ids, minlength=E)`` has more than E elements if an id is larger, so no graph knows how many. It
becomes ``index_add``, which counts the same and raises for such an id.
"""

from __future__ import annotations

import ast
import copy
import inspect
import logging
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from types import CellType, FunctionType
from typing import Any, TypeGuard

from torch import nn

from hecate.wrap.find_experts import ExpertsModule
from hecate.wrap.swapped_class import swap_class

log = logging.getLogger("hecate")


class _Left(Exception):
    """The loop stays as it is; the message says why."""


def make_loops_traceable(model: nn.Module, found: Sequence[ExpertsModule]) -> tuple[str, ...]:
    """Change such code in the methods of experts modules and of the modules around them.

    Returns:
        Where they are, as ``file:line``.
    """
    names = [experts.name for experts in found]
    done: dict[FunctionType, tuple[FunctionType, list[int]] | None] = {}
    places: dict[str, None] = {}
    for name, module in list(model.named_modules()):
        if not any(inner == name or not name or inner.startswith(f"{name}.") for inner in names):
            continue
        changed = {}
        for key, function in _methods(module):
            if function not in done:
                done[function] = _rewritten(function)
            rewritten = done[function]
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


def _rewritten(function: FunctionType) -> tuple[FunctionType, list[int]] | None:
    """The function with its loops changed, and their lines; None if there are none."""
    inner = vars(function).get("__wrapped__")
    if isinstance(inner, FunctionType):
        found = _rewritten(inner)
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
    loops = _Loops(definition)
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

    def __init__(self, definition: ast.FunctionDef) -> None:
        self.definition = definition
        self.lines: list[int] = []

    def visit_For(self, node: ast.For) -> ast.AST:
        try:
            changed = self._over_hits(node) or self._with_guards(node)
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
        hits = self._hits(node.iter)
        if hits is None:
            return None
        mask, one_dimensional = hits
        turn = node.target.id
        index = _Index(turn, one_dimensional)
        body = _without_guards(
            [statement for old in node.body for statement in index.statement(copy.deepcopy(old))], []
        )
        changed = ast.For(
            target=node.target, iter=_expression(f"range({mask}.shape[0])"), body=body, orelse=[],
            lineno=node.lineno, col_offset=node.col_offset,
        )  # fmt: skip
        self._check(node, body, _Empty(mask, turn))
        return ast.copy_location(changed, node)

    def _hits(self, iterated: ast.expr) -> tuple[str, bool] | None:
        """The mask whose experts with tokens are iterated over, and whether they are numbers, not rows of one."""
        expression, since = iterated, 0
        if isinstance(iterated, ast.Name):
            made = [n for n in ast.walk(self.definition) if _assigned(n) == [iterated.id]]
            if len(made) != 1 or not isinstance(made[0], ast.Assign):
                return None
            expression, since = made[0].value, made[0].lineno
        methods = {n.func.attr for n in ast.walk(expression) if _is_method(n)}
        names = {n.id for n in ast.walk(expression) if isinstance(n, ast.Name)} - {"torch"}
        if "nonzero" not in methods or not methods & {"sum", "any"} or methods - _HIT_METHODS or len(names) != 1:
            return None
        if not all(_compares_with_zero(n) for n in ast.walk(expression)):
            return None
        (mask,) = names
        if any(mask in _assigned(n) and getattr(n, "lineno", 0) > since for n in ast.walk(self.definition) if since):
            raise _Left(f"{mask} changes between the hits and the loop")
        return mask, bool(methods & {"squeeze", "flatten", "view", "reshape"}) or "as_tuple=True" in _text(expression)

    def _with_guards(self, node: ast.For) -> ast.For | None:
        """A loop that leaves out turns without rows, as one that does not."""
        guards: list[str] = []
        body = _without_guards([copy.deepcopy(statement) for statement in node.body], guards)
        if not guards:
            return None
        for guard in guards:
            self._check(node, body, _Empty(None, None, _same_rows(guard, body)))
        return ast.copy_location(ast.For(target=node.target, iter=node.iter, body=body, orelse=node.orelse), node)

    def _check(self, node: ast.For, body: list[ast.stmt], empty: _Empty) -> None:
        """Raise unless a turn in which ``empty`` is empty changes nothing."""
        if isinstance(node.target, ast.Name):
            body = [ast.Assign(targets=[node.target], value=ast.Constant(0)), *body]
        inside = {id(n) for statement in node.body for n in ast.walk(statement)}
        outside = {n.id for n in ast.walk(self.definition) if _is_load(n) and id(n) not in inside}
        _Effects(outside, empty).check(body)


class _Counts(ast.NodeTransformer):
    """Gives ``torch.bincount(ids, minlength=E)`` its E elements."""

    def __init__(self, lines: list[int]) -> None:
        self.lines = lines

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
            "(lambda ids, size: ids.new_zeros(size).index_add(0, ids.long(), ids.new_ones(ids.shape)).long())(0, 0)"
        )
        assert isinstance(count, ast.Call)
        count.args = [given[0], length[0]]
        return ast.copy_location(count, node)


# What model code does to a mask on its way to the experts that were hit.
_HIT_METHODS = {
    "nonzero", "sum", "any", "greater", "gt", "ne", "bool", "squeeze", "flatten", "view", "reshape", "tolist", "to",
    "long", "int", "cpu", "detach",
}  # fmt: skip


class _Index(ast.NodeTransformer):
    """Uses of the loop's variable, a tensor of one expert's number, as uses of the number itself."""

    def __init__(self, name: str, one_dimensional: bool) -> None:
        self.name, self.is_number = name, one_dimensional
        self._known: set[int] = set()

    def statement(self, node: ast.stmt) -> list[ast.stmt]:
        """The statement, rewritten; none for ``expert = expert[0]``."""
        changed = self.visit(node)
        for name in ast.walk(changed):
            if self._is_it(name) and not self.is_number and id(name) not in self._known:
                raise _Left(f"{self.name} is used in {_text(changed)}")
        if isinstance(changed, ast.Assign) and _assigned(changed) == [self.name]:
            if not self._is_it(changed.value):
                raise _Left(f"{self.name} becomes {_text(changed.value)}")
            self.is_number = True
            return []
        return [changed]

    def _is_it(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == self.name and isinstance(node.ctx, ast.Load)

    def _number(self, at: ast.AST) -> ast.Name:
        name = ast.copy_location(ast.Name(self.name, ast.Load()), at)
        self._known.add(id(name))
        return name

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if self._is_it(node.value) and _text(node.slice) == "0" and not self.is_number:
            return self._number(node)
        if self._is_it(node.slice) and _text(node.value).startswith("self.experts"):
            # A list takes either.
            node.slice = self._number(node.slice)
        self.generic_visit(node)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if self._is_it(node.left):
            node.left = self._number(node.left)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        function = node.func
        if isinstance(function, ast.Attribute):
            owner = function.value
            if function.attr in ("item", "squeeze", "long", "int", "cpu", "tolist") and not node.args:
                owner = self.visit(owner)
                if self._is_it(owner):
                    return self._number(node)
                function.value = owner
            if (
                function.attr == "squeeze" and _text(node)[-3:] == "(0)" and not self.is_number
                and isinstance(owner, ast.Subscript) and self._is_it(owner.slice)
            ):  # fmt: skip
                # mask[[3]] has a first dimension more than mask[3].
                owner.slice = self._number(owner.slice)
                return owner
        if _text(function) == "int" and len(node.args) == 1:
            argument = self.visit(node.args[0])
            if self._is_it(argument):
                return self._number(node)
        self.generic_visit(node)
        return node


class _Empty:
    """Which expressions have no rows in a turn without rows."""

    def __init__(self, mask: str | None, turn: str | None, names: Iterable[str] = ()) -> None:
        self.mask = mask
        self.turns = {turn}
        self.names = set(names)

    def learn(self, statement: ast.Assign) -> None:
        if self.has(statement.value):
            self.names |= set(_assigned(statement))
        if isinstance(statement.value, ast.Name) and statement.value.id in self.turns:
            self.turns |= set(_assigned(statement))

    def has(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Name):
            return node.id in self.names
        if isinstance(node, ast.Subscript):
            if self.mask is not None and _text(node.value) == self.mask and _text(node.slice) in self.turns:
                return True
            indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            return any(self.has(index) for index in indices) or self.has(node.value)
        if _is_method(node):
            if node.func.attr in ("where", "nonzero") and _text(node.func.value) == "torch" and len(node.args) == 1:
                return self.has(node.args[0])
            return node.func.attr in _KEEP_EMPTY and self.has(node.func.value)
        return False


_KEEP_EMPTY = {
    "nonzero", "squeeze", "bool", "any", "flatten", "view", "reshape", "to", "long", "contiguous", "detach"
}  # fmt: skip


def _same_rows(guard: str, body: list[ast.stmt]) -> set[str]:
    """Names that have no rows when ``guard`` has none: what was found with it, and by what it was found."""
    same = {guard}
    for statement in reversed(body):
        if not isinstance(statement, ast.Assign) or not same & set(_assigned(statement)):
            continue
        same |= set(_assigned(statement))
        value = statement.value
        while isinstance(value, ast.Subscript) or _is_method(value):
            if isinstance(value, ast.Subscript):
                indices = value.slice.elts if isinstance(value.slice, ast.Tuple) else [value.slice]
                same |= {index.id for index in indices if isinstance(index, ast.Name)}
                value = value.value if all(isinstance(index, ast.Constant) for index in indices) else value.slice
            elif value.func.attr in ("where", "nonzero"):
                value = value.args[0] if _text(value.func.value) == "torch" else value.func.value
                same |= {value.id} if isinstance(value, ast.Name) else set()
            else:
                break
    return same


class _Effects:
    """Checks that a turn leaves nothing behind but what it writes to its own rows."""

    def __init__(self, outside: set[str], empty: _Empty) -> None:
        self.outside, self.empty = outside, empty
        self.assigned: set[str] = set()
        self.own: set[str] = set()

    def check(self, body: list[ast.stmt]) -> None:
        later = {name for statement in body for n in ast.walk(statement) for name in _assigned(n)}
        for statement in body:
            self._statement(statement, later)

    def _statement(self, node: ast.stmt, later: set[str]) -> None:
        if isinstance(node, (ast.If, ast.With)):
            for inner in (*node.body, *(node.orelse if isinstance(node, ast.If) else ())):
                self._statement(inner, later)
            return
        if isinstance(node, (ast.Continue, ast.Pass, ast.Assert)):
            return
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        if self._writes_rows(node):
            return
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id in self.own:
            return
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            raise _Left(f"{_text(node)} may do something in a turn without rows")
        carried = {n.id for n in ast.walk(node.value) if _is_load(n)} & (later - self.assigned)
        names = set(_assigned(node))
        if carried or not names or names & self.outside:
            raise _Left(f"{_text(node)} reaches beyond a turn")
        self.assigned |= names
        # Another name for something from outside may be changed in place later.
        if not isinstance(node.value, (ast.Name, ast.Attribute)):
            self.own |= names
        if isinstance(node, ast.Assign):
            self.empty.learn(node)

    def _writes_rows(self, node: ast.stmt) -> bool:
        """``out.index_add_(0, rows, y)``, ``out = out.index_add(0, rows, y)``, ``out[rows] += y``, ``= y``."""
        if isinstance(node, ast.Expr):
            return self._adds_rows(node.value, "index_add_")
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Name) and self._adds_rows(node.value, "index_add"):
                assert _is_method(node.value)
                return _text(node.value.func.value) == target.id
            return isinstance(target, ast.Subscript) and self.empty.has(_loaded(target))
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Subscript):
            return self.empty.has(_loaded(node.target))
        return False

    def _adds_rows(self, node: ast.expr, method: str) -> bool:
        if not (_is_method(node) and node.func.attr == method and isinstance(node.func.value, ast.Name)):
            return False
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        return len(given) >= 3 and _text(given[0]) == "0" and self.empty.has(given[1])


def _without_guards(body: list[ast.stmt], guards: list[str]) -> list[ast.stmt]:
    """The statements without ``if rows.numel() == 0: continue``; adds the names that were asked to ``guards``."""
    kept: list[ast.stmt] = []
    for node in body:
        asked = _asks_for_rows(node.test) if isinstance(node, ast.If) and not node.orelse else None
        if asked is None:
            kept.append(node)
            continue
        assert isinstance(node, ast.If)
        name, when_empty = asked
        if when_empty and not (len(node.body) == 1 and isinstance(node.body[0], ast.Continue)):
            kept.append(node)
            continue
        guards.append(name)
        if not when_empty:
            kept.extend(_without_guards(node.body, guards))
    return kept


def _asks_for_rows(test: ast.expr) -> tuple[str, bool] | None:
    """Whether a test asks if a tensor has rows: its name, and whether the test is true if it has none."""
    text = _text(test)
    for name in {n.id for n in ast.walk(test) if isinstance(n, ast.Name)}:
        counts = (
            f"{name}.numel()", f"{name}.nelement()", f"{name}.shape[0]", f"{name}.size(0)", f"len({name})",
            f"{name}.sum()", f"{name}.sum().item()", f"{name}.any()", f"torch.any({name})",
        )  # fmt: skip
        for count in counts:
            if text in (f"{count} == 0", f"not {count}", f"{count} < 1", f"{count} <= 0"):
                return name, True
            if text in (f"{count} > 0", f"{count} != 0", count, f"{count} >= 1"):
                return name, False
    return None


# --- syntax ---


def _text(node: ast.AST) -> str:
    return ast.unparse(node)


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _loaded(node: ast.Subscript) -> ast.expr:
    """What is written to, as an expression."""
    return ast.Subscript(value=node.value, slice=node.slice, ctx=ast.Load())


def _compares_with_zero(node: ast.AST) -> bool:
    """False for a comparison with anything else, or other than "greater" and "not equal"."""
    if isinstance(node, ast.Compare):
        return isinstance(node.ops[0], (ast.Gt, ast.NotEq)) and _text(node.comparators[-1]) == "0"
    if _is_method(node) and node.func.attr in ("greater", "gt", "ne"):
        return _text(node.args[-1]) == "0"
    return True


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
