"""The parameters of a decoder: a ``ModelConfig`` gives a nested dict of ``ParameterSpec``."""

import dataclasses
import functools
from typing import Any

from hjax.models.families import family_of
from hjax.models.lora import adapter_parameters
from hjax.models.model_config import ModelConfig
from hjax.models.parameter_spec import (
    ParameterKind,
    ParameterSpec,
    StoredTensor,
    matrix,
    table,
    vector,
)
from hjax.models.quantized import quantized_parameters

Declared = dict[str, Any]  # nested dict of ParameterSpec


@functools.lru_cache(maxsize=256)
def decoder_parameters(config: ModelConfig) -> Declared:
    """The language model's parameters, nested dict of ``ParameterSpec``; cached: do not modify."""
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

    def stored(name: str, parameter: ParameterSpec) -> ParameterSpec:
        return dataclasses.replace(parameter, stored=tensors[name])

    layers = {name: stored(f"layers.{name}", p) for name, p in declared["layers"].items()}
    if config.quantized:
        layers = quantized_parameters(layers, config.quantized)
    if config.lora is not None:
        layers |= adapter_parameters(layers, config.lora)
    declared["layers"] = layers
    return {
        name: stored(name, p) if isinstance(p, ParameterSpec) else p for name, p in declared.items()
    }


@functools.lru_cache(maxsize=256)
def scalar_parameters(config: ModelConfig) -> Declared:
    """The parameters of a decoder with a scalar head; cached, so do not modify."""
    stored = (StoredTensor("score.weight", "1 embed"),)
    # Zero: a new critic predicts 0 everywhere, so the first advantages are the rewards.
    width = (("embed", config.hidden_size),)
    # The stored name of an embedding may be that of an output table only if the two are tied.
    embedding = decoder_parameters(config)["embedding"]
    return {
        "decoder": {**decoder_parameters(without_output_table(config)), "embedding": embedding},
        "head": ParameterSpec(width, ParameterKind.HEAD, stored=stored, optional=True),
        "bias": ParameterSpec((), ParameterKind.HEAD),
    }


def without_output_table(config: ModelConfig) -> ModelConfig:
    """The config of the same decoder without an output table: as if embeddings were tied."""
    return dataclasses.replace(config, tie_embeddings=True)


def _norm(config: ModelConfig, **axes: int) -> ParameterSpec:
    return vector(1 - config.norm_offset, **axes)


def _layer(config: ModelConfig) -> dict[str, ParameterSpec]:
    """Parameters of all layers, stacked on a leading ``layers`` axis, in the order of drawing."""
    sizes = {**config.dimensions, "head_dim": config.head_dim, "pair": 2}

    def axes(names: str) -> dict[str, int]:
        return {name: sizes[name] for name in ("layers", *names.split())}

    heads = config.heads * config.head_dim
    into, out = config.hidden_size**-0.5, (2 * config.layers) ** -0.5
    each = "experts " if config.experts else ""
    first, both = ("gate_up", "pair ") if config.gated_mlp else ("up", "")
    declared = {
        "q": matrix(into, "embed", **axes("embed heads head_dim")),
        # Keys and values in one array take one product; no mesh axis splits ``pair``.
        "kv": matrix(into, "embed", **axes("embed pair kv_heads head_dim")),
        "o": matrix(heads**-0.5 * out, "heads head_dim", **axes("heads head_dim embed")),
    }
    if config.experts:
        declared["router"] = matrix(into, "embed", **axes("embed experts"))
    declared[first] = matrix(into, "embed", **axes(f"{each}embed {both}mlp"))
    declared["down"] = matrix(config.mlp_size**-0.5 * out, "mlp", **axes(f"{each}mlp embed"))
    before, after = config.norms != "after", config.norms != "before"
    of_head, of_all = (config.query_key_norm == kind for kind in ("head", "all"))
    norms = [
        ("attention_norm", "embed", before),
        ("attention_out_norm", "embed", after),
        ("mlp_norm", "embed", before),
        ("mlp_out_norm", "embed", after),
        ("q_norm", "head_dim" if of_head else "heads head_dim", of_head or of_all),
        ("k_norm", "head_dim" if of_head else "kv_heads head_dim", of_head or of_all),
    ]
    vectors = [
        ("attention_norm_bias", "embed", before and config.layer_norm),
        ("mlp_norm_bias", "embed", before and config.layer_norm),
        ("q_bias", "heads head_dim", config.qkv_bias),
        ("kv_bias", "pair kv_heads head_dim", config.qkv_bias),
        ("sinks", "heads", config.sinks),
        ("router_bias", "experts", config.router_bias),
        ("o_bias", "embed", config.output_bias),
        (f"{first}_bias", f"{each}{both}mlp", config.mlp_bias),
        ("down_bias", f"{each}embed", config.mlp_bias),
    ]
    declared |= {name: _norm(config, **axes(names)) for name, names, there in norms if there}
    return declared | {name: vector(0, **axes(names)) for name, names, there in vectors if there}
