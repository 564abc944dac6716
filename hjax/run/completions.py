"""Responses to any number of prompts, so many at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hjax.data.dataset import Dataset
from hjax.errors import ConfigError

if TYPE_CHECKING:
    from hjax.models.config import ModelConfig
    from hjax.rollout.language_model import Completion, LanguageModel


def complete(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    batch: int,
    seed: int,
    progress: Callable[[int, int, str], None],
    **options: Any,
) -> Iterator[list[Completion]]:
    """Answer prompts in their order, ``batch`` in one call of ``model.generate``.

    A last batch that is not full is filled up with its last prompt, whose further answers are
    dropped: another number of rows would be another program to compile.

    Args:
      prompts: token ids.
      batch: prompts per call.
      seed: of the first call; those of others follow from it (`call_seed`).
      progress: told (prompts answered, prompts, what for) before each call and at the end.
      **options: of ``model.generate``.

    Yields:
      the completions of each call.
    """
    drawn = 0
    for call, start in enumerate(range(0, len(prompts), batch)):
        progress(start, len(prompts), f"{drawn:,} tokens")
        rows = list(prompts[start : start + batch])
        missing = batch - len(rows) if start else 0
        filled = [*rows, *[rows[-1]] * missing]
        found = model.generate(filled, seed=call_seed(seed, call), **options)[: len(rows)]
        drawn += sum(len(completion.tokens) for completion in found)
        yield found
    progress(len(prompts), len(prompts), "")


def call_seed(seed: int, call: int) -> int:
    """The seed of a call, from 0: draws follow from it and a prompt's place in the call.

    The first has the seed itself, so one call answers as ``model.generate`` does.
    """
    if call == 0:
        return seed
    return int(np.random.SeedSequence([seed, call]).generate_state(1)[0])


def check_room(prompts: Dataset, config: ModelConfig, max_new_tokens: int) -> None:
    """Whether every prompt leaves room for a response.

    Raises:
      ConfigError: the first one that does not, by its number and beginning.
    """
    room = config.max_length - max_new_tokens
    for i, tokens in enumerate(prompts.prompt_tokens):
        if len(tokens) > room:
            text = str(tokens if prompts.prompt_text is None else prompts.prompt_text[i])
            shown = repr(text if len(text) <= 40 else f"{text[:37]}...")
            most = config.max_length - len(tokens)
            lower = f"set it to {most} at most" if most > 0 else "shorten the prompt"
            raise ConfigError(
                f"prompt {i + 1} ({shown}) has {len(tokens)} tokens, and of the model's "
                f"{config.max_length} positions --max_new_tokens={max_new_tokens} leaves "
                f"{max(room, 0)}; {lower}"
            )
