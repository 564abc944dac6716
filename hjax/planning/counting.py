"""A model as the search takes it: a plain record of what counts."""

from __future__ import annotations

from hjax.kernels import cudnn
from hjax.models import arithmetic, remat
from hjax.models.config import ModelConfig
from hjax.planning.records import ModelCounts


def counts(config: ModelConfig, name: str = "", scalar: bool = False) -> ModelCounts:
    """The record that the auto-mapping takes."""
    head = config.hidden_size * (1 if scalar else config.vocab_size)
    total = arithmetic.parameters(config, scalar)
    activations, whole = arithmetic.activation_elements(config)
    gradients, whole_gradients = arithmetic.gradient_elements(config)
    products, whole_products = arithmetic.product_elements(config)
    return ModelCounts(
        name=name,
        layers=config.layers,
        hidden=config.hidden_size,
        heads=config.heads,
        kv_heads=config.kv_heads,
        mlp=config.mlp_size,
        vocab=config.vocab_size,
        experts=config.experts,
        experts_per_token=config.experts_per_token,
        # What is counted is split over devices; a scalar head's bias, one number, is not.
        parameters=total - int(scalar),
        layer_parameters=arithmetic.layer_parameters(config),
        layer_active=arithmetic.active_layer_parameters(config),
        layer_expert=arithmetic.expert_parameters(config),
        head_parameters=head,
        attention_width=config.heads * config.head_dim,
        cache_elements=arithmetic.cache_elements(config),
        layer_activations=activations,
        layer_activations_whole=whole,
        frozen=total - arithmetic.learned_parameters(config, scalar),
        bytes_each=arithmetic.byte_parameters(config),
        remade=activations - arithmetic.kept_elements(config, remat.NONE)[0],
        layer_gates=arithmetic.gate_elements(config),
        layer_products=products,
        layer_products_whole=whole_products,
        layer_gradients=gradients,
        layer_gradients_whole=whole_gradients,
        by_cudnn=not cudnn.refusal(
            "bfloat16", config.head_dim, config.attention_softcap, config.sinks
        ),
    )
