"""The training service as the real SDK of the Tinker API sees it (the extra `tinker`)."""

import asyncio
import concurrent.futures
import contextlib
import itertools
import math
import os
import pickle
import socket
import threading
import time
import urllib.parse

import jax
import numpy as np
import pytest
from helpers import save_model
from references import torch
from serving_double import byte_tokenizer
from training_server import command, training_server

from hjax.algorithms.pair_loss import PairLoss
from hjax.models.forward import response_log_probs
from hjax.training_service.shared_base import SharedBase

tinker = pytest.importorskip("tinker", reason="needs the extra tinker: pip install 'hjax[tinker]'")
pytestmark = pytest.mark.extended

TEXT = [10, 11, 12, 13, 14, 20, 30]
KEY = "tml-test"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("sdk") / "model"
    save_model(path, tokenizer=byte_tokenizer(), vocab_size=260, max_length=128)
    shared = SharedBase(path, slots=8)
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def service(base, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"
        }.items():  # fmt: skip
            patch.setitem(os.environ, name, value)
        store = tmp_path_factory.mktemp("store")
        names = ("any", base.path)
        with training_server(base, store, key=KEY, names=names) as (url, served, _):
            client = tinker.ServiceClient(base_url=url)
            client.url, client.models = url, served.models
            yield client
            client.close("success").result()


@pytest.fixture
def training(service, base):
    return service.create_lora_training_client(base_model=base.path, rank=4, seed=1).result()


def sft(tokens=TEXT, weights=None):
    return tinker.types.Datum(
        model_input=tinker.types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "weights": weights or [1.0] * (len(tokens) - 1),
        },
    )


def rl(sequence, advantage, prompt=TEXT[:3], **more):
    whole = list(prompt) + list(sequence.tokens)
    zeros = [0.0] * (len(prompt) - 1)
    return tinker.types.Datum(
        model_input=tinker.types.ModelInput.from_ints(whole[:-1]),
        loss_fn_inputs={
            "target_tokens": whole[1:],
            "logprobs": zeros + list(sequence.logprobs),
            "advantages": zeros + [advantage] * len(sequence.tokens),
            **more,
        },
    )


def adam(**settings):
    return tinker.types.AdamParams(**settings)


def test_supervised_steps_in_flight(training):
    calls = []
    for _ in range(8):  # both are sent before either is waited for
        calls.append(training.forward_backward([sft()] * 3, "cross_entropy"))
        last = training.optim_step(adam(learning_rate=0.03))
    losses = [call.result().metrics["loss:sum"] for call in calls]
    assert losses[-1] < 0.95 * losses[0] and last.result().metrics["grad_norm"] > 0
    [first, *_] = calls[0].result().loss_fn_outputs
    assert first["logprobs"].to_numpy().sum() == pytest.approx(-losses[0] / 3, rel=1e-5)
    assert training.get_info().lora_rank == 4


def test_soft_targets_sparse_and_dense(training):
    targets = np.stack([np.array(TEXT[1:]), np.zeros(len(TEXT) - 1, int)], 1)
    weights = np.zeros(targets.shape, np.float32)
    weights[:, 0] = [1, -2, 0, 0.5, 3, 1]
    plain = training.forward([sft(weights=weights[:, 0].tolist())], "cross_entropy").result()
    for convert in (lambda x: x, torch.tensor):  # the SDK sends torch's tensors as CSR
        datum = tinker.types.Datum(
            model_input=tinker.types.ModelInput.from_ints(TEXT[:-1]),
            loss_fn_inputs={"target_tokens": convert(targets), "weights": convert(weights)},
        )
        found = training.forward([datum], "cross_entropy").result()
        assert found.metrics["loss:sum"] == pytest.approx(plain.metrics["loss:sum"], rel=1e-5)
        assert found.loss_fn_outputs[0]["logprobs"].shape == [6, 2]


