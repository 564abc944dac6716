"""HybridFlow's experiments (arXiv 2409.19256, section 8) as this cost model sees them.

`python -m hjax.studies.paper_tables [--write=docs/auto_mapping.md] [NAME ...]` prints the tables of
docs/auto_mapping.md, or writes them into it between their markers.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hjax.errors import ConfigError, exit_status
from hjax.models.published import published
from hjax.planning import memory
from hjax.planning.auto import SCALAR
from hjax.planning.constants import Constants, describe
from hjax.planning.counting import counts
from hjax.planning.dataflow import find_algorithm, trace
from hjax.planning.hardware import DEVICES, cluster
from hjax.planning.options import Space, role_options
from hjax.planning.records import Plan, Workload
from hjax.planning.search import Problem
from hjax.planning.strategies import plan

WORK = Workload(prompt_length=1024, response_length=1024, sequences=1024)
UPDATES = 8
ASSUMED = Constants()
ALGORITHMS = ("ppo", "remax", "safe_rlhf")
# Numbers of GPUs, from the fewest on which the four models of a size fit.
SIZES = {
    "llama-7b": (8, 16, 32, 64, 96, 128),
    "llama-13b": (16, 32, 64, 96, 128),
    "llama-34b": (32, 64, 96, 128),
    "llama-70b": (64, 96, 128),
}
SYSTEMS = ("deepspeed_chat", "openrlhf", "nemo_aligner")
# The paper's averages and largest speed-ups of PPO, and its ranges over the three systems.
AVERAGES = {"deepspeed_chat": 3.67, "openrlhf": 3.25, "nemo_aligner": 12.52}
LARGEST = {"deepspeed_chat": 7.84, "openrlhf": 5.93, "nemo_aligner": 20.57}
RANGES = {
    ("ppo", "llama-7b"): (1.68, 8.63), ("ppo", "llama-13b"): (2.70, 18.96),
    ("ppo", "llama-34b"): (2.41, 20.57), ("ppo", "llama-70b"): (5.17, 17.98),
    ("remax", "llama-7b"): (1.53, 2.56), ("remax", "llama-13b"): (2.49, 3.66),
    ("remax", "llama-34b"): (2.14, 4.80), ("remax", "llama-70b"): (6.46, 9.78),
    ("safe_rlhf", "llama-7b"): (1.71, 12.87), ("safe_rlhf", "llama-13b"): (2.49, 18.47),
    ("safe_rlhf", "llama-34b"): (2.20, 19.76), ("safe_rlhf", "llama-70b"): (4.89, 16.86),
}  # fmt: skip
STRONG_SCALING = 0.668
MIXED_SIZES = {
    "actor": "llama-13b", "reference": "llama-13b", "critic": "llama-70b", "reward": "llama-70b",
}  # fmt: skip
# The paper's best placements; arw: {actor, reference, reward} and {critic}.
PLACEMENTS = {
    "13B": {32: "colocate", 64: "colocate", 96: "split", 128: "standalone"},
    "34B": {32: "colocate", 64: "colocate", 96: "split", 128: "split"},
    "13B, 70B": {32: "colocate", 64: "colocate", 96: "split", 128: "arw"},
}
MODELS: Mapping[str, str | Mapping[str, str]] = {
    "13B": "llama-13b", "34B": "llama-34b", "13B, 70B": MIXED_SIZES,
}  # fmt: skip


def problem(
    algorithm: str,
    models: str | Mapping[str, str],
    gpus: int,
    constants: Constants = ASSUMED,
) -> Problem:
    """One of the paper's experiments: A100-80GB, 8 to a machine. Its Safe-RLHF has one critic."""
    found = find_algorithm(algorithm)
    config = found.default_config()
    if algorithm == "safe_rlhf":
        config.pretraining_coef = 1.0
    roles = [r for r in found.needed_roles(config) if r != "cost_critic"]
    names = dict.fromkeys(roles, models) if isinstance(models, str) else dict(models)
    return Problem(
        trace(found, config, UPDATES, 1, roles, absent=("cost_critic",)),
        {r: counts(published(names[r]), names[r], scalar=r in SCALAR) for r in roles},
        WORK,
        cluster(f"{max(1, gpus // 8)}x{min(gpus, 8)}:a100-80g"),
        constants,
    )


def kind(found: Plan) -> str:
    """The paper's name of a placement."""
    sets = {frozenset(s.roles) for s in found.sets}
    if len(sets) == 1:
        return "colocate"
    if all(len(s) == 1 for s in sets):
        return "standalone"
    named = {
        "split": {frozenset({"actor", "reference"}), frozenset({"critic", "reward"})},
        "arw": {frozenset({"actor", "reference", "reward"}), frozenset({"critic"})},
    }
    return next((name for name, wanted in named.items() if sets == wanted), "other")


