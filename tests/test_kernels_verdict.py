"""Which forms of kernels a run takes: with, without and with a stale verdict, and on a resume."""

import dataclasses
import json
import types

import pytest

import hjax
from hjax.errors import DataError
from hjax.kernels import blockwise, decode, grouped_blocks, splash, verdict
from hjax.kernels.registry import make_kernel_set
from hjax.kernels.verdict import FormVerdict, choose_forms, known_or_assumed
from hjax.run import training_run
from hjax.run.backends import LocalBackend
from hjax.run.reporter import Reporter
from hjax.run.role_groups import describe_roles
from hjax.run.run_metadata import recorded_forms
from hjax.run.workdir import Workdir
from tests.helpers import ONE_DEVICE, computed, trainer_of

TPU, GPU = "TPU v5 lite", "NVIDIA H100 80GB HBM3"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def record(kind, results, **versions):
    found = FormVerdict(kind, verdict.runtime_versions() | versions, results)
    found.path.parent.mkdir(parents=True, exist_ok=True)
    found.path.write_text(json.dumps(dataclasses.asdict(found)))
    return found


def test_without_a_verdict_proven_forms_are_taken_and_one_line_says_so():
    choice = choose_forms("tpu", TPU)
    assert choice.forms == verdict.PROVEN_FORMS
    assert choice.remark == (
        "the verdict on TPU v5 lite is missing, so decode=tpu kernel, collective matmul, expert "
        "ring are not taken; try them once with python -m hjax.launch.check"
    )
    assert "decode=gpu kernel" in choose_forms("gpu", GPU).remark
    assert choose_forms("cpu", "cpu").remark == ""


def test_right_forms_are_taken_and_wrong_hung_and_crashed_ones_are_not():
    results = {
        "attention=splash": "wrong",
        "decode=tpu kernel": "right",
        "collective matmul": "hung",
        "expert ring": "crashed",
    }
    record(TPU, results)
    choice = choose_forms("tpu", TPU)
    # Megablox was not tried, and is a library's.
    taken = {name for name in verdict.forms_of("tpu") if name in choice.forms}
    assert taken == {"decode=tpu kernel", "grouped=megablox", "sparsecore collectives"}
    assert "attention=splash was wrong, collective matmul was hung" in choice.remark
    assert "\n" not in choice.remark


def test_a_verdict_is_of_one_kind_of_device_and_of_versions():
    record(TPU, {"decode=tpu kernel": "right"}, jax="0.0.1")
    choice = choose_forms("tpu", TPU)
    assert choice.forms == verdict.PROVEN_FORMS
    assert "has other versions of JAX or its plugins" in choice.remark
    record(TPU, {"decode=tpu kernel": "right"})
    assert "decode=tpu kernel" in choose_forms("tpu", TPU).forms
    # Ray's name of the same kind, and another kind.
    assert "decode=tpu kernel" in choose_forms("tpu", "TPU-V5E").forms
    assert "is missing" in choose_forms("tpu", "TPU v6 lite").remark


@pytest.mark.parametrize("text", ['{"results": {"expert ring": "fine"}}', "[]", "{"])
def test_a_damaged_verdict_is_refused_by_its_file(text):
    file = record(TPU, {}).path
    file.write_text(text)
    with pytest.raises(DataError, match=str(file)):
        choose_forms("tpu", TPU)


def test_a_resume_keeps_the_forms_of_its_run(tmp_path):
    first = choose_forms("tpu", TPU)
    recorded = json.loads(json.dumps(first.record(TPU)))
    record(TPU, {"decode=tpu kernel": "right", "attention=splash": "wrong"})
    again = choose_forms("tpu", TPU, recorded)
    assert again.forms == first.forms and again.remark == ""
    assert again.record(TPU) == recorded
    # Another kind of device computes other bits anyway.
    assert "decode=gpu kernel" not in choose_forms("gpu", GPU, recorded).forms
    workdir = Workdir(tmp_path / "run")
    config = hjax.get_config("grpo.py", {"steps": 1})
    workdir.open(config)
    workdir.write_json("kernels.json", recorded)
    assert recorded_forms(workdir, config) is None  # it took no step: it starts anew
    workdir.append("metrics.jsonl", [{"step": 1}])
    config.steps = 2
    assert recorded_forms(workdir, config) == recorded
    workdir.close()


