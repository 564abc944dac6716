"""What a run tells of settings that are probably not meant."""

import json

import pytest
from helpers import tiny_config

import hjax
from hjax.run.warnings import TruncationWarning


def told(warning, *shares):
    rows = [{"step": n, "response/truncated": share} for n, share in enumerate(shares, 1)]
    return [message for row in rows if (message := warning.message(row))]


def test_more_than_half_cut_is_told_once():
    assert told(TruncationWarning(6), 0.0, 0.5) == []
    assert told(TruncationWarning(6), 0.2, 0.51, 1.0) == [
        "step 2: 51% of the responses were cut at rollout.max_response_length=6 tokens; raise it "
        "if they are to end by themselves"
    ]


def test_a_limit_that_leaves_room_for_the_answer_is_meant():
    assert told(TruncationWarning(6, longest=6), 1.0) == []
    assert len(told(TruncationWarning(5, longest=6), 1.0)) == 1
    assert TruncationWarning(6).message({"step": 1, "actor/loss": 0.1}) is None  # SFT


class Display:
    """Keeps the messages."""

    def __init__(self):
        self.messages = []

    def message(self, text):
        self.messages.append(text)

    def __getattr__(self, name):
        import contextlib

        return lambda *args, **kwargs: contextlib.nullcontext()


@pytest.mark.parametrize("own", [True, False])
def test_data_of_ones_own_under_a_short_limit(own, tmp_path):
    rows = [{"prompt_tokens": [1 + i % 7, 2, 3]} for i in range(40)]
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(
        "def one(prompts, responses, **columns):\n    return [1.0 for _ in responses]\n"
    )
    changes = {"steps": 2}
    if own:  # nothing ends a response of token ids: all are cut
        changes |= {
            "data.path": f"{tmp_path}/ids.jsonl",
            "model.vocab_size": 16,
            "reward.function": f"{tmp_path}/rewards.py:one",
        }
    display = Display()
    trainer = hjax.Trainer(tiny_config("GRPO", changes), display=display)
    try:
        trainer.run()
    finally:
        trainer.close()
    cut = [text for text in display.messages if "max_response_length" in text]
    # The task's three digits and the end-of-sequence token fit into four.
    assert [text.partition(" of ")[0] for text in cut] == (["step 1: 100%"] if own else [])
