"""Assertions about tensors with messages that are put together when they are needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hecate
from tests.hecate_compile.graph.asserting_models import WIDTH, Asserting, ExpertChoice
from tests.support.extent import OLD_TORCH
from tests.support.models import batch
from tests.support.parity import compare, rank_and_size, run_step
from tests.support.ranks import run_ranks

IN_ONE_PROCESS = hecate.Config(backend="aot_eager", policy="replicate")


def two_steps() -> dict[str, Any]:
    torch.manual_seed(0)
    model, reference = ExpertChoice(), ExpertChoice()
    reference.load_state_dict(model.state_dict())
    hecate.compile(model, hecate.Config(backend="aot_eager"))
    _, size = rank_and_size()
    errors = []
    for number in range(2):
        ids = batch(number)
        model.zero_grad(), reference.zero_grad()
        loss = run_step(model, ids)
        # Every rank's tokens are a batch of their own.
        losses = [reference(input_ids=part, labels=part)["loss"] / size for part in ids.chunk(size)]
        torch.stack(losses).sum().backward()
        difference = compare(model, loss, reference, torch.stack(losses).sum().detach())
        errors += [difference.loss, difference.gradient]
    explanation = hecate.explain(model)
    return {"errors": errors, "graphs": len(explanation.graphs), "layers": len(hecate.stats(model).layers)}


@pytest.mark.distributed
def test_experts_behind_such_an_assertion_exchange_rows() -> None:
    for result in run_ranks(f"{__name__}:two_steps", 2):
        assert max(result["errors"]) < 1e-5, result
        assert result["graphs"] == result["layers"] == 1, result


_LEFT_TO_PYTHON = "torch before 2.12 leaves a function in which a graph broke to Python from then on"


def _compiled(how: str) -> tuple[nn.Module, nn.Module]:
    plain, model = Asserting(how), Asserting(how)
    model.load_state_dict(plain.state_dict())
    return hecate.compile(model, IN_ONE_PROCESS), plain


@pytest.mark.parametrize(
    ("how", "graphs"),
    [("values", 1), ("both", 1), ("size", 1), ("list", 1), ("negated", 2), ("branch", 2), ("other error", 2)],
)
def test_graphs_are_whole(how: str, graphs: int) -> None:
    model, plain = _compiled(how)
    x = torch.randn(3, WIDTH)
    torch.testing.assert_close(model(x), plain(x))
    assert len(hecate.explain(model).graphs) == graphs


@pytest.mark.skipif(OLD_TORCH, reason=_LEFT_TO_PYTHON)
def test_nobody_elses_code_is_traced_so() -> None:
    model, plain = _compiled("values")
    x = torch.randn(3, WIDTH)
    model(x)
    broken: list[torch.fx.GraphModule] = []
    torch.compile(plain, backend=lambda gm, inputs: broken.append(gm) or gm)(x)
    assert len(broken) == 2


def test_who_catches_an_assertion_goes_on() -> None:
    model, plain = _compiled("caught")
    for x in (torch.randn(3, WIDTH), torch.full((3, WIDTH), torch.inf)):
        torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize(
    ("how", "rows", "error", "says"),
    [
        ("values", 3, RuntimeError, r"the assertion in forward failed, line \d+ of tests.*\.asserting_models"),
        ("size", 1, AssertionError, "x has 1 rows"),
        ("both", 3, RuntimeError, "the assertion in forward failed"),
        ("negated", 3, AssertionError, "x is not finite"),
        ("branch", 3, AssertionError, "x is not finite"),
        ("other error", 3, ValueError, "x is not finite"),
    ],
)
def test_what_fails_says_so(how: str, rows: int, error: type[Exception], says: str) -> None:
    if OLD_TORCH and how in ("values", "both"):
        pytest.skip(_LEFT_TO_PYTHON)
    model, _ = _compiled(how)
    with pytest.raises(error, match=says):
        model(torch.full((rows, WIDTH), float("nan")))
