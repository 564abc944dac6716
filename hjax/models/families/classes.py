"""The classes that a config.json names beside its family: classes of that family, or it is another
model than its ``model_type`` says."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from hjax.models.families.given import Given

# A class of transformers: the family's name, then what the class is for.
_CLASS = re.compile(
    r"(\w+?)(For[A-Z]\w*|LMHeadModel|DoubleHeadsModel|PreTrainedModel|Model|Config)", re.ASCII
)


def check_classes(given: Given, own: str, classifier: str) -> None:
    """Hold ``architectures``, ``auto_map`` and ``is_encoder_decoder`` against the family.

    Classes with any head are the family's: heads are tensors, which are looked at where these are
    read. Code of the model's own is never run. As transformers without ``trust_remote_code`` takes
    its own class of a known ``model_type``, so is it here, where both have the name of one; a class
    of another name computes something else.

    Args:
      given: the config.json.
      own: transformers' class of this family.
      classifier: its class for sequence classification, called as its others are.

    Raises:
      ConfigError: a class of another family, code of a model of its own, or an encoder, by name.
    """
    given.only("is_encoder_decoder", False)
    kind = given.content.get("model_type")

    def of_family(name: str) -> bool:
        return name == own or _family(name) == _family(classifier)

    for name in _strings(given, "architectures", given.get("architectures", [])):
        if not of_family(name):
            raise given.error(
                f"architectures has {name!r}, which is no class of model_type {kind} (its own is "
                f"{own!r}); give the config.json of these weights"
            )
    code = given.get("auto_map", {})
    if not isinstance(code, Mapping):
        raise given.error(f"auto_map is {code!r}; names of classes by what they are for")
    for key, found in code.items():
        if not str(key).startswith(("AutoConfig", "AutoModel")):
            continue  # how text is read: tokenizer.json says it
        for name in _strings(given, f"auto_map.{key}", found):
            if not of_family(name.rpartition(".")[2]):
                raise given.error(
                    f"auto_map.{key} has {name!r}, code of the model's own, which is not run; "
                    f"remove auto_map if transformers' {own!r} is the same model"
                )


def _family(name: str) -> str:
    """Of a class's name that of its family, in small letters: Llama's was once LLaMA."""
    match = _CLASS.fullmatch(name)
    return (match[1] if match else name).lower()


def _strings(given: Given, key: str, found: Any) -> Iterable[str]:
    every = [found] if isinstance(found, str) else found
    if not isinstance(every, list) or not all(isinstance(name, str) for name in every):
        raise given.error(f"{key} is {found!r}; names of classes")
    return every
