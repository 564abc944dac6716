"""Value, reward and cost heads: transformers' LlamaForSequenceClassification is the truth."""

import jax
import numpy as np
import pytest
from references import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, torch
from safetensors.numpy import load_file, save_file

from hjax.errors import ConfigError
from hjax.models import parameter_counts
from hjax.models.compute import Compute
from hjax.models.forward import sequence_states
from hjax.models.parameters import scalar_network
from hjax.models.weights import load_params, read_config
from hjax.sharding.layout import make_layouts

ROWS = [[5, 9, 2, 40], [3, 17], [22, 31, 46, 11, 8, 1]]


def saved(kind, path, **changes):
    config = LlamaConfig(
        vocab_size=47,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        **changes,
    )
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(
                1 + 0.3 * torch.randn(p.shape) if "norm" in name else 0.2 * torch.randn(p.shape)
            )
    model.save_pretrained(path)
    return model


def load_scalar(path):
    config = read_config(path)
    layout = make_layouts(jax.devices()[:1]).train
    return config, load_params(path, scalar_network(config), layout)


@pytest.mark.parametrize("tied", [True, False])
def test_scores_equal_a_sequence_classifier(tied, tmp_path):
    theirs = saved(LlamaForSequenceClassification, tmp_path, num_labels=1, tie_word_embeddings=tied)
    config, params = load_scalar(tmp_path)
    network = scalar_network(config)
    assert (
        parameter_counts.parameter_count(config, scalar=True) == theirs.num_parameters() + 1
    )  # and a bias
    tokens, mask = np.zeros((3, 8), np.int32), np.zeros((3, 8), bool)
    for i, row in enumerate(ROWS):
        tokens[i, : len(row)], mask[i, : len(row)] = row, True

    @jax.jit
    def score(params):
        model = network.bind(params)
        return model.score(sequence_states(model.decoder, tokens, mask, Compute()))

    with torch.no_grad():
        expected = [theirs(torch.tensor([row])).logits.item() for row in ROWS]
    last = np.asarray(score(params))[range(3), mask.sum(1) - 1]
    np.testing.assert_allclose(last, expected, atol=2e-5)


def test_a_language_model_gets_a_head_of_zeros(tmp_path):
    saved(LlamaForCausalLM, tmp_path, tie_word_embeddings=False)
    config, params = load_scalar(tmp_path)
    assert not np.any(params["head"]) and params["head"].shape == (32,)
    expected = jax.tree.map(lambda x: x.shape, scalar_network(config).shapes)
    assert jax.tree.map(lambda x: x.shape, params) == expected


@pytest.mark.parametrize("tied", [True, False])
def test_an_output_table_stands_for_a_missing_embedding_only_where_they_are_tied(tied, tmp_path):
    theirs = saved(LlamaForCausalLM, tmp_path, tie_word_embeddings=tied)
    stored = load_file(tmp_path / "model.safetensors")
    embedding = stored.pop("model.embed_tokens.weight")
    save_file({**stored, "lm_head.weight": embedding + (not tied)}, tmp_path / "model.safetensors")
    if tied:
        found = load_scalar(tmp_path)[1]["decoder"]["embedding"]
        np.testing.assert_array_equal(found, theirs.model.embed_tokens.weight.detach().numpy())
    else:
        with pytest.raises(ConfigError, match="tensor 'model.embed_tokens.weight' is missing"):
            load_scalar(tmp_path)


def test_a_classifier_of_several_classes_is_refused(tmp_path):
    saved(LlamaForSequenceClassification, tmp_path, num_labels=3)
    with pytest.raises(ConfigError, match=r"score.weight has shape \(3, 32\).*\(1, 32\)"):
        load_scalar(tmp_path)
