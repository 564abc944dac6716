"""Reward functions shared by processes: each judges its groups, together they judge all."""

import numpy as np
import pytest

from hjax import sharded_values
from hjax.rewards.function import RewardFunction
from hjax.workers import WorkerContext
from hjax.workers.reward import FunctionReward


def lengths(prompts, responses, **columns):
    """The response's length; None where the column says so."""
    return [None if skip else len(r) for r, skip in zip(responses, columns["skip"], strict=True)]


def batch_of(rows):
    return {
        "prompts": np.ones((rows, 2), np.int32),
        "prompt_mask": np.ones((rows, 2), bool),
        "responses": np.ones((rows, 3), np.int32),
        "response_mask": np.arange(3)[None] <= np.arange(rows)[:, None] % 3,
        "prompt_text": ["p"] * rows,
        "response_text": ["x" * i for i in range(rows)],
        "columns": {"skip": [i == 3 for i in range(rows)]},
    }


def worker(index, processes):
    context = WorkerContext("reward", samples=2, process=(index, processes))
    return FunctionReward(context, RewardFunction(lengths, runs_in="thread"))


@pytest.mark.parametrize("rows, processes", [(12, 3), (10, 4), (4, 8), (7, 2)])
def test_shares_make_up_the_whole(rows, processes):
    batch = batch_of(rows)
    alone = worker(0, 1).compute_reward(batch)
    shares = [worker(i, processes).compute_reward(batch) for i in range(processes)]
    together = sharded_values.whole(sharded_values.merge(shares))
    np.testing.assert_array_equal(together["rewards"], alone["rewards"])
    assert together["reward_outcomes"] == alone["reward_outcomes"]


def test_a_group_is_judged_by_one_process():
    shares = [worker(i, 3).own_rows(batch_of(10)) for i in range(3)]
    assert [(s.start, s.stop) for s in shares] == [(0, 2), (2, 6), (6, 10)]
