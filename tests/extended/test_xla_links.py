"""Which wires collectives use and for how long, worked out by hand on small tori."""

import itertools

import pytest
from program_costs.limits import Limits, Torus
from program_costs.roofline import roofline

from hjax.xla.collectives import Collective


def torus(*sides, wraps=True):
    """A box of devices numbered row by row."""
    places = tuple(itertools.product(*map(range, sides)))
    return Torus(places, sides, (wraps,) * len(sides))


def shift(count, by):
    pairs = tuple((i, (i + by) % count) for i in range(count))
    return Collective("collective-permute", 8, pairs)


def gathered(*groups):
    return Collective("all-gather", 8, groups)


def test_a_step_round_a_ring_uses_each_link_of_one_way_once():
    ring = torus(4)
    ahead, passes = ring.way(shift(4, 1))
    # Half of what both ways bring.
    assert ahead == {((i,), 0, 1) for i in range(4)} and passes == 2
    back, passes = ring.way(shift(4, -1))
    assert back == {((i,), 0, -1) for i in range(4)} and passes == 2
    assert not ahead & back
    assert ring.way(shift(4, 2))[1] == 4  # two steps on, a link is passed by two


def test_on_a_line_the_last_one_goes_all_the_way_back():
    wires, passes = torus(4, wraps=False).way(shift(4, 1))
    ahead, back = {((i,), 0, 1) for i in range(3)}, {((i,), 0, -1) for i in (1, 2, 3)}
    assert wires == ahead | back and passes == 2


def test_round_a_square_each_device_has_a_link_of_each_axis():
    square = torus(2, 2, wraps=False)
    round_ = Collective("collective-permute", 8, ((0, 1), (1, 3), (3, 2), (2, 0)))
    ahead, passes = square.way(round_)
    assert ahead == {((0, 0), 1, 1), ((0, 1), 0, 1), ((1, 1), 1, -1), ((1, 0), 0, -1)}
    assert passes == 2
    other = Collective("collective-permute", 8, tuple((b, a) for a, b in round_.groups))
    assert not ahead & square.way(other)[0]


@pytest.mark.parametrize(
    ("sides", "wraps", "groups", "axes", "passes"),
    [
        ((4,), True, [(0, 1, 2, 3)], {0}, 1),
        ((4,), False, [(0, 1, 2, 3)], {0}, 2),  # the ends have one neighbour
        ((4,), True, [(0, 1), (2, 3)], {0}, 2),  # pairs of a ring
        ((2, 2), False, [(0, 1, 2, 3)], {0, 1}, 1),  # round the square
        ((2, 2), False, [(0, 1), (2, 3)], {1}, 2),
        ((2, 4), True, [(0, 1, 2, 3), (4, 5, 6, 7)], {1}, 1),
        ((2, 4), True, [(0, 4), (1, 5), (2, 6), (3, 7)], {0}, 2),
    ],
)
def test_a_collective_goes_round_where_its_axes_close(sides, wraps, groups, axes, passes):
    box = torus(*sides, wraps=wraps)
    wires, found = box.way(gathered(*groups))
    assert {axis for _, axis, _ in wires} == axes and found == passes
    assert len(wires) == 2 * len(box.places) * len(axes)


# A second multiplies 1000 times, and receives 10 bytes over both links of an axis.
def seconds(*lines, sides=(4,)):
    text = "HloModule hand, num_partitions=4\n\nENTRY %main () -> f32[] {\n"
    text += "".join(f"  {line}\n" for line in lines) + "}"
    limits = Limits({"bfloat16": 1000.0, "float32": 500.0}, 100.0, 10.0, torus=torus(*sides))
    return roofline(text, limits).seconds


PARTS = ["%x = f32[5]{0:S(1)} parameter(0)", "%a = bf16[10,10]{1,0:S(1)} parameter(1)"]
PRODUCT = "%y = bf16[10,10]{1,0:S(1)} dot(%a, %a), lhs_contracting_dims={1}"


def sent(name, pairs):
    start = (
        f"%{name} = (f32[5]{{0:S(1)}}, f32[5]{{0:S(1)}}, u32[], u32[]) "
        f"collective-permute-start(%x), channel_id=1, source_target_pairs={{{pairs}}}"
    )
    done = f"%{name}.there = f32[5]{{0:S(1)}} collective-permute-done(%{name})"
    return start, done


def test_transfers_over_different_links_run_at_the_same_time():
    ahead, back = "{0,1},{1,2},{2,3},{3,0}", "{1,0},{2,1},{3,2},{0,3}"
    one, one_there = sent("one", ahead)
    # 20 bytes over one link of an axis take 4 seconds, the product beside them 2.
    assert seconds(*PARTS, one, PRODUCT, one_there) == pytest.approx(4.0)
    for pairs, expected in ((back, 4.0), (ahead, 8.0)):
        other, other_there = sent("other", pairs)
        lines = *PARTS, one, other, PRODUCT, one_there, other_there
        assert seconds(*lines) == pytest.approx(expected)
    # Along another axis of a square, none that closes.
    along, across = "{0,1},{1,0},{2,3},{3,2}", "{0,2},{2,0},{1,3},{3,1}"
    one, one_there = sent("one", along)
    other, other_there = sent("other", across)
    lines = *PARTS, one, other, PRODUCT, one_there, other_there
    assert seconds(*lines, sides=(2, 2)) == pytest.approx(4.0)


def test_a_loop_s_idle_links_hide_what_runs_beside_it():
    """Two turns receive 20 bytes each ahead, waited for; 20 go back meanwhile."""
    back, there = sent("back", "{1,0},{2,1},{3,2},{0,3}")
    text = "\n".join(
        [
            "HloModule hand, num_partitions=4", "",
            "%test (t: (s32[])) -> pred[] {", "  ROOT %less = pred[] parameter(0)", "}", "",
            "%turn (t: (s32[])) -> (s32[]) {", "  %t = (s32[]) parameter(0)",
            "  %x = f32[5]{0:S(1)} constant({...})",
            "  %s = f32[5]{0:S(1)} collective-permute(%x), channel_id=2, "
            "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}",
            "  ROOT %r = (s32[]) tuple(%t)", "}", "",
            "ENTRY %main () -> f32[] {",
            "  %x = f32[5]{0:S(1)} parameter(0)", "  %t = (s32[]) parameter(1)",
            f"  {back}",
            "  %out = (s32[]) while(%t), condition=%test, body=%turn, "
            'backend_config={"known_trip_count":{"n":"2"}}',
            f"  {there}", "}",
        ]
    )  # fmt: skip
    limits = Limits({"bfloat16": 1000.0}, 100.0, 10.0, torus=torus(4))
    assert roofline(text, limits).seconds == pytest.approx(8.0)
    alone = Limits({"bfloat16": 1000.0}, 100.0, 10.0)  # not known where: one after another, at 10
    assert roofline(text, alone).seconds == pytest.approx(6.0)
