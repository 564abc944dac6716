"""Code blocks in a response, whose output comes back between them: plan, code, answer (ThinC)."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from hjax.environments.environment import Environment, Observation, Step
from hjax.environments.row_columns import number_column, one_of_column
from hjax.errors import DataError, short_repr
from hjax.rewards.math_answers import answers, extract_answer, is_equivalent, targets
from hjax.sandbox.python_session import PythonSession
from hjax.sandbox.sandbox_settings import THIS_MACHINE, SandboxSettings

OPEN, CLOSE = "<code>", "</code>"
SHOWN_CHARACTERS = 1000
_LEFT_OUT = " ... "
_TEXT = r"(?:(?!</?code>).)*"
_TURN = re.compile(rf"(?P<plan>{_TEXT})<code>(?P<code>{_TEXT})</code>\s*", re.DOTALL)
_TAG = re.compile(r"</?(?:code|out)>")
# The last line of what a block says that raised, or that lost its interpreter.
_RAISED = r"^(?:\w*(?:Error|Exception|Interrupt|Exit)\b|\[the interpreter)[^\n]*\Z"
_FAILED = re.compile(_RAISED, re.MULTILINE)
INJECTED = "RuntimeError: busy"


class CodeBlocks(Environment):
    """Runs the code blocks of turns until a turn gives the answer.

    A turn that ends with `<code>CODE</code>`, whatever stands before it, is run by a Python
    interpreter in the sandbox, which keeps an episode's variables. The observation is
    `<out>OUTPUT</out>`. A turn without a block that has an answer, after `####` or in `\\boxed{}`,
    is paid 1.0 if it is the row's (`hjax.rewards.math_answers`), else 0, and ends the episode. What
    is neither is not valid: blocks that are not closed, more than one, text after a block, a block
    beside an answer. It runs nothing, and the output says why. Tags in outputs are escaped
    (`&lt;code>`). Anchor: the prompt and the blocks so far.

    The row's columns are ``prompt``, and ``answer`` or another of
    ``hjax.rewards.math_answers.TARGETS``. It may lack ``interpreter`` (True), whether blocks are
    run; ``failures`` (0), the share of blocks that an injected error ends without being run;
    ``output_characters`` (1000), of an output, of which the middle is left out; ``stop_at_block``
    (True), whether `</code>` ends a turn, else the model has to.

    Metrics of an episode: ``code_blocks``; ``code_errors``, those that raised; ``after_error``,
    whether there was one, and ``recovered``, whether the answer is right nevertheless; and
    ``grounded``, whether the answer appears in an output.

    Args:
      sandbox: where code runs.
    """

    def __init__(self, sandbox: SandboxSettings = THIS_MACHINE):
        # Makes what runs the blocks, of an episode's seed, for the first block.
        self.open_session: Callable[[int], Any] = lambda seed: PythonSession(sandbox.make(), seed)
        self._session: Any = None

    def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        self.close()
        prompt = task.get("prompt")
        if not isinstance(prompt, str):
            raise DataError(f"prompt is {short_repr(prompt)}; it must be text")
        [self._target] = targets({name: [value] for name, value in task.items()})
        self._runs = one_of_column(task, "interpreter", (True, False))
        self._stop = (CLOSE,) if one_of_column(task, "stop_at_block", (True, False)) else ()
        self._failures = number_column(task, "failures")
        self._shown = int(number_column(task, "output_characters", SHOWN_CHARACTERS))
        self._seed, self._chance = seed, random.Random(seed)
        self.prompt, self.blocks, self.outputs = prompt, list[str](), list[str]()
        self._errors = 0
        return self._observe(prompt)

    def step(self, action: str) -> Step:
        if OPEN in action or CLOSE in action:
            return self._run_block(action)
        answer = extract_answer(action)
        if answer is None:
            return self._invalid("no code block, no ####")
        right, [spelled] = is_equivalent(self._target, answer), answers([action])
        told = {
            "grounded": any(_appears(spelled, output) for output in self.outputs),
            "after_error": self._errors > 0,
            "recovered": self._errors > 0 and right,
        }
        return Step(self._observe(""), reward=float(right), done=True, metrics=told)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _run_block(self, action: str) -> Step:
        found = _TURN.fullmatch(action)
        if found is None or extract_answer(found["plan"]) is not None:
            return self._invalid("one block ends a turn")
        if not self._runs:
            return self._invalid("no interpreter, use ####")
        self.blocks.append(found["code"])
        if self._chance.random() < self._failures:
            output = INJECTED
        else:
            if self._session is None:
                self._session = self.open_session(self._seed)
            output = self._session.run(found["code"]).rstrip("\n")
        failed = _FAILED.search(output) is not None
        self._errors += failed
        self.outputs.append(output)
        shown = _TAG.sub(lambda tag: tag[0].replace("<", "&lt;"), self._cut(output))
        return Step(
            self._observe(f"<out>{shown}</out>"),
            metrics={"code_blocks": 1, "code_errors": failed},
        )

    def _cut(self, output: str) -> str:
        """An output without its middle, if it is too long: an error stands at the end."""
        if len(output) <= self._shown:
            return output
        half = max(self._shown - len(_LEFT_OUT), 0) // 2
        return output[:half] + _LEFT_OUT + output[len(output) - half :]

    def _invalid(self, why: str) -> Step:
        return Step(self._observe(f"<out>{why}</out>"), valid=False)

    def _observe(self, text: str) -> Observation:
        return Observation(text, anchor=[self.prompt, *self.blocks], stop=self._stop)


def _appears(answer: str | None, output: str) -> bool:
    """Whether an answer stands in an output, not as a part of a longer word or number."""
    return re.search(rf"(?<![\w.]){re.escape(str(answer))}(?![\w]|\.\d)", output) is not None
