"""`python -m hjax.launch.transition`: its figures, its pictures, its refusals."""

import json
import os
import subprocess
import sys

import pytest

from hjax.launch.transition import main
from tests.helpers import save_model


def run(capsys, *arguments):
    status = main(arguments)
    output = capsys.readouterr()
    return status, output.out, output.err


def test_the_papers_example(capsys):
    arguments = ("--train=1,4,2", "--generate=1,2", "--json")
    status, out, _ = run(capsys, *arguments)
    found = json.loads(out.splitlines()[-1])
    assert status == 0 and found["devices"] == 8 and found["executed"]
    assert found["groups"] == {
        "tensor": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "pipe": [[i] for i in range(8)],
        "micro_data": [[0, 1], [2, 3], [4, 5], [6, 7]],
    }
    assert found["analytic"] == {"communication": 1 / 4, "peak": 1 / 2, "redundancy": 0}
    measured = found["measured"]
    assert measured["communication"] == 1 / 4 and measured["redundancy"] == 0
    bucket = found["bucket_bytes"] / found["model_bytes"]
    assert 1 / 2 <= measured["peak"] <= 1 / 2 + bucket
    # Norms are whole under tensor parallelism; the rest is split over t.
    assert set(found["unsharded"]) == {"layers.attention_norm", "layers.mlp_norm", "final_norm"}
    assert "█▓··" in out and "[0 2] [1 3]" in out


