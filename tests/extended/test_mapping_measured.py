"""The section 'How near it is' of docs/auto_mapping.md quotes what benchmarks/RESULTS.md has; and
what plans need is what their compilers said."""

import dataclasses
import json
import pathlib
import re
import sys

import pytest

from hjax.launch.plan_flags import parse
from hjax.models import presets
from hjax.models.cost_inputs import MeshSizes
from hjax.planning.plan_types import PlannedSet
from hjax.planning.role_options import role_options, rollout_slots

ROOT = pathlib.Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
import plan_compiled  # noqa: E402

PAGE = (ROOT / "docs" / "auto_mapping.md").read_text()
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text()
COMPILED = json.loads((ROOT / "benchmarks" / "plans_compiled.json").read_text())
NUMBER = r"(\d*\.\d+)"
SPREAD = rf"{NUMBER}, {NUMBER} to {NUMBER}"  # median and range


def point(name):
    """One point of the page's section, as ``**name**`` opens it."""
    section = PAGE.split("## How near it is\n")[1].split("\n## ")[0]
    (found,) = (line for line in section.splitlines() if line.startswith(f"- **{name}"))
    return found


def rows(title, first):
    """Rows of the results' table of this section whose head begins so."""
    section = RESULTS.split(f"## {title}\n")[1].split("\n## ")[0]
    table = section[section.index(f"| {first} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]


def numbers(text, pattern):
    found = re.search(pattern, text)
    assert found, f"the page says nothing of the form {pattern}"
    return [float(number) for number in found.groups()]


def rounded(values):
    """As the page rounds them, within the last of two decimals."""
    return pytest.approx(values, abs=0.0051)


def predictions():
    return rows("Predictions of the auto-mapping", "commit | command")


def medians(cell):
    return [float(median) for median, *_ in re.findall(SPREAD, cell)]


def test_step_times_are_those_of_the_commit_that_the_page_names():
    said = point("Step times")
    commit = re.search(r"Calibrations before (\w+)", said)[1]
    timed = [row for row in predictions() if "--memory" not in row[1] and "--comp" not in row[1]]
    (at,) = (number for number, row in enumerate(timed) if row[0] == commit)
    assert at == len(timed) - 1 and f"of the plans at {commit}" in PAGE
    _, _, correlations, spread, cases = timed[at]
    first, second, *_ = re.findall(NUMBER, correlations)
    assert numbers(said, rf"rank correlation {NUMBER} and {NUMBER} ") == [
        float(first), float(second)
    ]  # fmt: skip
    before, after = spread.split("after one run")
    assert numbers(said, rf"measured is {NUMBER} and {NUMBER} in the median") == rounded(
        medians(before)
    )
    assert numbers(said, rf"{NUMBER} and {NUMBER} after each has learned") == rounded(
        medians(after)
    )
    ratios = {
        name: float(predicted) / float(measured)
        for name, predicted, measured in re.findall(
            rf"(?:^|\. |· )([^·.]+): {NUMBER} / {NUMBER}", cases
        )
    }
    assert len(ratios) == int(numbers(said, r"of (\d+) runs")[0])
    sets = numbers(said, rf"two or three sets are predicted {NUMBER} and {NUMBER} times")
    assert sets == rounded([ratios["split"], ratios["standalone"]])
    least = float(re.search(SPREAD, before)[2])
    assert min(ratios, key=ratios.get).startswith("hidden 32")
    assert numbers(said, rf"the smallest model {NUMBER}\.") == rounded([least])
    # Earlier rows, before a run had taught anything.
    earlier = [m for row in timed[:at] for m in medians(row[3].split("after one run")[0])]
    assert len(earlier) > 4
    assert numbers(said, rf"had {NUMBER} to {NUMBER} in the median") == rounded(
        [min(earlier), max(earlier)]
    )


def test_peak_memory_is_the_row_of_the_results():
    said = point("Peak memory")
    (row,) = (row for row in predictions() if "--memory" in row[1])
    assert numbers(said, rf"rank correlation {NUMBER}") == rounded([float(row[2])])
    _, least, most = map(float, re.search(SPREAD, row[3]).groups())
    assert numbers(said, r"from (\d+) % less to (\d+) % more") == [
        round(100 * (1 - least)), round(100 * (most - 1))
    ]  # fmt: skip
    assert numbers(said, r"of (\d+) runs") == [row[4].count("·") + 1]


def test_compiled_plans_are_counted_as_in_the_results_and_in_their_file():
    """How many are compiled may grow: the three texts are compared with one another."""
    said = point("The compilers' memory")
    table = rows("Plans compiled", "cluster | plans")
    plans = {row[0]: tuple(map(int, row[1].split(" of "))) for row in table}
    # Of GPUs a cluster is hosts x devices first, of TPUs the kind of chip.
    gpus, tpus = (
        [sum(column) for column in zip(*(n for name, n in plans.items() if name[0].isdigit() == g))]
        for g in (True, False)
    )
    compiled, printed = gpus[0] + tpus[0], gpus[1] + tpus[1]
    words = re.sub(r"\(.*?\)", "", said)
    for count in (compiled, printed, gpus[0], tpus[0]):
        assert re.search(rf"\b{count}\b", words), count
    if compiled < printed:
        assert f"{printed - compiled} plans for TPUs were not compiled" in said
        assert gpus[0] == gpus[1]
    spreads = [re.search(rf"{NUMBER} to {NUMBER}", row[3]).groups() for row in table]
    least, most = (pick(map(float, ends)) for pick, ends in zip((min, max), zip(*spreads)))
    assert numbers(said, rf"planned bytes of each set are {NUMBER} to {NUMBER}") == [least, most]
    assert "all fit" in said
    kept = COMPILED["clusters"]
    assert set(kept) == set(plans)
    for name, _, sets, spread, median in table:
        found = kept[name]
        assert found["plans"] == found["plans_fit"] == plans[name][0]
        assert found["sets"] == found["sets_within_15_percent"] == int(sets)
        ends = [found["ratio_least"], found["ratio_most"], found["ratio_median"]]
        assert numbers(f"{spread} {median}", rf"{NUMBER} to {NUMBER} {NUMBER}") == rounded(ends)


def planned_sets(problem, rows):
    """The sets of a compiled plan as the cost model of today has them, without a search."""
    (pool,), work = problem.cluster.pools, problem.work
    for row in rows:
        roles, options = row["set"].split("+"), []
        for role in roles:
            asked, axes = row["settings"][role], row["layouts"][role]
            generate = {f"generate_{a}": n for a, n in axes.get("generate", {}).items()}
            mesh = MeshSizes(**axes["train"], **generate)
            space = dataclasses.replace(
                problem.space,
                pipes=tuple({mesh.pipe, mesh.generate_pipe or 1}),
                tensors=tuple({mesh.tensor, mesh.generate_tensor or 1}),
                contexts=(mesh.context,),
                fsdp=mesh.fsdp,
                shardings=("data",),
                micro_rows=(asked["micro_batch"] // mesh.replicas,),
                micro_batches={role: asked["micro_batch"]},
                remat=(asked.get("remat", "none"),),
            )
            place, flow = problem.place(pool, row["devices"]), problem.dataflow
            given = place, problem.models[role], flow, role, work, space, asked["offload"]
            every = role_options(*given, every=True)
            wanted = mesh, asked.get("slots", 0)
            fitting = (o for o in every if (o.mesh, rollout_slots(o, work)) == wanted)
            options.append(next(fitting))
        yield row, PlannedSet(tuple(roles), pool, row["devices"], tuple(options))


@pytest.mark.parametrize("half", [0, 1])
def test_plans_need_what_compilers_said(half, monkeypatch):
    """One plan of each of 40 random problems: today's estimate beside the recorded bytes."""
    monkeypatch.setattr(presets, "PRESETS", dict(presets.PRESETS))
    seeds = {row["problem"] for row in COMPILED["sample"]}
    assert len(seeds) == 40
    for seed in sorted(seeds)[half::2]:
        rows = [row for row in COMPILED["sample"] if row["problem"] == seed]
        flags = plan_compiled.flags_of(plan_compiled.problem(seed))
        for row, found in planned_sets(parse(flags).problem, rows):
            assert 0.85 <= found.peak_bytes / row["compiled_bytes"] <= 1.15, row
            assert found.peak_bytes == pytest.approx(row["predicted_bytes"], rel=0.001), row


def test_auto_beside_the_best_by_hand_is_the_table_of_the_results():
    said = point("The choice")
    ratios = {}
    for devices, _, *_, ratio, _ in rows("Predictions of the auto-mapping", "devices | run"):
        count, _, since = devices.partition(",")
        ratios.setdefault((bool(since), count == "8"), []).append(float(ratio.split()[0]))
    before = ratios[False, False] + ratios[False, True]
    assert numbers(said, rf"took {NUMBER} to {NUMBER} times") == rounded([min(before), max(before)])
    few, many = ratios[True, False], sorted(ratios[True, True])
    assert numbers(said, rf"with it {NUMBER} to {NUMBER} times on 2 and 4") == rounded(
        [min(few), max(few)]
    )
    assert numbers(said, rf"{NUMBER} and {NUMBER} times on 8") == rounded(many)
    since = [row for row in rows("Predictions of the auto-mapping", "devices | run")
             if "," in row[0]]  # fmt: skip
    assert {row[-1][:6] for row in since} == {"5 of 5"}
    assert "the same plan by all five calibrations each time" in said
