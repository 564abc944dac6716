"""cuDNN's attention: our masks in its terms against the plain form, and what is lowered for a GPU.

There is no GPU here. What the kernel is told is held to the plain form through JAX's own
implementation of the same arguments (``implementation="xla"``); that it is called so, with its
backward pass, is read off programs compiled for H100s that are not there.
"""

import functools
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hjax
from hjax.algorithms import get_algorithm
from hjax.dryrun.shape_inputs import read_shape, shape_inputs
from hjax.errors import ConfigError
from hjax.kernels import attention, blockwise, cudnn, verdict
from hjax.kernels.attention import MaskSpec, PackedPrompts, ScoreOptions
from hjax.kernels.registry import CUDNN, choose_kernel_set, make_kernel_set
from hjax.models.compute import Compute
from hjax.run.placement import plan_from_config
from hjax.run.role_groups import describe_roles

by_xla = functools.partial(cudnn.attend, implementation="xla")
# prompt, response, responses; without responses one sequence of the prompt's length
ROWS = {"one sequence": (57, 0, 0), "one response": (13, 30, 1), "shared prompt": (13, 11, 3)}
# Places of padding before and behind the tokens, by row of the batch; behind of one sequence only.
PADDING = {"none": None, "padded": ((4, 0), (0, 9), (7, 20), (0, 0), (57, 0))}


def case_of(rows, padding):
    prompt, response, count = ROWS[rows]
    length = prompt + response * count
    mask_spec = MaskSpec(prompt, response) if count else MaskSpec()
    if PADDING[padding] is None:
        return mask_spec, length, None
    marks = np.zeros((len(PADDING[padding]), length), np.int32)
    for row, (before, behind) in enumerate(PADDING[padding]):
        end = length if count else length - behind
        marks[row, min(before, prompt if count else length) : end] = 1
    return mask_spec, length, jnp.asarray(marks)


def values_and_gradients(attend, arrays, weight):
    def loss(*arrays):
        out = attend(*arrays)
        return jnp.sum(out * weight), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*arrays)
    return [jnp.where(weight != 0, out, 0), *grads]


@pytest.mark.parametrize("rows, padding, window", [*itertools.product(ROWS, PADDING, (0, 5, 200))])
def test_our_rows_in_its_masks_are_the_plain_form(rows, padding, window):
    mask_spec, length, marks = case_of(rows, padding)
    rng = np.random.default_rng(len(rows) + window)
    batch, heads, kv_heads, dim = len(PADDING["padded"]), 6, 2, 8

    def draw(heads):
        return jnp.asarray(rng.standard_normal((batch, length, heads, dim)), jnp.float32)

    arrays = draw(heads), draw(kv_heads), draw(kv_heads)
    # What is made of padding means nothing: here it is not looked at.
    seen = np.ones((batch, length), int) if marks is None else np.asarray(marks)
    weight = draw(heads) * seen[..., None, None]
    scoring = ScoreOptions(0.3, window=window)
    expected = values_and_gradients(
        lambda q, k, v: attention.reference(q, k, v, marks, None, scoring, mask_spec),
        arrays,
        weight,
    )
    found = values_and_gradients(
        lambda q, k, v: attention.attend(by_xla, q, k, v, marks, None, scoring, mask_spec),
        arrays, weight,
    )  # fmt: skip
    for one, other in zip(expected, found, strict=True):
        assert float(jnp.abs(one - other).max()) <= 2e-6 * float(jnp.abs(one).max())


def test_nothing_comes_from_padding_or_goes_to_it():
    """NaN on padding stays there: kernels leave what they like in places that are none."""
    mask_spec, length, marks = case_of("one sequence", "padded")
    real = np.asarray(marks)[..., None, None] > 0
    rng = np.random.default_rng(0)
    drawn = jnp.asarray(rng.standard_normal((*marks.shape, 2, 8)), jnp.float32)
    x = jnp.where(real, drawn, jnp.nan)

    def loss(x):
        out = by_xla(x, x, x, marks, None, ScoreOptions(), mask_spec)
        return jnp.sum(out), out

    (_, out), grad = jax.value_and_grad(loss, has_aux=True)(x)
    assert np.isfinite(out).all() and np.isfinite(grad).all()
    assert not np.where(real, 0, out).any() and not np.where(real, 0, grad).any()


