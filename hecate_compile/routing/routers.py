"""Layers that have a router."""

from __future__ import annotations

from hecate.compiled_model import CompiledModel
from hecate.passes.captured.hold_choices import router_of
from hecate.runtime.state.layer import Layer


def layers_with_routers(state: CompiledModel) -> dict[str, Layer]:
    """Return the layers by whose routers rows go to experts, by their names, in the model's order."""
    routers = router_of({layer.name: layer.num_experts for layer in state.layers})
    return {layer.name: layer for layer in state.layers if routers[layer.name] == layer.name}
