"""Reward for programs: the share of a task's tests that the program in a response passes.

    --config.reward.function=code_tests.py:reward

A row has its tests in the column `tests`, `input_output` (APPS, TACO), `public_test_cases`
(LiveCodeBench), `reward_model` (verl's) or `reward_spec` (SkyRL's, both in `ground_truth`), as an
object or its JSON:

- `{"inputs": [...], "outputs": [...]}`: what a program reads and must print, and with
  `"fn_name": "f"` arguments and results of a function, or of a method of a class `Solution`;
- `[{"input": ..., "output": ..., "testtype": "stdin" or "functional"}, ...]`, the function's name
  in the column `fn_name` or in `metadata` as `func_name`.

The program runs in a sandbox (``hjax.sandbox.local_sandbox``). Expected outputs never enter it:
inputs go in, outputs come out, and are compared here.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hjax.errors import ConfigError, DataError, short_repr
from hjax.machine import available_cores
from hjax.rewards.reward_results import RewardsWithMetrics
from hjax.sandbox.local_sandbox import ExecResult, Sandbox, SandboxLimits, python_command
from hjax.sandbox.sandbox_settings import SandboxSettings

# Columns with tests, in order of preference.
TEST_COLUMNS = ("tests", "input_output", "public_test_cases", "reward_model", "reward_spec")
# What a test can come to. `no_code` and `syntax` are a response's, for all its tests.
KINDS = (
    "passed", "wrong", "error", "timeout", "memory", "crash", "output", "limit", "syntax",
    "no_code",
)  # fmt: skip

_FENCED = re.compile(r"```[ \t]*([\w+#-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_LANGUAGES = ("", "py", "python", "python3")
_FLOAT = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?")
_RUNNER = Path(__file__).with_name("code_runner.py").read_bytes()
_made_sandbox = functools.cache(SandboxSettings.make)


@dataclasses.dataclass(frozen=True)
class ProgramTests:
    """Tests of one task.

    Attributes:
      inputs: texts for stdin, or lists of arguments.
      outputs: expected texts, or results.
      function: name of the function; empty: programs read stdin and print.
    """

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    function: str = ""


class CodeTests:
    """Share of tests that the last fenced program of a response passes, 0 to 1.

    Args:
      seconds: processor time of a test; by the clock it may take four times as long.
      total_seconds: processor time of all tests of a response; further ones count as failed.
      memory_bytes: of a program.
      partial: the share of tests passed; False: 1 where all are passed, else 0.
      tolerance: relative difference of two numbers that counts as equal, where the expected one is
        no integer.
      sandbox: of your own (``hjax.sandbox.local_sandbox.Sandbox``); None: that of the config's
        section ``sandbox``.
      command: that runs a Python file there; empty: this Python here, elsewhere ``python3``.

    Raises:
      ConfigError: a number that is not positive.
    """

    def __init__(
        self,
        seconds: int = 4,
        total_seconds: int = 30,
        memory_bytes: int = 1 << 30,
        partial: bool = True,
        tolerance: float = 1e-6,
        sandbox: Sandbox | None = None,
        command: Sequence[str] = (),
    ):
        for name, value in (("seconds", seconds), ("total_seconds", total_seconds)):
            if not isinstance(value, int) or value <= 0:
                raise ConfigError(f"CodeTests: {name}={value!r} must be a positive integer")
        self._seconds, self._partial, self._tolerance = seconds, partial, tolerance
        self._limits = SandboxLimits(
            cpu_seconds=total_seconds, wall_seconds=4 * total_seconds, memory_bytes=memory_bytes
        )
        self._sandbox, self._command = sandbox, tuple(command)
        self._settings = SandboxSettings()

    def use_sandbox(self, settings: SandboxSettings) -> None:
        """Run programs as a run's config says, unless a sandbox was given."""
        self._settings = settings

    def __call__(
        self, prompts: Sequence[Any], responses: Sequence[str], **columns: Sequence[Any]
    ) -> RewardsWithMetrics:
        """A reward per response, and the share of its tests that came to each kind.

        Raises:
          DataError: a row without tests, or with tests of another form.
          ConfigError: this machine cannot confine programs.
          RunError: the sandbox failed.
        """
        tests = program_tests(columns)
        sandbox = self._sandbox or _made_sandbox(self._settings)
        with concurrent.futures.ThreadPoolExecutor(available_cores()) as pool:
            found = list(pool.map(lambda r, t: self._kinds(r, t, sandbox), responses, tests))
        shares = {kind: [kinds.count(kind) / len(kinds) for kinds in found] for kind in KINDS}
        rewards = [x if self._partial else float(x == 1.0) for x in shares["passed"]]
        return RewardsWithMetrics(rewards, {f"tests_{kind}": x for kind, x in shares.items()})

    def _kinds(self, response: str, tests: ProgramTests, sandbox: Sandbox) -> list[str]:
        """What each test of a response came to."""
        code = extract_code(response)
        if code is None:
            return ["no_code"] * len(tests.inputs)
        name = sandbox.create()
        try:
            job = {
                "function": tests.function,
                "inputs": tests.inputs,
                "cpu_seconds": self._seconds,
                "wall_seconds": 4 * self._seconds,
                "output_bytes": max(1 << 20, 4 * len(json.dumps(tests.outputs))),
            }
            sandbox.write(name, "job.json", json.dumps(job).encode())
            sandbox.write(name, "solution.py", code.encode("utf-8", "replace"))
            sandbox.write(name, "code_runner.py", _RUNNER)
            python = self._command or (python_command(sandbox), "-I")
            command = [*python, "code_runner.py"]
            return self._compare(tests, sandbox.exec(name, command, limits=self._limits))
        finally:
            sandbox.kill(name)

    def _compare(self, tests: ProgramTests, done: ExecResult) -> list[str]:
        reported: dict[int, tuple[str, Any]] = {}
        for line in done.stdout.split(b"\n"):
            found = _json_or_none(line)
            if not isinstance(found, dict):
                continue
            if found.get("kind") == "syntax":
                return ["syntax"] * len(tests.inputs)
            number, kind = found.get("test"), found.get("kind")
            if type(number) is int and kind in KINDS + ("ok",) and kind != "passed":
                reported.setdefault(number, (kind, found.get("output")))
        kinds = []
        for number, expected in enumerate(tests.outputs):
            kind, output = reported.get(number, ("limit" if done.ended_by else "crash", None))
            if kind == "ok":
                kind = "passed" if self._is_right(tests, expected, output) else "wrong"
            kinds.append(kind)
        return kinds

    def _is_right(self, tests: ProgramTests, expected: Any, output: Any) -> bool:
        if not isinstance(output, str):
            return False
        if not tests.function:
            return texts_agree(expected, output, self._tolerance)
        try:
            found = json.loads(output)
        except (ValueError, RecursionError):
            return False
        return values_agree(expected, found, self._tolerance)


