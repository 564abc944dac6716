"""Families of decoders, by the ``model_type`` of their config.json."""

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
from hjax.user_code import file_and_name, load_object

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
    """A family in a file of the user's; ``spec``: absolute ``path.py:Class``."""

    spec: str
    family: Family


# By model_type, those that take_family has loaded.
_user_families: dict[str, _UserFamily] = {}


def load_family(spec: str, setting: str = "model.family") -> Family:
    """Load a family in a file of the user's: models of its ``model_type`` are read with it.

    Args:
      spec: ``path.py:Class``, a subclass of ``hjax.models.families.family.Family``.
      setting: what names it, for messages.

    Raises:
      ConfigError: no such file or class, one that is no family, or a ``model_type`` of hjax's own.
    """
    found = load_object(spec, setting)
    if not (isinstance(found, type) and issubclass(found, Family)):
        raise ConfigError(
            f"{setting}={spec!r}: {found!r} is no subclass of hjax.models.families.family.Family"
        )
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
    """The family of a model; one of a user's is loaded where this process does not have it yet."""
    if config.family in FAMILIES:
        return FAMILIES[config.family]
    known = (own.family for own in _user_families.values() if own.spec == config.family)
    return next(known, None) or load_family(config.family)


def family_config(spec: str, sizes: ModelConfig) -> ModelConfig:
    """A model from scratch of a family in a file of the user's.

    Args:
      spec: as of ``load_family``.
      sizes: Llama's plain form in the sizes that are wanted; the parts are the family's.
    """
    return from_hf(load_family(spec).write(sizes), f"model.family={spec!r}")


def from_hf(content: Mapping[str, Any], what: str = "config.json") -> ModelConfig:
    """Read the content of a Hugging Face ``config.json``.

    Raises:
      ConfigError: another family, or a key or value that this one does not have, by name.
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
        # By its file, so that other processes find it too.
        own = _user_families.get(model_type)
        return config if own is None else dataclasses.replace(config, family=own.spec)
    except ConfigError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        # A value of another kind than its key's, which no check of the key's own has met.
        raise ConfigError(
            f"{what}: a value is not of its key's kind ({type(error).__name__}: {error})"
        ) from error


def to_hf(config: ModelConfig, scalar: bool = False) -> dict[str, Any]:
    """The ``config.json`` that transformers reads; special tokens it lacks are null in it.

    Args:
      config: shapes.
      scalar: whether the model has a scalar head, and so is a classifier of one class.
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
