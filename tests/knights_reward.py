"""A verifier for knights-and-knaves puzzles in verl's columns, as a user would write it."""

import re


def reward(prompts, responses, **columns):
    """The share of inhabitants named rightly inside <answer>; 0 without an answer."""
    scores = []
    for response, truth in zip(responses, columns["reward_model"], strict=True):
        said = re.search(r"<answer>(.*?)</answer>", response, re.DOTALL)
        solution = truth["ground_truth"]["solution_text_format"]
        expected = re.findall(r"(\w+) is a (knight|knave)", solution)
        claims = set(re.findall(r"(\w+) is a (knight|knave)", said.group(1))) if said else set()
        scores.append(len(claims & set(expected)) / len(expected))
    return scores
