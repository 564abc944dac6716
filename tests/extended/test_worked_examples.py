"""The worked examples of docs/ on models and data cut to size, and the pages' formats and names."""

import gzip
import json
import pathlib
import re
import shutil
import string

import jax
import numpy as np
import pytest
from cookbook_tasks import messages_of
from helpers import read_rows

import hjax
from hjax.algorithms import ALGORITHMS
from hjax.config import flatten
from hjax.data.dataset import Dataset
from hjax.data.invalid_rows import InvalidRows
from hjax.data.read_options import ReadOptions
from hjax.data.tokenizer import Tokenizer
from hjax.devices import full_hardware_name
from hjax.launch.__main__ import main
from hjax.launch.evaluate import main as evaluate
from hjax.launch.generate import main as generate
from hjax.models.huggingface import read_config, save_weights
from hjax.models.parameters import decoder_network, to_host
from hjax.run.examples import load_examples
from hjax.sharding.layout import make_layouts

DOCS = pathlib.Path(__file__).parents[2] / "docs"
# Qwen2's shape in small, with a vocabulary of 6,400 and a ChatML template.
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 6400,
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    "rope_theta": 1e6, "rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

FILES = {"actor.path": "tiny", "data.path": "train.jsonl", "data.eval_path": "test.jsonl"}


@pytest.fixture
def small(tmp_path, monkeypatch, test_data):
    """In a folder with a tiny Qwen2 and the first rows of GSM8K."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(test_data / "tokenizers" / "minimind", "shape")
    pathlib.Path("shape/config.json").write_text(json.dumps(QWEN2))
    config = read_config("shape")
    layout = make_layouts(jax.devices()[:1]).train
    params = decoder_network(config).create(seed=0, layout=layout)
    save_weights("tiny", config, to_host(params))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"shape/{name}", "tiny")
    for name, rows in (("train", 20), ("test", 6)):
        lines = (test_data / "gsm8k" / f"{name}.jsonl").read_text().splitlines()[:rows]
        pathlib.Path(f"{name}.jsonl").write_text("\n".join(lines))
    return tmp_path


def config_of_page(name, file):
    """Write the config on a tutorial's page to a file of its name."""
    page = (DOCS / "tutorials" / name).read_text()
    [block] = re.findall(rf"^```python\n(# {file}\n.*?)^```", page, re.M | re.S)
    pathlib.Path(file).write_text(block)


def launch(file, keys, *flags):
    """Run a config's file in the folder `run`."""
    keys |= {"cluster.devices_per_process": 1}
    flags += (*(f"--config.{key}={value}" for key, value in keys.items()),)
    assert main([f"--config={file}", *flags, "--workdir=run"]) == 0


