"""Reading a config.json: keys that the family does not read are refused by name."""

import json
from collections.abc import Mapping
from typing import Any

from hjax.errors import ConfigError
from hjax.models.rotary import is_number

# Keys that do not affect a forward: ids, bookkeeping, initialization, generation, and dropout in
# transformers' own training.
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
    """The content of a config.json, with typed access that records which keys are read.

    Args:
      content: of the file.
      what: names the file in errors.
      defaults: of keys that may be missing, as in transformers' config class of the family.
    """

    def __init__(self, content: Mapping[str, Any], what: str, defaults: Mapping[str, Any] = {}):
        self.content, self.what = content, what
        self._defaults = defaults
        self._read_keys: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """A key's value, or the default if it is missing or null."""
        self._read_keys.add(key)
        value = self.content.get(key)
        return self._defaults.get(key, default) if value is None else value

    def null(self, key: str) -> bool:
        """Whether a key is present and null, which some classes distinguish from a missing key."""
        return key in self.content and self.content[key] is None

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer.

        Raises:
          ConfigError: another value, one of more than 31 bits, or no value and no default.
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
        """One of the allowed values; the first if the key is missing.

        Raises:
          ConfigError: another value.
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
        """Refuse keys that were not read.

        Raises:
          ConfigError: keys that this family does not know, by name.
        """
        left = {
            key: value
            for key, value in self.content.items()
            if key not in self._read_keys | IGNORED_KEYS and value is not None
        }
        if left:
            shown = ", ".join(f"{key}={value!r}" for key, value in sorted(left.items()))
            raise self.error(
                f"a {self.content.get('model_type')} model with {shown[:200]} is not supported"
            )
