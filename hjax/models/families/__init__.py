"""Families of decoders, by the ``model_type`` of their config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hjax.errors import ConfigError
from hjax.models.config import ModelConfig
from hjax.models.families.base import TOKEN_IDS, Family
from hjax.models.families.gemma import Gemma2, Gemma3
from hjax.models.families.gpt2 import GPT2
from hjax.models.families.gpt_oss import GptOss
from hjax.models.families.llama import Llama
from hjax.models.families.mistral import Mistral
from hjax.models.families.mixtral import Mixtral
from hjax.models.families.olmo2 import Olmo2
from hjax.models.families.phi3 import Phi3
from hjax.models.families.qwen import Qwen2, Qwen3, Qwen3Moe
from hjax.models.families.smollm3 import SmolLM3

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


def family_of(model_type: Any, what: str = "config.json") -> Family:
    """The family of a ``model_type``.

    Raises:
      ConfigError: one that is not supported, with those that are.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(
            f"{what}: model_type {model_type!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


def from_hf(content: Mapping[str, Any], what: str = "config.json") -> ModelConfig:
    """Read the content of a Hugging Face ``config.json``.

    Raises:
      ConfigError: another family, or a key or value that this one does not have, by name.
    """
    family = family_of(content.get("model_type"), what)
    try:
        return family.read(content, what)
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
    family = family_of(config.family)
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
