"""`python -m hjax.launch.plan`, the dataflow it reads off an algorithm, and `placement=auto`."""

import contextlib
import itertools
import json
import math
import pathlib
import subprocess
import sys
import types

import jax
import markupsafe
import numpy as np
import pytest
from helpers import tiny_config
from mapping_cases import brute_force, random_problem

import hjax
from hjax.algorithms import GRPO, PPO, ReMax, SafeRLHF, get_algorithm
from hjax.devices import DEVICES, Device
from hjax.dryrun import plan_programs as plan_compile
from hjax.errors import ConfigError
from hjax.launch import compile as compile_command
from hjax.launch import plan as command
from hjax.launch import plan_flags
from hjax.models.cost_inputs import FLOAT32, MeshSizes, model_counts
from hjax.models.model_config import ModelConfig
from hjax.planning import calibration, cost, generation_cost
from hjax.planning.constants import Constants
from hjax.planning.cost import DeviceSet
from hjax.planning.hardware import parse_cluster as clusters
from hjax.planning.plan_types import Candidate, DevicePool, PlannedSet
from hjax.planning.problems import trace_dataflow
from hjax.planning.profile import CALIBRATION_VERSION as VERSION
from hjax.planning.profile import MeasuredOn, Profile, write_profile
from hjax.planning.search import search
from hjax.planning.strategies import STRATEGIES, only_compiles
from hjax.run.placement import make_plan
from hjax.settings.config_loading import check_config, load_config
from hjax.show.plan_rows import plan_page

ROLES = ("actor", "critic", "reference", "reward", "cost", "cost_critic")
SMALL = ["--models=qwen2.5-0.5b", "--cluster=2x4:h100", "--batch=64", "--prompt_length=128",
         "--response_length=128"]  # fmt: skip


def run(*arguments, capsys):
    status = command.main([*arguments])
    shown = capsys.readouterr()
    return status, shown.out, shown.err.strip()


def planned(*arguments, capsys):
    status, out, _ = run(*arguments, "--json", capsys=capsys)
    assert status == 0
    return json.loads(out.strip().splitlines()[-1])


def calls_of(algorithm, updates=4, samples=2, **changes):
    config = algorithm.default_config()
    config.update(changes)
    flow = trace_dataflow(algorithm, config, updates, samples, ROLES)
    counted = {}
    for call in flow.calls:
        key = (call.role, call.kind, call.rows)
        counted[key] = counted.get(key, 0) + 1
    return flow.roles, counted


def test_ppo_s_calls_are_those_of_its_step():
    roles, counted = calls_of(PPO)
    assert roles == ("actor", "critic", "reference", "reward")
    assert counted == {
        ("actor", "generate", 1.0): 1, ("critic", "forward", 1.0): 1,
        ("reference", "forward", 1.0): 1, ("reward", "forward", 1.0): 1,
        ("critic", "update", 0.25): 4, ("actor", "update", 0.25): 4,
    }  # fmt: skip


def test_remax_generates_and_scores_one_greedy_response_per_prompt_too():
    roles, counted = calls_of(ReMax)
    assert roles == ("actor", "reference", "reward")
    assert counted["actor", "generate", 1.0] == counted["actor", "generate", 0.5] == 1
    assert counted["reward", "forward", 0.5] == 1


def test_safe_rlhf_trains_on_demonstrations_with_its_mini_batches():
    roles, counted = calls_of(SafeRLHF, pretraining_coef=1.0)
    assert set(roles) == set(ROLES)
    assert counted["actor", "update", 0.5] == 4 and counted["cost_critic", "update", 0.25] == 4


def test_epochs_and_a_missing_reference_show():
    roles, counted = calls_of(GRPO, kl_coef=0.0, epochs=3)
    assert roles == ("actor", "reward") and counted["actor", "update", 0.25] == 12


def test_a_user_s_own_algorithm_needs_no_declaration(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import hjax\n"
        "class Twice(hjax.algorithms.PPO):\n"
        "    def step(self, prompts):\n"
        "        self.actor.generate_sequences(prompts)\n"
        "        return super().step(prompts)\n"
    )
    _, counted = calls_of(get_algorithm(f"{file}:Twice"))
    assert counted["actor", "generate", 1.0] == 2


def test_a_step_that_cannot_be_read_off_is_an_error_that_says_so():
    class Odd(PPO):
        def step(self, prompts):
            return prompts["no such column"]

    with pytest.raises(ConfigError, match="Odd.step could not be read off.*no such column"):
        trace_dataflow(Odd, Odd.default_config(), 1, 1, ROLES)


def test_json_is_the_contract_s(capsys):
    found = planned(*SMALL, capsys=capsys)
    assert sorted(r for s in found["placement"] for r in s) == sorted(ROLES[:4])
    assert len(found["allocation"]) == len(found["placement"])
    assert sum(found["allocation"]) <= 8
    for roles, devices in zip(found["placement"], found["allocation"]):
        for role in roles:
            pipe, tensor, data = found["parallelism"][role]["train"]
            assert pipe * tensor * data == devices
    pipe, tensor = found["parallelism"]["actor"]["generate"]
    assert found["parallelism"]["actor"]["train"][0] % pipe == 0
    seconds = found["seconds"]
    stages = ("generation", "preparation", "learning", "transition")
    assert seconds["total"] == pytest.approx(sum(seconds[s] for s in stages))
    assert found["tokens_per_second"] == pytest.approx(64 * 256 / seconds["total"])
    assert set(found["memory_bytes"]) == set(ROLES[:4]) and found["search_seconds"] > 0
    assert found["candidates"][0]["seconds"] == pytest.approx(seconds["total"])
    assert all("slower" in c["reason"] for c in found["candidates"][1:])
    assert found["origins"]["seconds"] == "assumed"


