"""Batches of episodes: their arrays, episodes of several rows, baselines and mini-batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_config
from ml_collections import ConfigDict

from hjax.algorithms import GRPO, PPO, ReMax
from hjax.algorithms.aggregation import aggregation_weights
from hjax.algorithms.episode_rows import EpisodeRows, episode_minibatches
from hjax.batches import concatenate_batches, sample_rows
from hjax.environments.episode import Episode, EpisodeRow, Turn
from hjax.environments.episode_batch import episode_batch, episode_summary
from hjax.errors import RunError
from hjax.rewards.function import RewardFunction
from hjax.run.dataflow import absent_roles
from hjax.run.episode_rollout import RETURN_COLUMN, episode_return
from hjax.run.health_checks import HealthChecks
from hjax.run.metrics import batch_metrics
from hjax.run.reporter import histogram_row, sample_row
from hjax.workers import WorkerContext
from hjax.workers.reward import FunctionReward


def turn(tokens, observation=(), reward=0.0, anchor=None, **more):
    logprobs = {"logprobs": [-0.5 * t for t in tokens]}
    return Turn(list(tokens), logprobs, "a", list(observation), "o", reward, anchor=anchor, **more)


def played():
    """Two groups of two: an episode of three rows, one of one, one that never began, one of two."""
    episodes = [Episode(4 + i, i // 2, {}, 0, stop_reason="done") for i in range(4)]
    episodes[0].rows = [
        EpisodeRow(
            [9, 8], "p", [turn([1, 2], [7], 0.25, b"s"), turn([3], reward=0.5, anchor=b"t")]
        ),
        EpisodeRow([9], "q", [turn([4, 5], reward=1.0, anchor=b"s")]),
        EpisodeRow([8], "r", [turn([6], reward=0.125, valid=False, metrics={"x": 2.0})]),
    ]
    episodes[1].rows = [EpisodeRow([9, 8], "p", [turn([1], reward=0.5, anchor=b"t")])]
    episodes[2].stop_reason, episodes[2].fault = "timeout", "late"
    episodes[3].rows = [
        EpisodeRow([9], "p", [turn([2, 2])]), EpisodeRow([9], "p", [turn([1], reward=2.0)])
    ]  # fmt: skip
    episodes[3].stop_reason = "max_turns"
    return episodes


def test_arrays_by_hand():
    batch = episode_batch(played(), 3, 4, filler=15)
    # 3 + 1 + 1 + 2 rows, and one that fills up to twice the episodes.
    assert batch["episode"].tolist() == [4, 4, 4, 5, 6, 7, 7, -1]
    assert batch["group"].tolist() == [0, 0, 0, 0, 1, 1, 1, -1]
    assert batch["prompts"].tolist()[:5] == [[0, 9, 8], [0, 0, 9], [0, 0, 8], [0, 9, 8], [0, 0, 15]]
    assert batch["responses"].tolist()[:3] == [[1, 2, 7, 3], [4, 5, 0, 0], [6, 0, 0, 0]]
    assert batch["response_mask"][0].tolist() == [True, True, False, True]
    assert batch["response_lengths"].tolist() == [4, 2, 1, 1, 0, 2, 1, 0]
    assert batch["turn"].tolist()[:3] == [[0, 0, -1, 1], [2, 2, -1, -1], [3, -1, -1, -1]]
    # States are numbered within the group, whoever met them.
    assert batch["anchor"].tolist()[:4] == [
        [0, 0, -1, 1], [0, 0, -1, -1], [-1, -1, -1, -1], [1, -1, -1, -1]
    ]  # fmt: skip
    assert batch["token_rewards"].tolist()[:3] == [
        [0, 0.25, 0, 0.5], [0, 1, 0, 0], [0.125, 0, 0, 0]
    ]  # fmt: skip
    assert batch["logprobs"][0].tolist() == [-0.5, -1.0, 0.0, -1.5]
    assert batch["row_mask"].tolist() == [True] * 7 + [False]
    assert batch["truncated"].tolist() == [False] * 5 + [True, True, False]
    assert sample_rows(batch).tolist() == [0, 3, 4, 5]
    summary = episode_summary(batch | {"rewards": [1.875] * 3 + [0.5, np.nan, 2.0, 2.0, 0.0]})
    assert summary["episode/turns"] == (4 + 1 + 0 + 2) / 4
    assert summary["episode/return"] == pytest.approx((1.875 + 0.5 + 2.0) / 3)
    assert summary["episode/stop_done"] == 0.5 and summary["episode/stop_timeout"] == 0.25
    assert summary["episode/stop_max_turns"] == 0.25 and summary["episode/stop_context"] == 0.0
    assert summary["episode/x"] == 2.0 and summary["episode/invalid_actions"] == 0.25


def test_a_sample_is_an_episode_with_all_its_turns():
    batch = episode_batch(played(), 3, 4)
    batch["rewards"] = np.array([1.875] * 4 + [np.nan, 2.0, 2.0, 0.0])
    batch["advantages"] = batch["response_mask"] * np.arange(8.0)[:, None]
    first, second, third, last = (sample_row(batch, i, 3, "train") for i in range(4))
    assert [t["action"] for t in first["turns"]] == ["a"] * 4
    assert [t.get("fresh", False) for t in first["turns"]] == [False, True, True, False]
    assert [t["reward"] for t in first["turns"]] == [0.25, 0.5, 1.0, 0.125]
    assert first["turns"][3]["metrics"] == {"x": 2.0} and not first["turns"][3]["valid"]
    # Rows 0, 1 and 2 have three, two and one tokens of the policy's.
    assert first["advantage"] == pytest.approx((0 * 3 + 1 * 2 + 2 * 1) / 6)
    assert first["response"] == "ao" * 4 and first["prompt"] == "p" and first["reward"] == 1.875
    assert second["advantage"] == 3 and len(second["turns"]) == 1
    assert third["turns"] == [] and third["stop_reason"] == "timeout" and "advantage" not in third
    assert [last["index"], last["stop_reason"], last["truncated"]] == [3, "max_turns", True]
    assert batch_metrics(batch, 0.0)["response/length_mean"] == (4 + 2 + 1 + 1 + 0 + 2 + 1) / 7


def test_what_is_counted_of_a_batch_are_episodes_and_their_rows():
    """Neither rows that fill it up, nor an episode's return once per row."""
    batch = episode_batch(played(), 3, 4)
    batch["rewards"] = np.array([0.7] * 3 + [0.1, np.nan, 0.1, 0.1, 0.0], np.float32)
    found = histogram_row(batch, 3)
    assert sum(found["reward"]["counts"]) == 3 and sum(found["length"]["counts"]) == 7
    assert found["reward"]["sum"] == pytest.approx(0.9) and found["length"]["sum"] == 4 + 7
    # Of a step whose groups are all left out of the loss too.
    batch["row_mask"] = np.zeros(8, bool)
    assert batch_metrics(batch, 0.0)["response/length_mean"] == 11 / 7
    checks = HealthChecks(tiny_config("GRPO", {"rollout.samples": 2}), 0.0)
    equal = batch | {"rewards": np.array([0.1] * 4 + [0.7] * 3 + [0.0], np.float32)}
    lines = [checks.messages({"step": step}, equal) for step in range(1, 5)]
    assert [len(each) for each in lines] == [0, 0, 1, 0] and "in 100% of the groups" in lines[2][0]