def test_samplers(training, service, base):
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt, params = tinker.types.ModelInput.from_ints(TEXT[:3]), tinker.types.SamplingParams
    first, again = (
        sampler.sample(prompt, 2, params(max_tokens=6, seed=7, stop=[])).result() for _ in range(2)
    )
    assert [s.tokens for s in first.sequences] == [s.tokens for s in again.sequences]
    assert first.sequences[0].tokens != first.sequences[1].tokens
    greedy = sampler.sample(prompt, 1, params(max_tokens=8, temperature=0.0, stop=[])).result()
    stop = greedy.sequences[0].tokens[2]
    found = sampler.sample(
        prompt, 1, params(max_tokens=8, temperature=0.0, stop=[stop]),
        include_prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=2,
    ).result()  # fmt: skip
    [sequence] = found.sequences
    assert sequence.stop_reason == "stop" and sequence.tokens[-1] == stop
    assert [len(row) for row in sequence.topk_logprobs] == [2] * len(sequence.tokens)
    assert sequence.topk_logprobs[0][0][0] == sequence.tokens[0]
    assert found.prompt_logprobs[0] is None and len(found.topk_prompt_logprobs) == 3
    # Trainer and sampler agree.
    scores = sampler.compute_logprobs(tinker.types.ModelInput.from_ints(TEXT)).result()
    loss = training.forward([sft()], "cross_entropy").result().metrics["loss:sum"]
    assert -sum(scores[1:]) == pytest.approx(loss, rel=1e-5)
    own = service.create_sampling_client(base_model=base.path).result()
    assert len(own.compute_logprobs(tinker.types.ModelInput.from_ints(TEXT)).result()) == 7
    assert pickle.loads(pickle.dumps(sampler)).sample(prompt, 1, params(max_tokens=2)).result()


def test_log_probs_are_of_the_tempered_distribution(training):
    """As the cookbook's validate_temperature_logprobs judges a server."""
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = tinker.types.ModelInput.from_ints(TEXT[:3])
    found = sampler.sample(
        prompt, 1, tinker.types.SamplingParams(max_tokens=1, temperature=2.0, seed=1)
    ).result()
    [token], [logprob] = found.sequences[0].tokens, found.sequences[0].logprobs
    logits = [
        sampler.compute_logprobs(tinker.types.ModelInput.from_ints([*TEXT[:3], t])).result()[3]
        for t in range(260)
    ]
    tempered = np.array(logits) / 2
    expected = tempered[token] - np.log(np.exp(tempered).sum())
    assert logprob == pytest.approx(expected, abs=1e-4)


def test_policy_losses_and_their_sums(training):
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = tinker.types.ModelInput.from_ints(TEXT[:3])
    params = tinker.types.SamplingParams(max_tokens=6, seed=3, stop=[])
    found = sampler.sample(prompt, 4, params).result()
    data = [rl(s, a) for s, a in zip(found.sequences, (1.0, -1.0, 0.5, -0.25))]
    for loss, config in [
        ("importance_sampling", None), ("ppo", None),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
    ]:  # fmt: skip
        metrics = training.forward_backward(data, loss, config).result().metrics
        # On policy the ratio is 1: minus the sum of advantages, 6 tokens each.
        assert metrics["loss:sum"] == pytest.approx(-6 * 0.25, abs=1e-3)
    for loss in ("cispo", "dro"):
        assert training.forward_backward(data, loss).result().metrics["loss:sum"]
    mask = {"sequence_ratio_mask": [0.0, 0.0] + [1.0] * 6}
    ratio = [rl(s, 1.0, **mask) for s in found.sequences]
    metrics = training.forward_backward(ratio, "gspo").result().metrics
    assert metrics["loss:sum"] == pytest.approx(-24, abs=1e-3)
    assert training.optim_step(adam(grad_clip_norm=1.0)).result().metrics["grad_norm"] > 0


def test_a_loop_of_reinforcement_learns(test_data, tmp_path):
    """Trained weights; the reward is the share of tokens with an e."""
    base = SharedBase(test_data / "weights" / "stories260K-hf")
    decode, start = base.tokenizer.decode, base.tokenizer.encode("Once upon a time")
    prompt, rewards = tinker.types.ModelInput.from_ints(start), []
    norms = []
    with training_server(base, tmp_path, key=KEY, names=("any",)) as (url, _, _):
        service = tinker.ServiceClient(base_url=url, api_key=KEY)
        training = service.create_lora_training_client("stories", rank=8, seed=1).result()
        for step in range(5):
            sampler = training.save_weights_and_get_sampling_client().result()
            params = tinker.types.SamplingParams(max_tokens=8, seed=step, stop=[])
            found = sampler.sample(prompt, 24, params).result().sequences
            scores = np.array([np.mean(["e" in decode([t]) for t in s.tokens]) for s in found])
            rewards.append(scores.mean())
            data = [rl(s, float(a), start) for s, a in zip(found, scores - scores.mean())]
            training.forward_backward(data, "importance_sampling").result()
            metrics = training.optim_step(adam(learning_rate=0.01)).result().metrics
            norms.append(metrics["grad_norm"])
        service.close("success").result()
    base.close()
    assert rewards[-1] > rewards[0] + 0.3 and min(norms[:3]) > 0


