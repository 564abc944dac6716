"""Roles whose models differ in size and tokenizer from the actor's."""

import numpy as np
import pytest
from families import model
from helpers import ONE_DEVICE, save_model, tiny_config, trainer_of
from references import safetensors_torch, torch

import hjax
from hjax.data.tasks import get_task
from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError

# The task's digits in another order, among letters that the actor does not know.
FOREIGN = Tokenizer.characters("zyx9876543210>wv")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    ours = get_task("sorting").tokenizer()
    save_model(folder / "larger", tokenizer=ours, hidden_size=48, mlp_size=96, layers=2)
    save_model(folder / "foreign", tokenizer=FOREIGN, head=True, vocab_size=24, hidden_size=48)
    save_model(folder / "short", tokenizer=ours, max_length=6)
    save_model(folder / "bare", vocab_size=16, head=True)  # no tokenizer: takes the actor's ids
    return folder


def transformers_scores(directory, rows):
    """What transformers makes of a reward model: the head at the last token, one row at a time."""
    no_grad = torch.no_grad()  # without torch this skips, so before what imports it
    from references import LlamaModel
    model = LlamaModel.from_pretrained(directory)
    head = safetensors_torch.load_file(directory / "model.safetensors")["score.weight"]
    with no_grad:
        return [
            (model(torch.tensor([row])).last_hidden_state[0, -1] @ head.T).item() for row in rows
        ]


@pytest.mark.extended
def test_ppo_with_a_larger_critic_and_a_reward_model_of_another_tokenizer(models):
    paths = {"critic.path": f"{models}/larger", "reward.path": f"{models}/foreign"}
    with trainer_of("PPO", {**paths, "steps": 2, "eval.every": 2}) as trainer:
        rows = trainer.run()
        batch, shapes = trainer.batch, trainer.roles.models
    assert shapes["critic"].hidden_size == 48 and shapes["actor"].hidden_size == 32
    assert "reward" not in trainer.inputs.__dict__ or trainer.inputs.reward is None
    texts = zip(batch["prompt_text"], batch["response_text"], strict=True)
    retokenised = [FOREIGN.encode(prompt + response) for prompt, response in texts]
    expected = transformers_scores(models / "foreign", retokenised)
    np.testing.assert_allclose(batch["rewards"], expected, rtol=1e-4, atol=1e-5)
    assert batch["rewards"].std() > 0
    assert all(np.isfinite([row["critic/loss"], row["actor/loss"]]).all() for row in rows)
    assert "eval/accuracy" in rows[-1]  # the task's verifier still says what is right


@pytest.mark.slow
def test_a_qwen_learns_adapters_from_a_gemma_that_judges_its_text(tmp_path):
    """Two families and two vocabularies: the text is tokenised again for the judge."""
    ours = get_task("sorting").tokenizer()
    model("qwen2", vocab_size=ours.vocab_size).save_pretrained(tmp_path / "qwen")
    ours.save(tmp_path / "qwen")
    judge = model("gemma3")
    judge.save_pretrained(tmp_path / "gemma")
    FOREIGN.save(tmp_path / "gemma")
    head = torch.randn(1, judge.config.hidden_size)
    file = tmp_path / "gemma" / "model.safetensors"
    tensors = safetensors_torch.load_file(file) | {"score.weight": head}
    safetensors_torch.save_file(tensors, file, metadata={"format": "pt"})
    changes = {"actor.path": f"{tmp_path}/qwen", "reward.path": f"{tmp_path}/gemma", "steps": 2}
    with trainer_of("GRPO", {**changes, "actor.lora.rank": 2}) as trainer:
        rows = trainer.run()
        batch = trainer.batch
        families = {role: shape.family for role, shape in trainer.roles.models.items()}
    assert families == {"actor": "qwen2", "reward": "gemma3_text"}
    texts = zip(batch["prompt_text"], batch["response_text"], strict=True)
    with torch.no_grad():
        expected = [
            (judge.model(torch.tensor([FOREIGN.encode(p + r)])).last_hidden_state[0, -1] @ head.T)
            for p, r in texts
        ]
    expected = np.array([float(x) for x in expected])
    np.testing.assert_allclose(batch["rewards"], expected, rtol=1e-3, atol=1e-4)
    assert all(row["actor/grad_norm"] > 0 for row in rows)


