"""Batches with images for the models of :data:`WRAPPERS`, and how far off such a model's gradients are on ranks."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import hecate
from benchmarks.families.models import batch, build
from hecate.wrap.find_experts import find_experts
from hecate.wrap.text_model import find_text_model
from tests.support.parity import clear_gradients, compare, rank_and_size

# Of an image: height and width, in tokens of the text model. Families with one size of images see only how many.
Image = tuple[int, int]
SMALL, WIDE, TALL = (1, 2), (2, 3), (3, 2)


def image_batch(name: str, model: nn.Module, step: int, images: Sequence[Image]) -> dict[str, Any]:
    """Keyword arguments of a forward: ids, the first rows with placeholders in them, and the images."""
    given = batch(name, step)
    ids, config, asked = given["input_ids"], model.config, set(inspect.signature(model.forward).parameters)
    if "mm_token_type_ids" in asked:
        given["mm_token_type_ids"] = torch.zeros_like(ids)
    if not images:
        return given
    pixels, tokens = _PIXELS.get(name, _patches)(config, images)
    generator = torch.Generator().manual_seed(2000 + step)
    given["pixel_values"] = torch.randn(pixels, generator=generator)
    if "image_grid_thw" in asked:
        merge = 1 if name.startswith("inkling") else config.vision_config.spatial_merge_size
        given["image_grid_thw"] = torch.tensor([[1, height * merge, width * merge] for height, width in images])
    place = 1
    for index, count in enumerate(tokens):
        row = index * len(ids) // len(tokens)
        place = place if row == (index - 1) * len(ids) // len(tokens) and index else 1
        ids[row, place : place + count] = config.image_token_id
        # Text between images.
        place += count + 1
    is_image = ids == config.image_token_id
    assert int(is_image.sum()) == sum(tokens), "a row is too short for its images"
    given["labels"] = torch.where(is_image, -100, ids)
    given |= {key: is_image.long() for key in ("mm_token_type_ids", "moe_mm_token_type_ids") if key in asked}
    return given


def _patches(config: Any, images: Sequence[Image]) -> tuple[list[int], list[int]]:
    """The shape of the pixels, and how many tokens each image has: patches of all images in a row."""
    vision, areas = config.vision_config, [height * width for height, width in images]
    channels = getattr(vision, "in_channels", getattr(vision, "num_channels", 3))
    size = channels * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
    return [sum(areas) * vision.spatial_merge_size**2, size], areas


def _tokens_of_lines(config: Any, images: Sequence[Image]) -> tuple[list[int], list[int]]:
    """With one token more at the end of each line."""
    return _patches(config, images)[0], [height * (width + 1) for height, width in images]


def _squares(config: Any, images: Sequence[Image]) -> tuple[list[int], list[int]]:
    vision, areas = config.vision_config, [height * width for height, width in images]
    side = vision.patch_size * vision.spatial_merge_size
    return [sum(areas), side, side, vision.num_channels], areas


def _of_one_size(config: Any, images: Sequence[Image]) -> tuple[list[int], list[int]]:
    side = config.vision_config.image_size
    patches = (side // config.vision_config.patch_size) ** 2
    tokens = getattr(config, "projector_patch_to_query_dict", {patches: patches // 16})[patches]
    return [len(images), 3, side, side], [tokens] * len(images)


_PIXELS = dict(
    aria=_of_one_size, step3p7=_of_one_size, hy_v4_vl=_tokens_of_lines, inkling2=_squares, inkling2_loop=_squares
)

# Images of the first and of the second rank in each step.
ON_ALL_RANKS = [[[WIDE, SMALL], [TALL]], [[], []], [[SMALL], [TALL, TALL, WIDE]]]
ON_ONE_RANK = [[[WIDE], []], [[], [SMALL, TALL]], [[TALL], [WIDE, SMALL]], [[], []]]


def measure(
    name: str, steps: Sequence[Sequence[Sequence[Image]]], policy: Any = "hecate", layers: int = 2
) -> dict[str, Any]:
    """The worst errors of a few steps beside one process that has the batches of all ranks.

    Weights stay as they are: steps of an optimizer would add up what is rounded otherwise.
    """
    model, reference = build(name), build(name)
    for one in (model, reference):
        text: Any = find_text_model(one, find_experts(one)[0])
        text.layers, text.config.num_hidden_layers = text.layers[:layers], layers
    hecate.compile(model, hecate.Config(backend="aot_eager", policy=policy))
    # Known since ranks are connected.
    rank, size = rank_and_size()
    assert size == len(steps[0])
    found: dict[str, Any] = dict(loss=0.0, gradient=0.0)
    for step, images in enumerate(steps):
        clear_gradients(model, reference)
        batches = [image_batch(name, reference, size * step + other, images[other]) for other in range(size)]
        loss = model(**batches[rank])["loss"]
        loss.backward()
        expected = sum(reference(**one)["loss"] for one in batches) / size
        expected.backward()
        difference = compare(model, loss.detach(), reference, expected.detach(), smallest=1e-4)
        found["loss"] = max(found["loss"], difference.loss)
        if difference.gradient > found["gradient"]:
            found |= {"gradient": difference.gradient, "worst": difference.worst}
    return found