REFUSED = {
    "float32": (dict(dtype=jnp.float32), "computes in bfloat16 or float16, not in float32"),
    "heads that are odd": (dict(dim=12), "a multiple of 8 elements, at most 256, not 12"),
    "heads that are large": (dict(dim=264), "at most 256, not 264"),
    "capped scores": (dict(scoring=ScoreOptions(softcap=3.0)), "does not cap scores"),
    "sinks": (dict(sinks=np.zeros(2, np.float32)), "has no sinks"),
    "packs": (dict(mask_spec=MaskSpec(packed=True)), "several sequences in a row"),
    "prompts in packs": (
        dict(shared=PackedPrompts(np.ones((1, 16), int), np.ones((1, 16), int))),
        "several sequences",
    ),
    "a length that is split": (dict(length_shards=2), "does not split a row's length"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_compute_is_refused_in_one_line(name):
    wrong, says = REFUSED[name]
    given = (
        dict(dtype=jnp.bfloat16, dim=64, scoring=ScoreOptions(), sinks=None, mask_spec=MaskSpec())
        | wrong
    )
    x = jnp.zeros((1, 16, 2, given.pop("dim")), given.pop("dtype"))
    marks = jnp.ones((1, 16), jnp.int32)
    with pytest.raises(ConfigError, match=f"^model.attention=cudnn: .*{says}") as error:
        cudnn.attend(x, x, x, marks, axes=(), **given)
    assert "\n" not in str(error.value)


def test_without_cudnn_one_line_says_so():
    """This machine has none, or its libraries without a GPU: what JAX raises while it traces or
    lowers is passed on as one line."""
    x = jnp.zeros((1, 16, 2, 64), jnp.bfloat16)
    says = "^model.attention=cudnn: .*(cuDNN|dot_product_attention)"
    with pytest.raises(ConfigError, match=says):
        cudnn.attend(x, x, x, None, None, ScoreOptions(), MaskSpec())


def test_it_is_chosen_by_name_and_for_gpus_alone():
    assert [choose_kernel_set(p, "cudnn") for p in ("gpu", "cuda")] == ["cudnn", "cudnn"]
    found = make_kernel_set("cudnn")
    assert found.attention is cudnn.attend and not found.packs_share
    assert found.gated_mlp is make_kernel_set("backward").gated_mlp
    for platform in ("cpu", "tpu", "rocm"):
        says = f"model.attention=cudnn: it is for NVIDIA GPUs, and these devices are {platform}"
        with pytest.raises(ConfigError, match=says):
            choose_kernel_set(platform, "cudnn")
    assert Compute().attention == "auto"


# Whether it is used without being asked for


def test_auto_takes_it_where_a_role_can_and_no_verdict_is_against_it():
    auto = {"model.attention": "auto"}

    def kernels(**changes):
        roles = described(**changes, **auto)
        computes = [b.arguments[0].compute for r, b in roles.builds.items() if r in roles.models]
        return {compute.attention for compute in computes}

    assert kernels() == {CUDNN}
    assert kernels(platform="cpu") == kernels(platform="tpu") == {"auto"}
    for name in set(NOT_FOR) - {"cpus", "a length that is split"}:
        assert kernels(**NOT_FOR[name][0]) == {"auto"}, name
    # Of each role by itself.
    split, _ = NOT_FOR["a length that is split"]
    assert kernels(**split) == {"auto", CUDNN}
    assert kernels(forms=frozenset()) == {"auto"}
    # Wider heads are for some GPUs: taken where they were seen to be right.
    wide = {"actor.path": "gemma-3-1b"}
    assert kernels(**wide, forms=verdict.PROVEN_FORMS) == {"auto"}
    assert kernels(**wide, forms=verdict.ALL_FORMS) == {CUDNN}
    assert make_kernel_set(choose_kernel_set("cuda", "blocks")).attention is blockwise.attend
    with pytest.raises(ConfigError, match="model.attention=blocks: TPUs have a kernel"):
        choose_kernel_set("tpu", "blocks")


# What a run takes

PODS = {
    "actor.path": "qwen2.5-1.5b",
    "model.attention": "cudnn",
    "model.dtype": "bfloat16",
    "rollout.max_prompt_length": 512,
    "rollout.max_response_length": 1024,
}


def described(platform="cuda", devices=8, forms=verdict.ALL_FORMS, **changes):
    config = hjax.get_config("grpo.py", PODS | changes)
    algorithm = get_algorithm(config.algorithm.name)
    plan = plan_from_config(config, algorithm, devices)
    inputs = shape_inputs(config)
    return describe_roles(config, algorithm, inputs, plan, platform, read_shape, forms=forms)


def test_every_role_of_a_run_gets_it():
    roles = described()
    computes = [b.arguments[0].compute for r, b in roles.builds.items() if r in roles.models]
    assert len(computes) >= 2 and {compute.attention for compute in computes} == {"cudnn"}


NOT_FOR = {
    "cpus": (dict(platform="cpu"), "it is for NVIDIA GPUs, and these devices are cpu"),
    "float32": ({"model.dtype": "float32"}, "actor's model: it computes in bfloat16 or float16"),
    "capped scores": ({"actor.path": "gemma-2-2b"}, "actor's model: it does not cap scores"),
    "sinks": ({"actor.path": "gpt-oss-20b"}, "actor's model: it has no sinks"),
    "packs": ({"data.packing": 2048}, "several sequences in a row, and data.packing is 2048; use"),
    "a length that is split": (
        {"layout.actor.train.context": 2}, "actor's model: it does not split a row's length; use"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_FOR)
def test_a_run_that_it_is_not_for_is_refused_before_it_starts(name):
    changes, says = NOT_FOR[name]
    with pytest.raises(ConfigError, match=f"model.attention=cudnn.*{says}") as error:
        described(**changes)
    assert "\n" not in str(error.value)


def test_packs_that_are_attended_to_in_one_piece_are_taken():
    small = {"rollout.max_prompt_length": 64, "rollout.max_response_length": 64}
    assert described(**small, **{"data.packing": 512})


# What is compiled for GPUs

needs_plugin = pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)),
    reason="JAX's CUDA plugin, the GPU compiler, is not installed",
)

