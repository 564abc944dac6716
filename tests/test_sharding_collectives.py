"""Bytes and device groups read off a program's text, on hand-written programs and compiled ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from program_costs.limits import Limits
from program_costs.roofline import roofline

from hjax.xla.collectives import Collective, collectives, device_groups, received_bytes
from hjax.xla.hlo import shape_bytes


def module(body, more="", devices=8):
    """A module with this entry computation, of one float32 argument of 64 KiB."""
    return (
        f"HloModule jit_f, is_scheduled=true, num_partitions={devices}\n\n{more}\n"
        "ENTRY %main (x: f32[128,128]) -> f32[128,128] {\n"
        "  %x = f32[128,128]{1,0:T(8,128)} parameter(0)\n"
        f"{body}\n}}\n"
    )


K = 128 * 128 * 4


@pytest.mark.parametrize(
    "line, kind, groups, received",
    [
        (
            "%g = f32[128,512]{0,1} all-gather(%x), replica_groups=[2,4]<=[8]T(0), dimensions={1}",
            "all-gather",
            ((0, 1, 2, 3), (4, 5, 6, 7)),
            3 * K,
        ),
        (  # asynchronous: a tuple of what goes in and what comes out, counted once
            "%g = (f32[128,128]{1,0}, f32[256,128]{1,0}) all-gather-start(%x), "
            "replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}\n"
            "  %d = f32[256,128]{1,0} all-gather-done(%g)",
            "all-gather",
            ((0, 4), (1, 5), (2, 6), (3, 7)),
            K,
        ),
        (
            "%r = f32[128,128]{1,0} all-reduce(%x), replica_groups=[2,4]<=[4,2]T(1,0), "
            "use_global_device_ids=true, to_apply=%add",
            "all-reduce",
            ((0, 2, 4, 6), (1, 3, 5, 7)),
            2 * K * 3 // 4,
        ),
        ("%r = f32[128,128]{1,0} all-reduce(%x), replica_groups={}", "all-reduce",
         (tuple(range(8)),), 2 * K * 7 // 8),
        (
            "%s = f32[32,128]{1,0} reduce-scatter(%x), "
            "replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={0}, to_apply=%add",
            "reduce-scatter",
            ((0, 1, 2, 3), (4, 5, 6, 7)),
            K * 3 // 4,
        ),
        (
            "%a = (f32[64,128]{1,0}, /*index=1*/f32[64,128]{1,0}) all-to-all(%x), "
            "replica_groups={{0,1},{2,3},{4,5},{6,7}}",
            "all-to-all",
            ((0, 1), (2, 3), (4, 5), (6, 7)),
            K // 2,
        ),
        (
            "%p = (f32[128,128]{1,0}, f32[128,128]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) "
            "collective-permute-start(%x), source_target_pairs={{0,0},{1,2},{2,1},{3,3}}\n"
            "  %q = f32[128,128]{1,0} collective-permute-done(%p)",
            "collective-permute",
            ((1, 2), (2, 1)),
            K,
        ),
    ],
)  # fmt: skip
def test_one_collective(line, kind, groups, received):
    (found,) = collectives(module(f"  ROOT {line}"))
    assert (found.kind, found.groups, found.times) == (kind, groups, 1)
    assert found.input_bytes == K
    assert found.received_bytes == found.total_bytes == received
    assert received_bytes(module(f"  ROOT {line}")) == received


APART = ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize(
    "name, target, got, kind, groups, received",
    [
        ("ALL_REDUCE", '"{1,2}x{0:3}"', 128, "all-reduce", APART, K),
        ("ALL_GATHER", '"{1,2}x{0:3}"', 256, "all-gather", APART, K),
        ("REDUCE_SCATTER", '"{1,2}x{0:3}"', 64, "reduce-scatter", APART, K // 2),
        (
            "ALL_TO_ALL",
            "{{100000,200000},{100001,200001},{100002,200002},{100003,200003}}",
            128, "all-to-all", APART, K // 2,
        ),
        (
            "ONE_TO_ONE",
            "{{100000->200000},{200003->100001}}",
            128, "collective-permute", ((0, 4), (7, 1)), K,
        ),
    ],
)  # fmt: skip
def test_between_slices_hosts_send(name, target, got, kind, groups, received):
    attributes = (
        "is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous=\"r_0\","
        f'_xla_megascale_target={target},_xla_megascale_transfer_type="{name}"}}'
    )
    lines = (
        f"  %t = token[] after-all()\n"
        f"  %s = (f32[128,128]{{1,0}}, u32[], token[]) send(%x, %t), channel_id=2, {attributes}\n"
        f"  %d = token[] send-done(%s), channel_id=2, is_host_transfer=true\n"
        f"  %r = (f32[{got},128]{{1,0}}, u32[], token[]) recv(%t), channel_id=1, {attributes}\n"
        f"  ROOT %q = (f32[{got},128]{{1,0}}, token[]) recv-done(%r), channel_id=1"
    )
    text = module(lines, devices=4)
    [found] = collectives(text)
    assert (found.kind, found.groups, found.input_bytes) == (kind, groups, K)
    assert found.received_bytes == received
    if "REDUCE" in name:
        # Of the network's 10 bytes/s where one of the links' 1000 would do within a slice.
        limits = Limits({"bfloat16": 1.0}, 1.0, 1000.0, network=10.0, domain=4)
        assert roofline(text, limits).exposed_seconds == pytest.approx(received / 10)
    with pytest.raises(ValueError, match="between slices .*: ALL_OTHER"):
        collectives(text.replace(name, "ALL_OTHER"))


def test_nothing_is_received_from_oneself():
    assert Collective("all-gather", 8, ((0,), (1,))).received_bytes == 0
    assert Collective("collective-permute", 8, ()).received_bytes == 0


def test_a_group_has_several_inputs():
    line = (
        "  %y = bf16[128]{0} parameter(1)\n"
        "  ROOT %r = (f32[128,128]{1,0}, bf16[128]{0}) all-reduce(%x, %y), "
        "replica_groups={{0,1},{2,3}}, to_apply=%add"
    )
    (found,) = collectives(module(line))
    assert found.input_bytes == K + 256


GATHERING = """%gathering (p: f32[128,128]) -> f32[256,128] {
  %p = f32[128,128]{1,0} parameter(0)
  ROOT %g = f32[256,128]{1,0} all-gather(%p), replica_groups=[4,2]<=[8], dimensions={0}
}
"""


@pytest.mark.parametrize(
    "line",
    [
        "fusion(%x), kind=kCustom, calls=%gathering",
        "call(%x), to_apply=%gathering",
        "custom-call(%x), custom_call_target=\"f\", called_computations={%gathering}",
        "async-start(%x), calls=%gathering\n"
        "  %u = f32[256,128]{1,0} async-update(%c), calls=%gathering\n"
        "  %d = f32[256,128]{1,0} async-done(%u), calls=%gathering",
    ],
)  # fmt: skip
def test_collectives_inside_called_computations(line):
    assert received_bytes(module(f"  ROOT %c = f32[256,128]{{1,0}} {line}", GATHERING)) == K


def loop(trips="", limit="constant(5)", start="constant(2)", step="constant(1)"):
    """A loop over an all-gather of its carried 64 KiB; the counter is entry 0, a limit entry 2."""
    carried = "(s32[], f32[128,128], s32[])"
    more = f"""{GATHERING}
