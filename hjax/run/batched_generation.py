"""Responses to any number of prompts, so many at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hjax.data.dataset import Dataset
from hjax.errors import ConfigError

if TYPE_CHECKING:
    from hjax.models.model_config import ModelConfig
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


def length_limit(prompts: Dataset, config: ModelConfig, asked: int | None, usual: int) -> int:
    """How many tokens a response may have.

    Args:
      asked: by the user; None: ``usual``, or fewer where the longest prompt leaves fewer.

    Raises:
      ConfigError: the first prompt that does not leave so many, by its number and beginning.
    """
    room = config.max_length - prompts.longest_prompt
    limit = max(min(usual, room), 1) if asked is None else asked
    for i, tokens in enumerate(prompts.prompt_tokens):
        left = config.max_length - len(tokens)
        if left < limit:
            text = str(tokens if prompts.prompt_text is None else prompts.prompt_text[i])
            shown = repr(text if len(text) <= 40 else f"{text[:37]}...")
            lower = f"set it to {room} at most" if room > 0 else "shorten the prompt"
            raise ConfigError(
                f"prompt {i + 1} ({shown}) has {len(tokens)} tokens, and of the model's "
                f"{config.max_length} positions that leaves {max(left, 0)} for "
                f"--max_new_tokens={limit}; {lower}"
            )
    return limit
