"""`python -m hjax.launch.export` and `trainer.export`: directories that transformers loads."""

import fcntl
import json
import os

import numpy as np
import pytest
from families import logits, model
from helpers import ONE_DEVICE, save_model, trainer_of
from references import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    safetensors_torch,
    torch,
)

import hjax
from hjax.data.tasks import get_task
from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError
from hjax.launch.export import main
from hjax.models import export, huggingface
from hjax.models.export import export_model

TOKENS = np.array([[3, 4, 5, 6, 7, 8, 9]])


def test_a_directory_comes_back_tensor_for_tensor_in_its_dtype(tmp_path, capsys):
    theirs = model("qwen3 tied").to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    (tmp_path / "theirs" / "chat_template.jinja").write_text("{{ messages }}")
    flags = [f"--model={tmp_path}/theirs", f"--output={tmp_path}/ours", "--json"]
    assert main(flags) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["parameters"] == theirs.num_parameters() and said["dtype"] == "bfloat16"
    before = {}
    for file in (tmp_path / "theirs").glob("*.safetensors"):
        before |= safetensors_torch.load_file(file)
    after = safetensors_torch.load_file(tmp_path / "ours" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == torch.bfloat16 and torch.equal(after[name], tensor)
    assert (tmp_path / "ours" / "chat_template.jinja").read_text() == "{{ messages }}"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    assert again.dtype == torch.bfloat16


@pytest.mark.parametrize("said", ["dtype", "torch_dtype", None])
@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16", "mixed"])
@pytest.mark.parametrize("name", ["qwen2 tied", "phi3"])
def test_every_tensor_keeps_the_dtype_of_its_file_whatever_config_json_says(
    name, stored, said, tmp_path
):
    model(name).save_pretrained(tmp_path / "theirs")
    file, config = (tmp_path / "theirs" / n for n in ("model.safetensors", "config.json"))
    content = {k: x for k, x in json.loads(config.read_text()).items() if k != "dtype"}
    config.write_text(json.dumps(content | ({said: "bfloat16"} if said else {})))
    every = ["float32", "bfloat16", "float16"] if stored == "mixed" else [stored]
    before = {
        n: x.to(getattr(torch, every[i % len(every)]))
        for i, (n, x) in enumerate(safetensors_torch.load_file(file).items())
    }
    safetensors_torch.save_file(before, file)
    assert main([f"--model={tmp_path}/theirs", f"--output={tmp_path}/ours"]) == 0
    after = safetensors_torch.load_file(tmp_path / "ours" / "model.safetensors")
    assert before.keys() == after.keys()
    for n, tensor in before.items():
        assert after[n].dtype == tensor.dtype and torch.equal(after[n], tensor)
    # As transformers reads it by dtype="auto"; where nothing is said, what holds every value.
    expected = "bfloat16" if said else "float32" if stored == "mixed" else stored
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    assert again.dtype == getattr(torch, expected)


@pytest.mark.extended
def test_files_of_a_size(tmp_path, monkeypatch):
    theirs = model("mixtral")
    theirs.save_pretrained(tmp_path / "theirs")
    config, params = huggingface.load_weights(tmp_path / "theirs")
    huggingface.save_weights(tmp_path / "ours", config, params, shard_bytes=20_000)
    files = sorted(p.name for p in (tmp_path / "ours").glob("*.safetensors"))
    index = json.loads((tmp_path / "ours" / huggingface.INDEX).read_text())
    assert len(files) > 2 and set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == 4 * theirs.num_parameters()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    np.testing.assert_array_equal(logits(again.eval(), TOKENS), logits(theirs, TOKENS))
    np.testing.assert_array_equal(
        hjax.load_model(tmp_path / "ours").logits(TOKENS),
        hjax.load_model(tmp_path / "theirs").logits(TOKENS),
    )


def test_a_run_is_exported_by_command_and_by_its_trainer(tmp_path):
    tokenizer = get_task("sorting").tokenizer()
    save_model(tmp_path / "start", tokenizer=tokenizer)
    workdir = tmp_path / "run"
    changes = {"actor.path": str(tmp_path / "start"), "steps": 1, "checkpoint.every": 1}
    changes["algorithm.entropy_coef"] = 0.01  # all rewards may be equal
    with trainer_of("GRPO", changes | ONE_DEVICE, workdir=workdir) as trainer:
        trainer.run()
        trainer.export(tmp_path / "trainer")
        with pytest.raises(ConfigError, match="trainer is not empty; give a directory that is new"):
            trainer.export(tmp_path / "trainer")
    assert main([f"--model={workdir}", f"--output={tmp_path / 'command'}"]) == 0
    trained, start = hjax.load_model(workdir), hjax.load_model(tmp_path / "start")
    assert not np.allclose(trained.logits(TOKENS), start.logits(TOKENS))
    for name in ("trainer", "command"):
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        np.testing.assert_allclose(logits(theirs, TOKENS), trained.logits(TOKENS), atol=2e-5)
        ids = AutoTokenizer.from_pretrained(tmp_path / name).encode("312>")
        assert ids == tokenizer.encode("312>")


def test_generation_config_comes_along_or_is_made(tmp_path):
    """What that of the directory says stays, through a run too; from scratch it has the ids."""
    tokenizer = get_task("sorting").tokenizer()
    save_model(tmp_path / "start", tokenizer=tokenizer)
    said = {"temperature": 0.6, "top_p": 0.95, "eos_token_id": [tokenizer.eos_id, 3]}
    (tmp_path / "start" / "generation_config.json").write_text(json.dumps(said))
    for name, changes in {"run": {"actor.path": str(tmp_path / "start")}, "scratch": {}}.items():
        changes |= {"steps": 0, "warm_start.steps": 0}
        with trainer_of("GRPO", changes | ONE_DEVICE, workdir=tmp_path / name) as trainer:
            trainer.prepare()
            trainer.export(tmp_path / f"{name} exported")
    write_model = [f"--model={tmp_path}/start", f"--output={tmp_path}/start exported"]
    assert main(write_model) == 0
    for name in ("run/model", "run exported", "start exported"):
        content = json.loads((tmp_path / name / "generation_config.json").read_text())
        assert {key: content[key] for key in said} == said
    file = tmp_path / "scratch exported" / "generation_config.json"
    ids = json.loads(file.read_text())
    assert ids["eos_token_id"] == tokenizer.eos_id
    assert GenerationConfig.from_pretrained(file.parent).eos_token_id == tokenizer.eos_id


NAMED = {"default": "{{ messages }}", "tool_use": "{{ tools }}", "a.b": "{{ documents }}"}


@pytest.mark.parametrize(
    ("names", "files"),
    [
        (list(NAMED), True),
        (["default"], False),
        (["tool_use", "a.b"], False),
        pytest.param(list(NAMED), False, marks=pytest.mark.slow),
        pytest.param(["default"], True, marks=pytest.mark.slow),
        pytest.param(["tool_use", "a.b"], True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.extended
def test_every_chat_template_comes_along(names, files, tmp_path):
    """As files, or as a list in tokenizer_config.json, in both of which transformers keeps them."""
    save_model(tmp_path / "start", tokenizer=get_task("sorting").tokenizer())
    theirs = AutoTokenizer.from_pretrained(tmp_path / "start")
    templates = {name: NAMED[name] for name in names}
    theirs.chat_template = templates if len(names) > 1 else NAMED["default"]
    theirs.save_pretrained(tmp_path / "start", save_jinja_files=files)
    assert (tmp_path / "start" / "additional_chat_templates").is_dir() == (files and len(names) > 1)
    expected = AutoTokenizer.from_pretrained(tmp_path / "start").chat_template
    assert expected == theirs.chat_template
    workdir = tmp_path / "run"
    with trainer_of("GRPO", {"actor.path": str(tmp_path / "start")}, workdir) as trainer:
        trainer.export(tmp_path / "trainer")
        trainer.run(1)
    for source in ("start", "run"):
        assert main([f"--model={tmp_path / source}", f"--output={tmp_path / 'of'}-{source}"]) == 0
    for exported in ("trainer", "of-start", "of-run"):
        assert AutoTokenizer.from_pretrained(tmp_path / exported).chat_template == expected
        ours = Tokenizer.load(tmp_path / exported)
        assert ours.chat_template == templates.get("default")


@pytest.mark.parametrize(
    "flags, line",
    [
        (["--output=there"], "--model is missing"),
        (["--model=nowhere"], "--output is missing"),
        (["--model=nowhere", "--output=there"], "no model directory 'nowhere'"),
        (["--model=nowhere", "--output=there", "--dtype=int8"], "Unknown command line flag"),
    ],
)
@pytest.mark.extended
def test_wrong_input_is_one_line_and_nothing_is_written(flags, line, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(flags) == 2
    said = capfd.readouterr().err
    assert line in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_what_a_killed_export_left_is_removed_by_the_next(tmp_path):
    model = tmp_path / "model"
    save_model(model)
    killed, runs, new, others = (
        tmp_path / name
        for name in (".out.hjax-export-aaaaaaaa", ".out.hjax-export-bbbbbbbb",
                     ".out.hjax-export-cccccccc", ".out.settings")
    )  # fmt: skip
    for folder in (killed, runs, new, others):
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "config.json").write_text("{}")
        (folder / "lock").touch()
        if folder != new:
            os.utime(folder, (1, 1))
    handle = os.open(runs / "lock", os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        export_model(model, tmp_path / "out")
    finally:
        os.close(handle)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["model", "out", runs.name, new.name, others.name]
    )


def test_an_export_keeps_its_folder_while_another_begins(tmp_path):
    with export._atomic_directory(tmp_path / "out") as made:
        made.mkdir()
        os.utime(made.parent, (1, 1))
        with pytest.raises(KeyError), export._atomic_directory(tmp_path / "out"):
            raise KeyError
        assert made.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
