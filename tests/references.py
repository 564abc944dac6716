"""torch, an independent reference: without it a test that compares with it is skipped.

setup.cfg says on which Pythons the test extra brings it.
"""

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

__all__ = ["torch"]
