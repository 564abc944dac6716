"""Compiling for hardware that is not there, against arithmetic by hand."""

import importlib.util
import io
import json
import math
import os
import subprocess
import sys

import jax
import pytest
from helpers import save_model, trainer_of
from rich.console import Console

import hjax
from hjax.data.tasks import get_task
from hjax.dryrun import topologies
from hjax.dryrun.description import describe
from hjax.dryrun.programs import abstract_workers, add_held, held_beside, step_programs
from hjax.dryrun.shape_inputs import is_published, read_shape, shape_inputs
from hjax.dryrun.topologies import (
    GIB,
    GPU_MEMORY,
    GPUS,
    find_topology,
    parse_memory_error,
    parse_topology,
    target_config,
)
from hjax.errors import ConfigError
from hjax.launch.compile import main, parse
from hjax.models import parameter_counts
from hjax.models.presets import preset
from hjax.settings.config_loading import config_names, load_config
from hjax.show.memory_table import WIDTH, memory_table, verdict
from hjax.xla.collectives import received_bytes

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, the TPU compiler, is not installed: pip install 'jax[tpu]'",
)
needs_plugin = pytest.mark.skipif(
    not topologies.plugin_installed(),
    reason="JAX's CUDA plugin, the GPU compiler, is not installed: pip install 'jax[cuda13-local]'",
)
# Parameters of a 7B Llama: embedding and output table, and per layer q, k, v, o, gate, up, down
# and two norms; a final norm.
LAYERS = 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096)
DECODER = 2 * 32000 * 4096 + LAYERS + 4096
SCALAR = 32000 * 4096 + LAYERS + 4096 + (4096 + 1)