@pytest.mark.extended
@pytest.mark.parametrize(
    "method, communication, redundancy",
    [("vanilla", 3 / 4, 1 / 4), ("gather_all", 7 / 8, 1 / 8)],
)
def test_the_other_methods(capsys, method, communication, redundancy):
    arguments = ("--train=1,4,2", "--generate=1,2", f"--method={method}", "--json")
    status, out, _ = run(capsys, *arguments)
    found = json.loads(out.splitlines()[-1])
    assert status == 0
    for kind in ("analytic", "measured"):
        assert found[kind]["communication"] == communication
        assert found[kind]["redundancy"] == redundancy
    assert found["groups"]["tensor"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    # A program that knows no method, by hand: of vanilla rank 1 has part 1 and needs 2 and 3, and
    # keeps 1 beside them; of ZeRO-3 each has an eighth, of which rank 0 needs half the model.
    plain = found["resharded"]
    assert 1 / 2 <= plain["communication"] <= communication
    if method == "vanilla":
        assert plain == {"communication": 1 / 2, "redundancy": 1 / 4}


@pytest.mark.extended
def test_a_narrower_copy_moves_half_the_bytes_and_leaves_the_masters(capsys):
    _, out, _ = run(capsys, "--train=1,4,2", "--generate=1,2", "--dtype=bfloat16", "--json")
    found = json.loads(out.splitlines()[-1])
    assert found["executed"] and found["analytic"]["communication"] == 1 / 8
    assert found["measured"]["communication"] == 1 / 8
    assert found["measured"]["redundancy"] == 0 and found["back_bytes"] == 0
    assert found["masters_bytes"] == found["model_bytes"] / 4
    assert "masters" in out


@pytest.mark.parametrize("train, generate", [("64,64,64", "1,8"), ("1,8,64", "1,2")])
def test_many_devices_are_counted_in_seconds(capsys, train, generate):
    status, out, _ = run(capsys, f"--train={train}", f"--generate={generate}", "--json")
    found = json.loads(out.splitlines()[-1])
    assert status == 0 and "nothing is compiled" in out and not found["compiled"]
    for key, formula in found["analytic"].items():
        assert found["measured"][key] == pytest.approx(formula)


def test_where_groups_stand_on_hardware_that_is_not_here(capsys):
    arguments = ("--train=1,8,32", "--generate=1,8", "--topology=v5e:16x16", "--json")
    _, out, _ = run(capsys, *arguments, "--method=hybridflow")
    rings = json.loads(out.splitlines()[-1])["rings"]
    assert [rings[axis]["hops"] for axis in ("data", "tensor")] == [1.4375, 1.75]
    assert "hops in its rings" in out


@pytest.mark.extended
def test_pipeline_stages_leave_the_embedding_out(capsys):
    _, out, _ = run(capsys, "--train=4,2,1", "--generate=2,1", "--json")
    found = json.loads(out.splitlines()[-1])
    assert {"embedding", "unembedding"} <= set(found["unsharded"])
    assert found["measured"]["communication"] == (8 - 2) / (2 * 8)
    assert found["unsharded_received_bytes"] > 0


def test_a_published_model_is_compiled_and_not_run(capsys):
    """Llama 7B in float32 on 8 simulated devices would be 108 GB."""
    _, out, _ = run(capsys, "--train=1,8,1", "--generate=1,2", "--model=llama-7b", "--json")
    found = json.loads(out.splitlines()[-1])
    assert not found["executed"] and "not run" in out
    assert found["model_bytes"] == pytest.approx(4 * 6.74e9, rel=1e-3)
    assert found["measured"]["communication"] == pytest.approx(3 / 8)
    assert (
        1 / 2 <= found["measured"]["peak"] <= 1 / 2 + found["bucket_bytes"] / (found["model_bytes"])
    )


@pytest.mark.extended
def test_a_directory_gives_the_shape(capsys, tmp_path):
    save_model(tmp_path, heads=4, kv_heads=2)
    arguments = ("--train=1,4,1", "--generate=1,2", f"--model={tmp_path}", "--json")
    status, out, _ = run(capsys, *arguments)
    found = json.loads(out.splitlines()[-1])
    assert status == 0 and found["model"] == str(tmp_path)
    # Two KV heads are whole in training, split while generating: counted apart.
    assert "layers.kv" in found["unsharded"]


@pytest.mark.extended
def test_devices_are_simulated_whatever_the_environment_asks_for():
    arguments = ["--train=2,8,1", "--generate=1,8", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "hjax.launch.transition", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["devices"] == 16 and found["measured"]["communication"] == 1 / 16


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--generate=1,1"], "--train is missing: give --train=P,T,D, such as 1,4,2"),
        (["--train=2,2", "--generate=1,1"], "--train=2,2: give --train=P,T,D"),
        (["--train=1,2,1", "--generate=1,x"], "--generate=1,x: give --generate=PG,TG"),
        (["--train=4,1,1", "--generate=3,1"],
         "3 pipeline stages in generation do not divide training's 4; use one of 1, 2, 4"),
        (["--train=1,4,1", "--generate=1,8"],
         "8 tensor parts in generation do not divide training's 4; use one of 1, 2, 4"),
        (["--train=0,1,1", "--generate=1,1"], "pipe of size 0: 1 or more"),
        (["--train=1,2,1", "--generate=1,1", "--method=other"],
         "--method=other: one of hybridflow, vanilla, gather_all"),
        (["--train=1,2,1", "--generate=1,1", "--size=3"], "Unknown command line flag 'size'"),
        (["--train=1,2,1", "--generate=1,1", "more"], "unexpected argument 'more'"),
        (["--train=1,2,1", "--generate=1,1", "--model=nowhere"], "'nowhere'"),
        (["--train=1,1000000,1", "--generate=1,1"],
         "--train=1,1000000,1: 1000000 devices; at most 262144"),
        (["--train=1,2,1", "--generate=1,1", "--dtype=int3"],
         "--dtype=int3: one of float32, bfloat16, float16"),
        (["--train=1,2,1", "--generate=1,1", "--dtype=bfloat16", "--method=vanilla"],
         "--dtype=bfloat16 is of --method=hybridflow"),
        (["--train=1,2,1", "--generate=1,1", "--topology=v5e:2x2"],
         "--topology=v5e:2x2 has 4 devices, --train needs 2"),
        (["--train=3,1,1", "--generate=1,1", "--model=llama-7b"],
         "layers of size 32 does not divide over pipe = 3"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line_and_status_2(capsys, arguments, message):
    status, out, err = run(capsys, *arguments)
    assert status == 2 and out == ""
    assert message in err and err.count("\n") == 1


def test_help(capsys):
    status, out, _ = run(capsys, "--help")
    assert status == 0 and "--train=P,T,D" in out
