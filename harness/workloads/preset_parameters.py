"""Lists a preset model's sizes, and its parameters by name and shape, without building the model.

Commands that only plan a suite need only these lists, and do not need torch, whose import takes longer than the
planning.  This module does not import torch.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from harness.errors import Refusal, suggestion
from harness.suites.model_sizes import (
    IMAGE_CLASSES,
    IMAGE_SIDE,
    MOST_LAYERS,
    PATCHES,
    PRESETS,
    BERTShape,
    GPTShape,
    Shape,
    ViTShape,
)
from harness.suites.trial import Model, Trial
from impl.plan.unit_plan import Placed
from impl.policy.shard_layout import ParameterSpec


def shape_of(model: Model) -> Shape:
    """Return the sizes of a preset model; sizes in ``model.arguments`` replace the preset's own.

    Raises:
        Refusal: if there is no such preset, if it has no such size, or if a size is impossible.
    """
    if model.name not in PRESETS:  # only in an old record, since suites are checked earlier
        raise Refusal(f"model {model.name!r}: expected one of {', '.join(PRESETS)} or 'module:function'")
    preset = PRESETS[model.name]
    known = {field.name: field.type for field in fields(preset)}
    for name, value in model.arguments.items():
        if name not in known:
            wanted = f"expected one of {', '.join(known)}{suggestion(name, known)}"
            raise Refusal(f"model {model.name!r}: unknown argument {name!r}, {wanted}")
        if type(value).__name__ != known[name] or (type(value) is int and value < 1):
            wanted = "true or false" if known[name] == "bool" else "a whole number of at least 1"
            raise Refusal(f"model {model.name!r}: {name} = {value!r}, expected {wanted}")
    changed: dict[str, Any] = dict(model.arguments)
    shape = replace(preset, **changed)
    if shape.layers > MOST_LAYERS:
        raise Refusal(f"model {model.name!r}: {shape.layers} layers; expected at most {MOST_LAYERS}")
    if shape.width % shape.heads:
        raise Refusal(
            f"model {model.name!r}: a width of {shape.width} is not divisible by {shape.heads} heads; change "
            "width or heads"
        )
    return shape


def patch_of(model: Model, sequence: int) -> int:
    """Return the side of a patch, in pixels, if an image is cut into ``sequence`` square patches.

    Raises:
        Refusal: if an image cannot be cut into so many patches.
    """
    if sequence not in PATCHES:
        why = (
            f"sequence = {sequence}: model {model.name!r} cannot cut an image into {sequence} square patches"
        )
        raise Refusal(f"{why}; set sequence to one of {', '.join(map(str, PATCHES))}")
    return PATCHES[sequence]


def parameters_of(model: Model, sequence: int) -> tuple[list[Placed], list[str]]:
    """List the parameters and the blocks of the module that :func:`harness.workloads.models.build` makes of a preset.

    Returns:
        The parameters in the module's order, each with the name of its block, and the names of the blocks.

    Raises:
        Refusal: if there is no such preset, if a size is unknown or impossible, or if an image cannot be cut into
            ``sequence`` patches.
    """
    shape = shape_of(model)
    width, places, outputs, inputs = shape.width, sequence, IMAGE_CLASSES, (0, shape.width)
    if isinstance(shape, ViTShape):
        patch = patch_of(model, sequence)
        places, inputs = (IMAGE_SIDE // patch) ** 2, (width, patch * patch)  # of a linear map of pixels
    else:
        outputs, inputs = shape.vocab, (shape.vocab + isinstance(shape, BERTShape), width)  # with the mask
    blocks = [f"blocks.{number}" for number in range(shape.layers)]
    in_block = {
        "attention_norm": (width,), "attention.qkv": (3 * width, width), "attention.out": (width, width),
        "mlp_norm": (width,), "up": (4 * width, width), "down": (width, 4 * width),
    }  # fmt: skip
    placed = [
        Placed(ParameterSpec("embedding.weight", inputs), ""),
        Placed(ParameterSpec("positions.weight", (places, width)), ""),
    ]
    placed += [
        Placed(ParameterSpec(f"{block}.{name}.weight", size), block)
        for block in blocks
        for name, size in in_block.items()
    ]
    placed.append(Placed(ParameterSpec("norm.weight", (width,)), ""))
    if not (isinstance(shape, GPTShape) and shape.tied):  # else the head's weight is the embedding's
        placed.append(Placed(ParameterSpec("head.weight", (outputs, width)), ""))
    return placed, blocks


def parameters_of_trial(trial: Trial) -> tuple[list[Placed], list[str]]:
    """List the parameters and blocks of a trial's model, which must be a preset.

    Returns:
        The parameters in the module's order, and the names of the blocks.  Each parameter has the name of its block,
        and the index of its parameter group in the trial's optimizer.

    Raises:
        Refusal: in the same cases as :func:`parameters_of`, such as an unknown preset.
    """
    placed, blocks = parameters_of(trial.model, trial.sequence)
    group = trial.optimizer.group
    return [
        place._replace(
            spec=replace(place.spec, group=group(place.spec.name, place.spec.shape, hidden=bool(place.block)))
        )
        for place in placed
    ], blocks