def scored(batch, max_unscored):
    """What a run's reward worker says of the batch."""
    returns = {4: 0.7, 5: None, 6: None, 7: 0.1, -1: 0.0}
    columns = {RETURN_COLUMN: [returns[number] for number in batch["episode"].tolist()]}
    function = RewardFunction(episode_return, runs_in="thread")
    worker = FunctionReward(WorkerContext("reward"), function, max_unscored)
    return worker.compute_reward(batch | {"columns": columns})


@pytest.mark.parametrize("failed", [0, 1])
def test_the_share_of_unscored_is_of_episodes(failed):
    """Whatever the rows that they had: three of eight are of the first, one of the second."""
    episodes = played()
    episodes[failed].stop_reason, episodes[failed].fault = "timeout", "late"
    batch = episode_batch(episodes, 3, 4)
    found = scored(batch, 0.5 + 0.25 * (failed == 0))
    outcomes = {name: count for name, count in found["reward_outcomes"].items() if count}
    assert outcomes == ({"ok": 2, "none": 2} if failed else {"ok": 1, "none": 3})
    assert np.isnan(found["rewards"]).tolist() == (
        [False] * 3 + [True, True] + [False] * 3 if failed else [True] * 5 + [False] * 3
    )
    with pytest.raises(RunError, match=f"^{3 - failed} of 4 sequences have no reward"):
        scored(batch, 0.4)


