"""Who has which slot when, on an engine of numpy: each sequence draws what it would alone.

The engine here draws a token by a sequence's number and its position, and looks whether slots that
are given are free, and whether blocks hold what is said to be known."""

import dataclasses
import hashlib
import random
import threading
import types

import numpy as np
import pytest

from hjax.models.append_attention import BLOCK
from hjax.rollout import batcher, prefix_sharing, scheduler, waiting_requests
from hjax.rollout.prefix_cache import PrefixCache
from hjax.rollout.requests import Request
from hjax.rollout.rollout_job import GenerationConfig, ResumedResponses, RolloutJob
from hjax.rollout.sampling_params import SamplingParams
from hjax.rollout.scheduler import RolloutScheduler
from hjax.rollout.service import GenerationService
from hjax.rollout.slot_state import DecodedTokens

STOP = (0, 5)
NOWHERE = 10**6  # blocks beyond it are none


def token(sequence, position):
    """One in 7 or in 30 ends a response."""
    draw = hashlib.md5(repr((sequence, position)).encode()).digest()
    return int.from_bytes(draw[:4], "big") % (14 if sequence % 3 else 60)


def alone(sequence, limit):
    """Its whole response."""
    tokens = []
    while len(tokens) < limit and (not tokens or tokens[-1] not in STOP):
        tokens.append(token(sequence, len(tokens)))
    return tokens


@dataclasses.dataclass
class Rows:
    """A state: each row's sequence, tokens drawn, limit, whether it is done, and its prompt and
    response, [parts, rows]."""

    sequence: np.ndarray
    drawn: np.ndarray
    limit: np.ndarray
    done: np.ndarray
    text: np.ndarray


