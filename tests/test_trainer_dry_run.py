"""What a dry run says, against arithmetic by hand."""

import json
from types import SimpleNamespace

import pytest
from helpers import save_model, trainer_of

import hjax
from hjax.algorithms import GRPO
from hjax.data.tasks import get_task
from hjax.dryrun import description
from hjax.launch.__main__ import TrainCommand, _dry_run
from hjax.rewards.function import RewardFunction
from hjax.run.episode_rollout import episode_return
from hjax.sharding.layout import shard_bytes

# hidden 32, MLP 64, 4 heads of 8, 16 tokens (11 characters, pad, BOS, EOS and one unknown, rounded
# up to a multiple of 8), one layer: embedding + q, k, v, o + gate, up, down + three norms.
DECODER = 16 * 32 + 4 * 32 * 32 + 3 * 32 * 64 + 3 * 32


def describe(algorithm, changes):
    with trainer_of(algorithm, changes) as trainer:
        return description.describe(trainer), trainer


@pytest.fixture(scope="module")
def critic(tmp_path_factory):
    """A critic of its own shapes."""
    folder = tmp_path_factory.mktemp("critic")
    tokenizer = get_task("sorting").tokenizer()
    return folder, save_model(folder, tokenizer=tokenizer, hidden_size=16, mlp_size=40)


@pytest.fixture(scope="module")
def ppo(critic):
    changes = {"algorithm.minibatch": 8, "algorithm.epochs": 3, "steps": 7}
    return describe("PPO", changes | {"critic.path": str(critic[0])})


@pytest.mark.extended
def test_there_is_a_cache_only_where_something_generates(ppo):
    assert ppo[0]["cache"]["actor"]["bytes_per_token"] == 2 * 4 * 8 * 4  # keys, values; float32
    told, _ = describe("RewardModel", {"warm_start.batch": 16})
    assert "cache" not in told and told["memory"]


def test_batch_arithmetic(ppo):
    batch = ppo[0]["batch"]
    assert batch["prompts_per_step"] == 8 and batch["samples_per_prompt"] == 2
    assert batch["sequences_per_step"] == 16 and batch["minibatch_sequences"] == 8
    assert batch["epochs"] == 3 and batch["updates_per_step"] == 3 * 2
    assert batch["prompt_tokens"] == 5  # BOS, three digits, >
    assert batch["response_tokens"] == 4 and batch["steps"] == 7
    assert batch["held_out_prompts"] == 16
    assert batch["train_prompts"] == 10**3 - 126  # the task holds an eighth of its prompts out


def test_parameters(ppo):
    critic = 16 * 16 + 4 * 16 * 16 + 3 * 16 * 40 + 3 * 16 + (16 + 1)  # and its head
    assert ppo[0]["parameters"] == {"actor": DECODER, "critic": critic, "reference": DECODER}


def test_memory(ppo):
    description, _ = ppo
    # float32 parameters and Adam's two moments, whole on every device, and two counters.
    resident = description["resident_bytes"]
    assert resident["reference"] == 4 * DECODER
    assert resident["actor"] == pytest.approx(3 * 4 * DECODER, abs=16)
    programs = {(row["role"], row["program"]): row for row in description["memory"]}
    assert {("actor", "generate"), ("actor", "update"), ("critic", "update")} <= programs.keys()
    for row in programs.values():
        assert row["total_bytes"] >= row["argument_bytes"] > 0
    update = programs["actor", "update"]
    assert update["argument_bytes"] > resident["actor"]


def test_sharded_state_is_counted_per_device():
    changes = {
        "placement": "split", "layout.actor.train.fsdp": 2, "layout.actor.train.tensor": 2
    }  # fmt: skip
    with trainer_of("PPO", changes) as trainer:
        state = trainer.roles.groups["actor"].worker.abstract_state()
    # Matrices are split over four devices; the norms at most over two.
    norms = 3 * 32
    matrices = DECODER - norms
    low, high = 3 * 4 * matrices / 4, 3 * 4 * (matrices / 4 + norms) + 16
    assert low < shard_bytes(state) <= high


def test_placement(ppo):
    (everything,) = ppo[0]["placement"]
    assert everything["roles"] == ["actor", "critic", "reference"]
    assert len(everything["devices"]) == 8
    assert everything["layouts"]["actor"]["train"] == {"data": 8}
    assert ppo[0]["host_roles"] == ["reward"]


def test_a_dry_run_of_sft_writes_and_trains_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    description, trainer = describe("SFT", {"steps": 9, "eval.every": 1, "data.eval_size": 8})
    assert [line.partition(":")[0] for line in description["warnings"]] == [
        "warning (few held-out prompts)"
    ]
    assert description["batch"]["sequences_per_update"] == 8
    assert description["parameters"] == {"actor": DECODER}
    nothing_is_done(trainer, tmp_path)


def test_an_agent_is_named_with_what_tries_it_and_not_called():
    def first_calls(keys):
        config = hjax.get_config("base.py", keys)
        roles = SimpleNamespace(reward_functions={"reward": RewardFunction(episode_return)})
        trainer = SimpleNamespace(config=config, roles=roles, algorithm_class=GRPO)
        trainer.inputs = None  # nothing is called
        return description._first_calls(trainer)

    agent = {"agent.function": "my agent.py:solve", "data.task": "", "data.path": "q.jsonl"}
    assert first_calls(agent | {"actor.path": "model"}) == {
        "episodes": {
            "agent": "my agent.py:solve: not called; try it with python -m hjax.launch.evaluate "
            "--model=model --data=q.jsonl '--agent=my agent.py:solve' --limit=2"
        }
    }
    shop = {"environment.function": "shop.py:Shop", "data.task": "maze"}
    assert first_calls(shop)["episodes"]["environment"].endswith(
        "--model=WORKDIR --task=maze --environment=shop.py:Shop --limit=2"
    )
    assert first_calls({"data.task": "maze"}) == {}


def test_warnings_are_lines_of_their_own(monkeypatch, capsys):
    said = [f"warning (slow adapters): {'a rate, ' * 40}", "warning (fast weights): another"]
    made = {"algorithm": "SFT", "memory": [], "warnings": said}
    monkeypatch.setattr(description, "describe", lambda trainer: dict(made))
    trainer = SimpleNamespace(config=hjax.get_config("sft.py"), close=lambda: None)
    assert _dry_run(trainer, TrainCommand("sft.py", trainer.config, None)) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == said
    assert _dry_run(trainer, TrainCommand("sft.py", trainer.config, None, json=True)) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == said


@pytest.mark.extended
def test_a_dry_run_of_grpo_writes_and_trains_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nothing_is_done(describe("GRPO", {})[1], tmp_path)


def nothing_is_done(trainer, tmp_path):
    assert trainer.step_number == 0 and trainer.history == []
    assert list(tmp_path.iterdir()) == []