@pytest.mark.extended
def test_a_reward_model_without_tokenizer_reads_the_actors_ids(models):
    with trainer_of("GRPO", {"reward.path": f"{models}/bare", "steps": 1}) as trainer:
        trainer.run()
        batch = trainer.batch
    rows = [
        [*p[pm].tolist(), *r[rm].tolist()]
        for p, pm, r, rm in zip(
            batch["prompts"], batch["prompt_mask"], batch["responses"], batch["response_mask"]
        )
    ]
    expected = transformers_scores(models / "bare", rows)
    np.testing.assert_allclose(batch["rewards"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"critic.path": "foreign"}, "critic.path=.*foreign: its tokenizer is not the actor's"),
        ({"reference.path": "foreign"}, "reference.path=.*foreign: its tokenizer is not the actor"),
        ({"critic.path": "short"}, "critic.path: 6 positions are fewer than the 9 of prompt and"),
        ({"critic.path": "nowhere"}, "no model directory .*nowhere"),
        ({"reward.path": "nowhere"}, "no model directory .*nowhere"),
        ({"actor.path": "short"}, "prompts of 5 and responses of 4 tokens exceed the model's 6"),
    ],
    ids=lambda x: next(iter(x.items())).__repr__() if isinstance(x, dict) else "",
)
def test_a_model_that_does_not_fit_its_role_is_refused(keys, message, models):
    changes = {key: f"{models}/{name}" for key, name in keys.items()}
    with pytest.raises(ConfigError, match=message) as caught:
        hjax.Trainer(tiny_config("PPO", changes))
    assert "\n" not in str(caught.value)


@pytest.mark.extended
def test_an_actor_from_weights_starts_from_them_without_warm_start(models):
    changes = {"actor.path": f"{models}/larger", "warm_start.steps": 5, "steps": 1}
    with trainer_of("GRPO", changes) as trainer:
        trainer.prepare()
        worker = trainer.roles.groups["actor"].worker
        loaded = hjax.load_model(models / "larger")
        tokens = np.arange(1, 9)[None]
        np.testing.assert_array_equal(
            np.asarray(worker.params["embedding"]), np.asarray(loaded.params["embedding"])
        )
        assert loaded.logits(tokens).shape == (1, 8, 16)
        assert trainer.roles.starts_from["reference"] == "actor"


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A folder with a run of one step and its export, and the embedding that was trained."""
    folder = tmp_path_factory.mktemp("first")
    with trainer_of("GRPO", {"steps": 1} | ONE_DEVICE, folder / "run") as trainer:
        trainer.run()
        trainer.export(folder / "model")
        return folder, np.asarray(trainer.roles.groups["actor"].worker.params["embedding"])


@pytest.mark.extended
def test_a_workdir_gives_weights_to_the_next_run(first):
    folder, trained = first
    with trainer_of("GRPO", {"actor.path": f"{folder}/run", "steps": 1} | ONE_DEVICE) as trainer:
        trainer.prepare()
        again = np.asarray(trainer.roles.groups["actor"].worker.params["embedding"])
    np.testing.assert_array_equal(again, trained)
    model = hjax.load_model(folder / "run")
    assert model.generate(["312>"], max_new_tokens=3, temperature=0)[0].text is not None


@pytest.mark.parametrize(
    "name, algorithm, role",
    [
        ("run", "GRPO", "reward"),
        ("model", "SafeRLHF", "cost"),
        pytest.param("run", "SafeRLHF", "cost", marks=pytest.mark.extended),
        pytest.param("model", "GRPO", "reward", marks=pytest.mark.extended),
    ],
)
def test_a_language_model_does_not_judge(name, algorithm, role, first):
    """It got a head of zeros, and every answer the reward 0."""
    folder, _ = first
    with pytest.raises(ConfigError, match=f"{role}.path=.*{name}: a language model"):
        hjax.Trainer(tiny_config(algorithm, {f"{role}.path": str(folder / name)}))
