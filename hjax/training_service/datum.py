"""Data of a loss: checked, and padded into batches of few shapes."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hjax.errors import ConfigError
from hjax.training_service.token_losses import DatumLoss

TARGETS = "target_tokens"
# Lengths are padded to these at least, in tokens.
_SHORTEST = 32


@dataclasses.dataclass(frozen=True)
class Datum:
    """One sequence and what its loss reads.

    A target is what follows its position: nothing is shifted. So a text of n + 1 tokens is given as
    its first n tokens with its last n as targets.

    Attributes:
      tokens: ids int [N], what the model reads.
      inputs: by name, arrays in the shape of the targets. ``target_tokens`` are ids int [N], or
        with ``cross_entropy`` [N, K], several per position. The others are floats: ``weights`` of
        ``cross_entropy`` (any sign; 1 if left out), ``logprobs`` and ``advantages`` of the policy
        losses, ``sequence_ratio_mask`` (0 or 1) of ``gspo``.
    """

    tokens: Any
    inputs: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class DatumBatch:
    """A micro-batch of padded data.

    Attributes:
      rows: which data the rows are, by their index; later rows are padding.
      arrays: ``tokens`` int32 and ``mask`` bool [R, L]; ``target_tokens`` int32 and the loss's
        inputs, float32 [R, L] or [R, L, K].
    """

    rows: tuple[int, ...]
    arrays: dict[str, np.ndarray]


def check_datum(
    datum: Datum, label: str, loss: DatumLoss, *, vocab: int, longest: int, unread: bool = False
) -> Datum:
    """A datum as numpy arrays of the right dtypes, with the loss's inputs alone.

    Args:
      datum: as it was given.
      label: its name in messages.
      loss: that will read it.
      unread: allow inputs that the loss does not read; they are dropped.
      vocab: token ids are below it.
      longest: tokens that the model reads at most.

    Raises:
      ConfigError: ids outside of the vocabulary, no tokens or too many, an input that is missing,
        unknown, of another shape or not finite.
    """
    tokens = _whole(datum.tokens, f"{label}: tokens", vocab)
    if tokens.ndim != 1 or not 0 < len(tokens) <= longest:
        raise ConfigError(
            f"{label}: tokens are {list(tokens.shape)}; [N] is wanted, with N from 1 to {longest}"
        )
    if TARGETS not in datum.inputs:
        raise ConfigError(f"{label}: {TARGETS} is missing")
    targets = _whole(datum.inputs[TARGETS], f"{label}: {TARGETS}", vocab)
    if targets.ndim not in (1, 2) or len(targets) != len(tokens) or 0 in targets.shape:
        raise ConfigError(
            f"{label}: {TARGETS} are {list(targets.shape)} for {len(tokens)} tokens; give one per "
            "token [N], or several [N, K]"
        )
    if targets.ndim == 2 and not loss.several:
        raise ConfigError(
            f"{label}: {TARGETS} are {list(targets.shape)}; loss {loss.name!r} takes one per "
            "token, [N]"
        )
    inputs = {TARGETS: targets}
    known = (*loss.needs, *loss.optional)
    for name in datum.inputs:
        if name not in (TARGETS, *known) and not unread:
            raise ConfigError(
                f"{label}: loss {loss.name!r} reads no {name!r}; it reads "
                f"{', '.join((TARGETS, *known))}"
            )
    for name in known:
        if name in datum.inputs:
            inputs[name] = _floats(datum.inputs[name], f"{label}: {name}", targets.shape)
        elif name in loss.optional:
            inputs[name] = np.full(targets.shape, loss.optional[name], np.float32)
        else:
            raise ConfigError(f"{label}: loss {loss.name!r} needs {name!r}")
    return Datum(tokens, inputs)


def _whole(values: Any, label: str, vocab: int) -> np.ndarray:
    """Token ids as int32."""
    try:
        array = np.asarray(values)
    except ValueError:
        raise ConfigError(f"{label}: rows of different lengths; an array is wanted") from None
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ConfigError(f"{label} are {array.dtype}; whole numbers are wanted")
    if array.size and not (0 <= array.min() and array.max() < vocab):
        wrong = array.min() if array.min() < 0 else array.max()
        raise ConfigError(f"{label}: id {wrong} is outside the vocabulary, 0 to {vocab - 1}")
    return array.astype(np.int32)


def _floats(values: Any, label: str, shape: tuple[int, ...]) -> np.ndarray:
    try:
        array = np.asarray(values, np.float32)
    except (ValueError, TypeError):
        raise ConfigError(f"{label}: an array of numbers is wanted") from None
    if array.shape != shape:
        raise ConfigError(f"{label} has shape {list(array.shape)}, its targets {list(shape)}")
    if not np.isfinite(array).all():
        raise ConfigError(f"{label} has values that are not finite")
    return array


def batches_of(
    data: Sequence[Datum], tokens: int, longest: int, shards: int = 1
) -> Iterator[DatumBatch]:
    """Checked data in micro-batches of similar lengths, padded to few shapes.

    Args:
      data: as of ``check_datum``, at least one.
      tokens: that a micro-batch holds at most, padding included; one row may hold more.
      longest: tokens that the model reads at most.
      shards: parts into which a micro-batch's rows are split; ``tokens`` are of one part.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for index, datum in enumerate(data):
        targets = datum.inputs[TARGETS]
        several = 0 if targets.ndim == 1 else _power_of_two(targets.shape[1])
        shape = padded_length(len(datum.tokens), longest), several
        groups.setdefault(shape, []).append(index)
    for (length, several), members in sorted(groups.items()):
        most = shards << (max(tokens // length, 1).bit_length() - 1)
        for at in range(0, len(members), most):
            part = tuple(members[at : at + most])
            yield _padded(
                [data[i] for i in part], part, length=length, several=several, shards=shards
            )


def padded_length(length: int, longest: int) -> int:
    """The length that a sequence is padded to: a power of two or 1.5 times one, at most
    ``longest``."""
    whole = max(_power_of_two(length), _SHORTEST)
    between = whole * 3 // 4
    return min(between if length <= between and between >= _SHORTEST else whole, longest)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _padded(
    data: list[Datum], members: tuple[int, ...], length: int, several: int, shards: int
) -> DatumBatch:
    rows = shards * _power_of_two(-(-len(data) // shards))
    arrays = {"tokens": np.zeros((rows, length), np.int32), "mask": np.zeros((rows, length), bool)}
    shape = (rows, length, several) if several else (rows, length)
    for name, value in data[0].inputs.items():
        arrays[name] = np.zeros(shape, value.dtype)
    for row, datum in enumerate(data):
        count = len(datum.tokens)
        arrays["tokens"][row, :count], arrays["mask"][row, :count] = datum.tokens, True
        for name, value in datum.inputs.items():
            whole = arrays[name][row]
            whole[tuple(slice(n) for n in value.shape)] = value
    return DatumBatch(members, arrays)