def placement_row(label: str, gpus: int, constants: Constants = ASSUMED) -> dict[str, Any]:
    """The best plan of all, seconds of the named placements, and the paper's choice."""
    posed = problem("ppo", MODELS[label], gpus, constants)
    best = plan(posed, "auto", 3).plans
    named = {s: plan(posed, s, 1).plans for s in ("colocate", "split", "standalone")}
    seconds = {s: p[0].total for s, p in named.items() if p}
    for found in best:
        seconds.setdefault(kind(found), found.total)
    paper = PLACEMENTS[label][gpus]
    return {
        "models": label,
        "gpus": gpus,
        "best": best[0],
        "seconds": seconds,
        "paper": paper,
        "nearest": min(seconds, key=lambda s: (seconds[s], s)),
        "gap": seconds[paper] / best[0].total - 1 if paper in seconds else float("nan"),
    }


def speedup_row(algorithm: str, model: str, gpus: int) -> dict[str, float]:
    """Seconds of hjax's best plan, and each system's over it."""
    posed = problem(algorithm, model, gpus)
    mine = plan(posed, "auto", 1).plans[0].total
    row = {"seconds": mine}
    for system in SYSTEMS:
        found = plan(posed, system, 1).plans
        if found:
            row[system] = found[0].total / mine
    return row


def generation_sweep(model: str, constants: Constants = ASSUMED) -> dict[int, float]:
    """Fig. 15: seconds of the transition and generation by t_g.

    On 16 GPUs, all models colocated, trained 1-8-2.
    """
    posed = problem("ppo", model, 16, constants)
    place = posed.place(posed.cluster.pools[0], 16)
    space = Space(pipes=(1,), shardings=("data",))

    def options(role: str) -> list[Any]:
        arguments = (place, posed.models[role], posed.dataflow, role, WORK, space)
        return [o for o in role_options(*arguments) if o.mesh.tensor == 8]

    others = sum(
        min(o.resident for o in options(role)) for role in ("critic", "reference", "reward")
    )
    best: dict[int, float] = {}
    for option in options("actor"):
        if option.resident + option.transient + others <= memory.capacity(place):
            size = option.mesh.generate_tensor
            best[size] = min(best.get(size, float("inf")), option.seconds[0])
    return dict(sorted(best.items()))


def table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Markdown."""
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def constants_table() -> str:
    """Every uncertain number."""
    rows = [
        (f"`{r['constant']}`", f"{r['value']:g}", r["unit"], r["source"])
        for r in describe(Constants())
    ]
    return table(("constant", "value", "unit", "where from"), rows)


def devices_table() -> str:
    """The catalogue."""
    rows = [
        (
            d.name,
            f"{d.memory / 2**30:g}",
            f"{d.flops['bfloat16'] / 1e12:g}",
            f"{d.bandwidth / 1e9:g}",
            f"{d.link / 1e9:g}",
            f"{d.network / 1e9:g}",
            d.per_host,
            f"{d.torus}D torus" if d.torus else "all to all",
        )
        for d in DEVICES.values()
    ]
    titles = ("device", "GiB", "bf16 TFLOP/s", "memory GB/s", "link GB/s", "network GB/s per host",
              "per host", "fabric")  # fmt: skip
    return table(titles, rows)


def placements_table() -> str:
    """The paper's placements beside the model's."""
    rows = []
    for label, sizes in PLACEMENTS.items():
        for gpus in sizes:
            row = placement_row(label, gpus)
            best, seconds = row["best"], row["seconds"]
            sets = ", ".join(f"{'+'.join(s.roles)} {s.devices}" for s in best.sets)
            rows.append(
                (
                    label,
                    gpus,
                    f"{sets}: {best.total:.0f} s",
                    *(
                        f"{seconds[s]:.0f}" if s in seconds else "–"
                        for s in ("colocate", "split", "standalone")
                    ),
                    row["paper"],
                    f"{100 * row['gap']:+.0f} %",
                )  # fmt: skip
            )
    titles = ("models", "GPUs", "best of all", "colocate s", "split s", "standalone s", "paper",
              "paper's over best")  # fmt: skip
    return table(titles, rows)


def speedup_tables() -> str:
    """Every system over hjax's best plan, and the averages."""
    parts, ratios, scaling = [], [], []
    for algorithm in ALGORITHMS:
        rows = []
        for model, sizes in SIZES.items():
            found = {gpus: speedup_row(algorithm, model, gpus) for gpus in sizes}
            ratios += [(algorithm, row) for row in found.values()]
            first, last = sizes[0], sizes[-1]
            gain = found[first]["seconds"] / found[last]["seconds"]
            scaling.append((algorithm, gain / (last / first)))
            low, high = RANGES[algorithm, model]
            for gpus, row in found.items():
                cells = [f"{row[s]:.2f}" if s in row else "–" for s in SYSTEMS]
                paper = f"{low} to {high}" if gpus == first else ""
                rows.append((model, gpus, f"{row['seconds']:.0f}", *cells, paper))
        titles = ("models", "GPUs", "hjax s", *SYSTEMS, "paper's range over the three")
        parts.append(f"**{algorithm}**\n\n{table(titles, rows)}")
    rows = []
    for system in SYSTEMS:
        of = {
            a: statistics.mean(r[system] for x, r in ratios if x == a and system in r)
            for a in ALGORITHMS
        }
        every = statistics.mean(r[system] for _, r in ratios if system in r)
        cells = [f"{of[a]:.2f}" for a in ALGORITHMS]
        rows.append((system, *cells, f"{every:.2f}", AVERAGES[system]))
    means = [f"{statistics.mean(s for x, s in scaling if x == a):.3f}" for a in ALGORITHMS]
    every = statistics.mean(s for _, s in scaling)
    rows.append(("strong scaling", *means, f"{every:.3f}", STRONG_SCALING))
    averages = table(("average over sizes", *ALGORITHMS, "all", "paper"), rows)
    return "\n\n".join([*parts, averages])