@pytest.mark.extended
def test_a_set_spans_slices_where_that_pays(capsys):
    flags = ["--models=qwen2.5-0.5b", "--prompt_length=64", "--response_length=128", "--batch=256"]
    joined = planned(*flags, "--cluster=2xv5e:2x2", capsys=capsys)
    apart = planned(*flags, "--cluster=v5e:2x2+v5e:2x2", capsys=capsys)
    # A run's sets take one slice; that one over both is faster is said beside.
    assert max(joined["allocation"]) == max(apart["allocation"]) == 4
    assert joined["seconds"]["total"] == pytest.approx(apart["seconds"]["total"])
    spans = [c for c in joined["candidates"] if max(c["allocation"]) == 8]
    # A small model's gradients cross between slices in less time than idle devices lose.
    assert spans and spans[0]["seconds"] < joined["seconds"]["total"]
    assert spans[0]["reason"].endswith("% faster, but hjax only compiles it")
    # Of much slower a network nothing is left but the slices.
    slow = planned(*flags, "--cluster=2xv5e:2x2", "--constants=network=0.001", capsys=capsys)
    spans = [c for c in slow["candidates"] if max(c["allocation"]) == 8]
    assert all("% slower, and hjax only compiles it" in c["reason"] for c in spans)


@pytest.mark.parametrize("cluster", ["3xv5e:2x2", "3x4:h100"])
def test_rings_of_a_size_that_fills_no_slice_or_host_cross_the_network(cluster):
    """By hand: of four rings of three devices in a row, two have devices of two domains of four."""
    (pool,) = clusters(cluster).pools
    constants = Constants(link=1.0, network=0.001, link_latency=1e-6, network_latency=1e-3)
    place = DeviceSet(pool, 12, constants)
    network = pool.device.network_of(4) * 0.001
    assert cost.ring_bandwidth(place, 3, 1) == cost.ring_bandwidth(place, 12, 1) == network
    assert cost.latency(place, 3, 1) == 2e-3
    assert cost.ring_bandwidth(place, 2, 2) > network and cost.latency(place, 2, 2) == 1e-6
    # Four of a host are no fewer for having three or six in a row.
    assert cost.latency(DeviceSet(clusters("1x6:h100").pools[0], 6, constants), 2, 2) == 1e-6


# Three slices of a torus of four devices: copies on each of them.
@pytest.mark.parametrize("seed", [200_138, 200_295])
def test_a_search_over_slices_that_are_no_power_of_two_equals_brute_force(seed):
    problem = random_problem(seed, devices=16, models=5, wide=False)
    assert problem.cluster.pools[0].slices == 3
    assert search(problem, count=1).fastest.total == pytest.approx(brute_force(problem), rel=1e-9)


def test_the_plan_on_top_is_one_that_runs(tmp_path, capsys):
    """Of a slice of 16 hosts a set takes all; parts of it, faster by the model, only compile."""
    flags = ["--models=qwen2.5-7b", "--cluster=v5p:4x4x4", "--batch=64", "--prompt_length=256",
             "--response_length=256", f"--output={tmp_path}"]  # fmt: skip
    found = planned(*flags, capsys=capsys)
    assert found["allocation"] == [64] and found["only_compiles"] == []
    beside = [c for c in found["candidates"] if max(c["allocation"]) < 64]
    assert beside and all("hjax only compiles it" in c["reason"] for c in beside)
    others = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("plan_*.json"))]
    assert [bool(o["only_compiles"]) for o in others] == [True] * len(beside)


@pytest.mark.extended
def test_sets_on_different_devices_are_told_apart(tmp_path, capsys):
    flags = ["--models=llama-7b", "--cluster=1x8:h100+1x8:a100-80g", "--batch=256"]
    status, out, _ = run(*flags, f"--output={tmp_path}", capsys=capsys)
    text = " ".join(out.split())
    assert status == 0 and "8 of 1x8:h100" in text and "(8 of 1x8:a100-80g)" in text
    assert "Sets stand on different devices: before this plan runs" in text
    plan = json.loads((tmp_path / "plan.json").read_text())
    roles = [role for roles in plan["placement"] for role in roles]
    with pytest.raises(ConfigError, match="different devices, a100-80g and h100; say in"):
        make_plan(str(tmp_path / "plan.json"), roles, 16)
    labels = {"h100": "H100", "a100-80g": "A100"}
    plan["where"] = [{"ray.io/accelerator-type": labels[kind]} for kind in plan["kinds"]]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert make_plan(str(tmp_path / "plan.json"), roles, 16).where[0] == plan["where"][0]
    # Two groups of hosts with one kind of device are told apart, and need nothing said.
    alike = ["--models=llama-7b", "--cluster=1x8:h100+1x4:h100", "--batch=256"]
    status, out, _ = run(*alike, f"--output={tmp_path}", capsys=capsys)
    assert status == 0 and "Sets stand on different devices" not in " ".join(out.split())
    assert make_plan(str(tmp_path / "plan.json"), roles, 12).placement


@pytest.mark.parametrize(
    "algorithm, samples",
    [
        ("online_dpo", 2),
        *(
            pytest.param(*case, marks=pytest.mark.extended)
            for case in [("ppo", 4), ("grpo", 8), ("dapo", 8), ("spin", 1), ("remax", 4)]
        ),
    ],
)
def test_a_plan_without_samples_has_those_of_the_algorithm_s_config(algorithm, samples, tmp_path):
    """And what it writes passes a run's own checks."""
    flags = [*SMALL, "--batch=256", f"--algorithm={algorithm}", f"--output={tmp_path}"]
    assert command.main(flags) == 0
    written = load_config(tmp_path / "config.py")
    assert check_config(written).rollout.samples == samples


