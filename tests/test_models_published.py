"""config.json files as makers and mirrors publish them: which are read, which are refused.

The files are written by hand after the published ones (``published_configs``), with their sizes
made small where a model is computed.
"""

import json

import numpy as np
import pytest
from families import logits, randomise
from published_configs import REFUSED, TAKEN, newer, shrunk
from references import AutoConfig, AutoModelForCausalLM, torch

import hjax
from hjax.errors import ConfigError
from hjax.models.families import from_hf, to_hf
from hjax.models.families.checked_config import NEUTRAL_VALUES

TOKENS = np.random.default_rng(0).integers(1, 47, (2, 20)).astype(np.int32)
QUICK = ("unsloth/Llama-3.2-1B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct")


def test_there_are_fifty_and_ten():
    assert len(TAKEN) >= 50 and len(REFUSED) >= 10


@pytest.mark.parametrize("name", TAKEN)
def test_a_published_file_is_read_and_written_again(name):
    config = from_hf(TAKEN[name])
    assert from_hf(to_hf(config)) == config
    small = from_hf(shrunk(TAKEN[name]))
    assert (small.family, small.activation) == (config.family, config.activation)


@pytest.mark.parametrize("name", REFUSED)
def test_what_changes_the_network_is_refused_in_one_line(name):
    config, line = REFUSED[name]
    with pytest.raises(ConfigError, match=line) as caught:
        from_hf(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.extended) for n in TAKEN]
)
def test_logits_are_transformers_of_the_same_file(name, tmp_path):
    content = shrunk(TAKEN[name])
    theirs = {k: x for k, x in content.items() if x != "auto"}  # which transformers cannot read
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    asked = AutoConfig.from_pretrained(tmp_path)
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(
        asked, attn_implementation="eager", dtype=torch.float32
    )
    theirs = randomise(theirs.eval())
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(content))
    ours = hjax.load_model(tmp_path, dtype="float32").logits(TOKENS)
    np.testing.assert_allclose(ours, logits(theirs, TOKENS), rtol=1e-4, atol=1e-4)


SOUND = TAKEN["Qwen/Qwen3-0.6B"]


@pytest.mark.parametrize(
    "stamp",
    [
        {"unheard_of": False, "unheard_of_too": None, "and_this": "", "that": [], "those": {}},
        {"temperature": 0.6, "top_p": 0.95, "do_sample": True, "max_length": 20},
        {"tokenizer_class": "Qwen2Tokenizer", "prefix": None, "problem_type": "regression"},
        {"residual_multiplier": 1.0, "num_experts": 0, "q_lora_rank": 0, "n_group": 1},
        {"torch_dtype": "auto"},
        {"rope_scaling": {"rope_type": "default", "factor": 1.0, "mscale": False}},
    ],
    ids=str,
)
def test_what_changes_nothing_is_taken(stamp):
    assert from_hf(SOUND | stamp) == from_hf(SOUND)


@pytest.mark.parametrize(
    "key, value",
    [
        ("unheard_of", 0),
        ("unheard_of", 1.0),
        ("unheard_of", True),
        ("unheard_of", "x"),
        ("residual_multiplier", 0),
        ("residual_multiplier", True),
        ("num_experts", 1),
        ("num_experts", float("nan")),
        ("use_rope", False),
        ("layer_types_of_mine", ["full_attention"]),
    ],
)
def test_a_number_is_taken_only_of_a_key_that_is_known_to_mean_nothing_by_it(key, value):
    with pytest.raises(ConfigError, match=f"{key}=.* is not supported; remove from config.json"):
        from_hf(SOUND | {key: value})


@pytest.mark.parametrize("content", [SOUND, newer(SOUND)], ids=["rope_scaling", "rope_parameters"])
def test_an_odd_scaling_of_positions_is_refused(content):
    key = "rope_parameters" if "rope_parameters" in content else "rope_scaling"
    with pytest.raises(ConfigError, match="rope_type 'default' knows no factor"):
        from_hf(content | {key: {"rope_type": "default", "factor": 8.0}})


def test_neutral_values_are_none_of_a_familys_own_keys_that_it_reads_otherwise():
    """A family that reads a key decides by itself what its value means."""
    read = from_hf(TAKEN["Qwen/Qwen3-30B-A3B"])
    assert read.experts == 128 and "num_experts" in NEUTRAL_VALUES
    with pytest.raises(ConfigError, match="num_experts is 0; a whole number of 1"):
        from_hf(TAKEN["Qwen/Qwen3-30B-A3B"] | {"num_experts": 0})
