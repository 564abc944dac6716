"""The Tinker API's protobuf messages: hand-worked bytes, sparse arrays, and damage."""

import math
import struct

import numpy as np
import pytest
from training_server import datum, tensor

from hjax.errors import ConfigError
from hjax.rollout.prompt_log_probs import PromptLogProbs
from hjax.training_service.learner import LossOutput
from hjax.training_service.protobuf import (
    bytes_field,
    double_field,
    int_field,
    last_fields,
    read_fields,
    read_ints,
    varint,
)
from hjax.training_service.snapshot_sampler import SampledSequence, SampleResult
from hjax.training_service.tinker_messages import (
    read_datum,
    read_forward_backward,
    read_tensor,
    write_output,
    write_samples,
)


def test_numbers_are_as_the_documentation_has_them():
    """protobuf.dev's own examples: 150 in field 1, "testing" in field 2."""
    assert int_field(1, 150) == bytes.fromhex("089601")
    assert bytes_field(2, "testing") == bytes.fromhex("120774657374696e67")
    assert double_field(1, 1.5) == b"\x09" + struct.pack("<d", 1.5)
    assert list(read_fields(bytes.fromhex("08960112077465737469 6e67"))) == [
        (1, 150), (2, b"testing"),
    ]  # fmt: skip
    assert read_ints(bytes.fromhex("8e0286a703")[:2]) == [270]
    assert varint(300) == b"\xac\x02"


def test_a_request_is_read():
    body = bytes_field(1, "s:train:0") + int_field(2, 7) + bytes_field(4, "ppo")
    body += bytes_field(3, datum([5, 6], target_tokens=np.array([6, 7])))
    body += bytes_field(5, bytes_field(1, "old") + double_field(2, 1.0))
    setting = bytes_field(1, "clip_low_threshold") + bytes_field(2, double_field(1, 0.9))
    body += bytes_field(7, setting)
    found = read_forward_backward(body)
    assert (found.model_id, found.seq_id, found.loss) == ("s:train:0", 7, "ppo")
    assert found.config == {"clip_low_threshold": 0.9} and not found.forward_only
    [one] = map(read_datum, found.data)
    assert one.tokens.tolist() == [5, 6] and one.inputs["target_tokens"].tolist() == [6, 7]


def test_sparse_arrays_are_0_elsewhere():
    csr = bytes_field(1, np.array([2.5, -1, 4], np.float32).tobytes())
    csr += bytes_field(2, np.array([0, 1, 1, 3]).tobytes())
    csr += bytes_field(3, np.array([1, 0, 1]).tobytes())
    shape = bytes_field(4, varint(3) + varint(2))
    found = read_tensor(bytes_field(2, csr) + int_field(3, 1) + shape)
    np.testing.assert_array_equal(found, [[0, 2.5], [0, 0], [-1, 4]])


def test_bfloat16_is_the_upper_half_of_float32():
    halves = np.array([0x3FC0, 0xC000], np.uint16)  # 1.5, -2
    found = read_tensor(bytes_field(1, halves.tobytes()) + int_field(3, 4))
    assert found.tolist() == [1.5, -2.0] and found.dtype == np.float32


@pytest.mark.parametrize(
    "message, why",
    [
        (bytes_field(1, b"123") + int_field(3, 1), "3 bytes are no whole number of float32"),
        (tensor(np.zeros(3, np.float32)) + int_field(4, 2), "do not fill an array of shape"),
        (int_field(3, 9), "dtype number 9"),
        (int_field(3, 1) + int_field(4, 2**20) + int_field(4, 2**20), "at most 67108864 values"),
        (
            bytes_field(2, bytes_field(2, np.array([0, 5]).tobytes()))
            + int_field(3, 1) + int_field(4, 1) + int_field(4, 4),
            "does not fit its shape",
        ),
        (
            bytes_field(
                2,
                bytes_field(1, np.ones(1, np.float32).tobytes())
                + bytes_field(2, np.array([0, 1]).tobytes())
                + bytes_field(3, np.array([4]).tobytes()),
            )
            + int_field(3, 1) + int_field(4, 1) + int_field(4, 4),
            "columns outside",
        ),
    ],
)  # fmt: skip
def test_arrays_that_are_none_are_refused(message, why):
    with pytest.raises(ConfigError, match=why):
        read_tensor(message)


def test_images_are_refused_by_name():
    with pytest.raises(ConfigError, match="images are not supported"):
        read_datum(bytes_field(1, bytes_field(2, bytes_field(1, b"png"))))


def test_damage_is_one_kind_of_error():
    whole = bytes_field(1, "m:train:0") + int_field(2, 1) + bytes_field(4, "cross_entropy")
    whole += bytes_field(
        3, datum([1, 2, 3], target_tokens=np.array([2, 3, 4]), weights=[1.0, 0, 2])
    )
    draw = np.random.default_rng(0)
    failed = 0
    for number in range(3000):
        body = bytearray(whole)
        for _ in range(draw.integers(1, 4)):
            body[draw.integers(len(body))] = draw.integers(256)
        body = bytes(body[: draw.integers(len(body) + 1)]) if number % 2 else bytes(body)
        try:
            for each in read_forward_backward(body).data:
                read_datum(each)
        except ConfigError:
            failed += 1
    assert failed > 1000


def test_outputs_of_several_widths_are_records_of_their_own():
    rows = [np.array([-1.0, -2.0]), np.zeros((2, 3)), np.ones((1, 3))]
    output = write_output(LossOutput(2.5, [x.astype(np.float32) for x in rows]))
    fields = list(read_fields(output))
    assert [number for number, _ in fields] == [1, 2, 2, 3]
    first, second = (last_fields(value) for number, value in fields if number == 2)
    assert first[3] == 1 and second[3] == 2
    batched = last_fields(last_fields(second[2])[2])
    assert np.frombuffer(batched[2], np.int64).tolist() == [0, 24, 36]
    assert read_ints(batched[4]) == [3]
    batched = last_fields(last_fields(first[2])[2])
    assert np.frombuffer(batched[1], np.float32).tolist() == [-1, -2] and 4 not in batched


def test_samples_and_their_prompts():
    sequence = SampledSequence((4, 9), (-0.5, -1.5), "stop", (((4, -0.5), (2, -1.0)), ((9, -1.5),)))
    prompt = PromptLogProbs((-0.25, -0.75), (((8, -0.25),), ((3, -0.1), (7, -0.75))))
    made = write_samples(
        SampleResult((sequence,), prompt), top=2, prompt_logprobs=True, prompt_top=2, last=1
    )
    fields = last_fields(made)
    one = last_fields(fields[1])
    assert one[1] == 0 and np.frombuffer(one[2], np.int32).tolist() == [4, 9]
    table = last_fields(one[4])
    assert np.frombuffer(table[1], np.int32).tolist() == [4, 2, 9, 0]
    assert np.frombuffer(table[2], np.float32)[3] == -99999
    scores = np.frombuffer(fields[2], np.float32)
    assert math.isnan(scores[0]) and math.isnan(scores[1]) and scores[2] == -0.75
    top = last_fields(fields[3])
    assert (top[3], top[4]) == (2, 3)
    assert np.frombuffer(top[1], np.int32).tolist() == [0, 0, 0, 0, 3, 7]
