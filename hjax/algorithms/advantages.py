"""Advantage estimators (GAE, group baselines, ...): pure functions of float32 arrays, jit-able.

Shapes: N rows = prompts x samples (row = prompt_index * samples + sample), L response tokens.
`mask` [N, L] is true on response tokens. Responses are padded on the right; tokens masked out
in the middle of a response (a tool's output) are skipped as if they were not there.
NaN marks an unscored sample: it contributes nothing and gets advantage 0.

Wrong shapes raise AssertionError at trace time. Otherwise [N] rewards would broadcast silently
over [N, L] tokens wherever N = L.
"""

from typing import Any, Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from hjax.algorithms.masks import (
    bounded,
    constant,
    constant_where,
    last_token_mask,
    masked,
    masked_mean,
    whiten,
)
from hjax.errors import ConfigError

__all__ = [
    "discounted_returns",
    "gae",
    "group_advantages",
    "lagrangian_advantages",
    "length_adaptive_lambda",
    "masked_mean",
    "overlong_penalty",
    "process_leave_one_out",
    "remax_advantages",
    "rewards_differ",
    "token_rewards",
    "whiten",
]

BASELINES = ("group", "others", "length", "none")
NORMALISERS = ("std", "mean", "none")


def token_rewards(
    rewards: jax.Array,
    mask: jax.Array,
    kl: jax.Array | None = None,
    kl_coef: float | jax.Array = 0.0,
    clip: float | None = None,
    dense: jax.Array | None = None,
) -> jax.Array:
    r"""One reward per token: the sequence's at its last token, minus the KL penalty at each.

    .. math:: r_t = -\beta\,\mathrm{KL}_t + 1[t = T]\,R, \qquad
              \text{with clip } c:\ r_t \leftarrow \min(\max(r_t, -c), c)

    As in Ziegler et al. 2019 (https://arxiv.org/abs/1909.08593). Clamping the sum is Safe-RLHF's
    (https://arxiv.org/abs/2310.12773, taken from a derivative of its code). For a cost, reverse the
    sign of `kl_coef`: Safe-RLHF adds beta * KL to costs.

    Args:
        rewards: float [N]; NaN (unscored) counts as 0, so mask such rows in the loss.
        mask: bool [N, L].
        kl: float [N, L], nats per token (`hjax.algorithms.kl.kl_estimate`), or None.
        kl_coef: beta, reward per nat.
        clip: bound on the absolute token reward; None for no bound.
        dense: float [N, L], dense rewards; the difference between `rewards` and their sum (such as
            a length penalty) is added at the last token. None: all of `rewards` is.

    Returns:
        float32 [N, L], 0 outside the mask. A row without any token stays 0.

    Example:
        >>> mask, kl = jnp.array([[1, 1, 0]]), jnp.array([[2.0, 4.0, 9.0]])
        >>> token_rewards(jnp.array([1.0]), mask, kl, kl_coef=0.1)
        Array([[-0.2,  0.6,  0. ]], dtype=float32)
    """
    mask = jnp.asarray(mask, bool)
    rewards = jnp.asarray(rewards, jnp.float32)
    chex.assert_rank(mask, 2)
    chex.assert_shape(rewards, mask.shape[:1])
    if kl is not None:
        chex.assert_equal_shape([kl, mask])
    rewards = masked(rewards, ~jnp.isnan(rewards))
    last = last_token_mask(mask)
    if dense is None:
        result = jnp.where(last, rewards[:, None], 0.0)
    else:
        chex.assert_equal_shape([dense, mask])
        dense = masked(dense, mask)
        rest = rewards - jnp.sum(dense, axis=1)
        result = dense + jnp.where(last, rest[:, None], 0.0)
    if kl is not None:
        result = result - kl_coef * masked(kl, mask)
    return masked(bounded(result, clip), mask)


