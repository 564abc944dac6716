"""A job's parts as they are shown: a bar in a terminal, lines elsewhere."""

import io

import pytest

from hjax.show import progress_bar
from hjax.show.progress_bar import PartsDisplay


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    """Stands for `time`; the test says how late it is."""

    now = 100.0

    def monotonic(self):
        return self.now


def test_lines_come_at_the_ends_and_every_five_seconds(monkeypatch):
    clock, stream = Clock(), io.StringIO()
    monkeypatch.setattr(progress_bar, "time", clock)
    with PartsDisplay("calibrating", stream=stream) as progress:
        for done, seconds in ((0, 0), (1, 2), (2, 6), (3, 9), (9, 75), (10, 76)):
            clock.now = 100.0 + seconds
            progress(done, 10, f"part {done}" if done < 10 else "")
    assert stream.getvalue().splitlines() == [
        "calibrating  0/10   part 0   0:00 gone",
        "calibrating  2/10   part 2   0:06 gone, 0:24 left",
        "calibrating  9/10   part 9   1:15 gone, 0:08 left",
        "calibrating 10/10   done   1:16 gone",
    ]


@pytest.mark.parametrize("width", [60, 80, 160])
def test_the_bar_is_whole_at_any_width(width, monkeypatch):
    for name, value in {"TERM": "xterm", "COLUMNS": str(width)}.items():
        monkeypatch.setenv(name, value)
    stream = Terminal()
    with PartsDisplay("calibrating", stream=stream) as progress:
        progress(11, 12, "updates of all runs [bold]")
    shown = stream.getvalue()
    assert "…" not in shown
    for part in ("calibrating", "11/12", "updates of all runs [bold]", "0:00"):
        assert part in shown


def test_the_cursor_comes_back_after_an_error(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with pytest.raises(KeyboardInterrupt), PartsDisplay("calibrating", stream=stream) as progress:
        progress(0, 2, "one")
        raise KeyboardInterrupt
    hidden, shown = stream.getvalue().rfind("\x1b[?25l"), stream.getvalue().rfind("\x1b[?25h")
    assert 0 <= hidden < shown


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_nothing_is_shown_where_nothing_begins_or_it_is_switched_off(stream, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    with PartsDisplay("calibrating", stream=stream):
        pass
    with PartsDisplay("calibrating", enabled=False, stream=stream) as progress:
        progress(0, 2, "one")
    assert stream.getvalue() == ""


def test_a_closed_pipe_does_not_end_the_job():
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    with PartsDisplay("calibrating", stream=Closed()) as progress:
        progress(0, 2, "one")
