"""Responses of a model that cost whoever reads them: each is read in the time of its length."""

import json
import time

import pytest

from hjax.data import tool_call_forms
from hjax.data.tasks.horn import HornError, parse_program
from hjax.errors import ConfigError, DataError
from hjax.models.rope_override import with_rope_scaling
from hjax.rewards import code_tests, deontic, formats, math_answers

MANY = 20_000
PIECES = (
    r"\boxed{", "{", "}", "<think>", "<tool_call>", "<tool_call>{", "<function=a><parameter=b>",
    "```python\n", "```json\n", "9", "1,", "1/", "1.", ".", "-", "$", " ", "\n", "#### ", "e", "[",
    '{"a":', "Tax result:", "Result:", "a ",
)  # fmt: skip
BEGINNINGS = ("", "Tax result:", "<tool_call>", r"\boxed{", "#### ", "```json\n")
READERS = {
    "a boxed answer": math_answers.extract_answer,
    "a number": math_answers.parse_number,
    "an answer of sara": lambda text: deontic.direct_answer("sara_numeric", text),
    "what a program prints": lambda text: deontic.printed_answer("sara_numeric", text),
    "yes or no": lambda text: deontic.printed_answer("housing", text),
    "a program of clauses": deontic.program_of,
    "code": code_tests.extract_code,
    "JSON": lambda text: formats.json_object(["p"], [text]),
    "tags": lambda text: formats.think_answer(["p"], [text]),
    "calls": lambda text: [
        tool_call_forms.split_calls(text, form, {})
        for form in (tool_call_forms.TAGGED, tool_call_forms.IN_TAGS, tool_call_forms.BARE)
    ],
}


@pytest.mark.parametrize("name", READERS)
def test_a_response_is_read_in_the_time_of_its_length(name):
    read = READERS[name]
    for beginning in BEGINNINGS:
        for piece in PIECES:
            text = beginning + piece * (MANY // len(piece))
            begun = time.thread_time()
            read(text)
            # Their square would be a minute.
            assert time.thread_time() - begun < 2, (beginning, piece)


@pytest.mark.parametrize("text, answer", [
    (r"\boxed{1} \boxed{2", "1"), (r"\boxed{\boxed{3}}", "3"),
    (r"\boxed{\frac{1}{2}} {", r"\frac{1}{2}"),
    (r"} \boxed{4}", "4"), (r"\boxed{5} #### 6", "6"), (r"#### 7 \boxed{8}", "8"),
    (r"\boxed{9 ####", None), (r"{\boxed{}", None),
])  # fmt: skip
def test_which_box_counts(text, answer):
    assert math_answers.extract_answer(text) == answer


def test_numbers_of_thousands_of_digits_are_none():
    assert math_answers.parse_number("9" * 1000) == 10**1000 - 1
    assert math_answers.parse_number("9" * 4301) is None
    response = r"\boxed{%s}" % ("9" * 5000)
    assert math_answers.reward(["p", "p"], [response, r"\boxed{2}"], answer=["2", "2"]) == [0, 1]
    with pytest.raises(HornError, match="a number of 5000 characters"):
        parse_program(f"a({'9' * 5000}).")


@pytest.mark.parametrize("field", ["inputs", "outputs"])
def test_tests_of_programs_that_are_too_deep(field):
    deep = "[" * 100_000 + "]" * 100_000
    tests = {"fn_name": "f", "inputs": ["[1]"], "outputs": ["1"]} | {field: [deep]}
    columns = {"tests": [json.dumps(tests)]}
    if field == "inputs":
        with pytest.raises(DataError, match="must be a list of arguments"):
            code_tests.program_tests(columns)
    else:
        assert code_tests.program_tests(columns)[0].outputs == (deep,)


def test_a_setting_that_is_too_deep():
    with pytest.raises(ConfigError, match="no JSON"):
        with_rope_scaling(None, '{"factor":' * 50_000)