def test_episodes_of_one_row_are_not_filled_up():
    episodes = played()
    for each in episodes:
        each.rows = each.rows[:1]
    batch = episode_batch(episodes, 3, 4)
    assert len(batch["episode"]) == 4 and EpisodeRows.of(batch) is None


def test_batches_have_few_sizes():
    """A power of two times the episodes, and what is made of their rows follows from that alone."""
    episodes = played()
    assert len(episode_batch(episodes, 3, 4, least=9)["episode"]) == 16
    for each in episodes:
        each.rows = each.rows[:1]
    batch = episode_batch(episodes, 3, 4, least=16)
    assert batch["episode"].tolist() == [4, 5, 6, 7, *[-1] * 12]
    rows = EpisodeRows.of(batch)
    assert rows.join(batch)["responses"].shape == (4, 8 * 4)
    parts = episode_minibatches(batch["group"], batch["episode"], np.arange(2), 1)
    assert [len(part) for part in parts] == [8, 8]
    # Of resampled groups: their rows, and one of no episode until the size is reached.
    assert rows.of_groups(np.array([1]), 2, 4).tolist() == [2, 3, 4, 4]
    assert len(rows.of_groups(np.array([0, 1]), 2, 4)) == 8


def test_joined_and_split_again():
    batch = episode_batch(played(), 3, 4)
    episodes = EpisodeRows.of(batch)
    joined = episodes.join(batch)
    assert joined["responses"][0].tolist() == [1, 2, 7, 3, 4, 5, 0, 0, 6, *[0] * 7]
    assert joined["responses"][1].tolist() == [1, *[0] * 15]
    assert joined["prompts"].shape == (4, 3) and joined["episode"].tolist() == [4, 5, 6, 7]
    assert joined["response_lengths"].tolist() == [7, 1, 0, 3]
    assert joined["stop_reason"] == ["done", "done", "timeout", "max_turns"]
    found = joined | {
        "of_tokens": joined["responses"] * 1.5, "of_rows": np.arange(1, 5), "scalar": np.float32(3)
    }  # fmt: skip
    back = episodes.split(found, joined, batch)
    assert (back["of_tokens"] == batch["responses"] * 1.5).all()
    assert back["of_rows"].tolist() == [1, 1, 1, 2, 3, 4, 4, 0] and back["scalar"] == 3
    assert back["responses"] is batch["responses"]


def test_batches_whose_environments_report_other_metrics_are_joined():
    first, second = episode_batch(played(), 3, 4), episode_batch(played(), 3, 4)
    second["episode_metrics"] = {
        name: x for name, x in second["episode_metrics"].items() if name != "x"
    } | {"y": np.ones(8, np.float32)}
    joined = concatenate_batches([first, second])["episode_metrics"]
    assert set(joined) == {"turns", "invalid_actions", "seconds", "x", "y"}
    assert np.isnan(joined["x"][8:]).all() and np.isnan(joined["y"][:8]).all()
    assert joined["turns"].tolist() == first["episode_metrics"]["turns"].tolist() * 2


def algorithm(kind, samples=2, **changes):
    config = kind.default_config()
    config.update(changes)
    return kind(ConfigDict(config), absent_roles(kind, ()), samples=samples, max_response_length=4)


def returns_of(batch):
    values = {4: 1.0, 5: 0.0, 6: np.nan, 7: 2.0, -1: 0.0}
    return np.array([values[number] for number in batch["episode"].tolist()], np.float32)


