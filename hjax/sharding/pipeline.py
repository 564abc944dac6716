"""Pipeline parallelism: stacked layers over the ``pipe`` axes, micro-batches passed along.

The model stays one ordinary function, ``objective(params, micro_batch, stack)``, that calls
``stack`` where its layers stand; what comes before (the embedding) and after (head and loss) is
found by tracing it with different stacks. A stage is one index of the pipe axes: inside
``shard_map`` it holds its slice of every stacked leaf, hands activations on by ``ppermute``, and
the other mesh axes (data, fsdp, tensor, context) stay the compiler's.

Training runs one forward, one backward (1F1B; Narayanan et al. 2021, arXiv 2104.04473): in every
tick a stage runs the forward pass of one micro-batch and the backward pass of an earlier one. Only
the stages' inputs are kept, at most ``2 p - 1`` of them whatever the number of micro-batches, and
a stage's forward runs again in its backward pass. Idle slots are branches not taken. So a step
lasts ``(m + p - 1)`` forward and backward passes of a stage, ``(p - 1) / (m + p - 1)`` of it idle.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from hjax.sharding.layout import Layout
from hjax.trainable_split import TrainableSplit

PIPE_AXES = ("pipe", "pipe_micro")

Tree = Any
# layers(stacked parameters, activations) -> activations, a tree of float arrays of the same shapes
Layers = Callable[[Any, Tree], Tree]
# What a decoder calls in place of its layers: (layers, stacked parameters, embed) -> activations.
Stack = Callable[[Layers, Any, Callable[[], Tree]], Tree]
Objective = Callable[[Any, Any, Stack], Any]

# Passes of forward length in a slot: the backward pass runs the forward again and costs twice it.
_FORWARD, _BACKWARD = 1, 3


def plain(layers: Layers, stacked: Any, embed: Callable[[], Tree]) -> Tree:
    """The stack without a pipeline: all layers, one after another."""
    return layers(stacked, embed())


def first_layer(count: int, layers: int) -> int | jax.Array:
    """Number of the first of ``count`` stacked layers that run, of a model of so many: a stage's,
    where they are not all."""
    return 0 if count == layers else count * jax.lax.axis_index(PIPE_AXES)


class _Embedded(Exception):
    """Ends a trace once the embedding stands."""


class Pipeline:
    """Runs a model whose stacked layers are split over the pipe axes of a train layout.

    Args:
      layout: with more than one stage.
      axes: nested dict like the parameters, of logical axis names; leaves with a leading
        ``layers`` dimension are split over the stages, the others are whole on each.
      partition: of the parameters into what learns and what is frozen.
    """

    def __init__(self, layout: Layout, axes: Tree, partition: TrainableSplit | None = None):
        self.layout = layout
        self._partition = partition or TrainableSplit()
        self.stages = layout.ways("layers")
        self._staged = jax.tree.map(
            lambda names: names[:1] == ("layers",), axes, is_leaf=lambda x: isinstance(x, tuple)
        )
        self.specs = jax.tree.map(
            lambda staged: PartitionSpec(PIPE_AXES) if staged else PartitionSpec(), self._staged
        )

    def gradients(self, objective: Objective, params: Tree, parts: Tree) -> Any:
        """Sums over micro-batches of an objective, and their gradient.

        Args:
          objective: (params, micro-batch, stack) -> (float32 scalar, dict of scalars).
          params: nested dict, laid out for training.
          parts: the batch with a leading dimension of micro-batches.

        Returns:
          ((loss, statistics), gradients of what learns); the statistics have ``pipeline_bubble``
          too, the share of the stages' time in which they idled, from the slots that were executed.
        """
        split, join = self._partition.split, self._partition.join
        learned, frozen = split(params)
        starts, pull = jax.vjp(lambda p: self._starts(objective, join(p, frozen), parts), learned)
        count = jax.tree.leaves(parts)[0].shape[0]

        def body(params: Tree, starts: Tree, parts: Tree) -> Any:
            return self._one_forward_one_backward(objective, params, starts, parts, count)

        whole = PartitionSpec()
        loss, stats, grads, d_starts, busy = self._map(
            body,
            (self.specs, whole, whole),
            (whole, whole, split(self.specs)[0], whole, whole),
        )(params, starts, parts)
        stats = {**stats, "pipeline_bubble": _bubble(busy)}
        return (loss, stats), jax.tree.map(jnp.add, grads, pull(d_starts)[0])

    def forward(self, compute: Objective, params: Tree, parts: Tree) -> Tree:
        """Outputs of every micro-batch, stacked on a leading dimension.

        Args:
          compute: (params, micro-batch, stack) -> nested dict of arrays.
        """
        starts = self._starts(compute, params, parts)
        count = jax.tree.leaves(parts)[0].shape[0]

        def body(params: Tree, starts: Tree, parts: Tree) -> Tree:
            return self._forward(compute, params, starts, parts, count)

        whole = PartitionSpec()
        return self._map(body, (self.specs, whole, whole), whole)(params, starts, parts)

    def _map(self, body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(
            body,
            mesh=self.layout.mesh,
            axis_names=set(PIPE_AXES),
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )

    def _starts(self, objective: Objective, params: Tree, parts: Tree) -> Tree:
        """Embeddings of all micro-batches, [m, rows, length, embed], outside the stages.

        The compiler cannot split a gather over an automatic axis inside a manual region.
        """

        def start(part: Tree) -> Tree:
            found: list[Tree] = []

            def stack(layers: Layers, stacked: Any, embed: Callable[[], Tree]) -> Tree:
                found.append(embed())
                raise _Embedded

            try:
                objective(params, part, stack)
            except _Embedded:
                pass
            return found[0]

        return jax.lax.map(start, parts)

    def _stage(self, objective: Objective, params: Tree, x: Tree, part: Tree) -> Any:
        """This stage's activations, and what the objective makes of them."""
        found: list[Tree] = []

        def stack(layers: Layers, stacked: Any, embed: Callable[[], Tree]) -> Tree:
            found.append(layers(stacked, x))
            return found[0]

        result = objective(params, part, stack)
        return found[0], result

    def _one_forward_one_backward(
        self, objective: Objective, params: Tree, starts: Tree, parts: Tree, count: int
    ) -> Any:
        stages = self.stages
        learned, frozen = self._partition.split(params)

        def run(learned: Tree, x: Tree, part: Tree) -> Any:
            return self._stage(objective, self._partition.join(learned, frozen), x, part)

        stage = jax.lax.axis_index(PIPE_AXES)
        first, last = stage == 0, stage == stages - 1
        kept = 2 * stages - 1  # inputs between a stage's forward and backward pass
        rest = _zeros_of_one(starts)
        example = jax.tree.map(lambda x: x[0], parts)
        shapes = jax.eval_shape(lambda: run(learned, rest, example)[1])
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (learned, rest, shapes))

        def tick(carry: Any, time: jax.Array) -> Any:
            received, returned, inputs, total, d_starts = carry
            ahead, back = time - stage, time - 2 * (stages - 1) + stage
            forwards = (ahead >= 0) & (ahead < count)
            backwards = (back >= 0) & (back < count)
            part = _pick(parts, ahead, count)
            x = _where(first, _pick(starts, ahead, count), received)
            inputs = _where(forwards, _put(inputs, x, ahead % kept), inputs)
            # The last stage's forward is part of its backward pass, in the same tick.
            sent = jax.lax.cond(
                forwards & ~last,
                lambda: run(learned, x, part)[0],
                lambda: rest,
            )
            part = _pick(parts, back, count)
            x = jax.tree.map(lambda held: held[back % kept], inputs)

            turn = jnp.where(backwards, jnp.where(last, 2, 1), 0)
            grads, dx, result = _turned(
                turn, run, learned, x, part=part, returned=returned, nothing=nothing
            )
            total = jax.tree.map(jnp.add, total, (grads, result))
            done = _put(d_starts, dx, jnp.clip(back, 0, count - 1))
            d_starts = _where(backwards & first, done, d_starts)
            busy = _FORWARD * forwards * ~last + _BACKWARD * backwards
            carry = _shift(sent, 1, stages), _shift(dx, -1, stages), inputs, total, d_starts
            return carry, busy

        inputs = jax.tree.map(lambda x: jnp.zeros((kept, *x.shape), x.dtype), rest)
        d_starts = jax.tree.map(jnp.zeros_like, starts)
        zeros = rest, rest, inputs, (nothing[0], nothing[2]), d_starts
        ticks = jnp.arange(count + 2 * (stages - 1))
        (_, _, _, (grads, result), d_starts), busy = jax.lax.scan(tick, zeros, ticks)

        grads = jax.tree.map(
            lambda staged, grad: grad if staged else summed(grad, PIPE_AXES),
            self._partition.split(self._staged)[0],
            grads,
        )
        (loss, stats), d_starts = summed((result, d_starts), PIPE_AXES)
        return loss, stats, grads, d_starts, jax.lax.all_gather(busy, PIPE_AXES)

    def _forward(
        self, compute: Objective, params: Tree, starts: Tree, parts: Tree, count: int
    ) -> Tree:
        stages = self.stages
        stage = jax.lax.axis_index(PIPE_AXES)
        first, last = stage == 0, stage == stages - 1
        rest = _zeros_of_one(starts)
        example = jax.tree.map(lambda x: x[0], parts)
        shapes = jax.eval_shape(lambda: self._stage(compute, params, rest, example)[1])
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        def tick(received: Tree, time: jax.Array) -> Any:
            index = time - stage
            busy = (index >= 0) & (index < count)
            part = _pick(parts, index, count)
            x = _where(first, _pick(starts, index, count), received)
            turn = jnp.where(busy, jnp.where(last, 2, 1), 0)
            sent, result = jax.lax.switch(
                turn,
                (
                    lambda: (rest, nothing),
                    lambda: (self._stage(compute, params, x, part)[0], nothing),
                    lambda: (rest, self._stage(compute, params, x, part)[1]),
                ),
            )
            return _shift(sent, 1, stages), result

        _, results = jax.lax.scan(tick, rest, jnp.arange(count + stages - 1))
        # Only the last stage's, from its first busy tick on, are not zero.
        return summed(jax.tree.map(lambda x: x[stages - 1 :], results), PIPE_AXES)


