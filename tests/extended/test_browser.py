"""The pages in a real browser: what the scripts draw, what switches do, nothing cut at any width.

Skipped where Chromium or Playwright is missing (``pip install hjax[browser]``, and Debian's
``chromium``).
"""

import itertools
import json
import os
import re
import shutil

import pytest
from helpers import kept_screens
from written_run import written_run

from hjax.show.compare import write_comparison
from hjax.show.report import write_report

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
if CHROMIUM is None:
    pytest.skip("no Chromium is installed here", allow_module_level=True)
sync_api = pytest.importorskip(
    "playwright.sync_api", reason="Playwright is not installed: pip install hjax[browser]"
)


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        # Chromium refuses its sandbox to root.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield started
        started.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """By name the paths of a report and a comparison."""
    folder = tmp_path_factory.mktemp("pages")
    runs = []
    for seed, name in enumerate(("first", "second")):
        (folder / name).mkdir()
        runs.append(written_run(folder / name, seed))
    return {
        "report": write_report(runs[0]),
        "compare": write_comparison(runs, folder / "compare.html"),
    }


def opened(browser, path, **context):
    """A page, and what its scripts complain of."""
    page = browser.new_context(**context).new_page()
    complaints = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    page.goto(f"file://{path}")
    return page, complaints


DRAWN = """[...document.querySelectorAll("svg[data-chart]")].map(svg => ({
  lines: [...svg.querySelectorAll("polyline, polygon")].map(l => l.getAttribute("points")),
  dots: svg.querySelectorAll("circle").length,
  ticks: [...svg.querySelectorAll("text")].map(t => t.textContent),
}))"""


@pytest.mark.parametrize("name", ["report", "compare"])
def test_the_script_draws_what_python_has_drawn(browser, pages, name):
    """Two programs draw the same charts: places to a tenth of a pixel, ticks letter by letter."""
    plain, _ = opened(browser, pages[name], java_script_enabled=False)
    scripted, complaints = opened(browser, pages[name])
    assert not complaints
    by_python = [plain_chart(svg) for svg in plain.locator("svg[data-chart]").all()]
    by_script = scripted.evaluate(DRAWN)
    assert len(by_python) == len(by_script) >= 10
    for python, script in zip(by_python, by_script):
        assert python["ticks"] == script["ticks"] and python["dots"] == script["dots"]
        assert len(python["lines"]) == len(script["lines"])
        for a, b in itertools.chain.from_iterable(
            zip(numbers(x), numbers(y), strict=True)
            for x, y in zip(python["lines"], script["lines"])
        ):
            assert a == pytest.approx(b, abs=0.11)


def plain_chart(svg):
    """A chart of a page without scripts, read from its text."""
    markup = svg.inner_html()
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", markup)
    return {
        "lines": re.findall(r'<poly(?:line|gon)[^>]*points="([^"]*)"', markup),
        "dots": markup.count("<circle"),
        "ticks": texts,
    }


def numbers(points):
    return [float(x) for x in re.split(r"[ ,]", points) if x]


def test_axes_smoothing_and_legends(browser, pages):
    page, complaints = opened(browser, pages["report"])
    reward = page.locator(".card", has=page.locator("h3", has_text=re.compile("^Reward$")))

    def ticks():
        return reward.locator("svg .tick").all_text_contents()

    assert "2" in ticks()
    page.select_option("[data-view=time]", "time")
    assert any(text.endswith(" s") for text in ticks()) and "2" not in ticks()
    page.check("[data-view=log]")
    assert reward.locator("svg .band").count() == 0  # half of it may be below 0
    page.locator("[data-view=smooth]").evaluate(
        "input => { input.value = 0.5; input.dispatchEvent(new Event('input')); }"
    )
    assert reward.locator("svg .raw").count() == 2
    lines = reward.locator("svg polyline").count()
    reward.locator(".legend button", has_text="eval/reward").click()
    assert reward.locator("svg polyline").count() == lines - 2
    reward.locator(".legend button", has_text="eval/reward").click()
    assert reward.locator("svg polyline").count() == lines and not complaints


