"""Inputs of programs from shapes alone, where there are no weights and no data."""

from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from hjax.data.dataset import Dataset
from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError
from hjax.models.model_config import ModelConfig
from hjax.models.presets import PRESETS, preset
from hjax.models.rope_override import with_rope_scaling
from hjax.models.weights import read_config
from hjax.run.inputs import Inputs, load_inputs, load_tokenizer


def is_published(path: str) -> bool:
    """Whether a role's path names a published shape; a directory of that name has precedence."""
    return path.lower() in PRESETS and not Path(path).expanduser().is_dir()


def read_shape(path: str) -> tuple[ModelConfig, Tokenizer | None]:
    """Shapes and tokenizer of a published name, or of a directory; weights need not be there.

    Raises:
      ConfigError: the path is neither.
    """
    if is_published(path):
        return preset(path), None
    return read_config(path), load_tokenizer(path)


def shape_inputs(config: ConfigDict, source: str = "prompts") -> Inputs:
    """The inputs of a run, as far as its programs depend on them.

    Where the actor is a published shape there is no tokenizer, so no data is read: prompts have
    ``rollout.max_prompt_length`` tokens, and one token id ends a response.

    Raises:
      ConfigError: a missing or inconsistent setting, in one line.
    """
    path = config.actor.path
    if not is_published(path):
        return load_inputs(config, source)
    model = with_rope_scaling(preset(path), config.model.rope_scaling)
    length = config.rollout.max_prompt_length
    if not length:
        raise ConfigError(
            f"rollout.max_prompt_length=0 takes the longest prompt in the data, but {path!r} names "
            "a shape without tokenizer, so no data is read; set it"
        )
    needed = length + config.rollout.max_response_length
    if needed > model.max_length:
        raise ConfigError(
            f"prompts and responses of {needed} tokens exceed {path}'s {model.max_length} "
            "positions; lower rollout.max_prompt_length or rollout.max_response_length"
        )
    return Inputs(
        tokenizer=None,
        task=None,
        train=Dataset([], None, {}),
        held_out=None,
        model=model,
        prompt_length=length,
        reward=_unused,
        cost=_unused,
        demonstrations=[],
        eos_ids=(model.vocab_size - 1,),
    )


def _unused(*args: Any, **columns: Any) -> list[float]:
    raise ConfigError("a published shape has no data to score")