def test_refusals_are_errors_and_the_model_goes_on(training):
    with pytest.raises(tinker.RequestFailedError, match="stable_reinforce.*not published"):
        training.forward_backward([sft()], "stable_reinforce").result()
    short = tinker.types.Datum(
        model_input=tinker.types.ModelInput.from_ints([1, 2]), loss_fn_inputs={"target_tokens": [3]}
    )
    with pytest.raises(tinker.RequestFailedError, match=r"target_tokens are \[1\] for 2 tokens"):
        training.forward_backward([short], "cross_entropy").result()
    assert training.forward([sft()], "cross_entropy").result().metrics["loss:sum"] > 0


def own_dpo_gradients(learner, texts, reference, beta):
    """Of the pair loss of `algorithm.name=DPO`, the way a trainer computes it: the first three
    tokens are the prompt."""
    batch = {
        "prompts": np.array([text[:3] for text in texts], np.int32),
        "prompt_mask": np.ones((2, 3), bool),
        "responses": np.array([text[3:] for text in texts], np.int32),
        "response_mask": np.ones((2, len(texts[0]) - 3), bool),
        "ref_logprobs": np.stack([logprobs[2:] for logprobs in reference]),
    }
    base, loss = learner.base, PairLoss(beta=beta)
    network = base.programs(learner.lora).network

    def own(learned):
        model = network.bind(network.partition.join(learned, base.frozen))
        return loss(response_log_probs(model, batch, 1, base.compute), None, batch)[0].sum()

    return jax.jit(jax.grad(own))(learner.learned)


def test_custom_losses_run_on_the_client(training, service):
    """DPO, with torch on the client: its gradients are those of hjax's own, and it is learned."""
    pytest.importorskip("torch")
    texts = TEXT, [10, 11, 12, 40, 41, 42, 43]
    pair = [sft(text, [0.0] * 2 + [1.0] * 4) for text in texts]
    beta = 0.5
    reference = [
        x["logprobs"].to_numpy()
        for x in training.forward(pair, "cross_entropy").result().loss_fn_outputs
    ]

    def dpo(data, logprobs):
        gains = [
            (own - torch.tensor(ref))[2:].sum()
            for own, ref in zip(logprobs, reference, strict=True)
        ]
        margin = gains[0] - gains[1]
        loss = -torch.nn.functional.logsigmoid(beta * margin)
        return loss, {"margin": margin.item()}

    losses = []
    learner = service.models[training.model_id].learner
    for _ in range(5):
        own = own_dpo_gradients(learner, texts, reference, beta)
        call = training.forward_backward_custom(pair, dpo)
        losses.append(call.result().metrics)
        for ours, theirs in zip(*map(jax.tree.leaves, (learner.gradients, own)), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5 * max(np.abs(theirs).max(), 1e-3))
        training.optim_step(adam(learning_rate=3e-3)).result()
    assert losses[0]["margin"] == pytest.approx(0, abs=1e-4) and losses[-1]["margin"] > 0.1


def test_states_are_saved_and_loaded(training, service):
    training.forward_backward([sft()], "cross_entropy").result()
    training.optim_step(adam(learning_rate=0.01)).result()
    path = training.save_state("first").result().path
    named = training.save_weights_for_sampler("s1").result().path
    other = service.create_training_client_from_state_with_optimizer(path).result()
    fresh = service.create_training_client_from_state(path).result()
    norms = []
    for each in (training, other, fresh):
        each.forward_backward([sft()], "cross_entropy").result()
        norms.append(each.optim_step(adam(learning_rate=0.01)).result().metrics["grad_norm"])
    assert norms[0] == norms[1] == norms[2]
    after = [
        each.forward([sft()], "cross_entropy").result().metrics["loss:sum"]
        for each in (training, other, fresh)
    ]
    assert after[0] == after[1] != after[2]
    sampler = service.create_sampling_client(model_path=named).result()
    assert sampler.compute_logprobs(tinker.types.ModelInput.from_ints(TEXT)).result()[1] < 0
    rest = tinker.RestClient(base_url=service.url)
    listed = rest.list_checkpoints(training.model_id).result().checkpoints
    assert [c.checkpoint_id for c in listed] == ["weights/first", "sampler_weights/s1"]
    assert rest.get_training_run(training.model_id).result().lora_rank == 4
    assert rest.get_weights_info_by_tinker_path(named).result().lora_rank == 4
    rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result()
    assert rest.list_user_checkpoints().result().checkpoints
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.RequestFailedError, match="no such saved state"):
        service.create_training_client_from_state(path).result()


