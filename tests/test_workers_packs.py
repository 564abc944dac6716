"""Which rows share a pack: against brute force, by what each place says, and by how few shapes."""

import itertools

import numpy as np
import pytest

from hjax.workers.packer import PaddedBatch, choose_shape
from hjax.workers.packs import fill_shape, first_fit, make_packing, round_up


def fewest(sizes, capacity):
    """Bins of the best packing, by trying all."""
    if not sizes:
        return 0
    for count in range(1, len(sizes) + 1):
        for chosen in itertools.product(range(count), repeat=len(sizes)):
            loads = [0] * count
            for item, where in enumerate(chosen):
                loads[where] += sizes[item]
            if max(loads) <= capacity:
                return count
    raise AssertionError("an item larger than a bin")


def sizes_packed(sizes, capacity):
    """The packs of rows of so many places without shared prompts, by their numbers."""
    packs = first_fit(np.ones(len(sizes), int), np.array(sizes), 1, capacity)
    assert all(sum(piece.places for piece in pack) <= capacity for pack in packs)
    return [[piece.rows[0] for piece in pack] for pack in packs]


def test_first_fit_is_within_its_bound_of_the_best():
    """Dosa's bound, and the best itself nearly always."""
    rng = np.random.default_rng(0)
    best = 0
    for _ in range(60):
        sizes = rng.integers(1, 11, rng.integers(1, 7)).tolist()
        bins = sizes_packed(sizes, 10)
        assert sorted(itertools.chain(*bins)) == list(range(len(sizes)))
        least = fewest(sizes, 10)
        assert least <= len(bins) <= 11 / 9 * least + 6 / 9
        best += len(bins) == least
    assert best >= 57


def test_first_fit_by_hand():
    # 7 | 5 | 5 | 4 | 3 | 2 | 2 | 1 into 10: 7 3, 5 5, 4 2 2 1
    assert sizes_packed([3, 7, 5, 2, 4, 5, 1, 2], 10) == [[1, 0], [2, 5], [4, 3, 7, 6]]


def test_a_group_longer_than_a_pack_takes_its_prompt_into_several():
    """Four responses of 5, 4, 3, 1 tokens to a prompt of 4, in packs of 9: 4 + 4, 4 + 3 + 2 + 0."""
    packs = first_fit(np.full(4, 4), np.array([5, 4, 3, 1]), 4, 9)
    assert packs == [[((0, 3), 8)], [((1, 2), 9)]]


def test_a_row_goes_where_its_prompt_stands():
    """Packs of 20, prompts of 4. The second group's longest opens the first pack (4 + 10), the
    first's the second (4 + 9); what follows
    stays with its prompt."""
    prompts, responses = np.full(6, 4), np.array([10, 4, 3, 11, 3, 1])
    packs = first_fit(prompts, responses, 3, 20)
    assert packs == [[((3, 4, 5), 16)], [((0, 1, 2), 18)]]


def test_a_unit_is_in_one_pack():
    """Pairs of 3 + 2, 4 + 1 and 3 + 1 places into 9: the first and the last fill one, as rows of
    5, 5 and 4 would."""
    packs = first_fit(np.ones(6, int), np.array([3, 2, 4, 1, 3, 1]), 1, 9, 2)
    assert [[piece.rows for piece in pack] for pack in packs] == [
        [(0,), (1,), (4,), (5,)],
        [(2,), (3,)],
    ]


def test_rows_without_a_response_are_in_no_pack():
    assert first_fit(np.full(4, 3), np.zeros(4, int), 2, 8) == []


def test_what_does_not_fit_is_refused():
    with pytest.raises(AssertionError, match="5 \\+ 4 places in packs of 8"):
        first_fit(np.array([5]), np.array([5]), 1, 8)
    with pytest.raises(AssertionError, match="7 \\+ 5 places in packs of 11"):
        first_fit(np.array([3, 4]), np.array([3, 4]), 1, 11, 2)
    with pytest.raises(AssertionError, match="units of 2 rows, 3 of which share a prompt"):
        first_fit(np.full(6, 3), np.full(6, 3), 3, 20, 2)
    with pytest.raises(AssertionError, match="0 \\+ 2 places"):
        first_fit(np.array([0]), np.array([3]), 1, 8)


