"""FLOPs of a step and their share of a peak, by a count of one's own."""

import types

import numpy as np
import pytest
from helpers import trainer_of

from hjax.run.throughput import peak_flops


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        # Answers once, the reference's once, an update thrice.
        ({}, 5.0),
        ({"algorithm.kl_coef": 0.0, "algorithm.epochs": 2}, 7.0),
        # Of what is frozen there are no gradients: 384 of 9,000-odd parameters learn.
        ({"actor.lora.rank": 1}, None),
    ],
)
@pytest.mark.extended
def test_flops_of_a_step_are_those_of_its_tokens(changes, passes):
    with trainer_of("GRPO", {"steps": 1, **changes}) as trainer:
        trainer.costs._peak = 4e12
        row = trainer.step()
        batch, model = trainer.batch, trainer.roles.models["actor"]
    lengths = batch["prompt_mask"].sum(1) + batch["response_mask"].sum(1)
    h, m, vocab, layers = 32, 64, model.vocab_size, 1
    rank = model.lora.rank if model.lora else 0
    products = layers * (4 * h * h + 3 * h * m) + h * vocab
    norms = (2 * layers + 1) * h
    adapters = rank * (4 * 2 * h + 3 * (h + m)) * layers
    each = 2.0 * products * lengths + 4.0 * h * layers * lengths**2 / 2
    if passes is None:
        passes = 2 + 2 + adapters / (adapters + products + norms)
    seconds = row["time/step"]
    expected = passes * each.sum() / seconds / 1e12
    assert row["throughput/tflops"] == pytest.approx(expected, rel=1e-6)
    assert row["throughput/mfu"] == pytest.approx(expected / 4)
    assert np.isfinite(expected)


def test_a_peak_is_told_only_of_known_devices():
    def device(kind):
        return types.SimpleNamespace(device_kind=kind)

    h100, cpu = device("NVIDIA H100 80GB HBM3"), device("cpu")
    assert peak_flops([h100, h100], float32=False) == 2 * 989e12
    assert peak_flops([device("TPU v5 lite")], float32=True) == pytest.approx(197e12 / 6)
    # Rows then have no share of it, see test_trainer_metrics.
    assert peak_flops([h100, cpu], float32=False) == 0