def test_one_name_says_for_which_roles_it_adds_a_model(capsys):
    _, out, _ = run(*SMALL, "--algorithm=grpo", capsys=capsys)
    assert "is a model for reward too; as a function on the host: --models=actor=qwen2.5-0" in out
    _, out, _ = run(
        *SMALL, "--algorithm=grpo", "--models=actor=qwen2.5-0.5b,reference=qwen2.5-0.5b",
        capsys=capsys,
    )  # fmt: skip
    assert "is a model for" not in out and "reward" not in out


def test_a_config_that_its_algorithm_refuses_is_neither_planned_nor_compiled(capsys):
    refused = ["--config=grpo.py", "--config.rollout.samples=1", "--config.algorithm.minibatch=0"]
    status, _, err = run(*refused, "--cluster=1x2:h100", capsys=capsys)
    assert status == 2 and "GRPO compares a response with the others" in err
    assert compile_command.main([*refused, "--topology=h100:1x2"]) == 2
    assert "GRPO compares a response with the others" in capsys.readouterr().err


def test_what_is_offloaded_takes_no_memory_between_calls(capsys):
    kept = planned(*SMALL, "--strategy=colocate", "--offload=none", capsys=capsys)
    less = planned(*SMALL, "--strategy=colocate", "--offload=reference=all,critic=optimizer",
                   capsys=capsys)  # fmt: skip
    assert less["resident_bytes"]["reference"] == 0
    sizes = less["layouts"]["critic"]["train"]
    # Without the output table a critic of Qwen2.5 0.5B is as large as the model, which ties its.
    # A pipeline's stages have the table whole.
    table = 151936 * 896
    held = (494e6 - table) / sizes.get("pipe", 1) + table
    shards = sizes.get("tensor", 1) * sizes.get("fsdp", 1)
    assert less["resident_bytes"]["critic"] == pytest.approx(4 * held / shards, rel=0.01)
    assert less["seconds"]["total"] > kept["seconds"]["total"]


WAVES = ["--models=llama-7b", "--cluster=1x8:a100-80g"]


def test_a_plan_says_in_one_line_what_hjax_does_not_do_of_it(tmp_path, capsys):
    # 1024 sequences of 2048 tokens, 0.5 MiB of KV cache a token: 1 TiB, more than eight GPUs have.
    found = planned(*WAVES, "--numerics=mixed", capsys=capsys)
    assert found["waves"]["actor"] > 1
    waves = f"decoding in {found['waves']['actor']} waves"
    assert found["needs"] == [waves, "16-bit weights"]
    _, out, _ = run(*WAVES, "--numerics=mixed", f"--output={tmp_path}", capsys=capsys)
    line = f"This plan needs {waves} and 16-bit weights, which hjax does not do."
    assert line in out.splitlines() and line in (tmp_path / "plan.html").read_text()


@pytest.mark.extended
def test_with_the_run_s_numerics_what_has_no_room_waits_for_a_slot(capsys):
    found = planned(*WAVES, capsys=capsys)
    slots = found["settings"]["actor"]["slots"]
    # Whole prompts of each replica, and a token of 7B's keys and values takes 0.5 MiB in bfloat16.
    pipe, tensor = found["parallelism"]["actor"]["generate"]
    replicas = 8 // (pipe * tensor)
    assert 0 < slots < 1024 and slots % replicas == 0
    assert slots * 2048 * 2**19 / 8 < found["usable_bytes"][0]
    assert found["needs"] == [] and found["waves"]["actor"] == math.ceil(1024 / slots)
    _, out, _ = run(*WAVES, capsys=capsys)
    assert f"{slots}" in out and "This plan needs" not in out


def test_uneven_batches_and_other_systems_programs_are_said(capsys):
    # 64 sequences in 2 updates of 32 rows, on 6 devices a host.
    odd = planned(*SMALL[:1], *SMALL[2:], "--cluster=1x6:h100", "--numerics=mixed",
                  "--strategy=colocate", "--updates=2", capsys=capsys)  # fmt: skip
    uneven = [n for n in odd["needs"] if n.startswith("batches that do not divide")]
    assert odd["allocation"] == [6]
    for role in ROLES[:4]:
        layout = odd["layouts"][role]["train"]
        replicas = math.prod(layout.get(axis, 1) for axis in ("data", "fsdp"))
        rows = 32 if role in ("actor", "critic") else 64
        generating = 6 // math.prod(odd["parallelism"][role].get("generate", (6, 1)))
        divides = rows % replicas == 0 and 64 % generating == 0
        said = f"batches that do not divide over the replicas of the {role}"
        assert divides == (said not in uneven)
    assert uneven
    other = planned(*SMALL, "--strategy=deepspeed_chat", capsys=capsys)
    assert other["needs"][0] == "the programs of deepspeed_chat"


CONFIG = ("--config=ppo_llama_7b.py", "--cluster=v5p:4x4x4")


def test_a_config_is_planned_as_it_stands(capsys):
    found = planned(*CONFIG, "--config.critic.path=llama-13b", capsys=capsys)
    assert found["models"] == {
        "actor": "llama-7b", "critic": "llama-13b", "reference": "llama-7b", "reward": "llama-7b",
    }  # fmt: skip
    assert found["tokens_per_second"] * found["seconds"]["total"] == pytest.approx(512 * 2048)
    assert {found["settings"][r]["remat"] for r in ("actor", "critic")} == {"attention"}
    # Rows of a pass and slots are the config's own.
    assert all(set(s) <= {"remat", "offload"} for s in found["settings"].values())
    assert found["needs"] == [] and found["waves"] == {"actor": 1}
    for layouts in found["layouts"].values():  # 512 sequences, updates of 128, passes of 32
        assert 32 % math.prod(layouts["train"].get(a, 1) for a in ("data", "fsdp")) == 0