def test_an_episode_is_one_sample_of_the_baseline():
    """Rewards 1, 1, 0, 0 of episodes of 3, 1, 1, 1 rows have the mean .5, not .67."""
    episodes = [Episode(i, 0, {}, 0, stop_reason="done") for i in range(4)]
    for i, each in enumerate(episodes):
        each.rows = [EpisodeRow([9], "p", [turn([1])]) for _ in range(3 if i == 0 else 1)]
    batch = episode_batch(episodes, 2, 3)
    batch["rewards"] = np.array([1, 1, 1, 1, 0, 0, 0, 0], np.float32)
    made = algorithm(GRPO, samples=4, kl_coef=0.0, normalise="none").with_advantages(batch)
    assert made["advantages"][:, 0].tolist() == [0.5, 0.5, 0.5, 0.5, -0.5, -0.5, 0.0, 0.0]
    assert (made["advantages"][:, 1:] == 0).all()
    assert made["row_mask"].tolist() == [True] * 6 + [False] * 2


def two_turns():
    """A group of two: an episode of two turns with .1 and .7, and one of a turn with .1."""
    first = EpisodeRow(
        [9], "p", [turn([1, 2], [7, 8], 0.1), turn([3], reward=0.7)]
    )  # fmt: skip
    episodes = [Episode(i, 0, {}, 0, [row], "done") for i, row in enumerate(
        [first, EpisodeRow([9], "p", [turn([4], reward=0.1)])]
    )]  # fmt: skip
    return episode_batch(episodes, 1, 6)


def test_an_episode_of_two_turns_by_hand():
    """From its tokens to the gradient by log-probs."""
    batch = two_turns()
    assert batch["responses"].tolist() == [[1, 2, 7, 8, 3, 0], [4, 0, 0, 0, 0, 0]]
    drawn = np.array([[1, 1, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0]], bool)
    assert (batch["response_mask"] == drawn).all()
    assert batch["response_lengths"].tolist() == [5, 1]
    batch["rewards"] = np.array([0.8, 0.1], np.float32)
    grpo = algorithm(GRPO, kl_coef=0.0, normalise="none", clip_low=0.2, clip_high=0.2)
    made = grpo.with_advantages(batch)
    assert np.allclose(made["advantages"], drawn * np.array([[0.35], [-0.35]]), atol=1e-7)
    loss = grpo.losses(grpo.config, 6)["actor"]
    weights = loss.weights(made)
    # The mean over two episodes, of each the mean over the tokens that it drew.
    assert np.allclose(weights, drawn * np.array([[1 / 6], [1 / 2]]), atol=1e-7)
    ratios = np.array([[1.1, 0.9, 5.0, 5.0, 1.5, 5.0], [0.7, 5.0, 5.0, 5.0, 5.0, 5.0]])
    logprobs = np.where(drawn, made["old_logprobs"] + np.log(ratios), 3.0).astype(np.float32)

    def total(x):
        return jnp.sum(weights * loss(x, None, made)[0])

    value, gradient = jax.value_and_grad(total)(logprobs)
    # 1.5 is clipped to 1.2 where the advantage is above 0, .7 to .8 where it is below.
    assert value == pytest.approx(-0.35 * (1.1 + 0.9 + 1.2) / 6 + 0.35 * 0.8 / 2, abs=1e-6)
    wanted = [[-0.35 * 1.1 / 6, -0.35 * 0.9 / 6, 0, 0, 0, 0], [0] * 6]
    assert np.allclose(gradient, wanted, atol=1e-6)


