"""Independent references: torch, peft, and what transformers has under a name.

`from references import torch, LlamaForCausalLM` imports nothing yet: they take seconds to load,
which only tests that compare with them spend. Without one, or where one of transformers' needs
torch and there is none, such a test is skipped. setup.cfg says which Pythons' test extra has them.
"""

import importlib
import importlib.util
from typing import Any

import pytest


class _Reference:
    """A module, or what a module has under a name, loaded when something of it is used."""

    def __init__(self, module: str, name: str = ""):
        self._module, self._name = module, name

    def _loaded(self) -> Any:
        try:
            module = importlib.import_module(self._module)
            found = getattr(module, self._name) if self._name else module
        except ModuleNotFoundError as error:
            found, missing = None, error.name or "torch"
        else:  # transformers has a dummy that says what it needs
            missing = next((b for b in getattr(found, "_backends", ()) if not _there(b)), None)
        if missing:
            pytest.skip(f"compares with {missing}, which is not installed: pip install {missing}")
        return found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("pytestmark", "place_as"):  # pytest asks each object
            raise AttributeError(name)
        try:
            return getattr(self._loaded(), name)
        except ModuleNotFoundError:  # a module of transformers' that asks for torch only now
            return pytest.skip(f"{self._module}.{name} needs torch: pip install torch")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._loaded()(*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self._loaded()[key]


def _there(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


torch = _Reference("torch")
peft = _Reference("peft")
safetensors_torch = _Reference("safetensors.torch")
modeling_auto = _Reference("transformers.models.auto.modeling_auto")
modeling_llama = _Reference("transformers.models.llama.modeling_llama")


def __getattr__(name: str) -> _Reference:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Reference("transformers", name)
