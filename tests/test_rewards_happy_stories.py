"""The example reward: happier stories score higher, and it is not easily fooled."""

import numpy as np

from hjax.rewards.function import RewardFunction, load_function

reward = load_function("happy_stories.py:reward")  # found beside the module that loads it

HAPPY = (
    "Lily loved to play with her friends. They laughed and danced in the sunshine. Her mom smiled "
    "and gave her a hug. It was a wonderful day."
)
PLAIN = (
    "One day, Tom went to the park with his dog. He saw a big tree and a red ball near the table. "
    "He liked the ball."
)
SAD = (
    "One day, Tom lost his ball in the park. He was sad and cried. The big dog was mean and scared "
    "him near the tree."
)


def score(*stories):
    return reward([""] * len(stories), list(stories))


def test_happier_stories_score_higher():
    happy, plain, sad = score(HAPPY, PLAIN, SAD)
    assert happy > 0.9 and 0.3 < plain < 0.5 and sad < 0.1


def test_repetition_lists_and_short_ones_do_not_pay():
    repeated, listed, short, empty = score(
        "She was happy. " * 10,
        "happy joy love fun smile glad proud hug kiss sunny nice kind",
        "So happy!",
        "",
    )
    plain = score(PLAIN)[0]
    assert max(repeated, listed, short) < plain and empty == 0.0


def test_not_happy_is_sad():
    ahead = "One day, Tom went to the park with his dog and he was"
    assert score(f"{ahead} not happy")[0] < score(f"{ahead} here")[0] < score(f"{ahead} happy")[0]


def test_one_more_happy_word_is_always_better_in_a_story():
    words = ["smiled", "laughed", "danced", "sang and was happy"]
    stories = [
        "One day a girl went to the park with her dog and a big red ball. She "
        + ", ".join(words[:n]) + " and went back home again."
        for n in range(len(words) + 1)
    ]
    scores = score(*stories)
    assert scores == sorted(scores) and len(set(scores)) == len(scores)


def test_it_keeps_the_contract():
    judge = RewardFunction(reward)
    result = judge(["p"] * 2, [HAPPY, ""], {"answer": [1, 2]}, [[1]] * 2, [[2], []])
    assert result.outcomes["ok"] == 2
    assert ((result.rewards >= 0) & (result.rewards <= 1)).all()
    assert result.rewards.dtype == np.float32
