"""Small questions about FX nodes, in graphs of either dialect.

Nodes compare by their place in the graph: ``a < b`` if ``a`` comes first. That stays true while nodes are inserted.
"""

from __future__ import annotations

import importlib
import logging
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from hecate.passes.base import Refused, Skip
from hecate.private import FakeTensor, FakeTensorMode, OpOverload, OpOverloadPacket, schema_of

log = logging.getLogger("hecate")

# Key in the meta of a copy of a layer's body: the layer's number.
BODY_OF = "hecate_layer"


def arg(node: Any, index: int) -> Any:
    """Return a positional argument of a node. Raises Refused if the call passes it by name."""
    if index >= len(node.args):
        raise Refused(f"operands by name in {describe(node)}", node)
    return node.args[index]


def operands(node: Node) -> list[Any]:
    """Return all arguments, keyword ones after the positional ones."""
    return [*node.args, *node.kwargs.values()]


def option(node: Node, position: int, name: str, default: Any = None) -> Any:
    """Return an argument that a call may give by position, by name or not at all."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def arguments_of(node: Node) -> dict[str, Any]:
    """Return the arguments of a node that calls an operator by name, in the operator's order."""
    schema = schema_of(node.target)
    assert schema is not None, f"{node.name} calls no operator"
    names = [argument.name for argument in schema.arguments]
    return {name: node.args[i] if i < len(node.args) else node.kwargs[name] for i, name in enumerate(names)}


def calls(node: Any, *targets: Any) -> bool:
    """Tell whether ``node`` calls one of ``targets``; an operator packet stands for its default overload too."""
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    for target in targets:
        if node.target is target:
            return True
        if isinstance(target, OpOverloadPacket) and node.target is target.default:
            return True
    return False


def is_getitem(node: Any) -> bool:
    return calls(node, operator.getitem)


# Namespaces of torch's operators for collectives in graphs, as tensor parallelism has them.
_FOREIGN = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor")


def is_foreign_collective(node: Node) -> bool:
    """Tell whether a node is a collective of the model's own, or the wait for one."""
    return isinstance(node.target, OpOverload) and node.target.namespace in _FOREIGN


def closure_forward(starts: Iterable[Node], *, until: Node | None = None) -> set[Node]:
    """Return nodes up to ``until`` that depend on ``starts``, without ``starts`` (unless on each other)."""
    return reached(starts, lambda node: [n for n in node.users if until is None or n <= until])


def closure_backward(ends: Iterable[Node], *, since: Node | None = None) -> set[Node]:
    """Return nodes from ``since`` on that ``ends`` depend on, without ``ends`` (unless on each other)."""
    return reached(ends, lambda node: [n for n in node.all_input_nodes if since is None or n >= since])


def reached(starts: Iterable[Node], neighbours: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Return nodes that are neighbours of ``starts``, neighbours of these, and so on."""
    seen: set[Node] = set()
    stack = list(starts)
    while stack:
        new = [node for node in neighbours(stack.pop()) if node not in seen]
        seen.update(new)
        stack += new
    return seen


def between(starts: Iterable[Node], ends: Iterable[Node]) -> set[Node]:
    """Return all nodes on a path from one of ``starts`` to one of ``ends``, and these only if they lie on one.

    It visits nothing before the first start or after the last end, so its cost is that of the part, not of the graph.
    """
    starts, ends = list(starts), list(ends)
    if not starts or not ends:
        return set()
    return closure_forward(starts, until=max(ends)) & closure_backward(ends, since=min(starts))


def computed_from(starts: Iterable[Node]) -> set[Node]:
    """Return ``starts``, and all nodes that are computed from them alone."""
    found = set(starts)
    waiting = list(found)
    while waiting:
        for user in waiting.pop().users:
            if user not in found and all(source in found for source in user.all_input_nodes):
                found.add(user)
                waiting.append(user)
    return found


def exits_of(part: Collection[Node]) -> list[Node]:
    """Return the nodes of ``part`` that others use, in graph order."""
    return sorted(node for node in part if any(user not in part for user in node.users))


@dataclass(frozen=True, kw_only=True)
class CodeLine:
    """A line of the model's code: its file, and the line itself without indentation."""

    file: str
    number: int
    function: str
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"

    @property
    def short(self) -> str:
        """Name of the file without its folders, and the line."""
        return f"{Path(self.file).name}:{self.number}"


_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<number>\d+)(?:, in (?P<function>\S+))?\s*$')
# Folders whose code is no model's: code that reads parameters, wraps loops or runs operators. The three may be in
# three places.
_OUR_FOLDERS = [
    folder
    for package in ("hecate", "hecate.passes", "hecate.runtime")
    for folder in importlib.import_module(package).__path__
]
_NOT_A_MODEL = tuple(f"{folder}/" for folder in (Path(torch.__file__).parent, *_OUR_FOLDERS))


