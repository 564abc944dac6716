"""Adapters beside PEFT's: the same numbers, files both ways, and what is refused."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import MODELS, logits, model
from helpers import trainer_of
from references import AutoModelForCausalLM, AutoModelForSequenceClassification, peft, torch
from safetensors.numpy import load_file, save_file

import hjax
from hjax.errors import ConfigError
from hjax.models import huggingface
from hjax.models.attention_strategies import Causal
from hjax.models.dropout import Dropout, row_keys, token_keys
from hjax.models.lora import TARGETS, Lora, targets_of
from hjax.models.lora_compute import merge_adapters
from hjax.models.parameters import decoder_network, scalar_network, to_host
from hjax.models.peft_files import CONFIG, WEIGHTS, Adapter, save_adapter
from hjax.models.weights import base_model_path, load_params
from hjax.sharding.layout import make_layouts

TOKENS = np.array([[3, 4, 5, 6, 7, 8, 9], [10, 9, 11, 4, 3, 3, 5]])
LLAMA_LIKE = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
# By family: what PEFT is asked for, and what that is here. A fused tensor has several matrices.
ASKED = {
    "gpt2": (["c_attn", "c_fc"], ("q", "k", "v", "up")),
    "phi3": (["qkv_proj", "down_proj"], ("q", "k", "v", "down")),
    "mixtral": (["q_proj", "k_proj"], ("q", "k")),
    "qwen3_moe": (["q_proj", "o_proj"], ("q", "o")),
    "gpt_oss": (["q_proj", "v_proj"], ("q", "v")),
}
FIRST, EVERYDAY = "qwen3 tied", ("gpt2", "phi3")


def families():
    of_each = {MODELS[name][0]: name for name in reversed(MODELS)}
    for name in sorted({*of_each.values(), FIRST, *EVERYDAY}):
        often = pytest.mark.extended if name in EVERYDAY else pytest.mark.slow
        yield name if name == FIRST else pytest.param(name, marks=often)


def adapted(name, folder, targets=None, rank=3, classifier=False, **options):
    """PEFT's model of a family with random adapters, saved as ``base`` and ``adapter``."""
    model(name).save_pretrained(folder / "base")
    if classifier:
        config = folder / "base" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"pad_token_id": 0}))
    kind = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
    more = {"num_labels": 1} if classifier else {}
    base = kind.from_pretrained(folder / "base", attn_implementation="eager", **more)
    wanted = targets or ASKED.get(MODELS[name][0], (LLAMA_LIKE,))[0]
    task = "SEQ_CLS" if classifier else "CAUSAL_LM"
    asked = {"r": rank, "lora_alpha": 7.0, "target_modules": wanted, "task_type": task} | options
    made = peft.get_peft_model(base, peft.LoraConfig(**asked)).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for key, parameter in made.named_parameters():
            if "lora_" in key:
                parameter.normal_(0, 0.2)
    made.save_pretrained(folder / "adapter")
    return made


def network_with(folder, lora, scalar=False):
    config = huggingface.read_config(folder / "base")
    make = scalar_network if scalar else decoder_network
    return make(dataclasses.replace(config, lora=lora))


def run(network, params):
    mask = jnp.ones(TOKENS.shape, bool)
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)

    @jax.jit
    def logits_of(params):
        decoder = network.bind(params)
        return decoder.logits(decoder.hidden_states(TOKENS, positions, Causal(mask)))

    return logits_of(params)


def one_device():
    return make_layouts(jax.devices()[:1]).train


