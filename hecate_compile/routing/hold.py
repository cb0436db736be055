"""Blocks in which routing is recorded or replayed."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hecate.compiled_model import CompiledModel, compiled_model_of
from hecate.private import tree_leaves
from hecate.routing.routers import layers_with_routers
from hecate.routing.routing import Routing
from hecate.runtime.comm.warn import warn_together
from hecate.runtime.state.layer import ChoicePart, Layer


@contextmanager
def record_routing(model: nn.Module) -> Iterator[Routing]:
    """Record which experts the tokens of this rank's batch go to, in every forward inside the ``with`` block.

        with hecate.record_routing(model) as routing:
            texts = model.generate(prompts)
        routing.ids  # [batch, sequence, layer, k]

    Forwards follow one another in the sequence, as those of ``generate`` do; take a block for each forward that is no
    continuation. Tokens are in the order in which the model has them in a batch. In the first such block the model is
    traced once more, to graphs that tell what their routers choose; those without stay as they are. All ranks enter
    and leave together. Nothing is communicated, and the device is not waited for.

    Raises:
        ValueError: the model was not compiled, has no sharded experts, or its routing is recorded or replayed
            already. At the end of the first forward: the choice of a layer's router was not found.
    """
    state = _not_held(model, "record_routing")
    routing = Routing({})
    with _holding(state, _Recording(state, routing)):
        yield routing
    without = [name for name in layers_with_routers(state) if name not in routing.by_layer]
    if without and routing.by_layer:
        warn_together(
            f"hecate.record_routing: no forward of the model inside the block has called {', '.join(without)}, which "
            "are not in its routing",
            state.world.rank,
            stacklevel=3,
        )


@contextmanager
def replay_routing(
    model: nn.Module, routing: Routing | Tensor | np.ndarray[Any, Any] | Mapping[str, Tensor | np.ndarray[Any, Any]]
) -> Iterator[None]:
    """Send tokens to given experts, in every forward inside the ``with`` block.

        with hecate.replay_routing(model, ids):
            loss = model(tokens).loss
        loss.backward()

    Weights are the model's own, at these experts, and gradients flow through them. The backward may come later, and
    what is computed again in it chooses the same. Take a block for each micro-batch. In the first block the model is
    traced once more, see :func:`record_routing`. All ranks enter and leave together.

    Args:
        model: compiled.
        routing: for this rank's own batch, a recording, or integers ``[batch, sequence, layer, k]`` of any type, as
            inference engines have them; their layers are those with experts or all layers of the model. Or integers
            ``[batch, sequence, k]`` by the names of experts modules, of one that is called again "name (2)". -1 in
            all k places of a token leaves the choice to the model: pad with it where a rollout knows nothing.

    Raises:
        ValueError: the model was not compiled, has no sharded experts, or its routing is recorded or replayed
            already; layers, or experts, are others than the model's, or an expert comes twice for a token. In a
            forward: there are other tokens, as in ``generate``, a router chooses another number of experts, or there
            is nothing for a layer. At the end of a forward: the choice of a layer's router was not found, or a layer
            has not run.
        TypeError: no integers.
    """
    state = _not_held(model, "replay_routing")
    layers = layers_with_routers(state)
    given = routing.by_layer if isinstance(routing, Routing) else routing
    by_layer = dict(given) if isinstance(given, Mapping) else _by_layer(model, _integers(given, "ids"), layers)
    # Of a layer that is called again, "name (2)".
    calls = {name: layers.get(re.sub(r" \(\d+\)$", "", name)) for name in by_layer}
    unknown = [name for name, layer in calls.items() if layer is None]
    if unknown:
        raise ValueError(
            f"hecate.replay_routing: no layer with a router is {', '.join(unknown)}; these are {', '.join(layers)}"
        )
    experts = {name: layer.num_experts for name, layer in calls.items() if layer is not None}
    checked = {name: _checked(ids, name, experts[name]) for name, ids in by_layer.items()}
    with _holding(state, _Replay(state, checked)):
        yield


def _not_held(model: nn.Module, function: str) -> CompiledModel:
    state = compiled_model_of(model, function)
    if not state.layers:
        raise ValueError(f"hecate.{function}: this model has no sharded experts, so no graph knows its routers")
    if state.forward.held is not None:
        raise ValueError(f"hecate.{function}: the routing of this model is recorded or replayed already")
    return state


@contextmanager
def _holding(state: CompiledModel, held: _Held) -> Iterator[None]:
    state.forward.held = held
    try:
        yield
    finally:
        state.forward.held = None
        held.release()


class _Held(ABC):
    """What both have in common: which layers were held in a forward, and what is said where one was not."""

    _NAME: str

    def __init__(self, state: CompiledModel) -> None:
        self._state, self._layers = state, layers_with_routers(state)
        self._seen: dict[str, list[Tensor]] = {}
        self._running = False

    def release(self) -> None:
        """Forget what the block has held."""
        for layer in self._layers.values():
            layer.choices = None

    def begin(self, args: Any, kwargs: Any) -> None:
        self._seen, self._running = {}, True
        for layer in self._layers.values():
            layer.choices = partial(self._hold, layer)

    def end(self) -> None:
        self._running = False
        reasons = dict.fromkeys((name for name in self._needed() if name not in self._seen), "it has not run")
        reasons |= {skip.where: skip.reason for name, skip in self._state.backend.skips if name == "hold_choices"}
        for whole in self._state.forward.whole_layers.found:
            reasons |= dict.fromkeys(whole.experts, "it runs as Python")
        if reasons:
            because = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            raise ValueError(f"hecate.{self._NAME}: the choice of experts was not found. {because}")

    def _needed(self) -> Iterable[str]:
        """Return the names of layers that must run."""
        return () if self._seen else self._layers

    def _hold(self, layer: Layer, ids: Tensor, part: ChoicePart) -> Tensor:
        name = layer.name if part.call == 0 else f"{layer.name} ({part.call + 1})"
        # Outside of a forward, a backward computes a layer again.
        if self._running:
            seen = self._seen.setdefault(name, [])
            if part.first == 0 and seen:
                raise ValueError(
                    f"hecate.{self._NAME}: {name} is called several times in one forward, in checkpoints or graphs "
                    "of their own, so that nothing tells its calls apart"
                )
            # A copy: a compiled graph writes over what is no longer read.
            seen.append(ids.detach().reshape(-1, part.count).to(torch.int16, copy=True))
        return self._chosen(name, ids, part)

    @abstractmethod
    def _chosen(self, name: str, ids: Tensor, part: ChoicePart) -> Tensor:
        """Return the experts that tokens go to, where the router of layer ``name`` has chosen ``ids``."""


class _Recording(_Held):
    _NAME = "record_routing"

    def __init__(self, state: CompiledModel, routing: Routing) -> None:
        super().__init__(state)
        self._routing, self._batches = routing, list[tuple[int, int]]()

    def begin(self, args: Any, kwargs: Any) -> None:
        super().begin(args, kwargs)
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor) and value.ndim > 1]
        # Ids of tokens rather than anything else.
        tensors.sort(key=lambda tensor: tensor.is_floating_point())
        self._batches = [(tensor.shape[0], tensor.shape[1]) for tensor in tensors]

    def end(self) -> None:
        super().end()
        # Layers as the model has them, whatever the order in which they run, and then those that were called again.
        names = [*filter(self._seen.__contains__, self._layers), *(n for n in self._seen if n not in self._layers)]
        self._routing.append({name: self._in_batch(torch.cat(self._seen[name], dim=1)) for name in names})
        self._seen = {}

    def _in_batch(self, ids: Tensor) -> Tensor:
        """Return ``[T, k]`` as ``[batch, sequence, k]``; a batch of one where no input has so many tokens."""
        tokens, experts = ids.shape
        batch, sequence = next((two for two in self._batches if two[0] * two[1] == tokens), (1, tokens))
        return ids.reshape(batch, sequence, experts)

    def _chosen(self, name: str, ids: Tensor, part: ChoicePart) -> Tensor:
        return ids


class _Replay(_Held):
    _NAME = "replay_routing"

    def __init__(self, state: CompiledModel, given: Mapping[str, Tensor]) -> None:
        super().__init__(state)
        device = state.world.device
        self._given = {name: ids.to(device, torch.int64).flatten(0, 1) for name, ids in given.items()}
        self._whole = {name: bool((ids >= 0).all()) for name, ids in given.items()}
        self._twice = {name: text for name, ids in given.items() if (text := _an_expert_twice(name, ids))}

    def release(self) -> None:
        """Keep what the block has held: a backward may compute layers again, until another block comes."""

    def _needed(self) -> Iterable[str]:
        return self._given

    def _chosen(self, name: str, ids: Tensor, part: ChoicePart) -> Tensor:
        given = self._given.get(name)
        if given is None:
            raise ValueError(f"hecate.replay_routing: there is nothing for {name}, which has run")
        tokens = ids.numel() // part.count
        if given.shape != (tokens, part.total):
            raise ValueError(
                f"hecate.replay_routing: {name} sends {tokens} tokens to {part.total} experts each, "
                f"and there are {given.shape[1]} for {given.shape[0]} tokens. Give -1 for tokens whose experts are "
                "not known; generate outside of the block"
            )
        if part.differ and name in self._twice:
            raise ValueError(f"hecate.replay_routing: {self._twice[name]}")
        chosen = given[:, part.first : part.first + part.count].reshape(ids.shape).to(ids.device, ids.dtype)
        return chosen if self._whole[name] else torch.where(chosen < 0, ids, chosen)


def _integers(given: Any, what: str) -> Tensor:
    ids = torch.from_numpy(given) if isinstance(given, np.ndarray) else given
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        kind = ids.dtype if isinstance(ids, Tensor) else type(given).__name__
        raise TypeError(f"hecate.replay_routing: {what} are {kind}, expected integers in a tensor or array")
    return ids.detach()


def _by_layer(model: nn.Module, ids: Tensor, layers: Mapping[str, Layer]) -> dict[str, Tensor]:
    """Return what a tensor has for each layer with experts; its layers are these, or all of the model."""
    if ids.ndim != 4:
        raise ValueError(
            f"hecate.replay_routing: ids are {list(ids.shape)}, expected [batch, sequence, layer, k]; "
            "ids[None] makes a batch of one sequence"
        )
    given = ids.shape[2]
    if given == len(layers):
        return {name: ids[:, :, number] for number, name in enumerate(layers)}
    numbers = {name: re.match(r"(.+?)\.(\d+)\.", name) for name in layers}
    lists = {match[1] for match in numbers.values() if match is not None}
    if len(lists) == 1 and None not in numbers.values():
        whole = model.get_submodule(lists.pop())
        if isinstance(whole, nn.ModuleList) and len(whole) == given:
            return {name: ids[:, :, int(match[2])] for name, match in numbers.items() if match is not None}
    raise ValueError(
        f"hecate.replay_routing: ids are of {given} layers, and the model has {len(layers)} with experts: "
        f"{', '.join(layers)}"
    )


def _checked(given: Any, name: str, num_experts: int) -> Tensor:
    """Return integers ``[batch, sequence, k]``, each token's all experts of the layer, or all -1."""
    ids = _integers(given, f"those of {name}").to(torch.int64)
    if ids.ndim != 3:
        raise ValueError(f"hecate.replay_routing: {name} has {list(ids.shape)}, expected [batch, sequence, k]")
    problems = [
        ((ids < -1) | (ids >= num_experts), f"are not from 0 to {num_experts - 1}, or -1"),
        ((ids < 0) != (ids[..., :1] < 0), "have -1 in some places and experts in others"),
    ]
    for wrong, what in problems:
        if text := _first(wrong, f"experts of {name} {what}", ids):
            raise ValueError(f"hecate.replay_routing: {text}")
    return ids


def _an_expert_twice(name: str, ids: Tensor) -> str:
    """Return which token has an expert twice, as tables may, but no router that chooses; "" for none."""
    ordered = ids.sort(dim=-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    return _first(twice, f"experts of {name} come twice for a token", ids)


def _first(wrong: Tensor, what: str, ids: Tensor) -> str:
    """Return ``what`` is wrong with the first token for which that is so; "" if there is none."""
    if not bool(wrong.any()):
        return ""
    batch, position, *_ = wrong.nonzero()[0].tolist()
    return f"{what}: {ids[batch, position].tolist()}, of token {position} of sequence {batch}"