def summed(tree: Tree, axes: str | tuple[str, ...]) -> Tree:
    """Sums over axes of a region whose other axes are the compiler's.

    bfloat16 is added in float32: on CPUs XLA ends the process over such a sum of bfloat16. Where
    all stages but one have zeros it is the same number.
    """

    def one(x: jax.Array) -> jax.Array:
        if x.dtype != jnp.bfloat16:
            return jax.lax.psum(x, axes)
        return jax.lax.psum(x.astype(jnp.float32), axes).astype(x.dtype)

    return jax.tree.map(one, tree)


def _turned(
    turn: jax.Array,
    run: Callable[[Tree, Tree, Tree], Any],
    learned: Tree,
    x: Tree,
    part: Tree,
    returned: Tree,
    nothing: Tree,
) -> Any:
    """A stage's backward pass: gradients of its parameters and of x, and the objective's result.

    Args:
      turn: 0: idle; 1: of what the stage after it has ``returned``; 2: of the objective.
      run: of parameters, x and a micro-batch the stage's activations, and the objective's result.
      nothing: zeros in place of what is returned.
    """

    def middle() -> Any:
        _, pull = jax.vjp(lambda p, x: run(p, x, part)[0], learned, x)
        return *pull(returned), nothing[2]

    def end() -> Any:
        value_and_grad = jax.value_and_grad(lambda p, x: run(p, x, part)[1], (0, 1), has_aux=True)
        result, (grads, dx) = value_and_grad(learned, x)
        return grads, dx, result

    return jax.lax.switch(turn, (lambda: nothing, middle, end))


def _pick(tree: Tree, index: jax.Array, count: int) -> Tree:
    at = jnp.clip(index, 0, count - 1)
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, at, keepdims=False), tree)


def _put(tree: Tree, part: Tree, at: jax.Array) -> Tree:
    return jax.tree.map(
        lambda x, own: jax.lax.dynamic_update_index_in_dim(x, own, at, 0), tree, part
    )


def _where(condition: jax.Array, this: Tree, other: Tree) -> Tree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), this, other)


def _zeros_of_one(starts: Tree) -> Tree:
    """Zeros like one micro-batch's."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), starts)


def _shift(tree: Tree, by: int, stages: int) -> Tree:
    """From every stage to the next (or the one before); the end gets zeros."""
    pairs = [(s, s + by) for s in range(stages) if 0 <= s + by < stages]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, PIPE_AXES, pairs), tree)


def _bubble(busy: jax.Array) -> jax.Array:
    """Share of idle time, of int [stages, ticks] work: a tick lasts as long as its longest."""
    lasted = jnp.sum(jnp.max(busy, axis=0)) * busy.shape[0]
    return 1 - jnp.sum(busy) / lasted
