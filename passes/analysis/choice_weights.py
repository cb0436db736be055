"""Weights of the experts that a router has chosen, in Dynamo's graph: whether they follow another choice."""

from __future__ import annotations

import torch
from torch.fx import Node

from hecate.passes.analysis.choices import Choice, made_from
from hecate.passes.analysis.expert_numbers import changes_of
from hecate.passes.analysis.torch_values import shape_of, value_of
from hecate.passes.base import Refused
from hecate.passes.fx import arg, closure_forward, describe, is_getitem, operands, option, reached
from hecate.passes.match import is_cast, named


def refuse_kept_scores(choices: list[Choice], uses: list[Node]) -> None:
    """Raise Refused if weights of experts would be the scores of those that a router has chosen itself.

    They would if they are the largest scores by an operation of their own, with no mask and no number of an expert
    between; or if scores are masked in place.

    Args:
        uses: what is done with the experts.
    """
    for choice in choices:
        if _is_masked_in_place(choice):
            raise Refused(
                "its scores are masked in place before the choice, so that those of other experts are lost",
                choice.node,
            )
    own, sources = {choice.node for choice in choices}, set[Node]()
    for choice in choices:
        sources |= made_from(choice.scores) if choice.scores is not None else set()
    exempt = {largest for choice in choices for largest in largest_scores_of(choice)}
    beyond = closure_forward(uses)
    for node in choices[0].node.graph.nodes:
        if node in own or not named(node, "topk", "sort", "max", "amax"):
            continue
        scores = operands(node)[0]
        among = shape_of(scores)[-1:] == (choices[0].among,)
        if not among or not _is_floating(scores) or sources.isdisjoint(made_from(scores)):
            continue
        values = [node] if named(node, "amax") else [n for n in node.users if is_getitem(n) and arg(n, 1) == 0]
        for value in values:
            if value in exempt or _keeps_in_range(value, scores):
                continue
            # What becomes one number is part of a loss.
            lead_on = reached([value], lambda n: [user for user in n.users if _is_floating(user) and shape_of(user)])
            if not beyond.isdisjoint(lead_on):
                raise Refused(
                    "its weights are the largest scores by an operation of their own, and would stay those of its "
                    f"own choice: {describe(node)}",
                    node,
                )


def _is_floating(node: Node) -> bool:
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _keeps_in_range(largest: Node, scores: Node) -> bool:
    """Tell whether the largest of scores is subtracted from these, which keeps their exponentials in range."""
    same = reached([largest], lambda n: [user for user in n.users if named(user, "detach") or is_cast(user)])
    return any(named(user, "sub") and scores in user.args for one in (largest, *same) for user in one.users)


def _is_masked_in_place(choice: Choice) -> bool:
    """Tell whether something is written into scores whose values are used as weights."""
    if choice.scores is None or not choice.has_values:
        return False
    used = any(is_getitem(user) and arg(user, 1) == 0 and user.users for user in choice.node.users)
    return used and any(named(change, "masked_fill_") for change in changes_of(choice.scores))


def largest_scores_of(choice: Choice) -> list[Node]:
    """Return the nodes that are the largest of the scores of which an argmax has the place.

    What is subtracted from the scores themselves keeps their exponentials in range.
    """
    if not named(choice.node, "argmax") or choice.scores is None:
        return []
    found = []
    for user in choice.scores.users:
        last = len(shape_of(choice.scores)) - 1
        dim = option(user, 1, "dim") if named(user, "max", "amax") else None
        if type(dim) is int and dim % (last + 1) == last:
            values = [user] if named(user, "amax") else [n for n in user.users if is_getitem(n) and arg(n, 1) == 0]
            found += [value for value in values if not _keeps_in_range(value, choice.scores)]
    return found


def unmasked(scores: Node) -> Node:
    """Return scores from before a mask, as of a token's own groups, in which held experts need not be."""
    while named(scores, "masked_fill", "where"):
        # torch.where(mask, scores, value), and as a method scores.where(mask, value).
        inner = arg(scores, 1 if named(scores, "where") and scores.op == "call_function" else 0)
        if shape_of(inner) != shape_of(scores) or not _is_floating(inner):
            break
        scores = inner
    return scores
