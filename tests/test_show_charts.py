"""Charts: ticks that can be told apart, curves and spans where they belong."""

import html
import itertools
import json
import math

import pytest

from hjax.show.charts import ChartSeries, line_chart, stacked_bar, timeline, value_text
from hjax.show.format import ticks
from hjax.show.pages import render


@pytest.mark.parametrize(
    ("low", "high", "wanted", "texts"),
    [
        (0, 1, 4, "0.00 0.25 0.50 0.75 1.00"),
        (0.9, 1.1, 4, "0.90 0.95 1.00 1.05 1.10"),
        (0.1, 0.1 + 0.2, 4, "0.10 0.15 0.20 0.25 0.30"),  # ends at 0.30000000000000004
        (-0.01, 0.002, 4, "-0.010 -0.005 0.000"),
        (-2000, 2000, 4, "-2000 -1000 0 1000 2000"),
        (-3.7, -3.3, 4, "-3.7 -3.6 -3.5 -3.4 -3.3"),
        # Around 1 by less than float32 can tell: once all of them `1e+00`.
        (1 - 6e-8, 1 + 1.06e-6, 4, "1.0000000 1.0000005 1.0000010"),
        (1 - 1e-9, 1, 4, "0.99999999925 0.99999999950 0.99999999975 1.00000000000"),
        (0, 3.2e-6, 4, "0 1e-6 2e-6 3e-6"),
        (0, 1e-3, 4, "0 2.5e-4 5e-4 7.5e-4 1e-3"),
        (1e-6, 1e3, 4, "250 500 750 1000"),  # over nine powers of ten
        (1e-300, 4e-300, 3, "1e-300 2e-300 3e-300 4e-300"),
        (0, 10_000, 4, "0 2.5k 5k 7.5k 10k"),
        (0, 4.3e9, 4, "0 2G 4G"),
        (0.9e6, 1.2e6, 3, "900k 1M 1.1M 1.2M"),
        (123_456, 123_460, 4, "123456 123457 123458 123459 123460"),
        (0, 3.2e30, 4, "0 1e30 2e30 3e30"),
        (-1.7e308, 1.7e308, 4, "-1e308 0 1e308"),
    ],
)
def test_ticks_are_round_and_exact(low, high, wanted, texts):
    assert [tick.text for tick in ticks(low, high, wanted)] == texts.split()


@pytest.mark.parametrize(
    ("first", "last", "texts"),
    [
        (1, 60, "20 40 60"),
        (0.5, 1.5, "1"),  # one step alone
        (1, 3, "1 2 3"),
        (1, 12, "5 10"),
        (1, 8, "2 4 6 8"),
        (1_000_001, 1_000_004, "1000001 1000002 1000003 1000004"),
        (1, 20_000, "5k 10k 15k 20k"),
    ],
)
def test_steps_are_whole_numbers(first, last, texts):
    assert [tick.text for tick in ticks(first, last, 5, whole=True)] == texts.split()


UNITS = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def test_ticks_of_any_range_are_distinct_and_say_their_values():
    widths = [10.0**power * some for power in range(-11, 1) for some in (1, 1.7, 3.3, 7.9)]
    sizes = [sign * 10.0**power for power in range(-30, 31, 3) for sign in (1, -1)]
    for size, width in itertools.product(sizes, widths):
        low, high = sorted((size, size + abs(size) * width))
        found = ticks(low, high, 4)
        texts, values = [tick.text for tick in found], [tick.value for tick in found]
        assert 2 <= len(found) <= 6 and len(set(texts)) == len(texts), (low, high, texts)
        room = 1e-8 * (high - low)
        assert low - room <= values[0] and values[-1] <= high + room
        for text, value in zip(texts, values):
            said = float(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else float(text)
            assert said == pytest.approx(value, rel=1e-15, abs=0.0)
        gaps = [b - a for a, b in itertools.pairwise(values)]
        assert max(gaps) - min(gaps) <= 1e-2 * max(gaps)


def heights(*values, spread=None, limit=None):
    points = list(enumerate(values, start=1))
    return line_chart([ChartSeries("x", points, spread=spread)], limit)


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ((1.0, 1.0), "0.90 0.95 1.00 1.05 1.10"),
        ((0.0,), "-1.0 -0.5 0.0 0.5 1.0"),
        ((-2.0, -2.0), "-2.2 -2.1 -2.0 -1.9 -1.8"),
        ((3e-7,), "2.8e-7 3e-7 3.2e-7"),
        ((5e-13, 9e-13), "5e-13 6e-13 7e-13 8e-13 9e-13"),  # small, but no constant
    ],
)
def test_constants_have_an_axis_around_them(values, texts):
    assert [text for _, text in heights(*values).heights] == texts.split()


@pytest.mark.parametrize(
    "values", [(1.0, 1 + 1e-7), (-1e300, 1e300), (1e30, 3e30), (1e-30, 2e-30), (-5.0, -5.0)]
)
def test_curves_stay_inside_of_the_field(values):
    chart = heights(*values)
    points = [tuple(map(float, pair.split(","))) for pair in chart.curves[0]["line"].split()]
    assert len(points) == len(values)
    for x, y in points:
        assert chart.left <= x <= chart.right and chart.top <= y <= chart.bottom
    assert all(math.isfinite(y) for y, _ in chart.heights)


