"""What commands that sample have in common: a model, how tokens are drawn, how many at a time."""

from __future__ import annotations

import dataclasses
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hjax.errors import ConfigError
from hjax.launch.command import define, parse_flags, settle
from hjax.rollout.sampling_params import OPTIONS, SamplingParams
from hjax.rules import Rule, at_least, between
from hjax.user_input import user_path

if TYPE_CHECKING:
    from hjax.data.tokenizer import Tokenizer
    from hjax.models.model_config import ModelConfig
    from hjax.rollout.language_model import LanguageModel

# Sequences at a time.
BATCH = 32
HELP = """\
{options}\
  --seed=S              every draw follows from it (0)
  --stop=TEXT           ends a response, besides the model's own tokens; may be given again
                        (a model without tokenizer: a token's id)
  --chat                put every prompt that is text into the model's chat template
  --dtype=float32       of compute: float32 or bfloat16
  --cache_dtype=auto    of keys and values: that of compute, or int8
  --batch={batch}            so many sequences are generated at a time
  --tensor=1            devices of this machine that share the model, split by heads
  --copies=1            of the model, each on so many devices, which share a batch
"""

SEEDS = between(0, 2**32 - 1)
_RULES: Mapping[str, Rule] = {
    "max_new_tokens": at_least(1),
    "seed": SEEDS,
    "batch": at_least(1),
    "tensor": at_least(1),
    "copies": at_least(1),
}
# Of commands that read a model, as of ``define``; ``OPTIONS`` are None where they are not given.
DTYPES = {"dtype": ("float32", "bfloat16"), "cache_dtype": ("auto", "int8")}
UNSET: Mapping[str, type] = {name: type(key.default) for name, key in OPTIONS.items()}


def read_flags(arguments: Sequence[str], rules: Mapping[str, Rule], **own: object) -> Any:
    """The flags of a command that samples; a length or option that is not given is None.

    Args:
      rules: of flags of its own.
      own: these, as of ``define``.

    Raises:
      ConfigError: a wrong flag or value.
    """
    shared = define(model="", family="", max_new_tokens=int, json=False, seed=0)
    define(shared, stop=[], chat=False, batch=BATCH, tensor=1, copies=1, **DTYPES, **UNSET, **own)
    parse_flags(shared, arguments)
    settle(shared, {**_RULES, **rules})
    return shared


def sampling_help(temperature: str) -> str:
    """Lines of a command's help for the flags of ``read_flags``; ``temperature`` as below."""
    return HELP.format(options=options_help(temperature), batch=BATCH)


def options_help(temperature: str) -> str:
    """Lines of a command's help for ``OPTIONS``.

    Args:
      temperature: what is said of it.
    """
    lines = []
    for name, key in OPTIONS.items():
        said = temperature if name == "temperature" else key.doc
        head, indent = f"  --{name}={key.default}".removesuffix(".0").ljust(22), " " * 24
        if name == "temperature":
            head = f"  --{name}=T".ljust(22)
        body = textwrap.wrap(said, 100, initial_indent=indent, subsequent_indent=indent)
        if len(head) > 22:
            lines.append(head)
        else:
            body[0] = head + body[0][22:]
        lines += body
    return "".join(line + "\n" for line in lines)


def sampling_of(own: Any, vocab_size: int, temperature: float) -> dict[str, Any]:
    """Options that the flags give, by name, checked.

    Args:
      own: the flags.
      vocab_size: tokens of the model.
      temperature: where the flag is not given.

    Raises:
      ConfigError: a value out of range, its flag named.
    """
    given = {name: own[name].value for name in OPTIONS if own[name].value is not None}
    given = {"temperature": temperature} | given
    try:
        SamplingParams(**given).check_vocabulary(vocab_size)
    except ConfigError as error:
        raise ConfigError(f"--{error}") from error
    return given


def described(options: Mapping[str, Any]) -> dict[str, Any]:
    """For the JSON that a command prints: every option, given or not."""
    return {name: options.get(name, key.default) for name, key in OPTIONS.items()}