def test_a_config_s_int8_cache_is_that_of_its_plan():
    """By hand: llama-7b has 2 x 32 layers x 32 heads x 128 numbers a token, and a scale per head;
    of a step of decoding half of the response is read, and the prompt."""
    found = {}
    for kept, element in (("auto", 2), ("int8", 1 + 4 / 128)):
        problem = plan_flags.parse([*CONFIG, f"--config.rollout.cache_dtype={kept}"]).problem
        (pool,), work, model = problem.cluster.pools, problem.work, problem.models["actor"]
        place, mesh = (
            problem.place(pool, 64),
            MeshSizes(generate_pipe=1, generate_tensor=2, tensor=2),
        )
        token = 2 * 32 * 32 * 128 * element
        assert place.memory(model, mesh).cache(3, 7) == pytest.approx(3 * 7 * token / 2)
        found[kept] = generation_cost.decoding_cost(place, model, mesh, 512, work).per_row, token
    share = 1 / work.samples if problem.numerics.shared_prompt else 1
    read = (work.prompt_length * share + work.response_length / 2) / 2 / place.bandwidth
    saved = found["auto"][0] - found["int8"][0]
    assert saved == pytest.approx((found["auto"][1] - found["int8"][1]) * read)


class Compiler:
    """Stands for `compile_step`: finds so many bytes missing in each plan that it is asked for."""

    def __init__(self, monkeypatch, *missing):
        self.missing, self.placements = list(missing), []
        monkeypatch.setattr(plan_compile, "compile_step", self)

    def __call__(self, command, console):
        plan = json.loads(pathlib.Path(command.config.placement).read_text())
        self.placements.append(plan["placement"])
        program = {
            "role": "actor", "program": "update", "runs": 4, "sum_bytes": 2**30, "flops": 459e12,
            "received_bytes": 0,
        }  # fmt: skip
        others = [
            {**program, "program": name, "runs": 1} for name in ("transition_0", "compute_log_prob")
        ]
        return {
            "step": {"missing_bytes": self.missing.pop(0)},
            "versions": {"libtpu": "0"},
            "topology": {"memory_bytes": 2**34},
            "programs": [program, *others],
        }


@pytest.mark.extended
def test_the_fastest_plan_that_fits_by_the_compiler_is_taken(monkeypatch, capsys):
    by_formulas = planned(*CONFIG, capsys=capsys)
    compiler = Compiler(monkeypatch, 5 * 2**30, 0)
    found = planned(*CONFIG, "--compile", capsys=capsys)
    assert compiler.placements == [c["placement"] for c in by_formulas["candidates"][:2]]
    assert found["placement"] == by_formulas["candidates"][1]["placement"]
    assert found["candidates"][1]["reason"] == "does not fit: 5.0 GiB missing"
    assert found["origins"]["memory_bytes"] == "compiled"
    row = found["compiled"]["programs"][0]
    assert row["compiled_bytes"] == 2**30 and row["stage"] == "learning"


def test_where_no_plan_fits_by_the_compiler_the_bytes_missing_are_said(monkeypatch, capsys):
    Compiler(monkeypatch, 7 * 2**30, 3 * 2**30)
    status, _, err = run(*CONFIG, "--compile", "--candidates=2", capsys=capsys)
    assert status == 2 and "none of the 2 best plans, compiled for v5p:4x4x4, fits" in err
    assert "3.0 GiB per device are missing at least" in err


def test_sets_add_up_and_run_side_by_side(capsys):
    found = planned(*SMALL, "--strategy=split", capsys=capsys)
    assert [set(s) for s in found["placement"]] == [{"actor", "reference"}, {"critic", "reward"}]
    for stage, name in (("preparation", "preparation"), ("learning", "learning")):
        of_sets = [
            sum(found["role_seconds"][role][stage] for role in roles)
            for roles in found["placement"]
        ]
        assert found["seconds"][name] == pytest.approx(max(of_sets))


def test_what_is_drawn(tmp_path, capsys):
    status, out, _ = run(*SMALL, "--strategy=split", f"--output={tmp_path}", capsys=capsys)
    assert status == 0
    for text in ("actor", "train p-t-d", "one step", "memory per device", "candidates"):
        assert text in out
    page = (tmp_path / "plan.html").read_text()
    assert "<svg" in page and "http" not in page.replace("http://www.w3.org", "")
    assert "critic\nlearning" in page
    plan = make_plan(str(tmp_path / "plan.json"), ROLES[:4], 8)
    assert sorted(r for s in plan.placement for r in s) == sorted(ROLES[:4])
    assert plan.predicted["seconds"]["total"] > 0


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=[] if name == "openrlhf" else pytest.mark.extended)
        for name in STRATEGIES
    ],
)
def test_every_strategy_is_drawn_with_all_of_its_roles(strategy, tmp_path, capsys):
    """OpenRLHF's has one more than the algorithm: the copy of the actor that generates."""
    roles = (*ROLES[:4], "rollout") if strategy == "openrlhf" else ROLES[:4]
    arguments = (*SMALL, f"--strategy={strategy}", f"--output={tmp_path}", "--json")
    status, out, _ = run(*arguments, capsys=capsys)
    found = json.loads(out.strip().splitlines()[-1])
    page = (tmp_path / "plan.html").read_text()
    assert status == 0 and sorted(r for s in found["placement"] for r in s) == sorted(roles)
    assert found["models"] == dict.fromkeys(roles, "qwen2.5-0.5b")
    for role in roles:
        assert role in out and f"<td>{role}</td>" in page
        assert len(found["parallelism"][role]["train"]) == 3
    generating = {r for r, layouts in found["parallelism"].items() if "generate" in layouts}
    assert generating == {"rollout" if strategy == "openrlhf" else "actor"}


