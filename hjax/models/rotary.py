"""RoPE, rotary position embeddings (Su et al. 2021, arXiv 2104.09864), and its scalings.

Each scaling equals that of transformers with the same ``rope_type`` (``modeling_rope_utils.py``):
frequencies in radians per position, and a factor on cos and sin. Three of them are fixed;
``dynamic`` and ``longrope`` depend on the length of the sequence.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from hjax.errors import ConfigError

Tables = tuple[jax.Array, jax.Array]


def plain_frequencies(theta: float, size: int) -> np.ndarray:
    """float32 [size / 2], ``theta ** -(2 i / size)``, within an ulp of what transformers has.

    Exponents are rounded to float32 as there, and powers are computed exactly in NumPy. XLA would
    multiply by 1 / size, which is inexact unless a power of two; an angle's error is that of its
    frequency times the position.
    """
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    return np.float32(1) / (theta ** exponents.astype(np.float64)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """A scaling of RoPE for longer sequences; a field's metadata has its key in config.json."""

    kind: ClassVar[str]
    depends_on_length: ClassVar[bool] = False  # whether frequencies depend on the sequence's length

    def frequencies(self, theta: float, plain: jax.Array, length: jax.Array) -> jax.Array:
        """The scaled frequencies for sequences of ``length`` tokens.

        Args:
          theta: the base.
          plain: float32 [size / 2], ``theta ** -(2 i / size)``.
          length: int [...], tokens of each sequence.

        Returns:
          float32 [size / 2], or [..., size / 2] where they depend on the length.
        """
        raise NotImplementedError

    @property
    def table_factor(self) -> float:
        """The factor of cos and sin (transformers' attention scaling)."""
        return 1.0


def _field(key: str, **more: Any) -> Any:
    return dataclasses.field(metadata={"key": key}, **more)


@dataclasses.dataclass(frozen=True)
class LinearScaling(RopeScaling):
    """Linear scaling, position interpolation (Chen et al. 2023, arXiv 2306.15595)."""

    kind: ClassVar[str] = "linear"
    factor: float = _field("factor")

    def frequencies(self, theta: float, plain: jax.Array, length: jax.Array) -> jax.Array:
        """All divided by the factor."""
        return plain / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Scaling(RopeScaling):
    """Llama 3's scaling: low frequencies are divided, high ones kept, smooth in between."""

    kind: ClassVar[str] = "llama3"
    factor: float = _field("factor")
    low_frequency_factor: float = _field("low_freq_factor")
    high_frequency_factor: float = _field("high_freq_factor")
    original_max_length: int = _field("original_max_position_embeddings")

    def frequencies(self, theta: float, plain: jax.Array, length: jax.Array) -> jax.Array:
        """Scaled by the number of rotations within the original length."""
        turns = self.original_max_length * plain / (2 * jnp.pi)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        smooth = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
        return plain * (smooth + (1 - smooth) / self.factor)


@dataclasses.dataclass(frozen=True)
class YarnScaling(RopeScaling):
    """YaRN (Peng et al. 2023, arXiv 2309.00071)."""

    kind: ClassVar[str] = "yarn"
    factor: float = _field("factor")
    original_max_length: int = _field("original_max_position_embeddings")
    beta_fast: float = _field("beta_fast", default=32.0)
    beta_slow: float = _field("beta_slow", default=1.0)
    truncate: bool = _field("truncate", default=True)
    attention_factor: float | None = _field("attention_factor", default=None)
    mscale: float | None = _field("mscale", default=None)
    mscale_all_dim: float | None = _field("mscale_all_dim", default=None)

    def frequencies(self, theta: float, plain: jax.Array, length: jax.Array) -> jax.Array:
        """A ramp over the dimensions, from those kept to those divided by the factor."""
        half = plain.shape[0]

        def dimension(turns: float) -> float:
            """The dimension that rotates so often within the original length."""
            within = math.log(self.original_max_length / (turns * 2 * math.pi))
            return half * within / math.log(theta)

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * half - 1)
        high += 0.001 if low == high else 0  # no division by 0
        ramp = jnp.clip((jnp.arange(half, dtype=jnp.float32) - low) / (high - low), 0.0, 1.0)
        return plain / self.factor * ramp + plain * (1 - ramp)

    @property
    def table_factor(self) -> float:
        """The paper's ``0.1 ln(factor) + 1``, unless config.json overrides it."""
        if self.attention_factor is not None:
            return self.attention_factor

        def scale(by: float) -> float:
            return 1.0 if self.factor <= 1 else 0.1 * by * math.log(self.factor) + 1.0

        if self.mscale and self.mscale_all_dim:
            return scale(self.mscale) / scale(self.mscale_all_dim)
        return scale(1.0)


