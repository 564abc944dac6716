"""``rollout.slots=-1``: how many sequences are generated at a time, by the memory that is left."""

import pytest
from helpers import trainer_of
from test_run_rematerialise import GIB, chosen

from hjax.dryrun.description import describe
from hjax.errors import ConfigError
from hjax.planning.auto import _waves

ASKED = {"rollout.slots": -1, "rollout.prompts": 128, "rollout.samples": 2}


STAGES = {
    "layout.actor.train.fsdp": 4, "layout.actor.train.pipe": 2, "layout.actor.generate.pipe": 2
}  # fmt: skip


@pytest.mark.parametrize(("stages", "platform", "spare"), [(1, "gpu", 64), (2, "tpu", 0)])
@pytest.mark.extended
def test_less_memory_fewer_sequences(stages, platform, spare):
    asked = ASKED | (STAGES if stages > 1 else {})
    found = [chosen(platform, n * GIB, **asked).slots for n in range(40, 240, 8)]
    slots = [room.slots or room.sequences for room in found]
    assert slots == sorted(slots) and slots[0] < slots[-1] == 256 and found[-1].slots == 0
    # By hand: a token of llama-7b is 2 x 32 layers x 32 heads x 128 x 2 bytes, split over the
    # tensor axis of generation; prompts once for both answers, which have columns to spare where
    # no kernel has each row's tokens begin in column 0, as a TPU's does. A stage has its own
    # layers' alone.
    room = [r for r in found if r.slots][-1]
    layout = chosen(memory=GIB, **asked).layouts["actor"].generate
    assert layout.shard_count("layers") == stages
    groups = room.slots / 2 / layout.shard_count("batch")
    assert groups % stages == 0
    token = 2 * 32 / stages * 32 * 128 * 2 / layout.shard_count("heads")
    assert room.cache_bytes == groups * (512 + 2 * (3072 + spare)) * token
    assert room.cache_bytes < room.usable_bytes


def test_int8_has_room_for_more():
    """By hand: a byte for each number and four for a scale, of heads of 128."""
    for memory in (80 * GIB, 96 * GIB):
        plain, small = (
            chosen(memory=memory, **ASKED, **{"rollout.cache_dtype": kept}).slots
            for kept in ("auto", "int8")
        )
        assert 0 < plain.slots < (small.slots or small.sequences)
    layout = chosen(memory=GIB, **ASKED).layouts["actor"].generate
    token = 2 * 32 * 32 * (128 + 4) / layout.shard_count("heads")
    groups = (small.slots or small.sequences) / 2 / layout.shard_count("batch")
    assert small.cache_bytes == groups * (512 + 2 * 3072) * token
    assert "keys and values in int8 take" in small.why and "int8" not in plain.why


def test_the_workers_get_it_and_it_says_why():
    roles = chosen(memory=64 * GIB, **ASKED)
    assert 0 < roles.slots.slots < 256
    assert roles.builds["actor"].arguments[0].slots == roles.slots.slots
    assert f"{roles.slots.slots} of the 256 sequences" in roles.slots.why
    tight = chosen(memory=20 * GIB, **ASKED)
    assert tight.slots.slots == 2 * tight.layouts["actor"].generate.shard_count("batch")
    assert "more than the" in tight.slots.why
    unknown = chosen("cpu", memory=0, **ASKED)
    assert unknown.slots.slots == unknown.builds["actor"].arguments[0].slots == 0
    assert "do not say" in unknown.slots.why
    assert chosen(memory=64 * GIB).slots is None  # nobody asked


@pytest.mark.extended
def test_the_programs_of_so_many_fit(monkeypatch):
    """By the compiler: what the dry run counts of every program, beside what is kept."""
    keys = {
        "rollout.slots": -1, "rollout.prompts": 64, "rollout.samples": 4, "model.layers": 4,
        "rollout.max_response_length": 240, "model.unroll_layers": True, "warm_start.steps": 0,
        "model.hidden_size": 128, "actor.micro_batch": 8,
    }  # fmt: skip
    memory = 24 * 2**20
    monkeypatch.setattr("hjax.run.training_run.device_memory", lambda device: memory)
    with trainer_of("GRPO", keys) as trainer:
        told = describe(trainer)
    slots = told["slots"]["slots"]
    assert 0 < slots < 256 and slots % 4 == 0
    generating = [row for row in told["memory"] if row["program"].startswith("generate")]
    assert {row["program"] for row in generating} == {"generate.prefill", "generate.decode"}
    most = max(row["sum_bytes"] for row in generating)
    assert 0.6 * memory < most <= memory


def test_plans_decode_in_as_many_parts():
    assert _waves(0, 256) == _waves(256, 256) == (1,)
    assert _waves(96, 256) == (3,)
    assert max(_waves(-1, 256)) > 8


def test_fewer_than_all_is_refused():
    with pytest.raises(ConfigError, match="rollout.slots=-2: must be -1 or more"):
        chosen(**{"rollout.slots": -2})