def batch_of(rng, rows, share, widths):
    """Random lengths, and a different token in every real place."""
    prompts = np.repeat(rng.integers(1, widths[0] + 1, rows // share), share)
    responses = rng.integers(0, widths[1] + 1, rows)
    own = 1000 * (1 + np.arange(rows))[:, None]
    of_group = 1000 * (1 + np.arange(rows) // share * share)[:, None]
    mask = np.arange(widths[0]) >= widths[0] - prompts[:, None]
    first = np.where(mask, of_group + np.cumsum(mask, 1) - 1, 0)
    mask = np.arange(widths[1]) < responses[:, None]
    second = np.where(mask, own + prompts[:, None] + np.arange(widths[1]), 0)
    return prompts, responses, np.concatenate([first, second], axis=1)


CASES = [  # rows, share, capacity, parts, per_pass, unit
    (12, 1, 16, 1, 0, 1),
    (12, 3, 40, 1, 0, 1),
    (12, 3, 12, 1, 2, 1),
    (16, 4, 20, 2, 0, 1),
    (16, 4, 20, 2, 1, 1),
    (24, 2, 17, 3, 2, 1),
    (12, 1, 24, 1, 0, 2),
    (24, 1, 30, 3, 1, 2),
    (16, 4, 24, 2, 1, 2),
    (18, 3, 26, 2, 1, 3),
]


@pytest.mark.parametrize("rows, share, capacity, parts, per_pass, unit", CASES)
def test_every_token_finds_its_sequence(rows, share, capacity, parts, per_pass, unit):
    widths = (5, 7)
    rng = np.random.default_rng(rows + capacity)
    prompts, responses, tokens = batch_of(rng, rows, share, widths)
    packing = make_packing(prompts, responses, widths, share, capacity, parts, per_pass, unit)
    assert packing.source.shape[2] == capacity
    assert (packing.source.shape[1] == per_pass) if len(packing.order) > parts else True
    check_places(packing, prompts, responses, tokens, share, parts, unit)


@pytest.mark.parametrize(
    "rows, share, parts, unit", dict.fromkeys((c[0], c[1], c[3], c[5]) for c in CASES)
)
def test_every_token_finds_its_sequence_in_packs_of_one_shape(rows, share, parts, unit):
    """Also those that a limit of answers or rows keeps out of a pack with places left."""
    widths, shapes, limited = (5, 7), set(), 0
    rng = np.random.default_rng(rows)
    for _ in range(8):
        prompts, responses, tokens = batch_of(rng, rows, share, widths)
        shape = choose_shape(PaddedBatch(rows, (40, 56), 1, 1), parts, unit, least=1)
        shape = shape._replace(answers=8 * unit, slots=shape.height * 4 * unit)
        shape = shape._replace(capacity=14 * unit, passes=-(-rows // (unit * parts)))
        packing = fill_shape(prompts, responses, widths, share, shape, parts, unit)
        assert packing is not None
        check_places(packing, prompts, responses, tokens, share, parts, unit)
        computed = (packing.segments > 0).any((1, 2)).reshape(parts, -1)
        assert computed.any(0).sum() == packing.passes
        assert not computed[:, packing.passes :].any()
        shapes.add(tuple(x.shape for x in packing if x is not None))
        free = first_fit(prompts, responses, share, shape.capacity, unit)
        limited += len(free) < (packing.segments > 0).any(2).sum()
    assert len(shapes) == 1 and limited


def check_places(packing, prompts, responses, tokens, share, parts, unit):
    """Each token of a batch stands in a pack where it sees its own sequence."""
    rows, capacity, widths = len(prompts), packing.source.shape[2], (5, 7)
    cells, slots = packing.order.shape
    units = packing.order.reshape(-1, unit)
    together = units[units[:, 0] < rows]
    np.testing.assert_array_equal(together, together[:, :1] // unit * unit + np.arange(unit))
    assert cells % parts == 0
    assert sorted(packing.order[packing.order < rows].tolist()) == list(range(rows))
    empty = np.zeros((1, sum(widths)), int)
    found = 0
    for cell in range(cells):
        table = np.concatenate([tokens, empty])[packing.order[cell]].reshape(-1)
        table = np.append(table, 0)
        stand = table[packing.source[cell]]
        np.testing.assert_array_equal(stand > 0, packing.segments[cell] > 0)
        flat, positions = stand.reshape(-1), packing.positions[cell].reshape(-1)
        segments = packing.segments[cell].reshape(-1)
        np.testing.assert_array_equal(flat[flat > 0] % 1000, positions[flat > 0])
        for slot, row in enumerate(packing.order[cell]):
            count = responses[row] if row < rows else 0
            answers = packing.back[cell, slot]
            assert (answers[count:] == packing.states[cell].size).all()
            found += count
            for t, answer in enumerate(answers[:count]):
                place = packing.states[cell].reshape(-1)[answer]
                assert table[packing.targets[cell].reshape(-1)[answer]] == tokens[row, 5 + t]
                # The token before it, of its own or of its prompt.
                assert flat[place] % 1000 == prompts[row] + t - 1
                group = row // share * share
                assert flat[place] // 1000 == (1 + (row if t else group))
                # What it sees, by the rule of attention, is its sequence up to there.
                pack = slice(place // capacity * capacity, place + 1)
                seen = segments[pack] == segments[place]
                if packing.prompts is not None:
                    seen |= segments[pack] == packing.prompts[cell].reshape(-1)[place]
                whole = tokens[group if t == 0 else row, :5].tolist()
                whole = [x for x in whole if x] + tokens[row, 5 : 5 + t].tolist()
                assert flat[pack][seen].tolist() == whole
    assert found == responses.sum()


def test_packs_are_chosen_by_hand():
    """Eight rows of a prompt of 2 and up to 30, padded 8 x 32 = 256 places; a pack holds 32, a
    sequence of n response tokens n + 1. Packs of a third less: at most 5 of them."""
    padded = PaddedBatch(8, (2, 30), 1, 1)
    shape = choose_shape(padded, parts=1, least=1)
    assert (shape.passes, shape.height, shape.capacity) == (5, 1, 32)
    prompts = np.full(8, 2)

    def passes(responses):
        packing = fill_shape(prompts, np.array(responses), padded.widths, 1, shape, 1)
        return None if packing is None else int(packing.passes)

    assert passes([30, 15, 15, 15, 15, 15, 15, 15]) == 5  # 31 | 16 16 | 16 16 | 16 16 | 16
    assert passes([30, 16, 16, 16, 16, 16, 16, 16]) is None  # 31 and seven times 17
    assert passes([30, 1, 1, 1, 1, 1, 1, 1]) == 2
    assert passes([0] * 8) == 1
    # On two devices packs come in twos; a pass of at least 64 places holds two packs of a device.
    two = choose_shape(padded, parts=2, least=1)
    assert (two.passes, two.height) == (2, 1)
    wide = choose_shape(padded, parts=1, least=64)
    assert (wide.passes, wide.height) == (2, 2)
    assert fill_shape(prompts, np.full(8, 15), padded.widths, 1, wide, 1).passes == 2


def test_a_response_to_no_prompt_is_not_packed():
    padded = PaddedBatch(4, (3, 9), 1, 1)
    shape = choose_shape(padded, parts=1, least=1)
    prompts, responses = np.array([3, 0, 2, 1]), np.array([1, 1, 2, 1])
    assert fill_shape(prompts, responses, padded.widths, 1, shape, 1) is None
    assert fill_shape(prompts, responses * (prompts > 0), padded.widths, 1, shape, 1) is not None


def test_packs_are_dealt_out_evenly():
    rng = np.random.default_rng(3)
    responses = rng.integers(1, 60, 64)
    packing = make_packing(np.full(64, 4), responses, (4, 60), 1, 64, 4)
    filled = (packing.segments > 0).sum((1, 2))
    assert filled.max() - filled.min() <= 64
    assert filled.sum() == (responses + 3).sum()


def test_shapes_are_few():
    """Long-tailed lengths, drawn anew sixty times: a handful of programs."""
    rng = np.random.default_rng(4)
    shapes = set()
    for _ in range(60):
        responses = np.minimum(rng.geometric(1 / 40, 256), 256)
        packing = make_packing(np.full(256, 32), responses, (32, 256), 4, 512, 2)
        shapes.add(tuple(x.shape for x in packing if x is not None))
    assert len(shapes) <= 6
    assert [round_up(n) for n in (1, 7, 16, 17, 33, 100)] == [1, 7, 16, 18, 36, 104]
