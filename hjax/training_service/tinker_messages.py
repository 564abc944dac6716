"""The protobuf messages of the Tinker API: requests for gradients, their results, and samples.

Field numbers are those of package ``tinker_public`` in SDK 0.38.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hjax.errors import ConfigError, short_repr
from hjax.rollout.prompt_log_probs import Top
from hjax.training_service.datum import Datum
from hjax.training_service.learner import LossOutput
from hjax.training_service.protobuf import (
    Value,
    as_bytes,
    as_int32,
    as_number,
    as_text,
    bytes_field,
    double_field,
    int_field,
    last_fields,
    read_fields,
    read_ints,
    varint,
)
from hjax.training_service.snapshot_sampler import SampleResult
from hjax.training_service.tinker_requests import ID_LENGTH

_DTYPES: Mapping[int, Any] = {1: np.float32, 2: np.int64, 3: np.int32}
_FLOAT32, _BFLOAT16 = 1, 4
# Log-prob of an empty place in a table of top tokens.
_NO_LOGPROB = -99999.0
# Values of all arrays of a request at most: a sparse one's bytes say little of its size.
_MOST_VALUES = 2**26
# Fields of a message at most: each takes many times its bytes once it is read.
_MOST_DATA, _MOST_PARTS = 2**13, 2**10


@dataclasses.dataclass(frozen=True)
class ForwardBackwardRequest:
    """A request for a loss, its log-probs and its gradients.

    Attributes:
      model_id: of the model.
      seq_id: number of the request among the model's.
      data: as protobuf messages, see ``read_datum``.
      loss: name of the loss.
      config: its settings.
      forward_only: without gradients.
    """

    model_id: str
    seq_id: int
    data: tuple[bytes, ...]
    loss: str
    config: Mapping[str, Any]
    forward_only: bool


def read_forward_backward(body: bytes) -> ForwardBackwardRequest:
    """A request from its message; ConfigError if it is damaged."""
    found: dict[str, Any] = {"model_id": "", "seq_id": 0, "loss": "", "forward_only": False}
    data: list[bytes] = []
    old: dict[str, Any] = {}
    new: dict[str, Any] = {}
    for number, value in read_fields(body, _MOST_DATA):
        if number == 1:
            found["model_id"] = as_text(value)
        elif number == 2:
            found["seq_id"] = as_int32(value)
        elif number == 3:
            data.append(as_bytes(value))
        elif number == 4:
            found["loss"] = as_text(value)
        elif number == 5:
            entry = last_fields(as_bytes(value))
            old[as_text(entry.get(1, b""))] = as_number(entry.get(2, 0.0))
        elif number == 6:
            found["forward_only"] = bool(value)
        elif number == 7:
            entry = last_fields(as_bytes(value))
            setting = last_fields(as_bytes(entry.get(2, b"")))
            told = as_text(setting[2]) if 2 in setting else as_number(setting.get(1, 0.0))
            new[as_text(entry.get(1, b""))] = told
    for name in ("model_id", "loss"):
        if len(found[name]) > ID_LENGTH:
            raise ConfigError(f"{name} has {len(found[name])} characters: at most {ID_LENGTH}")
    return ForwardBackwardRequest(data=tuple(data), config=new or old, **found)


def read_data(messages: Sequence[bytes]) -> list[Datum]:
    """The data of a request; ConfigError as of ``read_datum``, and for too many values."""
    found, left = [], _MOST_VALUES
    for message in messages:
        found.append(read_datum(message, left))
        left -= sum(array.size for array in found[-1].inputs.values())
    return found


def read_datum(message: bytes, most: int = _MOST_VALUES) -> Datum:
    """A datum from its message, of so many values at most.

    Raises:
      ConfigError: it is damaged, or has something else than text.
    """
    tokens: list[np.ndarray] = []
    inputs: dict[str, np.ndarray] = {}
    for number, value in read_fields(message, _MOST_PARTS):
        if number == 1:
            chunk = last_fields(as_bytes(value))
            if 1 not in chunk:
                kind = {2: "images", 3: "audio"}.get(next(iter(chunk), 0), "such chunks")
                raise ConfigError(f"{kind} are not supported: chunks of text tokens alone")
            text = last_fields(as_bytes(chunk[1]))
            tokens.append(_array(as_bytes(text.get(1, b"")), np.int32))
        elif number == 2:
            entry = last_fields(as_bytes(value))
            array = read_tensor(as_bytes(entry.get(2, b"")), most)
            most -= array.size
            inputs[as_text(entry.get(1, b""))] = array
    return Datum(np.concatenate(tokens) if tokens else np.zeros(0, np.int32), inputs)


def read_tensor(message: bytes, most: int = _MOST_VALUES) -> np.ndarray:
    """An array of so many values at most from its message; a sparse one (CSR) is 0 elsewhere.

    Raises:
      ConfigError: it is damaged, or of another dtype than float32, bfloat16, int32 and int64.
    """
    dense, sparse, number, shape = b"", None, 0, list[int]()
    for field, value in read_fields(message, _MOST_PARTS):
        if field == 1:
            dense = as_bytes(value)
        elif field == 2:
            sparse = last_fields(as_bytes(value))
        elif field == 3:
            number = as_int32(value)
        elif field == 4:
            shape += read_ints(value)
    if len(shape) > 2 or max([math.prod(shape), *shape]) > most:
        raise ConfigError(
            f"an array of shape {short_repr(shape)}: at most {_MOST_VALUES} values over a request, "
            "as [N] or [N, K]"
        )
    if sparse is not None:
        return _dense(sparse, number, shape)
    values = _values(dense, number)
    try:
        return values.reshape(shape) if shape else values
    except ValueError:
        raise ConfigError(f"{values.size} values do not fill an array of shape {shape}") from None


def _dense(sparse: Mapping[int, Value], number: int, shape: list[int]) -> np.ndarray:
    values = _values(as_bytes(sparse.get(1, b"")), number)
    starts = _array(as_bytes(sparse.get(2, b"")), np.int64)
    columns = _array(as_bytes(sparse.get(3, b"")), np.int64)
    fits = len(shape) == 2 and len(starts) == shape[0] + 1 and len(columns) == len(values)
    counts = np.diff(starts)
    if not fits or starts[0] != 0 or starts[-1] != len(values) or (counts < 0).any():
        raise ConfigError(f"a sparse array (CSR) does not fit its shape {shape}")
    if len(columns) and not (0 <= columns.min() and columns.max() < shape[1]):
        raise ConfigError(f"a sparse array (CSR) has columns outside of its shape {shape}")
    made = np.zeros(shape, values.dtype)
    made[np.repeat(np.arange(shape[0]), counts), columns] = values
    return made


def _values(data: bytes, number: int) -> np.ndarray:
    if number == _BFLOAT16:  # the upper half of a float32
        return (_array(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    if number not in _DTYPES:
        raise ConfigError(f"an array of dtype number {number} is not supported")
    return _array(data, _DTYPES[number])


def _array(data: bytes, dtype: Any) -> np.ndarray:
    if len(data) % np.dtype(dtype).itemsize:
        raise ConfigError(f"{len(data)} bytes are no whole number of {np.dtype(dtype)} values")
    return np.frombuffer(data, dtype)


def write_output(output: LossOutput) -> bytes:
    """A ``ForwardBackwardOutput``: log-probs of each datum, and the loss as ``loss:sum``."""
    made = bytes_field(1, "ArrayRecord")
    # One record holds rows of the same trailing shape; the order of the data is kept.
    at, rows = 0, output.logprobs
    while at < len(rows):
        trailing, start = rows[at].shape[1:], at
        while at < len(rows) and rows[at].shape[1:] == trailing:
            at += 1
        made += bytes_field(2, _record(rows[start:at], trailing))
    return made + bytes_field(3, bytes_field(1, "loss:sum") + double_field(2, output.loss))


def _record(rows: Sequence[np.ndarray], trailing: tuple[int, ...]) -> bytes:
    arrays = [np.ascontiguousarray(row, np.float32) for row in rows]
    offsets = np.cumsum([0, *(x.nbytes for x in arrays)]).astype(np.int64)
    batched = bytes_field(1, b"".join(x.tobytes() for x in arrays))
    batched += bytes_field(2, offsets.tobytes()) + int_field(3, _FLOAT32)
    if trailing:
        batched += bytes_field(4, b"".join(map(varint, trailing)))
    return bytes_field(2, bytes_field(1, "logprobs") + bytes_field(2, batched)) + int_field(
        3, len(arrays)
    )


def write_samples(
    result: SampleResult, *, top: int, prompt_logprobs: bool, prompt_top: int, last: int | None
) -> bytes:
    """A ``SampleResponse``.

    Args:
      result: what was drawn.
      top: tokens reported of each response position.
      prompt_logprobs: whether the prompt's log-probs are reported.
      prompt_top: tokens reported of each prompt position.
      last: prompt tokens from the end that are reported; None: all.
    """
    made = b""
    for each in result.sequences:
        sequence = int_field(1, {"stop": 0, "length": 1}[each.stop_reason])
        sequence += bytes_field(2, np.array(each.tokens, np.int32).tobytes())
        sequence += bytes_field(3, np.array(each.logprobs, np.float32).tobytes())
        if top:
            sequence += bytes_field(4, _top_table(each.top, top))
        made += bytes_field(1, sequence)
    if result.prompt is None:
        return made
    scores = np.array([math.nan, *result.prompt.logprobs], np.float32)
    tops: list[Top] = [(), *result.prompt.top]
    for position in range(len(scores) - last if last is not None else 0):
        scores[position], tops[position] = math.nan, ()
    if prompt_logprobs:
        made += bytes_field(2, scores.tobytes())
    if prompt_top:
        made += bytes_field(3, _top_table(tops, prompt_top))
    return made


def _top_table(rows: Sequence[Top], count: int) -> bytes:
    ids = np.zeros((len(rows), count), np.int32)
    values = np.full((len(rows), count), _NO_LOGPROB, np.float32)
    for position, row in enumerate(rows):
        for place, (token, logprob) in enumerate(row[:count]):
            ids[position, place], values[position, place] = token, logprob
    made = bytes_field(1, ids.tobytes()) + bytes_field(2, values.tobytes())
    return made + int_field(3, count) + int_field(4, len(rows))
