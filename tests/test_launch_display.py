"""What a person sees: aligned lines, a live view, and nothing when it is switched off."""

import io
import time

import pytest

from hjax.settings.config_loading import default_config
from hjax.show.format import (
    clock,
    count,
    one_line,
    sample_texts,
    score_texts,
    size,
    spread_samples,
)
from hjax.show.live import Display, DisplayState
from hjax.show.step_table import COLUMNS, IMPORTANCE, fitting_columns, row_cells, used_columns
from hjax.show.tables import print_description


class Terminal(io.StringIO):
    def isatty(self):
        return True


def row(step, **more):
    return {
        "step": step,
        "reward/mean": 0.25 + step / 100,
        "reward/std": 0.5,
        "actor/loss": -0.0123,
        "throughput/tokens_per_second": 12345,
        "time/step": 0.5,
        **more,
    }


def show(stream, steps=3, **options):
    config = default_config()
    config.display.update(options)
    display = Display(config, steps, stream)
    display.start("ppo.py on two devices")
    display.warm_start(1, 2, 3.5)
    display.warm_start(2, 2, 1.5)
    for step in range(1, steps + 1):
        with display.phase("generate"):
            pass
        display.step(row(step, **({"eval/accuracy": 0.5} if step == 1 else {})))
        display.samples([{"prompt": f"[red]{step}", "response": "a\nb", "reward": 1.0}])
    display.message("a line [bold]as it is")
    display.close()
    return stream.getvalue()


def test_plain_lines_are_aligned():
    lines = show(io.StringIO()).splitlines()
    assert lines[0] == "ppo.py on two devices"
    assert any("warm start     2/2   loss 1.5000" in line for line in lines)
    header = next(line for line in lines if "accuracy" in line)
    rows = [line for line in lines if "/3 " in line]
    assert len(rows) == 3
    for title, value in (("reward", "0.260 ±0.500"), ("loss", "-0.0123"), ("tok/s", "12.3k")):
        end = header.index(title) + len(title)
        assert rows[0][:end].endswith(value)
    assert "50.0%" in rows[0] and "50.0%" not in rows[1]
    assert "a line [bold]as it is" in lines


def test_plain_samples_show_text_as_it_is():
    assert "[red]1 → a⏎b" in show(io.StringIO())


def test_plain_header_comes_again():
    assert show(io.StringIO(), steps=45).count("accuracy") == 3


def test_live_view_in_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    text = show(Terminal())
    assert "\x1b[?25l" in text and text.rstrip().endswith("\x1b[?25h")  # cursor hidden, then shown
    for part in ("ppo.py on two devices", "3/3", "0.260", "samples of step 3", "[red]3", "a⏎b"):
        assert part in text
    assert "a line [bold]as it is" in text


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in show(Terminal())


def test_switched_off_is_silent():
    assert show(io.StringIO(), enabled=False) == ""


def test_no_samples_on_request():
    assert "[red]" not in show(io.StringIO(), samples=0)


def test_a_closed_pipe_does_not_end_the_run():
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    show(Closed())


def test_time_left_ignores_the_first_step_which_compiles():
    state = DisplayState(total_steps=10, sample_count=0)
    state.add_step({"step": 1, "time/step": 60.0})
    assert state.seconds_left() is None
    for step, seconds in ((2, 1.0), (3, 3.0), (4, 2.0)):
        state.add_step({"step": step, "time/step": seconds})
    assert state.seconds_left() == 2.0 * 6  # the median, times what is left


def test_phases_nest():
    state = DisplayState(10, 0)
    state.enter("step", 0.0)
    state.enter("update", 1.0)
    state.leave("update", 2.0)
    over, active = state.phases()
    assert over == [("update", 2.0)] and [name for name, _ in active] == ["step"]


def test_columns_appear_when_first_needed():
    first = used_columns([], {"step": 1, "actor/loss": 0.1})
    assert first == ["step", "loss"]
    second = used_columns(first, {"step": 2, "actor/loss": 0.1, "kl/reference": 0.0})
    assert second == ["step", "KL", "loss"]
    assert row_cells({"step": 3, "kl/reference": 0.5}, second, 9) == ["3/9", "0.500", ""]


