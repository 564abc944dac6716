"""A compiled program's account, held to programs worked out by hand and to XLA's own figures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from program_costs.limits import Limits
from program_costs.roofline import roofline

from hjax.xla.collectives import received_bytes
from hjax.xla.hlo import array_shapes, parse

# A second moves 100 bytes, multiplies 1000 times and receives 10 bytes.
LIMITS = Limits({"bfloat16": 1000.0, "float32": 500.0}, 100.0, 10.0)


def program(*entry, **computations):
    """A module of lines; the other computations by name: parameters' text, then lines."""
    blocks = ["HloModule hand, num_partitions=4", ""]
    for name, (head, *lines) in computations.items():
        blocks += [f"%{name} ({head}) -> f32[] {{", *(f"  {line}" for line in lines), "}", ""]
    return "\n".join([*blocks, "ENTRY %main () -> f32[] {", *(f"  {x}" for x in entry), "}"])


def account(*entry, loop_trips=None, **computations):
    return roofline(program(*entry, **computations), LIMITS, loop_trips)


@pytest.mark.parametrize(
    "shape, size",
    [
        ("f32[10,100]{1,0:T(8,128)}", 16 * 128 * 4),
        ("f32[10,100]{0,1:T(8,128)}", 104 * 128 * 4),  # the minor dimension is the first
        ("bf16[3,8,128]{2,1,0:T(8,128)(2,1)}", 3 * 8 * 128 * 2),
        ("pred[9,9]{0,1:T(8,128)(4,1)}", 16 * 128),
        ("f32[5]{0:T(128)}", 512),
        ("f32[]", 4),
        ("f32[10,100]{1,0}", 4000),
        ("s4[3]{0}", 2),
    ],
)
def test_an_array_takes_its_tiles_filled_up(shape, size):
    [array] = array_shapes(shape)
    assert array.bytes == size and array.space == 0


def test_the_arrays_of_a_tuple_and_their_memories():
    found = array_shapes("(f32[2,3]{1,0:T(2,128)S(1)}, /*index=1*/bf16[4]{0:S(5)}, u32[]{:S(2)})")
    assert [(a.kind, a.sizes, a.space) for a in found] == [
        ("f32", (2, 3), 1), ("bf16", (4,), 5), ("u32", (), 2)
    ]  # fmt: skip


