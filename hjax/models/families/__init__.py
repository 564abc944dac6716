"""Model families, by the ``model_type`` of their config.json."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from hjax.errors import ConfigError
from hjax.models.families.family import TOKEN_IDS, Family
from hjax.models.families.gemma import Gemma2, Gemma3
from hjax.models.families.gpt2 import GPT2
from hjax.models.families.gpt_oss import GptOss
from hjax.models.families.llama import Llama
from hjax.models.families.mistral import Mistral, Mixtral
from hjax.models.families.olmo2 import Olmo2
from hjax.models.families.phi3 import Phi3
from hjax.models.families.qwen import Qwen2, Qwen3, Qwen3Moe
from hjax.models.families.smollm3 import SmolLM3
from hjax.models.model_config import ModelConfig
from hjax.user_code import file_and_name, load_subclass

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Llama(),
        Qwen2(),
        Qwen3(),
        Mistral(),
        SmolLM3(),
        Olmo2(),
        Gemma2(),
        Gemma3(),
        Phi3(),
        GPT2(),
        Mixtral(),
        Qwen3Moe(),
        GptOss(),
    )
}


class _UserFamily(NamedTuple):
    """A family in a user's file; ``spec``: absolute ``path.py:Class``."""

    spec: str
    family: Family


# Families loaded by ``load_family``, by model_type.
_user_families: dict[str, _UserFamily] = {}


def load_family(spec: str, setting: str = "model.family") -> Family:
    """Load a family from a user's file, for models of its ``model_type``.

    Args:
      spec: ``path.py:Class``, a subclass of ``hjax.models.families.family.Family``.
      setting: name of the setting, for errors.

    Raises:
      ConfigError: no such file or class, not a ``Family``, or a ``model_type`` that hjax has.
    """
    found = load_subclass(spec, setting, Family)
    model_type = getattr(found, "model_type", "")
    if not model_type or model_type in FAMILIES:
        raise ConfigError(
            f"{setting}={spec!r}: its model_type is {model_type!r}; give it one that is not "
            f"among hjax's own ({', '.join(FAMILIES)})"
        )
    path, name = file_and_name(found) or spec.rsplit(":", 1)
    own = _user_families[model_type] = _UserFamily(f"{path}:{name}", found())
    return own.family


def family_of(config: ModelConfig) -> Family:
    """The family of a model; a user's family is loaded if this process has not yet done so."""
    if config.family in FAMILIES:
        return FAMILIES[config.family]
    known = (own.family for own in _user_families.values() if own.spec == config.family)
    return next(known, None) or load_family(config.family)


def family_config(spec: str, sizes: ModelConfig) -> ModelConfig:
    """The config of a new model of a user's family.

    Args:
      spec: as of ``load_family``.
      sizes: a Llama config with the sizes; everything else is the family's.
    """
    return from_hf(load_family(spec).write(sizes), f"model.family={spec!r}")


def from_hf(content: Mapping[str, Any], what: str = "config.json") -> ModelConfig:
    """The ``ModelConfig`` of a Hugging Face ``config.json``.

    Raises:
      ConfigError: an unknown family, or a key or value that the family does not support, by name.
    """
    model_type = content.get("model_type")
    known = {**FAMILIES, **{name: own.family for name, own in _user_families.items()}}
    if not isinstance(model_type, str) or model_type not in known:
        raise ConfigError(
            f"{what}: model_type {model_type!r} is not supported; supported: {', '.join(known)} "
            "(one of your own: model.family=path.py:Class, docs/families.md)"
        )
    try:
        config = known[model_type].read(content, what)
        # Name the file, so that other processes find the family.
        own = _user_families.get(model_type)
        return config if own is None else dataclasses.replace(config, family=own.spec)
    except ConfigError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        # A value of a wrong type that no check of its key has caught.
        raise ConfigError(
            f"{what}: a value is not of its key's kind ({type(error).__name__}: {error})"
        ) from error


def to_hf(config: ModelConfig, scalar: bool = False) -> dict[str, Any]:
    """The ``config.json`` for transformers; special token ids that the config lacks are null.

    Args:
      config: shapes.
      scalar: whether the model has a scalar head, as a classifier with one class.
    """
    family = family_of(config)
    content = family.write(config) | dict.fromkeys(TOKEN_IDS)
    if scalar:
        content |= {
            "architectures": [family.classifier],
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
            "problem_type": "regression",
        }
    for key, value in config.token_ids:
        content[key] = list(value) if isinstance(value, tuple) else value
    return content
