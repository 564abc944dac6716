"""Whole runs on the environments of other packages."""

import pytest
from helpers import episode_keys, trainer_of

pytest.importorskip("websockets", reason="the extra environments")

from openenv_double import openenv_double  # noqa: E402

from hjax.data.tokenizer import Tokenizer  # noqa: E402

# What the server and the adapter say.
SAID = "This is no action. An JSON object with (integer, required), value of alone yes higher lower"


def test_a_run_learns_from_an_openenv_server(tmp_path):
    """Returns are what the server has paid, and its observations are in the rows."""
    keys = episode_keys(tmp_path)
    alphabet = "".join(sorted({*SAID, *"0123456789->\n"}))
    Tokenizer.characters(alphabet).save(tmp_path / "tokenizer")
    with openenv_double() as server:
        server.sessions = 64
        changes = {
            **keys,
            "environment.function": f"openenv:{server.address}",
            "environment.turn_tokens": 1,
            "rollout.max_prompt_length": 16,
            "rollout.max_response_length": 600,
            "steps": 2,
        }
        with trainer_of("GRPO", changes) as trainer:
            rows = [trainer.step() for _ in range(2)]
            batch = trainer.batch
        episodes = len(server.resets) / 2
        paid = sum(row["episode/return"] for row in rows) * episodes
        assert server.hits > 0 and paid == pytest.approx(server.hits)
        assert all(row["reward/unscored"] == 0 for row in rows)
        assert {"seed"} == set().union(*server.resets)
        assert len(server.actions) > episodes and "0-9" in batch["prompt_text"][0]
        assert server.open == 0
