"""Pipeline parallelism: stacked layers over the ``pipe`` axes, micro-batches passed along.

The model stays one ordinary function, ``objective(params, micro_batch, stack)``, that calls
``stack`` in place of its layers. Tracing it with different stacks separates the embedding before
the layers from the head and loss after them. A stage is one index of the pipe axes. Inside
``shard_map`` it holds its slice of every stacked leaf and passes activations on by ``ppermute``;
the compiler keeps the other mesh axes (data, fsdp, tensor, context).

Training runs one forward, one backward (1F1B; Narayanan et al. 2021, arXiv 2104.04473): in every
tick a stage runs the forward pass of one micro-batch and the backward pass of an earlier one. Only
the stages' inputs are buffered, at most ``2 p - 1`` for any number of micro-batches, and a stage's
forward runs again in its backward pass. Idle slots are branches not taken. So a step lasts
``(m + p - 1)`` forward and backward passes of a stage, and ``(p - 1) / (m + p - 1)`` of it is idle.
"""

import functools
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

# Costs in forward passes: the backward pass runs the forward again and costs two more.
_FORWARD, _BACKWARD = 1, 3


def run_all_layers(layers: Layers, stacked: Any, embed: Callable[[], Tree]) -> Tree:
    """The ``Stack`` without a pipeline: all layers, one after another."""
    return layers(stacked, embed())


def first_layer(count: int, layers: int) -> int | jax.Array:
    """Index of the first of ``count`` stacked layers, in a model of ``layers``: the stage's offset
    if it holds a part of them, else 0."""
    return 0 if count == layers else count * jax.lax.axis_index(PIPE_AXES)


class _Embedded(Exception):
    """Ends a trace after the embedding."""