%body (p: {carried}) -> {carried} {{
  %p = {carried} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %y = f32[128,128] get-tuple-element(%p), index=1
  %n = s32[] get-tuple-element(%p), index=2
  %one = s32[] {step}
  %next = s32[] add(%i, %one)
  %g = f32[256,128]{{1,0}} fusion(%y), kind=kLoop, calls=%gathering
  %s = f32[128,128]{{1,0}} slice(%g), slice={{[0:128], [0:128]}}
  ROOT %t = {carried} tuple(%next, %s, %n)
}}

%condition (p: {carried}) -> pred[] {{
  %p = {carried} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=2
  %five = s32[] constant(5)
  ROOT %lt = pred[] compare(%i, {"%n" if limit == "carried" else "%five"}), direction=LT
}}
"""
    body = f"""  %first = s32[] {start}
  %seven = s32[] constant(7)
  %copied = s32[] copy(%first)
  %t = {carried} tuple(%copied, %x, %seven)
  ROOT %w = {carried} while(%t), condition=%condition, body=%body{trips}"""
    return module(body, more)


def test_a_loops_body_counts_once_per_trip():
    known = ', backend_config={"known_trip_count":{"n":"12"}}'
    assert received_bytes(loop(known)) == 12 * K
    # Not written down, as by the TPU's compiler: from 2 to 5, or to the carried 7, in steps.
    assert received_bytes(loop()) == 3 * K
    assert received_bytes(loop(step="constant(2)")) == 2 * K
    assert received_bytes(loop(limit="carried")) == 5 * K


def test_entries_of_tuples_may_be_named_where_they_are_used():
    """As newer printers do: ``%p#1`` and no line for it."""
    short = loop()
    for name, entry in (("i", 0), ("y", 1), ("n", 2)):
        short = short.replace(f"  %{name} = s32[] get-tuple-element(%p), index={entry}\n", "")
        short = short.replace(
            f"  %{name} = f32[128,128] get-tuple-element(%p), index={entry}\n", ""
        )
        for end in (")", ","):
            short = short.replace(f"%{name}{end}", f"%p#{entry}{end}")
    assert "get-tuple-element" not in short and "compare(%p#0, %five)" in short
    assert received_bytes(short) == received_bytes(loop()) == 3 * K
    # Of a tuple in a tuple the one array that goes in, not the bytes of the whole.
    line = (
        "  %t = (s32[], (bf16[7]{0}, /*index=1*/f32[128,128]{1,0:T(8,128)})) custom-call(%x)\n"
        "  ROOT %r = f32[128,128]{1,0} all-reduce(%t#1#1), replica_groups={{0,1},{2,3}}"
    )
    (found,) = collectives(module(line))
    assert found.input_bytes == K
    for wrong in ("%t#1#2", "%t#0#0", "%x#0", "%later#0"):
        with pytest.raises(ValueError, match="in the shape of HLO text|before %later"):
            collectives(module(line.replace("%t#1#1", wrong)))