@pytest.mark.parametrize("name", list(families()))
def test_adapters_of_peft_give_its_numbers_merged_and_beside_the_weights(tmp_path, name):
    theirs = adapted(name, tmp_path)
    expected = logits(theirs, TOKENS)
    assert np.abs(expected - logits(model(name), TOKENS)).max() > 0.01
    np.testing.assert_allclose(
        hjax.load_model(tmp_path / "adapter").logits(TOKENS), expected, atol=1e-4
    )
    lora = Lora(3, 7.0, ASKED.get(MODELS[name][0], (0, ("q", "v", "o", "gate", "down")))[1])
    network = network_with(tmp_path, lora)
    params = load_params(tmp_path / "adapter", network, one_device())
    apart = run(network, params)
    np.testing.assert_allclose(apart, expected, atol=1e-4)
    plain = merge_adapters(params, network)
    assert jax.tree.structure(plain) == jax.tree.structure(network.base.shapes)
    bound = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(run(network.base, plain), apart, rtol=0, atol=bound)
    found = run(network.base, network.without_adapters_of(params))
    np.testing.assert_allclose(found, logits(model(name), TOKENS), atol=1e-4)


@pytest.mark.parametrize("rslora", [pytest.param(False, marks=pytest.mark.extended), True])
def test_they_go_to_peft_and_back_bit_for_bit(tmp_path, rslora):
    theirs = adapted("qwen2", tmp_path, use_rslora=rslora)
    network = network_with(tmp_path, Lora(3, 7.0, ("q", "v", "o", "gate", "down"), rslora))
    params = load_params(tmp_path / "adapter", network, one_device())
    learned, _ = network.partition.split(to_host(params))
    lora = network.config.lora
    save_adapter(tmp_path / "ours", network.declared, learned, lora, str(tmp_path / "base"))
    before, after = (load_file(tmp_path / x / WEIGHTS) for x in ("adapter", "ours"))
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        np.testing.assert_array_equal(after[key], tensor)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    again = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    np.testing.assert_array_equal(logits(again, TOKENS), logits(theirs, TOKENS))


@pytest.mark.parametrize("name", ["gpt2", "phi3"])
@pytest.mark.extended
def test_matrices_in_one_tensor_go_to_peft_as_blocks(tmp_path, name):
    adapted(name, tmp_path)
    network = network_with(tmp_path, Lora(2, 3.0))
    drawn = network.create(0, one_device())
    keys = iter(jax.random.split(jax.random.key(3), 40))
    learned, frozen = network.partition.split(drawn)
    learned = jax.tree.map(lambda x: 0.2 * jax.random.normal(next(keys), x.shape), learned)
    base = load_params(tmp_path / "base", network.base, one_device())
    expected = run(network, network.partition.join(learned, base))
    folder = tmp_path / "ours"
    save_adapter(
        folder, network.declared, to_host(learned), network.config.lora, str(tmp_path / "base")
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(loaded, folder).eval()
    np.testing.assert_allclose(logits(theirs, TOKENS), expected, atol=1e-4)
    np.testing.assert_allclose(hjax.load_model(folder).logits(TOKENS), expected, atol=1e-4)
    assert frozen.keys() == network.base.shapes.keys()


def test_a_scalar_head_is_the_adapters(tmp_path):
    theirs = adapted("qwen2", tmp_path, classifier=True)
    with torch.no_grad():
        theirs.base_model.model.score.modules_to_save.default.weight.normal_()
    theirs.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS)).logits[:, 0].numpy()
    mask = jnp.ones(TOKENS.shape, bool)
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    for lora in (None, Lora(3, 7.0, ("q", "v", "o", "gate", "down"))):
        network = network_with(tmp_path, lora, scalar=True)
        params = load_params(tmp_path / "adapter", network, one_device())
        score = jax.jit(lambda x, bind=network.bind: bind(x)(TOKENS, positions, Causal(mask)))
        found = score(params)[:, -1]
        np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.extended