def test_many_at_once_and_a_call_in_parts(training):
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = tinker.types.ModelInput.from_ints(TEXT[:3])

    async def many():
        asked = [
            sampler.sample(prompt, 1, tinker.types.SamplingParams(max_tokens=4)).coroutine()
            for _ in range(100)
        ]
        call = training.forward_backward([sft()] * 2500, "cross_entropy")  # three parts
        step = training.optim_step(adam(learning_rate=1e-3))
        drawn = await asyncio.gather(*asked)
        return drawn, await call, await step

    drawn, whole, step = asyncio.run(many())
    assert len(drawn) == 100 and len(whole.loss_fn_outputs) == 2500
    one = -sum(whole.loss_fn_outputs[0]["logprobs"].to_numpy().tolist())
    assert whole.metrics["loss:sum"] == pytest.approx(2500 * one, rel=1e-4)
    assert math.isfinite(step.metrics["grad_norm"])


def test_keys_that_are_wrong(service, base):
    with pytest.raises(tinker.AuthenticationError, match="X-API-Key"):
        client = tinker.ServiceClient(base_url=service.url, api_key="tml-other")
        client.create_lora_training_client(base_model=base.path, rank=4).result()


def losses_of(training, steps=1):
    found = []
    for _ in range(steps):
        call = training.forward_backward([sft()], "cross_entropy")
        training.optim_step(adam(learning_rate=0.01)).result()
        found.append(call.result().metrics["loss:sum"])
    return found


def test_states_are_loaded_into_a_model_that_there_is(training):
    losses_of(training)
    path = training.save_state("here").result().path
    with pytest.raises(tinker.RequestFailedError, match="exists; overwrite=True replaces it"):
        training.save_state("here").result()
    after = losses_of(training, 3)
    with pytest.warns(FutureWarning):
        training.load_state_with_optimizer(path).result()
    assert losses_of(training, 3) == after
    with pytest.warns(FutureWarning):
        training.load_state(path).result()
    without = losses_of(training, 3)  # the first step without its moments is another
    assert without[0] == after[0] and without[1:] != after[1:]
    assert training.save_state("here", overwrite=True).result().path == path


def test_what_is_listed(service, base):
    about = {"run": "seven"}
    with tinker.ServiceClient(
        base_url=service.url, user_metadata={"who": "me"}, display_name="mine"
    ) as other:
        training = other.create_lora_training_client(
            base.path, rank=4, user_metadata=about
        ).result()
        path = training.save_state("listed", user_metadata={"step": "0"}).result().path
        sampler = training.create_sampling_client(path).result()
        assert sampler.get_base_model() == base.path
        assert sampler.get_tokenizer().encode("a") == training.get_tokenizer().encode("a")
        rest = tinker.RestClient(base_url=service.url)
        found = rest.get_server_capabilities().result().supported_models
        assert [each.model_name for each in found] == ["any", base.path]
        model_id = training.model_id
        session_id = model_id.partition(":")[0]
        session = rest.get_session(session_id).result()
        assert session.training_run_ids == [model_id] and session.display_name == "mine"
        assert session.user_metadata == {"who": "me"} and len(session.sampler_ids) == 1
        assert session_id in rest.list_sessions().result().sessions
        assert rest.list_sessions(limit=1).result().sessions != [session_id]  # the oldest is first
        assert rest.get_sampler(session.sampler_ids[0]).result().model_path == path
        assert model_id in [
            r.training_run_id for r in rest.list_training_runs().result().training_runs
        ]
        assert rest.get_training_run(model_id).result().user_metadata == about
    with pytest.raises(tinker.NotFoundError, match="is not open"):
        rest.get_session(session_id).result()
    run = rest.get_training_run_by_tinker_path(path).result()  # it has ended; its state is there
    assert run.user_metadata == about and run.last_checkpoint.user_metadata == {"step": "0"}
    rest.delete_checkpoint(model_id, "weights/listed").result()
    with pytest.raises(tinker.NotFoundError, match="no training run"):
        rest.get_training_run(model_id).result()


def test_what_is_not_served_fails_at_once(training, service):
    rest = tinker.RestClient(base_url=service.url)
    path = training.save_state("plain").result().path
    session = training.model_id.partition(":")[0]
    began = time.monotonic()
    for ask in (
        lambda: training.save_weights_external("elsewhere"),
        lambda: rest.copy_weights(path, "project"),
        lambda: rest.publish_checkpoint_from_tinker_path(path),
        lambda: rest.unpublish_checkpoint_from_tinker_path(path),
        lambda: rest.get_external_weights_urls(path.replace("/weights/", "/external_weights/")),
        lambda: rest.assign_session_project(session, "project"),
        lambda: rest.export_session_trace(session),
        lambda: rest.search_sessions(
            tinker.types.SessionSearchRequest(owner=tinker.types.AccessibleSearchOwner())
        ),
    ):
        with pytest.raises(tinker.APIStatusError, match="/api/v1/.*: "):
            ask().result()
    assert losses_of(training)  # the model goes on
    assert time.monotonic() - began < 30


