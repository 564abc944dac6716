"""What a run teaches a profile: by hand, with a cost model of three lines."""

import json
import pathlib
from types import SimpleNamespace

import jax
import pytest
from helpers import tiny_config

import hjax
from hjax.controller.timeline import Span
from hjax.devices import DEVICES, Device
from hjax.errors import ConfigError
from hjax.launch import plan as command
from hjax.planning import profile_correction as fitting
from hjax.planning.constants import Constants
from hjax.planning.profile import MeasuredOn, Profile, profile_path, read_profile, write_profile
from hjax.planning.profile_correction import PLAN_SECONDS, correct_profile, corrected_profile
from hjax.roles import STAGES

BELIEVED = Constants().with_values(
    {"matmul": 0.5, "dispatch": 0.01, "decode_layer": 0.002, "backward": 1.5, "rollout": 0.05,
     "layer_pass": 0.0, "score": 0.0},
    measured=True,
)  # fmt: skip


def account(constants):
    """Two roles: 32 tokens of 4 layers are decoded, passes take 0.1 s at the peak's rate."""
    c = constants
    generate = c.dispatch + c.rollout + 32 * 4 * c.decode_layer
    forward = c.dispatch + 0.1 / c.matmul
    update = c.dispatch + 0.1 * (1 + 2 * c.backward) / c.matmul
    options = [
        SimpleNamespace(seconds=(generate, forward, update)),
        SimpleNamespace(seconds=(0.0, forward, 0.0)),
    ]
    return SimpleNamespace(sets=[SimpleNamespace(roles=("actor", "reference"), options=options)])


CALLS = {
    ("actor", "generation"): ("generate_sequences", "generate"),
    ("actor", "preparation"): ("compute_log_prob", "prepare"),
    ("actor", "learning"): ("update_actor", "update"),
    ("reference", "preparation"): ("compute_ref_log_prob", "prepare"),
}


def spans(truth, steps=6, slow_first=9.0):
    """A timeline on a machine of these constants; its first steps compile."""
    found, clock = [], 0.0
    for step in range(1, steps + 1):
        for (role, stage), seconds in fitting.predicted_seconds(account(truth)).items():
            method, phase = CALLS[role, stage]
            taken = seconds + (slow_first if step <= 2 else 0.0)
            found.append(Span("pool", role, method, phase, step, clock, clock + taken))
            clock += taken
    return found


@pytest.mark.parametrize(
    "name, factor", [("matmul", 2.0), ("decode_layer", 3.0), ("backward", 2.0), ("matmul", 0.6)]
)
def test_the_term_that_is_wrong_is_named_and_set_right(name, factor):
    value = getattr(BELIEVED, name)
    truth = BELIEVED.with_values({name: value / factor if name == "matmul" else value * factor})
    found = fitting.fit_correction(account, BELIEVED, spans(truth), 6)
    assert found.wrong == name
    after = fitting.fit_correction(
        account, fitting.corrected_constants(BELIEVED, found), spans(truth), 6
    )
    for before, later in zip(found.calls, after.calls, strict=True):
        assert later.measured == pytest.approx(before.measured)
        assert abs(later.ratio - 1) <= abs(before.ratio - 1) + 0.02
        assert later.ratio == pytest.approx(1, abs=0.12)


def test_a_plan_that_was_right_teaches_nothing():
    found = fitting.fit_correction(account, BELIEVED, spans(BELIEVED), 6)
    assert found.wrong == "" and all(call.ratio == pytest.approx(1) for call in found.calls)
    assert all(factor == pytest.approx(1) for factor in found.factors.values())
    assert "no term stands out" in fitting.summary(fitting.correction_record(found))


def test_the_more_runs_have_spoken_the_less_one_says():
    truth = BELIEVED.with_values({"decode_layer": 0.006})
    moved = [
        fitting.fit_correction(account, BELIEVED, spans(truth), 6, runs).factors["decode_layer"]
        for runs in (0, 3, 30)
    ]
    assert 3.1 > moved[0] > moved[1] > moved[2] > 1


def test_steps_that_compile_do_not_count():
    with pytest.raises(ConfigError, match="2 steps say nothing of seconds"):
        fitting.fit_correction(account, BELIEVED, spans(BELIEVED, steps=2), 2)


def test_a_profile_keeps_what_it_has_learned_and_says_so(tmp_path):
    made_on = MeasuredOn("cpu", 8, "a processor", 2, (("jax", "1"),))
    profile = Profile(DEVICES["h100"], BELIEVED, {8: 1.0}, made_on)
    truth = BELIEVED.with_values({"decode_layer": 0.004})
    better = corrected_profile(profile, fitting.fit_correction(account, BELIEVED, spans(truth), 6))
    write_profile(better, tmp_path / "profile.json")
    again = read_profile(tmp_path / "profile.json", made_on)
    assert again == better and again.runs == 1
    assert again.constants.decode_layer == pytest.approx(0.004, rel=0.1)
    assert again.origins()["decode_layer"].startswith("measured on 8 x cpu (a processor), times 1.")
    assert again.origins()["network"] == "data sheet"
    other = MeasuredOn("cpu", 4, "another processor", 2, (("jax", "2"),))
    with pytest.raises(ConfigError) as refused:
        read_profile(tmp_path / "profile.json", other)
    text = str(refused.value)
    for part in ("devices 8, not 4", "cpu a processor, not another processor", "jax 1, not 2"):
        assert part in text
    assert text.endswith("--calibrate") and "\n" not in text