def test_returns_run_on_from_row_to_row():
    """GAE over the rows of an episode is that of its turns in one row."""
    batch = episode_batch(played(), 3, 4) | {"rewards": None}
    batch["rewards"] = returns_of(batch)
    rng = np.random.default_rng(0)
    batch["values"] = rng.normal(size=batch["responses"].shape).astype(np.float32)
    ppo = algorithm(PPO, samples=2, kl_coef=0.0, gamma=0.9, whiten=False)
    made = ppo.with_advantages(batch)
    # The first episode by hand: tokens of its turns in order, with their values.
    drawn = batch["response_mask"][:3]
    values = batch["values"][:3][drawn].astype(np.float64)
    rewards = batch["token_rewards"][:3][drawn].astype(np.float64)
    rewards[-1] += 1.0 - rewards.sum()  # what the turns' rewards leave of the episode's
    advantage, lam = 0.0, ppo.config.lam
    wanted = np.zeros(len(values))
    for t in reversed(range(len(values))):
        following = values[t + 1] if t + 1 < len(values) else 0.0
        advantage = rewards[t] + 0.9 * following - values[t] + 0.9 * lam * advantage
        wanted[t] = advantage
    assert np.allclose(made["advantages"][:3][drawn], wanted, atol=1e-5)
    assert np.allclose(made["returns"][:3][drawn], wanted + values, atol=1e-5)
    assert not made["row_mask"][[4, 7]].any() and made["row_mask"][[0, 3, 5]].all()


def test_mini_batches_hold_whole_groups():
    groups = np.array([3, 3, 3, 3, 1, 1, 1, 8, 8, -1, -1])
    episodes = np.array([0, 0, 0, 1, 2, 2, 3, 4, 5, -1, -1])
    parts = episode_minibatches(groups, episodes, np.array([2, 0, 1]), 1)
    assert [part.tolist() for part in parts] == [[7, 8, 9, 9], [0, 1, 2, 3], [4, 5, 6, 9]]
    (whole,) = episode_minibatches(groups, episodes, np.arange(3), 3)
    assert sorted(whole.tolist()) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9]


@pytest.mark.parametrize("key, value, instead", [
    ("ratio", "sequence", "token"), ("ratio", "sequence_sum", "token"),
    ("correction", "sequence_mask", "truncated"),
])  # fmt: skip
def test_what_compares_whole_responses_refuses_several_rows(key, value, instead):
    batch = episode_batch(played(), 3, 4)
    batch["rewards"] = returns_of(batch)
    with pytest.raises(RunError, match=f"{value} .* into several rows; use {key}={instead}$"):
        algorithm(GRPO, kl_coef=0.0, **{key: value}).with_advantages(batch)


@pytest.mark.parametrize("kind", ["token", "sequence", "constant", "sum"])
def test_an_episode_is_one_unit_of_the_loss(kind):
    """Its rows' weights are those that the tokens have in one row; rows of no episode have none."""
    batch = episode_batch(played(), 3, 4)
    most = 16 if kind == "constant" else None
    mask, rows = batch["response_mask"], batch["row_mask"].copy()
    rows[4] = False  # the one that never began
    made = aggregation_weights(mask, kind, most, rows, batch["episode"])
    joined = EpisodeRows.of(batch).join(batch)
    whole = np.array([True, True, False, True])
    wanted = aggregation_weights(joined["response_mask"], kind, most, whole)
    assert np.allclose(np.asarray(made)[:3].ravel(), np.asarray(wanted)[0, :12], atol=1e-7)
    assert not np.asarray(wanted)[0, 12:].any()
    assert np.allclose(np.asarray(made)[5:7].ravel()[:8], np.asarray(wanted)[3][:8], atol=1e-7)
    assert not np.asarray(made)[[4, 7]].any()
    alone = np.arange(8)  # episodes of a row each change nothing
    plain = aggregation_weights(mask, kind, most, rows)
    assert (np.asarray(aggregation_weights(mask, kind, most, rows, alone)) == plain).all()


