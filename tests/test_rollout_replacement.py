"""Weights that are replaced while requests come: each answer is of one version of them."""

import contextlib
import random
import threading
import time

import jax
import numpy as np
import pytest

from hjax.errors import ConfigError, RunError
from hjax.kernels import decode
from hjax.models.append_attention import BLOCK
from hjax.models.model_config import ModelConfig
from hjax.models.parameters import decoder_network
from hjax.rollout import waiting_requests
from hjax.rollout.language_model import LanguageModel
from hjax.rollout.requests import Request
from hjax.rollout.sampling_params import SamplingParams
from hjax.rollout.service import GenerationService
from hjax.sharding.layout import make_layouts

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=16, mlp_size=24, layers=2, heads=4, kv_heads=2, head_dim=8,
    max_length=256,
)  # fmt: skip
SECONDS = 120
TOKENS = 40
LONG = tuple(random.Random(1).choices(range(64), k=10 * BLOCK))
# It goes on otherwise where LONG's first chunk of two blocks ends.
TWIN = (*LONG[: 2 * BLOCK], *random.Random(2).choices(range(64), k=2 * BLOCK))
PROMPTS = [LONG, TWIN, (1, 2, 3), (4, 5)]


@pytest.fixture(scope="module")
def weights():
    """By their seed."""
    layout = make_layouts(jax.devices()[:1]).generate
    return {seed: decoder_network(CONFIG).create(seed, layout) for seed in (1, 2)}


@pytest.fixture(scope="module")
def greedy(weights):
    """What each weights answer to each prompt, in one program for all tokens, without a service."""
    model, found = LanguageModel(CONFIG, weights[1]), {}
    for seed in weights:
        model.params = weights[seed]
        answers = model.generate(PROMPTS, TOKENS, 0)
        found |= {(seed, p): answer.tokens for p, answer in zip(PROMPTS, answers, strict=True)}
    assert all(found[1, prompt] != found[2, prompt] for prompt in PROMPTS)
    return found


@pytest.fixture
def model(weights):
    return LanguageModel(CONFIG, weights[1])


@pytest.fixture
def service(model):
    made = GenerationService(model, slots=3)
    yield made
    made.close(0)


class Asked:
    """A request, and what is heard of it."""

    def __init__(self, service, prompt):
        self.tokens, self.finish = [], ""
        self.begun, self.ended = threading.Event(), threading.Event()
        options = SamplingParams(temperature=0)
        self.ticket = service.submit(Request(prompt, TOKENS, options), self._hear)

    def _hear(self, piece):
        self.tokens += piece.tokens
        self.finish = piece.finish
        self.begun.set()
        if piece.finish:
            self.ended.set()

    def whole(self):
        assert self.ended.wait(SECONDS), "no end"
        assert self.finish == "length"
        return self.tokens


class Gate:
    """Stands before the engine's decoding: so many dispatches pass as are let."""

    def __init__(self, monkeypatch, engine):
        self._passes = threading.Semaphore(0)
        self.open, self.came, self._lets = False, 0, 0
        decode = engine.decode

        def gated(*arguments):
            self.came += 1
            assert self.open or self._passes.acquire(timeout=SECONDS)
            return decode(*arguments)

        monkeypatch.setattr(engine, "decode", gated)

    def let(self, count=1):
        """Returns when the next dispatch waits."""
        self._lets += count
        self._passes.release(count)
        until(lambda: self.came > self._lets)

    def lift(self):
        self.open = True
        self._passes.release()


@contextlib.contextmanager
def replacing(service, *given):
    """While another thread replaces the weights; gives the list in which its error will be."""
    errors = []

    def run():
        try:
            service.replace(*given)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: service._replacement is not None or not thread.is_alive())
    yield errors
    thread.join(SECONDS)
    assert not thread.is_alive()


def until(true):
    late = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < late, "it never became true"
        time.sleep(0.002)


@pytest.mark.extended
def test_what_was_kept_of_the_old_weights_is_forgotten_and_nothing_compiled(
    service, weights, greedy
):
    def ask_twice():
        for known in (0, 3 * BLOCK):  # all but the last block, of which a token is to be read
            asked = Asked(service, TWIN)
            yield asked.whole()
            assert asked.ticket.cached_tokens == known

    def programs():
        engine, prefixes = service._engine, service._batcher.prefixes
        of_engine = engine._empty, engine._prefill, engine._first, engine._insert_kv, engine._decode
        others = prefixes._store, engine.chunked_prefill._prefill
        return [program._cache_size() for program in (*of_engine, *others)]

    assert list(ask_twice()) == [greedy[1, TWIN]] * 2
    before = programs()
    service.replace(jax.tree.map(np.asarray, weights[2]))
    assert service.stats()["kept_tokens"] == 0
    assert list(ask_twice()) == [greedy[2, TWIN]] * 2
    assert programs() == before and before[-3] > 0