# Rows as in metrics.jsonl, with texts as wide as they come.
PPO_ROW = {
    "reward/mean": -0.125, "reward/std": 0.5, "eval/accuracy": 1.0, "eval/reward": 0.5,
    "kl/reference": 0.086, "actor/loss": -0.0123, "actor/entropy": 12.5,
    "response/length_mean": 1023.5, "throughput/tokens_per_second": 123456, "time/step": 12.25,
}  # fmt: skip
SAFE_ROW = {
    **{k: v for k, v in PPO_ROW.items() if k != "eval/accuracy"},
    "cost/mean": -0.039, "cost/multiplier": 1.3281,
}  # fmt: skip
CELLS = {
    "step": "2/300", "reward": "-0.125 ±0.500", "accuracy": "100.0%", "eval": "0.500",
    "cost": "-0.039", "multiplier": "1.328", "KL": "0.086", "loss": "-0.0123", "entropy": "12.5",
    "length": "1023.5", "tok/s": "123.5k", "time": "12.2 s", "left": "1:00:51",
}  # fmt: skip
# By hand from the columns' widths (9, 13, 8, 6, 6, 10, 7, 8, 7, 6, 7, 7, 7) and 2 between two.
PLAIN = [
    (PPO_ROW, 97, "step reward accuracy KL loss entropy length tok/s time left"),
    (PPO_ROW, 96, "step reward accuracy KL loss length tok/s time left"),
    (PPO_ROW, 80, "step reward accuracy KL loss length time left"),
    (PPO_ROW, 60, "step reward accuracy KL loss"),
    (PPO_ROW, 30, "step reward"),
    (SAFE_ROW, 115, "step reward eval cost multiplier KL loss entropy length tok/s time left"),
    (SAFE_ROW, 80, "step reward eval cost multiplier KL loss time"),
    (SAFE_ROW, 60, "step reward eval cost KL loss"),
]
# A live table's columns are as wide as their texts (300/300 for steps); what is left stands above.
LIVE = [
    (PPO_ROW, 120, "step reward accuracy KL loss entropy length tok/s time left"),
    (PPO_ROW, 80, "step reward accuracy KL loss length tok/s time"),
    (PPO_ROW, 81, "step reward accuracy KL loss entropy length tok/s time"),
    (PPO_ROW, 60, "step reward accuracy KL loss time"),
    (SAFE_ROW, 120, "step reward eval cost multiplier KL loss entropy length tok/s time left"),
    (SAFE_ROW, 80, "step reward eval cost multiplier KL loss time"),
    (SAFE_ROW, 60, "step reward eval cost KL loss"),
]


def shown_rows(lines, columns):
    """The cells of the table's rows, read below the ends of their titles."""
    (at,) = [i for i, line in enumerate(lines) if line.split() == columns]
    ends = [lines[at].index(f"{title} ") + len(title) for title in columns[:-1]]
    ends.append(len(lines[at].rstrip()))
    rows = [line for line in lines[at + 1 :] if "/300" in line]
    return [[r[a:b].strip() for a, b in zip([0, *ends], ends)] for r in rows]


def steps_shown(view, row):
    for step in (1, 2):
        view.step({"step": step, **row})


@pytest.mark.parametrize(("row", "width", "columns"), PLAIN)
def test_plain_lines_fit_with_whole_cells(row, width, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    config = default_config()
    stream = io.StringIO()
    display = Display(config, 300, stream)
    steps_shown(display, row)
    long = {"prompt": "p" * 300, "response": "r" * 300, "reward": 1.0, "advantage": -0.5}
    display.samples([long])
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines[:-1])) <= width
    assert len(lines[-1]) <= max(width, 60)  # a sample keeps 20 characters
    columns = columns.split()
    assert shown_rows(lines, columns)[-1] == [CELLS[title] for title in columns]


