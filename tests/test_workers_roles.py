"""What each model class answers: actor, reference, critic, reward."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references import LlamaConfig, LlamaForSequenceClassification, torch

from hjax import workers
from hjax.algorithms.losses import PolicyLoss, SupervisedLoss, ValueLoss
from hjax.controller import ResourcePool, WorkerGroup
from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError, RunError
from hjax.models.compute import Compute
from hjax.models.model_config import ModelConfig
from hjax.models.parameters import to_host
from hjax.models.weights import read_config
from hjax.rewards.function import RewardFunction
from hjax.roles import bound_methods
from hjax.rollout.sampling_params import SamplingParams
from hjax.sharded_values import ArrayRegions
from hjax.sharding.layout import make_layouts
from hjax.sharding.parameter_manifest import manifest_of
from hjax.workers import (
    Actor,
    Critic,
    FunctionReward,
    ModelReward,
    ModelWorker,
    OptimizerConfig,
    Reference,
    WorkerContext,
)

# Gradient descent in disguise, see test_workers_layouts: before - after = 1000 g.
DESCENT = OptimizerConfig(learning_rate=1e9, epsilon=1e6, max_grad_norm=0.0)
SCALE = 1e3
CHARACTERS = Tokenizer.characters("abcdefgh ")
MODEL = ModelConfig(CHARACTERS.vocab_size, 16, 24, 1, 2, 1, 8, 32, tie_embeddings=False)
SAMPLES = 4
ENDS = (CHARACTERS.eos_id,)


def context(role, devices=1, **changes):
    options = {
        "layouts": make_layouts(jax.devices()[:devices]),
        "model": MODEL,
        "samples": SAMPLES,
        "max_response_length": 6,
        "optimizer": DESCENT,
        "tokenizer": CHARACTERS,
        "sampling": SamplingParams(stop=ENDS),
        "compute": Compute(unroll_layers=True),
    }
    return WorkerContext(role=role, **(options | changes))


def start(kind, role, **changes):
    worker = kind(context(role, **changes))
    worker.initialize()
    return worker


def prompts(texts=("abc", "h g")):
    ids = [CHARACTERS.encode(text) for text in texts]
    width = max(map(len, ids))
    tokens = np.array([[0] * (width - len(row)) + row for row in ids], np.int32)
    return {
        "prompts": tokens,
        "prompt_mask": tokens > 0,
        "prompt_text": list(texts),
        "columns": {"answer": [text.upper() for text in texts]},
        "step": 1,
    }


def demonstrations():
    rng = np.random.default_rng(5)
    return {
        "prompts": rng.integers(3, 12, (8, 4), dtype=np.int32),
        "prompt_mask": np.ones((8, 4), bool),
        "responses": rng.integers(3, 12, (8, 6), dtype=np.int32),
        "response_mask": np.arange(6) < rng.integers(1, 7, (8, 1)),
    }


def gradient(worker, update):
    """The gradient that a public update took."""
    before = to_host(worker.params)
    metrics = update(worker)
    return jax.tree.map(lambda a, b: (a - b) / SCALE, before, to_host(worker.params)), metrics


def close(left, right):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b) + 1e-9


@pytest.fixture(scope="module")
def actor():
    return start(
        Actor,
        "actor",
        loss=PolicyLoss(),
        sampling=SamplingParams(temperature=0.7, stop=ENDS),
    )


@pytest.fixture(scope="module")
def batch(actor):
    rollout = actor.generate_sequences(prompts())
    return {k: np.asarray(v) if isinstance(v, jax.Array) else v for k, v in rollout.items()}


# Actor


def test_generation_returns_the_batch_of_the_dataflow(batch):
    rows, length = batch["responses"].shape
    assert rows == 2 * SAMPLES and length == 6
    assert batch["columns"]["answer"] == ["ABC"] * SAMPLES + ["H G"] * SAMPLES
    assert batch["prompt_text"] == ["abc"] * SAMPLES + ["h g"] * SAMPLES
    for tokens, mask, text in zip(
        batch["responses"], batch["response_mask"], batch["response_text"], strict=True
    ):
        assert CHARACTERS.decode(tokens[mask]) == text
        assert not tokens[~mask].any()
    assert (batch["truncated"] == ~(batch["responses"] == CHARACTERS.eos_id).any(axis=1)).all()


def test_generation_and_training_agree_on_log_probs(actor, batch):
    """At temperature 0.7: token_prob_error, the mean of exp|difference|, is 1."""
    again = np.asarray(actor.compute_log_prob(batch)["old_logprobs"])
    np.testing.assert_allclose(again, batch["logprobs"], atol=1e-5)
    error = np.exp(np.abs(again - batch["logprobs"]))[batch["response_mask"]].mean()
    assert error < 1 + 2e-6


@pytest.mark.extended
def test_bfloat16_generation_reads_norms_as_training_does():
    """The narrow copy must not round what the training forward reads wide."""
    worker = start(Actor, "actor", loss=PolicyLoss(), compute=Compute(jnp.bfloat16, True))
    rng = np.random.default_rng(0)
    worker.params = jax.tree.map_with_path(
        lambda path, x: x * 3 * (1 + 0.3 * rng.normal(size=x.shape).astype(np.float32)),
        worker.params,
    )
    rollout = worker.generate_sequences(prompts())
    again = np.asarray(worker.compute_log_prob(rollout)["old_logprobs"])
    error = np.abs(again - np.asarray(rollout["logprobs"]))[np.asarray(rollout["response_mask"])]
    assert error.mean() < 1e-3


def test_rows_of_different_prompts_are_not_taken_for_samples(actor, batch):
    """samples = 4, but a greedy batch has one row per prompt, a shuffled one any order."""
    greedy = actor.generate_sequences(prompts(("abc", "h g", "ddd", "e")), greedy=True)
    assert np.asarray(greedy["responses"]).shape[0] == 4
    single = start(Actor, "actor", loss=PolicyLoss(), samples=1)
    single.take_weights(actor.params)
    untempered = np.asarray(single.compute_log_prob(greedy)["old_logprobs"])
    np.testing.assert_allclose(untempered, greedy["logprobs"], atol=1e-5)

    keys = ("prompts", "prompt_mask", "responses", "response_mask", "prompt_id")
    tokens = {key: batch[key] for key in keys}
    assert actor.grouped(tokens)
    order = np.random.default_rng(0).permutation(8)
    mixed = {key: x[order] for key, x in tokens.items()}
    assert not actor.grouped(mixed) and not actor.grouped(greedy)
    shuffled = actor.compute_log_prob(mixed)
    expected = actor.compute_log_prob(tokens)["old_logprobs"][order]
    np.testing.assert_allclose(shuffled["old_logprobs"], expected, atol=1e-5)


@pytest.fixture(scope="module")
def learner():
    """An actor to update, from the same initial parameters in every test."""
    return start(Actor, "actor", loss=PolicyLoss(), supervised_loss=SupervisedLoss())


@pytest.fixture(scope="module")
def lesson(batch, learner):
    """(batch to learn from, gradient of its policy loss, metrics)."""
    rng = np.random.default_rng(0)
    learn = {key: x for key, x in batch.items() if isinstance(x, np.ndarray)}
    learn |= {
        "advantages": rng.normal(size=(8, 6)).astype(np.float32),
        "old_logprobs": batch["logprobs"],
    }
    return learn, *gradient(learner, lambda w: w.update_actor(learn))


@pytest.mark.extended
def test_updates_of_shuffled_rows_have_the_same_gradient(learner, lesson):
    learn, expected, _ = lesson
    order = np.random.default_rng(1).permutation(8)
    learner.initialize()
    shuffled = {key: x[order] for key, x in learn.items()}
    close(gradient(learner, lambda w: w.update_actor(shuffled))[0], expected)


@pytest.mark.extended
def test_pretraining_adds_exactly_its_coefficient_times_its_gradient(learner, lesson):
    learn, alone, plain = lesson
    data = demonstrations()
    mixed = data | {"coefficient": jnp.float32(0.25)}
    learner.initialize()
    both, metrics = gradient(learner, lambda w: w.update_actor(learn, mixed))
    supervised = start(Actor, "actor", loss=SupervisedLoss(), samples=1)
    likelihood, nll = gradient(supervised, lambda w: w.update_actor(data))
    close(both, jax.tree.map(lambda a, b: a + 0.25 * b, alone, likelihood))
    assert float(metrics["loss"]) == pytest.approx(
        float(plain["loss"]) + 0.25 * float(nll["loss"]), rel=1e-5
    )
    assert float(metrics["pretrain_loss"]) == pytest.approx(float(nll["loss"]), rel=1e-5)


@pytest.mark.extended
def test_demonstrations_do_not_share_prompts(actor, learner):
    """Their loss is the plain mean over response tokens, whatever `samples` is."""
    data, temperature = demonstrations(), actor.context.sampling.temperature
    assert temperature == 0.7  # the likelihood is untempered
    one = start(Actor, "actor", loss=SupervisedLoss(), samples=1)
    one.take_weights(actor.params)
    table = np.asarray(one.compute_log_prob(data)["old_logprobs"])
    expected = -table.sum() / data["response_mask"].sum()
    assert float(actor.compute_loss(data)["loss"]) == pytest.approx(expected, rel=1e-5)
    warm = start(Actor, "actor", loss=PolicyLoss(), warm_start=DESCENT,
                 supervised_loss=SupervisedLoss())  # fmt: skip
    warm.take_weights(actor.params)
    warm.begin_stage("warm_start")
    assert float(warm.update_actor(data)["loss"]) == pytest.approx(expected, rel=1e-5)


def test_a_warm_start_that_was_not_set_up_is_refused():
    worker = start(Actor, "actor", loss=PolicyLoss())
    with pytest.raises(ConfigError, match="set up without a warm_start stage"):
        worker.begin_stage("warm_start")
    with pytest.raises(ConfigError, match="stage 'middle'; allowed: main, warm_start"):
        worker.begin_stage("middle")


def test_abstract_state_is_the_state():
    worker = start(Actor, "actor", devices=8, loss=PolicyLoss(),
                   layouts=make_layouts(jax.devices(), {"fsdp": 8}))  # fmt: skip
    real, promised = worker.state(), worker.abstract_state()
    assert jax.tree.structure(real) == jax.tree.structure(promised)
    for array, shape in zip(jax.tree.leaves(real), jax.tree.leaves(promised), strict=True):
        assert (array.shape, array.dtype) == (shape.shape, shape.dtype)
        assert array.sharding.is_equivalent_to(shape.sharding, array.ndim)


# Reference


def test_the_reference_is_a_copy_that_does_not_change(actor, batch):
    reference = Reference(context("reference", sampling=SamplingParams(temperature=0.7, stop=ENDS)))
    worker = start(Actor, "actor", loss=PolicyLoss())
    worker.take_weights(actor.params)
    reference.take_weights(worker.params)
    before = np.asarray(reference.compute_ref_log_prob(batch)["ref_logprobs"])
    np.testing.assert_allclose(before, batch["logprobs"], atol=1e-5)  # at the actor's temperature
    assert not before[~batch["response_mask"]].any()
    worker.update_actor(
        batch | {"advantages": batch["logprobs"], "old_logprobs": batch["logprobs"]}
    )
    after = np.asarray(reference.compute_ref_log_prob(batch)["ref_logprobs"])
    np.testing.assert_array_equal(after, before)


# Critic


def test_a_new_critic_predicts_zero_and_its_first_gradient_is_by_hand(actor, batch):
    """Value 0 everywhere, so d/d bias of mean 1/2 (V - R)^2 over tokens is -mean R."""
    critic = Critic(context("critic", loss=ValueLoss(clip=None)))
    critic.take_weights(actor.params)
    assert "unembedding" in actor.params and "unembedding" not in critic.params["decoder"]
    assert not np.asarray(critic.compute_values(batch)["values"]).any()
    mask = batch["response_mask"]
    returns = np.where(mask, np.arange(48, dtype=np.float32).reshape(8, 6) / 10, 0)
    got, metrics = gradient(critic, lambda w: w.update_critic(batch | {"returns": returns}))
    assert got["bias"] == pytest.approx(-returns[mask].mean(), rel=1e-5)
    assert float(metrics["loss"]) == pytest.approx(0.5 * (returns[mask] ** 2).mean(), rel=1e-5)
    assert not jax.tree.leaves(got["decoder"])[0].any()  # nothing flows through a head of zeros
    values = np.asarray(critic.compute_values(batch)["values"])
    assert values[mask].any() and not values[~mask].any()


# Weights in pieces


def in_pieces(params):
    """As another pool's processes give them: each array in two parts where it can be."""

    def cut(x):
        x = np.asarray(x)
        if x.ndim == 0 or x.shape[0] % 2:
            return ArrayRegions.of(x)
        half, rest = x.shape[0] // 2, tuple((0, n) for n in x.shape[1:])
        parts = (((0, half), *rest), x[:half]), (((half, x.shape[0]), *rest), x[half:])
        return ArrayRegions(x.shape, x.dtype, parts)

    return jax.tree.map(cut, params)


