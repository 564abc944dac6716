"""Kernels broken on purpose, under the names of forms: a table of cases for test_launch_check.py
that stands in for `hjax.launch.form_checks.case_table`."""

import os
import signal
import time

import jax
import jax.numpy as jnp

from hjax.kernels import attention, verdict
from hjax.launch.form_checks.comparison import Case
from hjax.launch.form_checks.kernel_cases import AttentionSizes, attention_cases


def right(q, k, v, segments, sinks, scoring, mask_spec, **_):
    return attention.reference(q, k, v, segments, sinks, scoring, mask_spec)


def wrong_scale(q, *rest, **_):
    return right(q * 1.1, *rest)


def wrong_mask(q, k, v, segments, *rest, **_):
    return right(q, k, v, None, *rest)


def nan_in_padding(q, k, v, segments, *rest, **_):
    return jnp.where(segments[:, :, None, None] == 0, jnp.nan, right(q, k, v, segments, *rest))


def last_block_dropped(q, *rest, **_):
    return right(q, *rest).at[:, 48:].set(0)


def no_gradient_of_keys(q, k, *rest, **_):
    return right(q, jax.lax.stop_gradient(k), *rest)


def hangs():
    time.sleep(3600)


def crashes():
    os.kill(os.getpid(), signal.SIGSEGV)


SIZES = {"padding": AttentionSizes(60, padded=9)}
GOOD = Case("a right one", lambda: "")


def of(kernel):
    return lambda: attention_cases(kernel, SIZES, ("bfloat16",))


CASES = {
    verdict.SPLASH: of(wrong_scale),
    verdict.MEGABLOX: of(nan_in_padding),
    verdict.CUDNN_ATTENTION: of(wrong_mask),
    verdict.GPU_DECODING: of(last_block_dropped),
    verdict.EXPERT_RING: of(no_gradient_of_keys),
    verdict.TPU_DECODING: lambda: [Case("a hang", hangs), GOOD],
    verdict.COLLECTIVE_MATMUL: lambda: [Case("a crash", crashes), GOOD],
    verdict.SPARSECORE: of(right),
}
