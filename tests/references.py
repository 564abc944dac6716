"""torch and peft, independent references: without them a test that compares with one is skipped.

setup.cfg says on which Pythons the test extra brings them.
"""

import importlib
from typing import Any

import pytest


class _Absent:
    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        there = f"{self._name}, which is not installed: pip install {self._name}"
        pytest.skip(f"compares with {there}")


def _reference(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return _Absent(name)


torch = _reference("torch")
peft = _reference("peft")


def llama_layers() -> Any:
    """transformers' module of Llama's layers, which imports torch; without it a skip."""
    assert torch.nn
    return importlib.import_module("transformers.models.llama.modeling_llama")