def sweep_table() -> str:
    """Fig. 15."""
    rows = []
    for model, paper in (("llama-7b", "2, 60.3 %"), ("llama-13b", "4, 36.4 %")):
        times = generation_sweep(model)
        best = min(times, key=lambda t: times[t])
        gain = f"{best}, {100 * (1 - times[best] / times[8]):.1f} %"
        cells = [f"{times[t]:.0f}" if t in times else "does not fit" for t in (1, 2, 4, 8)]
        rows.append((model, *cells, gain, paper))
    titles = ("actor", "t_g = 1 s", "2", "4", "8", "best, faster than 8 by", "paper")
    return table(titles, rows)


def sensitivity_table() -> str:
    """Where the best placement flips as the uncertain constants move."""
    values = {
        "network": (0.2, 0.3, 0.4, 0.6, 0.85),
        "overlap": (0.0, 0.25, 0.5),
        "matmul": (0.4, 0.5, 0.6),
        "decode_row": (0.0, 6e-5, 1.2e-4),
    }
    rows = []
    for name, tried in values.items():
        for value in tried:
            cells = []
            for label, gpus in (("13B", 64), ("13B", 96), ("13B", 128), ("34B", 128),
                                ("13B, 70B", 128)):  # fmt: skip
                posed = problem("ppo", MODELS[label], gpus, Constants().with_values({name: value}))
                best = plan(posed, "auto", 1).plans[0]
                sets = "+".join(str(s.devices) for s in best.sets)
                cells.append(f"{kind(best)} {sets}, {best.total:.0f} s")
            mark = " (default)" if value == getattr(Constants(), name) else ""
            rows.append((f"`{name}` {value:g}{mark}", *cells))
    titles = ("constant", "13B, 64 GPUs", "13B, 96", "13B, 128", "34B, 128", "13B and 70B, 128")
    return table(titles, rows)


TABLES: dict[str, Callable[[], str]] = {
    "constants": constants_table,
    "devices": devices_table,
    "placements": placements_table,
    "speedups": speedup_tables,
    "sweep": sweep_table,
    "sensitivity": sensitivity_table,
}


def sections(text: str) -> Iterator[tuple[str, str]]:
    """(name, content) of each marked section of a page."""
    pattern = r"<!-- table: (\w+) -->\n(.*?)<!-- end -->"
    for match in re.finditer(pattern, text, re.DOTALL):
        yield match[1], match[2].removesuffix("\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print tables, or write them into a page."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if "--help" in arguments:
        print(__doc__, f"\nnames: {', '.join(TABLES)}")
        return 0
    return exit_status(lambda: _run(arguments))


def _run(arguments: Sequence[str]) -> int:
    names = [a for a in arguments if not a.startswith("--")] or list(TABLES)
    pages = [a.partition("=")[2] for a in arguments if a.startswith("--write=")]
    for name in names:
        if name not in TABLES:
            raise ConfigError(f"no table is named {name!r}; known: {', '.join(TABLES)}")
        content = TABLES[name]()
        print(f"{name}\n\n{content}\n", flush=True)
        for page in pages:
            text = Path(page).read_text()
            for section, before in sections(text):
                if section == name:
                    marker = f"<!-- table: {name} -->\n"
                    old = f"{marker}{before}\n" if before else marker
                    text = text.replace(old, f"{marker}{content}\n")
            Path(page).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
