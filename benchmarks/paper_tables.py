"""Tables of docs/auto_mapping.md and benchmarks/RESULTS.md, and sentences that count what stands
in them.

`python benchmarks/paper_tables.py [--write] [NAME ...]` prints the tables, with `--write` it also
puts them into both pages, between their markers; `--write=PAGE` into one page alone. All of them
take some minutes.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mesh_hops import hops_table
from paper_experiments import (
    ASSUMED,
    MODELS,
    NAMED,
    PPO_AVERAGES,
    RANGES,
    STRONG_SCALING,
    SYSTEMS,
    TRANSITION_LESS,
    PlacementRow,
    SpeedupRow,
    generation_sweep,
    paper_problem,
    placement_name,
    placement_rows,
    ratios_of,
    speedup_row,
    speedup_rows,
    strong_scaling,
    transition_rows,
)

from hjax.devices import DEVICES
from hjax.errors import ConfigError, exit_status
from hjax.planning.constants import Constants
from hjax.planning.search import partitions
from hjax.planning.strategies import search_strategy

# Constants that were moved while the paper's figures were looked at, from 0.85 to 0.4 and from 0.5
# to 0.
# ``network`` is again what is published; these are the values that were moved to or from.
MOVED = {"network": 0.4, "overlap": 0.5}
# What their sources say of two constants that are frozen outside of it: the middle of nccl-tests'
# 230 to 250 of 300 GB/s, and of 20 to 40 us for an all-reduce over 8 devices, 2 * log2(8) of them.
SOURCES_SAY = {"link": 0.8, "link_latency": 5e-6}
PAGES = ("docs/auto_mapping.md", "benchmarks/RESULTS.md")
PLACEMENT_COUNT = len(list(partitions(NAMED["colocate"][0])))


def describe(constants: Constants) -> list[dict[str, Any]]:
    """One row per constant: name, value, unit, range, origin and source."""
    calibrated = constants.calibrated()
    return [
        {
            "constant": f.name,
            "value": getattr(constants, f.name),
            "unit": f.metadata["unit"],
            "range": f.metadata["range"],
            "origin": constants.origin(f.name),
            "source": "plan --calibrate" if f.name in calibrated else f.metadata["source"],
        }
        for f in dataclasses.fields(constants)
        if f.name != "measured"
    ]


def table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Markdown."""
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def constants_table() -> str:
    """Every uncertain number."""
    rows = [
        (f"`{r['constant']}`", f"{r['value']:g}", _range(r["range"]), r["unit"], r["source"])
        for r in describe(Constants())
    ]
    return table(("constant", "value", "range", "unit", "where from"), rows)


def _range(ends: tuple[float, float] | None) -> str:
    return f"{ends[0]:g} to {ends[1]:g}" if ends else ""


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
    """The paper's placements beside the model's, and how many agree."""
    found = placement_rows()
    rows = []
    for row in found:
        sets = ", ".join(f"{'+'.join(s.roles)} {s.devices}" for s in row.best.sets)
        named = (f"{row.seconds[s]:.0f}" if s in row.seconds else "–" for s in NAMED)
        best = f"{sets}: {row.best.total:.0f} s"
        gaps = (f"{100 * gap:+.0f} %" for gap in (row.named_gap, row.gap))
        rows.append((row.models, row.gpus, best, *named, row.paper, *gaps))
    titles = ("models", "GPUs", "best of all", *(f"{name} s" for name in NAMED), "paper",
              "paper's over best of four", "over best of all")  # fmt: skip
    return f"{table(titles, rows)}\n\n{placements_sentence(found)}"


def placements_sentence(rows: Sequence[PlacementRow]) -> str:
    """How often the model's fastest placement is the paper's, and where it is not."""
    named, of_all = agreement(rows)
    sentence = (
        f"Of the paper's four placements ({', '.join(NAMED)}) the model's fastest is the one that "
        f"the paper found best in {named} of {len(rows)} cases; of all {PLACEMENT_COUNT} "
        f"placements in {of_all} of {len(rows)}."
    )
    others = [
        f"{row.models} on {row.gpus} GPUs ({row.fastest_named}; {row.paper}, the paper's, takes "
        f"{100 * row.named_gap:.0f} % longer, and {100 * row.gap:.0f} % longer than the best of "
        "all)"
        for row in rows
        if row.fastest_named != row.paper
    ]
    return f"{sentence} The others: {'; '.join(others)}." if others else sentence


def agreement(rows: Sequence[PlacementRow]) -> tuple[int, int]:
    """In how many cases the fastest of the named placements, and of all, is the paper's."""
    named = sum(row.fastest_named == row.paper for row in rows)
    return named, sum(placement_name(row.best) == row.paper for row in rows)