def command(*arguments, cache, timeout=280):
    """Run `python -m hjax.launch.compile`; returns the finished process."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    return subprocess.run(
        [sys.executable, "-m", "hjax.launch.compile", *arguments],
        env={**environment, "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def error_of(*arguments):
    with pytest.raises(ConfigError) as caught:
        parse(arguments)
    return str(caught.value)


# Input


def test_topologies_are_read():
    assert parse_topology("v5p:4x4x4") == ("v5p", (4, 4, 4), 1)
    assert parse_topology("V5E:2x2") == ("v5e", (2, 2), 1)
    assert parse_topology("2xv5e:2x4") == ("v5e", (2, 4), 2)
    assert parse_topology("h100:2x8") == ("h100", (2, 8), 1)
    assert parse_topology("a100-80g:16x8") == ("a100-80g", (16, 8), 1)


@pytest.mark.parametrize(
    "name, says",
    [
        ("v5p", "a kind and sizes, such as v5p:4x4x4"),
        ("v5p:4,4", "a kind and sizes"),
        ("v9:2x2", "unknown kind 'v9'; known: v2"),
        ("h100:8", "of GPUs hosts x GPUs per host"),
        ("v5e:0x2", "sizes of 1 or more"),
    ],
)
def test_a_wrong_topology_is_named(name, says):
    with pytest.raises(ConfigError, match=says):
        parse_topology(name)


def test_wrong_arguments_are_named():
    assert "--topology= is missing" in error_of("--config=ppo.py")
    assert "O0, O1, O2, O3" in error_of(
        "--config=ppo.py", "--topology=v5e:2x2", "--optimization=fast"
    )
    assert "--config=NAME.py is missing" in error_of("--topology=v5e:2x2")
    assert "unknown key config.steeps" in error_of(
        "--config=ppo.py", "--topology=v5e:2x2", "--config.steeps=3"
    )


def test_help(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "--topology=KIND:SIZES" in out and "ppo_llama_7b.py" in out and "exit status" in out


@pytest.mark.extended
def test_the_compiler_says_how_much_memory_is_missing():
    text = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
        "required for HLO temporaries (81.25G) exceeds available HBM (15.75G). HLO module: jit_x."
    )
    assert parse_memory_error(text) == (81.25 * GIB, 15.75 * GIB)
    assert parse_memory_error(text.replace("81.25G", "1.5T"))[0] == 1.5 * 1024 * GIB
    assert parse_memory_error("INVALID_ARGUMENT: no") is None


# Published shapes


def test_a_published_name_is_a_shape_unless_there_is_such_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_published("llama-7b") and is_published("Qwen2.5-7B")
    assert not is_published("llama-8b") and not is_published("")
    assert read_shape("llama-7b") == (preset("llama-7b"), None)
    (tmp_path / "llama-7b").mkdir()
    assert not is_published("llama-7b")
    with pytest.raises(ConfigError, match="config.json"):
        read_shape("llama-7b")


def test_shapes_need_no_data_but_a_prompt_length():
    config = load_config("ppo_llama_7b.py")
    inputs = shape_inputs(config)
    assert inputs.model == preset("llama-7b")
    assert inputs.prompt_length == 1024 and inputs.tokenizer is None
    with pytest.raises(ConfigError, match="rollout.max_prompt_length=0"):
        shape_inputs(load_config("ppo_llama_7b.py", ["--config.rollout.max_prompt_length=0"]))
    with pytest.raises(ConfigError, match="5120 tokens exceed llama-7b's 4096 positions"):
        shape_inputs(load_config("ppo_llama_7b.py", ["--config.rollout.max_prompt_length=4096"]))


def test_training_a_published_name_says_what_is_missing(tmp_path):
    with pytest.raises(ConfigError, match="'llama-7b' names a published shape, without weights"):
        trainer_of("PPO", {"actor.path": "llama-7b"}).__enter__()


# The programs of a step


def programs_of(algorithm, changes=None):
    with trainer_of(algorithm, changes or {}) as trainer:
        rehearsal = abstract_workers(trainer.roles, jax.devices())
        length = trainer.inputs.prompt_length
        found, remark = step_programs(trainer.config, trainer.algorithm_class, rehearsal, length)
        assert remark == ""
        return {(p.role, p.name): p for p in found}, rehearsal


@pytest.mark.extended
def test_a_users_own_call_brings_its_program(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import hjax\n"
        "class Mine(hjax.algorithms.GRPO):\n"
        "    def step(self, prompts):\n"
        "        return self.actor.compute_log_prob(super().step(prompts))\n"
        "class Odd(hjax.algorithms.GRPO):\n"
        "    def step(self, prompts):\n"
        "        return super().step(prompts | {'more': prompts['columns']['answer'][0]})\n"
    )
    assert ("actor", "compute_log_prob") in programs_of(f"{tmp_path}/mine.py:Mine")[0]
    # Where the calls cannot be read off, every program is counted, and that is said.
    with trainer_of(f"{tmp_path}/mine.py:Odd") as trainer:
        told = describe(trainer)
    assert "calls of Odd.step could not be read off" in told["remark"]
    assert {"generate", "generate_greedy", "compute_log_prob", "update"} <= {
        row["program"] for row in told["memory"] if row["role"] == "actor"
    }


@pytest.mark.extended
def test_every_program_of_a_step_is_listed():
    ppo, _ = programs_of("PPO", {"algorithm.minibatch": 8, "algorithm.epochs": 3})
    names = set(ppo)
    assert {
        ("actor", "generate"), ("actor", "update"), ("critic", "compute_values"),
        ("critic", "update"), ("reference", "compute_ref_log_prob"),
    } <= names  # fmt: skip
    assert ("actor", "compute_log_prob") not in names and ("actor", "generate_greedy") not in names
    # 8 prompts x 2 samples in mini-batches of 8, three times over.
    assert ppo["actor", "update"].rows == 8 and ppo["actor", "update"].runs == 6
    assert ppo["actor", "generate"].rows == 16 and ppo["actor", "generate"].runs == 1
    assert ppo["actor", "generate"].program.loop_trips == 3  # of 4 response tokens
    assert ("actor", "generate_greedy") in programs_of("ReMax")[0]
    sft, _ = programs_of("SFT")
    assert set(sft) == {("actor", "update")} and sft["actor", "update"].rows == 8


def test_what_stays_beside_a_program():
    (programs, roles) = programs_of("PPO", {"model.dtype": "bfloat16"})
    decoder = 16 * 32 + 4 * 32 * 32 + 3 * 32 * 64 + 3 * 32
    critic = decoder + 32 + 1
    held, away = held_beside(programs["actor", "generate"], roles)
    assert away == {}  # nothing is offloaded
    matrices = decoder - 3 * 32
    # Norms are handed over as they are; of the matrices generation reads a copy.
    assert held["actor params"] == 4 * matrices
    assert held["actor optimizer"] == pytest.approx(8 * decoder, abs=16)
    assert held["critic params"] == 4 * critic and held["reference params"] == 4 * decoder
    update, _ = held_beside(programs["actor", "update"], roles)
    assert set(update) == {"critic params", "critic optimizer", "reference params"}
    values, _ = held_beside(programs["critic", "compute_values"], roles)
    assert "critic optimizer" in values and "critic params" not in values
    record = add_held({"total_bytes": 1000}, programs["actor", "update"], roles)
    assert record["sum_bytes"] == 1000 + sum(update.values())


@pytest.mark.extended
def test_an_fsdp_update_moves_parameters_and_gradients_not_activations():
    changes = {
        "layout.actor.train.data": 1, "layout.actor.train.fsdp": 8, "model.remat": "full",
        "rollout.prompts": 64, "rollout.samples": 4, "rollout.max_response_length": 16,
    }  # fmt: skip
    programs, roles = programs_of("PPO", changes)
    text = programs["actor", "update"].program.trace().lower().compile().as_text()
    model = 4 * parameter_counts.parameter_count(roles.workers["actor"].network.config)
    # Gathered for the forward and for the backward pass; gradients summed (which counts twice).
    rule = (1 + 1 + 2) * 7 / 8 * model
    assert received_bytes(text) == pytest.approx(rule, rel=0.05)


def test_other_pools_hold_nothing_here():
    programs, roles = programs_of("PPO", {"placement": "split"})
    assert set(held_beside(programs["critic", "update"], roles)[0]) == set()
    assert set(held_beside(programs["actor", "update"], roles)[0]) == {"reference params"}


# What is shown


def test_bars_are_in_proportion():
    record = {
        "role": "actor", "program": "update", "runs": 4, "argument_bytes": 2 * GIB,
        "output_bytes": GIB, "temporary_bytes": GIB, "code_bytes": 0, "peak_bytes": 3 * GIB,
        "total_bytes": 4 * GIB, "held_bytes": {"critic params": 4 * GIB}, "sum_bytes": 8 * GIB,
    }  # fmt: skip

    def shown(memory):
        out = io.StringIO()
        Console(file=out, width=160).print(memory_table([record], memory))
        return out.getvalue()

    quarter = WIDTH // 4
    half_full = "█" * quarter + "▓" * (quarter // 2) + "▒" * (quarter // 2) + "·" * (2 * quarter)
    assert half_full + "|" in shown(16 * GIB)
    assert "█" * (2 * quarter) + "|" + "▓" * quarter + "▒" * quarter in shown(4 * GIB)
    assert "█" * (2 * quarter) + "▓" * quarter + "▒" * quarter in shown(None)
    assert verdict([record], 5 * GIB) == (
        "most is held during actor.update ×4: 8.0 GiB per device of 5.0 GiB, 3.0 GiB are missing "
        "(its own 4.0 GiB, beside it critic params 4.0 GiB)"
    )


# The compilers


def test_gpus_are_described():
    assert set(GPUS) == set(GPU_MEMORY)
    for kind, gpu in GPUS.items():
        assert 0.9 * gpu.memory < GPU_MEMORY[kind] < 1.08 * gpu.memory
    assert "cuda_compute_capability { major: 9 minor: 0 }" in target_config("h100")


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setattr(topologies, "plugin_installed", lambda: False)
    with pytest.raises(ConfigError, match=r"not installed; pip install 'jax\[cuda13-local\]'"):
        find_topology("h100:2x8")


# A small TPU and a small GPU machine; those that the 7B models need.
NEEDS = {"v5e:2x2": needs_libtpu, "h100:1x8": needs_plugin}
PODS = {"v5e:2x2": "v5p:2x2x4", "h100:1x8": "h100:2x8"}
# Everyday an update for the GPU's compiler (a whole step for the TPU's is compiled below); most of
# the other cases take half a minute or more.
QUICK = (("sft.py", "h100:1x8"),)


@pytest.mark.parametrize(
    "name, topology",
    [
        pytest.param(
            *(name, topology),
            marks=[needs] if (name, topology) in QUICK else [needs, pytest.mark.slow],
        )
        for name in config_names()
        # base.py has no task; the others have programs of their own, compiled at the first call.
        if name != "base.py" and not name.endswith("_cartpole.py")
        for topology, needs in NEEDS.items()
    ]
    + [pytest.param("ppo.py", "v5e:4x4", marks=[needs_libtpu, pytest.mark.slow])],
)
@pytest.mark.timeout(3600)
@pytest.mark.extended
def test_every_shipped_config_compiles_as_it_stands(name, topology, tmp_path, request):
    if name == "stories.py":
        request.getfixturevalue("test_data")  # its weights
    if name == "ppo_llama_7b.py":
        topology = PODS[topology]
    done = command(
        f"--config={name}", f"--topology={topology}", "--json", cache=tmp_path, timeout=3500
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = json.loads(done.stdout.splitlines()[-1])
    kind, sizes, _ = parse_topology(topology)
    assert found["topology"]["devices"] == math.prod(sizes)
    assert found["topology"]["platform"] == ("cuda" if kind == "h100" else "tpu")
    assert found["fits"] and found["optimization"] == "default"
    programs = {f"{p['role']}.{p['program']}": p for p in found["programs"]}
    assert "actor.update" in programs
    # All devices learn from their own rows, so gradients are summed between them.
    assert all(p["received_bytes"] > 0 for name, p in programs.items() if "update" in name)
    if name == "grpo.py":
        # The weights are whole on every device in both layouts: a cast, and nothing to send.
        assert programs["actor.transition"]["collectives"] == {}
        assert found["transition"] == {"received_bytes": 0, "formula_bytes": 0}
        assert "receives 0 B per device; HybridFlow's formula says 0 B\n" in done.stdout


TWO_SLICES = """
import json
from hjax.dryrun.topologies import find_topology, prepare_environment
prepare_environment()
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from program_costs.account import limits_of
from hjax.dryrun.compilation import link_bytes
from hjax.sharding.device_mesh import place_devices
from hjax.xla.collectives import collectives
topology = find_topology("2xv5e:2x2")
shape = {"data": 2, "tensor": 4}
mesh = Mesh(place_devices(topology.devices, shape), tuple(shape))
spec = PartitionSpec("data", "tensor")
x = jax.ShapeDtypeStruct((256, 1024), "float32", sharding=NamedSharding(mesh, spec))
def both(x):
    return jax.lax.psum(x, "data"), jax.lax.all_gather(x, "tensor", axis=1, tiled=True)
