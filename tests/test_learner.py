"""``hjax.Learner``: losses, gradients, AdamW, snapshots, saved states; torch is the truth."""

import concurrent.futures
import functools
import json

import jax
import numpy as np
import optax
import pytest
from helpers import save_model
from references import LlamaForCausalLM, peft, torch

from hjax.algorithms.pair_loss import PairLoss
from hjax.errors import ConfigError, RunError
from hjax.models.forward import response_log_probs
from hjax.models.parameters import to_host
from hjax.models.peft_files import save_adapter
from hjax.training_service import shared_base
from hjax.training_service.datum import Datum, padded_length
from hjax.training_service.learner import Learner
from hjax.training_service.shared_base import SharedBase
from hjax.training_service.snapshot_sampler import SampleRequest
from hjax.training_service.token_losses import LOSSES

VOCAB = 37


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("learner") / "model"
    save_model(path, layers=2, kv_heads=2, vocab_size=VOCAB, max_length=80)
    return path


@pytest.fixture(scope="module")
def base(folder):
    # Two rows of 32 to a pass: the data below need several.
    shared = SharedBase(folder, micro_batch_tokens=64)
    yield shared
    shared.close()


def learner_of(base, rank=3, seed=0):
    """A learner whose adapters are not 0, so that every one of them has a gradient."""
    learner = Learner(base, rank, seed=seed)
    draw = np.random.default_rng(seed)
    learner.learned = jax.tree.map(
        lambda x: x + (0.03 * draw.normal(size=x.shape)).astype(np.float32), learner.learned
    )
    return learner


def data_of(loss, lengths=(5, 9, 40, 33, 7)):
    """Data with weights and advantages of both signs and 0, ratios inside and outside of bounds."""
    draw = np.random.default_rng(3)
    made = []
    for n in lengths:
        inputs = {"target_tokens": draw.integers(0, VOCAB, n)}
        if loss == "cross_entropy":
            inputs["weights"] = draw.normal(size=n).astype(np.float32) * (draw.random(n) > 0.3)
        else:
            inputs["logprobs"] = (-3.6 + 0.4 * draw.normal(size=n)).astype(np.float32)
            inputs["advantages"] = draw.normal(size=n).astype(np.float32) * (draw.random(n) > 0.3)
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = (draw.random(n) > 0.2).astype(np.float32)
        made.append(Datum(draw.integers(0, VOCAB, n), inputs))
    return made


def torch_loss(name, logp, inputs):
    """The published formulas, on one datum."""
    t = {k: torch.tensor(np.asarray(v, np.float64)) for k, v in inputs.items()}
    if name == "cross_entropy":
        return -(t["weights"] * logp).sum()
    q, a = t["logprobs"], t["advantages"]
    ratio = torch.exp(logp - q)
    if name == "importance_sampling":
        return -(ratio * a).sum()
    if name == "ppo":
        return -torch.minimum(ratio * a, torch.clamp(ratio, 0.8, 1.2) * a).sum()
    if name == "cispo":
        return -(torch.clamp(ratio, 0.0, 4.0).detach() * a * logp).sum()
    if name == "dro":
        return -(logp * a - 0.5 * 0.05 * (logp - q) ** 2).sum()
    mask = t["sequence_ratio_mask"] != 0
    sequence = torch.exp((logp - q)[mask].mean()).detach()
    ratio = sequence * torch.exp(logp) / torch.exp(logp).detach()
    return -torch.minimum(ratio * a, torch.clamp(ratio, 0.8, 1.2) * a).sum()


def peft_tree(learner, folder, params):
    """Adapters, or their gradients, by PEFT's names."""
    from safetensors.numpy import load_file

    network = learner.base.programs(learner.lora).network
    save_adapter(folder, network.declared, to_host(params), learner.lora, learner.base.path)
    return load_file(folder / "adapter_model.safetensors")


def torch_model(learner, folder):
    """The same model in torch, float64, with PEFT's adapters."""
    peft_tree(learner, folder, learner.learned)
    model = LlamaForCausalLM.from_pretrained(learner.base.path, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, folder, is_trainable=True).double()


def torch_logprobs(model, datum):
    logits = model(torch.tensor(np.asarray(datum.tokens))[None]).logits[0]
    targets = torch.tensor(np.asarray(datum.inputs["target_tokens"]))
    several = targets if targets.ndim == 2 else targets[:, None]
    return torch.log_softmax(logits, -1).gather(1, several).reshape(targets.shape)


