"""Batched generation: responses to any number of prompts, in calls of a fixed batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hjax.data.dataset import Dataset
from hjax.errors import ConfigError

if TYPE_CHECKING:
    from hjax.models.model_config import ModelConfig
    from hjax.rollout.language_model import Completion, LanguageModel


def generate_in_batches(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    batch: int,
    seed: int,
    progress: Callable[[int, int, str], None],
    **options: Any,
) -> Iterator[list[Completion]]:
    """Generate a response to each prompt, in order, ``batch`` prompts per ``model.generate`` call.

    A partial last batch is padded with copies of its last prompt, because another batch size would
    compile another program. Their responses are dropped.

    Args:
      prompts: token ids.
      batch: prompts per call.
      seed: of the first call; the seeds of later calls derive from it (`call_seed`).
      progress: called with (prompts done, all prompts, text) before each call and at the end.
      **options: of ``model.generate``.

    Yields:
      the completions of each call.
    """
    generated = 0
    for call, start in enumerate(range(0, len(prompts), batch)):
        progress(start, len(prompts), f"{generated:,} tokens")
        rows = list(prompts[start : start + batch])
        missing = batch - len(rows) if start else 0
        padded = [*rows, *[rows[-1]] * missing]
        completions = model.generate(padded, seed=call_seed(seed, call), **options)[: len(rows)]
        generated += sum(len(completion.tokens) for completion in completions)
        yield completions
    progress(len(prompts), len(prompts), "")


def call_seed(seed: int, call: int) -> int:
    """The seed of a call, counted from 0; sampling depends on it and on a prompt's row in the call.

    The first call has the seed itself, so a single call equals ``model.generate``.
    """
    return seed if call == 0 else int(np.random.SeedSequence([seed, call]).generate_state(1)[0])


def length_limit(prompts: Dataset, config: ModelConfig, requested: int | None, default: int) -> int:
    """Most tokens of a response.

    Args:
      asked: the user's limit; None: ``default``, or what the longest prompt leaves if that is less.

    Raises:
      ConfigError: a prompt leaves fewer positions; names the first such prompt.
    """
    available = config.max_length - prompts.longest_prompt
    limit = max(min(default, available), 1) if requested is None else requested
    for i, tokens in enumerate(prompts.prompt_tokens):
        left = config.max_length - len(tokens)
        if left < limit:
            text = str(tokens if prompts.prompt_text is None else prompts.prompt_text[i])
            shown = repr(text if len(text) <= 40 else f"{text[:37]}...")
            lower = f"set it to {available} at most" if available > 0 else "shorten the prompt"
            raise ConfigError(
                f"prompt {i + 1} ({shown}) has {len(tokens)} tokens, and of the model's "
                f"{config.max_length} positions that leaves {max(left, 0)} for "
                f"--max_new_tokens={limit}; {lower}"
            )
    return limit
