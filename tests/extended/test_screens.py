"""What stands on the screen: a run in a terminal of 80, 120 and 200 columns, as a person sees it.

The command runs in a pseudo-terminal, and pyte draws what it writes. With HJAX_SCREENS=FOLDER the
screens are kept there to be looked at (those of the pages as well, tests/extended/test_browser.py).
"""

import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time

import pytest
from helpers import TINY, kept_screens

pyte = pytest.importorskip("pyte", reason="pyte is not installed: pip install hjax[test]")
pty = pytest.importorskip("pty", reason="this system has no pseudo-terminals")

ROWS = 50


def watched(arguments, width, limit=240.0):
    """The exit status, the screens (one whenever they stood still), and the last one, by lines."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, width, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdin=follower, stdout=follower, stderr=follower, start_new_session=True,
        env=environment | {"TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(follower)
    screen = pyte.HistoryScreen(width, ROWS, history=5000)
    stream = pyte.ByteStream(screen)
    seen, until = [], time.monotonic() + limit
    while time.monotonic() < until:
        if select.select([leader], [], [], 0.2)[0]:
            try:
                given = os.read(leader, 65536)
            except OSError:  # the command has ended
                break
            if not given:
                break
            stream.feed(given)
        drawn = [line.rstrip() for line in screen.display]
        if any(drawn) and (not seen or drawn != seen[-1]):
            seen.append(drawn)
    else:
        process.kill()
    os.close(leader)
    return process.wait(), seen


@pytest.mark.parametrize(
    "width", [80, *(pytest.param(width, marks=pytest.mark.slow) for width in (120, 200))]
)
def test_a_run_as_it_stands_on_the_screen(width, tmp_path):
    workdir = tmp_path / "run"
    options = [f"--config.{key}={value}" for key, value in TINY.items()]
    status, seen = watched(
        [
            "hjax.launch",
            "--config=ppo.py",
            f"--workdir={workdir}",
            "--config.steps=3",
            *options,
            "--config.algorithm.minibatch=8",
            "--config.eval.every=2",
            "--config.display.enabled=true",
        ],
        width,
    )
    last = seen[-1]
    if folder := kept_screens():
        (folder / f"terminal-{width}.txt").write_text("\n".join(last) + "\n")
    assert status == 0, "\n".join(last)
    text = "\n".join(last)
    assert f"done: 3 steps in {workdir}" in re.sub(r"\n", "", text)
    # One table, each step in one line, with the title over every cell and nothing shortened.
    table = next(i for i, line in enumerate(last) if line.split()[:2] == ["step", "reward"])
    rows = [line for line in last[table:] if re.match(r" *\d/3 ", line)]
    assert [row.split()[0] for row in rows] == ["1/3", "2/3", "3/3"]
    titles = last[table].split()
    assert {"step", "reward", "KL", "time"} <= set(titles)
    assert all("…" not in line for line in last[table : table + 5])
    # A wider screen has more of the columns.
    assert len(titles) == {80: 9, 120: 10, 200: 10}[width]
    # The box of samples is closed on both sides, in every line.
    top = next(i for i, line in enumerate(last) if line.startswith("╭─ samples"))
    bottom = next(i for i, line in enumerate(last) if i > top and line.startswith("╰"))
    assert bottom > top + 1
    assert {(line[0], line[-1], len(line)) for line in last[top + 1 : bottom]} == {
        ("│", "│", len(last[top]))
    }
    # While it ran it said what it was at.
    words = {word for screen in seen for line in screen for word in line.split()}
    assert {"warm", "▶", "compiling"} & words >= {"▶"}
