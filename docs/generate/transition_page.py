"""docs/transition.md, with every case of Table 2 compiled, run and counted.

`python docs/generate/transition_page.py` writes the page, and the rows of all cases into
benchmarks/RESULTS.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from hjax.dryrun.transition_groups import METHODS, Table2Case, describe_groups, table2

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "transition.md"
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
BEGIN, END = "<!-- written by docs/generate/transition_page.py: do not edit -->", "<!-- end -->"
SIZES = (1, 2, 4, 8, 16)
DEVICES = 16
# Small arrays that divide over 16 devices, of equal size: each is a bucket.
AXES = {
    **{f"matrix_{i}": ("layers", "embed", "heads") for i in range(4)},
    "norm": ("layers", "embed"),
}
SHAPES = {"layers": 16, "embed": 2, "heads": 16}
EXAMPLE = Table2Case(1, 4, 2, 1, 2)

TEXT = """\
# The transition between training and generation

<!-- written by `python docs/generate/transition_page.py`: do not edit -->

```sh
python -m hjax.launch.transition --train=1,4,2 --generate=1,2
python -m hjax.launch.transition --train=1,8,8 --generate=1,2 --model=llama-7b --method=vanilla
python -m hjax.launch.transition --train=1,8,8 --generate=1,2 --dtype=bfloat16 --topology=v5e:8x8
```

The command prints what a change of layout receives, holds and keeps twice. `--topology` adds how
far apart the devices of each group stand ([meshes](meshes.md)). Up to 128 devices are simulated and
every program is compiled. Above 128 the planned moves are counted.

