"""Requests at any time, of any kind: each gets what it would get alone."""

import dataclasses
import random
import threading
import time

import jax
import numpy as np
import pytest

from hjax.errors import ConfigError, RunError
from hjax.models.model_config import ModelConfig
from hjax.models.parameters import decoder_network
from hjax.rollout.generator import Generator
from hjax.rollout.language_model import LanguageModel
from hjax.rollout.requests import QueueFull, Request, RequestHandle, ResponseChunk
from hjax.rollout.sampling_params import OPTIONS, SamplingParams
from hjax.rollout.service import GenerationService
from hjax.sharding.layout import make_layouts

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=16, mlp_size=24, layers=1, heads=4, kv_heads=2, head_dim=8,
    max_length=256,
)  # fmt: skip
SECONDS = 120
SLOTS = 2  # nearly everywhere the same, so that an engine's programs are compiled once


@pytest.fixture(scope="module")
def model():
    layout = make_layouts(jax.devices()[:1]).generate
    return LanguageModel(CONFIG, decoder_network(CONFIG).create(1, layout))


@pytest.fixture
def service(model):
    made = GenerationService(model, slots=SLOTS)
    yield made
    made.close(0)


def test_its_thread_ends_before_the_interpreter(model, monkeypatch):
    at_exit = []
    monkeypatch.setattr("atexit.register", lambda *call, **named: at_exit.append((call, named)))
    service = GenerationService(model, slots=SLOTS)
    answer = Answer(service, Request((1, 2, 3), 40, SamplingParams(temperature=0)))
    [((close, *values), named)] = at_exit
    close(*values, **named)
    assert not service._thread.is_alive()
    assert answer.whole()[2] in ("cancelled", "length")


class Answer:
    """Gathers a request's pieces."""

    def __init__(self, service, request):
        self.pieces, self.ended = [], threading.Event()
        self.ticket = service.submit(request, self._hear)

    def _hear(self, piece):
        self.pieces.append(piece)
        if piece.finish:
            self.ended.set()

    def whole(self):
        assert self.ended.wait(SECONDS), "no end"
        assert [piece.finish for piece in self.pieces[:-1]] == [""] * (len(self.pieces) - 1)
        tokens = [token for piece in self.pieces for token in piece.tokens]
        logprobs = [x for piece in self.pieces for x in piece.logprobs]
        assert len(tokens) == len(logprobs)
        return tokens, logprobs, self.pieces[-1].finish


def plain(draw):
    """A request with few options."""
    options = SamplingParams(
        temperature=draw.choice([0, 0.7, 1.0, 1.3]),
        top_k=draw.choice([0, 0, 5]),
        top_p=draw.choice([1.0, 0.8]),
        stop=tuple(draw.sample(range(64), draw.choice([0, 1, 3]))),
    )
    prompt = tuple(draw.choices(range(64), k=draw.randint(1, 90)))
    return Request(prompt, draw.randint(1, 120), options, seed=draw.randrange(2**32))


def any_kind(draw):
    """One with options of all kinds."""
    request = plain(draw)
    options = dataclasses.replace(
        request.options,
        min_p=draw.choice([0, 0.1]),
        repetition_penalty=draw.choice([1.0, 1.2]),
        presence_penalty=draw.choice([0, 0.5]),
        frequency_penalty=draw.choice([0, -0.3]),
        logit_bias={draw.randrange(64): draw.choice([-100, 2.0])},
        min_tokens=draw.choice([0, 4]),
    )
    return dataclasses.replace(request, options=options, choice=draw.choice([0, 3]))


def check(service, requests, alone):
    """They come in any order, some at once; each gets what it gets ``alone``."""
    answers = []
    for i, request in enumerate(requests):
        answers.append(Answer(service, request))
        if i % 7 == 3:
            time.sleep(0.02)
    for request, answer in zip(requests, answers, strict=True):
        tokens, logprobs, finish = answer.whole()
        expected, exact, reason = alone(request)
        assert (tokens, finish) == (expected, reason)
        np.testing.assert_allclose(logprobs, exact, atol=1e-5)


@pytest.mark.parametrize("count", [12, pytest.param(250, marks=pytest.mark.slow)])
@pytest.mark.extended
def test_each_request_gets_what_generate_gives(count, model):
    def alone(request):
        asked = request.options
        [answer] = model.generate(
            [list(request.prompt)], request.max_tokens, seed=request.seed, stop=asked.stop,
            **{name: getattr(asked, name) for name in OPTIONS},
        )  # fmt: skip
        return answer.tokens, answer.logprobs, answer.finish_reason

    draw = random.Random(count)
    # Few programs of the other side: it compiles one for each of these.
    kinds = [plain(draw) for _ in range(2)] + [
        dataclasses.replace(any_kind(draw), choice=0) for _ in range(2)
    ]
    requests = [
        dataclasses.replace(draw.choice(kinds), prompt=plain(draw).prompt, seed=i)
        for i in range(count)
    ]
    service = GenerationService(model, slots=4)
    try:
        check(service, requests, alone)
    finally:
        service.close(0)