def test_gradients_are_the_matrices_times_the_other_part(tmp_path):
    """d loss / dA = scaling dW B^T and d loss / dB = scaling A^T dW, of the merged model's dW."""
    model("qwen3").save_pretrained(tmp_path / "base")
    network = network_with(tmp_path, Lora(4, 6.0))
    params = network.create(0, one_device())
    keys = iter(jax.random.split(jax.random.key(1), 60))
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape), params)

    def loss(network, params):
        weights = jnp.sin(jnp.arange(47.0))
        return jnp.mean(jax.nn.log_softmax(run(network, params)) @ weights)

    learned, frozen = network.partition.split(params)
    join = network.partition.join
    found = jax.grad(lambda x: loss(network, join(x, frozen)))(learned)["layers"]
    whole = jax.grad(lambda x: loss(network.base, x))(merge_adapters(params, network))["layers"]
    layers, scaling = params["layers"], 6.0 / 4
    of = {
        "q": ("ldhe,lrhe->ldr", "ldr,ldhe->lrhe"),
        "kv": ("ldcke,lcrke->lcdr", "lcdr,ldcke->lcrke"),
        "o": ("lhed,lrd->lher", "lher,lhed->lrd"),
        "gate_up": ("ldcm,lcrm->lcdr", "lcdr,ldcm->lcrm"),
        "down": ("lmd,lrd->lmr", "lmr,lmd->lrd"),
    }
    for name, (to_a, to_b) in of.items():
        dw, a, b = whole[name], layers[f"{name}_a"], layers[f"{name}_b"]
        np.testing.assert_allclose(found[f"{name}_a"], scaling * jnp.einsum(to_a, dw, b), atol=1e-5)
        np.testing.assert_allclose(found[f"{name}_b"], scaling * jnp.einsum(to_b, a, dw), atol=1e-5)
    assert found.keys() == {f"{name}_{part}" for name in of for part in "ab"}


@pytest.mark.extended
def test_the_base_is_drawn_as_without_adapters():
    config = huggingface.ModelConfig(31, 16, 24, 2, 4, 2, 4, 32)
    network = decoder_network(dataclasses.replace(config, lora=Lora(2, 4.0)))
    plain = decoder_network(config).create(5, one_device())
    drawn = network.create(5, one_device())
    jax.tree.map(np.testing.assert_array_equal, network.without_adapters_of(drawn), plain)
    jax.tree.map(
        np.testing.assert_array_equal,
        network.create_learned(5, one_device()),
        network.partition.split(drawn)[0],
    )
    for name, x in drawn["layers"].items():
        if name.endswith("_b"):
            assert not x.any()
        elif name.endswith("_a"):  # as large as PEFT draws them, uniform to 1 / sqrt(inputs)
            inputs = np.prod(x.shape[1:-1]) / (2 if name in ("kv_a", "gate_up_a") else 1)
            assert np.std(x) == pytest.approx((3 * inputs) ** -0.5, rel=0.25)


def test_names_of_targets():
    assert targets_of(("all",), experts=False) == TARGETS
    assert targets_of(("all",), experts=True) == ("q", "k", "v", "o")
    assert targets_of(("v_proj", "q"), experts=True) == ("q", "v")
    assert targets_of(("all", "down_proj"), experts=True) == ("q", "k", "v", "o", "down")
    for names, said in (
        (("query",), "lora.targets=query: all, or some of q, k, v, o, gate, up, down"),
        ((), "lora.targets=(): all, or some of"),
    ):
        with pytest.raises(ConfigError) as error:
            targets_of(names, experts=False)
        assert said in str(error.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"actor.lora.dropout": 0.1}, "config.actor.lora.dropout=0.1 is for adapters, of which "),
        ({"critic.lora.targets": ("q",)}, "config.critic.lora.targets=('q',) is for adapters"),
        ({"critic.lora.alpha": 64.0}, "config.critic.lora.rank=0 makes none; set the rank to 1"),
        ({"teacher.lora.rslora": True}, "config.teacher.lora.rslora=True is for adapters"),
        ({"actor.lora.dora": True}, "config.actor.lora.dora=True is for adapters"),
        (
            {"critic.lora.rank": 2, "critic.lora.targets": ("query",)},
            "config.critic.lora.targets=query: all, or some of q, k, v, o, gate, up, down",
        ),
        (
            {"actor.lora.rank": 2, "actor.lora.targets": ("",)},
            "config.actor.lora.targets=(): all, or some of",
        ),
    ],
)
def test_settings_without_adapters_and_wrong_ones_are_named_by_their_whole_key(changes, said):
    with pytest.raises(ConfigError) as error, trainer_of("PPO", changes):
        pass
    assert said in str(error.value) and "\n" not in str(error.value)


