"""Tasks of a newcomer's, done with what the docs say and no private name (the fourth and fifth,
algorithms of one's own, are docs/extending.md's, tests/test_algorithms_extending.py)."""

import json

import jinja2
import numpy as np
import pytest
from helpers import TINY, command, read_rows

import hjax
from hjax.data.tokenizer import Tokenizer
from hjax.launch.__main__ import main

REWARD = """\
def reward(prompts, responses, wanted, **columns):
    pairs = zip(responses, wanted)
    return [response.count(letter) / (1 + len(response)) for response, letter in pairs]
"""
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}/{% endfor %}{{ tone }}>"


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(autouse=True)
def keep_signal_handlers():
    import signal

    kept = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_chats_with_a_template_from_texts(tmp_path):
    """docs/data.md: `data.chat`, `data.system`, `data.template_arguments`, `data.columns`."""
    Tokenizer.characters("abcdefghijklmnopqrstuvwxyz:/> ").save(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    questions = [{"question": f"say {letter}", "wanted": letter} for letter in "abcdefgh"] * 4
    (tmp_path / "mine.py").write_text(REWARD)
    changes = TINY | {
        "data.path": str(write(tmp_path / "questions.jsonl", questions)),
        "data.columns": "question=prompt",
        "data.chat": True,
        "data.system": "be kind",
        "data.template_arguments": '{"tone": "calm"}',
        "tokenizer.path": str(tmp_path / "tokenizer"),
        "reward.function": f"{tmp_path / 'mine.py'}:reward",
        "rollout.max_response_length": 6,
    }
    changes = {k: v for k, v in changes.items() if not k.startswith(("data.task", "warm_start"))}
    trainer = hjax.Trainer(hjax.get_config("base.py", changes), workdir=tmp_path / "run")
    try:
        metrics = trainer.step()
        trainer.save()
    finally:
        trainer.close()
    samples = read_rows(tmp_path / "run", "samples.jsonl")
    asked = {"role": "system", "content": "be kind"}, {"role": "user", "content": "say a"}
    rendered = jinja2.Template(TEMPLATE).render(messages=asked, tone="calm")
    begins, ends = rendered.split("say a")
    assert len({sample["prompt"] for sample in samples}) > 1
    for sample in samples:
        assert sample["prompt"].startswith(begins) and sample["prompt"].endswith(ends)
        letter = sample["prompt"][len(rendered) - len(ends) - 1]
        expected = sample["response"].count(letter) / (1 + len(sample["response"]))
        assert sample["reward"] == pytest.approx(expected)
    assert metrics["reward/unscored"] == 0

    # Loaded, asked and scored.
    model = hjax.load_model(tmp_path / "run")
    chat = [{"role": "user", "content": "say a"}]
    one = model.generate([chat], max_new_tokens=5, seed=1)[0]
    asked = model.tokenizer.encode(model.tokenizer.chat(chat), add_special=False)
    scored = np.asarray(model.log_probs([asked + one.tokens, asked]))[0]
    np.testing.assert_allclose(scored[-len(one.tokens) :], one.logprobs, atol=1e-4)
    assert np.isfinite(model.log_probs(["say a", "b"])[0]).all()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_reward_and_prompts_of_ones_own_on_real_weights(test_data, tmp_path):
    """README: a reward function in a file, prompts in a jsonl, weights in a directory."""
    weights = test_data / "weights" / "stories260K-hf"
    names = ["Tim", "Lily", "Ben", "Mia", "Tom", "Sue", "Max", "Anna"]
    rows = [{"opening": f"One day, {name} saw a {thing}.", "wanted": "e"}
            for name in names for thing in ("dog", "cat", "ball", "tree")]  # fmt: skip
    (tmp_path / "mine.py").write_text(REWARD)
    keys = {
        "actor.path": weights,
        "data.path": write(tmp_path / "openings.jsonl", rows),
        "data.columns": "opening=prompt",
        "reward.function": f"{tmp_path / 'mine.py'}:reward",
        "steps": 40,
        "rollout.max_response_length": 24,
        "rollout.prompts": 16,
        "actor.learning_rate": 3e-4,
        "display.enabled": False,
    }
    run = tmp_path / "run"
    assert main(["--config=base.py", f"--workdir={run}", *command(keys)]) == 0
    rewards = [row["reward/mean"] for row in read_rows(run)]
    assert np.mean(rewards[-5:]) > 1.3 * np.mean(rewards[:5]), rewards
    # What it learned: more of the letter, by the reward's own formula, than before.
    prompts = [row["opening"] for row in rows]
    shares = []
    for path in (weights, run):
        answers = hjax.load_model(path).generate(prompts, 24, seed=3, stop=["."])
        assert all("." not in answer.text[:-1] for answer in answers)
        shares.append(np.mean([a.text.count("e") / (1 + len(a.text)) for a in answers]))
    assert shares[1] > shares[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_eight_devices_that_learn_by_four_and_generate_by_two(tmp_path):
    """docs/config.md: `layout.actor.train.tensor` and `layout.actor.generate.tensor`."""
    layout = {"layout.actor.train.tensor": 4, "layout.actor.generate.tensor": 2}
    changes = TINY | {"algorithm.name": "GRPO", "steps": 2, "eval.every": 0}
    rows = []
    for more in ({}, layout):
        trainer = hjax.Trainer(hjax.get_config("base.py", changes | more))
        try:
            rows.append(trainer.run())
        finally:
            trainer.close()
    for one, other in zip(*rows, strict=True):
        for key in ("reward/mean", "actor/loss", "actor/grad_norm", "response/length_mean"):
            assert other[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5), key
        assert other["time/transition"] > 0
