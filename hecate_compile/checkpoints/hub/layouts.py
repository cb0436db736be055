"""Layouts: the tensors that a library's ``save_pretrained`` would write, made from a model's by its own function."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hecate.checkpoints.state_dicts import whole_shape
from hecate.private import (
    buffers_of,
    is_persistent,
    names_left_out_of_files,
    parameters_of,
    set_weight_conversions,
    weight_conversions,
)


@dataclass(frozen=True)
class PlainTensor:
    """A parameter or persistent buffer of the plain model."""

    name: str
    like: torch.Tensor  # Of the whole, on the meta device; the same object for all names of a tied parameter.
    here: torch.Tensor  # What the model holds in its place, perhaps a shard, or a DTensor.


class PlainView:
    """A model whose parameters, in ``tensors``, have plain names and whole shapes; all else is that of ``model``."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.tensors = _plain_tensors(model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    @property
    def is_pretrained(self) -> bool:
        """True if the model is of transformers, which is not imported for that."""
        module: Any = sys.modules.get("transformers.modeling_utils")
        return module is not None and isinstance(self.model, module.PreTrainedModel)

    def get_parameter(self, target: str) -> torch.Tensor:
        """Return a tensor with the shape and dtype of a parameter, on the meta device."""
        if target not in self.tensors:
            raise AttributeError(f"{type(self.model).__name__} has no {target}")
        return self.tensors[target].like

    get_parameter_or_buffer = get_parameter


def _plain_tensors(model: nn.Module) -> dict[str, PlainTensor]:
    likes: dict[int, torch.Tensor] = {}
    found: dict[str, PlainTensor] = {}
    # In preorder, own tensors first, the order of state_dict.
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, here in (*parameters_of(module).items(), *buffers_of(module).items()):
            if here is None or not is_persistent(module, key):
                continue
            name = f"{prefix}.{key}".lstrip(".")
            like = likes.setdefault(id(here), torch.empty(whole_shape(here), dtype=here.dtype, device="meta"))
            found[name] = PlainTensor(name, like, here)
    return found


log = logging.getLogger("hecate")

Tensors = dict[str, torch.Tensor]


class PlainLayout:
    """The layout of the state dict."""

    def __init__(self, view: PlainView) -> None:
        sharing = Counter(id(tensor.like) for tensor in view.tensors.values())
        self._tied = {name for name, tensor in view.tensors.items() if sharing[id(tensor.like)] > 1}

    def kept(self, likes: Tensors) -> Tensors:
        """Return the model's tensors that are written."""
        return likes

    def groups(self, likes: Tensors) -> list[list[str]]:
        """Return the names of tensors that are converted together."""
        return [[name] for name in likes]

    def convert(self, tensors: Tensors) -> Tensors:
        """Return the tensors that files have in place of a group, in order."""
        # In a file no two tensors share memory.
        return {name: tensor.clone() if name in self._tied else tensor for name, tensor in tensors.items()}


class PretrainedLayout(PlainLayout):
    """The layout of transformers' ``save_pretrained``."""

    def __init__(self, view: PlainView) -> None:
        # Typed Any, because it has all attributes of the model.
        self._view: Any = view
        self._converts = True
        self._renamed: dict[str, str] = {}

    def kept(self, likes: Tensors) -> Tensors:
        from transformers.modeling_utils import remove_tied_weights_from_state_dict

        ignored = names_left_out_of_files(self._view)
        saved = {name: like for name, like in likes.items() if name not in ignored}
        kept: Tensors = remove_tied_weights_from_state_dict(saved, self._view)
        return kept

    def groups(self, likes: Tensors) -> list[list[str]]:
        from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

        whole = self.convert(dict(likes))
        self._remember_conversions()
        if not self._converts:
            return [[name] for name in likes]
        reverse = [one.reverse_transform() for one in weight_conversions(self._view) or ()][::-1]
        converters = [one for one in reverse if isinstance(one, WeightConverter)]
        groups: dict[tuple[str, bool], list[str]] = {}
        for name in sorted(likes, key=dot_natural_key):
            target, pattern = rename_source_key(name, [], converters, reverse=True)
            groups.setdefault((name, False) if pattern is None else (target, True), []).append(name)
        found = list(groups.values())
        try:
            self._renamed = self._names_of_renamed(groups, likes, whole)
            if self._gives(found, likes, whole):
                return found
        except Exception as problem:
            log.info("hecate.export: group by group: %r", problem)
        # A conversion that looks at more than its own tensors.
        log.warning("hecate.export: transformers converts this model as a whole, so rank 0 holds all of it")
        self._renamed = {}
        return [list(likes)]

    def _names_of_renamed(
        self, groups: Mapping[tuple[str, bool], list[str]], likes: Tensors, whole: Tensors
    ) -> dict[str, str]:
        """Return the name in the files of each tensor that is not converted; it may depend on the other tensors."""
        renamed, left = {}, iter(whole)
        for (name, is_converted), names in groups.items():
            if not is_converted:
                renamed[name] = next(left, name)
            else:
                for _ in self.convert({name: likes[name] for name in names}):
                    next(left, None)
        return renamed

    def _remember_conversions(self) -> None:
        """Look conversions up once; transformers does so in every call for a model that it did not load."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        found = weight_conversions(self._view)
        if found is None:
            every = get_model_conversion_mapping(self._view, add_legacy=False)
            found = [one for one in every if not isinstance(one, PrefixChange)] or None
        set_weight_conversions(self._view, found)
        self._converts = found is not None

    def _gives(self, groups: list[list[str]], likes: Tensors, whole: Tensors) -> bool:
        """Return whether converting group by group gives what converting the whole model gives."""
        parts = [part for names in groups for part in self.convert({name: likes[name] for name in names}).items()]
        return [(n, t.shape, t.dtype) for n, t in parts] == [(n, t.shape, t.dtype) for n, t in whole.items()]

    def convert(self, tensors: Tensors) -> Tensors:
        from transformers.core_model_loading import revert_weight_conversion

        if not self._converts:
            return tensors
        if tensors.keys() <= self._renamed.keys():
            return {self._renamed[name]: tensor for name, tensor in tensors.items()}
        converted: Tensors = revert_weight_conversion(self._view, tensors)
        return converted