PROGRAM = """
import sys
from hjax.dryrun.topologies import find_topology, prepare_environment
prepare_environment()
import json, jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_enable_compilation_cache", False)
from jax.sharding import NamedSharding, PartitionSpec
from program_costs.account import account
from hjax.kernels import cudnn
from hjax.kernels.attention import ScoreOptions, MaskSpec, attend
from hjax.models.remat import with_remat
from hjax.sharding.layout import make_layouts
asked = json.loads(sys.argv[1])
topology = find_topology(asked["topology"])
layouts = make_layouts(topology.devices, {"data": 2, "tensor": 2}, None, "layout")
spread = layouts.train.kernel_sharding
mask_spec, scoring = MaskSpec(*asked["mask_spec"]), ScoreOptions(window=asked["window"])
def loss(q, k, v, marks):
    def layer(_, q, k, v):
        marked = marks if asked["padded"] else None
        return attend(cudnn.attend, q * 2, k, v, marked, None, scoring, mask_spec, spread)
    out = with_remat(layer, asked["remat"], True)(0, q, k, v)
    return jnp.sum(out.astype(jnp.float32) ** 2)
def given(dtype, *sizes, axes=()):
    sharding = NamedSharding(spread.mesh, PartitionSpec(spread.rows, None, *axes))
    return jax.ShapeDtypeStruct((4, asked["length"], *sizes), dtype, sharding=sharding)
q = given(jnp.bfloat16, 8, asked["dim"], axes=(spread.heads,))
k = given(jnp.bfloat16, 4, asked["dim"], axes=(spread.kv_heads,))
lowered = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, k, given(jnp.int32))
text = lowered.compile().as_text()
print(json.dumps({"text": text, "account": account(text, topology, None)}))
"""