def test_weights_in_pieces_are_those_in_arrays(actor):
    layouts = make_layouts(jax.devices(), {"fsdp": 4, "data": 2})
    pieces = in_pieces(actor.params)
    reference = Reference(context("reference", layouts=layouts))
    reference.take_weights(pieces, manifest_of(actor.params, 7))
    jax.tree.map(np.testing.assert_array_equal, reference.params, actor.params)
    assert reference.version == 7 and reference.fetched_bytes == 0  # all was at hand
    critic = Critic(context("critic", loss=ValueLoss(clip=None), layouts=layouts))
    critic.take_weights(pieces)
    promised = critic.abstract_state()["params"]
    jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s.sharding, x.ndim) or 1 / 0,
                 critic.params, promised)  # fmt: skip
    jax.tree.map(
        np.testing.assert_array_equal,
        critic.params["decoder"],
        {key: actor.params[key] for key in critic.params["decoder"]},
    )
    head = {key: x for key, x in critic.params.items() if key != "decoder"}
    assert head and not any(np.asarray(x).any() for x in jax.tree.leaves(head))


def test_weights_that_are_not_the_promised_or_the_models_are_refused(actor):
    pieces, manifest = in_pieces(actor.params), manifest_of(actor.params, 7)
    reference = Reference(context("reference"))
    reference.take_weights(pieces, manifest)
    before = reference.params
    with pytest.raises(RunError, match="version 7 came while version 7 is in use"):
        reference.take_weights(pieces, manifest)
    short = {key: x for key, x in pieces.items() if key != "embedding"}
    with pytest.raises(RunError, match="embedding .* is missing among the weights of version 8"):
        reference.take_weights(short, dataclasses.replace(manifest, version=8))
    with pytest.raises(RunError, match="embedding .* is missing"):
        reference.take_weights(short)
    assert reference.params is before and reference.version == 7
    critic = Critic(context("critic", loss=ValueLoss(clip=None)))
    with pytest.raises(RunError, match=r"decoder\.embedding .* is missing"):
        critic.take_weights(short)


