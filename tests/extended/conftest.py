"""What is not in the README's test line: `.ci/run` and `python -m pytest -m extended` run it.

Long tables, features beside each other, predictions of the planner and of compilers, Ray, resumed
and interrupted runs. A single test of a file in `tests/` is marked `extended` by hand.
"""

import pathlib

import pytest
from helpers import trainer_of

FOLDER = pathlib.Path(__file__).parent


def pytest_itemcollected(item: pytest.Item) -> None:
    if FOLDER in item.path.parents:
        item.add_marker(pytest.mark.extended)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that answers in the task's letters, so that some answers score more than others."""
    folder = tmp_path_factory.mktemp("base") / "model"
    with trainer_of("GRPO", {"model.layers": 2, "warm_start.steps": 30}) as trainer:
        trainer.export(folder)
    return str(folder)