@functools.cache
def compiled(**changes):
    """The text of values and gradients on two times two GPUs, and its account."""
    done = compilation(**changes)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    return found["text"], found["account"]


def compilation(**changes):
    asked = dict(topology="h100:1x4", mask_spec=(), window=0, padded=True, length=1024, dim=128)
    asked |= {"remat": "none"} | changes
    command = [sys.executable, "-c", PROGRAM, json.dumps(asked)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def calls(text):
    """By target of cuDNN's: shapes and configuration of each call."""
    found = {}
    for line in text.splitlines():
        if target := re.search(r'custom_call_target="__cudnn\$fmha(\w+)"', line):
            config = json.loads(line[line.index("backend_config=") + len("backend_config=") :])
            found.setdefault(target[1], []).append((line, config["cudnn_fmha_backend_config"]))
    return found


FORWARD, BACKWARD = "Softmax", "SoftmaxBackward"


@needs_plugin
def test_for_gpus_both_passes_are_calls_of_cudnn():
    text, account = compiled()
    found = calls(text)
    assert {name: len(lines) for name, lines in found.items()} == {FORWARD: 1, BACKWARD: 1}
    for lines in found.values():
        ((line, config),) = lines
        # Two of four rows and half of the heads on each device; lengths of queries and of keys.
        assert "bf16[2,1024,4,128]" in line and "bf16[2,1024,2,128]" in line
        assert line.count("s32[2]{0}") == 2
        assert config["mask_type"] == "PADDING_CAUSAL" and config["sliding_window_length"] == 0
        assert config["fmha_scale"] == pytest.approx(128**-0.5)
        assert config["intermediate_tensor_shape"]["dimensions"] == ["2", "4", "1024", "1024"]
    assert not re.search(r"\[[\d,]*1024,1024[\d,]*\]", text)  # no array of two lengths
    # Eight blocks of 128 places see 36 of 64: 2 products forward, 5 backward.
    assert account["opaque"] == []
    assert account["flops"] == pytest.approx(7 * 2 * 2 * 4 * 36 * 128**3)


@needs_plugin
@pytest.mark.slow
def test_a_window_and_rows_without_padding_need_no_lengths():
    text, account = compiled(window=256, padded=False)
    for ((line, config),) in calls(text).values():
        assert config["mask_type"] == "CAUSAL" and config["sliding_window_length"] == 256
        assert "s32[2]{0}" not in line
    assert account["flops"] < compiled()[1]["flops"]


@needs_plugin
@pytest.mark.slow
def test_a_shared_prompt_stands_before_each_response():
    text, _ = compiled(mask_spec=(256, 384, 2))
    for ((line, _),) in calls(text).values():
        assert "bf16[4,640,4,128]" in line  # two rows of two responses of 256 + 384 places


@needs_plugin
@pytest.mark.parametrize(
    "remat, forwards", [("attention", 1), pytest.param("full", 2, marks=pytest.mark.slow)]
)
def test_where_attention_is_kept_it_runs_once(remat, forwards):
    found = calls(compiled(remat=remat)[0])
    assert len(found[FORWARD]) == forwards and len(found[BACKWARD]) == 1


@needs_plugin
@pytest.mark.slow
def test_large_heads_are_for_hopper():
    assert calls(compiled(dim=256)[0])
    refused = compilation(topology="a100-80g:1x4", dim=256)
    line = refused.stderr.splitlines()[-1]
    assert refused.returncode and "model.attention=cudnn: The head dim must be <= 128" in line
