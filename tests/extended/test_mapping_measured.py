"""The section 'How near it is' of docs/auto_mapping.md quotes what benchmarks/RESULTS.md has."""

import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "auto_mapping.md").read_text()
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text()
COMPILED = ROOT / "benchmarks" / "plans_compiled.jsonl"
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
    kept = [json.loads(line) for line in COMPILED.read_text().splitlines()]
    clusters = [json.loads(row["identity"])[0]["cluster"] for row in kept]
    for name, (count, _) in plans.items():
        assert clusters.count(name) >= count, name
    assert "all fit" in said
    for row in kept:
        assert max(p["compiled"] for p in row["programs"]) <= row["memory_bytes"]


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