def test_a_loop_of_unknown_length_is_an_error_unless_given():
    unknown = loop(start="parameter(1)")
    with pytest.raises(ValueError, match="loop w.*loop_trips"):
        received_bytes(unknown)
    assert received_bytes(unknown, loop_trips=10) == 10 * K
    # Known trips are not overruled, and loops without collectives don't matter.
    assert received_bytes(loop(), loop_trips=10) == 3 * K
    assert received_bytes(unknown.replace("calls=%gathering", "calls=%nothing").replace(
        "%condition (", "%nothing (p: f32[1]) -> f32[1] {\n  ROOT %p = f32[1] parameter(0)\n}\n\n"
        "%condition ("
    )) == 0  # fmt: skip


def test_of_a_conditional_the_dearer_branch_counts():
    more = GATHERING + GATHERING.replace("gathering", "wide").replace("[4,2]<=[8]", "[1,8]<=[8]")
    line = (
        "  %k = s32[] parameter(1)\n  ROOT %c = f32[256,128]{1,0} conditional(%k, %x, %x), "
        "branch_computations={%gathering, %wide}"
    )
    assert received_bytes(module(line, more)) == 7 * K
    line = line.replace("branch_computations={%gathering, %wide}",
                        "true_computation=%gathering, false_computation=%gathering")  # fmt: skip
    assert received_bytes(module(line, more)) == K


@pytest.mark.parametrize(
    "text, groups",
    [
        ("{{0,3},{1,2}}, dimensions={0}", ((0, 3), (1, 2))),
        ("{}", ()),
        ("[2,2]<=[4]", ((0, 1), (2, 3))),
        ("[2,4]<=[2,2,2]T(1,0,2), dimensions={0}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}, dimensions={0}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=4], device_ids=([2,2,2]T(1,0,2)) {'a'}, dimensions={0}",
         ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}", ((3, 2), (1, 0))),
    ],
)
def test_replica_groups(text, groups):
    assert device_groups(text) == groups


