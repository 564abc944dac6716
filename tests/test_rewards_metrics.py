"""Numbers of a reward function that are no rewards, and become metrics of a run."""

import numpy as np

from hjax.rewards.function import RewardFunction
from hjax.rewards.reward_results import RewardResult, RewardsWithMetrics
from hjax.run.metrics import batch_metrics


def test_metrics_of_a_reward_function_are_no_rewards():
    """A mean over sequences of each; NaN where a call gave none."""
    returned = RewardsWithMetrics([1.0, None], {"tests_passed": [0.5, 1]})
    judge = RewardFunction(lambda prompts, responses, **columns: returned)
    result = judge(["p"] * 2, ["r"] * 2, {}, [[0]] * 2, [[1], [2]])
    assert result.rewards[0] == 1 and result.named == {}
    other = RewardResult(np.float32([3]), ("ok",))
    whole = RewardResult.concatenated([result.row(1), other, result.row(0)])
    np.testing.assert_array_equal(whole.metrics["tests_passed"], np.float32([1, np.nan, 0.5]))
    batch = {"response_mask": np.ones((3, 1)), "truncated": np.zeros(3), "rewards": whole.rewards}
    found = batch_metrics(batch | {"reward_metrics": whole.metrics}, 0.0)
    assert found["reward/tests_passed"] == 0.75 and found["reward/mean"] == 2
    for name, values in (("mean", [1, 2]), ("long", [1, 2, 3])):
        returned = RewardsWithMetrics([1.0, 1.0], {name: values})
        failed = judge(["p"] * 2, ["r"] * 2, {}, [[0]] * 2, [[1], [2]])
        assert failed.outcomes["exception"] == 2
        assert f"metric '{name}' of shape ({len(values)},): it must" in failed.first_traceback
