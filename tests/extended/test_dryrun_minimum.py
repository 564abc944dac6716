"""The least that decoding and updates have to do, counted pair by pair."""

from __future__ import annotations

import dataclasses

import pytest
from program_costs.lower_bound import Tokens

from hjax.models import parameter_counts
from hjax.models.model_config import LayerKind, ModelConfig

PLAIN = ModelConfig(
    vocab_size=64, hidden_size=32, layers=3, heads=4, kv_heads=2, head_dim=16, mlp_size=64,
    max_length=2048,
)  # fmt: skip
WINDOWED = dataclasses.replace(
    PLAIN, layer_kinds=(LayerKind(window=100), LayerKind(), LayerKind(window=700))
)
ROWS, SAMPLES, PROMPT, RESPONSE = 8, 4, 300, 500


def seen(model: ModelConfig, place: int) -> list[int]:
    """First token that the one at a place sees, by layer."""
    kinds = model.layer_kinds or (LayerKind(),) * model.layers
    return [0 if k.window is None else max(0, place + 1 - k.window) for k in kinds]


@pytest.mark.parametrize("model", [PLAIN, WINDOWED], ids=["plain", "windows"])
def test_products_of_attention_are_those_of_the_pairs_that_see_each_other(model):
    groups = ROWS // SAMPLES
    pairs = sum(
        times * (place + 1 - first)
        for place in range(PROMPT + RESPONSE)
        for times in [groups if place < PROMPT else ROWS]
        for first in seen(model, place)
    )
    tokens = Tokens(ROWS, SAMPLES, PROMPT, RESPONSE)
    every = groups * PROMPT + ROWS * RESPONSE
    products = 2 * model.layers * parameter_counts.active_layer_parameters(model) * every
    products += 2 * model.hidden_size * model.vocab_size * ROWS * RESPONSE
    expected = products + 4 * model.heads * model.head_dim * pairs
    assert tokens.forward_flops(model, False) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("model", [PLAIN, WINDOWED], ids=["plain", "windows"])
def test_decoding_reads_of_the_cache_what_each_layer_sees(model):
    read = 0
    for place in range(PROMPT, PROMPT + RESPONSE):
        for first in seen(model, place):
            read += ROWS // SAMPLES * max(0, PROMPT - first)  # once for all samples of a prompt
            read += ROWS * (place + 1 - max(PROMPT, first))
    tokens = Tokens(ROWS, SAMPLES, PROMPT, RESPONSE)
    assert tokens.read_while_decoding(model) == pytest.approx(read, rel=3e-3)