def changed(**keys):
    def change(folder):
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(config | keys))

    return change


def tensors(change):
    def rewrite(folder):
        found = load_file(folder / WEIGHTS)
        save_file(change(found), folder / WEIGHTS)

    return rewrite


def cut_short(folder):
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:-100])


def pickled(folder):
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
BROKEN = {
    "of another kind": (
        changed(peft_type="IA3"),
        "peft_type 'IA3' is not supported; supported: LORA",
    ),
    "ALoRA": (changed(alora_invocation_tokens=[1]), "with alora_invocation_tokens=[1] are not"),
    "biases": (changed(bias="all"), "adapters with bias='all' are not supported"),
    "another start": (changed(init_lora_weights="pissa_niter_4"), "='pissa_niter_4' changes the"),
    "an unknown start": (changed(init_lora_weights="mine"), "init_lora_weights='mine' changes the"),
    "whole modules": (
        changed(modules_to_save=["lm_head", "score"]),
        "modules_to_save=['lm_head', 'score'], whole",
    ),
    "an output table": (
        tensors(
            lambda x: x | {f"base_model.model.lm_head.lora_{p}.weight": x[FIRST] for p in "AB"}
        ),
        "'lm_head.lora_A.weight' adapts an embedding or output table",
    ),
    "an embedding": (
        tensors(lambda x: x | {"base_model.model.model.embed_tokens.lora_embedding_A": x[FIRST]}),
        "'model.embed_tokens.lora_embedding_A' adapts an embedding",
    ),
    "a quantized base": (
        changed(base_model_name_or_path="unsloth/Qwen2.5-0.5B-unsloth-bnb-4bit"),
        "/adapter,base=unsloth/Qwen2.5-0.5B",
    ),
    "no base": (changed(base_model_name_or_path=None), "base_model_name_or_path is not named"),
    "not JSON": (lambda folder: (folder / CONFIG).write_text("{"), "not valid JSON"),
    "cut short": (cut_short, "not a readable safetensors file"),
    "pickled": (pickled, f"no {WEIGHTS} there; adapters are read from that file alone"),
    "one half": (
        tensors(lambda x: {k: v for k, v in x.items() if k != FIRST}),
        "'model.layers.0.self_attn.q_proj.lora_A.weight' is missing",
    ),
    "not finite": (
        tensors(lambda x: x | {FIRST: np.full_like(x[FIRST], np.nan)}),
        "q_proj.lora_A.weight has values that are not finite",
    ),
    "another base": (
        tensors(lambda x: x | {FIRST: np.zeros((3, 7), np.float32)}),
        "these adapters are for another base",
    ),
    "no such matrix": (
        tensors(lambda x: x | {FIRST.replace("q_proj", "w_proj"): x[FIRST]}),
        "w_proj.lora_A.weight' is no adapter of a matrix",
    ),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    adapted("qwen2", folder)
    return folder


@pytest.mark.parametrize("what", BROKEN)
def test_broken_adapters_are_named_in_one_line(sound, tmp_path, what):
    change, said = BROKEN[what]
    shutil.copytree(sound / "adapter", tmp_path / "adapter")
    change(tmp_path / "adapter")
    with pytest.raises(ConfigError) as error:
        hjax.load_model(tmp_path / "adapter")
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        (Lora(4, 7.0, ("q", "v", "o", "gate", "down")), "lora.rank=4 and the base imply (4, "),
        (Lora(3, 8.0, ("q", "v", "o", "gate", "down")), "lora.alpha=8 with rank 3 by 2.66667"),
        (Lora(3, 7.0, ("q", "v", "o", "gate")), "is not among lora.targets"),
        (Lora(3, 7.0), "_proj.lora_A.weight' is missing; lora.targets must name"),
    ],
)
def test_training_goes_on_only_from_adapters_of_the_same_form(sound, lora, said):
    with pytest.raises(ConfigError) as error:
        load_params(sound / "adapter", network_with(sound, lora), one_device())
    assert said in str(error.value)


