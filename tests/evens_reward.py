"""A reward that a new model gets some of: the share of even digits among four."""


def evens(prompts, responses, **columns):
    return [sum(c in "02468" for c in response) / 4 for response in responses]