def test_hovering_says_the_values(browser, pages):
    page, complaints = opened(browser, pages["report"])
    chart = page.locator("svg[data-chart]").first
    box = chart.bounding_box()
    page.mouse.move(box["x"] + 0.97 * box["width"], box["y"] + 80)
    said = page.locator("#tip").text_content()
    assert "step 4" in said and "reward/mean  0.8" in said and not complaints


def test_steps_can_be_browsed(browser, pages):
    page, complaints = opened(browser, pages["report"])

    def browse(kind, place):
        page.locator(f"[data-browse={kind}]").evaluate(
            "(input, at) => { input.value = at; input.dispatchEvent(new Event('input')); }", place
        )

    assert "answer 4" in page.locator("#shown-samples").text_content()
    browse("train", 0)
    assert "answer 1" in page.locator("#shown-samples").text_content()
    assert page.locator("#shown-step").text_content() == "Step 1"
    browse("eval", 0)
    assert page.locator("#held-out").text_content().count("answer 1") == 2
    assert "before training" in page.locator("#held-out-head").text_content()
    browse("histograms", 1)  # step 2: 2 of each but 8 in the last bin
    heights = page.locator("#histogram rect").evaluate_all(
        "bars => bars.map(b => b.height.baseVal.value)"
    )
    assert heights[0] == 25.0 and heights[-1] == 100.0 and not complaints


def test_episodes_are_chosen_by_kind_return_end_and_turns(browser, tmp_path):
    path = written_run(tmp_path)
    turn = {"action": "a", "observation": "o", "reward": 0.1, "valid": True}
    found = [  # kind, return, end, turns
        ("train", 0.7, "done", 1), ("train", -0.1, "max_turns", 7), ("train", None, "timeout", 2),
        ("eval", 0.0, "done", 3), ("eval", 0.1, "done", 4),
    ]  # fmt: skip
    rows = [
        {"step": 4, "index": i, "kind": kind, "prompt": "p", "response": "ao" * turns,
         "reward": reward, "truncated": False, "stop_reason": end, "turns": [turn] * turns}
        for i, (kind, reward, end, turns) in enumerate(found)
    ]  # fmt: skip
    (path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page, complaints = opened(browser, write_report(path))

    def shown(**chosen):
        for name in ("kind", "return", "stop", "turns"):
            value = chosen.get(name, "0" if name == "turns" else "")
            page.locator(f"[data-episodes={name}]").select_option(value)
        counted = page.locator("#episodes-count").text_content()
        notes = page.locator("#episodes tr").all_text_contents()
        assert counted.startswith(f"{len(notes)} of 5 ")
        return len(notes)

    assert shown() == 5 and shown(kind="eval") == 2
    assert [shown(**{"return": of}) for of in ("above", "zero", "below", "none")] == [2, 1, 1, 1]
    assert shown(stop="done") == 3 and shown(stop="timeout") == 1
    assert [shown(turns=least) for least in ("1", "2", "4")] == [5, 4, 2]
    assert shown(kind="train", stop="done", turns="2") == 0 and not complaints


@pytest.mark.parametrize("name", ["report", "compare"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1400])
def test_nothing_is_cut_at_any_width(browser, pages, name, width, scheme, tmp_path):
    page, complaints = opened(
        browser, pages[name], viewport={"width": width, "height": 900}, color_scheme=scheme
    )
    # Tables may scroll within their cards; the page itself may not.
    assert page.evaluate("document.documentElement.scrollWidth") <= width and not complaints
    wide = page.locator("h1, h2, .tile, .card, .legend").evaluate_all(
        "all => all.filter(e => e.getBoundingClientRect().right > innerWidth + 1).length"
    )
    assert wide == 0
    red, green, blue = map(
        int,
        re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3],
    )
    assert (max(red, green, blue) < 60) == (scheme == "dark")
    picture = (kept_screens() or tmp_path) / f"{name}-{width}-{scheme}.png"
    page.screenshot(path=str(picture), full_page=True)
    assert picture.stat().st_size > 10_000