outs = PartitionSpec(None, "tensor"), PartitionSpec("data", None)
made = jax.shard_map(both, mesh=mesh, in_specs=spec, out_specs=outs, check_vma=False)
found = collectives(jax.jit(made).lower(x).compile().as_text())
limits = limits_of(topology, list(mesh.devices.ravel()))
print(json.dumps({
    "received": {one.kind: one.received_bytes for one in found},
    "seconds": {one.kind: limits.way(one).seconds for one in found},
    "way": link_bytes(found, list(mesh.devices.ravel())),
}))
"""


@needs_libtpu
@pytest.mark.extended
def test_what_crosses_between_slices_is_counted_at_the_network_s_rate():
    done = subprocess.run(
        [sys.executable, "-c", TWO_SLICES], capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # A device has 128 x 256 numbers. Summed with the other slice's it receives as many bytes,
    # gathered from the four of its slice three times as many.
    part = 128 * 256 * 4
    assert found["received"] == {"all-reduce": part, "all-gather": 3 * part}
    # Data sheet: 25 GB/s for a host of four chips; 90 GB/s over both links, round the square.
    assert found["seconds"]["all-reduce"] == pytest.approx(part / (25e9 / 4))
    assert found["seconds"]["all-gather"] == pytest.approx(3 * part / 90e9)
    assert found["way"]["network_bytes"] == part and found["way"]["hop_bytes"] > 0


@needs_libtpu
@pytest.mark.extended
def test_a_small_step_compiles_for_a_small_topology(tmp_path):
    arguments = (
        "--config=ppo.py", "--topology=v5e:2x2", "--optimization=O0", "--json",
        "--config.model.layers=1", "--config.model.dtype=float32",
    )  # fmt: skip
    done = command(*arguments, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    description = json.loads(done.stdout.splitlines()[-1])
    assert description["fits"] and description["step"]["missing_bytes"] == 0
    topology = description["topology"]
    assert topology["devices"] == 4 and topology["device_kind"] == "TPU v5 lite"
    assert topology["memory_bytes"] == 15.75 * GIB
    programs = {(p["role"], p["program"]): p for p in description["programs"]}
    update = programs["actor", "update"]
    decoder = 16 * 128 + 4 * 128**2 + 3 * 128 * 384 + 3 * 128
    resident = description["resident_bytes"]
    assert resident["actor"]["params"] == 4 * decoder
    # On a TPU small arrays are padded.
    assert 12 * decoder < update["argument_bytes"] < 1.3 * 12 * decoder
    # 128 sequences of 7 + 6 tokens, whose prompts are shared by 4, on 4 devices.
    tokens = 32 * 7 + 128 * 6
    matrices = 4 * 128**2 + 3 * 128 * 384
    products = 6 * tokens * matrices + 6 * 128 * 6 * 16 * 128
    assert update["product_flops"] * 4 == pytest.approx(products, rel=0.05)
    # Data parallelism: one gradient is summed over 4 devices.
    assert update["received_bytes"] == pytest.approx(2 * 3 / 4 * 4 * decoder, rel=0.05)
    assert update["runs"] == 4 and update["sum_bytes"] == update["total_bytes"] + sum(
        update["held_bytes"].values()
    )
    again = command(*arguments, cache=tmp_path)
    kept = json.loads(again.stdout.splitlines()[-1])
    assert all(p["kept"] for p in kept["programs"]) and "kept from before" in again.stdout
    for before, after in zip(description["programs"], kept["programs"], strict=True):
        assert before | {"kept": True} == after


@needs_libtpu
@pytest.mark.extended
def test_a_vocabulary_that_does_not_fit_is_refused_with_the_bytes_missing(tmp_path):
    keys = {"layers": 1, "hidden_size": 2048, "vocab_size": 1 << 20}
    changes = [f"--config.model.{key}={value}" for key, value in keys.items()]
    done = command("--config=sft.py", "--topology=v5e:2x2", "--json", *changes, cache=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "does not fit on v5e:2x2" in line and "are missing" in line
    description = json.loads(done.stdout.splitlines()[-1])
    step, memory = description["step"], description["topology"]["memory_bytes"]
    assert not description["fits"]
    assert step["missing_bytes"] == step["sum_bytes"] - memory > 0
    # Whole on each device: the table in float32, and two moments.
    table, resident = 4 * 2048 * (1 << 20), description["resident_bytes"]["actor"]
    assert resident["params"] == pytest.approx(table, rel=0.02)
    assert resident["optimizer"] == pytest.approx(2 * table, rel=0.02)


@needs_libtpu
@pytest.mark.slow
def test_a_model_that_does_not_fit_is_refused_with_the_bytes_missing(tmp_path):
    done = command(
        "--config=ppo_llama_7b.py", "--topology=v5e:2x2", "--json", cache=tmp_path
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "does not fit on v5e:2x2" in line and "are missing" in line
    description = json.loads(done.stdout.splitlines()[-1])
    step, memory = description["step"], description["topology"]["memory_bytes"]
    assert not description["fits"]
    assert step["missing_bytes"] == step["sum_bytes"] - memory > 0
    programs = {(p["role"], p["program"]): p for p in description["programs"]}
    assert step["sum_bytes"] == max(p["sum_bytes"] for p in programs.values())
    # Split over 4 devices but for the norms: float32 parameters and two moments.
    resident = description["resident_bytes"]
    for role, parameters in (("actor", DECODER), ("critic", SCALAR)):
        assert resident[role]["params"] == pytest.approx(4 * parameters / 4, rel=1e-3)
        assert resident[role]["optimizer"] == pytest.approx(8 * parameters / 4, rel=1e-3)
    assert resident["reference"] == {"params": pytest.approx(DECODER, rel=1e-3)}
    # The update's arguments alone are more than there is.
    assert programs["actor", "update"]["refused_bytes"] > 12 * DECODER / 4 > memory


@needs_libtpu
@pytest.mark.extended
def test_a_topology_that_the_compiler_does_not_know(tmp_path):
    done = command("--config=ppo.py", "--topology=v5e:3x3", cache=tmp_path)
    assert done.returncode == 2
    assert "--topology=v5e:3x3: " in done.stderr.splitlines()[-1]


@needs_libtpu
@pytest.mark.extended
def test_with_libtpu_and_without_a_tpu_the_cpu_is_taken_quietly(tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "TPU_"))}
    done = subprocess.run(
        [sys.executable, "-m", "hjax.launch", "--config=sft.py", "--dry_run"],
        env={**environment, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and "cpu:0" in done.stdout


@pytest.mark.slow
def test_the_shipped_7b_config_trains_once_it_is_given_weights_and_data(tmp_path):
    tokenizer = get_task("sorting").tokenizer()
    save_model(tmp_path / "actor", tokenizer=tokenizer)
    save_model(tmp_path / "reward", tokenizer=tokenizer, head=True)
    rows = [{"prompt": f"{i}>"} for i in range(10, 60)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load_config(
        "ppo_llama_7b.py",
        [
            f"--config.actor.path={tmp_path}/actor",
            f"--config.reward.path={tmp_path}/reward",
            f"--config.data.path={tmp_path}/data.jsonl",
            # Smaller, for a test.
            "--config.rollout.prompts=16", "--config.algorithm.minibatch=8",
            "--config.actor.micro_batch=4", "--config.critic.micro_batch=4",
            "--config.rollout.max_prompt_length=8", "--config.rollout.max_response_length=4",
            "--config.display.enabled=False", "--config.eval.every=0",
            "--config.cluster.devices_per_process=4",
        ],
    )  # fmt: skip
    trainer = hjax.Trainer(config)
    try:
        assert trainer.roles.layouts["actor"].train.shard_count("heads") == 4
        metrics = trainer.step()
    finally:
        trainer.close()
    assert math.isfinite(metrics["actor/loss"]) and math.isfinite(metrics["reward/mean"])


# Pods: minutes a program


@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("topology, memory", [("v5p:4x4x4", 95.73), ("v6e:8x8", 31.24)])
def test_a_7b_ppo_step_compiles_for_a_pod_and_fits(topology, memory, tmp_path):
    done = command(
        "--config=ppo_llama_7b.py", f"--topology={topology}", "--json",
        cache=tmp_path, timeout=3500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["topology"]["devices"] == 64
    assert found["topology"]["memory_bytes"] == pytest.approx(memory * GIB, rel=1e-3)
    assert 0 < found["step"]["sum_bytes"] < memory * GIB
    programs = {(p["role"], p["program"]): p for p in found["programs"]}
    assert {
        ("actor", "generate"), ("actor", "update"), ("critic", "compute_values"),
        ("critic", "update"), ("reference", "compute_ref_log_prob"), ("reward", "compute_reward"),
    } < set(programs)  # fmt: skip
    # Llama 7B in bfloat16 from 16 x 4 shards to 2: M (1/2 - 1/64), by hand.
    formula = 2 * DECODER * (1 / 2 - 1 / 64)
    moved = found["transition"]
    assert moved["formula_bytes"] == pytest.approx(formula, rel=1e-3)  # norms stay float32
    assert moved["received_bytes"] == pytest.approx(formula, rel=0.01)
    # Gathers, and of half the model at most: nobody ever has all of it.
    ways = [p for p in found["programs"] if p["program"].startswith("transition")]
    assert {kind for p in ways for kind in p["collectives"]} == {"all-gather"}
    received = sum(p["received_bytes"] for p in ways)
    assert received + 2 * DECODER / 64 < 1.01 * 2 * DECODER / 2
    # Forward, backward and the forward once more: about 8 operations per parameter and token.
    update, tokens = programs["actor", "update"], 128 * 2048
    assert update["product_flops"] == pytest.approx(8 * DECODER * tokens / 64, rel=0.1)
    # Tensor parallelism sums two rows' activations in bfloat16 6 times a layer (2 forward, again,
    # and backward); FSDP gathers a quarter of the model forward, again, and backward, and sums as
    # much of gradients: in each of 4 passes. No whole batches, which would be ten times that.
    sums = 32 * 6 * 2 * 3 / 4 * (2 * 2048 * 4096 * 2)
    quarter = 2 * DECODER / 4
    assert update["received_bytes"] < 1.3 * 4 * (sums + (3 + 2) * quarter)