def line_of(node: Node) -> CodeLine | None:
    """Return the innermost line of a node's code that is neither torch's nor Hecate's, or None."""
    frames: list[CodeLine] = []
    for line in (node.meta.get("stack_trace") or "").splitlines():
        if (frame := _FRAME.match(line)) is not None:
            number, function = int(frame["number"]), frame["function"] or ""
            frames.append(CodeLine(file=frame["file"], number=number, function=function, code=""))
        elif frames and not frames[-1].code and line.strip(" ^~"):
            frames[-1] = replace(frames[-1], code=line.strip())
    known = [frame for frame in frames if not frame.file.startswith(_NOT_A_MODEL)] or frames
    return known[-1] if known else None


def describe(node: Node) -> str:
    """Return a node as a user recognizes it: its call, and the line of model code it came from."""
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    line = line_of(node)
    return f"{target} in '{line.code}' ({line.short})" if line is not None else f"{target} (%{node.name})"


def skip_of(
    where: str, refused: Refused, *near: Node, reason: str = "", fallback: bool = True, fix: str = ""
) -> Skip:
    """Return a skip with the line of model code that a pass did not understand, or of one ``near`` it."""
    nodes = [refused.node, *near] if refused.node is not None else near
    line = next((found for node in nodes if (found := line_of(node)) is not None), None)
    return Skip(
        where=where, reason=reason or str(refused), fallback=fallback, line=str(line or ""), fix=fix or refused.fix
    )


def note(node: Node, key: str, value: int | str) -> None:
    """Write a note on a node, handed on by autograd to the nodes that it makes of it; a copy has notes of its own."""
    node.meta["custom"] = {**node.meta.get("custom", {}), key: value}


def copy_place(node: Node, new: Node) -> None:
    """Let a new node be shown where the model's line is that ``node`` came from."""
    new.meta |= {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}


def is_view(node: Node) -> bool:
    """Tell whether an ATen node returns a view of its input, at no cost."""
    schema = schema_of(node.target)
    return schema is not None and any(
        result.alias_info is not None and not result.alias_info.is_write for result in schema.returns
    )


# Entries of a node's meta that are of the node alone; a node that takes its place has its own.
_OWN = ("val", "example_value", "eager_input_vals")


def fake_mode_of(graph: Graph) -> tuple[str, FakeTensorMode] | None:
    """Return the key of this graph's fake values, "example_value" or "val", and the mode that made them."""
    for node in graph.nodes:
        for key in ("example_value", "val"):
            if isinstance(value := node.meta.get(key), FakeTensor):
                return key, value.fake_mode
    return None


def take_place(old: Node, new: Node, *, unless: Callable[[Node], bool] = lambda user: False) -> None:
    """Use ``new`` in place of ``old``, except by ``unless``, with its value, whose memory later nodes share."""
    new.meta |= {key: old.meta[key] for key in ("val", "example_value", "unbacked_bindings") if key in old.meta}
    old.replace_all_uses_with(new, delete_user_cb=lambda user: not unless(user))