@dataclasses.dataclass(frozen=True)
class DynamicNTKScaling(RopeScaling):
    """Dynamic NTK scaling: a larger base for sequences longer than the model's length."""

    kind: ClassVar[str] = "dynamic"
    depends_on_length: ClassVar[bool] = True
    factor: float = _field("factor")
    original_max_length: int = _field("max_position_embeddings")  # of the model, not the form's

    def frequencies(self, theta: float, plain: jax.Array, length: jax.Array) -> jax.Array:
        """Of the base ``theta * (factor * length / original - (factor - 1)) ** (d / (d - 2))``."""
        size = 2 * plain.shape[0]
        length = jnp.maximum(length, self.original_max_length).astype(jnp.float32)
        stretch = self.factor * length / self.original_max_length - (self.factor - 1)
        exponent = jnp.arange(0, size, 2, dtype=jnp.float32) / size
        return plain * stretch[..., None] ** -(exponent * size / (size - 2))


@dataclasses.dataclass(frozen=True)
class LongRopeScaling(RopeScaling):
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): a divisor for each frequency, with other
    divisors for sequences longer than the original length."""

    kind: ClassVar[str] = "longrope"
    depends_on_length: ClassVar[bool] = True
    short: tuple[float, ...] = _field("short_factor")
    long: tuple[float, ...] = _field("long_factor")
    original_max_length: int = _field("original_max_position_embeddings")
    factor: float | None = _field("factor", default=None)
    attention_factor: float | None = _field("attention_factor", default=None)
    max_length: int = _field("max_position_embeddings", default=0)  # of the model

    def frequencies(self, theta: float, plain: jax.Array, length: jax.Array) -> jax.Array:
        """The long factors where the sequence is longer than the original length."""
        short, long = (jnp.asarray(x, jnp.float32) for x in (self.short, self.long))
        return plain / jnp.where((length > self.original_max_length)[..., None], long, short)

    @property
    def table_factor(self) -> float:
        """``sqrt(1 + ln(stretch) / ln(original length))``, unless config.json overrides it."""
        if self.attention_factor is not None:
            return self.attention_factor
        stretch = self.factor or self.max_length / self.original_max_length
        if stretch <= 1:
            return 1.0
        return math.sqrt(1 + math.log(stretch) / math.log(self.original_max_length))


SCALINGS: dict[str, type[RopeScaling]] = {
    form.kind: form
    for form in (LinearScaling, DynamicNTKScaling, YarnScaling, LongRopeScaling, Llama3Scaling)
}
_UNREAD = ("finetuned", "original_max_position_embeddings")  # of scalings without such a field
_NEUTRAL_AT_1 = ("attn_factor", "extrapolation_factor", "factor")
_OF_MODEL = "max_position_embeddings"  # a scaling's field that is a key of the model


@dataclasses.dataclass(frozen=True)
class Rope:
    """RoPE: its base, its scaling, and the fraction of a head that is rotated (partial RoPE)."""

    theta: float = 10000.0
    scaling: RopeScaling | None = None
    rotary_fraction: float = 1.0

    def check(self, head_dim: int, what: str) -> None:
        """Raise ConfigError if LongRoPE does not have a factor for each rotated pair.

        Args:
          head_dim: of the model.
          what: names the file.
        """
        if not isinstance(self.scaling, LongRopeScaling):
            return
        pairs = self.rotary_dim(head_dim) // 2
        for name in ("short", "long"):
            count = len(getattr(self.scaling, name))
            if count != pairs:
                raise ConfigError(f"{what}: rope {name}_factor has {count} numbers for {pairs}")

    def rotary_dim(self, head_dim: int) -> int:
        """Elements of a head that are rotated; the others are not changed."""
        return int(head_dim * self.rotary_fraction)

    def tables(
        self,
        head_dim: int,
        positions: jax.Array,
        make: Callable[[jax.Array, jax.Array], Tables],
        lengths: jax.Array | None = None,
    ) -> Tables:
        """cos and sin of every position, each float32 [..., 1, rotary_dim / 2].

        Args:
          head_dim: of the model.
          positions: int [..., length], of each token in its sequence.
          make: ``KernelSet.rotary_tables``.
          lengths: int [...], final length of each sequence; None: its largest position + 1.
        """
        plain = jnp.asarray(plain_frequencies(self.theta, self.rotary_dim(head_dim)))
        if self.scaling is None:
            return make(plain, positions)
        lengths = jnp.max(positions, axis=-1) + 1 if lengths is None else lengths
        frequencies = self.scaling.frequencies(self.theta, plain, lengths)
        if not self.scaling.depends_on_length:
            cos, sin = make(frequencies, positions)
        else:
            angles = positions[..., None, None].astype(jnp.float32)
            angles = angles * frequencies[..., None, None, :]
            cos, sin = jnp.cos(angles), jnp.sin(angles)
        factor = self.scaling.table_factor
        return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def stretched_length(ropes: Sequence[Rope], length: int) -> int:
    """Maximal length of a model with ``max_position_embeddings=length``; dynamic NTK multiplies it
    by its factor, which config.json does not include."""
    stretched = (r.scaling.factor for r in ropes if isinstance(r.scaling, DynamicNTKScaling))
    return int(length * max(stretched, default=1.0))


def original_length(ropes: Sequence[Rope], positions: int) -> int:
    """The inverse of ``stretched_length``."""
    own = (r.scaling.original_max_length for r in ropes if isinstance(r.scaling, DynamicNTKScaling))
    return next(own, positions)


def read_scaling(content: Mapping[str, Any], max_length: int, what: str) -> RopeScaling | None:
    """The scaling that ``rope_scaling`` or ``rope_parameters`` describes.

    Args:
      content: its keys, without ``rope_theta`` and ``partial_rotary_factor``.
      max_length: ``max_position_embeddings``.
      what: names the file in errors.

    Raises:
      ConfigError: an unknown ``rope_type``, or a missing or unknown key.
    """
    content = {key: value for key, value in content.items() if value is not None}
    kind = content.pop("rope_type", content.pop("type", "default"))
    kind = {"su": "longrope"}.get(kind, kind)
    if kind != "default" and kind not in SCALINGS:
        raise ConfigError(
            f"{what}: rope_type {kind!r} is not supported; supported: default, "
            f"{', '.join(SCALINGS)}"
        )
    form = SCALINGS.get(kind)
    by_key = {field.metadata["key"]: field for field in dataclasses.fields(form)} if form else {}
    if kind in ("yarn", "llama3", "longrope"):
        content.setdefault("original_max_position_embeddings", max_length)
    if _OF_MODEL in by_key:
        content[_OF_MODEL] = max_length
    missing = [
        key for key, field in by_key.items()
        if field.default is dataclasses.MISSING and key not in content
    ]  # fmt: skip
    if missing:
        raise ConfigError(f"{what}: rope_type {kind!r} needs {', '.join(missing)} too")
    unread = {key for key, x in content.items() if x is False or key in _UNREAD}
    unread |= {key for key in _NEUTRAL_AT_1 if content.get(key) == 1}
    unknown = sorted(set(content) - set(by_key) - unread)
    if unknown:
        raise ConfigError(f"{what}: rope_type {kind!r} knows no {', '.join(unknown)}")
    if form is None:
        return None
    values = {}
    for key, field in by_key.items():
        if key in content:
            what_key = f"{what}: rope {key}"
            values[field.name] = _checked_value(content[key], str(field.type), what_key)
    return form(**values)


def is_number(value: Any) -> bool:
    """Whether it is a finite number, not a bool, that float32 can compute with."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return value == 0 or 1e-30 <= abs(value) <= 1e30


