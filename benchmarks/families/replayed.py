"""One family on this rank: record its routing, replay it, and replay one that was drawn."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import hecate
from benchmarks.families.case import mean_of, step_of, worst_error
from benchmarks.families.models import batch, build


class OverwrittenRouters(TorchFunctionMode):
    """Routers of a plain model choose given experts.

    Its ``topk``, ``max`` and ``argmax`` over scores of experts do, and lookups in tables of integers.

    ``given`` are numbers of experts and choices ``[batch, sequence, k]``, layer by layer. Each second choice is of
    ``weights`` alone, if there are any.
    """

    def __init__(self, given: list[tuple[int, Tensor]], *, weights: bool = False) -> None:
        super().__init__()
        self._weights, self._turn = weights, 0
        self._left = [(experts, ids.flatten(0, 1).long()) for experts, ids in given]
        self._leading = [(*ids.shape[:2],) for _, ids in given] + [(len(ids),) for _, ids in self._left]
        self._column = 0

    @property
    def left(self) -> int:
        """How many layers have not chosen."""
        return len(self._left)

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if name not in ("topk", "max", "argmax", "__getitem__") or not self._left:
            return out
        scores: Tensor = args[0] if args else (kwargs or {})["input"]
        experts, ids = self._left[0]
        if name == "__getitem__":
            looked_up = not scores.is_floating_point() and scores.ndim == 2 and isinstance(args[1], Tensor)
            if not looked_up or out.shape != ids.shape:
                return out
            self._left.pop(0)
            return ids.to(out.dtype)
        places = out if isinstance(out, Tensor) else out[1]
        count = places.shape[-1] if name == "topk" else 1
        # Others choose among the scores of groups, or look for the largest score.
        of_tokens = not (name == "max" and (kwargs or {}).get("keepdim"))
        of_tokens &= scores.shape[-1:] == (experts,) and scores.shape[:-1] in self._leading
        self._turn += of_tokens
        of_tokens &= not self._weights or self._turn % 2 == 1
        if not of_tokens or places.numel() != len(ids) * count or places.is_floating_point():
            return out
        chosen = ids[:, self._column : self._column + count].reshape(places.shape)
        self._column += count
        if self._column >= ids.shape[1]:
            self._left.pop(0)
            self._column = 0
        if isinstance(out, Tensor):
            return chosen
        kept = chosen.ndim == scores.ndim
        values = scores.gather(-1, chosen if kept else chosen.unsqueeze(-1))
        return type(out)((values if kept else values.squeeze(-1), chosen))


def run(name: str, backend: str = "aot_eager") -> dict[str, Any]:
    """Errors of a step that replays its own routing, and of one that replays a routing that was drawn.

    The first is compared with the recorded step, the second with data parallelism in one process whose routers are
    overwritten. Errors are those of :func:`benchmarks.families.case.run`.
    """
    warnings.simplefilter("ignore")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    reference, model = build(name), build(name)
    hecate.compile(model, hecate.Config(backend=backend))
    given = batch(name, rank)
    with hecate.record_routing(model) as routing:
        recorded = step_of(model, given)
    with hecate.replay_routing(model, routing):
        replayed = step_of(model, given)
    routing = hecate.Routing(_in_order_of_run(reference, given, routing.by_layer))
    experts = {one.name: one.num_experts for one in hecate.explain(model).experts}
    drawn = [_drawn(routing.by_layer, experts, one) for one in range(world)]
    with hecate.replay_routing(model, drawn[rank]):
        got = step_of(model, given)
    parts = [(batch(name, one), drawn[one]) for one in range(world)]
    # NLLB's experts take the tokens of its first choice, and weights of both.
    weights = name == "nllb_moe"
    expected = mean_of([_overwritten(reference, *part, experts, weights=weights) for part in parts])
    return dict(
        layers=len(routing.by_layer),
        experts=max(experts.values()),
        chosen=next(iter(routing.by_layer.values())).shape[-1],
        replay_error=max(abs(replayed[0] - recorded[0]), worst_error(replayed[1], recorded[1])[0]),
        loss_error=abs(_mean(got[0]) - expected[0]) / abs(expected[0]),
        gradient_error=worst_error(got[1], expected[1])[0],
    )


@torch.no_grad()
def _in_order_of_run(model: nn.Module, given: dict[str, Any], by_layer: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return layers as a forward runs them, where all are modules that are called."""
    ran: list[str] = []
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: ran.append(name))
        for name in by_layer
        if " " not in name
    ]
    model(**given)
    for hook in hooks:
        hook.remove()
    return {name: by_layer[name] for name in ran} if {*ran} == {*by_layer} else by_layer


def _drawn(by_layer: Mapping[str, Tensor], experts: Mapping[str, int], rank: int) -> dict[str, Tensor]:
    """Return other experts for all tokens, all of a token different."""
    generator = torch.Generator().manual_seed(rank)
    return {
        name: torch.rand(*ids.shape[:2], experts[name.partition(" ")[0]], generator=generator)
        .topk(ids.shape[-1])
        .indices
        for name, ids in by_layer.items()
    }


def _overwritten(
    model: nn.Module, given: dict[str, Any], drawn: Mapping[str, Tensor], experts: Mapping[str, int], *, weights: bool
) -> tuple[float, dict[str, Tensor]]:
    choices = [(experts[name.partition(" ")[0]], ids) for name, ids in drawn.items()]
    with OverwrittenRouters(choices, weights=weights) as routers:
        step = step_of(model, given)
    if routers.left:
        raise AssertionError(f"{routers.left} layers of the plain model have chosen by themselves")
    return step


def _mean(loss: float) -> float:
    mean = torch.tensor(loss, dtype=torch.float64, device="cpu")
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()