def test_explain_shows_the_calls_side_by_side(tmp_path, capsys):
    truth = BELIEVED.with_values({"matmul": 0.25})
    said = fitting.correction_record(fitting.fit_correction(account, BELIEVED, spans(truth), 6))
    said |= {"constants": "measured", "runs_before": 0, "taught": True, "untaught": ""}
    (tmp_path / PLAN_SECONDS).write_text(json.dumps(said))
    assert command.main([f"--explain={tmp_path}", "--json"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1]) == said
    assert "update_actor" in out and "most of the difference is `matmul`" in out
    assert command.main([f"--explain={pathlib.Path('nowhere')}"]) == 2
    err = capsys.readouterr().err
    assert f"it has no {PLAN_SECONDS}" in err and err.count("\n") == 1


SAID = {
    "calls": [{"role": "actor", "stage": "learning", "methods": ["update_actor"],
               "predicted": 1.0, "measured": 2.0, "ratio": 0.5}],
    "factors": {"matmul": 2.0}, "explains_seconds": {"matmul": 1.0}, "wrong": "matmul",
    "constants": "measured", "taught": True, "untaught": "",
}  # fmt: skip


@pytest.mark.parametrize(
    "found",
    [
        {}, [1], None, 3, SAID | {"calls": [1]},
        SAID | {"calls": [SAID["calls"][0] | {"ratio": "a"}]},
        SAID | {"wrong": "memory"}, SAID | {"wrong": []}, SAID | {"factors": []},
        SAID | {"calls": [SAID["calls"][0] | {"methods": [1]}]}, SAID | {"taught": None},
        SAID | {"calls": [SAID["calls"][0] | {"predicted": float("inf")}]},
        SAID | {"calls": [SAID["calls"][0] | {"predicted": 10**400}]},
    ],
)  # fmt: skip
def test_a_record_that_no_run_wrote_is_refused_in_one_line(found, tmp_path, capsys):
    (tmp_path / PLAN_SECONDS).write_text(json.dumps(SAID))
    assert command.main([f"--explain={tmp_path}"]) == 0
    capsys.readouterr()
    (tmp_path / PLAN_SECONDS).write_text(json.dumps(found))
    assert command.main([f"--explain={tmp_path}"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert f"--explain={tmp_path}: {PLAN_SECONDS} is not what a run writes" in err


def test_what_is_part_of_another_constant_is_not_said_to_be_measured(tmp_path):
    """A calibration finds a step's and a sequence's own seconds in ``rollout`` and ``decode``."""
    values = {"rollout": 0.05, "decode": 2.0, "decode_step": 0.0, "decode_row": 0.0}
    constants = Constants().with_values(values, measured=True)
    assert constants.measured == {"rollout", "decode"}
    assert constants.origin("decode_row") == "part of decode"
    made_on = MeasuredOn("cpu", 8, "a processor", 2, (("jax", "1"),))
    profile = Profile(DEVICES["h100"], constants, {8: 1.0}, made_on)
    write_profile(profile, tmp_path / "profile.json")
    again = read_profile(tmp_path / "profile.json", made_on)
    assert again.constants == constants and again.constants.decode_row == 0
    said = again.origins()
    assert said["decode_step"] == "part of what is measured as rollout"
    assert said["decode_row"] == "part of what is measured as decode"
    assert said["decode"].startswith("measured on")
    # What somebody asks for instead is their own.
    other = constants.with_user_values({"decode_row": 1e-4})
    assert other.origin("decode_row") == "assumed"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_teaches_the_profile_of_its_devices(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    devices = jax.devices()
    changes = {"placement": "colocate", "steps": 4}
    trainer = hjax.Trainer(tiny_config("GRPO", changes))
    try:
        trainer.run()
        assert correct_profile(trainer, tmp_path) is None  # no profile, nothing to compare with
        device = Device("cpu", 2.0**33, {"float32": 1e9}, 1e10, 1e9, 1e9, len(devices), 0, "test")
        # Of the catalogue's devices the seconds stand side by side, and nothing is stored.
        monkeypatch.setattr("hjax.planning.profile_correction.device_of_kind", lambda *_: device)
        listed = correct_profile(trainer, tmp_path)
        assert listed["calls"] and not listed["taught"] and not profile_path(devices).exists()
        assert "no profile is stored that could learn it" in listed["untaught"]
        write_profile(
            Profile(device, BELIEVED, {}, MeasuredOn.here(devices)), profile_path(devices)
        )
        found = correct_profile(trainer, tmp_path)
        again = correct_profile(trainer, tmp_path)
    finally:
        trainer.close()
    assert {(c["role"], c["stage"]) for c in found["calls"]} == {
        ("actor", "generation"), ("reference", "preparation"), ("actor", "learning"),
    }  # fmt: skip
    taken = {s: sum(c["measured"] for c in found["calls"] if c["stage"] == s) for s in STAGES}
    said = trainer.history[2:]
    assert taken["learning"] <= 1.05 * max(row["time/update"] for row in said)
    profile = read_profile(profile_path(devices), MeasuredOn.here(devices))
    assert profile.runs == 2 and json.loads((tmp_path / PLAN_SECONDS).read_text()) == again
    # The same run explained again by what it has taught.
    before, after = (
        sum(abs(1 - c["predicted"] / c["measured"]) for c in x["calls"]) for x in (found, again)
    )
    assert after < before