def test_programs_for_absent_devices_say_what_they_assume():
    found = known_or_assumed("tpu", TPU)
    assert found.forms == verdict.ALL_FORMS and found.remark.startswith("assumed right on TPU v5")
    record(TPU, {"decode=tpu kernel": "hung"})
    found = known_or_assumed("tpu", TPU)
    assert "decode=tpu kernel" not in found.forms
    assert found.remark == (
        "forms by the verdict on TPU v5 lite: attention=splash; grouped=megablox; sparsecore "
        "collectives"
    )


def test_forms_decide_kernels():
    plain = make_kernel_set("tpu", forms=frozenset())
    assert plain.attention is blockwise.attend and plain.packs_share
    assert plain.grouped is grouped_blocks.product
    assert make_kernel_set("tpu", forms=frozenset({"attention=splash"})).attention is splash.attend
    tpu = types.SimpleNamespace(platform="tpu", device_kind=TPU)
    gpu = types.SimpleNamespace(platform="gpu", device_kind=GPU, compute_capability="9.0")
    assert decode.choose_form(tpu, 128) == decode.TPU_KERNEL
    assert decode.choose_form(tpu, 128, frozenset()) == decode.TILES
    assert decode.choose_form(gpu, 128) == decode.GPU_KERNEL
    assert decode.choose_form(gpu, 128, frozenset()) == decode.ROWS


@pytest.mark.extended
def test_runs_without_with_and_with_a_stale_verdict(tmp_path, monkeypatch):
    # CPU devices by a TPU's name: the choice is the controller's, and so are line and record.
    found = {}

    def choose(platform, kind, recorded=None):
        return choose_forms("tpu", kind, recorded)

    def role_groups(*arguments, forms, **options):
        found["forms"] = forms
        return describe_roles(*arguments, forms=forms, **options)

    kind = property(lambda backend: TPU, lambda backend, found: None)
    monkeypatch.setattr(LocalBackend, "device_kind", kind, raising=False)
    monkeypatch.setattr(training_run, "choose_forms", choose)
    monkeypatch.setattr(training_run, "forms_of", lambda platform: verdict.forms_of("tpu"))
    monkeypatch.setattr(training_run, "describe_roles", role_groups)
    monkeypatch.setattr(Reporter, "message", lambda self, text: found["lines"].append(text))
    own = {"decode=tpu kernel", "expert ring", "collective matmul"}

    def run(name, steps=1):
        found["lines"] = []
        changes = ONE_DEVICE | {"steps": steps, "model.layers": 1}
        with trainer_of("GRPO", changes, tmp_path / name) as trainer:
            rows = trainer.run()
        lines = [line for line in found["lines"] if line.startswith(("the verdict on", TPU))]
        recorded = json.loads((tmp_path / name / "kernels.json").read_text())
        assert set(recorded["forms"]) == found["forms"]
        return found["forms"] & own, lines, [computed(row) for row in rows]

    forms, lines, alone = run("without")
    assert forms == set() and len(lines) == 1 and "is missing" in lines[0]
    record(TPU, {"decode=tpu kernel": "right"}, jax="0.0.1")
    forms, lines, _ = run("stale")
    assert forms == set() and len(lines) == 1 and "has other versions" in lines[0]
    record(TPU, {"decode=tpu kernel": "right", "expert ring": "wrong", "collective matmul": "hung"})
    forms, lines, rows = run("with")
    assert forms == {"decode=tpu kernel"} and len(lines) == 1
    assert "expert ring was wrong, collective matmul was hung" in lines[0]
    assert rows == alone  # a CPU computes with its own forms
    # A resume keeps what its run began with.
    forms, lines, _ = run("without", steps=2)
    assert forms == set() and lines == []
