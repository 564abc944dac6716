"""Config validation: names, types and ranges of keys, defaults, and batch arithmetic."""

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from hjax.config import Config, convert, data_path, flatten, nearest_keys, section_error
from hjax.config_aliases import wish
from hjax.errors import ConfigError, safe_repr
from hjax.settings.keys import (
    DEFAULT_RESPONSE_LENGTH,
    KEYS,
    OWNED_SECTIONS,
    PLACEMENTS,
    default_config,
)

# Sections that a run without sequences does not read.
_OF_SEQUENCES = tuple(
    f"{section}."
    for section in ("model", "data", "tokenizer", "teacher", "reward", "environment", "sandbox",
                    "cost", "rollout", "warm_start")
)  # fmt: skip
_MAX_DIVISORS = 24  # most divisors in an error message


def check_config(config: ConfigDict | Mapping[str, Any]) -> Config:
    """Complete and validate a copy of a config.

    Missing keys get their defaults: common keys those of `default_config()`, keys under
    `config.algorithm` those of the algorithm's class. Sizes that depend on the data are resolved
    (`resolve_sizes`). Whether sizes divide over the devices is checked by the Trainer.

    Args:
      config: nested, e.g. `default_config()` with some keys changed.

    Returns:
      a new, locked Config.

    Raises:
      ConfigError: an unknown key (suggests the nearest), a wrong type, a value out of range, or
        batch sizes that do not divide (suggests divisors).
    """
    return resolve_sizes(validate(config))


def resolve_sizes(config: Config) -> Config:
    """Resolve `rollout.max_response_length=0`, which leaves the length to the data.

    Raises:
      ConfigError: there is no such task, or its options are invalid.
    """
    from hjax.algorithms import get_algorithm

    if config.rollout.max_response_length or not get_algorithm(config.algorithm.name).sequences:
        return config
    length = None
    if not data_path(config.data) and config.data.task:
        from hjax.data.tasks import get_task

        length = get_task(config.data.task, **config.data.task_options).response_length
    config.rollout.max_response_length = length or DEFAULT_RESPONSE_LENGTH
    return config


def validate(config: ConfigDict | Mapping[str, Any]) -> Config:
    """`check_config` without `resolve_sizes`, for a config whose data may be chosen later."""
    complete = complete_config(config)
    _check_ranges(complete)
    _check_sequences(complete)
    _check_algorithm(complete)
    _check_placement(complete)
    _check_model(complete)
    _check_batches(complete)
    _check_adapters(complete)
    _check_optimizers(complete)
    _check_best_metric(complete)
    _check_mixture(complete)
    _check_reference(complete)
    _check_evaluation(complete)
    return complete


def complete_config(config: ConfigDict | Mapping[str, Any]) -> Config:
    """Add all missing keys at their defaults; checks names and types, not values.

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
    if not _learns_sequences(given.get("algorithm.name", complete.algorithm.name)):
        if given.get("data.task") == complete.data.task:  # the default of runs that read one
            del given["data.task"]
        complete.data.task = ""
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


def _learns_sequences(name: Any) -> bool:
    from hjax.algorithms import get_algorithm

    return get_algorithm(name).sequences if isinstance(name, str) else True


def _check_sequences(config: ConfigDict) -> None:
    """Raise ConfigError for a setting of sequences in a run that has none."""
    if _learns_sequences(config.algorithm.name):
        return
    defaults = flatten(default_config()) | {"data.task": ""}
    for key, value in flatten(config).items():
        section = key.startswith(_OF_SEQUENCES) or ".lora." in key
        if section and value != defaults.get(key, value):
            raise ConfigError(
                f"config.{key}={safe_repr(value)}: {config.algorithm.name} learns from arrays of "
                "its own making, not from sequences of tokens (sequences = False), and would not "
                "read it; leave it out, or give the algorithm a key of its own"
            )


def owned_defaults(section: str, name: str) -> dict[str, Any]:
    """Keys and defaults of a section of `OWNED_SECTIONS`.

    Args:
      section: `algorithm` or `data.task_options`.
      name: the algorithm (a name or `path.py:Class`) or the task that defines the keys.

    Raises:
      ConfigError: there is no such algorithm or task.
    """
    # Imported late, so that a config can be printed without loading an algorithm.
    if section == "algorithm":
        from hjax.algorithms import get_algorithm

        return flatten(get_algorithm(name).default_config())
    from hjax.data.tasks import get_task

    return dict(get_task(name).default_options()) if name else {}


def _class_name(name: str) -> str:
    """Canonical name of an algorithm: its class's; a `path.py:Class` is unchanged."""
    from hjax.algorithms import get_algorithm

    return name if ":" in name else get_algorithm(name).__name__


def set_key(config: ConfigDict, key: str, value: Any) -> None:
    """Set a dotted key, creating its sections."""
    *sections, last = key.split(".")
    for section in sections:
        if section not in config:
            config[section] = Config()
        config = config[section]
    config[last] = value


def unknown_key(key: str, known: Iterable[str], given: Mapping[str, Any]) -> ConfigError:
    """The error for an unknown key, with hjax's key for another library's alias, or the nearest.

    Args:
      key: dotted, without `config.`.
      known: all existing keys.
      given: dotted key to value; tells the algorithm or task that lacks the key.
    """
    known = list(known)
    message = f"unknown key config.{key}"
    for section, selector in OWNED_SECTIONS.items():
        if key.startswith(section + ".") and selector in given:
            message += f" (not a key of {given[selector]})"
    if below := [k for k in known if k.startswith(key + ".")]:
        return section_error(key, below)
    if alias := wish(key):
        return ConfigError(f"{message}: {alias}")
    near = nearest_keys(key, known)
    return ConfigError(f"{message}; did you mean {' or '.join('config.' + k for k in near)}?")