def test_matrices_that_share_a_tensor_are_named_all(tmp_path):
    adapted("gpt2", tmp_path)
    with pytest.raises(ConfigError, match="is of matrices too that are not among lora.targets"):
        load_params(
            tmp_path / "adapter", network_with(tmp_path, Lora(3, 7.0, ("q", "v", "up"))),
            one_device(),
        )  # fmt: skip


def test_an_adapter_on_an_adapter_is_refused(sound, tmp_path):
    shutil.copytree(sound / "adapter", tmp_path / "two")
    changed(base_model_name_or_path=str(sound / "adapter"))(tmp_path / "two")
    with pytest.raises(ConfigError, match="base_model_name_or_path is an adapter itself"):
        Adapter(tmp_path / "two")


@pytest.mark.parametrize("start", [True, False, "Gaussian", "eva", "orthogonal", "mica"])
def test_starts_that_leave_the_base_as_it_is_are_read(sound, tmp_path, start):
    shutil.copytree(sound / "adapter", tmp_path / "adapter")
    changed(init_lora_weights=start, eva_config={"rho": 2.0})(tmp_path / "adapter")
    Adapter(tmp_path / "adapter")


def test_adapters_are_given_another_base(sound, tmp_path):
    """As those that learned beside quantized weights need: the float model instead."""
    shutil.copytree(sound / "adapter", tmp_path / "adapter")
    before = Adapter(sound / "adapter")
    expected = hjax.load_model(sound / "adapter").logits(TOKENS)
    changed(base_model_name_or_path="unsloth/nothing-bnb-4bit")(tmp_path / "adapter")
    given = f"{tmp_path}/adapter,base={before.base}"
    np.testing.assert_array_equal(hjax.load_model(given).logits(TOKENS), expected)
    assert base_model_path(given) == before.base
    with pytest.raises(ConfigError, match="no model directory 'nowhere'"):
        hjax.load_model(f"{tmp_path}/adapter,base=nowhere")
    with pytest.raises(ConfigError, match="no model directory"):
        hjax.load_model(f"{before.base},base={before.base}")  # no adapters


def test_a_share_is_kept_and_every_matrix_layer_token_and_update_has_its_own():
    rate = 0.4
    rows = row_keys(3, jnp.int32(0), 8, 4)
    other = row_keys(3, jnp.int32(1), 8, 4)
    assert len(np.unique(rows[:, :2], axis=0)) == 2 and len(np.unique(rows[:, 2:], axis=0)) == 8
    assert not (np.asarray(rows) == np.asarray(other)).all(axis=1).any()
    tokens = token_keys(rows, 4, 5, 6)
    assert tokens.shape == (2, 5 + 4 * 6, 2)
    np.testing.assert_array_equal(tokens[1, 0], rows[4, :2])
    np.testing.assert_array_equal(tokens[1, 5 + 2 * 6], rows[6, 2:])
    positions = jnp.tile(jnp.concatenate([jnp.arange(5), jnp.tile(5 + jnp.arange(6), 4)]), (2, 1))
    drawn = Dropout.of(tokens, positions)
    x = jnp.ones((2, 29, 500))
    found = np.asarray(drawn.for_layer(0).apply(x, rate, (1, 2), paired=True))
    assert found.shape == (2, 29, 2, 500)
    assert set(np.unique(found)) == {0, np.float32(1 / (1 - rate))}
    kept = (found > 0).reshape(-1, 500)
    # 58 tokens for 2 matrices: four standard deviations of a mean of 58,000 draws.
    assert abs(kept.mean() - (1 - rate)) < 4 * np.sqrt(rate * (1 - rate) / kept.size)
    assert len(np.unique(kept, axis=0)) == len(kept)
    later = np.asarray(drawn.for_layer(1).apply(x, rate, (1, 2), paired=True))
    assert abs((found == later).mean() - (rate**2 + (1 - rate) ** 2)) < 0.01