def test_long_labels_get_room():
    narrow, wide = heights(0.0, 1.0), heights(1.0, 1 + 1e-6)
    longest = max(len(text) for _, text in wide.heights)
    assert narrow.left == 46 and wide.left >= 6 * longest + 6  # 11 px figures are 6 wide


def test_a_point_stands_at_its_value():
    # 0 to 10 and 0.6 of room above (0 stays at the bottom): 10 / 10.6 of 164 px up from y = 174.
    chart = heights(0.0, 10.0)
    assert chart.curves[0]["line"] == f"46.0,174.0 368.0,{174 - 164 * 10 / 10.6:.1f}"


def test_a_limit_and_a_band_are_in_view():
    chart = heights(1.0, 2.0, spread=[0.5, 0.5], limit=("limit", 4.0))
    y, name = chart.limit
    band = [float(pair.split(",")[1]) for pair in chart.curves[0]["band"].split()]
    assert name == "limit" and chart.top < y < min(band) and max(band) < chart.bottom


def drawn(macro, chart):
    """A macro of charts.jinja, as its pages use it."""
    from hjax.show.pages import _environment

    template = "{% import 'charts.jinja' as charts %}{{ charts." + macro + "(chart) }}"
    return _environment().from_string(template).render(chart=chart)


def test_long_curves_are_averaged_down():
    chart = line_chart([ChartSeries("x", [(i, i % 2) for i in range(100_000)])])
    kept = json.loads(chart.data)["series"][0]
    assert len(kept["steps"]) == 400
    assert (kept["steps"][0], kept["values"][0]) == (249, 0.5)  # the mean of 250 steps


def test_steps_that_are_clipped_do_not_widen_the_chart():
    points = [(1, 90.0), (2, 1.0), (3, 2.0)]
    chart = line_chart([ChartSeries("time", points)], clipped=[1])
    assert max(float(text) for _, text in chart.heights) <= 2.5
    first = chart.curves[0]["line"].split()[0]
    assert float(first.split(",")[1]) == chart.top  # along the edge
    assert json.loads(chart.data)["series"][0]["values"][0] == 90.0  # and is still told


def test_values_have_the_digits_that_tell_them_apart():
    assert value_text(0.123456, [0.1, 0.9]) == "0.1235"
    # Of a curve from 1 to 1.0000012: a hundredth of its range is 1e-8.
    assert value_text(1.00000058, [1.0, 1.0000012]) == "1.00000058"
    assert value_text(0.001, [0.001, 0.001]) == "0.001" and value_text(0.0, [0.0, 1e-9]) == "0"


def test_names_in_charts_are_escaped():
    svg = drawn("line_chart", line_chart([ChartSeries('"><b>', [(1, 1.0)])], ("<limit>", 2.0)))
    assert "<b>" not in svg and "<limit>" not in svg
    assert svg.index("&lt;limit&gt;</text>") > svg.index("<polyline")  # above what may cross it
    assert "&lt;limit&gt;" in svg and json.dumps('"><b>') in html.unescape(svg)


def test_a_stacked_bar_is_as_long_as_its_parts():
    parts = stacked_bar([("generate", 3.0, 0), ("update", 1.0, 1)])
    assert [(p["x"], p["width"], p["seconds"], p["percent"]) for p in parts] == [
        (0.0, 750.0, "3 s", "75 %"),
        (750.0, 250.0, "1 s", "25 %"),
    ]


def test_timeline_places_spans_by_time():
    span = {"row": 0, "color": 0, "names": ["a call of some length", "call"], "title": "call"}
    spans = [{**span, "start": 0.0, "length": 1.0}, {**span, "start": 3.0, "length": 0.25}]
    chart = timeline(["pool"], spans, [(3.0, "step 1")])
    # 3.25 s over 884 px from x = 108: 272 px a second.
    assert [(s["x"], s["width"]) for s in chart.spans] == [(108.0, 272.0), (924.0, 68.0)]
    assert [s["text"] for s in chart.spans] == ["a call of some length", "call"]
    assert chart.marks == [(924.0, "step 1")]
    assert [text for _, text in chart.seconds] == ["0.0", "0.5", "1.0", "1.5", "2.0", "2.5", "3.0"]


def test_names_of_a_timelines_rows_get_room():
    spans = [{"row": 0, "color": 0, "names": [], "title": "", "start": 0.0, "length": 1.0}]
    name = "actor+critic+reference (16)"
    chart = timeline([name], spans, [])
    assert chart.rows[0]["short"] == name and chart.left > 6.5 * len(name)  # 12 px letters
    assert chart.left + chart.lane_width < chart.width
    svg = drawn("timeline", timeline([10 * "name"], spans, []))
    assert 8 * "name" + "nam…" in svg and f"<title>{10 * 'name'}</title>" in svg


def test_a_template_that_lacks_a_value_is_an_error():
    import jinja2

    with pytest.raises(jinja2.UndefinedError, match="name"):
        render("report.jinja")