def _check_ranges(config: ConfigDict) -> None:
    from hjax.algorithms import get_algorithm

    values = flatten(config)
    rules = {key: definition.rule for key, definition in flatten(KEYS).items()}
    own = get_algorithm(config.algorithm.name).all_keys()
    rules |= {f"algorithm.{name}": key.rule for name, key in own.items()}
    for key, rule in rules.items():
        # A user's `default_config` may omit keys of its base class.
        if rule is not None and key in values and not rule.holds(values[key]):
            raise ConfigError(f"config.{key}={safe_repr(values[key])}: must be {rule.text}")
    for key, value in values.items():
        if isinstance(value, float) and value != 0 and not 1e-20 <= abs(value) <= 1e12:
            raise ConfigError(
                f"config.{key}={value!r}: must be 0, or from 1e-20 to 1e+12 in magnitude"
            )
    for text in config.rollout.stop:
        if not isinstance(text, str) or not text:
            said = safe_repr(text)
            raise ConfigError(
                f"config.rollout.stop={said}: each must be a non-empty string; numbers need quotes "
                "within quotes, \"'12','13'\""
            )


def _check_algorithm(config: ConfigDict) -> None:
    from hjax.algorithms import get_algorithm

    algorithm = get_algorithm(config.algorithm.name)
    algorithm.check(config.algorithm)
    algorithm.check_samples(config.algorithm, config.rollout.samples)


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
    """Whether a config uses cluster processes."""
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
    """Raise ConfigError for LoRA keys of a role whose rank is 0."""
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


def _check_evaluation(config: ConfigDict) -> None:
    if config.eval.samples > 1 and config.rollout.extra_samples:
        raise ConfigError(
            f"config.eval.samples={config.eval.samples} with rollout.extra_samples="
            f"{config.rollout.extra_samples}: the shortest answers alone would be scored; leave "
            "one of the two out"
        )


def _check_reference(config: ConfigDict) -> None:
    if config.reference.sync_every and config.reference.path:
        raise ConfigError(
            f"config.reference.sync_every={config.reference.sync_every}: a reference that follows "
            "the actor begins as the actor; leave reference.path empty"
        )


def _check_mixture(config: ConfigDict) -> None:
    data = config.data
    for key in ("path", "weights"):
        if data.mixture and data[key]:
            raise ConfigError(
                f"config.data.{key}={data[key]} beside config.data.mixture, which names its files "
                "with their weights; leave one of the two out"
            )


def _check_best_metric(config: ConfigDict) -> None:
    """Check that evaluations meet checkpoints, if the best one is chosen by them."""
    metric, saved, evaluated = config.checkpoint.best, config.checkpoint.every, config.eval.every
    if not metric.startswith("eval/"):
        return
    if not evaluated:
        raise ConfigError(
            f"config.checkpoint.best={metric}: nothing is evaluated; set config.eval.every above 0"
        )
    if saved and saved % evaluated and evaluated % saved:
        raise ConfigError(
            f"config.checkpoint.best={metric}: evaluations every {evaluated} steps rarely meet "
            f"checkpoints every {saved}; make one of eval.every and checkpoint.every a multiple of "
            "the other"
        )


def _check_optimizers(config: ConfigDict) -> None:
    """Raise ConfigError for weight decay with an optimizer that has none, for warm-up said twice,
    and for the end of a schedule that has none."""
    for role, section in config.items():
        trained = isinstance(section, ConfigDict) and "schedule" in section
        if trained and section.warmup_updates and section.warmup_ratio:
            raise ConfigError(
                f"config.{role}.warmup_ratio={section.warmup_ratio:g} beside warmup_updates="
                f"{section.warmup_updates}; leave one of the two at 0"
            )
        if trained and section.min_lr_ratio and section.schedule == "constant":
            raise ConfigError(
                f"config.{role}.min_lr_ratio={section.min_lr_ratio:g}: a constant schedule has no "
                f"end; set config.{role}.schedule to cosine or linear"
            )
        named = section.get("optimizer", "") if isinstance(section, ConfigDict) else ""
        if (named == "adam" or ":" in named) and section.weight_decay:
            raise ConfigError(
                f"config.{role}.weight_decay={section.weight_decay:g}: {named} takes none; use 0, "
                f"or config.{role}.optimizer=adamw"
            )


def _check_batches(config: ConfigDict) -> None:
    if not _learns_sequences(config.algorithm.name):
        return
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

    algorithm = get_algorithm(config.algorithm.name)
    # Demonstrations paired with responses are as many rows again.
    unit = 1 if algorithm.source == "prompts" else algorithm.unit
    learned = (minibatch or batch) * unit, "mini-batch"
    examples = config.warm_start.batch, "warm_start.batch"
    # A teacher learns from examples, and so does all of an algorithm that generates nothing.
    actor = learned if algorithm.generates else examples
    for role, (whole, name) in {"actor": actor, "critic": learned, "teacher": examples}.items():
        micro = config[role].micro_batch
        if micro and whole % micro:
            raise ConfigError(
                f"config.{role}.micro_batch={micro} (sequences) does not divide the {name} of "
                f"{whole}; it may be {divisors(whole)}"
            )


def divisors(n: int, times: int = 1) -> str:
    """The divisors of ``n``, each times ``times``, as text; the middle of a long list is cut."""
    low = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    found = [str(i * times) for i in [*low, *(n // i for i in reversed(low) if i * i != n)]]
    if len(found) > _MAX_DIVISORS:
        found = [*found[: _MAX_DIVISORS // 2], "...", *found[-_MAX_DIVISORS // 2 :]]
    return ", ".join(found)