def moved_table() -> str:
    """What the placements would be with the values that constants were moved to or from."""
    before = {"as they are": {}, **{f"`{k}` {v:g}": {k: v} for k, v in MOVED.items()}}
    before["both"] = MOVED
    rows = []
    for label, values in before.items():
        found = placement_rows(Constants().with_values(values))
        named, of_all = agreement(found)
        gap = statistics.mean(row.gap for row in found)
        cells = (f"{n} of {len(found)}" for n in (named, of_all))
        rows.append((label, *cells, f"{100 * gap:.0f} %"))
    titles = ("constants", "paper's is the fastest of the four", "of all",
              "paper's over best, mean")  # fmt: skip
    return table(titles, rows)


def speedups_tables() -> str:
    """Every system over hjax's best plan, their averages, ranges and strong scaling."""
    found = speedup_rows()
    parts = [_sizes_table(found, algorithm) for algorithm in SYSTEMS]
    return "\n\n".join([*parts, averages_table(found), _ranges_table(found), _scaling_table(found)])


def _sizes_table(found: Sequence[SpeedupRow], algorithm: str) -> str:
    systems = SYSTEMS[algorithm]
    rows = []
    for row in (r for r in found if r.algorithm == algorithm):
        cells = (f"{row.ratios[s]:.2f}" if s in row.ratios else "–" for s in systems)
        rows.append((row.model, row.gpus, f"{row.seconds:.0f}", *cells))
    return f"**{algorithm}**\n\n{table(('models', 'GPUs', 'hjax s', *systems), rows)}"


def averages_table(found: list[SpeedupRow]) -> str:
    """Means over the sizes that fit, and what is averaged."""
    rows, means = [], {}
    for system, paper in PPO_AVERAGES.items():
        cells = []
        for algorithm in SYSTEMS:
            ratios = ratios_of(found, algorithm, system)
            cells.append(f"{statistics.mean(ratios):.2f} ({len(ratios)})" if ratios else "–")
        means[system] = statistics.mean(ratios_of(found, "ppo", system)) / paper
        rows.append((system, *cells, paper))
    titles = ("average over sizes (how many)", *SYSTEMS, "paper, ppo")
    beside = ", ".join(f"{ratio:.2f} for {system}" for system, ratio in means.items())
    missing = [f"{s} has no {a}" for s in PPO_AVERAGES for a in SYSTEMS if s not in SYSTEMS[a]]
    return (
        f"{table(titles, rows)}\n\nEach average is of one column of the tables above, over the "
        f"sizes that fit; {', '.join(missing)}. The paper's averages are of PPO alone, so `ppo` is "
        f"the column to compare: the model's over the paper's is {beside}."
    )


def _ranges_table(found: Sequence[SpeedupRow]) -> str:
    rows, outside, cells = [], [], 0
    for (algorithm, model), (low, high) in RANGES.items():
        of = [r for r in found if (r.algorithm, r.model) == (algorithm, model)]
        ratios = [(ratio, system, r.gpus) for r in of for system, ratio in r.ratios.items()]
        cells += len(ratios)
        beyond = [cell for cell in ratios if not low <= cell[0] <= high]
        outside += [(algorithm, model, *cell) for cell in beyond]
        mine = f"{min(ratios)[0]:.2f} to {max(ratios)[0]:.2f}"
        inside = f"{len(ratios) - len(beyond)} of {len(ratios)}"
        rows.append((algorithm, model, mine, f"{low:.2f} to {high:.2f}", inside))
    titles = ("algorithm", "models", "model's ratios over sizes and systems", "paper's",
              "inside the paper's")  # fmt: skip
    listed = "; ".join(f"{a} {m} on {n}, {s}: {r:.2f}" for a, m, r, s, n in outside)
    whole = sum(inside.split(" of ")[0] == inside.split(" of ")[1] for *_, inside in rows)
    below = [cell for cell in outside if cell[2] < RANGES[cell[0], cell[1]][0]]
    above = [cell for cell in outside if cell[2] > RANGES[cell[0], cell[1]][1]]
    return (
        f"{table(titles, rows)}\n\n{cells - len(outside)} of {cells} ratios lie inside the "
        f"paper's range of their algorithm and models, in {whole} of {len(rows)} ranges all. "
        f"Below it lie {_by_system(below)}, above it {_by_system(above)}. "
        f"Outside: {listed or 'none'}."
    )


def _by_system(cells: Sequence[tuple[Any, ...]]) -> str:
    """How many (algorithm, model, ratio, system, GPUs), and how many of them each system has."""
    counts = {s: sum(cell[3] == s for cell in cells) for s in PPO_AVERAGES}
    return f"{len(cells)} ({', '.join(f'{s} {count}' for s, count in counts.items())})"


def _scaling_table(found: list[SpeedupRow]) -> str:
    each = [strong_scaling(found, algorithm) for algorithm in SYSTEMS]
    cells = (f"{value:.3f}" for value in (*each, statistics.mean(each)))
    titles = ("strong scaling", *SYSTEMS, "mean of the three", "paper")
    return table(titles, [("hjax's best plan", *cells, STRONG_SCALING)])


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