class Spread:
    """The same model over several devices."""

    def __init__(self, model, sizes):
        layout = make_layouts(jax.devices(), sizes, {"tensor": -1}).generate
        network = decoder_network(model.config)
        self.config, self.tokenizer = model.config, None
        self.params = network.place(model.params, layout)
        self.engine_for = Generator(network, layout).engine_for


@pytest.mark.parametrize(
    "count, sizes",
    [
        (16, None),
        pytest.param(1000, None, marks=pytest.mark.slow),
        pytest.param(1000, {"data": 4, "tensor": 2}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.extended
def test_neighbours_change_nothing(count, sizes, model, monkeypatch):
    draw = random.Random(count)
    requests = [any_kind(draw) for _ in range(count)]
    flat, prefill = [], model.engine.prefill

    def read(how, params, new, *given):
        flat.append(new.packed_size)
        return prefill(how, params, new, *given)

    monkeypatch.setattr(model.engine, "prefill", read)
    service = GenerationService(Spread(model, sizes) if sizes else model, slots=8 if sizes else 4)
    single = GenerationService(model, slots=1)
    try:
        check(service, requests, lambda request: Answer(single, request).whole())
        stats = service.stats()
    finally:
        single.close(0)
        service.close(0)
    assert stats["running"] == stats["waiting"] == 0
    assert stats["prompt_tokens"] == sum(len(r.prompt) for r in requests)
    assert sizes or any(flat)


def test_log_probs_are_those_of_the_draw_and_of_the_policy(model, service):
    options = SamplingParams(temperature=0.7, top_k=5, min_p=0.05, presence_penalty=0.4)
    answer = Answer(service, Request((5, 9, 2), 30, options, seed=4))
    tokens, sampled, _ = answer.whole()
    policy = [x for piece in answer.pieces for x in piece.policy_logprobs]
    logits = np.asarray(model.logits([[5, 9, 2, *tokens]]), np.float64)[0, 2:-1] / 0.7
    whole = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = whole[np.arange(len(tokens)), tokens]
    np.testing.assert_allclose(policy, expected, atol=1e-5)
    assert np.mean(np.array(sampled) - policy) > 0.1  # of fewer tokens, each is likelier


@pytest.mark.extended
def test_a_request_that_is_cancelled_makes_room(model):
    service = GenerationService(model, slots=SLOTS)
    endless = Request((1, 2, 3), 120)
    answers = [Answer(service, dataclasses.replace(endless, seed=i)) for i in range(4)]
    while not answers[0].pieces:
        time.sleep(0.01)
    for answer in (answers[0], answers[3]):  # one that runs, one that waits
        answer.ticket.cancel()
        assert answer.whole()[2] == "cancelled"
    for answer in answers[1:3]:
        tokens, _, finish = answer.whole()
        assert (len(tokens), finish) == (120, "length")
    service.close(0)


@pytest.mark.extended
def test_several_answers_to_a_prompt_read_it_once(model):
    """The other tests of what is kept of prompts are in test_rollout_prefixes."""
    service = GenerationService(model, slots=SLOTS)
    prompt = tuple(random.Random(3).choices(range(64), k=70))
    answers = [Answer(service, Request(prompt, 8, choice=i)) for i in range(3)]
    assert [answer.whole()[2] for answer in answers] == ["length"] * 3
    assert sorted(answer.ticket.cached_tokens for answer in answers) == [0] + [64] * 2
    service.close(0)


def test_one_that_is_cancelled_at_any_moment_is_told(service, monkeypatch):
    class Later(RequestHandle):
        """Cancelled between the second look of the engine's thread at it and the third."""

        looks = 0

        @property
        def cancelled(self):
            self.looks += 1
            return self.looks > 2

        @cancelled.setter
        def cancelled(self, value):
            pass

    monkeypatch.setattr("hjax.rollout.service.RequestHandle", Later)
    assert Answer(service, Request((1, 2, 3), 240)).whole()[2] == "cancelled"


def test_a_listener_that_fails_is_dropped_and_logged_and_no_other(service, caplog):
    def fails(piece: ResponseChunk):
        raise ValueError("gone")

    service.submit(Request((1,), 100), fails)
    assert Answer(service, Request((5, 6), 20)).whole()[2] == "length"
    until = time.monotonic() + SECONDS
    while service.stats()["running"]:
        assert time.monotonic() < until
        time.sleep(0.01)
    [record] = [r for r in caplog.records if "listener failed" in r.message]
    assert "gone" in str(record.exc_info[1])


@pytest.mark.parametrize(
    "request_, message",
    [
        (Request((), 5), "prompt is empty"),
        (Request((64,), 5), "token 64 is outside the vocabulary, 0 to 63"),
        (Request((1,), 0), "max_tokens=0: 1 or more"),
        (Request((1,) * 200, 57), "prompt of 200 and max_tokens=57 exceed the 256 tokens"),
        (Request((1,), 5, seed=2**32), "seeds are 0 to"),
        (Request((1,), 5, SamplingParams(bad=(99,))), "99"),
    ],
)
def test_what_can_never_be_answered_is_refused(request_, message, service):
    with pytest.raises(ConfigError, match=message):
        service.submit(request_, lambda piece: None)


def test_a_full_queue_and_a_closed_service_refuse(model):
    service = GenerationService(model, slots=SLOTS, max_queue=1)
    answers = []
    for seed in range(SLOTS):
        answers.append(Answer(service, Request((1,), 250, seed=seed)))
        while not answers[-1].pieces:
            time.sleep(0.01)
    answers.append(Answer(service, Request((1,), 250, seed=SLOTS)))
    with pytest.raises(QueueFull, match="1 requests wait"):
        service.submit(Request((1,), 5), lambda piece: None)
    service.close(0)
    assert [answer.whole()[2] for answer in answers] == ["cancelled"] * (SLOTS + 1)
    with pytest.raises(RunError, match="closing"):
        service.submit(Request((1,), 5), lambda piece: None)


def test_closing_lets_those_end_that_are_there(model):
    service = GenerationService(model, slots=SLOTS)
    answers = [Answer(service, Request((i,), 40)) for i in range(5)]
    service.close(SECONDS)
    assert [answer.whole()[2] for answer in answers] == ["length"] * 5


@pytest.mark.extended
def test_an_engine_that_fails_tells_everybody(model, monkeypatch):
    service = GenerationService(model, slots=1)

    def broken(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(model.engine, "decode", broken)
    answers = [Answer(service, Request((i,), 40)) for i in range(3)]
    assert {answer.whole()[2] for answer in answers} == {"error: no room"}
    with pytest.raises(RunError, match="the engine failed: no room"):
        service.submit(Request((1,), 5), lambda piece: None)
    service.close()


@pytest.mark.parametrize("limit, sizes, options", [
    (96, None, {}),
    pytest.param(96, None, {"prefix_tokens": 0}, marks=pytest.mark.slow),
    pytest.param(96, None, {"lookup": 3}, marks=pytest.mark.slow),
    pytest.param(96, {"data": 4, "tensor": 2}, {}, marks=pytest.mark.slow),
    pytest.param(1100, None, {}, marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.extended
def test_after_the_warm_up_nothing_is_compiled_whatever_comes(limit, sizes, options):
    config = dataclasses.replace(CONFIG, max_length=limit)
    layout = make_layouts(jax.devices()[:1]).generate
    model = LanguageModel(config, decoder_network(config).create(1, layout))
    service = GenerationService(Spread(model, sizes) if sizes else model, slots=4, **options)
    draw, compiled, told = random.Random(5), [], []

    def heard(name, *_, **__):
        if name == "/jax/core/compile/backend_compile_duration":
            compiled.append(name)

    try:
        service.warm_up(told.append)
        assert "long prompts" in told or "prefix_tokens" in options or sizes
        jax.monitoring.register_event_duration_secs_listener(heard)
        requests = []
        for i in range(24):
            prompt = tuple(draw.choices(range(64), k=draw.randint(1, limit - 2)))
            begun = draw.choice(requests).prompt if i % 3 == 2 else ()
            prompt = (*begun, *prompt)[: limit - 2]
            asked = any_kind(draw)
            most = draw.randint(1, limit - len(prompt))
            more = {"scored": i % 4 == 1, "options": dataclasses.replace(asked.options, top=i % 3)}
            requests.append(dataclasses.replace(asked, prompt=prompt, max_tokens=most, **more))
        cancelled = Answer(service, requests[0])
        cancelled.ticket.cancel()
        cancelled.ended.wait(SECONDS)
        for some in (requests[:1], requests[1:4], requests[4:]):  # alone, few, many
            for answer in [Answer(service, request) for request in some]:
                answer.whole()
        assert not compiled
        with pytest.raises(RunError, match="comes before the first request"):
            service.warm_up()
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)
        service.close(0)
