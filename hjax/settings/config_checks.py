"""Holding a config against the keys that exist: names, types, ranges and batch arithmetic."""

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from hjax.config import Config, convert, flatten, nearest_keys, section_error
from hjax.config_aliases import wish
from hjax.errors import ConfigError, safe_repr
from hjax.settings.keys import (
    KEYS,
    OWNED_SECTIONS,
    PLACEMENTS,
    RESPONSE_TOKENS,
    default_config,
)

_SHOWN = 24  # divisors in a message


def check_config(config: ConfigDict | Mapping[str, Any]) -> Config:
    """A complete, checked copy of a config.

    Keys that are missing take their defaults: the common ones those of `default_config()`, the
    ones under `config.algorithm` those of the algorithm's class. Sizes that follow from the data
    become numbers (`with_sizes`). Whether sizes divide over the devices is not checked here: the
    Trainer knows the devices.

    Args:
      config: nested, e.g. `default_config()` with some keys changed.

    Returns:
      a new, locked Config.

    Raises:
      ConfigError: an unknown key (the nearest one is offered), a wrong type, a value out of range,
        or batch sizes that do not divide (the divisors are offered).
    """
    return with_sizes(checked(config))


def with_sizes(config: Config) -> Config:
    """The config with `rollout.max_response_length` as a number, where 0 leaves it to the data.

    Raises:
      ConfigError: there is no such task, or it refuses its options.
    """
    if config.rollout.max_response_length:
        return config
    length = None
    if not config.data.path and config.data.task:
        from hjax.data.tasks import get_task

        length = get_task(config.data.task, **config.data.task_options).response_length
    config.rollout.max_response_length = length or RESPONSE_TOKENS
    return config


def checked(config: ConfigDict | Mapping[str, Any]) -> Config:
    """`check_config` without `with_sizes`: the data may still be named."""
    complete = complete_config(config)
    _check_ranges(complete)
    _check_algorithm(complete)
    _check_placement(complete)
    _check_model(complete)
    _check_batches(complete)
    _check_adapters(complete)
    _check_decay(complete)
    return complete


def complete_config(config: ConfigDict | Mapping[str, Any]) -> Config:
    """The config with all missing keys at their defaults; names and types checked, values not.

    Raises:
      ConfigError: an unknown key, a wrong type, or an algorithm that cannot be found.
    """
    if not isinstance(config, ConfigDict | Mapping):
        raise ConfigError(
            f"a config is expected here, not {safe_repr(config)}: "
            "hjax.get_config(NAME, {KEY: VALUE, ...}) makes one"
        )
    given = flatten(config)
    complete = default_config()
    complete.unlock()
    common = flatten(complete)
    for section, selector in OWNED_SECTIONS.items():
        name = convert(selector, given.get(selector, common[selector]), common[selector])
        for key, value in owned_defaults(section, name).items():
            set_key(complete, f"{section}.{key}", value)
    known = flatten(complete)
    for key, value in given.items():
        if key not in known:
            raise unknown_key(key, known, given)
        set_key(complete, key, convert(key, value, known[key]))
    complete.algorithm.name = _class_name(complete.algorithm.name)
    complete.lock()
    return complete


def owned_defaults(section: str, name: str) -> dict[str, Any]:
    """The keys below a section of `OWNED_SECTIONS` and their defaults.

    Args:
      section: `algorithm` or `data.task_options`.
      name: the algorithm (a name or `path.py:Class`) or the task whose keys they are.

    Raises:
      ConfigError: there is no such algorithm or task.
    """
    # Imported late: a config can be printed and documented without loading an algorithm.
    if section == "algorithm":
        from hjax.algorithms import get_algorithm

        return flatten(get_algorithm(name).default_config())
    from hjax.data.tasks import get_task

    return dict(get_task(name).default_options()) if name else {}


def _class_name(name: str) -> str:
    """An algorithm's name as its class is spelled; a `path.py:Class` stays."""
    from hjax.algorithms import get_algorithm

    return name if ":" in name else get_algorithm(name).__name__


def set_key(config: ConfigDict, key: str, value: Any) -> None:
    """Set a dotted key, making the sections it needs."""
    *sections, last = key.split(".")
    for section in sections:
        if section not in config:
            config[section] = Config()
        config = config[section]
    config[last] = value


def unknown_key(key: str, known: Iterable[str], given: Mapping[str, Any]) -> ConfigError:
    """The error for a key that does not exist: what hjax has for it, or the nearest keys.

    Args:
      key: dotted, without `config.`.
      known: all keys that exist.
      given: dotted key to value, to say which algorithm or task has no such key.
    """
    known = list(known)
    message = f"unknown key config.{key}"
    for section, selector in OWNED_SECTIONS.items():
        if key.startswith(section + ".") and selector in given:
            message += f" (not a key of {given[selector]})"
    if below := [k for k in known if k.startswith(key + ".")]:
        return section_error(key, below)
    if wished := wish(key):
        return ConfigError(f"{message}: {wished}")
    near = nearest_keys(key, known)
    return ConfigError(f"{message}; did you mean {' or '.join('config.' + k for k in near)}?")


