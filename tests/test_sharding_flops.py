"""FLOPs of a jaxpr, against arithmetic by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import Mesh, PartitionSpec

from hjax.kernels import blockwise, splash
from hjax.kernels.attention import attend, cost_label
from hjax.models.compute import Compute
from hjax.models.forward import sequence_states, token_log_probs
from hjax.models.model_config import ModelConfig
from hjax.models.parameters import decoder_network
from hjax.xla.flops import Flops, count_flops, scope_cost
from hjax.xla.hlo import parse


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def flops(function, *arguments, **options):
    return count_flops(jax.jit(function).trace(*arguments).jaxpr, **options)


def test_a_product_is_two_operations_per_multiplication():
    product = flops(jnp.matmul, array(3, 5), array(5, 7))
    assert product == Flops(2 * 3 * 5 * 7)
    batched = flops(lambda x, y: jnp.einsum("bij,bkj->bik", x, y), array(4, 3, 5), array(4, 7, 5))
    assert batched == Flops(4 * 2 * 3 * 5 * 7)


def test_a_convolution():
    # 2 images of 8 x 8, 3 channels in, 4 out, a 3 x 3 kernel without padding: 6 x 6 results.
    def convolve(x, kernel, **options):
        return lax.conv_general_dilated(x, kernel, (1, 1), "VALID", **options)

    assert flops(convolve, array(2, 3, 8, 8), array(4, 3, 3, 3)) == Flops(
        2 * (2 * 4 * 6 * 6) * (3 * 3 * 3)
    )
    grouped = flops(
        lambda x, k: convolve(x, k, feature_group_count=2), array(2, 6, 8, 8), array(4, 3, 3, 3)
    )
    assert grouped == Flops(2 * (2 * 4 * 6 * 6) * (3 * 3 * 3))


def test_a_ragged_product_counts_each_row_once():
    x, w, sizes = array(8, 4), array(3, 4, 5), array(3, dtype=jnp.int32)
    assert flops(lax.ragged_dot, x, w, sizes) == Flops(2 * 8 * 4 * 5)

    def loss(x, w, sizes):
        return lax.ragged_dot(x, w, sizes).sum()

    # The two gradients are one product each, of the same size as the forward's.
    gradients = flops(jax.grad(loss, argnums=(0, 1)), x, w, sizes)
    assert 2 * 2 * 8 * 4 * 5 <= gradients.products <= 3 * 2 * 8 * 4 * 5


def test_elementwise_operations_and_reductions():
    assert flops(lambda x, y: jnp.exp(x) * y + 1.0, array(6, 7), array(6, 7)) == Flops(0, 3 * 42)
    assert flops(lambda x: x.sum(axis=0), array(6, 7)) == Flops(0, 42)
    # Neither integers nor comparisons, casts and copies.
    assert flops(lambda x: x * 2 + 1, array(6, dtype=jnp.int32)).total == 0
    assert flops(lambda x: jnp.where(x > 0, x.T, 0).astype(jnp.bfloat16), array(6, 6)).total == 0
    assert flops(lambda x: x + x, array(6, dtype=jnp.bfloat16)) == Flops(0, 6)


def test_a_scan_counts_its_length():
    def chain(x):
        return lax.scan(lambda c, _: (c @ x, None), x, length=10)[0]

    assert flops(chain, array(4, 4)) == Flops(10 * 2 * 4**3)
    assert flops(lambda x: lax.fori_loop(0, 3, lambda i, c: chain(c), x), array(4, 4)) == Flops(
        3 * 10 * 2 * 4**3
    )


def test_a_while_loop_takes_its_trips_from_the_caller():
    def loop(x):
        return lax.while_loop(lambda c: c[0, 0] > 0, lambda c: c @ x, x)

    assert flops(loop, array(4, 4), loop_trips=7) == Flops(7 * 2 * 4**3, 0, open_loops=1)
    with pytest.raises(ValueError, match="give loop_trips"):
        flops(loop, array(4, 4))


def test_a_scope_tells_how_many_turns_of_a_loop_to_expect():
    def halve(x, least):
        with jax.named_scope("trips:3"):
            return lax.while_loop(lambda x: x.sum() > least, lambda x: x @ x / 2, x)

    given = array(8, 8), array()
    for function, turns in ((halve, 3), (jax.remat(halve), 3), (jax.vmap(halve, (0, None)), 12)):
        arguments = (array(4, 8, 8), array()) if turns == 12 else given
        counted = flops(function, *arguments)
        assert counted.products == turns * 2 * 8**3 and not counted.open_loops
    module = parse(jax.jit(halve).lower(*given).compile().as_text())
    found = [
        module.trips(computation, instruction)
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode == "while"
    ]
    assert found == [3]


def test_a_conditional_counts_its_dearest_branch():
    def either(x):
        return lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x + 1, x)

    assert flops(either, array(4, 4)) == Flops(2 * 2 * 4**3)


def test_remat_counts_what_is_done_again():
    def loss(x, w, again):
        layer = lambda x: jnp.tanh(jnp.tanh(x @ w) @ w)  # noqa: E731
        return (jax.checkpoint(layer) if again else layer)(x).sum()

    once = flops(jax.grad(lambda x, w: loss(x, w, False), (0, 1)), array(4, 4), array(4, 4))
    twice = flops(jax.grad(lambda x, w: loss(x, w, True), (0, 1)), array(4, 4), array(4, 4))
    # Forward 2, backward 4; the forward's products once more.
    assert once.products == 6 * 2 * 4**3
    assert twice.products == 8 * 2 * 4**3


def test_custom_derivatives_count_what_is_called():
    @jax.custom_vjp
    def square(x):
        return x @ x

    square.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x.T + x.T @ g,))
    assert flops(square, array(4, 4)).products == 2 * 4**3
    gradient = flops(jax.grad(lambda x: square(x).sum()), array(4, 4))
    assert gradient.products == 3 * 2 * 4**3
    assert flops(jax.nn.relu, array(4, 4)) == Flops(0, 16)


def test_shard_map_counts_every_device():
    mesh = Mesh(jax.devices()[:8], ("data",))
    rows = PartitionSpec("data")

    def local(x, w):
        assert x.shape == (2, 4)  # of 16 rows
        return x @ w

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows)
    assert flops(mapped, array(16, 4), array(4, 4)) == Flops(2 * 16 * 4 * 4)
    # Along an axis that splits nothing all devices do the same.
    repeated = jax.shard_map(
        lambda x, w: x @ w, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec()
    )
    assert flops(repeated, array(16, 4), array(4, 4)) == Flops(8 * 2 * 16 * 4 * 4)


def test_a_kernel_counts_its_grid():
    def kernel(x, w, out):
        out[...] = x[...] @ w[...]

    block = pl.BlockSpec((8, 16), lambda i: (i, 0))
    product = pl.pallas_call(
        kernel,
        out_shape=array(32, 16),
        grid=(4,),
        in_specs=[block, pl.BlockSpec((16, 16), lambda i: (0, 0))],
        out_specs=block,
    )
    assert flops(product, array(32, 16), array(16, 16)) == Flops(2 * 32 * 16 * 16)


@pytest.mark.parametrize("remat", ["none", "products", "full"])
def test_training_a_decoder_is_six_operations_per_parameter_and_token(remat):
    hidden, mlp, layers, vocab, batch, length = 256, 688, 3, 512, 2, 32
    config = ModelConfig(
        vocab_size=vocab, hidden_size=hidden, mlp_size=mlp, layers=layers, heads=4, kv_heads=4,
        head_dim=64, max_length=length,
    )  # fmt: skip
    network = decoder_network(config)

    def loss(params, tokens, mask):
        model = network.bind(params)
        states = sequence_states(model, tokens, mask, Compute(remat=remat))
        return token_log_probs(model, states, tokens, with_entropy=False)[0].sum()

    tokens = batch, length
    found = flops(
        jax.grad(loss), network.shapes, array(*tokens, dtype=jnp.int32), array(*tokens, dtype=bool)
    )
    in_layers = layers * (4 * hidden**2 + 3 * hidden * mlp)
    # Scores and weighted values: two products of each token with all of its row.
    attention = layers * 2 * length * hidden
    tokens = batch * length
    forward = 2 * tokens * (in_layers + vocab * hidden + attention)
    # Short sequences' scores are made again where products are kept.
    made_again = {"none": 0, "products": attention, "full": in_layers + attention}
    again = 2 * tokens * made_again[remat]
    # The last product of a layer (remat: `down`) need not be made again.
    saved = 2 * tokens * layers * hidden * mlp if remat == "full" else 0
    assert found.products == 3 * forward + again - saved
    if remat == "none":
        rule = 6 * (in_layers + vocab * hidden) * tokens
        assert found.products == pytest.approx(rule, rel=0.03)
        assert found.elementwise < 0.05 * found.products


def test_a_scope_tells_what_a_kernel_costs():
    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...] @ x_ref[...]

    def run(x):
        call = pl.pallas_call(kernel, out_shape=array(8, 8), grid=(4,), name="squares_fwd")
        with jax.named_scope("squares_fwd"):
            return call(x)

    def told(x):
        with jax.named_scope(cost_label((("_fwd", 1200.0, 64.0), ("_bwd", 7.0, 8.0)))):
            return jax.jit(run)(x)

    def told_of_another(x):
        with jax.named_scope(cost_label((("_other", 1200.0, 64.0),))):
            return run(x)

    body = 4 * 2 * 8 * 8 * 8
    assert [flops(f, array(8, 8)).products for f in (run, told, told_of_another)] == [
        body, 1200, body,
    ]  # fmt: skip
    assert scope_cost("a/cost:_fwd=1.5e+3,2e+0:_dq=3e+3,4e+0/vmap(x_dq)/call") == (3000.0, 4.0)
    assert scope_cost("a/x_dq/cost:_dq=3e+3,4e+0/call") is None


def test_attention_counts_the_blocks_that_are_seen():
    length, heads, dim = 2048, 4, 128
    q, k = array(2, length, heads, dim), array(2, length, 2, dim)

    def of(kernel, function):
        return flops(function(lambda q, k, v: attend(kernel, q, k, v).sum()), q, k, k).products

    def gradient(f):
        return jax.grad(f, (0, 1, 2))

    # 512 places a block: of 4 x 4 blocks 10 are seen; a block's product:
    product = 2 * heads * 10 * 2 * 512**2 * dim
    weighed = 2 * 2 * heads * length * dim  # outputs by their gradients, once
    # Forward scores and values; backward by blocks five products, in splash's two kernels seven.
    assert of(blockwise.attend, lambda f: f) == of(splash.attend, lambda f: f) == 2 * product
    assert of(blockwise.attend, gradient) == (2 + 5) * product
    assert of(splash.attend, gradient) == (2 + 3 + 4) * product + weighed
