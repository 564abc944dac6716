"""After the first two steps nothing is compiled any more; a new length bucket is, once, by name."""

import contextlib
import dataclasses
import json

import pytest
from helpers import trainer_of

from hjax.data.tasks import get_task

STEPS = 6


@pytest.mark.parametrize(
    "algorithm",
    ["GRPO", *(pytest.param(n, marks=pytest.mark.slow) for n in ("PPO", "ReMax", "SafeRLHF"))],
)
def test_nothing_is_compiled_after_the_second_step(algorithm, tmp_path):
    # With mini-batches and a pretraining loss: tests/extended/test_resume.py.
    changes = {"steps": STEPS, "eval.every": 2, "checkpoint.every": 2}
    with trainer_of(algorithm, changes, workdir=tmp_path / "run") as trainer:
        counts = [row["compile/count"] for row in trainer.run()]
    assert counts[1] > 0
    assert counts[1:] == [counts[1]] * (STEPS - 1)


class Messages:
    """A display that keeps what it is told."""

    def __init__(self):
        self.said = []

    def message(self, text):
        self.said.append(text)

    def phase(self, name):
        return contextlib.nullcontext()

    def step(self, metrics):
        pass

    def samples(self, rows):
        pass


def test_a_new_length_bucket_is_compiled_once_and_named(tmp_path):
    # Responses are cut to the longest one's multiple of 64: here all run to the limit of 66, but
    # in steps 3 and 4 they end with their first token.
    (tmp_path / "reward.py").write_text("def one(p, r, **c): return [1.0] * len(r)\n")
    get_task("sorting").tokenizer().save(tmp_path / "tokenizer")
    rows = [{"prompt": f"{i}>"} for i in range(20)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        "steps": 6,
        "data.path": f"{tmp_path}/data.jsonl",
        "tokenizer.path": f"{tmp_path}/tokenizer",
        "reward.function": f"{tmp_path}/reward.py:one",
        "rollout.max_prompt_length": 5,
        "rollout.max_response_length": 66,
        "algorithm.kl_coef": 0.0,
        "cluster.devices_per_process": 1,
    }
    with trainer_of("GRPO", changes) as trainer:
        trainer.display = Messages()
        worker = trainer.roles.groups["actor"].worker
        counts, lengths = [], []
        for step in range(1, 7):
            every_token, none = tuple(range(16)), ()
            stop = every_token if step in (3, 4) else none
            sampling = dataclasses.replace(worker.context.sampling, stop=stop)
            worker.context = dataclasses.replace(worker.context, sampling=sampling)
            counts.append(trainer.step()["compile/count"])
            lengths.append(trainer.batch["responses"].shape[1])
        # Without a KL there is no reference, and nothing to measure against.
        assert "reference" not in trainer.roles.groups
        assert not any("kl/reference" in row for row in trainer.history)
        said = trainer.display.said
    assert lengths == [66, 66, 64, 64, 66, 66]
    first, second, third, *rest = counts
    assert first == second < third
    assert rest == [third] * 3
    compiled = [text for text in said if " compiled " in text]
    assert [text.split(" compiled ")[0] for text in compiled] == ["step 3"]
    assert "actor_update" in compiled[0]
