"""Copies in loops, of programs written by hand: what counts as one and what does not."""

import pytest
from program_costs.limits import Limits
from program_costs.loops import copies
from program_costs.roofline import roofline

from hjax.xla.hlo import parse

# Carried: a counter, weights of 4 layers and a cache of 2, both of a megabyte a layer.
CARRIED = "(s32[], bf16[4,512,1024]{2,1,0}, f32[2,64,4096]{2,1,0})"


def program(*turn, **computations):
    """A loop of 10 turns over these lines, which read %w and %c; other computations by name."""
    blocks = ["HloModule hand", ""]
    for name, (head, *lines) in computations.items():
        blocks += [f"%{name} ({head}) -> f32[] {{", *(f"  {line}" for line in lines), "}", ""]
    lines = [
        f"%p = {CARRIED} parameter(0)",
        "%n = s32[] get-tuple-element(%p), index=0",
        "%w = bf16[4,512,1024]{2,1,0} get-tuple-element(%p), index=1",
        "%c = f32[2,64,4096]{2,1,0} get-tuple-element(%p), index=2",
        "%one = s32[] constant(1)",
        "%next = s32[] add(%n, %one)",
        *turn,
        f"ROOT %back = {CARRIED} tuple(%next, %w, %c)",
    ]
    test = [
        f"%q = {CARRIED} parameter(0)",
        "%m = s32[] get-tuple-element(%q), index=0",
        "%ten = s32[] constant(10)",
        "ROOT %less = pred[] compare(%m, %ten), direction=LT",
    ]
    start = [
        "%zero = s32[] constant(0)",
        "%w0 = bf16[4,512,1024]{2,1,0} parameter(0)",
        "%c0 = f32[2,64,4096]{2,1,0} parameter(1)",
        f"%start = {CARRIED} tuple(%zero, %w0, %c0)",
        f"ROOT %end = {CARRIED} while(%start), condition=%test, body=%turn",
    ]
    for name, text in (("turn", lines), ("test", test)):
        blocks += [f"%{name} (p: s32[]) -> s32[] {{", *(f"  {x}" for x in text), "}", ""]
    return "\n".join([*blocks, "ENTRY %main () -> f32[] {", *(f"  {x}" for x in start), "}"])


def found_in(*turn, at_least=2**20, **computations):
    module = parse(program(*turn, **computations))
    loop = module.entry.instructions["end"]
    return [(copy.name, copy.bytes) for copy in copies(module, loop, at_least)]


SLICE = (
    "x: bf16[4,512,1024]",
    "%x = bf16[4,512,1024]{2,1,0} parameter(0)",
    "%i = s32[] parameter(1)",
    "%o = s32[] constant(0)",
    "ROOT %s = bf16[1,512,1024]{2,1,0} dynamic-slice(%x, %i, %o, %o), "
    "dynamic_slice_sizes={1,512,1024}",
)
PRODUCT = (
    *SLICE[:4],
    SLICE[4].removeprefix("ROOT "),
    "%b = bf16[512,1024]{1,0} bitcast(%s)",
    "ROOT %y = bf16[512,512]{1,0} dot(%b, %b), lhs_contracting_dims={1}, rhs_contracting_dims={1}",
)
UPDATE = (
    "c: f32[2,64,4096]",
    "%c = f32[2,64,4096]{2,1,0} parameter(0)",
    "%u = f32[1,64,1]{2,1,0} parameter(1)",
    "%i = s32[] parameter(2)",
    "%o = s32[] constant(0)",
    "ROOT %d = f32[2,64,4096]{2,1,0} dynamic-update-slice(%c, %u, %i, %o, %o)",
)


