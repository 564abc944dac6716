"""What is not in the README's test line: `.ci/run` and `python -m pytest -m extended` run it.

Long tables, features beside each other, predictions of the planner and of compilers, Ray, resumed
and interrupted runs. A single test of a file in `tests/` is marked `extended` by hand.
"""

import pathlib

import pytest

FOLDER = pathlib.Path(__file__).parent


def pytest_itemcollected(item: pytest.Item) -> None:
    if FOLDER in item.path.parents:
        item.add_marker(pytest.mark.extended)
