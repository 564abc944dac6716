"""The parameters of a decoder, each declared once, from its shapes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from hjax.models.config import ModelConfig
from hjax.models.declaration import Kind, Parameter, Stored, matrix, table, vector
from hjax.models.families import family_of
from hjax.models.lora import adapter_parameters
from hjax.models.quantized import quantized_parameters

Declared = dict[str, Any]  # nested: of Parameter


@functools.lru_cache(maxsize=256)
def decoder_parameters(config: ModelConfig) -> Declared:
    """Nested dict of ``Parameter``, as the language model has them; not to be changed."""
    vocab, width = config.vocab_size, config.hidden_size
    declared: Declared = {
        "embedding": table(0.02, vocab=vocab, embed=width),
        "layers": _layer(config),
        "final_norm": _norm(config, embed=width),
    }
    if config.layer_norm:
        declared["final_norm_bias"] = vector(0, embed=width)
    if config.learned_positions:
        declared["positions"] = table(0.02, positions=config.max_length, embed=width)
    if not config.tie_embeddings:
        declared["unembedding"] = table(width**-0.5, vocab=vocab, embed=width)
    tensors = family_of(config).tensors(config)

    def stored(name: str, parameter: Parameter) -> Parameter:
        return dataclasses.replace(parameter, stored=tensors[name])

    layers = {name: stored(f"layers.{name}", p) for name, p in declared["layers"].items()}
    if config.quantized:
        layers = quantized_parameters(layers, config.quantized)
    if config.lora is not None:
        layers |= adapter_parameters(layers, config.lora)
    declared["layers"] = layers
    return {
        name: stored(name, p) if isinstance(p, Parameter) else p for name, p in declared.items()
    }


@functools.lru_cache(maxsize=256)
def scalar_parameters(config: ModelConfig) -> Declared:
    """Those of a decoder with one number per token; not to be changed."""
    stored = (Stored("score.weight", "1 embed"),)
    # Zero: a new critic predicts 0 everywhere, so the first advantages are the rewards.
    width = (("embed", config.hidden_size),)
    # Only a table that is tied to the embedding may stand for it.
    embedding = decoder_parameters(config)["embedding"]
    return {
        "decoder": {**decoder_parameters(without_output_table(config)), "embedding": embedding},
        "head": Parameter(width, Kind.HEAD, stored=stored, optional=True),
        "bias": Parameter((), Kind.HEAD),
    }


def without_output_table(config: ModelConfig) -> ModelConfig:
    """The same decoder where nothing reads an output table: as if embeddings were tied."""
    return dataclasses.replace(config, tie_embeddings=True)


def _norm(config: ModelConfig, **axes: int) -> Parameter:
    return vector(1 - config.norm_offset, **axes)


def _layer(config: ModelConfig) -> dict[str, Parameter]:
    """Those of all layers, stacked on a leading ``layers`` dimension, in the order of drawing."""
    n, d, h, k, e, m = (
        config.layers,
        config.hidden_size,
        config.heads,
        config.kv_heads,
        config.head_dim,
        config.mlp_size,
    )
    into, out = d**-0.5, (2 * n) ** -0.5
    declared = {
        "q": matrix(into, "embed", layers=n, embed=d, heads=h, head_dim=e),
        # In one array: one product, split along a dimension no mesh axis splits.
        "kv": matrix(into, "embed", layers=n, embed=d, pair=2, kv_heads=k, head_dim=e),
        "o": matrix(
            (h * e) ** -0.5 * out, "heads head_dim", layers=n, heads=h, head_dim=e, embed=d
        ),
    }
    each = {"experts": config.experts} if config.experts else {}
    if config.experts:
        declared["router"] = matrix(into, "embed", layers=n, embed=d, experts=config.experts)
    if config.gated_mlp:
        declared["gate_up"] = matrix(into, "embed", layers=n, **each, embed=d, pair=2, mlp=m)
    else:
        declared["up"] = matrix(into, "embed", layers=n, **each, embed=d, mlp=m)
    declared["down"] = matrix(m**-0.5 * out, "mlp", layers=n, **each, mlp=m, embed=d)
    for part in ("attention", "mlp"):
        if config.norms != "after":
            declared[f"{part}_norm"] = _norm(config, layers=n, embed=d)
            if config.layer_norm:
                declared[f"{part}_norm_bias"] = vector(0, layers=n, embed=d)
        if config.norms != "before":
            declared[f"{part}_out_norm"] = _norm(config, layers=n, embed=d)
    if config.query_key_norm == "head":
        declared["q_norm"] = _norm(config, layers=n, head_dim=e)
        declared["k_norm"] = _norm(config, layers=n, head_dim=e)
    elif config.query_key_norm == "all":
        declared["q_norm"] = _norm(config, layers=n, heads=h, head_dim=e)
        declared["k_norm"] = _norm(config, layers=n, kv_heads=k, head_dim=e)
    if config.qkv_bias:
        declared["q_bias"] = vector(0, layers=n, heads=h, head_dim=e)
        declared["kv_bias"] = vector(0, layers=n, pair=2, kv_heads=k, head_dim=e)
    if config.sinks:
        declared["sinks"] = vector(0, layers=n, heads=h)
    if config.router_bias:
        declared["router_bias"] = vector(0, layers=n, experts=config.experts)
    if config.output_bias:
        declared["o_bias"] = vector(0, layers=n, embed=d)
    if config.mlp_bias:
        if config.gated_mlp:
            declared["gate_up_bias"] = vector(0, layers=n, **each, pair=2, mlp=m)
        else:
            declared["up_bias"] = vector(0, layers=n, **each, mlp=m)
        declared["down_bias"] = vector(0, layers=n, **each, embed=d)
    return declared