def existing_file(flag: str, name: str) -> Path:
    """The file that a flag names.

    Raises:
      ConfigError: there is none.
    """
    path = user_path(name, f"--{flag}=")
    if not path.is_file():
        raise ConfigError(f"--{flag}={name}: there is no such file")
    return path


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """What is known of a model before its weights are read.

    Attributes:
      path: as it was given.
      config: shapes.
      tokenizer: or None.
    """

    path: str
    config: ModelConfig
    tokenizer: Tokenizer | None

    @classmethod
    def read(cls, path: str) -> ModelInfo:
        """Read config and tokenizer; ConfigError where there is no model."""
        from hjax.models.weights import check_weights, read_config
        from hjax.run.inputs import load_tokenizer

        config = read_config(path)
        check_weights(path)
        return cls(path, config, load_tokenizer(path))

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        own = self.config.vocab_size
        return own if self.tokenizer is None else min(own, self.tokenizer.vocab_size)

    def stops(self, texts: list[str]) -> tuple[int | str, ...]:
        """What --stop says: texts as they are, without a tokenizer ids of tokens."""
        if self.tokenizer is not None:
            if "" in texts:
                raise ConfigError("--stop= is empty; give the text that ends a response")
            return tuple(texts)
        for text in texts:
            if not re.fullmatch(r"\d+", text) or int(text) >= self.vocab_size:
                raise ConfigError(
                    f"--stop={text}: {self.path} has no tokenizer; give the token's id, "
                    f"0 to {self.vocab_size - 1}"
                )
        return tuple(map(int, texts))

    def wording(self, chat: bool, instruction: str = "") -> Callable[[str], Any] | None:
        """How a prompt that is text is put to the model; None: as it is.

        Args:
          chat: as a message of the user's, for the chat template.
          instruction: a line added behind it.

        Raises:
          ConfigError: no tokenizer, or one without a template.
        """
        if chat:
            self.check_chat()
        if not chat and not instruction:
            return None

        def worded(text: str) -> Any:
            text = f"{text}\n{instruction}" if instruction else text
            return [{"role": "user", "content": text}] if chat else text

        return worded

    def check_chat(self) -> None:
        """Whether there is a chat template; ConfigError if not."""
        if self.tokenizer is None or not self.tokenizer.chat_template:
            lacks = "tokenizer" if self.tokenizer is None else "chat template"
            raise ConfigError(f"--chat: {self.path} has no {lacks}; leave --chat out")

    def load(self, own: Any, copies: int = 1) -> LanguageModel:
        """The model with its weights: on so many devices and in the dtypes that flags say, and so
        many times."""
        import hjax
        from hjax.launch.jax_setup import prepare_devices
        from hjax.progress import progress_listener
        from hjax.show.progress_bar import PartsDisplay

        prepare_devices(own.tensor * copies)
        with PartsDisplay("loading", sys.stderr.isatty(), sys.stderr) as display:

            def percent(what: str, done: int, total: int) -> None:
                display(100 * done // max(total, 1), 100, what.removeprefix("loading "))

            with progress_listener(percent):
                return hjax.load_model(self.path, own.dtype, own.tensor, copies, own.cache_dtype)


def options_of(own: Any, front: ModelInfo, temperature: float) -> dict[str, Any]:
    """What ``LanguageModel.generate`` takes, of the flags.

    Args:
      temperature: where the flag is not given.

    Raises:
      ConfigError: a value out of range.
    """
    given = sampling_of(own, front.config.vocab_size, temperature)
    return given | {"stop": front.stops(own.stop)}


def token_ids(text: str, vocab_size: int) -> list[int]:
    """Token ids as they are typed for a model without tokenizer, with commas or blanks between.

    Raises:
      ConfigError: something else.
    """
    parts = text.strip("[] ").replace(",", " ").split()
    ids = [int(part) for part in parts if part.isdecimal()]
    if not parts or len(ids) < len(parts) or max(ids) >= vocab_size:
        raise ConfigError(
            f"{text[:60]!r}: this model has no tokenizer; give token ids, as 3,4,5, each 0 to "
            f"{vocab_size - 1}"
        )
    return ids
