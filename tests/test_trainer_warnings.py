"""What a run tells of settings that are probably not meant."""

import json

import pytest
from helpers import ONE_DEVICE, tiny_config, trainer_of

import hjax
from hjax.errors import RunError
from hjax.run.health_checks import SamplerCheck, TruncationWarning


def told(warning, *shares):
    rows = [{"step": n, "response/truncated": share} for n, share in enumerate(shares, 1)]
    return [message for row in rows if (message := warning.message(row))]


def test_more_than_half_cut_is_told_once():
    assert told(TruncationWarning(6), 0.0, 0.5) == []
    assert told(TruncationWarning(6), 0.2, 0.51, 1.0) == [
        "step 2: warning (truncated): 51% of the responses were cut at "
        "rollout.max_response_length=6 tokens; raise it if they are to end by themselves"
    ]


def test_a_limit_that_leaves_room_for_the_answer_is_meant():
    assert told(TruncationWarning(6, longest=6), 1.0) == []
    # Episodes that had all their turns are whole.
    whole = {"step": 1, "response/truncated": 1.0, "episode/stop_context": 0.2}
    assert TruncationWarning(6).message(whole) is None
    assert TruncationWarning(6).message(whole | {"episode/stop_context": 0.6}) is not None
    assert len(told(TruncationWarning(5, longest=6), 1.0)) == 1
    assert TruncationWarning(6).message({"step": 1, "actor/loss": 0.1}) is None  # SFT


def errors_of(changes, *errors):
    watch = SamplerCheck(tiny_config("GRPO", changes))
    rows = [{"rollout/token_prob_error": error} for error in errors]
    return [message for row in rows if (message := watch.message(row))]


def test_a_sampler_that_is_not_the_learner_is_told_once_and_stops_the_run():
    assert errors_of({}, 1.0, 1.1, float("nan")) == []
    (message,) = errors_of({}, 1.2, 1.3)
    assert message.startswith("warning (sampler): rollout/token_prob_error is 1.2, above rollout")
    with pytest.raises(RunError, match="is 2.5, above rollout.max_prob_error=2: the sampler's"):
        errors_of({}, 1.05, 2.5)
    quiet = {"rollout.warn_prob_error": 0.0, "rollout.max_prob_error": 0.0}
    meant = {"actor.lora.rank": 4, "actor.lora.dropout": 0.1}
    for changes in (quiet, meant):
        assert errors_of(changes, 1.5, 99.0, float("inf")) == []


def test_a_run_stops_at_the_step_and_keeps_its_batch(tmp_path, monkeypatch):
    """With a sampler that says half of what it drew by."""
    from hjax.workers.actor import Actor

    answer = Actor.generate_tokens

    def wrong(self, *arguments):
        rollout = answer(self, *arguments)
        return rollout | {"logprobs": rollout["logprobs"] - 2.0 * rollout["response_mask"]}

    monkeypatch.setattr(Actor, "generate_tokens", wrong)
    with trainer_of("GRPO", ONE_DEVICE, tmp_path / "run") as trainer:
        with pytest.raises(RunError, match="token_prob_error is 7.389, above"):
            trainer.step()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()  # no row of a step that was none
    assert list((tmp_path / "run" / "skipped").iterdir())


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
@pytest.mark.extended
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
    assert [text.partition(" of ")[0] for text in cut] == (
        ["step 1: warning (truncated): 100%"] if own else []
    )