def test_no_name_in_a_plan_becomes_markup(capsys):
    evil = "</title></script>\"'><evil onload=e()>{{ 7 * 7 }}"
    text = json.dumps(planned(*SMALL, capsys=capsys))
    for name in ("actor", "qwen2.5-0.5b", "2x4:h100", "PPO", "chosen", "assumed"):
        assert f'"{name}"' in text
        text = text.replace(f'"{name}"', json.dumps(name + evil))
    page = plan_page(json.loads(text))
    assert "<evil" not in page and "{{ 7 * 7 }}" in page
    for name in ("actor", "qwen2.5-0.5b", "2x4:h100", "PPO", "chosen", "assumed"):
        assert name + str(markupsafe.escape(evil)) in page


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--cluster=2x4:h900"], "no device is named 'h900'; known: h"),
        (["--cluster=2by4"], "should be HOSTSxDEVICES:DEVICE"),
        (["--cluster=1x2:cpu"], "no CPU has a data sheet here; python -m hjax.launch.plan --calib"),
        (["--algorithm=grpo", "--samples=1"], "GRPO compares a response with the others to its"),
        (["--algorithm=online_dpo", "--samples=4"], "OnlineDPO compares two answers to a prompt"),
        (["--samples=0"], "--samples=0: a whole number of 1 or more"),
        (["--cluster=v5p:3x4x4"], "each a power of two"),
        (["--cluster=0x8:h100"], "sizes of 1 or more"),
        (["--models=llama-9b"], "no published model is named 'llama-9b'"),
        (["--models=actor=llama-7b"], "lacks critic, reference"),
        (["--models=judge=llama-7b"], "no role 'judge'; this algorithm has actor"),
        (["--batch=0"], "--batch=0: a whole number of 1 or more"),
        (["--response_length=0"], "--response_length=0"),
        (["--batch=60"], "--batch=60 does not divide into 8 updates"),
        (["--strategy=luck"], "--strategy=luck: one of auto, colocate"),
        (["--algorithm=qpo"], "algorithm.name='qpo' is unknown"),
        (["--algorithm=sft"], "has no dataflow to place"),
        (["--constants=speed=2"], "no constant is named 'speed'"),
        (["--constants=matmul=5,usable=2"], "matmul=5: a share of peak FLOP/s, above 0 to 1"),
        (["--constants=usable=2"], "usable=2: a share of device memory, above 0 to 1"),
        (["--cluster=3x5:h100", "--models=qwen2.5-32b", "--samples=1"], "no layout divides bat"),
        (["--constants=link=no"], "'link=no' is not NAME=NUMBER"),
        (["--constants=link_latency=inf"], "link_latency=inf: a number from 0 to 1e+15"),
        (["--constants=matmul=1e400"], "matmul=inf: a number above 0 to 1e+15"),
        (["--constants=decode=1e308"], "decode=1e+308: a number from 0 to 1e+15"),
        (["--constants=decode=nan"], "decode=nan: a number from 0 to 1e+15"),
        (["--constants=decode=-1"], "decode=-1: a number from 0 to"),
        (["--profile=nowhere.json"], "--profile=nowhere.json: No such file"),
        (["--prompt_length=40000"], "fewer than the 40128"),
        (["--models=llama-70b", "--cluster=1x8:a100-40g"], "GiB per device are missing"),
        (["--offload=actor=disk"], "'actor=disk' is not ROLE=WHAT"),
        (["--compile"], "--compile needs --config=NAME.py"),
        ([*CONFIG, "--roofline"], "python benchmarks/roofline.py"),
        (["--config=ppo_llama_7b.py"], "--models: the config sets it; leave it out"),
        (["--config=nothing.py"], "nothing.py"),
        (["--nonsense=1"], "nonsense"),
        (["stray"], "unexpected argument 'stray'"),
    ],
)
def test_wrong_input_ends_in_one_line(arguments, said, capsys):
    status, out, err = run(*SMALL, *arguments, capsys=capsys)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1 and said in err


@pytest.mark.extended
def test_help_exits_with_0():
    done = subprocess.run(
        [sys.executable, "-m", "hjax.launch.plan", "--help"],
        capture_output=True, text=True, timeout=120,
        cwd=pathlib.Path(__file__).parent.parent,
    )  # fmt: skip
    assert done.returncode == 0 and "--cluster" in done.stdout and "deepspeed_chat" in done.stdout


@pytest.mark.extended
def test_calibration_stores_a_profile_that_plans_read(calibrated, capsys):
    shown = (calibrated / "shown.txt").read_text().strip().splitlines()
    measured = json.loads(shown[-1])
    assert set(measured["busy"]) == {"1", "2"}  # each number of devices that may be busy
    assert measured["device"]["per_host"] == 2
    assert all(rate > 0 for rate in measured["device"]["flops"].values())
    assert measured["constants"]["decode_row"] == measured["constants"]["decode_step"] == 0
    assert measured["origins"]["decode_row"] == "part of what is measured as decode"
    # It is of simulated devices, of which there are no clusters to plan.
    status, out, err = run(*SMALL, f"--profile={calibrated / 'two.json'}", capsys=capsys)
    assert (status, out) == (2, "") and len(err.splitlines()) == 1
    assert "two.json was measured on 2 x cpu (" in err and "not on h100; make one there" in err