def test_a_part_that_is_refused_leaves_the_others(training, service, base):
    """The SDK sends 1024 data at a time; a step that has been sent takes the parts that count."""
    wrong = sft([*TEXT[:-1], 900])
    call = training.forward_backward([sft()] * 1500 + [wrong] + [sft()] * 10, "cross_entropy")
    step = training.optim_step(adam())
    with pytest.raises(tinker.RequestFailedError, match="id 900 is outside"):
        call.result()
    other = service.create_lora_training_client(base_model=base.path, rank=4, seed=1).result()
    other.forward_backward([sft()] * 1024, "cross_entropy").result()
    expected = other.optim_step(adam()).result().metrics["grad_norm"]
    assert expected > 0
    assert step.result().metrics["grad_norm"] == pytest.approx(expected, rel=1e-5)


def trained(url, base, seed):
    """Losses, and tokens that are drawn between, of a client of its own."""
    service = tinker.ServiceClient(base_url=url)
    training = service.create_lora_training_client(base.path, rank=4, seed=seed).result()
    prompt, found = tinker.types.ModelInput.from_ints(TEXT[:3]), []
    for step in range(3):
        sampler = training.save_weights_and_get_sampling_client().result()
        params = tinker.types.SamplingParams(max_tokens=6, seed=step, stop=[])
        drawn = sampler.sample(prompt, 2, params).result().sequences
        found += [each.tokens for each in drawn] + losses_of(training)
    service.close("success").result()
    return found


def test_two_clients_at_once_are_as_each_alone(service, base):
    alone = [trained(service.url, base, seed) for seed in (1, 2)]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        assert list(pool.map(lambda seed: trained(service.url, base, seed), (1, 2))) == alone
    assert alone[0] != alone[1]


@contextlib.contextmanager
def cut_connections(url, every):
    """URL that leads to a server; every so often an answer is lost with its connection."""
    to = urllib.parse.urlsplit(url)
    listener, answers, cut = socket.create_server(("127.0.0.1", 0)), itertools.count(1), []

    def forward(source, sink, loses):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if loses and next(answers) % every == 0:
                    cut.append(data)
                    break
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def accept():
        with contextlib.suppress(OSError):
            while True:
                near = listener.accept()[0]
                far = socket.create_connection((to.hostname, to.port))
                for given in ((near, far, False), (far, near, True)):
                    threading.Thread(target=forward, args=given, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", cut
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def test_answers_that_are_lost_change_nothing(service, base):
    """Every fourth answer is lost after the server has done the work: the SDK asks again."""
    with cut_connections(service.url, 4) as (url, cut):
        assert trained(url, base, 1) == trained(service.url, base, 1)
    assert len(cut) > 3


def test_a_killed_server_costs_its_clients_one_clear_error(base, tmp_path):
    """Killed while a pass runs: it and the step after it fail, and nothing is taken twice."""
    long = [sft(list(range(100)))] * 1000
    with command(base.path, tmp_path) as (url, process):
        service = tinker.ServiceClient(base_url=url, api_key=KEY)
        training = service.create_lora_training_client("tiny", rank=4, seed=1).result()
        losses_of(training)
        path = training.save_state("kept").result().path
        named = training.save_weights_for_sampler("drawn").result().path
        sampler = service.create_sampling_client(model_path=named).result()
        text = tinker.types.ModelInput.from_ints(TEXT)
        scores, losses = sampler.compute_logprobs(text).result(), losses_of(training, 2)
        calls = [training.forward_backward(long, "cross_entropy"), training.optim_step(adam())]
        time.sleep(0.2)
        process.kill()
    port = urllib.parse.urlsplit(url).port
    with command(base.path, tmp_path, [f"--port={port}"]):
        for call in calls:
            with pytest.raises(tinker.RequestFailedError, match=f"saved state is {path}"):
                call.result(timeout=120)
        with pytest.raises(tinker.RequestFailedError, match="make one of a saved state"):
            sampler.compute_logprobs(text).result(timeout=120)
        again = tinker.ServiceClient(base_url=url, api_key=KEY)
        sampler = again.create_sampling_client(model_path=named).result()
        assert sampler.compute_logprobs(text).result() == scores
        training = again.create_training_client_from_state_with_optimizer(path).result()
        assert losses_of(training, 2) == losses
