"""The environment that asks what ``agents_double.two_questions`` asks."""

import hjax


class TwoQuestions(hjax.Environment):
    """The row's prompt, then another question; rewards even lengths of what was said."""

    def reset(self, task, seed):
        self.said = []
        return hjax.Observation(task["prompt"])

    def step(self, action):
        self.said.append(action)
        done = len(self.said) == 2
        reward = float(len("".join(self.said)) % 2) if done else 0.0
        return hjax.Step(hjax.Observation("" if done else "more?"), reward=reward, done=done)