def stored(path, kind="NVIDIA H100 80GB HBM3", versions=None, **figures):
    """A profile of 8 of these devices, made on a machine that is not this one."""
    versions = versions or {"calibration": VERSION, "jax": "0.1"}
    made_on = MeasuredOn(kind, 8, "another processor", 64, tuple(sorted(versions.items())))
    rates = {"memory": 6e10, "flops": {"bfloat16": 5e14}, "bandwidth": 2.5e12, "link": 3e11}
    device = Device("gpu", **(rates | figures), network=3e11, per_host=8, torus=0, source="")
    constants = Constants().with_values({"matmul": 0.7, "link": 1.0, "memory": 1.0}, measured=True)
    write_profile(Profile(device, constants, {}, made_on), path)
    return f"--profile={path}"


def test_a_profile_of_the_cluster_s_devices_says_what_it_was_made_on(tmp_path, capsys):
    profile = stored(tmp_path / "h100.json")
    _, out, _ = run(*SMALL, profile, capsys=capsys)
    said = ("measured on 8 x NVIDIA H100 80GB HBM3 (another processor, cores: 64; "
            f"calibration {VERSION}, jax 0.1)")  # fmt: skip
    assert said in " ".join(out.split()) and "this machine" not in out
    found = planned(*SMALL, profile, capsys=capsys)
    assert found["origins"]["seconds"] == "measured: link, matmul, memory"
    assert found["origins"]["hardware"] == [f"{said}; network: data sheet"]
    assert found["cluster"] == "2x4:h100"


def test_a_profile_s_shares_are_of_the_rates_that_it_measured(tmp_path):
    read = stored(tmp_path / "h100.json")
    problem = plan_flags.parse([*SMALL, read]).problem
    place = problem.place(problem.cluster.pools[0], 4)
    assert place.flops == pytest.approx(0.7 * 5e14) and place.bandwidth == 2.5e12
    assert cost.ring_bandwidth(place, 4, 1) == 3e11
    known = DEVICES["h100"]
    assert problem.cluster.pools[0].device.network == known.network


@pytest.mark.parametrize(
    "cluster, changes, said",
    [
        ("2x8:a100", {}, "was measured on 8 x NVIDIA H100 80GB HBM3 (another processor), not on "
         "a100-80g; make one there with python"),
        ("2x8:h100+2x8:a100", {}, "not on a100-80g and h100"),
        ("2x4:h100", {"kind": "NVIDIA H100 PCIe"}, "8 x NVIDIA H100 PCIe (another processor), not"),
        ("2x4:h100", {"kind": "cpu"}, "8 x cpu (another processor), not on h100"),
        ("2x4:h100", {"versions": {"calibration": "1"}}, f"is of calibration 1, not {VERSION}"),
        ("2x4:h100", {"versions": {"jax": "1"}}, f"is of calibration none, not {VERSION}"),
        ("2x4:h100", {"memory": "much"}, "not a profile (ValueError: could not convert"),
    ],
)  # fmt: skip
def test_a_profile_of_other_devices_is_refused(cluster, changes, said, tmp_path, capsys):
    profile = stored(tmp_path / "made.json", **changes)
    status, out, err = run(*SMALL, f"--cluster={cluster}", profile, capsys=capsys)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1 and said in err and "made.json" in err


@pytest.mark.extended
def test_a_rack_s_models_take_a_power_of_two_of_its_devices(capsys):
    found = planned("--models=llama-70b", "--cluster=1x72:gb200", "--batch=1024", capsys=capsys)
    assert sum(found["allocation"]) == 64


@contextlib.contextmanager
def auto_trainer(algorithm="PPO", changes=None, workdir=None):
    """A tiny run whose placement is planned as the command plans it."""
    config = tiny_config(algorithm, {"placement": "auto", **(changes or {})})
    trainer = hjax.Trainer(config, workdir=workdir, plan=hjax.plan(config, workdir))
    try:
        yield trainer
    finally:
        trainer.close()


@pytest.mark.extended
def test_calibration_says_how_far_it_has_come(calibrated):
    shown = (calibrated / "shown.txt").read_text().splitlines()
    lines = [line for line in shown if line.startswith("calibrating")]
    # A dtype; actors on 1 and on 2 devices, with FSDP and a tensor axis; seven parts more.
    assert lines[0].startswith("calibrating  0/12   products in float32")
    assert lines[-1].startswith("calibrating 12/12   done")


def test_calls_are_repeated_until_their_medians_are_known(monkeypatch):
    """Calls that take what is listed, second after second, of a clock that nothing else moves."""
    clock, log = [0.0], []
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(calibration, "MAX_SECONDS", 100.0)

    def call(name, seconds):
        left = itertools.cycle(seconds)

        def run():
            log.append(name)
            clock[0] += next(left)
            return types.SimpleNamespace(result=lambda: None)

        return run

    # Always the same: one that is not counted and three of each, in turn.
    found = calibration._time_interleaved([call("a", [1.0]), call("b", [2.0])])
    assert [taken.seconds for taken in found] == [1.0, 2.0]
    assert log == ["a", "b"] * 4
    # Middle halves of .9 to 1.1: known to 3 % of 1.1 after (.2 / .033)^2 = 37 at the earliest.
    log.clear()
    found = calibration._time_interleaved([call("a", [0.9, 1.1, 0.9, 1.1])])
    assert 38 <= len(log) <= 52 and 0.9 <= found[0].seconds <= 1.1
    # Never known: until the time is over.
    log.clear()
    calibration._time_interleaved([call("a", [1.0, 9.0])])
    assert sum([1.0, 9.0][i % 2] for i in range(1, len(log))) <= 109


CALIBRATED = ModelConfig(
    vocab_size=16, hidden_size=32, mlp_size=64, layers=2, heads=2, kv_heads=2, head_dim=16,
    max_length=64,
)  # fmt: skip


