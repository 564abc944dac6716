"""What a person sees: aligned lines, a live view, and nothing when it is switched off."""

import io

import pytest

from hjax.settings.reading import default_config
from hjax.show.format import cells, clock, count, one_line, pick, size, used_columns
from hjax.show.live import Display, State, sample_texts
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
    state = State(total_steps=10, sample_count=0)
    state.add_step({"step": 1, "time/step": 60.0})
    assert state.seconds_left() is None
    for step, seconds in ((2, 1.0), (3, 3.0), (4, 2.0)):
        state.add_step({"step": step, "time/step": seconds})
    assert state.seconds_left() == 2.0 * 6  # the median, times what is left


def test_phases_nest():
    state = State(10, 0)
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
    assert cells({"step": 3, "kl/reference": 0.5}, second, 9) == ["3/9", "0.500", ""]


def test_control_characters_cannot_reach_the_terminal():
    assert one_line("a\x1b[31mb\nc\td\u202e") == "a·[31mb⏎c d·"


def test_samples_are_spread_over_the_rewards():
    samples = [{"reward": r} for r in (0.5, None, 1.0, 0.0)]
    assert [s["reward"] for s in pick(samples, 2)] == [None, 1.0]
    assert [s["reward"] for s in pick(samples, 1)] == [1.0]
    assert len(pick(samples, 9)) == 4


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