def test_a_product_takes_the_longer_of_reading_and_multiplying():
    found = account(
        "%x = bf16[2,4]{1,0} parameter(0)",
        "%w = bf16[4,8]{1,0} parameter(1)",
        "ROOT %y = bf16[2,8]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    )
    assert found.bytes == 2 * (8 + 32 + 16) and found.flops == 2 * 2 * 4 * 8
    assert found.seconds == pytest.approx(112 / 100)  # against 128 / 1000
    assert found.bound == "memory" and found.memory_seconds == found.seconds


def test_products_of_float32_run_at_their_own_rate():
    found = account(
        "%x = f32[50,50]{1,0:S(1)} parameter(0)",
        "ROOT %y = f32[50,50]{1,0:S(1)} dot(%x, %x), lhs_contracting_dims={1}",
    )
    assert found.bytes == 0  # both are on the chip
    assert found.seconds == pytest.approx(2 * 50**3 / 500) and found.bound == "compute"
    tpu = Limits(LIMITS.flops, 100.0, 10.0, default_float32=False)
    text = program(
        "%x = f32[50,50]{1,0:S(1)} parameter(0)",
        "ROOT %y = f32[50,50]{1,0:S(1)} dot(%x, %x), lhs_contracting_dims={1}",
    )
    assert roofline(text, tpu).seconds == pytest.approx(2 * 50**3 / 1000)
    exact = text.replace("lhs_", "operand_precision={highest,highest}, lhs_")
    assert roofline(exact, tpu).seconds == pytest.approx(2 * 50**3 / 500)


def test_a_product_as_the_convolution_that_a_tpu_makes_of_it():
    # [6, 5] by [5, 4, 3]: the window slides over the 4 and 3, of which padding meets nothing.
    found = account(
        "%x = bf16[6,5]{1,0} parameter(0)",
        "%x4 = bf16[6,5,1,1]{1,0,2,3} bitcast(%x)",
        "%w = bf16[5,4,3,2]{3,2,1,0} parameter(1)",
        "ROOT %y = bf16[6,4,3,2]{3,2,1,0} convolution(%x4, %w), window={size=4x3 pad=3_3x2_2 "
        "rhs_reversal=1x1}, dim_labels=bf01_i01o->b01f",
    )
    assert found.flops == 2 * 6 * 5 * (4 * 3 * 2)


def test_a_loop_counts_its_trips():
    loop = (
        '%out = (s32[], f32[10]{0}) while(%start), condition=%test, body=%step, '
        'backend_config={"known_trip_count":{"n":"7"}}'
    )
    parts = {
        "test": ["t: (s32[], f32[10])", "ROOT %less = pred[] parameter(0)"],
        "step": [
            "t: (s32[], f32[10])",
            "%t = (s32[], f32[10]{0}) parameter(0)",
            "%v = f32[10]{0} get-tuple-element(%t), index=1",
            "%i = s32[] get-tuple-element(%t), index=0",
            "%w = f32[10]{0} negate(%v)",
            "ROOT %r = (s32[], f32[10]{0}) tuple(%i, %w)",
        ],
    }
    lines = ["%start = (s32[], f32[10]{0}) parameter(0)", loop]
    found = account(*lines, **parts)
    assert found.bytes == 7 * 80 and found.seconds == pytest.approx(5.6)
    [operation] = found.operations
    assert (operation.name, operation.times) == ("w", 7)
    unknown = [lines[0], loop.split(", backend")[0]]
    with pytest.raises(ValueError, match="trips of loop out .*loop_trips"):
        account(*unknown, **parts)
    assert account(*unknown, loop_trips=3, **parts).bytes == 3 * 80


def test_of_a_cut_array_only_the_part_is_read():
    # A layer's weights out of a stack: 2 x [4, 4] float32 of 10.
    found = account(
        "%all = f32[10,4,4]{2,1,0} parameter(0)",
        "%i = s32[] parameter(1)",
        "ROOT %y = f32[2,4,4]{2,1,0} fusion(%all, %i), kind=kLoop, calls=%cut",
        cut=[
            "p: f32[10,4,4], i: s32[]",
            "%p = f32[10,4,4]{2,1,0} parameter(0)",
            "%i = s32[] parameter(1)",
            "%zero = s32[] constant(0)",
            "%wide = f64[10,4,4]{2,1,0} convert(%p)",
            "%part = f64[2,4,4]{2,1,0} dynamic-slice(%wide, %i, %zero, %zero), "
            "dynamic_slice_sizes={2,4,4}",
            "ROOT %back = f32[2,4,4]{2,1,0} convert(%part)",
        ],
    )
    assert found.bytes == 128 + 128 + 4


def test_of_an_array_written_over_only_the_part_moves():
    found = account(
        "%cache = f32[100,4]{1,0} parameter(0)",
        "%new = f32[1,4]{1,0} parameter(1)",
        "%i = s32[] parameter(2)",
        "ROOT %y = f32[100,4]{1,0} fusion(%cache, %new, %i), kind=kLoop, calls=%write",
        write=[
            "p: f32[100,4], q: f32[1,4], i: s32[]",
            "%p = f32[100,4]{1,0} parameter(0)",
            "%q = f32[1,4]{1,0} parameter(1)",
            "%i = s32[] parameter(2)",
            "%zero = s32[] constant(0)",
            "%double = f32[1,4]{1,0} add(%q, %q)",
            "ROOT %u = f32[100,4]{1,0} dynamic-update-slice(%p, %double, %i, %zero)",
        ],
    )
    assert found.bytes == 16 + 16 + 4  # the new row in and out, its place
    plain = account(
        "%cache = f32[100,4]{1,0} parameter(0)",
        "%new = f32[1,4]{1,0} parameter(1)",
        "%i = s32[] parameter(2)",
        "ROOT %u = f32[100,4]{1,0} dynamic-update-slice(%cache, %new, %i, %i)",
    )
    assert plain.bytes == 32


GATHER = (
    "%go = (f32[5]{0}, f32[20]{0}) all-gather-start(%x), channel_id=1, dimensions={0}, "
    "replica_groups={{0,1,2,3}}"
)


def test_what_runs_beside_a_transfer_hides_it():
    # 3 x 20 bytes come in 6 seconds; the product beside it takes 4.
    product = "%y = bf16[10,20]{1,0:S(1)} dot(%a, %b), lhs_contracting_dims={1}"
    lines = [
        "%x = f32[5]{0} parameter(0)",
        "%a = bf16[10,10]{1,0:S(1)} parameter(1)",
        "%b = bf16[10,20]{1,0:S(1)} parameter(2)",
        GATHER,
        product,
        "ROOT %done = f32[20]{0} all-gather-done(%go)",
    ]
    found = account(*lines)
    assert found.product_seconds == pytest.approx(4.0)
    assert found.exposed_seconds == pytest.approx(2.0)
    assert found.seconds == pytest.approx(6.0)
    assert found.received == 60 and found.synchronous == pytest.approx(20)
    # Nothing beside it: all of it is waited for.
    bare = account(*lines[:4], lines[5], product)
    assert bare.seconds == pytest.approx(10.0) and bare.synchronous == pytest.approx(60)
    # Two at once share the wire.
    twice = [
        *lines[:4],
        GATHER.replace("%go", "%more").replace("channel_id=1", "channel_id=2"),
        product,
        "%first = f32[20]{0} all-gather-done(%go)",
        "ROOT %second = f32[20]{0} all-gather-done(%more)",
    ]
    assert account(*twice).seconds == pytest.approx(12.0)


def test_a_collective_without_a_start_is_waited_for():
    found = account(
        "%x = f32[5]{0} parameter(0)",
        "ROOT %y = f32[5]{0} all-reduce(%x), channel_id=1, replica_groups={{0,1},{2,3}}, "
        "to_apply=%add",
        add=["a: f32[]", "ROOT %a = f32[] parameter(0)"],
    )
    assert found.received == 20 and found.synchronous == 20
    assert found.seconds == pytest.approx(2.0) and found.bound == "network"


def test_a_collective_inside_several_fusions_comes_once():
    """A TPU's asynchronous collective fusion: start, work and end are fusions of one channel."""
    inside = [
        "p: f32[5]",
        "%p = f32[5]{0} parameter(0)",
        "ROOT %g = f32[20]{0} all-gather(%p), channel_id=9, dimensions={0}, "
        "replica_groups={{0,1,2,3}}",
    ]
    lines = (
        "%x = f32[5]{0:S(1)} parameter(0)",
        "%a = bf16[10,10]{1,0:S(1)} parameter(1)",
        "%start = f32[20]{0:S(1)} fusion(%x), kind=kCustom, calls=%one",
        "%y = bf16[10,10]{1,0:S(1)} dot(%a, %a), lhs_contracting_dims={1}",
        "ROOT %done = f32[20]{0:S(1)} fusion(%x), kind=kCustom, calls=%two",
    )
    found = account(*lines, one=inside, two=inside)
    assert found.received == 60 == received_bytes(program(*lines, one=inside, two=inside))
    assert found.seconds == pytest.approx(6.0)  # of which 2 beside the product
    assert found.exposed_seconds == pytest.approx(4.0)


def test_a_chain_that_goes_on_inside_a_loop_comes_once():
    inside = [
        "p: f32[5]",
        "%p = f32[5]{0} parameter(0)",
        "ROOT %g = f32[20]{0} all-gather(%p), channel_id=9, dimensions={0}, "
        "replica_groups={{0,1,2,3}}",
    ]
    lines = (
        "%x = f32[5]{0:S(1)} parameter(0)",
        "%start = f32[20]{0:S(1)} fusion(%x), kind=kCustom, calls=%one",
        "%t = (s32[]) parameter(1)",
        "%out = (s32[]) while(%t), condition=%test, body=%turn, "
        'backend_config={"known_trip_count":{"n":"6"}}',
        "ROOT %done = f32[20]{0:S(1)} fusion(%x), kind=kCustom, calls=%two",
    )
    parts = {
        "one": inside,
        "two": inside,
        "three": inside,
        "test": ["t: (s32[])", "ROOT %less = pred[] parameter(0)"],
        "turn": [
            "t: (s32[])",
            "%t = (s32[]) parameter(0)",
            "%x = f32[5]{0:S(1)} constant({...})",
            "%part = f32[20]{0:S(1)} fusion(%x), kind=kCustom, calls=%three",
            "ROOT %r = (s32[]) tuple(%t)",
        ],
    }
    assert received_bytes(program(*lines, **parts)) == 60
    assert account(*lines, **parts).received == 60


def test_a_copy_onto_the_chip_hides_behind_products():
    copy = "%go = (f32[100]{0:S(1)}, f32[100]{0}, u32[]{:S(2)}) copy-start(%x)"
    lines = [
        "%x = f32[100]{0} parameter(0)",
        "%a = bf16[10,10]{1,0:S(1)} parameter(1)",
        copy,
        "%y = bf16[10,10]{1,0:S(1)} dot(%a, %a), lhs_contracting_dims={1}",
        "ROOT %there = f32[100]{0:S(1)} copy-done(%go)",
    ]
    found = account(*lines)
    assert found.bytes == 400  # read once; what is written is on the chip
    assert found.seconds == pytest.approx(4.0)  # of the copy, 2 of them beside the product
    assert found.memory_seconds == pytest.approx(2.0)


def test_a_written_kernel_counts_what_it_says_of_itself():
    call = (
        'ROOT %y = f32[4]{0} custom-call(%x), custom_call_target="tpu_custom_call", '
        'backend_config={"custom_call_config":{"body":"TUzvUg"TOLD}}'
    )
    x = "%x = f32[4]{0} parameter(0)"
    estimate = ',"cost_estimate":{"flops":"90","bytes_accessed":"32"}'
    told = account(x, call.replace("TOLD", estimate))
    assert told.flops == 90 and told.bytes == 32 and not told.opaque
    part = account(x, call.replace("TOLD", estimate.replace("32", "5")))
    assert part.bytes == 5  # of its arguments it reads a part, and writes into them
    silent = account(x, call.replace("TOLD", ""))
    assert silent.opaque == ("y",) and silent.bytes == 2 * 16


def test_an_array_with_nothing_in_it_yet_moves_nothing():
    found = account(
        "%x = f32[4]{0} parameter(0)",
        '%new = f32[1000]{0} custom-call(), custom_call_target="AllocateBuffer"',
        "%zero = s32[] constant(0)",
        "ROOT %y = f32[1000]{0} dynamic-update-slice(%new, %x, %zero)",
    )
    assert found.bytes == 2 * 16 and not found.opaque


def test_a_kernel_whose_words_go_over_several_lines_ends_no_computation():
    found = account(
        "%x = f32[4]{0} parameter(0)",
        '%k = f32[4]{0} custom-call(%x), custom_call_target="tpu_custom_call", '
        'frontend_attributes={kernel_metadata={\n"words":"{\\"block\\": 128}"\n}}, '
        'metadata={op_name="k"}, backend_config={"custom_call_config":{"cost_estimate":'
        '{"flops":"7"}}}',
        "ROOT %y = f32[4]{0} negate(%k)",
    )
    assert found.flops == 7 and found.bytes == 2 * 32


def test_costs_stand_by_the_line_that_they_come_from():
    text = program(
        "%x = f32[10]{0} parameter(0)",
        '%a = f32[10]{0} negate(%x), metadata={op_name="n" stack_frame_id=3}',
        '%b = f32[10]{0} negate(%a), metadata={op_name="n" stack_frame_id=3}',
        'ROOT %c = f32[10]{0} negate(%b), metadata={source_file="old.py" source_line=8}',
    )
    tables = """FileNames
1 "main.py"
2 "/lib/site-packages/jax/x.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12}
2 {file_name_id=2 function_name_id=1 line=3 end_line=3}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
3 {file_location_id=2 parent_frame_id=2}
"""
    head, rest = text.split("\n", 1)
    found = roofline(f"{head}\n\n{tables}\n{rest}", LIMITS)
    assert [(o.source, o.times, o.bytes) for o in found.by_source()] == [
        ("main.py:12", 2, 160), ("old.py:8", 1, 80)
    ]  # fmt: skip


def compiled(function, *arrays):
    return jax.jit(function).lower(*arrays).compile()


def test_a_real_program_has_the_bytes_and_products_that_xla_tells_of_it():
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=(64, 64)), jnp.float32) for _ in range(2))
    made = compiled(lambda a, b: a @ b, a, b)
    found = roofline(made.as_text(), LIMITS)
    memory = made.memory_analysis()
    assert found.flops == made.cost_analysis()["flops"] == 2 * 64**3
    assert found.bytes == memory.argument_size_in_bytes + memory.output_size_in_bytes


def test_a_real_loop_counts_each_layer_once():
    layers, width = 6, 32
    weights = jnp.ones((layers, width, width))
    x = jnp.ones((8, width))

    def run(x, weights):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    text = compiled(run, x, weights).as_text()
    found = roofline(text, LIMITS)
    assert found.flops == layers * 2 * 8 * width * width
    least = weights.nbytes + layers * 2 * x.nbytes
    assert least <= found.bytes <= 3 * least  # a layer's weights are cut out before they are read
    assert parse(text).devices == 1