def _checked_value(value: Any, kind: str, what: str) -> Any:
    if kind.startswith("bool"):
        if not isinstance(value, bool):
            raise ConfigError(f"{what} is {value!r}; true or false")
        return value
    every = value if kind.startswith("tuple") and isinstance(value, list | tuple) else [value]
    least = "0 or more" if "mscale" in what else "above 0"
    if not all(is_number(x) and (x > 0 or (x == 0 and "mscale" in what)) for x in every):
        raise ConfigError(f"{what} is {value!r}; finite and {least}")
    if kind.startswith("int"):
        if value != int(value) or not 2 <= value < 2**31:
            raise ConfigError(f"{what} is {value!r}; a whole number from 2 to {2**31 - 1}")
        return int(value)
    if any(x and not 1e-6 <= x <= 1e6 for x in every):
        raise ConfigError(f"{what} is {value!r}; from 1e-6 to 1e6")
    if kind.startswith("tuple"):
        return tuple(float(x) for x in every)
    return float(value)


def write_scaling(scaling: RopeScaling | None) -> dict[str, Any]:
    """The keys that ``read_scaling`` reads, without defaults."""
    if scaling is None:
        return {"rope_type": "default"}
    written: dict[str, Any] = {"rope_type": scaling.kind}
    for field in dataclasses.fields(scaling):
        value = getattr(scaling, field.name)
        if field.metadata["key"] != _OF_MODEL and value is not None and value != field.default:
            written[field.metadata["key"]] = list(value) if isinstance(value, tuple) else value
    return written
