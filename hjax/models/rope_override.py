"""Rotary scaling that a run gives to a model for longer sequences (``model.rope_scaling``)."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from hjax.errors import ConfigError
from hjax.models.model_config import ModelConfig
from hjax.models.rotary import (
    DynamicNTKScaling,
    LinearScaling,
    RopeScaling,
    YarnScaling,
    read_scaling,
)

KEY = "model.rope_scaling"


def with_rope_scaling(model: ModelConfig, text: str) -> ModelConfig:
    """The model with the scaling, and its factor times as many positions.

    Args:
      model: as its directory describes it.
      text: JSON of ``rope_scaling`` as in a config.json; ``original_max_position_embeddings`` of
        YaRN is by default the model's positions. Empty: none.

    Returns:
      The model itself where ``text`` is empty, or where it has that scaling already, as that of a
      run that was given the same.

    Raises:
      ConfigError: no such scaling, or one that the model cannot take.
    """
    if not text:
        return model
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{KEY}={text[:60]}: no JSON ({error})") from error
    if not isinstance(content, Mapping):
        raise ConfigError(f"{KEY}={text}: a JSON object with rope_type and factor")
    wanted = read_scaling(content, model.max_length, KEY)
    if not isinstance(wanted, LinearScaling | YarnScaling | DynamicNTKScaling):
        raise ConfigError(
            f"{KEY}={text}: rope_type may be linear, dynamic or yarn; other forms belong to models "
            "that were trained with them"
        )
    if wanted.factor <= 1:
        raise ConfigError(f"{KEY}={text}: a factor above 1 makes room for longer sequences")
    if len(model.ropes) != 1:
        found = "several rotary embeddings" if model.ropes else "no rotary positions"
        raise ConfigError(f"{KEY}={text}: the model has {found}; leave the key empty")
    (rope,) = model.ropes
    original = getattr(wanted, "original_max_length", model.max_length)
    if rope.scaling is not None:
        if _settings(wanted) == _settings(rope.scaling):
            return model
        raise ConfigError(
            f"{KEY}={text}: the model's positions are scaled already ({rope.scaling.kind}); change "
            "its config.json, or leave the key empty"
        )
    return dataclasses.replace(
        model,
        ropes=(dataclasses.replace(rope, scaling=wanted),),
        max_length=int(original * wanted.factor),
    )


def _settings(scaling: RopeScaling) -> dict[str, Any]:
    """All but the original length, which a stretched model no longer has as its positions."""
    found = dataclasses.asdict(scaling) | {"kind": scaling.kind}
    return {name: value for name, value in found.items() if name != "original_max_length"}