def _check_ranges(config: ConfigDict) -> None:
    from hjax.algorithms import get_algorithm

    values = flatten(config)
    rules = {key: definition.rule for key, definition in flatten(KEYS).items()}
    own = get_algorithm(config.algorithm.name).all_keys()
    rules |= {f"algorithm.{name}": key.rule for name, key in own.items()}
    for key, rule in rules.items():
        # A `default_config` of the user's may leave out keys of its base's.
        if rule is not None and key in values and not rule.holds(values[key]):
            raise ConfigError(f"config.{key}={safe_repr(values[key])}: must be {rule.text}")
    for text in config.rollout.stop:
        if not isinstance(text, str) or not text:
            said = safe_repr(text)
            raise ConfigError(
                f"config.rollout.stop={said}: each must be a non-empty string; numbers need quotes "
                "within quotes, \"'12','13'\""
            )


def _check_algorithm(config: ConfigDict) -> None:
    from hjax.algorithms import get_algorithm

    get_algorithm(config.algorithm.name).check(config.algorithm)


def _check_placement(config: ConfigDict) -> None:
    placement = config.placement
    if placement.endswith(".json"):
        if not os.path.isfile(placement):
            raise ConfigError(f"config.placement={placement!r}: no such file")
    elif placement not in PLACEMENTS:
        raise ConfigError(
            f"config.placement={placement!r}: must be one of {', '.join(PLACEMENTS)}, "
            "or the path of a plan.json"
        )


def on_cluster(config: ConfigDict) -> bool:
    """Whether a config asks for processes of a cluster."""
    return bool(config.cluster.address) or config.cluster.processes > 1


def _check_model(config: ConfigDict) -> None:
    model = config.model
    if model.family:
        from hjax.models.families import load_family

        load_family(model.family, "config.model.family")
    if model.hidden_size % model.heads:
        raise ConfigError(
            f"config.model.heads={model.heads} does not divide config.model.hidden_size="
            f"{model.hidden_size}; it may be {divisors(model.hidden_size)}"
        )
    if model.heads % model.kv_heads:
        raise ConfigError(
            f"config.model.kv_heads={model.kv_heads} does not divide config.model.heads="
            f"{model.heads}; it may be {divisors(model.heads)}"
        )


def _check_adapters(config: ConfigDict) -> None:
    """Raise ConfigError where something is said of adapters that there are none of."""
    for role, section in default_config().items():
        if not isinstance(section, ConfigDict) or "lora" not in section or config[role].lora.rank:
            continue
        for name, default in section.lora.items():
            if (value := config[role].lora[name]) != default:
                raise ConfigError(
                    f"config.{role}.lora.{name}={safe_repr(value)} is for adapters, of which "
                    f"config.{role}.lora.rank=0 makes none; set the rank to 1 or more as well, or "
                    f"leave {name} out"
                )


def _check_decay(config: ConfigDict) -> None:
    """Raise ConfigError for weight decay of an optimizer that has none."""
    for role, section in config.items():
        named = section.get("optimizer", "") if isinstance(section, ConfigDict) else ""
        if (named == "adam" or ":" in named) and section.weight_decay:
            raise ConfigError(
                f"config.{role}.weight_decay={section.weight_decay:g}: {named} takes none; use 0, "
                f"or config.{role}.optimizer=adamw"
            )


def _check_batches(config: ConfigDict) -> None:
    prompts, samples = config.rollout.prompts, config.rollout.samples
    batch = prompts * samples
    minibatch = config.algorithm.get("minibatch", 0)
    if minibatch and (minibatch % samples or batch % minibatch):
        allowed = divisors(prompts, samples)
        raise ConfigError(
            f"config.algorithm.minibatch={minibatch} (sequences) must divide the step's batch of "
            f"{prompts} prompts x {samples} samples = {batch} and hold whole groups of {samples}; "
            f"it may be {allowed}"
        )
    from hjax.algorithms import get_algorithm

    learned = minibatch or batch, "mini-batch"
    examples = config.warm_start.batch, "warm_start.batch"
    # A teacher learns from examples, and so does all of an algorithm that generates nothing.
    actor = learned if get_algorithm(config.algorithm.name).generates else examples
    for role, (whole, name) in {"actor": actor, "critic": learned, "teacher": examples}.items():
        micro = config[role].micro_batch
        if micro and whole % micro:
            raise ConfigError(
                f"config.{role}.micro_batch={micro} (sequences) does not divide the {name} of "
                f"{whole}; it may be {divisors(whole)}"
            )


def divisors(n: int, times: int = 1) -> str:
    """The divisors of ``n``, each multiplied by ``times``, as a list in words; of many the ends."""
    low = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    found = [str(i * times) for i in [*low, *(n // i for i in reversed(low) if i * i != n)]]
    if len(found) > _SHOWN:
        found = [*found[: _SHOWN // 2], "...", *found[-_SHOWN // 2 :]]
    return ", ".join(found)