@pytest.mark.extended
def test_who_runs_ends_first_and_who_waits_or_is_half_read_begins_anew(
    model, service, weights, greedy, monkeypatch
):
    monkeypatch.setattr(waiting_requests, "PREFILL_CHUNK", 2 * BLOCK)
    gate = Gate(monkeypatch, model.engine)
    runs = Asked(service, (1, 2, 3))
    assert runs.begun.wait(SECONDS)
    half = Asked(service, LONG)
    gate.let(2)
    twins = [Asked(service, TWIN) for _ in range(2)]
    gate.let()
    # Of the twins one runs; the other waits for what it reads, and holds what is known of it.
    assert half.ticket.prefilled_tokens > 0 and not half.begun.is_set()
    assert twins[0].begun.is_set() and not twins[1].begun.is_set()
    assert twins[1].ticket.cached_prefix.tokens == 2 * BLOCK
    with replacing(service, weights[2]):
        late = Asked(service, (4, 5))
        gate.lift()
        assert runs.whole() == greedy[1, (1, 2, 3)] and twins[0].whole() == greedy[1, TWIN]
        assert half.whole() == greedy[2, LONG] and twins[1].whole() == greedy[2, TWIN]
        assert late.whole() == greedy[2, (4, 5)]
    # It was read again from its first token on: all but the last chunk, which enters with it.
    assert (half.ticket.cached_tokens, half.ticket.prefilled_tokens) == (0, len(LONG) - 2 * BLOCK)
    [tree] = service._batcher.prefixes._trees
    assert not any(block.ref_count for block in tree._blocks.values())


@pytest.mark.parametrize(
    "form", ["", pytest.param(decode.GPU_INTERPRETED, marks=pytest.mark.slow)]
)
@pytest.mark.extended
def test_several_devices_answer_as_one(form, weights, greedy, monkeypatch):
    tensor = 4  # more than key-value heads
    if form:
        monkeypatch.setattr(decode, "choose_form", lambda *_: form)
    service = GenerationService(LanguageModel(CONFIG, weights[1], tensor=tensor), slots=2)
    try:
        for seed in weights:
            service.replace(weights[seed])
            for known in (0, 3 * BLOCK):
                asked = Asked(service, TWIN)
                assert asked.whole() == greedy[seed, TWIN]
                assert asked.ticket.cached_tokens == known
            params = service._model.params
            layers = [params["layers"]] if isinstance(params, dict) else params.layers
            parts = [layer["q"].addressable_shards for layer in layers]
            sizes = np.sum([[part.data.size for part in each] for each in parts], axis=0)
            assert sizes.tolist() == [2 * 16 * 4 * 8 // tensor] * tensor
    finally:
        service.close(0)


@pytest.mark.extended
def test_other_names_shapes_and_dtypes_are_refused(model, service, weights, greedy):
    new, norm = weights[2], weights[2]["final_norm"]
    cases = [
        (jax.tree.map(lambda x: x[:1], new), r"embedding of the new weights is float32\[1, 16\], "
         r"of the current ones float32\[64, 16\]"),
        ({"embedding": new["embedding"], "layers": new["layers"]}, "final_norm .* is nothing"),
        (new | {"more": norm}, r"more of .* is float32\[16\], of the current ones nothing"),
        (new | {"final_norm": norm.astype("bfloat16")}, r"final_norm .* is bfloat16\[16\]"),
        (new | {"final_norm": 3}, "final_norm of the new weights is a int"),
    ]  # fmt: skip
    for params, line in cases:
        with pytest.raises(ConfigError, match=line) as caught:
            service.replace(params)
        assert "\n" not in str(caught.value)
    assert model.params["final_norm"] is weights[1]["final_norm"]
    assert Asked(service, TWIN).whole() == greedy[1, TWIN]


@pytest.mark.extended
def test_the_old_weights_go_on_where_requests_do_not_end_in_time_or_it_closes(
    model, service, weights, greedy, monkeypatch
):
    gate = Gate(monkeypatch, model.engine)
    runs = Asked(service, (1, 2, 3))
    assert runs.begun.wait(SECONDS)
    with pytest.raises(RunError, match="did not end within 0.01 s; the old weights go on"):
        service.replace(weights[2], seconds=0.01)
    with replacing(service, weights[2]) as errors:
        waits = Asked(service, TWIN)
        with pytest.raises(RunError, match="others are replacing the weights"):
            service.replace(weights[2])
        closing = threading.Thread(target=service.close, args=(SECONDS,))
        closing.start()
        until(lambda: errors)
        gate.lift()
        closing.join()
    assert str(errors[0]) == "the service is closing and takes no weights"
    assert runs.whole() == greedy[1, (1, 2, 3)] and waits.whole() == greedy[1, TWIN]
    with pytest.raises(RunError, match="the service is closing and takes no weights"):
        service.replace(weights[2])


@pytest.mark.extended
def test_an_engine_that_fails_tells_who_replaces_its_weights(model, service, weights, monkeypatch):
    begun, failing = threading.Event(), threading.Event()

    def fails(*_):
        begun.set()
        assert failing.wait(SECONDS)
        raise MemoryError("no room")

    monkeypatch.setattr(model.engine, "decode", fails)
    Asked(service, (1, 2, 3))
    assert begun.wait(SECONDS)  # before that nobody runs, and weights are taken at once
    with replacing(service, weights[2]) as errors:
        failing.set()
    assert [str(error) for error in errors] == ["the engine failed: no room"]
