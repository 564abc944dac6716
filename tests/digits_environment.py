"""Environments of the tests of whole runs: random digits for some turns, in several manners."""

import os
import pathlib
import random
import time

import hjax


class Digits(hjax.Environment):
    """Says digits for one to five turns; pays for the share of `1` in what the policy says.

    Variables of the process, which say what the environment does beside that: `HJAX_TEST_SLEEP`,
    the longest pause in seconds, by the wall clock; `HJAX_TEST_CALLS`, a file to which each call
    appends a line; `HJAX_TEST_FAILS`, the end of prompts whose second step raises.
    """

    fresh_share = 0.0

    def reset(self, task, seed):
        self.random = random.Random(seed)
        self.left = self.random.randint(1, 5)
        self._prompt, self._steps = task["prompt"], 0
        self._called("reset", task["prompt"])
        return hjax.Observation(task["prompt"], anchor=self.left)

    def step(self, action):
        self.left -= 1
        self._called("step", action)
        self._steps += 1
        if self._steps == 2 and self._prompt.endswith(os.environ.get("HJAX_TEST_FAILS", "never")):
            raise ValueError("of the environment")
        text = "".join(self.random.choices("0123456789", k=self.random.randint(1, 6)))
        return hjax.Step(
            hjax.Observation(text + ">", anchor=self.left),
            reward=action.count("1") / (1 + len(action)) + 0.1 * len(action),
            done=self.left == 0,
            valid="1" in action,
            fresh=self.random.random() < self.fresh_share,
            metrics={"ones": action.count("1")} if "1" in action else {},
        )

    def _called(self, call, text):
        if longest := float(os.environ.get("HJAX_TEST_SLEEP", 0)):
            time.sleep(random.SystemRandom().uniform(0, longest))
        if path := os.environ.get("HJAX_TEST_CALLS"):
            with pathlib.Path(path).open("a") as file:
                file.write(f"{call} {text!r}\n")


class Fresh(Digits):
    """Half of its observations replace the history."""

    fresh_share = 0.5
