"""`python -m hjax.launch.check`: kernels broken on purpose are found and not taken."""

import json
import re
import subprocess
import sys

import broken_forms
import pytest

import hjax
from hjax.kernels import verdict
from hjax.kernels.verdict import CRASHED, HUNG, RIGHT, UNSUITED, WRONG, FormVerdict, choose_forms
from hjax.launch import check
from hjax.launch.check import CheckReport, check_forms, form_line, summary
from hjax.launch.form_checks import checked_process, timings
from hjax.launch.form_checks.checked_process import CaseResult, joined_result
from hjax.machine import start_error

WRONG_FORMS = {
    verdict.SPLASH: r"^(values|gradients of \w+) are off by",
    verdict.MEGABLOX: r"^values: \d+ values are not finite$",
    verdict.CUDNN_ATTENTION: r"^values are off by",
    verdict.GPU_DECODING: r"^values are off by",
    verdict.EXPERT_RING: r"^gradients of keys are off by 1 of the largest",
}
EVERY_DAY = verdict.MEGABLOX


@pytest.mark.parametrize(
    "form", [f if f == EVERY_DAY else pytest.param(f, marks=pytest.mark.extended)
             for f in WRONG_FORMS]
)  # fmt: skip
def test_a_wrong_kernel_is_found(form):
    [case] = broken_forms.CASES[form]()
    result, detail = checked_process._run(case)
    assert result == WRONG and re.search(WRONG_FORMS[form], detail), detail