@pytest.mark.parametrize(
    "lines, size",
    [
        # A layer cut out by the compiler, as it is or laid out anew; the whole; into another type.
        (["%a = bf16[1,512,1024]{2,1,0} fusion(%w, %n), kind=kLoop, calls=%cut"], 2**20),
        (["%a = bf16[512,1024]{0,1} copy(%w)"], 2**20),
        (["%a = f32[2,64,4096]{1,2,0} copy(%c)"], 2**21),
        (["%a = f32[1024,512]{1,0} convert(%w)"], 2**21),
    ],
    ids=["slice", "layout of a layer", "layout of all", "cast"],
)
def test_a_layer_or_all_of_what_is_carried_is_a_copy(lines, size):
    assert found_in(*lines, cut=SLICE) == [("a", size)]


@pytest.mark.parametrize(
    "lines",
    [
        ["%a = bf16[512,512]{1,0} fusion(%w, %n), kind=kOutput, calls=%multiply"],
        ["%u = f32[1,64,1]{2,1,0} constant({...})",
         "%a = f32[2,64,4096]{2,1,0} fusion(%c, %u, %n), kind=kLoop, calls=%write"],
        ["%a = bf16[1,512,1024]{2,1,0:S(1)} fusion(%w, %n), kind=kLoop, calls=%cut"],
        ["%a = (bf16[4,512,1024]{2,1,0:S(1)}, bf16[4,512,1024]{2,1,0}, u32[]{:S(2)}) "
         "copy-start(%w)"],
        ["%a = f32[512,1024]{1,0} iota(), iota_dimension=0"],
        ['%a = f32[2,64,4096]{2,1,0} custom-call(%c), custom_call_target="k"'],
        ["%a = bf16[511,1024]{1,0} slice(%w), slice={[0:1], [0:511], [0:1024]}"],
        ["%x = bf16[512,1024]{1,0} iota(), iota_dimension=0",
         "%a = bf16[512,1024]{0,1} copy(%x)"],
    ],
    ids=["product", "written in place", "onto the chip", "begun onto the chip", "made of nothing",
         "kernel", "other size", "of nothing carried"],
)  # fmt: skip
def test_what_is_no_copy(lines):
    assert found_in(*lines, cut=SLICE, multiply=PRODUCT, write=UPDATE) == []


def test_what_is_written_or_cut_out_is_still_what_is_carried():
    written = [
        "%u = f32[1,64,1]{2,1,0} constant({...})",
        "%d = f32[2,64,4096]{2,1,0} fusion(%c, %u, %n), kind=kLoop, calls=%write",
        "%b = f32[2,262144]{1,0} bitcast(%d)",
        "%a = f32[262144,2]{0,1} transpose(%b), dimensions={1,0}",
    ]
    assert found_in(*written, write=UPDATE) == [("a", 2**21)]
    cut = [
        "%s = bf16[1,512,1024]{2,1,0:S(1)} fusion(%w, %n), kind=kLoop, calls=%cut",
        "%a = f32[512,1024]{1,0} convert(%s)",
    ]
    assert found_in(*cut, cut=SLICE) == [("a", 2**21)]


def test_copies_in_a_loop_within_count_and_small_ones_do_not():
    inner = (
        "q: s32[]",
        f"%q = {CARRIED} parameter(0)",
        "%v = bf16[4,512,1024]{2,1,0} get-tuple-element(%q), index=1",
        "ROOT %a = bf16[512,1024]{0,1} copy(%v)",
    )
    call = "%r = bf16[512,1024]{0,1} call(%p), to_apply=%inner"
    assert found_in(call, inner=inner) == [("a", 2**20)]
    assert found_in(call, inner=inner, at_least=2**20 + 1) == []


def test_a_turn_of_the_longest_loop_stands_in_the_account():
    text = program("%a = bf16[512,1024]{0,1} copy(%w)")
    turn = roofline(text, Limits({"bfloat16": 1.0, "float32": 1.0}, 2.0**20, 1.0)).turn
    # Written a layer, read as much as the operand has: all four; and a counter's few bytes.
    assert turn.bytes == pytest.approx(5 * 2**20, abs=100)
    assert turn.seconds == pytest.approx(5.0, abs=1e-3)
    assert [copy.name for copy in turn.copies] == ["a"]