def test_a_calibration_counts_a_prompt_once_for_its_responses():
    """Of 16 sequences on 8 devices, two to each prompt of 32, as the cost model does: 48 tokens."""
    batch = {"responses": np.zeros((16, 32)), "prompts": np.zeros((16, 32))}
    found = calibration._Probe(MeshSizes(data=8), None, CALIBRATED, {}, batch).account(forward=1.0)
    layer = 4 * 32 * 32 + 3 * 32 * 64
    products = 2 * (2 * layer + 16 * 32) * 2 * 48
    assert found.flops == products + 2 * 32 * 2 * 2 * 48 * 48  # causal: half of the scores
    assert found.scores == 2 * 2 * 48 * 48 * 2
    assert found.length == 48


def test_a_calibrated_rollout_takes_what_it_took():
    """1 s to start, 8 s for each layer and token, the cache, and what is read of weights, which by
    its bandwidth would be 4 s a token and is 10."""
    counted = model_counts(CALIBRATED)
    read = 4 * (2 * counted.layer_parameters + counted.head_parameters)
    device = Device("d", 1e9, {"float32": 1e30}, read / 4, 1.0, 1.0, 1, 0, "by hand")
    values = {"memory": 1.0, "matmul": 1.0, "dispatch": 0.25, "rollout": 0.75,
              "decode_layer": 8.0, "decode_step": 0.0, "decode_row": 0.0}  # fmt: skip
    place = DeviceSet(DevicePool(device, 1, 1), 1, Constants().with_values(values), FLOAT32)
    # Of 16 sequences half of a prompt of 32 and, in the middle, 16 of their own.
    cache = 16 * (16 + 16) * 2 * (2 * 2 * 16 * 4) / device.bandwidth
    taken = 1 + 32 * (2 * 8 + 10 + cache)
    assert calibration._fit_decode(place, CALIBRATED, 16, taken) == pytest.approx(2.5)


def test_what_is_scored_and_learned_from_in_a_calibration_is_whole():
    """Two full responses to each prompt, so that its shapes hang on nothing that was drawn."""
    prompts = {"prompts": np.arange(6).reshape(3, 2), "prompt_mask": np.ones((3, 2), bool)}
    batch = calibration._full_batch(prompts, 5, 7)
    assert batch["prompts"].tolist() == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]]
    assert batch["prompt_id"].tolist() == [0, 0, 1, 1, 2, 2]
    assert batch["response_mask"].shape == (6, 5) and batch["response_mask"].all()
    assert 0 <= batch["responses"].min() and batch["responses"].max() < 7


@pytest.mark.parametrize("display", [True, False])
def test_a_plan_shows_the_calibration_that_it_needs(display, tmp_path, monkeypatch, capsys):
    def calibrate(devices, progress):
        progress(0, 1, "products")
        progress(1, 1, "")
        return shared_cores(0.5)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("hjax.planning.auto.calibrate", calibrate)
    config = tiny_config("PPO", {"placement": "auto", "display.enabled": display})
    hjax.plan(config)
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[:2] == (["calibrating 0/1   products   0:00 gone",
                          "calibrating 1/1   done   0:00 gone"] if display else [])  # fmt: skip
    assert [line.startswith("placement=auto: ") for line in lines[2:]] == [True] * len(lines[2:])
    assert any("a step takes" in line for line in lines) == display
    hjax.plan(config)  # the profile is stored now
    assert "calibrating" not in capsys.readouterr().out


