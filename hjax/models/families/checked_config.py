"""The content of a config.json while it is read: what nobody asked for is refused by name."""

import json
from collections.abc import Mapping
from typing import Any

from hjax.errors import ConfigError
from hjax.models.rotary import is_number

# Keys that change nothing of what a forward computes: ids, bookkeeping, and what applies to
# initial values, to generation, or, as dropout, to transformers' own training.
IGNORED_KEYS = frozenset(
    """
    _name_or_path attention_dropout attn_implementation cache_implementation
    chunk_size_feed_forward embd_pdrop id2label initializer_range is_decoder
    keys_to_ignore_at_inference label2id max_length model_type
    output_attentions output_hidden_states output_router_logits pretraining_tp
    problem_type resid_pdrop return_dict sep_token_id torchscript transformers_version unk_token_id
    use_cache use_return_dict
    """.split()
)

_MAX_SIZE = 2**31 - 1  # of a size


class CheckedConfig:
    """The content of a config.json while a family reads it.

    Args:
      content: of the file.
      what: names the file in errors.
      defaults: of keys that it may leave out, as transformers' class of this family has them.
    """

    def __init__(self, content: Mapping[str, Any], what: str, defaults: Mapping[str, Any] = {}):
        self.content, self.what = content, what
        self._defaults = defaults
        self._asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """A key's value; the default where it is missing or null."""
        self._asked.add(key)
        value = self.content.get(key)
        return self._defaults.get(key, default) if value is None else value

    def null(self, key: str) -> bool:
        """Whether a key is there and null, which some classes tell from a missing one."""
        return key in self.content and self.content[key] is None

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number of 1 or more.

        Raises:
          ConfigError: another value, one of more than 31 bits, or none without a default.
        """
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_SIZE:
            problem = "is missing" if value is None else f"is {value!r}"
            raise self.error(f"{key} {problem}; a whole number of 1 to {_MAX_SIZE}")
        return value

    def number(self, key: str, default: float) -> float:
        """A number.

        Raises:
          ConfigError: something else.
        """
        value = self.get(key, default)
        if not is_number(value):
            raise self.error(f"{key} is {value!r}; a finite number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false.

        Raises:
          ConfigError: something else.
        """
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} is {value!r}; true or false")
        return value

    def only(self, key: str, *allowed: Any) -> Any:
        """One of these values; the first where the key is missing.

        Raises:
          ConfigError: another one.
        """
        value = self.get(key, allowed[0])
        if value not in allowed:
            supported = ", ".join(json.dumps(one) for one in allowed)
            raise self.error(f"{key} {value!r} is not supported; supported: {supported}")
        return value

    def error(self, line: str) -> ConfigError:
        """The error to raise, naming the file."""
        return ConfigError(f"{self.what}: {line}")

    def finish(self) -> None:
        """Refuse what was not asked for.

        Raises:
          ConfigError: keys that this family does not know, by name.
        """
        left = {
            key: value
            for key, value in self.content.items()
            if key not in self._asked | IGNORED_KEYS and value is not None
        }
        if left:
            shown = ", ".join(f"{key}={value!r}" for key, value in sorted(left.items()))
            raise self.error(
                f"a {self.content.get('model_type')} model with {shown[:200]} is not supported"
            )