def transition_table() -> str:
    """Fig. 14."""
    found = transition_rows()
    systems = list(found[0].seconds)
    rows = [
        (r.model, r.gpus, *(f"{r.seconds[s]:.2f}" for s in systems), f"{100 * r.less:.1f} %")
        for r in found
    ]
    each = {"average": found, "llama-70b": [r for r in found if r.model == "llama-70b"]}
    means = {name: statistics.mean(r.less for r in some) for name, some in each.items()}
    titles = ("actor", "GPUs", *(f"{s} s" for s in systems), "hjax less than the others' mean")
    said = " and ".join(
        f"{100 * means[name]:.1f} % {'on average' if name == 'average' else 'at 70B'} (paper "
        f"{100 * paper:.1f} %)"
        for name, paper in TRANSITION_LESS.items()
    )
    return f"{table(titles, rows)}\n\nLess by {said}."


def uncertain() -> dict[str, tuple[float, ...]]:
    """Other values of the constants that have a range: its ends, and what their sources say."""
    found = {}
    for f in describe(ASSUMED):
        if f["range"]:
            name = f["constant"]
            said = [SOURCES_SAY[name]] if name in SOURCES_SAY else []
            found[name] = tuple(sorted({*f["range"], *said} - {f["value"]}))
    return found


# The constants of the other systems alone.
OTHERS = ("eager_matmul", "eager_layer", "native_decode")


def systems_table() -> str:
    """How the systems' ratios move with the constants, those of the systems themselves too."""
    cases = (("llama-7b", 16), ("llama-13b", 64), ("llama-70b", 96))
    tried = {"as they are": ASSUMED}
    values = {name: uncertain()[name] for name in (*OTHERS, "network", "overlap")}
    for name, of in (values | {name: (value,) for name, value in SOURCES_SAY.items()}).items():
        for value in of:
            tried[f"`{name}` {value:g}"] = ASSUMED.with_values({name: value})
    rows = []
    for label, constants in tried.items():
        found = [speedup_row("ppo", model, gpus, constants) for model, gpus in cases]
        means = [statistics.mean(r.ratios[s] for r in found if s in r.ratios) for s in PPO_AVERAGES]
        rows.append((label, *(f"{mean:.2f}" for mean in means)))
    rows.append(("paper, all sizes", *map(str, PPO_AVERAGES.values())))
    sizes = ", ".join(f"{model} on {gpus}" for model, gpus in cases)
    return f"{table(('constants', *PPO_AVERAGES), rows)}\n\nMeans of PPO's ratios over {sizes}."


def sensitivity_table() -> str:
    """Where the best placement flips as the uncertain constants move."""
    values = {name: of for name, of in uncertain().items() if name not in OTHERS}
    values["network"] = tuple(sorted({*values["network"], MOVED["network"]}))
    tried: dict[str, dict[str, float]] = {"as they are": {}}
    tried |= {f"`{name}` {value:g}": {name: value} for name, of in values.items() for value in of}
    cases = (("13B", 64), ("13B", 96), ("13B", 128), ("34B", 128), ("13B, 70B", 128))
    answers: list[dict[str, str]] = [{} for _ in cases]
    rows = []
    for label, changed in tried.items():
        cells, constants = [], Constants().with_values(changed)
        for answer, (models, gpus) in zip(answers, cases):
            posed = paper_problem("ppo", MODELS[models], gpus, constants)
            best = search_strategy(posed, "auto", 1).fastest
            sizes = "+".join(str(s.devices) for s in best.sets)
            answer[label] = f"{placement_name(best)} {sizes}"
            cells.append(f"{answer[label]}, {best.total:.0f} s")
        rows.append((label, *cells))
    titles = ("constant", *(f"{models}: {gpus} GPUs" for models, gpus in cases))
    return f"{table(titles, rows)}\n\n{_moves(titles[1:], answers, 'as they are')}"


def _moves(cases: Sequence[str], answers: Sequence[dict[str, str]], default: str) -> str:
    """Which answers flip, and where."""
    still, moving = [], []
    for case, answer in zip(cases, answers):
        usual = answer[default]
        flips = [f"{chosen} at {where}" for where, chosen in answer.items() if chosen != usual]
        if flips:
            moving.append(f"{case}: {usual}, but {', '.join(flips)}")
        else:
            still.append(case)
    return (
        f"The same at all of these values: {'; '.join(still) or 'none'}. Not the same: "
        f"{'; '.join(moving) or 'none'}."
    )


TABLES: dict[str, Callable[[], str]] = {
    "constants": constants_table,
    "moved": moved_table,
    "devices": devices_table,
    "placements": placements_table,
    "speedups": speedups_tables,
    "transition": transition_table,
    "sweep": sweep_table,
    "systems": systems_table,
    "sensitivity": sensitivity_table,
    "hops": hops_table,
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
    pages: list[str] = []
    for flag in (a for a in arguments if a.startswith("--")):
        name, _, page = flag.partition("=")
        if name != "--write":
            raise ConfigError(f"no flag is named {name}; known: --write, --write=PAGE")
        pages += [page] if page else PAGES
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