def test_a_calibration_tells_whoever_asked(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    told = []
    monkeypatch.setattr(
        "hjax.planning.auto.calibrate",
        lambda devices, progress: (progress(1, 2, "copies"), shared_cores(0.5))[1],
    )
    config = tiny_config("PPO", {"placement": "auto", "display.enabled": True})
    hjax.plan(config, progress=lambda *parts: told.append(parts))
    assert told == [(1, 2, "copies")]
    assert "calibrating" not in capsys.readouterr().out


def test_a_plan_says_why_devices_are_idle(monkeypatch, capsys):
    """6 prompts do not divide over 8 devices, one head and one layer over no two."""
    monkeypatch.setattr("hjax.planning.auto.find_profile", lambda *_: shared_cores(0.5))
    changes = {"placement": "auto", "display.enabled": True, "rollout.prompts": 6,
               "rollout.samples": 1, "algorithm.minibatch": 0, "warm_start.steps": 0,
               "model.heads": 1, "model.kv_heads": 1, "model.layers": 1}  # fmt: skip
    plan = hjax.plan(tiny_config("PPO", changes))
    out = capsys.readouterr().out
    assert sum(plan.allocation) < 8
    idle = f"{8 - sum(plan.allocation)} of 8 devices are idle: no layout of these models"
    assert idle in out and plan.predicted["idle"].startswith(idle)


@pytest.mark.extended
def test_auto_runs_the_plan_it_printed(calibrated, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(calibrated))
    with auto_trainer(workdir=tmp_path) as trainer:
        trainer.run()
        predicted = trainer.roles.plan.predicted
        written = json.loads((tmp_path / "plan.json").read_text())
    assert predicted["seconds"]["total"] > 0
    assert written["predicted"]["seconds"] == predicted["seconds"]
    assert sum(written["allocation"]) <= 8
    # The plan is also what a run of that plan.json gets.
    again = make_plan(str(tmp_path / "plan.json"), ("actor", "critic", "reference"), 8)
    assert [list(s) for s in again.placement] == written["placement"]
    assert list(again.allocation) == written["allocation"]


@pytest.mark.extended
def test_a_resumed_auto_keeps_its_plan(calibrated, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(calibrated))
    with auto_trainer(changes={"checkpoint.every": 1}, workdir=tmp_path) as first:
        first.run(1)
        planned = first.plan_record()
    # Nothing is measured or searched again: what another calibration says would change sums.
    monkeypatch.setattr("hjax.planning.auto.find_profile", lambda *_: pytest.fail("measured"))
    with auto_trainer(changes={"checkpoint.every": 1}, workdir=tmp_path) as again:
        assert again.plan_record() == planned and again.plan_record()["predicted"]["candidates"]
        again.run(1)
        assert again.step_number == 2


def shared_cores(load, faster=2.0):
    """8 simulated devices; a set on 4 of them takes ``load`` of the cores' time."""
    device = Device(
        "cpu", 2.0**40, {"float32": 1e10}, 1e10, 1e10, 1e10, 8, 0, "test",
        alone=((4, faster, load), (8, 1.0, 1.0)),
    )  # fmt: skip
    values = {"decode_row": 0.0, "decode_step": 0.0, "link_latency": 0.0, "network_latency": 0.0}
    return Profile(device, Constants().with_values(values), {}, MeasuredOn.here(jax.devices()))


@pytest.mark.parametrize("load, sets", [(0.97, 1), (0.5, 2)])
def test_auto_takes_the_simplest_of_equal_plans(load, sets, monkeypatch):
    # Actor and critic update at the same time. Sets that would take all of the cores gain 3 % by
    # it, which is noise; sets that leave half of them idle gain much.
    monkeypatch.setattr("hjax.planning.auto.find_profile", lambda *_: shared_cores(load))
    changes = {"algorithm.kl_coef": 0.0, "rollout.prompts": 32}
    with auto_trainer(changes=changes) as trainer:
        found = trainer.plan_record()
    seconds = [c["seconds"] for c in found["predicted"]["candidates"]]
    reasons = [c["reason"] for c in found["predicted"]["candidates"]]
    assert len(found["placement"]) == sets and reasons[0] == "chosen"
    assert (seconds[0] > min(seconds)) == (sets == 1)
    assert any("within the model's error, but 2 sets" in r for r in reasons) == (sets == 1)


@pytest.mark.parametrize("faster, devices", [(2.1, 8), (4.0, 4)])
def test_auto_takes_all_devices_of_equal_plans(faster, devices, monkeypatch):
    # Four busy devices do 5 % more than eight together, which is noise, or twice as much.
    monkeypatch.setattr("hjax.planning.auto.find_profile", lambda *_: shared_cores(1.0, faster))
    changes = {"algorithm.kl_coef": 0.0, "rollout.prompts": 32}
    with auto_trainer(changes=changes) as trainer:
        found, layouts = trainer.plan_record(), trainer.roles.plan.layouts
    reasons = [c["reason"] for c in found["predicted"]["candidates"]]
    assert found["allocation"] == [devices] and reasons[0] == "chosen"
    on_few = any("within the model's error, but on 4 of 8 devices" in r for r in reasons)
    assert on_few == (devices == 8)
    # A tensor axis of 2 would be 3 % faster on all of them, which is noise too.
    if devices == 8:
        assert all(layout["train"] == {"data": 8} for layout in layouts.values())


def test_auto_splits_weights_where_rows_do_not_divide(monkeypatch):
    monkeypatch.setattr("hjax.planning.auto.find_profile", lambda *_: shared_cores(1.0))
    changes = {"placement": "auto", "algorithm.kl_coef": 0.0, "rollout.prompts": 4,
               "rollout.samples": 1, "algorithm.minibatch": 0, "warm_start.steps": 0}  # fmt: skip
    plan = hjax.plan(tiny_config("PPO", changes))
    assert plan.allocation == (8,)
    assert plan.layouts["actor"]["train"].get("data", 1) <= 4


def test_auto_refuses_what_it_does_not_know(monkeypatch):
    monkeypatch.setattr("hjax.planning.auto.find_profile", None)  # nothing is measured before
    with pytest.raises(ConfigError, match="one model and no rollouts"):
        hjax.plan(tiny_config("SFT", {"placement": "auto"}))


@pytest.mark.parametrize(
    "cluster, expected",
    [
        # Four chips a host: two hosts a slice.
        ("v5e:2x4", [["actor, reference on 4 of 8 devices of a slice of several hosts"], []]),
        ("2xv5e:2x4", [["actor, reference on 2 slices"], []]),
        ("v5e:2x2", [[], []]),  # one host, whose parts are boxes
        ("4x8:h100", [[], []]),
    ],
)
def test_sets_that_are_no_slice_are_compiled_and_not_run(cluster, expected):
    (pool,) = clusters(cluster).pools
    devices = {"v5e:2x4": 4, "2xv5e:2x4": 16}.get(cluster, 2)
    part = PlannedSet(("actor", "reference"), pool, devices, ())
    whole = PlannedSet(("actor",), pool, pool.domain, ())
    assert [only_compiles(Candidate((s,))) for s in (part, whole)] == expected


@pytest.mark.extended
def test_a_plan_that_spans_slices_says_that_it_is_not_run(capsys):
    large = ["--models=llama-70b", "--batch=64", "--prompt_length=128",
             "--response_length=128", "--strategy=colocate"]  # fmt: skip
    status, out, _ = run(*large, "--cluster=4xv5e:8x8", capsys=capsys)
    assert status == 0
    line = "hjax compiles this plan and does not run it: actor"
    assert f"{line}, critic, reference, reward on " in " ".join(out.split())
    found = planned(*large, "--cluster=4xv5e:8x8", capsys=capsys)
    assert found["only_compiles"] and found["needs"] == []
    assert line in plan_page(found)
    assert planned(*SMALL, capsys=capsys)["only_compiles"] == []