def extract_code(response: str) -> str | None:
    """The last program between ``` fences, of Python or no named language; else None."""
    blocks = _FENCED.findall(response)
    found = [code for language, code in blocks if language.lower() in _LANGUAGES and code.strip()]
    return found[-1] if found else None


def program_tests(columns: Mapping[str, Sequence[Any]]) -> list[ProgramTests]:
    """The tests of each row.

    Raises:
      DataError: no column of TEST_COLUMNS, or a row of another form.
    """
    name = next((name for name in TEST_COLUMNS if name in columns), None)
    if name is None:
        raise DataError(
            f"code_tests: no column with tests, one of {', '.join(TEST_COLUMNS)}; there are "
            f"{', '.join(columns) or 'none'}"
        )
    rows = len(columns[name])
    functions: list[Any] = list(columns.get("fn_name") or [None] * rows)
    for row, told in enumerate(columns.get("metadata") or []):
        told = _json_or_none(told) if isinstance(told, str | bytes) else told
        if functions[row] is None and isinstance(told, Mapping):
            functions[row] = told.get("func_name")
    return [
        _tests_of_row(value, functions[i], f"code_tests: {name} of row {i + 1}")
        for i, value in enumerate(columns[name])
    ]


def _tests_of_row(value: Any, function: Any, where: str) -> ProgramTests:
    if isinstance(value, Mapping) and "ground_truth" in value:
        value = value["ground_truth"]
    shown = short_repr(value)
    if isinstance(value, str):
        value = _json_or_none(value)
    inputs: Any = None
    outputs: Any = None
    if isinstance(value, Mapping):
        inputs, outputs = value.get("inputs"), value.get("outputs")
        function = value.get("fn_name") or function
    elif isinstance(value, Sequence) and all(isinstance(x, Mapping) for x in value):
        inputs = [test.get("input") for test in value]
        outputs = [test.get("output") for test in value]
        if all(test.get("testtype") == "stdin" for test in value):
            function = None
    if not _is_list(inputs) or not _is_list(outputs) or len(inputs) != len(outputs) or not inputs:
        raise DataError(
            f"{where} is {shown}; it must have as many `inputs` as `outputs`, at least "
            "one, or be a list of tests with `input` and `output` (docs/rewards.md)"
        )
    if not function:
        if not all(isinstance(x, str) for x in (*inputs, *outputs)):
            raise DataError(f"{where}: without `fn_name` inputs and outputs must be texts")
        return ProgramTests(tuple(inputs), tuple(outputs))
    if not isinstance(function, str) or not function.isidentifier():
        raise DataError(f"{where}: fn_name={function!r} must be the name of a function")
    arguments = tuple(_arguments(given, where) for given in inputs)
    return ProgramTests(arguments, tuple(_result(x) for x in outputs), function)