def gae(
    rewards: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    gamma: float | jax.Array,
    lam: float | jax.Array,
) -> tuple[jax.Array, jax.Array]:
    r"""Generalised advantage estimation (Schulman et al. 2016, https://arxiv.org/abs/1506.02438).

    .. math:: \delta_t = r_t + \gamma V_{t+1} - V_t, \qquad
              A_t = \delta_t + \gamma\lambda A_{t+1}, \qquad R_t = A_t + V_t

    The value after the last token is 0, also where a response ran into the length limit.

    Args:
        rewards: float [N, L], per token (`token_rewards`).
        values: float [N, L], the critic's value before each response token is sampled.
        mask: bool [N, L].
        gamma: discount per token, scalar or [N].
        lam: lambda, scalar or [N] (one per response, as in VAPO).

    Returns:
        (advantages, returns), float32 [N, L], 0 outside the mask.

    Example:
        >>> gae(jnp.array([[0.0, 1.0]]), jnp.array([[0.5, 0.5]]), jnp.ones((1, 2)), 1.0, 0.5)
        (Array([[0.25, 0.5 ]], dtype=float32), Array([[0.75, 1.  ]], dtype=float32))
    """
    chex.assert_rank(mask, 2)
    chex.assert_equal_shape([rewards, values, mask])
    mask = jnp.asarray(mask, bool)
    values = masked(values, mask)

    def step(carry, token):
        next_advantage, next_value = carry
        reward, value, valid = token
        delta = reward + gamma * next_value - value
        advantage = jnp.where(valid, delta + gamma * lam * next_advantage, next_advantage)
        return (advantage, jnp.where(valid, value, next_value)), advantage

    start = jnp.zeros(mask.shape[0], jnp.float32)
    tokens = (masked(rewards, mask).T, values.T, mask.T)
    _, advantages = jax.lax.scan(step, (start, start), tokens, reverse=True)
    advantages = masked(advantages.T, mask)
    return advantages, advantages + values


def discounted_returns(
    rewards: jax.Array, mask: jax.Array, gamma: float | jax.Array = 1.0
) -> jax.Array:
    r"""Reward to go, :math:`G_t = \sum_{s \ge t} \gamma^{s-t} r_s`.

    REINFORCE++ (https://arxiv.org/abs/2501.03262) is `whiten(discounted_returns(token_rewards(
    rewards, mask, kl, beta), mask, gamma), mask)`.

    Args:
        rewards: float [N, L], per token.
        mask: bool [N, L].
        gamma: discount per token, scalar or [N].

    Returns:
        float32 [N, L], 0 outside the mask.
    """
    advantages, _ = gae(rewards, jnp.zeros(jnp.shape(mask)), mask, gamma, 1.0)
    return advantages


def group_advantages(
    rewards: jax.Array,
    samples: int,
    *,
    baseline: Literal["group", "others", "length", "none"] = "group",
    normalise: Literal["std", "mean", "none"] = "std",
    epsilon: float = 1e-6,
    lengths: jax.Array | None = None,
    unbiased_std: bool = True,
) -> jax.Array:
    r"""Compare each sample with the others drawn for its prompt.

    .. math:: A_i = \frac{r_i - b}{\mathrm{std}(r) + \epsilon}

    ==================================  =========================================================
    switches                            method
    ==================================  =========================================================
    the defaults                        GRPO, https://arxiv.org/abs/2402.03300: b the mean
    normalise="none"                    Dr.GRPO, https://arxiv.org/abs/2503.20783
    normalise="mean"                    MaxRL: divided by the mean; 0 if the mean is not above 0
    baseline="others",                  RLOO, https://arxiv.org/abs/2402.14740: b the mean of the
    normalise="none"                    others
    baseline="others"                   NeMo-RL's GRPO: mean and std of the others
    baseline="length",                  OPO, https://arxiv.org/abs/2505.23585: b the mean weighed
    normalise="none"                    by the responses' lengths
    baseline="none", normalise="none"   the reward itself
    ==================================  =========================================================

    Args:
        rewards: float [N]; NaN marks an unscored sample, which is left out of mean and std and
            gets 0.
        samples: responses per prompt; N is a multiple of it and groups are adjacent rows.
        baseline: b, see above.
        normalise: "std" divides by std + epsilon, "mean" by the mean, "none" leaves the reward's
            unit.
        epsilon: 1e-6 in verl and NeMo-RL, 1e-4 in TRL. Where rewards (with baseline "others" those
            of the others) are `constant`, nothing is divided by their std, as in NeMo-RL.
        lengths: int or float [N], tokens of each response, for baseline "length".
        unbiased_std: divide the squares by n - 1 (torch's default, as in TRL and verl), else n.

    Returns:
        float32 [N]. With a baseline, a group with fewer than two scored samples, or with `constant`
        rewards, gets exact zeros: it carries no learning signal.

    Raises:
        ConfigError: N is not a multiple of `samples`, or a switch is unknown.

    Example:
        >>> group_advantages(jnp.array([1.0, 0.0, jnp.nan, 2.0]), 4, normalise="none")
        Array([ 0., -1.,  0.,  1.], dtype=float32)
    """
    _check_known("normalise", normalise, NORMALISERS)
    _check_known("baseline", baseline, BASELINES)
    groups = _Groups.of(jnp.asarray(rewards, jnp.float32), samples, baseline)
    advantages = groups.above - groups.subtracted(baseline, lengths)
    if normalise == "std":
        advantages /= groups.deviation(unbiased_std, epsilon)
    elif normalise == "mean":
        advantages = groups.over_mean(advantages)
    return masked(advantages, groups.comparable(baseline)).reshape(-1)