def test_what_cannot_be_read_is_an_error():
    with pytest.raises(ValueError, match="replica_groups"):
        device_groups("something else")
    with pytest.raises(ValueError, match="ENTRY"):
        collectives("HloModule jit_f\n")


@pytest.mark.parametrize(
    "shape, size",
    [
        ("f32[]", 4),
        ("bf16[2,3]{1,0:T(8,128)(2,1)}", 12),
        ("(f8e4m3fn[8]{0}, /*index=1*/pred[3], s4[5]{0:E(4)}, token[])", 8 + 3 + 3),
        ("c64[2]", 16),
    ],
)
def test_sizes(shape, size):
    assert shape_bytes(shape) == size


# Real programs, on 8 simulated devices: 2 x 2 x 2.


def mesh():
    devices = np.asarray(jax.devices()[:8]).reshape(2, 2, 2)
    return Mesh(devices, ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)


def compiled(function, in_specs, out_specs, *shapes):
    mapped = jax.shard_map(
        function, mesh=mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh(), spec))
        for shape, spec in zip(shapes, in_specs, strict=True)
    ]
    return jax.jit(mapped).lower(*arguments).compile().as_text()


P = PartitionSpec
# Each device's share of what goes in is 8 KiB.
SHARE = 8192


@pytest.mark.parametrize(
    "function, out, kind, groups, received",
    [
        (functools.partial(jax.lax.all_gather, axis_name="c", axis=1, tiled=True),
         P("a", "b"), "all-gather", {(0, 1), (2, 3), (4, 5), (6, 7)}, SHARE),
        (functools.partial(jax.lax.all_gather, axis_name=("a", "c"), axis=0, tiled=True),
         P(None, "b"), "all-gather", {(0, 1, 4, 5), (2, 3, 6, 7)}, 3 * SHARE),
        (functools.partial(jax.lax.psum, axis_name="b"),
         P("a", "c"), "all-reduce", {(0, 2), (1, 3), (4, 6), (5, 7)}, SHARE),
        (functools.partial(jax.lax.psum_scatter, axis_name="a", scatter_dimension=1, tiled=True),
         P("b", ("c", "a")), "reduce-scatter", {(0, 4), (1, 5), (2, 6), (3, 7)}, SHARE // 2),
        (functools.partial(jax.lax.all_to_all, axis_name=("b", "c"), split_axis=0, concat_axis=1,
                           tiled=True),
         P(("a", "b", "c")), "all-to-all", {(0, 1, 2, 3), (4, 5, 6, 7)}, SHARE * 3 // 4),
        (functools.partial(jax.lax.ppermute, axis_name="a", perm=[(0, 1), (1, 0)]),
         P("a", ("b", "c")), "collective-permute",
         {(0, 4), (1, 5), (2, 6), (3, 7), (4, 0), (5, 1), (6, 2), (7, 3)}, SHARE),
    ],
)  # fmt: skip
def test_compiled_collectives(function, out, kind, groups, received):
    (found,) = collectives(compiled(function, (P("a", ("b", "c")),), out, (64, 256)))
    assert (found.kind, found.times) == (kind, 1)
    assert {tuple(sorted(g)) if kind != "collective-permute" else g for g in found.groups} == groups
    assert (found.input_bytes, found.received_bytes) == (SHARE, received)


def test_compiled_loops_nest():
    def nested(x):
        def inner(i, x):
            return jax.lax.psum(x, "b") * 0.5

        def outer(i, x):
            return jax.lax.psum(jax.lax.fori_loop(0, 3, inner, x), "a") * 0.5

        return jax.lax.fori_loop(0, 5, outer, x)

    text = compiled(nested, (P("a", ("b", "c")),), P("a", ("b", "c")), (64, 256))
    assert received_bytes(text) == (5 * 3 + 5) * SHARE


def test_a_compiled_loop_of_unknown_length():
    def grow(x):
        def small(x):
            return jnp.sum(x) < 10.0

        return jax.lax.while_loop(small, lambda x: jax.lax.psum(x, "b"), x)

    text = compiled(grow, (P("a"),), P("a"), (64, 256))
    with pytest.raises(ValueError, match="loop_trips"):
        collectives(text)
    assert received_bytes(text, loop_trips=4) == 4 * 32 * 256 * 4


def test_groups_that_the_partitioner_writes():
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32, sharding=NamedSharding(mesh(), P("a", "c")))
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh(), P(None, "c")))
    (found,) = collectives(whole.lower(x).compile().as_text())
    assert {frozenset(g) for g in found.groups} == {
        frozenset({0, 4}), frozenset({1, 5}), frozenset({2, 6}), frozenset({3, 7})
    }  # fmt: skip
    assert found.received_bytes == 64 * 256 * 4 // 4


