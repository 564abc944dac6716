"""The reward of the Tinker cookbook's `math_rl` by step, unmodified, against the training service.

The model is stories260K after 3,000 steps of supervised training by hjax (`sft.py`) on
demonstrations of sums, half of which are one too large; the environment is the recipe's
`arithmetic` (what is x + y, up to 100 each).
Writes the curve, and prints one JSON line: rewards, shares of right and of well-formed answers and
gradient norms by step, and the divergence of sampler and trainer. Needs what
tests/extended/test_tinker_cookbook.py names.

    HJAX_TEST_DATA=DIR python benchmarks/training_cookbook.py [--steps=30] [--rate=3e-4]
        [--model=DIR] [--output=docs/images/tinker_math_rl.svg]
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import tempfile

import machine

from hjax.show.charts import ChartSeries, svg_file

sys.path.insert(0, str(machine.ROOT / "tests"))
COLUMNS = {
    "reward": "env/all/reward/total",
    "right": "env/all/correct",
    "well_formed": "env/all/format",
    "grad_norm": "grad_norm",
    "kl_sampler_trainer": "optim/kl_sample_train_v2",
}


def main() -> None:
    """Train, draw the curve, and print the line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--model", default="", help="as warm_model has made it")
    parser.add_argument("--output", default=str(machine.ROOT / "docs/images/tinker_math_rl.svg"))
    args = parser.parse_args()
    from cookbook_tasks import run_recipe, served, warm_model  # type: ignore[import-not-found]

    stories = pathlib.Path(os.environ["HJAX_TEST_DATA"]) / "weights" / "stories260K-hf"
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        model = args.model or warm_model(
            stories, folder / "warm", steps=3000, tasks=("summed",), mistakes=0.5
        )
        with served(model, folder / "store") as url:
            rows = run_recipe(
                url, folder, "math_rl.train", model_name=model, renderer_name="role_colon",
                env="arithmetic", loss_fn="importance_sampling", group_size=16,
                groups_per_batch=16, max_tokens=12, max_steps=args.steps, eval_every=0,
                save_every=0, learning_rate=args.rate,
            )  # fmt: skip
    rows = [row for row in rows if COLUMNS["reward"] in row]
    # A step whose groups are all constant has no gradient.
    found = {name: [round(row.get(key, 0.0), 8) for row in rows] for name, key in COLUMNS.items()}
    points = list(enumerate(found["reward"]))
    series = [ChartSeries("mean reward", points, 0)]
    chart = svg_file("math_rl, arithmetic: mean reward", series, ("start", found["reward"][0]))
    pathlib.Path(args.output).write_text(chart)
    print(json.dumps({**found, **machine.describe()}))


if __name__ == "__main__":
    main()