def test_a_trained_role_needs_a_loss_and_an_optimizer():
    with pytest.raises(ConfigError, match="critic: a trained role needs a loss and an optimizer"):
        Critic(context("critic"))
    with pytest.raises(ConfigError, match="reference: a model needs devices and shapes"):
        Reference(dataclasses.replace(context("reference"), model=None))


# Rewards


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A reward model with a tokenizer of its own: other ids for the same characters."""
    path = tmp_path_factory.mktemp("classifier")
    tokenizer = Tokenizer.characters("hgfedcba .")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=24,
        num_labels=1,
    )
    model = LlamaForSequenceClassification(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.5 * torch.randn(p.shape))
    model.save_pretrained(path)
    tokenizer.save(path)
    return path, model, tokenizer


def torch_scores(model, sequences):
    with torch.no_grad():
        return [model(torch.tensor([ids])).logits.item() for ids in sequences]


def reward_model(classifier, role="reward", devices=8, **changes):
    path, _, tokenizer = classifier
    made = ModelReward(
        context(
            role, devices, path=str(path), model=read_config(path), tokenizer=tokenizer, **changes
        )
    )
    made.initialize()
    return made


def test_a_reward_model_of_another_tokenizer_gets_the_text(classifier, batch):
    _, theirs, tokenizer = classifier
    texts = [p + r for p, r in zip(batch["prompt_text"], batch["response_text"], strict=True)]
    expected = torch_scores(theirs, [tokenizer.encode(text) for text in texts])
    worker = reward_model(classifier, retokenize=True)
    np.testing.assert_allclose(worker.compute_reward(batch)["rewards"], expected, atol=2e-5)
    np.testing.assert_allclose(worker.compute_cost(batch)["costs"], expected, atol=2e-5)


def test_a_reward_model_of_the_same_tokenizer_gets_the_tokens(classifier, batch):
    """Seven rows on eight devices: the rest is filled up and dropped."""
    _, theirs, _ = classifier
    seven = {key: x[:7] for key, x in batch.items() if isinstance(x, np.ndarray)}
    sequences = [
        [*p[pm].tolist(), *r[rm].tolist()]
        for p, pm, r, rm in zip(
            seven["prompts"],
            seven["prompt_mask"],
            seven["responses"],
            seven["response_mask"],
            strict=True,
        )
    ]
    rewards = reward_model(classifier).compute_reward(seven)["rewards"]
    assert np.shape(rewards) == (7,)
    np.testing.assert_allclose(rewards, torch_scores(theirs, sequences), atol=2e-5)


def test_a_sequence_beyond_the_reward_models_positions_is_refused(classifier):
    long = {"prompt_text": ["a" * 20], "response_text": ["b" * 10]}
    with pytest.raises(RunError, match="reward: .* 31 tokens, more than the 24 positions"):
        reward_model(classifier, retokenize=True).compute_reward(long)


def test_a_function_sees_text_columns_and_tokens(batch):
    def reward(prompts, responses, **columns):
        assert prompts == batch["prompt_text"] and responses == batch["response_text"]
        assert columns["answer"] == batch["columns"]["answer"]
        assert (
            columns["response_tokens"][0]
            == batch["responses"][0][batch["response_mask"][0]].tolist()
        )
        return [float(len(text)) for text in responses]

    worker = FunctionReward(WorkerContext("reward"), RewardFunction(reward))
    out = worker.compute_reward(batch)
    assert out["rewards"].tolist() == [len(text) for text in batch["response_text"]]
    assert out["reward_outcomes"]["ok"] == 8
    assert worker.compute_cost(batch)["costs"].tolist() == out["rewards"].tolist()


# A worker of one's own


def test_programs_are_told_apart_by_their_code():
    worker = start(ModelWorker, "mine")
    ones = {"x": jnp.ones((2, 3))}
    twice = worker.forward(lambda model, batch, share: 2 * batch["x"], worker.params, ones)
    thrice = worker.forward(lambda model, batch, share: 3 * batch["x"], worker.params, ones)
    assert float(twice[0, 0]) == 2 and float(thrice[0, 0]) == 3


def test_a_group_runs_the_critic_behind_its_protocol(actor, batch):
    critic = context("critic", devices=8, loss=ValueLoss(clip=None))
    group = WorkerGroup(ResourcePool("all", jax.devices()), Critic, critic, role="critic")
    group.worker.take_weights(actor.params)
    values = group.compute_values(batch).result()["values"]
    assert values.sharding.spec == jax.sharding.PartitionSpec("data")
    group.pool.close()


@pytest.fixture(scope="module")
def scorers():
    """References by the rows that they score at a time; 0: all."""
    return {m: start(Reference, "reference", devices=2, micro_batch=m) for m in (0, 4)}


def test_scores_are_made_in_micro_batches(scorers):
    """The same numbers, prompts still run once for all their samples."""
    rng = np.random.default_rng(3)
    rows, length = 16, 6
    batch = {
        "prompts": np.repeat(rng.integers(3, 12, (4, 4), dtype=np.int32), SAMPLES, axis=0),
        "prompt_mask": np.ones((rows, 4), bool),
        "responses": rng.integers(3, 12, (rows, length), dtype=np.int32),
        "response_mask": np.ones((rows, length), bool),
        "prompt_id": np.repeat(np.arange(4), SAMPLES),
    }
    whole, parts = (scorers[m].compute_ref_log_prob(batch)["ref_logprobs"] for m in (0, 4))
    np.testing.assert_allclose(parts, whole, atol=1e-5)


@pytest.mark.extended
def test_scores_in_micro_batches_take_less_memory(scorers):
    temporary = {}
    for micro, worker in scorers.items():
        (program,) = worker.programs(64, 32)
        temporary[micro] = program.trace().lower().compile().memory_analysis().temp_size_in_bytes
    assert temporary[4] < 0.5 * temporary[0]


@pytest.mark.parametrize(
    "kind", ["Critic", "ImplicitReward", "Reference", "RewardTrainer", "Teacher"]
)
def test_a_dry_run_has_the_programs_of_all_scoring_methods(kind):
    worker = getattr(workers, kind)
    scoring = {name for name in bound_methods(worker) if name.startswith("compute_")}
    assert scoring == worker.score_methods.keys()
    assert all(hasattr(worker, program) for program in worker.score_methods.values())
