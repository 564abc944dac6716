"""The count of compiled programs."""

import gc
import weakref

import jax

from hjax.run.backends import ProcessProbe


def test_counts_programs_by_name_and_goes_when_unused():
    first, second = ProcessProbe(), ProcessProbe()

    def doubled(x):
        return x * 2

    compiled = jax.jit(doubled)
    compiled(1.0)
    compiled(2.0)
    later = ProcessProbe()
    compiled(jax.numpy.ones(3))
    assert first.take_names().count("doubled") == 2 and later.take_names().count("doubled") == 1
    assert first.count == second.count > later.count >= 1
    assert not first.take_names() and first.seconds > 0
    gone = weakref.ref(second)
    del second
    gc.collect()
    assert gone() is None  # nothing that stays with JAX holds it