def test_turns_of_a_run_are_credited_as_its_keys_say():
    """The rewards of each turn, discounted by turn, over episodes of several rows."""
    batch = episode_batch(played(), 3, 4)
    batch["rewards"] = np.array([1.875] * 3 + [0.5, np.nan, 2.0, 2.0, 0.0], np.float32)
    grpo = algorithm(GRPO, kl_coef=0.0, normalise="none", turn_discount=0.5)
    made = grpo.with_advantages(batch)["advantages"]
    # Turns of the first group: .25, .5, 1, .125, with what follows halved per turn; and .5.
    returns = [0.25 + 0.25 + 0.25 + 0.015625, 0.5 + 0.5 + 0.03125, 1.0625, 0.125, 0.5]
    mean = sum(returns) / 5
    wanted = [returns[0] - mean] * 2 + [0.0, returns[1] - mean]
    assert np.allclose(made[0], wanted, atol=1e-6)
    assert np.allclose(made[1, :2], returns[2] - mean, atol=1e-6)
    assert np.allclose([made[2, 0], made[3, 0]], [returns[3] - mean, returns[4] - mean], atol=1e-6)
    assert not made[4:].any()  # one scored episode is compared with nobody
    batch["values"] = np.zeros(batch["responses"].shape, np.float32)
    ppo = algorithm(PPO, kl_coef=0.0, whiten=False, credit="turn", turn_gamma=0.5, turn_lam=1.0)
    made = ppo.with_advantages(batch)["advantages"]
    assert np.allclose(made[:3, 0], [returns[0], returns[2], returns[3]], atol=1e-6)


@pytest.mark.parametrize("buffer", [0.0, 0.5])
def test_greedy_episodes_of_several_rows_are_baselines(buffer):
    """Of each prompt's samples, whatever rows they and it have; a long row is worse as theirs."""
    batch = episode_batch(played(), 3, 4)
    batch["rewards"] = returns_of(batch) * np.float32(0.7)
    greedy = played()[::3]
    for number, each in enumerate(greedy):
        each.number = each.group = number
    greedy = episode_batch(greedy, 3, 4)
    assert greedy["episode"].tolist() == [0, 0, 0, 1, 1, -1, -1, -1]
    verdicts = {"rewards": np.array([0.1] * 3 + [0.3] * 2 + [0.0] * 3, np.float32)}
    remax = algorithm(ReMax, kl_coef=0.0, overlong_buffer=buffer)
    made = remax.with_advantages(batch | {"baseline": (greedy, verdicts)})
    # Of 4 tokens 2 are free. Longest rows have 4, 1 and 2, of the greedy ones 4 and 2.
    over = 1.0 if buffer else 0.0
    baseline = [0.1 - over] * 4 + [0.3] * 3
    scores = [0.7 - over] * 3 + [0.0, np.nan] + [1.4] * 2
    assert np.allclose(made["baseline"][:7], baseline, atol=1e-6)
    wanted = np.nan_to_num(np.array(scores) - baseline)
    drawn = batch["response_mask"][:7]
    assert np.allclose(made["advantages"][:7], wanted[:, None] * drawn, atol=1e-6)
    assert made["row_mask"].tolist() == [True] * 4 + [False] + [True] * 2 + [False]


@pytest.mark.parametrize("credit", ["turn", "bilevel"])
def test_an_episode_of_one_turn_is_credited_alike_beside_others_of_several_rows(credit):
    """What a joined row has behind its last token is of no turn."""
    batch = episode_batch(played(), 3, 4)
    batch["rewards"] = np.array([1.875] * 3 + [0.7, np.nan, 2.0, 2.0, 0.0], np.float32)
    batch["values"] = np.full(batch["responses"].shape, 0.1, np.float32)
    rates = {"gamma": 0.9, "lam": 0.5} if credit == "bilevel" else {}
    ppo = algorithm(PPO, kl_coef=0.0, whiten=False, credit=credit, **rates)
    made = ppo.with_advantages(batch)
    # The second episode has one turn of one token, the others four and two of up to two tokens.
    assert np.allclose(made["advantages"][3], [0.7 - 0.1, 0, 0, 0], atol=1e-6)
    assert not made["advantages"][~batch["response_mask"]].any()
    joined = EpisodeRows.of(batch).join(batch)
    assert ((joined["turn"] >= 0) == joined["response_mask"]).all()
    assert (joined["anchor"][~joined["response_mask"]] == -1).all()
    both = concatenate_batches([episode_batch(played(), 3, width) for width in (4, 6)])
    assert ((both["turn"] >= 0) == both["response_mask"]).all()
    assert (both["anchor"][~both["response_mask"]] == -1).all()
