"""The first example of each kind as text, for ``--dry_run``: what is given, and what is learned."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ml_collections import ConfigDict

from hjax.data.tokenizer import Tokenizer
from hjax.run.examples import learns_from_examples
from hjax.run.inputs import Inputs


def first_examples(config: ConfigDict, inputs: Inputs, source: str) -> dict[str, dict[str, str]]:
    """By kind of example, the ``prompt`` and what is ``learned``, with their special tokens.

    After each step whose label is learned stands the label, as ``[1]``. A prompt that the policy
    answers itself has nothing that is learned.

    Args:
      config: of the run.
      inputs: of the run.
      source: what the algorithm learns from, see ``Algorithm.source``.
    """
    found: dict[str, dict[str, str]] = {}
    if source == "prompts":
        found["prompt"] = _shown(inputs.tokenizer, inputs.train.prompt_tokens[0])
    if not inputs.demonstrations or not learns_from_examples(config, source):
        return found
    if source == "verdicts" and inputs.labels is not None:
        for label, kind in ((True, "right answer"), (False, "wrong answer")):
            if label in inputs.labels:
                prompt, answer = inputs.demonstrations[inputs.labels.index(label)]
                found[kind] = _shown(inputs.tokenizer, prompt, answer)
        return found
    prompt, *responses = inputs.demonstrations[0]
    kinds = {"pairs": ("chosen", "rejected"), "steps": ("steps",)}.get(source, ("demonstration",))
    for kind, response in zip(kinds, responses, strict=True):
        labels = inputs.annotations["labels"][0][0] if kind == "steps" else {}
        found[kind] = _shown(inputs.tokenizer, prompt, response, labels)
    return found


def _shown(
    tokenizer: Tokenizer | None,
    prompt: Sequence[int],
    response: Sequence[int] = (),
    labels: Mapping[int, float] = MappingProxyType({}),
) -> dict[str, Any]:
    """An example as text; token ids without a tokenizer."""

    def text(tokens: Sequence[int]) -> str:
        return str(tokens) if tokenizer is None else tokenizer.decode(tokens, skip_special=False)

    learned, done = "", 0
    for place in [*labels, len(response)]:
        before = text([*prompt, *response[:done]])  # SentencePiece drops a text's first blank
        learned += text([*prompt, *response[:place]]).removeprefix(before)
        learned += f"[{labels[place]:g}]" if place in labels else ""
        done = place
    return {"prompt": text(prompt), "learned": learned}