class Pipeline:
    """Runs a model whose stacked layers are split over the pipe axes of a train layout.

    Args:
      layout: with more than one stage.
      axes: nested dict like the parameters, of logical axis names; leaves with a leading
        ``layers`` dimension are split over the stages, the others are replicated.
      partition: of the parameters into trainable and frozen ones.
    """

    def __init__(self, layout: Layout, axes: Tree, partition: TrainableSplit | None = None):
        self.layout = layout
        self._partition = partition or TrainableSplit()
        self.stages = layout.shard_count("layers")
        self._map = functools.partial(
            jax.shard_map, mesh=layout.mesh, axis_names=set(PIPE_AXES), check_vma=False
        )
        self._staged = jax.tree.map(
            lambda names: names[:1] == ("layers",), axes, is_leaf=lambda x: isinstance(x, tuple)
        )
        self.specs = jax.tree.map(
            lambda staged: PartitionSpec(PIPE_AXES) if staged else PartitionSpec(), self._staged
        )

    def gradients(self, objective: Objective, params: Tree, parts: Tree) -> Any:
        """Gradient accumulation through the pipeline: an objective summed over micro-batches.

        Args:
          objective: (params, micro-batch, stack) -> (float32 scalar, dict of scalars).
          params: nested dict, in the train layout.
          parts: the batch with a leading dimension of micro-batches.

        Returns:
          ((loss, statistics), gradients of the trainable parameters). The statistics also have
          ``pipeline_bubble``, the idle share of the stages' time, from executed slots.
        """
        split, join = self._partition.split, self._partition.join
        learned, frozen = split(params)
        embedded, pull = jax.vjp(lambda p: self._embed(objective, join(p, frozen), parts), learned)
        count = jax.tree.leaves(parts)[0].shape[0]

        def body(params: Tree, embedded: Tree, parts: Tree) -> Any:
            return self._one_forward_one_backward(objective, params, embedded, parts, count)

        whole = PartitionSpec()
        loss, stats, grads, d_embedded, busy = self._map(
            body,
            in_specs=(self.specs, whole, whole),
            out_specs=(whole, whole, split(self.specs)[0], whole, whole),
        )(params, embedded, parts)
        stats = {**stats, "pipeline_bubble": _bubble(busy)}
        return (loss, stats), jax.tree.map(jnp.add, grads, pull(d_embedded)[0])

    def forward(self, compute: Objective, params: Tree, parts: Tree) -> Tree:
        """Outputs of all micro-batches, stacked on a leading dimension.

        Args:
          compute: (params, micro-batch, stack) -> nested dict of arrays.
        """
        embedded = self._embed(compute, params, parts)
        count = jax.tree.leaves(parts)[0].shape[0]

        def body(params: Tree, embedded: Tree, parts: Tree) -> Tree:
            return self._forward(compute, params, embedded, parts, count)

        whole = PartitionSpec()
        run = self._map(body, in_specs=(self.specs, whole, whole), out_specs=whole)
        return run(params, embedded, parts)

    def _embed(self, objective: Objective, params: Tree, parts: Tree) -> Tree:
        """Embeddings of all micro-batches, [m, rows, length, embed], outside the stages.

        Inside a ``shard_map`` region the compiler cannot split a gather over the other axes.
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
        """This stage's output activations, and the objective's result for them."""
        found: list[Tree] = []

        def stack(layers: Layers, stacked: Any, embed: Callable[[], Tree]) -> Tree:
            found.append(layers(stacked, x))
            return found[0]

        result = objective(params, part, stack)  # fills `found`
        return found[0], result

    def _one_forward_one_backward(
        self, objective: Objective, params: Tree, embedded: Tree, parts: Tree, count: int
    ) -> Any:
        stages = self.stages
        learned, frozen = self._partition.split(params)

        def run(learned: Tree, x: Tree, part: Tree) -> Any:
            return self._stage(objective, self._partition.join(learned, frozen), x, part)

        stage = jax.lax.axis_index(PIPE_AXES)
        first, last = stage == 0, stage == stages - 1
        buffered = 2 * stages - 1  # inputs kept between a stage's forward and backward pass
        zero_x = _zeros_of_one(embedded)
        example = jax.tree.map(lambda x: x[0], parts)
        shapes = jax.eval_shape(lambda: run(learned, zero_x, example)[1])
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (learned, zero_x, shapes))

        def tick(carry: Any, time: jax.Array) -> Any:
            received, d_received, inputs, total, d_embedded = carry
            forward_index, backward_index = time - stage, time - 2 * (stages - 1) + stage
            forward = (forward_index >= 0) & (forward_index < count)
            runs_backward = (backward_index >= 0) & (backward_index < count)
            part = _pick(parts, forward_index, count)
            x = _where(first, _pick(embedded, forward_index, count), received)
            inputs = _where(forward, _store(inputs, x, forward_index % buffered), inputs)
            # The last stage's forward is part of its backward pass, in the same tick.
            sent = jax.lax.cond(forward & ~last, lambda: run(learned, x, part)[0], lambda: zero_x)
            part = _pick(parts, backward_index, count)
            x = jax.tree.map(lambda buffer: buffer[backward_index % buffered], inputs)

            branch = jnp.where(runs_backward, jnp.where(last, 2, 1), 0)
            grads, dx, result = _backward(
                branch, run, learned, x, part=part, d_received=d_received, zeros=zeros
            )
            total = jax.tree.map(jnp.add, total, (grads, result))
            done = _store(d_embedded, dx, jnp.clip(backward_index, 0, count - 1))
            d_embedded = _where(runs_backward & first, done, d_embedded)
            busy = _FORWARD * forward * ~last + _BACKWARD * runs_backward
            carry = _shift(sent, 1, stages), _shift(dx, -1, stages), inputs, total, d_embedded
            return carry, busy

        inputs = jax.tree.map(lambda x: jnp.zeros((buffered, *x.shape), x.dtype), zero_x)
        d_embedded = jax.tree.map(jnp.zeros_like, embedded)
        carry = zero_x, zero_x, inputs, (zeros[0], zeros[2]), d_embedded
        ticks = jnp.arange(count + 2 * (stages - 1))
        (_, _, _, (grads, result), d_embedded), busy = jax.lax.scan(tick, carry, ticks)

        grads = jax.tree.map(
            lambda staged, grad: grad if staged else psum_tree(grad, PIPE_AXES),
            self._partition.split(self._staged)[0],
            grads,
        )
        (loss, stats), d_embedded = psum_tree((result, d_embedded), PIPE_AXES)
        return loss, stats, grads, d_embedded, jax.lax.all_gather(busy, PIPE_AXES)

    def _forward(
        self, compute: Objective, params: Tree, embedded: Tree, parts: Tree, count: int
    ) -> Tree:
        stages = self.stages
        stage = jax.lax.axis_index(PIPE_AXES)
        first, last = stage == 0, stage == stages - 1
        zero_x = _zeros_of_one(embedded)
        example = jax.tree.map(lambda x: x[0], parts)
        shapes = jax.eval_shape(lambda: self._stage(compute, params, zero_x, example)[1])
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        def tick(received: Tree, time: jax.Array) -> Any:
            index = time - stage
            busy = (index >= 0) & (index < count)
            part = _pick(parts, index, count)
            x = _where(first, _pick(embedded, index, count), received)
            sent, result = jax.lax.switch(
                jnp.where(busy, jnp.where(last, 2, 1), 0),
                (
                    lambda: (zero_x, zeros),
                    lambda: (self._stage(compute, params, x, part)[0], zeros),
                    lambda: (zero_x, self._stage(compute, params, x, part)[1]),
                ),
            )
            return _shift(sent, 1, stages), result

        _, results = jax.lax.scan(tick, zero_x, jnp.arange(count + stages - 1))
        # Only results of the last stage, from its first busy tick on, are not zero.
        return psum_tree(jax.tree.map(lambda x: x[stages - 1 :], results), PIPE_AXES)


def psum_tree(tree: Tree, axes: str | tuple[str, ...]) -> Tree:
    """``psum`` over axes of a ``shard_map`` region whose other axes are the compiler's.

    bfloat16 is summed in float32, because XLA's CPU compiler aborts the process on such a sum of
    bfloat16. The result is the same where all stages but one have zeros.
    """

    def one(x: jax.Array) -> jax.Array:
        if x.dtype != jnp.bfloat16:
            return jax.lax.psum(x, axes)
        return jax.lax.psum(x.astype(jnp.float32), axes).astype(x.dtype)

    return jax.tree.map(one, tree)


def _backward(
    branch: jax.Array,
    run: Callable[[Tree, Tree, Tree], Any],
    learned: Tree,
    x: Tree,
    part: Tree,
    d_received: Tree,
    zeros: Tree,
) -> Any:
    """A stage's backward pass: gradients of its parameters and of x, and the objective's result.

    Args:
      branch: 0: idle; 1: from ``d_received``; 2: from the objective (the last stage).
      run: (parameters, x, micro-batch) -> (the stage's activations, the objective's result).
      d_received: gradients of this stage's activations, from the next stage.
      zeros: the results of an idle stage.
    """

    def from_next_stage() -> Any:
        _, pull = jax.vjp(lambda p, x: run(p, x, part)[0], learned, x)
        return *pull(d_received), zeros[2]

    def from_objective() -> Any:
        value_and_grad = jax.value_and_grad(lambda p, x: run(p, x, part)[1], (0, 1), has_aux=True)
        result, (grads, dx) = value_and_grad(learned, x)
        return grads, dx, result

    return jax.lax.switch(branch, (lambda: zeros, from_next_stage, from_objective))


def _pick(tree: Tree, index: jax.Array, count: int) -> Tree:
    at = jnp.clip(index, 0, count - 1)
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, at, keepdims=False), tree)


def _store(tree: Tree, part: Tree, at: jax.Array) -> Tree:
    return jax.tree.map(
        lambda x, own: jax.lax.dynamic_update_index_in_dim(x, own, at, 0), tree, part
    )


def _where(condition: jax.Array, this: Tree, other: Tree) -> Tree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), this, other)


def _zeros_of_one(embedded: Tree) -> Tree:
    """Zeros like the embeddings of one micro-batch."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), embedded)


def _shift(tree: Tree, by: int, stages: int) -> Tree:
    """Send from every stage to the one ``by`` further; stages without a sender get zeros."""
    pairs = [(s, s + by) for s in range(stages) if 0 <= s + by < stages]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, PIPE_AXES, pairs), tree)


def _bubble(busy: jax.Array) -> jax.Array:
    """Idle share of the stages' time; ``busy``: int [stages, ticks], costs. A tick lasts as long as
    its busiest stage."""
    available = jnp.sum(jnp.max(busy, axis=0)) * busy.shape[0]
    return 1 - jnp.sum(busy) / available
