"""torch, an independent reference: without it a test that compares with it is skipped.

setup.cfg says on which Pythons the test extra brings it.
"""

import importlib
from typing import Any

import pytest

try:
    import torch
except ModuleNotFoundError:

    class _Absent:
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            pytest.skip("compares with torch, which is not installed: pip install torch")

    torch = _Absent()  # type: ignore[assignment]


def llama_layers() -> Any:
    """transformers' module of Llama's layers, which imports torch; without it a skip."""
    assert torch.nn
    return importlib.import_module("transformers.models.llama.modeling_llama")
