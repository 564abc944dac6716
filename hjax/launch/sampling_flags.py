"""Flags of the commands that sample: model, sampling parameters, batch size and devices."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hjax.errors import ConfigError
from hjax.launch.command import check_model_flags, define_flags, parse_flags
from hjax.rollout.sampling_params import OPTIONS, SamplingParams
from hjax.rules import Rule, at_least, between, whole_number
from hjax.user_input import user_path

if TYPE_CHECKING:
    from hjax.data.tokenizer import Tokenizer
    from hjax.models.model_config import ModelConfig
    from hjax.rollout.language_model import LanguageModel

# Sequences per batch.
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
# Flags of commands that read a model, for ``define_flags``; those of ``OPTIONS`` default to None.
DTYPES = {"dtype": ("float32", "bfloat16"), "cache_dtype": ("auto", "int8")}
UNSET: Mapping[str, type] = {name: type(key.default) for name, key in OPTIONS.items()}


def read_flags(arguments: Sequence[str], rules: Mapping[str, Rule], **own: object) -> Any:
    """Parse the flags of a command that samples; an unset length or option is None.

    Args:
      rules: for the command's additional flags.
      own: these flags with their defaults, see ``define_flags``.

    Raises:
      ConfigError: a wrong flag or value.
    """
    args = define_flags(model="", family="", max_new_tokens=int, json=False, seed=0)
    define_flags(
        args, stop=[], chat=False, batch=BATCH, tensor=1, copies=1, **DTYPES, **UNSET, **own
    )
    parse_flags(args, arguments)
    check_model_flags(args, {**_RULES, **rules})
    return args


def sampling_help(temperature: str) -> str:
    """Help text for the flags of ``read_flags``; ``temperature`` as in ``options_help``."""
    return HELP.format(options=options_help(temperature), batch=BATCH)


def options_help(temperature: str) -> str:
    """Help text for the sampling options, ``OPTIONS``.

    Args:
      temperature: description of the temperature.
    """
    lines = []
    for name, key in OPTIONS.items():
        description = temperature if name == "temperature" else key.doc
        head, indent = f"  --{name}={key.default}".removesuffix(".0").ljust(22), " " * 24
        if name == "temperature":
            head = f"  --{name}=T".ljust(22)
        body = textwrap.wrap(description, 100, initial_indent=indent, subsequent_indent=indent)
        if len(head) > 22:
            lines.append(head)
        else:
            body[0] = head + body[0][22:]
        lines += body
    return "".join(line + "\n" for line in lines)


def sampling_options(args: Any, vocab_size: int, temperature: float) -> dict[str, Any]:
    """Validated sampling options that the flags set, by name.

    Args:
      args: the flags.
      vocab_size: the model's.
      temperature: default for --temperature.

    Raises:
      ConfigError: a value out of range; the message names its flag.
    """
    options = {name: args[name].value for name in OPTIONS if args[name].value is not None}
    options = {"temperature": temperature} | options
    try:
        SamplingParams(**options).check_vocabulary(vocab_size)
    except ConfigError as error:
        raise ConfigError(f"--{error}") from error
    return options


def question_source(data: str, task: Any) -> dict[str, Any]:
    """Where a result's questions come from, for its JSON: a file, or a task and its options."""
    if task is None:
        return {"data": data}
    return {"task": task.name, "task_options": dataclasses.asdict(task)}


def all_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Every sampling option with its value or default, for a command's JSON."""
    return {name: options.get(name, key.default) for name, key in OPTIONS.items()}


def existing_file(flag: str, name: str) -> Path:
    """The path of a flag's file.

    Raises:
      ConfigError: there is no such file.
    """
    path = user_path(name, f"--{flag}=")
    if not path.is_file():
        raise ConfigError(f"--{flag}={name}: there is no such file")
    return path


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """Path, config and tokenizer of a model, before its weights are read.

    Attributes:
      path: of --model.
      config: the model's shapes.
      tokenizer: None without one.
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
        """Upper bound of token ids."""
        size = self.config.vocab_size
        return size if self.tokenizer is None else min(size, self.tokenizer.vocab_size)

    def parse_stops(self, texts: list[str]) -> tuple[int | str, ...]:
        """Stop strings of --stop; token ids for a model without tokenizer."""
        if self.tokenizer is not None:
            if "" in texts:
                raise ConfigError("--stop= is empty; give the text that ends a response")
            return tuple(texts)
        for text in texts:
            number = whole_number(text)
            if number is None or number >= self.vocab_size:
                raise ConfigError(
                    f"--stop={text}: {self.path} has no tokenizer; give the token's id, "
                    f"0 to {self.vocab_size - 1}"
                )
        return tuple(map(int, texts))

    def wording(self, chat: bool, instruction: str = "") -> Callable[[str], Any] | None:
        """Function that formats a text prompt for the model; None: prompts are used as they are.

        Args:
          chat: format it as a user message, for the chat template.
          instruction: a line that is appended to it.

        Raises:
          ConfigError: no tokenizer, or one without a chat template.
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
        """Raise ConfigError without a chat template."""
        if self.tokenizer is None or not self.tokenizer.chat_template:
            missing = "tokenizer" if self.tokenizer is None else "chat template"
            raise ConfigError(f"--chat: {self.path} has no {missing}; leave --chat out")

    def load(self, args: Any, copies: int = 1) -> LanguageModel:
        """Load the model in the dtypes and on the devices of the flags, ``copies`` times."""
        import hjax
        from hjax.launch.jax_setup import prepare_devices
        from hjax.progress import progress_listener
        from hjax.show.progress_bar import PartsDisplay

        prepare_devices(args.tensor * copies)
        with PartsDisplay("loading", sys.stderr.isatty(), sys.stderr) as display:

            def percent(what: str, done: int, total: int) -> None:
                display(100 * done // max(total, 1), 100, what.removeprefix("loading "))

            with progress_listener(percent):
                return hjax.load_model(self.path, args.dtype, args.tensor, copies, args.cache_dtype)


def generate_options(args: Any, info: ModelInfo, temperature: float) -> dict[str, Any]:
    """Arguments of ``LanguageModel.generate`` from the flags.

    Args:
      temperature: default for --temperature.

    Raises:
      ConfigError: a value out of range.
    """
    options = sampling_options(args, info.config.vocab_size, temperature)
    return options | {"stop": info.parse_stops(args.stop)}


def token_ids(text: str, vocab_size: int) -> list[int]:
    """Parse token ids, separated by commas or spaces, for a model without tokenizer.

    Raises:
      ConfigError: the text is not a list of token ids.
    """
    parts = text.strip("[] ").replace(",", " ").split()
    ids = [found for part in parts if (found := whole_number(part)) is not None]
    if not parts or len(ids) < len(parts) or max(ids) >= vocab_size:
        raise ConfigError(
            f"{text[:60]!r}: this model has no tokenizer; give token ids, as 3,4,5, each 0 to "
            f"{vocab_size - 1}"
        )
    return ids