def check_gradients(learner, model, folder):
    ours = peft_tree(learner, folder, learner.gradients)
    theirs = {
        name.replace(".default", ""): p.grad.numpy()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        error = np.abs(ours[name] - gradient).max() / np.abs(gradient).max()
        assert error < 1e-5, (name, error)


@pytest.mark.extended
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_losses_and_gradients_are_torchs(loss, base, tmp_path):
    learner, data = learner_of(base), data_of(loss)
    model = torch_model(learner, tmp_path / "adapters")
    wanted = [torch_logprobs(model, datum) for datum in data]
    total = sum(torch_loss(loss, x, d.inputs) for x, d in zip(wanted, data))
    total.backward()
    found = learner.forward_backward(data, loss)
    assert found.loss == pytest.approx(total.item(), rel=1e-5)
    for ours, theirs in zip(found.logprobs, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=1e-5)
    check_gradients(learner, model, tmp_path / "gradients")
    alone = learner.forward(data, loss)
    assert alone.loss == pytest.approx(found.loss, rel=1e-6)


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_losses_are_the_published_formulas(loss):
    for datum in data_of(loss):
        inputs = dict(datum.inputs)
        del inputs["target_tokens"]
        given = np.random.default_rng(1).normal(-3.6, 0.5, len(datum.tokens))
        logp = torch.tensor(given, requires_grad=True)
        total = torch_loss(loss, logp, inputs)
        total.backward()
        rows = {name: jax.numpy.asarray(x, jax.numpy.float32)[None] for name, x in inputs.items()}

        def ours(x, rows=rows):
            return LOSSES[loss].function(x, rows, LOSSES[loss].settings(None)).sum()

        found, slopes = jax.value_and_grad(ours)(jax.numpy.asarray(given, jax.numpy.float32)[None])
        assert found == pytest.approx(total.item(), rel=1e-5, abs=1e-5)
        np.testing.assert_allclose(slopes[0], logp.grad.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.extended
def test_several_targets_per_position(base, tmp_path):
    draw = np.random.default_rng(5)
    data = [
        Datum(
            draw.integers(0, VOCAB, n),
            {
                "target_tokens": draw.integers(0, VOCAB, (n, k)),
                "weights": draw.normal(size=(n, k)).astype(np.float32),
            },
        )
        for n, k in ((6, 3), (11, 3), (4, 1))
    ]
    learner = learner_of(base)
    model = torch_model(learner, tmp_path / "adapters")
    wanted = [torch_logprobs(model, datum) for datum in data]
    total = sum(torch_loss("cross_entropy", x, d.inputs) for x, d in zip(wanted, data))
    total.backward()
    found = learner.forward_backward(data, "cross_entropy")
    assert found.loss == pytest.approx(total.item(), rel=1e-5)
    assert [x.shape for x in found.logprobs] == [(6, 3), (11, 3), (4, 1)]
    check_gradients(learner, model, tmp_path / "gradients")


@pytest.mark.extended
def test_adamw_is_torchs_over_steps_whose_settings_change(base, tmp_path):
    learner = learner_of(base, seed=2)
    model = torch_model(learner, tmp_path / "start")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    for step in range(20):
        settings = {
            "learning_rate": 1e-3 * (1 + step % 3), "beta1": 0.9 - 0.02 * (step % 5),
            "beta2": 0.95 + 0.002 * step, "eps": 1e-8, "weight_decay": 0.1 * (step % 2),
        }  # fmt: skip
        clip = 0.5 if step % 4 == 3 else 0.0
        [datum] = data_of("cross_entropy", lengths=(6 + step,))
        learner.forward_backward([datum], "cross_entropy")
        found = learner.optim_step(**settings, grad_clip_norm=clip)
        if step == 0:  # programs of one function count together, other tests' too
            compiled = learner._programs._step._cache_size()
        optimizer.zero_grad()
        torch_loss("cross_entropy", torch_logprobs(model, datum), datum.inputs).backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, clip or 1e30)
        assert found["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        [group] = optimizer.param_groups
        group["lr"], group["weight_decay"] = settings["learning_rate"], settings["weight_decay"]
        group["betas"], group["eps"] = (settings["beta1"], settings["beta2"]), settings["eps"]
        optimizer.step()
    ours = peft_tree(learner, tmp_path / "end", learner.learned)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            name = name.replace(".default", "")
            np.testing.assert_allclose(ours[name], parameter.detach().numpy(), atol=1e-5)
    assert learner._programs._step._cache_size() == compiled  # other settings compile nothing


def largest_difference(first, second):
    gaps = jax.tree.map(lambda x, y: np.abs(np.asarray(x) - np.asarray(y)).max(), first, second)
    return max(jax.tree.leaves(gaps))


def test_calls_add_up(base):
    data, whole, parts = data_of("ppo"), learner_of(base), learner_of(base)
    whole.forward_backward(data, "ppo")
    for datum in data:
        parts.forward_backward([datum], "ppo")
    largest = max(np.abs(x).max() for x in jax.tree.leaves(to_host(whole.gradients)))
    assert largest_difference(whole.gradients, parts.gradients) < 1e-6 * largest
    # A step takes them all, and the next one finds none.
    assert whole.optim_step()["grad_norm"] == pytest.approx(parts.optim_step()["grad_norm"])
    assert whole.optim_step()["grad_norm"] == 0


def test_tokens_that_do_not_count_add_exactly_nothing(base):
    """Their ratio is e^200, and the weight of the other sign would be infinite."""
    datum = Datum(
        [1, 2, 3],
        {"target_tokens": [2, 3, 4], "logprobs": [-200.0] * 3, "advantages": [0.0] * 3},
    )
    learner = learner_of(base)
    for loss in ("importance_sampling", "ppo", "cispo"):
        assert learner.forward_backward([datum], loss).loss == 0
    assert learner.optim_step()["grad_norm"] == 0


@pytest.mark.extended
def test_dpo_by_weights_is_the_step_of_hjaxs_own_loss(base):
    """As custom losses run: log-probs forward, the loss's slopes back as weights of cross_entropy.

    The other way is a trainer's: prompts and responses, and the pair loss of `algorithm.name=DPO`.
    """
    learner, optimizer = learner_of(base), optax.adamw(1e-2, b1=0.9, b2=0.95, weight_decay=0.0)
    network, start = base.programs(learner.lora).network, learner.learned
    loss, draw = PairLoss(beta=0.5), np.random.default_rng(7)
    batch = {
        "prompts": np.tile(draw.integers(0, VOCAB, (1, 3), np.int32), (2, 1)),
        "prompt_mask": np.ones((2, 3), bool),
        "responses": draw.integers(0, VOCAB, (2, 4), np.int32),
        "response_mask": np.array([[1, 1, 1, 1], [1, 1, 1, 0]], bool),
        "ref_logprobs": draw.normal(-3.6, 0.2, (2, 4)).astype(np.float32),
    }

    def own_loss(learned):
        model = network.bind(network.partition.join(learned, base.frozen))
        found = response_log_probs(model, batch, 1, base.compute)
        return loss(found, None, batch)[0].sum()

    gradients = jax.jit(jax.grad(own_loss))(start)
    updates, _ = optimizer.update(gradients, optimizer.init(start), start)

    rows = [  # padding left out: texts of their own lengths
        np.concatenate([batch["prompts"][i], batch["responses"][i][batch["response_mask"][i]]])
        for i in range(2)
    ]
    data = [Datum(row[:-1], {"target_tokens": row[1:]}) for row in rows]
    found = learner.forward(data, "cross_entropy").logprobs
    logp = [torch.tensor(x[2:], requires_grad=True) for x in found]
    gain = [
        (x - torch.tensor(batch["ref_logprobs"][i, : len(x)])).sum() for i, x in enumerate(logp)
    ]
    (-torch.nn.functional.logsigmoid(0.5 * (gain[0] - gain[1]))).backward()
    weights = [np.concatenate([[0, 0], -x.grad.numpy()]).astype(np.float32) for x in logp]
    weighted = [Datum(d.tokens, {**d.inputs, "weights": w}) for d, w in zip(data, weights)]
    learner.forward_backward(weighted, "cross_entropy")
    assert largest_difference(learner.gradients, gradients) < 1e-5
    learner.optim_step(learning_rate=1e-2, eps=1e-8)
    assert largest_difference(learner.learned, optax.apply_updates(start, updates)) < 1e-5


@pytest.mark.extended
def test_trained_weights_score_as_the_goldens(test_data):
    """float64, made elsewhere; stories260K."""
    path = test_data / "weights" / "stories260K-hf"
    golden = json.loads((path / "goldens.json").read_text())
    learner, ids = Learner(path, 4), golden["text_ids"]
    [found] = learner.forward(
        [Datum(ids[:-1], {"target_tokens": ids[1:]})], "cross_entropy"
    ).logprobs
    np.testing.assert_allclose(found, golden["text_logprobs"], atol=1e-4)


@pytest.mark.extended
def test_models_over_one_base_do_not_see_each_other(base):
    data = data_of("cross_entropy")
    alone, beside, other = (learner_of(base) for _ in range(3))
    for step in range(3):
        for learner in (alone, beside):
            learner.forward_backward(data, "cross_entropy")
        other.forward_backward(data[: 1 + step], "cross_entropy")
        other.optim_step(learning_rate=0.1)
        alone.optim_step(learning_rate=1e-2)
        beside.optim_step(learning_rate=1e-2)
    assert largest_difference(alone.learned, beside.learned) == 0
    assert largest_difference(alone.learned, other.learned) > 0.01


@pytest.mark.extended
def test_a_snapshot_keeps_its_weights(base):
    learner = learner_of(base)
    before = learner.snapshot()
    tokens = [1, 5, 9, 2, 30]
    datum = Datum(tokens[:-1], {"target_tokens": tokens[1:]})
    scores = before.compute_logprobs(tokens)
    assert before.programs.sampler() is base.programs(None).sampler()  # merged in float32
    [trained] = learner.forward([datum], "cross_entropy").logprobs
    np.testing.assert_allclose(scores[1:], trained, atol=1e-5)
    assert np.isnan(scores[0])
    learner.forward_backward([datum], "cross_entropy")
    learner.optim_step(learning_rate=0.05)
    [after] = learner.forward([datum], "cross_entropy").logprobs
    assert np.abs(after - trained).max() > 0.01
    np.testing.assert_allclose(learner.snapshot().compute_logprobs(tokens)[1:], after, atol=1e-5)
    assert before.compute_logprobs(tokens) == scores
    # Equal seeds draw the same, and the samples of a request differ.
    ask = functools.partial(learner.sample, tokens, num_samples=3, max_tokens=6, stop=())
    first, again = ask(seed=2**40 + 7), ask(seed=2**40 + 7)
    assert first == again and len({s.tokens for s in first.sequences}) == 3
    assert all(s.stop_reason == "length" for s in first.sequences)


def test_a_saved_state_goes_on_bit_for_bit(base, tmp_path):
    learner, data = learner_of(base), data_of("ppo")
    learner.forward_backward(data, "ppo")
    learner.optim_step(learning_rate=1e-2)
    learner.save(tmp_path / "state", about={"name": "a"})
    again = Learner.from_saved(base, tmp_path / "state")
    fresh = Learner.from_saved(base, tmp_path / "state", optimizer=False)
    for each in (learner, again, fresh):
        each.forward_backward(data, "ppo")
        each.optim_step(learning_rate=1e-2)
    assert largest_difference(learner.learned, again.learned) == 0
    assert again.step == 2 and fresh.step == 1
    assert largest_difference(learner.learned, fresh.learned) > 0
    assert json.loads((tmp_path / "state" / "state.json").read_text())["name"] == "a"


def test_damaged_and_unfit_states_are_refused(base, tmp_path):
    learner = learner_of(base)
    learner.save(tmp_path / "state")
    with pytest.raises(ConfigError, match="of rank 3 .* this model has adapters of rank 2"):
        Learner(base, 2).load(tmp_path / "state")
    (tmp_path / "state" / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(ConfigError, match="adapter_model.safetensors is not what was saved"):
        learner.load(tmp_path / "state")
    with pytest.raises(ConfigError, match="there is no saved state"):
        learner.load(tmp_path / "none")


@pytest.mark.extended
def test_all_parameters_can_be_trained(base):
    learner = Learner(base, 0)
    data = data_of("cross_entropy")
    before = learner.forward(data, "cross_entropy").loss
    learner.forward_backward(data, "cross_entropy")
    learner.optim_step(learning_rate=1e-3)
    assert learner.forward(data, "cross_entropy").loss < before
    # The base that others share is as it was.
    assert Learner(base, 0).forward(data, "cross_entropy").loss == before


def test_gradients_that_are_not_finite_change_nothing(base):
    learner, data = learner_of(base), data_of("cross_entropy")
    whole = learner.learned
    learner.learned = jax.tree.map(lambda x: x * np.float32("nan"), whole)
    learner.forward_backward(data, "cross_entropy")
    learner.learned = whole
    assert learner.optim_step(learning_rate=1.0)["skipped"] == 1
    assert largest_difference(learner.learned, whole) == 0 and learner.step == 0


def test_no_step_is_taken_on_lost_gradients(base, monkeypatch, tmp_path):
    learner, data = learner_of(base), data_of("cross_entropy")
    learner.save(tmp_path / "state")

    def fail(*given):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(learner._programs, "run", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            learner.forward_backward(data, "cross_entropy")
    with pytest.raises(RunError, match="lost when a backward pass failed: out of memory; load"):
        learner.optim_step()
    learner.load(tmp_path / "state")
    learner.forward_backward(data, "cross_entropy")
    assert learner.optim_step()["grad_norm"] > 0


GOOD = {"target_tokens": [2, 3, 4]}
POLICY = GOOD | {"logprobs": [-1.0] * 3, "advantages": [1.0] * 3}


@pytest.mark.parametrize(
    "tokens, inputs, loss, config, why",
    [
        ([1, 2, 3], GOOD, "stable_reinforce", None, "stable_reinforce.*not published"),
        ([1, 2, 3], GOOD, "cross_entrpy", None, "did you mean cross_entropy"),
        ([1, 2, 3], POLICY, "ppo", {"clip_low": 0.5}, "no setting 'clip_low'; did you mean"),
        ([1, 2, 3], POLICY, "ppo", {"clip_low_threshold": "a"}, "must be a finite number"),
        ([1, 2, 3], GOOD, "ppo", None, "datum 0: loss 'ppo' needs 'logprobs'"),
        ([1, 2, 3], POLICY | {"weights": [1.0] * 3}, "ppo", None, "'ppo' reads no 'weights'"),
        ([1, 2, VOCAB], GOOD, "cross_entropy", None, "id 37 is outside the vocabulary, 0 to 36"),
        ([1, 2, 3], {"target_tokens": [2, 3, -1]}, "cross_entropy", None, "id -1 is outside"),
        ([1, 2], GOOD, "cross_entropy", None, r"target_tokens are \[3\] for 2 tokens"),
        ([1, 2, 3], {}, "cross_entropy", None, "target_tokens is missing"),
        ([], {"target_tokens": []}, "cross_entropy", None, "N from 1 to 80"),
        ([1] * 81, {"target_tokens": [1] * 81}, "cross_entropy", None, "N from 1 to 80"),
        ([1.5, 2], {"target_tokens": [1, 2]}, "cross_entropy", None, "whole numbers are wanted"),
        ([1, 2, 3], GOOD | {"weights": [1.0]}, "cross_entropy", None, r"weights has shape \[1\]"),
        ([1, 2, 3], GOOD | {"weights": [1, np.inf, 0]}, "cross_entropy", None, "not finite"),
        (
            [1, 2], {"target_tokens": [[1], [2]], "logprobs": [[0]] * 2, "advantages": [[0]] * 2},
            "ppo", None, r"loss 'ppo' takes one per token, \[N\]",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(tokens, inputs, loss, config, why, base):
    learner = Learner(base, 3)
    with pytest.raises(ConfigError, match=why):
        learner.forward_backward([Datum(tokens, inputs)], loss, config)
    assert learner.optim_step()["grad_norm"] == 0


def test_settings_of_a_step_are_checked(base):
    learner = Learner(base, 3)
    for settings, why in (
        ({"learning_rate": -1.0}, "learning_rate=-1.0: must be from 0 to 1000000000000000"),
        ({"beta1": 1.0}, "beta1=1.0: must be from 0 to below 1"),
        ({"momentum": 0.9}, "no setting 'momentum'"),
    ):
        with pytest.raises(ConfigError, match=why):
            learner.optim_step(**settings)
    with pytest.raises(ConfigError, match="data is empty"):
        learner.forward([], "cross_entropy")
    with pytest.raises(ConfigError, match="dtype: the base has them"):
        Learner(base, dtype="bfloat16")


def test_kinds_of_models_are_limited(folder, monkeypatch):
    monkeypatch.setattr(shared_base, "KINDS", 2)
    base = SharedBase(folder)
    for rank in (1, 2, 1):
        Learner(base, rank)
    with pytest.raises(ConfigError, match="2 kinds of models .* ranks so far: 1, 2"):
        Learner(base, 3)


def test_lengths_are_few():
    lengths = [padded_length(n, 300) for n in range(1, 301)]
    assert sorted(set(lengths)) == [32, 48, 64, 96, 128, 192, 256, 300]
    assert all(n <= length for n, length in enumerate(lengths, start=1))


# Ranks of adapters and meshes.
MESHES = [
    (3, {"tensor": 2}),
    (3, {"data": 3}),
    (0, {"fsdp": 2, "tensor": 2, "generate_tensor": 1}),
    (3, {"data": 2, "fsdp": 2, "tensor": 2}),
]


@pytest.mark.extended
@pytest.mark.parametrize(("rank", "mesh"), MESHES, ids=str)
def test_on_a_mesh_as_on_one_device(rank, mesh, tmp_path):
    save_model(tmp_path / "model", layers=2, kv_heads=2, vocab_size=VOCAB + 1, max_length=80)
    found = []
    for axes in ({}, mesh):
        base = SharedBase(tmp_path / "model", micro_batch_tokens=64, **axes)
        learner, data = Learner(base, rank), data_of("ppo")
        for _ in range(2):
            output = learner.forward_backward(data, "ppo")
            learner.optim_step(learning_rate=1e-2, eps=1e-8)
        drawn = learner.sample([1, 2, 3], max_tokens=5, temperature=0.0, stop=())
        found.append((output, to_host(learner.learned), drawn.sequences[0].tokens))
        if not axes:  # a state of one device goes on where there are several
            learner.save(tmp_path / "state")
            later = learner.forward_backward(data, "ppo").loss
        else:
            other = Learner.from_saved(base, tmp_path / "state")
            assert other.forward_backward(data, "ppo").loss == pytest.approx(later, rel=1e-4)
        base.close()
    (one, learned, tokens), (two, split, others) = found
    assert two.loss == pytest.approx(one.loss, rel=1e-4)
    for ours, theirs in zip(one.logprobs, two.logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert largest_difference(learned, split) < 1e-4 and tokens == others


def test_several_processes_are_refused(folder, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match="one of 2 processes.* does not run on Ray"):
        SharedBase(folder)


@pytest.mark.extended
def test_a_mesh_trains_and_samples_at_once(tmp_path):
    save_model(tmp_path / "model", layers=2, kv_heads=2, vocab_size=VOCAB + 1, max_length=80)
    base = SharedBase(tmp_path / "model", micro_batch_tokens=64, data=2, fsdp=2, tensor=2)
    learner, data = Learner(base, 3), data_of("ppo")
    request = SampleRequest((1, 2, 3), num_samples=5, max_tokens=30, stop=(), seed=4)
    before = learner.snapshot()
    alone = before.sample(request)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        drawn = [pool.submit(before.sample, request) for _ in range(6)]
        for _ in range(6):
            learner.forward_backward(data, "ppo")
            learner.optim_step(learning_rate=1e-2)
        after = learner.snapshot()
        drawn += [pool.submit(each.sample, request) for each in (after, before) * 2]
        learner.forward_backward(data, "ppo")
        found = [each.result(120) for each in drawn]
    tokens = [[sequence.tokens for sequence in each.sequences] for each in (alone, *found)]
    assert all(each == tokens[0] for each in [*tokens[1:7], *tokens[8::2]])
    assert tokens[7] == tokens[9] != tokens[0]
    base.close()


def test_a_mesh_that_cannot_be_is_refused(folder):
    wrong = [
        ({"data": 3, "fsdp": 3}, "fsdp=3: 1 to 2, by 3 each of the 8 devices"),
        ({"tensor": 8}, "heads of size 4 does not divide over tensor = 8; tensor may be 1, 2, 4"),
        ({"tensor": 4, "generate_tensor": 3}, "tensor=3 does not divide the training size 4"),
    ]
    for axes, message in wrong:
        with pytest.raises(ConfigError, match=message):
            SharedBase(folder, **axes)


@pytest.mark.extended
def test_bfloat16_keeps_float32_where_it_learns(folder):
    base = SharedBase(folder, dtype="bfloat16")
    learner, data = Learner(base, 3), data_of("cross_entropy", lengths=(9, 20))
    losses = []
    for _ in range(5):
        losses.append(learner.forward_backward(data, "cross_entropy").loss)
        learner.optim_step(learning_rate=1e-2)
    assert losses[-1] < losses[0]
    assert {x.dtype for x in jax.tree.leaves(learner.learned)} == {np.dtype("float32")}
    tokens = list(range(1, 9))
    [trained] = learner.forward(
        [Datum(tokens[:-1], {"target_tokens": tokens[1:]})], "cross_entropy"
    ).logprobs
    sampled = learner.snapshot().compute_logprobs(tokens)[1:]
    np.testing.assert_allclose(sampled, trained, atol=0.02)
    base.close()