def test_plain_lines_without_a_terminal_have_all_columns(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    stream = io.StringIO()
    more = {"eval/accuracy": 0.5, "eval/loss": 1.5, "episode/turns": 3.0, "time/environment": 0.1}
    more |= {"throughput/calls_per_second": 4.0, "time/agents": 0.2, "time/calls_wait": 0.3}
    more |= {"eval/pair_accuracy": 0.5, "actor/margin": 0.1}
    steps_shown(Display(default_config(), 300, stream), {**SAFE_ROW, **more})
    assert stream.getvalue().splitlines()[0].split() == [t for t in COLUMNS if t != "eval"]


def test_plain_columns_widen_and_the_header_comes_again():
    stream = io.StringIO()
    display = Display(default_config(), 300, stream)
    display.step({"step": 1, "reward/mean": 0.5, "reward/std": 0.5, "actor/loss": 0.25})
    display.step({"step": 2, "reward/mean": -12345.0, "reward/std": 54321.0, "actor/loss": 0.25})
    first, _, second, row = stream.getvalue().splitlines()
    assert first != second and second.split() == ["step", "reward", "loss"]
    assert row[: second.index("reward") + 6].endswith("-1.2e+04 ±5.4e+04")
    assert row.endswith("  0.2500") and len(row) == len(second)


def live_lines(row, width, monkeypatch):
    """The live view of 300 steps of which two are done, as lines of text."""
    from rich.text import Text

    for name, value in {"TERM": "xterm", "COLUMNS": str(width), "LINES": "40"}.items():
        monkeypatch.setenv(name, value)
    display = Display(default_config(), 300, Terminal())
    display.state.title = "safe_rlhf.py  SafeRLHF  runs/safe_rlhf-20250101-120000"
    display.step({"step": 1, **row})
    phases = ("generate", "transition", "prepare", "update", "evaluate")
    for seconds, name in enumerate(phases, start=10):
        display.state.enter(name, 0.0)
        display.state.leave(name, float(seconds))
    display.step({"step": 2, **row})
    display.state.enter("generate", time.monotonic())
    long = {"prompt": "p" * 300, "response": "r" * 300, "reward": 1.0, "advantage": -0.5}
    display.samples([long])
    view = display._view
    with view._console.capture() as captured:
        view._console.print(view._draw())
    return Text.from_ansi(captured.get()).plain.splitlines()


@pytest.mark.parametrize(("row", "width", "columns"), LIVE)
def test_live_table_fits_with_whole_cells(row, width, columns, monkeypatch):
    lines = live_lines(row, width, monkeypatch)
    assert max(map(len, lines)) <= width
    columns = columns.split()
    first = CELLS | {"step": "1/300", "left": ""}  # which compiled: how long is left is not known
    expected = [[texts[title] for title in columns] for texts in (first, CELLS)]
    assert shown_rows(lines, columns) == expected


@pytest.mark.parametrize("width", [60, 80, 120])
def test_live_head_and_phases_fit(width, monkeypatch):
    lines = live_lines(PPO_ROW, width, monkeypatch)
    samples = next(i for i, line in enumerate(lines) if "samples of step 2" in line)
    above = "\n".join(lines[:samples])
    assert "…" not in above and "2/300" in lines[1] and "1:00:51 left" in lines[1]
    phases = lines[2].split("   ")
    assert phases[-1].startswith("▶ generate 0.0")
    # With all that are over the line has 88 characters; the shortest phases go first.
    over = ["transition 11.0 s", "prepare 12.0 s", "update 13.0 s", "evaluate 14.0 s"]
    assert phases[:-1] == over[{120: 0, 80: 1, 60: 2}[width] :]


def test_a_run_on_pairs_shows_its_accuracy_and_margin():
    step = {"step": 2, "actor/loss": 0.6, "actor/margin": 0.25, "time/step": 1.0}
    columns = used_columns([], step)
    assert columns == ["step", "margin", "loss", "time", "left"]
    evaluated = step | {"eval/pair_accuracy": 0.875, "eval/pair_loss": 0.5}
    columns = used_columns(columns, evaluated)
    assert columns == ["step", "pair_acc", "margin", "loss", "time", "left"]
    assert row_cells(evaluated, columns, 9)[:3] == ["2/9", "87.5%", "0.250"]
    assert row_cells(step, columns, 9)[:3] == ["2/9", "", "0.250"]


def test_columns_go_in_the_order_of_importance():
    assert sorted(IMPORTANCE) == sorted(COLUMNS)
    widths = dict.fromkeys(COLUMNS, 8)
    counts = range(1, len(COLUMNS))
    left = [fitting_columns(list(COLUMNS), widths, 10 * n - 2) for n in counts]
    assert [set(columns) for columns in left] == [set(IMPORTANCE[:n]) for n in counts]
    assert left[4] == ["step", "reward", "accuracy", "cost", "KL"]  # in the table's order
    assert fitting_columns(list(COLUMNS), widths, 3) == ["step"]
    assert fitting_columns(list(COLUMNS), widths, None) == list(COLUMNS)


def test_control_characters_cannot_reach_the_terminal():
    assert one_line("a\x1b[31mb\nc\td\u202e") == "a·[31mb⏎c d·"


def test_a_score_that_rounds_to_zero_has_no_minus():
    texts = score_texts({"reward": -0.001, "advantage": -0.0})
    assert texts == ["reward +0.00", "advantage +0.00"]
    assert score_texts({"reward": None, "advantage": -0.126}) == ["reward   – ", "advantage -0.13"]


def test_samples_are_spread_over_the_rewards():
    samples = [{"reward": r} for r in (0.5, None, 1.0, 0.0)]
    assert [s["reward"] for s in spread_samples(samples, 2)] == [None, 1.0]
    assert [s["reward"] for s in spread_samples(samples, 1)] == [1.0]
    assert len(spread_samples(samples, 9)) == 4


def test_long_samples_keep_the_prompts_end_and_the_responses_beginning():
    prompt, response = sample_texts(
        {"prompt": "x" * 50 + "end", "response": "begin" + "y" * 50}, 20
    )
    assert prompt.startswith("…") and prompt.endswith("end")
    assert response.startswith("begin") and response.endswith("…")
    assert len(prompt) + len(response) == 20


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (clock(5), "0:05"),
        (clock(3725), "1:02:05"),
        (count(812), "812"),
        (count(12_345), "12.3k"),
        (count(13e9), "13.0B"),
        (size(512), "512 B"),
        (size(3 * 2**20), "3.0 MiB"),
    ],
)
def test_figures(text, expected):
    assert text == expected


def test_descriptions_are_printed_as_tables():
    stream = io.StringIO()
    print_description(
        {
            "algorithm": "PPO",
            "batch": {"sequences_per_step": 64},
            "memory": [{"role": "actor", "total_bytes": 2**21}],
            "resident_bytes": {"actor": 2**30},
        },
        title="dry run",
        stream=stream,
    )
    text = stream.getvalue()
    for part in ("dry run", "algorithm  PPO", "sequences per step  64", "2.0 MiB", "1.0 GiB"):
        assert part in text
