"""An example of several named rewards: how well digits are sorted.

A run uses it by `--config.reward.function=sorted_digits.py:reward` (gdpo.py does). A dict of lists
by name is several rewards: a response's reward is their sum, each is logged as `reward/<name>`, and
GDPO normalises each within its group before they are summed.
"""


def reward(prompts, responses, answer, **columns):
    """`exact`: 1 for the right answer, else 0; `places`: share of digits in the right place."""
    exact = [float(response == right) for response, right in zip(responses, answer)]
    places = [
        sum(a == b for a, b in zip(response, right)) / max(len(right), len(response))
        for response, right in zip(responses, answer)
    ]
    return {"exact": exact, "places": places}