def erase_unused(nodes: Iterable[Node]) -> None:
    """Erase those of ``nodes`` that nothing uses, users before what they use."""
    for node in sorted(set(nodes), reverse=True):
        if not node.users:
            node.graph.erase_node(node)


@contextmanager
def as_if_untraced(mode: FakeTensorMode) -> Iterator[None]:
    """Compute fake values inside the block without a trace: no guard comes of it, nor a size to account for."""
    sizes, cached = mode.shape_env, mode.cache_enabled
    if sizes is None:
        yield
        return
    # A result from the cache would not be checked again when it is traced.
    mode.cache_enabled = False
    try:
        with sizes.suppress_guards(), sizes.ignore_fresh_unbacked_symbols():
            yield
    finally:
        mode.cache_enabled = cached
        # Torch remembers a check that was suppressed as one that was made, and would not make it again.
        forget: Any = type(sizes).guard_or_defer_runtime_assert
        forget.cache_clear()


class Builder:
    """Writes nodes one after another into a graph, behind ``after`` or before ``before``.

    A node gets the fake value that it returns, as the graph's own nodes have it. It has none if an argument has none,
    or if it depends on a size that only data decide.

    Args:
        layer: the MoE layer that they are for, which is noted on them.
        like: a node that they stand for, whose notes they get.

    Attributes:
        last: the node behind which the next one will stand.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        after: Node | None = None,
        before: Node | None = None,
        layer: int | None = None,
        like: Node | None = None,
    ) -> None:
        self.graph, self.layer, self.like = graph, layer, like
        place = after if after is not None else before.prev if before is not None else None
        assert place is not None, "a place to write to"
        self.last = place
        self._fake = fake_mode_of(graph)

    def _written(self, node: Node) -> Node:
        if self.like is not None:
            node.meta |= {key: value for key, value in self.like.meta.items() if key not in _OWN}
        if self.layer is not None:
            note(node, "hecate_in", self.layer)
        self._compute_value(node)
        self.last = node
        return node

    def _compute_value(self, node: Node) -> None:
        if self._fake is None:
            return
        key, mode = self._fake
        node.meta.pop(key, None)
        if not all(key in source.meta for source in node.all_input_nodes):
            return
        args, kwargs = map_arg((node.args, node.kwargs), lambda source: source.meta[key])
        target: Any = node.target
        with as_if_untraced(mode), torch.no_grad(), mode:
            try:
                if node.op == "call_method":
                    node.meta[key] = getattr(args[0], target)(*args[1:], **kwargs)
                else:
                    node.meta[key] = target(*args, **kwargs)
            except Exception as error:
                log.debug("hecate: nothing is known of what %s returns: %s", describe(node), error)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Write a call of a function or operator."""
        with self.graph.inserting_after(self.last):
            return self._written(self.graph.call_function(target, args, kwargs))

    def method(self, name: str, *args: Any) -> Node:
        """Write a call of a method of the first argument."""
        with self.graph.inserting_after(self.last):
            return self._written(self.graph.call_method(name, args))

    def copy(self, node: Node, new: Mapping[Node, Node]) -> Node:
        """Write a copy of ``node`` with the arguments that ``new`` has for its own."""
        with self.graph.inserting_after(self.last):
            return self._written(self.graph.node_copy(node, lambda n: new.get(n, n)))

    def parts(self, whole: Node, count: int) -> list[Node]:
        """Write the ``count`` results of ``whole``."""
        return [self.call(operator.getitem, whole, index) for index in range(count)]

    def length(self, tensor: Node) -> Node:
        """Write the size of dimension 0."""
        return self.call(torch.ops.aten.sym_size.int, tensor, 0)


def bodies_of(gm: GraphModule) -> Iterator[GraphModule]:
    """Yield the graph and every graph inside it, such as the body of a checkpointed layer."""
    for module in gm.modules():
        if isinstance(module, GraphModule):
            yield module
