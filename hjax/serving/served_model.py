"""The served model: its name, its tokenizer, and the generation service that runs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hjax.data.tokenizer import Tokenizer
from hjax.data.tool_call_forms import CallForm, call_form
from hjax.serving.request_errors import RequestRefused


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """A model that is served.

    Attributes:
      name: the name that requests give.
      service: draws the tokens; None: each request is given one of its own.
      tokenizer: None: prompts and answers are token ids.
      vocab_size: token ids of prompts and options are below it.
      eos_ids: tokens that end a response.
    """

    name: str
    service: Any
    tokenizer: Tokenizer | None
    vocab_size: int
    eos_ids: tuple[int, ...]

    def text_tokenizer(self, field: str) -> Tokenizer:
        """The tokenizer, for a field that needs one; RequestRefused without."""
        if self.tokenizer is None:
            raise RequestRefused(
                f"{field}: {self.name} has no tokenizer; give token ids to /v1/completions",
                param=field,
            )
        return self.tokenizer

    def check_name(self, name: str) -> None:
        """Raise RequestRefused for another model's name; "" is any."""
        if name not in ("", self.name):
            raise RequestRefused(
                f"model={name!r}: this server has {self.name}",
                404,
                param="model",
                code="model_not_found",
            )

    def check_ids(self, field: str, ids: Sequence[object]) -> None:
        """Raise RequestRefused if one is not an id of the vocabulary."""
        for each in ids:
            if type(each) is not int or not 0 <= each < self.vocab_size:
                raise RequestRefused(
                    f"{field}: {each!r} is no token id, 0 to {self.vocab_size - 1}", param=field
                )

    @property
    def call_form(self) -> CallForm | None:
        """How it writes tool calls; None: its chat template does not say."""
        template = None if self.tokenizer is None else self.tokenizer.template_for([])
        return None if template is None else call_form(template)