@pytest.mark.extended
def test_broken_forms_are_not_taken_and_a_hang_costs_its_deadline(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    report = check_forms(deadline=30.0, table="broken_forms")
    results = report.verdict.results
    assert {form for form, found in results.items() if found == WRONG} == set(WRONG_FORMS)
    assert results[verdict.TPU_DECODING] == HUNG and results[verdict.COLLECTIVE_MATMUL] == CRASHED
    assert results[verdict.SPARSECORE] == RIGHT and report.failed
    cases = {(case.form, case.case): case for case in report.cases}
    hang = cases[verdict.TPU_DECODING, "a hang"]
    assert hang.result == HUNG and hang.seconds > 30.0
    crash = cases[verdict.COLLECTIVE_MATMUL, "a crash"]
    assert crash.result == CRASHED and "SIGSEGV" in crash.detail
    # The rest of a form's cases go on in another process.
    for form in (verdict.TPU_DECODING, verdict.COLLECTIVE_MATMUL):
        assert cases[form, "a right one"].result == RIGHT
    # The file is a verdict on this kind of device; on a TPU of that kind nothing broken is taken.
    found = verdict.read_verdict(report.devices["device_kind"])
    assert found is not None and found.results == results
    choice = choose_forms("tpu", report.devices["device_kind"])
    assert {form for form in verdict.forms_of("tpu") if form in choice.forms} == {
        verdict.SPARSECORE
    }


def report_of(platform, kind, results, cases=()):
    devices = {"platform": platform, "device_kind": kind, "devices": 4, "memory_bytes": 2**34}
    versions = {"jax": "0.9.1", "libtpu": "0.0.30"}
    return CheckReport(devices, FormVerdict(kind, versions, results), list(cases), 61.0)


def test_the_summary_says_what_auto_takes_and_what_instead():
    report = report_of("tpu", "TPU v5 lite", {verdict.SPLASH: RIGHT, verdict.TPU_DECODING: HUNG})
    lines = summary(report).splitlines()
    assert lines[1].startswith("4 TPU v5 lite of 16.0 GiB")
    taken = "attention=splash, grouped=megablox, sparsecore collectives"
    assert f"auto takes from now on: {taken}" in lines
    assert "  not decode=tpu kernel: products over the cache by XLA" in lines
    assert lines[-1].startswith("something was wrong, in 1:01; verdict in ")
    assert any(line.startswith("sandbox: ") and "limits" in line for line in lines)
    record = json.loads(json.dumps(report.record()))
    assert set(record["sandbox"]) == {"landlock", "seccomp", "namespaces", "users"}
    assert record["results"] == {verdict.SPLASH: RIGHT, verdict.TPU_DECODING: HUNG}
    assert not report_of("tpu", "TPU v4", {verdict.SPLASH: RIGHT}).failed


def test_a_form_is_as_bad_as_its_worst_case():
    def of(*results):
        return [CaseResult("f", f"case {i}", each, "why") for i, each in enumerate(results)]

    assert joined_result(of(RIGHT, UNSUITED)) == RIGHT
    assert joined_result(of(UNSUITED)) == UNSUITED == joined_result([])
    assert joined_result(of(RIGHT, WRONG, HUNG)) == HUNG
    assert form_line("f", of(RIGHT, WRONG)).splitlines()[1] == "    case 1: wrong, why"


@pytest.mark.parametrize("text, says", [
    # Provoked with JAX 0.10 without a device.
    ("", "libraries or the driver are missing"),
    ("Unable to initialize backend 'cuda': Backend 'cuda' is not in the list of known backends: "
     "['cpu', 'tpu']. (set JAX_PLATFORMS='' to automatically choose an available backend)",
     "JAX has no plugin for it here; pip install 'hjax[cuda]'"),
    ("Unable to initialize backend 'tpu': NOT_FOUND: TPU initialization failed: No jellyfish "
     "device found.", "no device is visible"),
    # As JAX, libtpu and CUDA document them.
    ("Unable to initialize backend 'cuda': INTERNAL: no supported devices found for platform CUDA",
     "no device is visible; nvidia-smi"),
    ("CUDA driver version is insufficient for CUDA runtime version", "driver is too old"),
    ("The TPU is already in use by process with pid 77. Not attempting to load libtpu.so in this "
     "process.", "another process holds the devices"),
    ("CUDA_ERROR_OUT_OF_MEMORY: out of memory", "another process has the GPU's memory"),
])  # fmt: skip
def test_a_platform_that_does_not_start_is_one_line_with_the_remedy(text, says):
    line = str(start_error(RuntimeError(text), "cuda"))
    assert line.startswith("JAX_PLATFORMS=cuda does not start: ") and says in line
    assert "\n" not in line and "set JAX_PLATFORMS=''" not in line


def test_times_are_lines():
    seconds = {"attention, 2 rows": {"by blocks": 0.0125, "splash": "ValueError: too wide"}}
    times = {"bandwidths": {"memory_bytes_per_second": 2.0**39}, "seconds": seconds}
    assert check.time_lines(times) == [
        "memory: 512.0 GiB/s",
        "attention, 2 rows: by blocks 12.5 ms, splash ValueError: too wide",
    ]
    assert check.time_lines({"failed": "hung, it ran past its deadline"}) == [
        "times: hung, it ran past its deadline"
    ]


def test_a_run_gives_the_sizes_that_are_timed():
    changes = {"actor.path": "qwen2.5-1.5b", "rollout.max_prompt_length": 500}
    config = hjax.get_config("grpo.py", changes | {"rollout.max_response_length": 300})
    sizes = check.run_sizes(config)
    assert (sizes["prompt"], sizes["response"], sizes["experts"]) == (500, 300, 0)
    assert (sizes["heads"], sizes["kv_heads"], sizes["dim"]) == (12, 2, 128)


@pytest.mark.extended
def test_forms_are_timed_beside_each_other():
    sizes = timings.TimedSizes(2, 100, 500, 4, 2, 16, 32, 24, 3)
    found = timings.measure(sizes)
    assert [sorted(forms) for forms in found.values()] == [
        ["by blocks"], ["by XLA"], ["by blocks", "ragged_dot"]
    ]  # fmt: skip
    for forms in found.values():
        assert all(0 < seconds < 60 for seconds in forms.values()), forms


def test_wrong_flags_are_refused(capsys):
    assert check.main(["--deadline=0"]) == 2
    assert "--deadline=0.0: must be above 0 to 1e8 seconds" in capsys.readouterr().err


@pytest.mark.extended
def test_a_run_on_a_platform_that_is_not_there_ends_with_one_line(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "rocm")
    command = [sys.executable, "-m", "hjax.launch", "--config=grpo.py", "--dry_run"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("hjax: error: JAX_PLATFORMS=rocm does not start: JAX has no plugin")
