"""An example of several rewards at once: how well digits are sorted, judged apart.

A run uses it by `--config.reward.function=sorted_digits.py:reward` (gdpo.py does). A dict of lists
by name is several rewards: their sum is the response's, each is logged as `reward/<name>`, and GDPO
normalises each within its group before they are added.
"""


def reward(prompts, responses, answer, **columns):
    """`exact`: 1 for the answer, 0 otherwise; `places`: share of the answer's digits in place."""
    exact = [float(response == right) for response, right in zip(responses, answer)]
    places = [
        sum(a == b for a, b in zip(response, right)) / max(len(right), len(response))
        for response, right in zip(responses, answer)
    ]
    return {"exact": exact, "places": places}