class Engine:
    """As ``hjax.rollout.engine.Engine``; ``number`` says whose prompt and key an entry is."""

    def __init__(self, parts, uses_kernel=False, draft_tokens=0, number=lambda _, key: int(key[0])):
        self.parts, self.uses_kernel, self.draft_tokens = parts, uses_kernel, draft_tokens
        self.row_columns = uses_kernel or draft_tokens > 0
        self.spare_columns, self.packs_prompts = 0, True
        mesh = types.SimpleNamespace(size=2)
        ways = {"shard_count": lambda name: 1, "replicated": None}
        self.layout = types.SimpleNamespace(mesh=mesh, **ways)
        config = types.SimpleNamespace(rope_depends_on_length=False, vocab_size=64)
        self.network = types.SimpleNamespace(config=config)
        self.block_sharding, self.number = None, number
        self.chunked_prefill = types.SimpleNamespace(empty=lambda count: {}, prefill=self.read)
        self.moves = self.reads = 0

    def empty(self, size, column=0):
        shape = self.parts, size.rows // self.parts
        zeros = np.zeros(shape, int)
        text = np.empty(shape, object)
        return Rows(zeros - 1, zeros.copy(), zeros.copy(), np.ones(shape, bool), text)

    def read(self, params, blocks, tokens, mask, known, where):
        self.reads += 1
        new = {
            (part, int(number)): row[i * BLOCK : (i + 1) * BLOCK].tolist()
            for part, (row, numbers) in enumerate(zip(tokens, where, strict=True))
            for i, number in enumerate(numbers)
            if number < NOWHERE
        }
        return blocks | new

    def admit(self, sampling, params, state, new, blocks=None):
        rows = new.rows.reshape(self.parts, -1)
        each, samples = rows.shape[1], new.rows.size // new.groups.size
        drawn, done = np.zeros((new.rows.size, 1), np.int32), np.zeros(new.rows.size, bool)
        for at in range(new.rows.size):
            part, row, group = at // each, int(new.rows[at]), at // samples
            if row >= state.done.shape[1]:
                continue
            assert state.done[part, row], "somebody has it"
            if new.cached is None:
                prompt = new.prompts[group][new.mask[group]].tolist()
            else:
                prompt = new.cached.tokens[group][new.cached.mask[group]].tolist()
                numbers = new.cached.blocks[group][: new.cached.count[group] // BLOCK]
                known = [t for number in numbers for t in blocks[part, int(number)]]
                assert known == prompt[: new.cached.count[group]]
            before = 0 if new.resumed is None else int(new.resumed.count[at])
            sequence = self.number(prompt, new.keys[at])
            first, limit = token(sequence, before), int(new.limit[at])
            drawn[at], done[at] = first, first in STOP or before + 1 >= limit
            state.sequence[part, row], state.drawn[part, row] = sequence, before + 1
            state.limit[part, row], state.done[part, row] = limit, done[at]
            state.text[part, row] = [*prompt, first]
        return state, self.told(drawn, np.ones(drawn.shape, bool), done, 1)

    def decode(self, sampling, params, state, steps, most, bitmask=None, enough_live=0, new=None):
        assert steps > 0 and not state.done.all()
        tokens = np.zeros((state.done.size, most), np.int32)
        mask, taken = np.zeros(tokens.shape, bool), 0
        while taken < steps and (~state.done).sum(axis=1).max() > enough_live:
            for part, row in zip(*np.nonzero(~state.done), strict=True):
                at = part * state.done.shape[1] + row
                drawn = token(int(state.sequence[part, row]), int(state.drawn[part, row]))
                tokens[at, taken], mask[at, taken] = drawn, True
                state.drawn[part, row] += 1
                state.text[part, row].append(drawn)
                whole = state.drawn[part, row] >= state.limit[part, row]
                state.done[part, row] = drawn in STOP or whole
            taken += 1
        return state, self.told(tokens, mask, state.done.ravel().copy(), taken)

    def told(self, tokens, mask, done, steps):
        logprobs = {name: -tokens.astype(np.float32) for name in ("logprobs", "policy_logprobs")}
        return DecodedTokens(tokens, mask, logprobs, done, steps)

    def share_prompts(self, state, members, place):
        return state

    def stop_rows(self, state, rows):
        state.done |= rows.reshape(state.done.shape)
        return state

    def move(self, state, rows=None, groups=None, length=0, first=0):
        self.moves += 1
        if rows is None:
            return state
        index, old = rows.reshape(self.parts, -1), state.done.shape[1]
        made = Rows(*(np.take_along_axis(x, np.minimum(index, old - 1), 1)
                      for x in vars(state).values()))  # fmt: skip
        made.done |= index >= old
        return made


@pytest.fixture(autouse=True)
def small(monkeypatch):
    sizes = {"SHORT_PROMPT": 32, "PREFILL_CHUNK": 64, "PROMPT_COLUMNS": (32, 64),
             "MAX_PREFILL_TOKENS": 400, "MIN_SAVED_TOKENS": 64}  # fmt: skip
    for name, value in sizes.items():
        monkeypatch.setattr(prefix_sharing, name, value)
    monkeypatch.setattr(scheduler, "PREFILL_CHUNK", 64)


def drawn_prompts(draw, count):
    """Most begin alike."""
    length = int(draw.choice([7, 60, 150, 500]))
    common = draw.integers(1, 64, length // 2)
    tokens, mask = np.zeros((count, length), np.int32), np.zeros((count, length), bool)
    for row, there in zip(tokens, mask, strict=True):
        size = int(draw.integers(1, length + 1))
        text = draw.integers(1, 64, length)
        if draw.random() < 0.7:
            text = np.concatenate([common, text])
        row[-size:], there[-size:] = text[:size], True
    return tokens, mask


@pytest.mark.parametrize("seed", range(40))
def test_each_sequence_draws_what_it_does_alone(seed):
    draw = np.random.default_rng(seed)
    parts, samples = int(draw.choice([1, 1, 2, 4])), int(draw.integers(1, 5))
    prompts = drawn_prompts(draw, parts * int(draw.integers(1, 7)))
    uses_kernel = bool(draw.random() < 0.2)
    engine = Engine(parts, uses_kernel, 0 if uses_kernel else int(draw.choice([0, 0, 2])))
    surplus = int(samples > 1 and draw.random() < 0.3)
    config = GenerationConfig(
        int(draw.choice([20, 90, 200])), samples - surplus, SamplingParams(stop=STOP),
        slots=int(draw.choice([0, 4, 8, 16])), extra_samples=surplus,
    )  # fmt: skip
    count, limit = len(prompts[0]), config.max_new_tokens
    keys = np.stack([np.arange(count * samples), np.zeros(count * samples)], 1).astype(np.uint32)
    cuts = [limit // 3] if draw.random() < 0.2 and not surplus else []
    heard = {}

    def hear(prompt, responses):
        assert prompt not in heard
        heard[prompt] = responses

    begun = None
    for end in (*cuts, None):
        work = RolloutJob(*prompts, keys, dataclasses.replace(config, pause_after=end), begun)
        schedule = RolloutScheduler(engine, work, on_prompt_done=hear)
        made = schedule.run(None)
        last = made["responses"][
            np.arange(len(made["responses"])), made["response_mask"].sum(axis=1) - 1
        ]
        begun = ResumedResponses(end or limit, np.isin(last, STOP), made)
    expected = []
    for prompt in range(count):
        each = [alone(prompt * samples + i, limit) for i in range(samples)]
        shortest = sorted(range(samples), key=lambda i: (len(each[i]), i))[: config.samples]
        expected += [each[i] for i in sorted(shortest)]
    pairs = zip(made["responses"], made["response_mask"], strict=True)
    assert [row[mask].tolist() for row, mask in pairs] == expected
    np.testing.assert_array_equal(made["logprobs"], -made["responses"])
    n = config.samples
    assert heard == {p: expected[p * n : (p + 1) * n] for p in range(count)}
    lengths = prompts[1].sum(axis=1)
    assert (schedule.sharing.cached_tokens < lengths).all()
    assert schedule.table.max_live_rows == 0


@pytest.mark.parametrize("seed", range(10))
def test_a_text_s_end_is_a_response_s(seed):
    """By hand: a text ends with the first token whose sum with its sequence's number is 3 of 11."""
    draw = np.random.default_rng(seed)
    prompts, samples, limit = drawn_prompts(draw, 8), 2, 90
    keys = np.stack([np.arange(16), np.zeros(16)], 1).astype(np.uint32)

    def ends(number, tokens):
        return next((i + 1 for i, t in enumerate(tokens) if (number + t) % 11 == 3), None)

    config = GenerationConfig(limit, samples, SamplingParams(stop=STOP), slots=6)
    made = RolloutScheduler(Engine(1), RolloutJob(*prompts, keys, config), ends).run(None)
    for number, (row, mask) in enumerate(zip(made["responses"], made["response_mask"])):
        whole = alone(number, limit)
        assert row[mask].tolist() == whole[: ends(number, whole)]


def number_of(prompt, key=None):
    return int(hashlib.md5(repr(list(prompt)).encode()).hexdigest()[:5], 16)


def serving(monkeypatch, engine, **options):
    monkeypatch.setattr(
        batcher.ContinuousBatcher, "_make_allow_all",
        lambda self, rows: np.zeros((rows, 2), np.uint32),
    )  # fmt: skip
    config = types.SimpleNamespace(max_length=256, vocab_size=64)
    model = types.SimpleNamespace(
        config=config, params=None, tokenizer=None, engine_for=lambda draft_tokens: engine,
        place_params=lambda params: params,
    )  # fmt: skip
    return GenerationService(model, **options)


@pytest.mark.parametrize("chunk, parts", [(2 * BLOCK, 1), (512, 1), (2 * BLOCK, 3), (512, 2)])
def test_requests_find_what_earlier_ones_and_their_answers_left(chunk, parts, monkeypatch):
    """Six talks that begin with five blocks, of three turns."""

    def write(prefixes, state, tables):
        for table in tables:
            for part, pieces in enumerate(table):
                for row, first, where in pieces.T:
                    if where < prefixes.capacity // BLOCK:
                        block = state.text[part, row][first : first + BLOCK]
                        prefixes.blocks[part, int(where)] = block

    monkeypatch.setattr(PrefixCache, "_write", write)
    monkeypatch.setattr(waiting_requests, "PREFILL_CHUNK", chunk)
    engine, draw = Engine(parts, number=number_of), random.Random(1)
    service = serving(monkeypatch, engine, slots=4 if parts == 1 else 6 * parts, prefix_tokens=4096)
    system = draw.choices(range(1, 64), k=5 * BLOCK)
    talks = [(*system, *draw.choices(range(1, 64), k=draw.randint(1, 40))) for _ in range(6)]
    before = [0] * 6
    for turn in range(3):
        heard, tickets = [threading.Event() for _ in talks], []
        for talk, ended in zip(talks, heard, strict=True):

            def hear(piece, ended=ended):
                if piece.finish:
                    ended.set()

            tickets.append(service.submit(Request(talk, 20, SamplingParams(stop=STOP)), hear))
        assert all(ended.wait(60) for ended in heard)
        cached = [ticket.cached_tokens for ticket in tickets]
        for talk, ticket in zip(talks, tickets, strict=True):
            assert ticket.tokens == alone(number_of(talk), 20)
        if not turn:
            # The first of each part that is used reads it, the others find it.
            first = sum(n < 5 * BLOCK for n in cached)
            assert 1 <= first <= parts, cached
        assert (np.array(cached) >= before).all()
        # Of what was said all but the last token drawn is kept.
        before = [(len(talk) + len(t.tokens) - 1) // BLOCK * BLOCK
                  for talk, t in zip(talks, tickets, strict=True)]  # fmt: skip
        talks = [(*talk, *t.tokens, *draw.choices(range(1, 64), k=draw.randint(1, 20)))
                 for talk, t in zip(talks, tickets, strict=True)]  # fmt: skip
    assert (engine.reads > 0) == (chunk < 512)
    trees = service._batcher.prefixes._trees
    assert not any(block.ref_count for tree in trees for block in tree._blocks.values())
    service.close(1)


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("way", [(False, 0), (False, 2), (True, 0)], ids=str)
def test_requests_are_answered_as_alone_whoever_comes_and_goes(parts, way, monkeypatch):
    engine, draw = Engine(parts, *way, number=number_of), random.Random(parts)
    service = serving(monkeypatch, engine, slots=8, prefix_tokens=0, lookup=way[1])
    heard, ended = {}, {}
    for i in range(60):
        prompt = tuple(draw.choices(range(1, 64), k=draw.randint(1, 120)))
        request = Request(prompt, draw.randint(1, 100), SamplingParams(stop=STOP), seed=i)
        heard[request], ended[request] = [], threading.Event()

        def hear(piece, request=request):
            heard[request].append(piece)
            if piece.finish:
                ended[request].set()

        ticket = service.submit(request, hear)
        if i % 9 == 0:
            ticket.cancel()
    service.replace(None)
    assert all(end.wait(60) for end in ended.values())
    for request, pieces in heard.items():
        tokens = [t for piece in pieces for t in piece.tokens]
        expected = alone(number_of(request.prompt), request.max_tokens)
        if pieces[-1].finish == "cancelled":
            assert tokens == expected[: len(tokens)]
        else:
            assert tokens == expected
            assert pieces[-1].finish == ("stop" if expected[-1] in STOP else "length")
    stats = service.stats()
    assert stats["running"] == stats["waiting"] == 0
    service.close(1)