def _arguments(given: Any, where: str) -> list[Any]:
    """Arguments of a call: a list, or text with the JSON of one on each line."""
    if _is_list(given):
        return list(given)
    lines = [line for line in given.split("\n") if line.strip()] if isinstance(given, str) else [""]
    try:
        return [json.loads(line) for line in lines]
    except (ValueError, RecursionError):
        raise DataError(
            f"{where}: the input {str(given)[:60]!r} must be a list of arguments, or have the JSON "
            "of one on each line"
        ) from None


def _result(expected: Any) -> Any:
    """An expected result: JSON if it is such text."""
    if isinstance(expected, str):
        try:
            return json.loads(expected)
        except (ValueError, RecursionError):
            return expected
    return list(expected) if _is_list(expected) else expected


def texts_agree(expected: str, output: str, tolerance: float) -> bool:
    """Whether a program printed what was expected: the same lines of the same words, spaces and
    empty lines at the end aside; numbers by their value."""
    lines = [[line.split() for line in text.rstrip().split("\n")] for text in (expected, output)]
    if [len(line) for line in lines[0]] != [len(line) for line in lines[1]]:
        return False
    words = (itertools.chain.from_iterable(side) for side in lines)
    pairs = zip(*words, strict=True)
    return all(a == b or _numbers_agree(a, b, tolerance) for a, b in pairs)


def _numbers_agree(expected: str, output: str, tolerance: float) -> bool:
    """Whether two words are numbers of one value; an integer only equals the same digits."""
    if len(output) > 400 or not _FLOAT.fullmatch(expected):
        return False
    try:
        return values_agree(float(expected), float(output), tolerance)
    except ValueError:
        return False


def values_agree(expected: Any, output: Any, tolerance: float) -> bool:
    """Whether two values of JSON are equal; numbers within a relative tolerance if a float is
    expected. A boolean equals no number."""
    if isinstance(expected, Mapping) and isinstance(output, dict):
        return expected.keys() == output.keys() and all(
            values_agree(expected[key], output[key], tolerance) for key in expected
        )
    if _is_list(expected) and _is_list(output):
        return len(expected) == len(output) and all(
            values_agree(a, b, tolerance) for a, b in zip(expected, output, strict=True)
        )
    if isinstance(expected, bool) or isinstance(output, bool):
        return expected is output
    if isinstance(expected, float) and isinstance(output, int | float) and expected != output:
        with contextlib.suppress(OverflowError):
            return abs(expected - output) <= tolerance * max(abs(expected), 1.0)
    return bool(expected == output)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _json_or_none(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


# `--config.reward.function=code_tests.py:reward`
reward = code_tests = CodeTests()
