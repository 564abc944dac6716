"""A chat in the terminal: what is said goes to a model, line by line."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from hjax.errors import ConfigError
from hjax.launch.sampling_flags import token_ids
from hjax.run.completions import call_seed
from hjax.show.answers import say, say_pieces
from hjax.show.tables import wide_console

if TYPE_CHECKING:
    from hjax.rollout.language_model import LanguageModel

# As long as it is, a line is a command.
_NEW, _END = "/new", "/exit"


class Chat:
    """A conversation with a model, by its chat template; without one every line stands alone.

    Args:
      model: with or without a tokenizer.
      seed: of the first answer; those of others follow from it.
      limit: tokens of an answer at most; fewer where the model's positions leave fewer.
      options: of ``model.generate``.
    """

    def __init__(self, model: LanguageModel, seed: int, limit: int, options: dict[str, Any]):
        self.model = model
        self.seed = seed
        self.limit = limit
        self.options = options
        self.turns = 0
        self.messages: list[dict[str, str]] = []
        tokenizer = model.tokenizer
        self._templated = tokenizer is not None and bool(tokenizer.chat_template)
        self._console = wide_console(sys.stdout)

    def run(self) -> int:
        """Until the input ends; the command's exit status."""
        if self.model.tokenizer is None:
            how = "no tokenizer: a line is token ids, as 3,4,5"
        elif self._templated:
            how = "by its chat template"
        else:
            how = "no chat template: it goes on with each line by itself"
        with contextlib.suppress(ImportError):  # lines can then be edited
            import readline  # noqa: F401
        say(self._console, f"{how}; {_NEW} begins anew, Ctrl-D ends\n", "dim")
        while True:
            try:
                line = input("> ")
            except EOFError:
                say(self._console, "\n")
                return 0
            if line.strip() == _END:
                return 0
            if line.strip() == _NEW:
                self.messages.clear()
            elif line.strip():
                try:
                    self.answer(line)
                except ConfigError as error:  # of this line; the next may do
                    say(self._console, f"{error}\n", "red")

    def answer(self, line: str) -> None:
        """Answer a line and print the answer.

        Raises:
          ConfigError: a line that the model cannot take; what was said before stays.
        """
        messages = [*self.messages, {"role": "user", "content": line}]
        seed = call_seed(self.seed, self.turns)
        prompt = self._prompt(line, messages)
        limit = max(min(self.limit, self.model.config.max_length - len(prompt)), 1)
        pieces = self.model.stream(prompt, seed=seed, max_new_tokens=limit, **self.options)
        text = say_pieces(self._console, pieces)
        self.turns += 1
        if self._templated:
            self.messages = [*messages, {"role": "assistant", "content": text}]

    def _prompt(self, line: str, messages: list[dict[str, str]]) -> list[int]:
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            return token_ids(line, self.model.config.vocab_size)
        if not self._templated:
            return tokenizer.encode(line)
        return tokenizer.encode(tokenizer.chat(messages), add_special=False)