def _check_known(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is unknown: use {', '.join(allowed)}")


class _Groups(NamedTuple):
    """Rewards by prompt, [groups, samples], and the statistics with which they are compared.

    Attributes:
        rewards: NaN where unscored.
        scored: bool.
        lowest, highest: of each group's scored rewards, [groups, 1].
        above: rewards minus the group's lowest, so that equal rewards are exact zeros; 0 where
            unscored, and in groups of `constant` rewards that have a baseline.
        peers: bool [groups, samples, samples], [p, i, j]: sample j counts in the baseline of i.
        peer_count: of each sample's peers.
        mean: of its peers, over `above`.
    """

    rewards: jax.Array
    scored: jax.Array
    lowest: jax.Array
    highest: jax.Array
    above: jax.Array
    peers: jax.Array
    peer_count: jax.Array
    mean: jax.Array

    @classmethod
    def of(cls, rewards: jax.Array, samples: int, baseline: str) -> "_Groups":
        """The groups of float32 rewards [N]."""
        chex.assert_rank(rewards, 1)
        if samples < 1 or rewards.shape[0] % samples:
            raise ConfigError(
                f"{rewards.shape[0]} rewards do not split into groups of samples={samples}: "
                "pass the number of responses drawn per prompt"
            )
        grouped = rewards.reshape(-1, samples)
        scored = ~jnp.isnan(grouped)
        lowest = jnp.min(jnp.where(scored, grouped, jnp.inf), axis=1, keepdims=True)
        highest = jnp.max(jnp.where(scored, grouped, -jnp.inf), axis=1, keepdims=True)
        differ = ~constant(lowest, highest) | (baseline == "none")
        above = masked(grouped - lowest, scored & differ)
        peers = jnp.broadcast_to(scored[:, None, :], (*above.shape, samples))
        if baseline == "others":
            peers = peers & ~jnp.eye(samples, dtype=bool)
        peer_count = jnp.sum(peers, axis=2)
        mean = jnp.sum(masked(above[:, None, :], peers), axis=2) / jnp.maximum(peer_count, 1)
        return cls(grouped, scored, lowest, highest, above, peers, peer_count, mean)

    def _lowest_of_each(self) -> jax.Array:
        return masked(jnp.broadcast_to(self.lowest, self.above.shape), self.scored)

    def subtracted(self, baseline: str, lengths: jax.Array | None) -> jax.Array:
        """The baseline of each sample, over `above`."""
        if baseline == "none":
            return -self._lowest_of_each()
        if baseline != "length":
            return self.mean
        chex.assert_equal_shape([lengths, self.rewards.reshape(-1)])
        weight = masked(jnp.asarray(lengths).reshape(self.above.shape), self.scored)
        total = jnp.sum(weight, axis=1, keepdims=True)
        return jnp.sum(weight * self.above, axis=1, keepdims=True) / jnp.maximum(total, 1.0)

    def deviation(self, unbiased: bool, epsilon: float) -> jax.Array:
        """Standard deviation of each sample's peers plus epsilon; 1 where they are `constant`."""
        differences = self.above[:, None, :] - self.mean[:, :, None]
        squares = jnp.sum(masked(differences**2, self.peers), axis=2)
        degrees = self.peer_count - 1 if unbiased else self.peer_count
        std = jnp.sqrt(squares / jnp.maximum(degrees, 1))
        rewards = jnp.broadcast_to(self.rewards[:, None, :], self.peers.shape)
        return jnp.where(constant_where(rewards, self.peers, axis=2), 1.0, std + epsilon)

    def over_mean(self, advantages: jax.Array) -> jax.Array:
        """Advantages divided by the mean reward; 0 where that is not above 0."""
        mean = self.mean + self._lowest_of_each()
        positive = mean > 1e-6 * jnp.abs(self.highest).clip(1.0)
        return jnp.where(positive, advantages / jnp.where(positive, mean, 1.0), 0.0)

    def comparable(self, baseline: str) -> jax.Array:
        """Scored samples; with a baseline only those of groups with two scored ones or more."""
        if baseline == "none":
            return self.scored
        return self.scored & (jnp.sum(self.scored, axis=1, keepdims=True) >= 2)


def process_leave_one_out(
    rewards: jax.Array, places: jax.Array, scored: jax.Array, samples: int
) -> jax.Array:
    r"""PRIME's leave-one-out baseline of process rewards (arXiv 2502.01456; verl's recipe).

    .. math:: \tilde r_{i,t} = \frac{n}{n-1} r_{i,t} - \frac{1}{n-1} \sum_{j=1}^{n} \bar r_j

    with the mean :math:`\bar r_j` over the positions of response j and n the scored responses to a
    prompt. With one position each it is the reward minus the mean of the others (RLOO).

    Args:
        rewards: float [N, L].
        places: bool [N, L], tokens that have a reward.
        scored: bool [N]; unscored responses are left out of n and the sum, and get 0.
        samples: responses per prompt.

    Returns:
        float32 [N, L], 0 outside `places`; a group of fewer than two scored responses gets zeros.
    """
    chex.assert_equal_shape([rewards, places])
    chex.assert_shape(scored, places.shape[:1])
    if samples < 1 or places.shape[0] % samples:
        raise ConfigError(f"{places.shape[0]} rows do not split into groups of samples={samples}")
    mean = jnp.where(scored, masked_mean(rewards, places, axis=1), 0.0)
    n = jnp.sum(scored.reshape(-1, samples), axis=1)
    total = jnp.sum(mean.reshape(-1, samples), axis=1)
    n, total = (jnp.repeat(x, samples)[:, None] for x in (n, total))
    made = (n * masked(rewards, places) - total) / jnp.maximum(n - 1, 1)
    return masked(made, places & scored[:, None] & (n >= 2))


def rewards_differ(rewards: Any, samples: int) -> np.ndarray:
    """Whether a group has a learning signal (its rewards differ): bool [N / samples].

    In numpy, because the planner traces a step's dataflow through it and must not start devices.

    Args:
        rewards: float [N], NaN where unscored; `samples`: as of `group_advantages`.
    """
    groups = np.asarray(rewards, np.float32).reshape(-1, samples)
    scored = ~np.isnan(groups)
    largest = np.max(np.where(scored, groups, -np.inf), axis=1)
    return ~constant(np.min(np.where(scored, groups, np.inf), axis=1), largest)


def overlong_penalty(lengths: jax.Array, limit: int, buffer: float) -> jax.Array:
    r"""DAPO's soft overlong punishment (https://arxiv.org/abs/2503.14476, equation 13).

    0 up to `limit - buffer` tokens, then falling linearly to -1 at `limit`, and -1 beyond.

    Args:
        lengths: int or float [N], tokens.
        limit: maximum response length, tokens.
        buffer: tokens, above 0.

    Returns:
        float32 [N], -1 to 0.
    """
    beyond = jnp.asarray(lengths, jnp.float32) - (limit - buffer)
    return -jnp.clip(beyond / buffer, 0.0, 1.0)


def length_adaptive_lambda(lengths: jax.Array, alpha: float) -> jax.Array:
    r"""VAPO's length-adaptive GAE lambda, one per response: :math:`1 - 1 / \max(\alpha l, 1)`.

    https://arxiv.org/abs/2504.05118, where alpha is .05; one per response as in NeMo-RL.

    Args:
        lengths: int or float [N], tokens.
    """
    return 1.0 - 1.0 / jnp.maximum(alpha * jnp.asarray(lengths, jnp.float32), 1.0)


def remax_advantages(
    rewards: jax.Array,
    baseline: jax.Array,
    mask: jax.Array,
    kl: jax.Array | None = None,
    kl_coef: float | jax.Array = 0.0,
    gamma: float | jax.Array = 1.0,
    *,
    kl_cumulated: bool = False,
    clip: float | None = None,
) -> jax.Array:
    r"""ReMax (Li et al. 2023, https://arxiv.org/abs/2310.10505): the greedy response as baseline.

    .. math::
        \text{kl\_cumulated=False: } A_t &= \gamma^{T-t}\,\mathrm{clip}(r - b, \pm c)
                                           - \beta\,\mathrm{KL}_t \\
        \text{kl\_cumulated=True: }  A_t &= \sum_{s \ge t} \gamma^{s-t}
            \left(1[s = T]\,\mathrm{clip}(r - b, \pm c) - \beta\,\mathrm{KL}_s\right)

    The first is the authors' code (`remax_trainer.py`, where the KL is not cumulated although
    the variable is named a return). The second is verl's (`core_algos.py`, there with gamma 1 and
    without a clip): a token's advantage also includes the KL of the tokens after it.

    Args:
        rewards: float [N], of the sampled responses.
        baseline: float [N], rewards of the greedy responses to the same prompts.
        mask: bool [N, L].
        kl: float [N, L], nats per token, k1 in both sources; or None.
        kl_coef: beta, reward per nat.
        gamma: discount per token.
        kl_cumulated: see above.
        clip: c, bound on |r - b|; None for no bound.

    Returns:
        float32 [N, L], 0 outside the mask and in rows whose reward or baseline is NaN.
    """
    mask = jnp.asarray(mask, bool)
    chex.assert_rank(mask, 2)
    chex.assert_shape([rewards, baseline], mask.shape[:1])
    if kl is not None:
        chex.assert_equal_shape([kl, mask])
    gain = jnp.asarray(rewards, jnp.float32) - jnp.asarray(baseline, jnp.float32)
    mask = mask & ~jnp.isnan(gain)[:, None]
    gain = bounded(gain, clip)
    if kl_cumulated:
        return discounted_returns(token_rewards(gain, mask, kl, kl_coef), mask, gamma)
    advantages = discounted_returns(token_rewards(gain, mask), mask, gamma)
    return advantages if kl is None else advantages - kl_coef * masked(kl, mask)


def lagrangian_advantages(
    reward_advantages: jax.Array, cost_advantages: jax.Array, multiplier: float | jax.Array
) -> jax.Array:
    r"""Safe-RLHF's combination :math:`(A^r - \lambda A^c) / (1 + \lambda)`, elementwise.

    https://arxiv.org/abs/2310.12773. With rewards minus, and costs plus, beta times the KL, and
    neither clamped, the KL terms combine to exactly -beta * KL for every multiplier.

    Args:
        reward_advantages: float [N, L].
        cost_advantages: float [N, L]; a positive cost is unsafe.
        multiplier: lambda >= 0.
    """
    chex.assert_equal_shape([reward_advantages, cost_advantages])
    reward_advantages = jnp.asarray(reward_advantages, jnp.float32)
    return (reward_advantages - multiplier * jnp.asarray(cost_advantages)) / (1.0 + multiplier)