# A TPU's asynchronous gather: a chain of fusions that hand on a semaphore, all of one channel.
PART = """
%NAME (p: f32[4,128]) -> f32[16,128] {
  %p = f32[4,128]{1,0} parameter(0)
  ROOT %g = f32[16,128]{1,0} all-gather(%p), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
}
"""
FLIGHT = "(f32[4,128]{1,0:S(1)}, f32[16,128]{1,0:S(1)}, u32[]{:S(2)})"


def chain(tag, source):
    """Start, a product that goes on beside it, and end."""
    lines = [f"%start.{tag} = {FLIGHT} fusion(%{source}), kind=kCustom, calls=%start"]
    for name, before in (("beside", "start"), ("end", "beside")):
        lines += [
            f"%{name}.a.{tag} = f32[4,128]{{1,0:S(1)}} get-tuple-element(%{before}.{tag}), index=0",
            f"%{name}.b.{tag} = u32[]{{:S(2)}} get-tuple-element(%{before}.{tag}), index=2",
        ]
        shape = FLIGHT if name == "beside" else "f32[16,128]{1,0}"
        lines.append(
            f"%{name}.{tag} = {shape} fusion(%{name}.a.{tag}, %{name}.b.{tag}), kind=kCustom, "
            f"calls=%{name}"
        )
    return "\n".join(f"  {line}" for line in lines)


PARTS = "".join(PART.replace("NAME", name) for name in ("start", "beside", "end"))
GATHERED = 3 * 4 * 128 * 4
LIMITS = Limits({"bfloat16": 1.0}, 1.0, 1000.0)


def test_chains_of_two_loops_may_have_the_same_channel():
    loops, called = PARTS, []
    for tag, trips in (("one", 5), ("two", 3)):
        loops += (
            f"%test.{tag} (t: (s32[])) -> pred[] {{\n  %t = (s32[]) parameter(0)\n"
            "  ROOT %less = pred[] constant(false)\n}\n"
            f"%turn.{tag} (t: (s32[])) -> (s32[]) {{\n  %t = (s32[]) parameter(0)\n"
            f"  %w = f32[4,128]{{1,0}} constant({{...}})\n{chain(tag, 'w')}\n"
            "  ROOT %r = (s32[]) tuple(%t)\n}\n"
        )
        called.append(
            f"  %loop.{tag} = (s32[]) while(%t), condition=%test.{tag}, body=%turn.{tag}, "
            f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
        )
    text = module("  %t = (s32[]) tuple(%x)\n" + "\n".join(called), loops)
    assert [(c.kind, c.times) for c in collectives(text)] == [("all-gather", 5), ("all-gather", 3)]
    assert received_bytes(text) == 8 * GATHERED == roofline(text, LIMITS).received


def test_chains_one_after_the_other_may_have_the_same_channel():
    first = "  %w = f32[4,128]{1,0} constant({...})\n" + chain("one", "w")
    text = module(f"{first}\n{chain('two', 'w')}", PARTS)
    assert received_bytes(text) == 2 * GATHERED == roofline(text, LIMITS).received
    assert received_bytes(module(first, PARTS)) == GATHERED