Training splits a model finely: gradients and optimizer state take many times the memory of the
weights. Generation splits it coarsely: every split costs communication per token. So the actor's
weights change their layout twice per step. This is HybridFlow's 3D-HybridEngine
([paper](https://arxiv.org/abs/2409.19256), section 5). Training has p-t-d groups (pipeline, tensor,
data). Generation has p_g-t_g-d_g-d groups of the same devices, with d_g = p t / (p_g t_g).

## How it works

- **One mesh.** Both layouts are rule tables on one mesh. Training's axis of size t is split into
  `tensor` (t_g) and `tensor_micro` (t / t_g), its pipeline into `pipe` and `pipe_micro`. Training
  uses both of each pair, generation the first; the micro axes split generation's batch.
- **No redundancy.** The generation axis is major, so a device's generation shard contains its
  training shard. An all-gather in the micro groups (consecutive ranks) makes the generation shard;
  a local slice gives the training shard back (`hjax/sharding/layout.py`).
- **Planned moves.** For each array the cheapest sequence of moves (slice, all-to-all, all-gather,
  permute) is searched and run as explicit collectives, so the bytes are the planned ones.
  Parameters sharded by rows over (fsdp, tensor) reach columns over tensor by an all-to-all and an
  all-gather; XLA alone takes a full replica of them (`hjax/sharding/reshard_plan.py`).
- **Buckets.** Arrays move in buckets of `rollout.transition_bucket_bytes` (at least one array),
  largest first. An array stacked over layers moves in slices. A source is freed when its target
  stands, so the peak is M / (t_g p_g) and one bucket. Arrays that both layouts hold alike are the
  same arrays in both and are never freed.
- **Narrower dtype.** Arrays are cast before they move, so half the bytes travel. The float32
  masters stay in their training shards beside the one generation copy; the way back drops the copy.
- **The way back moves nothing**: a local slice, or the copy is dropped. Training's parameters come
  back even where generation fails.
- **Disjoint pools.** Every byte crosses once, to one device of the other pool, which then gathers
  by the same moves; the source stays. The plan follows from the two layouts alone
  (`hjax/sharding/transfer_plan.py`). Arrays of one process, or pieces of another world's, take it
  (`hjax/sharding/cross_mesh_transfer.py`).
- **Cost.** `Transition.cost()` says before it runs: bytes received per device, read off the
  compiled programs (loops times their trips), peak, temporaries and redundant bytes. What no move
  does is left to the compiler and named.

## The paper's example

Eight devices, training 1-4-2, generation 1-2-2-2. A mark per quarter of the model:

{pictures}

{groups}

With the vanilla grouping ranks 1 and 2 (and 5, 6) generate with weights that they do not train, so
every device keeps two sets. The 3D-HybridEngine's ranks already hold half of what they need.

## Formulas

The paper's Table 2, bytes as a share of the model's bytes M:

| | received | most held | redundant |
|---|---|---|---|
| gather_all (DeepSpeed-Chat) | (tpd − 1) / tpd | 1 | 1 / tpd |
| vanilla (HybridFlow-V) | (tp − 1) / tp | 1 | 1 / tp |
| hybridflow | (tp − t_g p_g) / (t_g p_g t p) | 1 / (t_g p_g) | 0 |

Every case of p, t, d, p_g, t_g in powers of two with p t d of at most {devices} was compiled,
counted, and run there and back on simulated devices. M counts the arrays that are split over all of
p t: here four, in a bucket each. The others (a norm, where t > 1) are counted apart. "Most held" is
bytes alive while it ran; it exceeds the formula by at most the bucket that is being moved. The rows
of all cases are in [RESULTS.md](../benchmarks/RESULTS.md#every-case-of-the-transition).

{summary}

**Which programs know the formulas.** hybridflow's program is the transition that a run takes: its
moves are searched from the two layouts. Vanilla's and gather_all's were written to do what the
formulas say (`hjax/dryrun/gather_all_baseline.py`): they gather the whole model, hold it and a
bucket, and cut it. Their agreement with the formulas is no evidence of other systems.

**Plain resharding** is a program that knows no method: the identity from the same shards to the
same shards, laid out by the compiler, one program for all arrays. It is compiled and not run; its
redundancy follows from the shards. It need not gather the whole model: in the example above a
device of vanilla receives half of it instead of three quarters, and keeps the same quarter beside
it. `--method=vanilla` and `--method=gather_all` print the plain figures of a case.
"""


def cases(most: int = DEVICES) -> list[Table2Case]:
    """All cases in powers of two on at most so many devices."""
    found = []
    for p, t, d in itertools.product(SIZES, repeat=3):
        for p_g, t_g in itertools.product(SIZES, repeat=2):
            if p * t * d <= most and p % p_g == 0 and t % t_g == 0:
                found.append(Table2Case(p, t, d, p_g, t_g))
    return found


def measured_rows(devices: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Every case by every method, compiled, run and counted."""
    import jax
    import jax.numpy as jnp

    from hjax.dryrun.transition_cost import lay_out, measure, resharded

    leaves = {
        name: (axes, jax.ShapeDtypeStruct(tuple(SHAPES[a] for a in axes), jnp.float32))
        for name, axes in AXES.items()
    }
    for case in cases(len(devices)):
        for method in METHODS:
            setup = lay_out(case, method, devices, leaves)
            yield measure(case, method, setup, bucket_bytes=1) | {"resharded": resharded(setup)}


def transition_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The text of docs/transition.md, from ``measured_rows``."""
    example = _by_case(rows)[EXAMPLE]
    return TEXT.format(
        devices=DEVICES,
        pictures=_pictures(example),
        groups=_groups(example),
        summary=_summary(rows),
    )


def _pictures(example: dict[str, dict[str, Any]]) -> str:
    from hjax.dryrun.transition_groups import LEGEND, rank_marks

    lines = ["```", "rank  training  hybridflow  vanilla"]
    for rank in range(EXAMPLE.devices):
        before, after = rank_marks(example["hybridflow"], rank)
        lines.append(
            f"{rank:>4}  {before}      {after}        {rank_marks(example['vanilla'], rank)[1]}"
        )
    return "\n".join([*lines, "", LEGEND, "```"])


def _groups(example: dict[str, dict[str, Any]]) -> str:
    lines = ["| groups (ranks from 0) | tensor | micro data |", "|---|---|---|"]
    train = describe_groups(example["hybridflow"]["train_groups"])
    lines.append(f"| training | {train['tensor']} | |")
    for method in ("hybridflow", "vanilla"):
        found = describe_groups(example[method]["groups"])
        lines.append(f"| generation, {method} | {found['tensor']} | {found['micro_data']} |")
    return "\n".join(lines)


def _summary(rows: Sequence[dict[str, Any]]) -> str:
    of = {method: [row for row in rows if row["method"] == method] for method in METHODS}
    back = sum(row["back_bytes"] for row in rows)
    mine = [row["measured"]["redundancy"] for row in of["hybridflow"]]
    fewer = [0, 0, 0]
    for row, other in zip(of["hybridflow"], of["vanilla"], strict=True):
        own, plain = row["measured"]["communication"], other["resharded"]["communication"]
        fewer[_sign(own - plain)] += 1
    same, more, less = fewer
    return (
        f"{_programs(of)}\n\nOf {len(rows) // len(METHODS)} cases each. Largest redundancy of "
        f"hybridflow {max(mine):g}; bytes received on all ways back {back}. Beside plain "
        f"resharding to vanilla's shards hybridflow receives less in {less} cases, the same in "
        f"{same} and more in {more}."
    )


def _sign(difference: float) -> int:
    """1, 0 or -1; 0 of what differs by rounding alone."""
    return 0 if abs(difference) < 1e-9 else 1 if difference > 0 else -1


def _programs(of: dict[str, list[dict[str, Any]]]) -> str:
    """In how many cases which programs receive, and leave redundant, what the formulas say."""
    titles = ["to the shards of", "by", "written to the formula", "receives the formula's bytes",
              "less", "more", "over the formula's, all cases together",
              "redundant as by the formula", "less", "more"]  # fmt: skip
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for how in ("measured", "resharded"):
        for method, found in of.items():
            by = "hjax's transition" if method == "hybridflow" else "gather and cut"
            known = "no" if method == "hybridflow" else "yes"
            cells = [method, *((by, known) if how == "measured" else ("plain resharding", "no"))]
            for what in ("communication", "redundancy"):
                signs = [_sign(row[how][what] - row["analytic"][what]) for row in found]
                cells += [str(signs.count(sign)) for sign in (0, -1, 1)]
                if what == "communication":
                    counted, formula = (sum(r[k][what] for r in found) for k in (how, "analytic"))
                    cells.append(f"{counted / formula:.2f}")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _by_case(rows: Sequence[dict[str, Any]]) -> dict[Table2Case, dict[str, dict[str, Any]]]:
    by_case: dict[Table2Case, dict[str, dict[str, Any]]] = {}
    for row in rows:
        case = Table2Case(*row["train"], *row["generate"])
        by_case.setdefault(case, {})[row["method"]] = row
    return by_case


def cases_table(rows: Sequence[dict[str, Any]]) -> str:
    """A table with a line for each case, from ``measured_rows``."""
    head = ["case", *(f"{m}: formula, counted, plain" for m in METHODS)]
    head += ["hybridflow holds: formula, measured", "redundant: hybridflow, vanilla, gather_all"]
    head += ["redundant, plain: the same"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for case, found in _by_case(rows).items():
        cells = [str(case)]
        for method in METHODS:
            formula = _fraction(table2(case, method)["communication"])
            counted, plain = (
                found[method][how]["communication"] for how in ("measured", "resharded")
            )
            cells.append(f"{formula}, {counted:.4f}, {plain:.4f}")
        held = found["hybridflow"]["measured"]["peak"]
        cells.append(f"{_fraction(table2(case, 'hybridflow')['peak'])}, {held:.4f}")
        for how in ("measured", "resharded"):
            cells.append(", ".join(f"{found[m][how]['redundancy']:.4g}" for m in METHODS))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _fraction(value: float) -> str:
    return str(Fraction(value).limit_denominator(4096))


def main() -> None:
    """Measure, and write both files."""
    from hjax.machine import simulated_devices

    rows = list(measured_rows(simulated_devices(DEVICES)))
    PAGE.write_text(transition_markdown(rows))
    text = RESULTS.read_text()
    start = text.index(BEGIN) + len(BEGIN)
    end = text.index(END, start)
    RESULTS.write_text(f"{text[:start]}\n{cases_table(rows)}\n{text[end:]}")


if __name__ == "__main__":
    main()