def test_gsm8k_as_it_stands_in_small(small, capsys):
    config_of_page("gsm8k.md", "gsm8k.py")
    launch("gsm8k.py", {
        **FILES,
        "rollout.prompts": 4, "rollout.samples": 2, "rollout.max_response_length": 8,
        "algorithm.minibatch": 4, "actor.micro_batch": 2, "steps": 2, "eval.prompts": 4,
    })  # fmt: skip
    rows = read_rows(small / "run")
    assert [row["step"] for row in rows] == [1, 2] and "eval/reward" in rows[0]
    [shown, *_] = [x for x in read_rows(small / "run", "samples.jsonl") if x["kind"] == "train"]
    # The question as the template has it, after the page's system message.
    assert "Put the final answer in \\boxed{}.<|im_end|>" in shown["prompt"]
    assert shown["prompt"].count("<|im_start|>user\n") == 1
    capsys.readouterr()
    assert generate(["--model=run", "--prompt=What is 3 times 14?", "--max_new_tokens=4"]) == 0
    more = ["--data=test.jsonl", "--reward=math", "--max_new_tokens=4", "--json"]
    assert evaluate(["--model=run", *more]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["questions"] == 6


def test_an_agent_with_python_in_small(small, test_data, capsys):
    config_of_page("agent.md", "agent.py")
    shutil.copy(test_data / "chat_templates" / "qwen2_5.jinja", "tiny/chat_template.jinja")
    keys = {
        **FILES,
        "rollout.prompts": 2, "rollout.samples": 2, "rollout.max_response_length": 24,
        "environment.turn_tokens": 8, "algorithm.minibatch": 4, "actor.micro_batch": 2,
        "steps": 2, "eval.prompts": 2,
    }  # fmt: skip
    launch("agent.py", keys, "--dry_run")
    # The first prompt has the tool as Qwen 2.5's template writes it.
    shown = capsys.readouterr().out
    assert "<tools>" in shown and '"name": "python"' in shown and "Use the tool" in shown
    launch("agent.py", keys)
    rows = read_rows(small / "run")
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["episode/turns"] >= 1 and "episode/tool_calls" in rows[0]


def test_from_demonstrations_to_ppo_in_small(small, test_data):
    """Three stages on dialogues in ultrafeedback_binarized's columns."""
    config_of_page("sft_reward_ppo.md", "chain.py")
    rows = []
    with gzip.open(test_data / "hh-rlhf" / "harmless-base-test.jsonl.gz", "rt") as file:
        for pair in map(json.loads, file):
            chosen, rejected = messages_of(pair["chosen"]), messages_of(pair["rejected"])
            if len(chosen) == len(rejected) == 2 and chosen[0] == rejected[0]:
                texts = {"prompt": chosen[0]["content"], "messages": chosen}
                rows.append(texts | {"chosen": chosen, "rejected": rejected, "score_chosen": 8.5})
    for name, part in (("train", rows[:12]), ("test", rows[12:18])):
        pathlib.Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    keys = {"actor.micro_batch": 2, "warm_start.batch": 4, "rollout.max_response_length": 160}
    files = {key: value for key, value in FILES.items() if key != "actor.path"}
    ppo = {
        "rollout.prompts": 4, "algorithm.minibatch": 2, "critic.micro_batch": 2, "eval.prompts": 2,
        "rollout.max_response_length": 8,
    }  # fmt: skip
    ppo = {f"ppo.{key}": value for key, value in ppo.items()}
    launch("chain.py", {**files, **keys, **ppo, "sft.actor.path": "tiny", "steps": 1})
    found = {name: read_rows(small / "run" / name)[0] for name in ("sft", "reward_model", "ppo")}
    for name, metric in (("sft", "eval/loss"), ("reward_model", "eval/accuracy")):
        assert metric in found[name]
    # The reward model is the second stage's, and its head has begun to move.
    assert found["ppo"]["reward/mean"] != 0
    assert (small / "run" / "report.html").exists()


@pytest.fixture
def qwen3(test_data):
    """A tokenizer of characters with Qwen3's template."""
    tokenizer = Tokenizer.characters(string.printable)
    tokenizer.chat_template = (test_data / "chat_templates/qwen3.jinja").read_text()
    return tokenizer


# By heading: config, what is learned of, what the answers are, and formats of rows other than ''.
KINDS = {
    "Prompts, for RL": ("base.py", "prompts", [], {}),
    "Demonstrations, for supervised training": (
        "sft.py", "demonstrations", ["84"], {3: "alpaca", 4: "sharegpt"}),
    "Pairs, for DPO and reward models": ("dpo.py", "pairs", ["84", "74"], {}),
    "Labels, for KTO": ("kto.py", "verdicts", ["84"], {}),
    "Tools": ("base.py", "prompts", [], {}),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_the_formats_page_are_read(kind, tmp_path, qwen3):
    page = (DOCS / "guides" / "data_formats.md").read_text()
    part = page.partition(f"\n## {kind}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```json\n(.*?)```", part, re.S)
    rows = [json.loads(line) for line in "".join(blocks).splitlines()]
    name, source, answers, formats = KINDS[kind]
    assert len(rows) > max(formats, default=0)
    for number, row in enumerate(rows):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(json.dumps(row))
        data = Dataset.from_file(
            path,
            qwen3,
            options=ReadOptions(format=formats.get(number, "columns")),
            learns_demonstrations=source == "demonstrations",
        )
        assert len(data) == 1 and data.prompt_tokens[0]
        config = hjax.get_config(name, {"data.path": str(path), "rollout.max_response_length": 256})
        learned = load_examples(
            config, None, qwen3, data=data, source=source, invalid=InvalidRows()
        )
        if answers:
            [(prompt, *found)] = learned.examples
            assert "12 * 7" in qwen3.decode(prompt)
            expected = answers if row.get("label", True) else ["74"]
            assert all(a in qwen3.decode(x) for a, x in zip(expected, found, strict=True))


def test_the_figure_of_the_logging_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    values = {2: [0.1, 0.4, None], 10: [0.3, 0.6, 0.9]}
    for seed, column in values.items():
        folder = pathlib.Path(f"runs/grpo-{seed}")
        folder.mkdir(parents=True)
        rows = [{"step": i, "eval/reward": x} for i, x in enumerate(column, 1)]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    page = (DOCS / "logging.md").read_text()
    [block] = re.findall(r"^```python\n(# figure\.py\n.*?)^```", page, re.M | re.S)
    names = {}
    exec(block, names)
    assert names["steps"] == [1, 2]  # the last step is not finite in one of the runs
    np.testing.assert_allclose(names["mean"], [0.2, 0.5])
    np.testing.assert_allclose(names["spread"], [0.02**0.5] * 2)
    assert pathlib.Path("figure.pdf").stat().st_size > 1000


def test_names_on_the_pages_of_choices():
    page = (DOCS / "guides" / "which_algorithm.md").read_text()
    configs = set(re.findall(r"`(\w+\.py)`", page))
    assert len(configs) > 15
    for name in configs:
        assert hjax.get_config(name).algorithm.name in ALGORITHMS
    page = (DOCS / "guides" / "will_it_fit.md").read_text()
    rows = re.findall(r"^\| (`.*?) \| (.*?) \| ([\d, ]+) \|$", page, re.M)
    assert len(rows) == 7
    for usual, full, _ in rows:
        names, means = (re.findall(r"`([\w:-]+)`", cell) for cell in (usual, full))
        assert means == [] or [full_hardware_name(name) for name in names] == means
    keys = flatten(hjax.get_config("grpo.py"))
    for name in ("lora", "memory", "reward_does_not_rise", "which_algorithm"):
        text = (DOCS / "guides" / f"{name}.md").read_text()
        named = re.findall(r"`((?:actor|rollout|data|model|reference|warm_start)\.[\w.]+)", text)
        assert named and [key for key in named if key.rstrip(".") not in keys] == []
