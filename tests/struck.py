"""`python struck.py MOMENT NTH SIGNALS ...`: the command, signalled at a moment that has a name.

Like `python -m hjax.launch ...`, but when it comes to the moment for the nth time it sends itself
signals, ``TERM`` or ``TERM+0.1+INT`` (seconds between them): what is struck is the same in each
run, without anything of the kind in hjax itself. A strike from another thread is as the system's.
"""

import os
import runpy
import signal
import sys
import threading
import time

# By moment the function that is about to run, and of a call which.
MOMENTS = {
    "start": ("hjax.run.workdir", "Workdir", "open"),
    "initialise": ("hjax.run.trainer", "Trainer", "_initialize"),
    "restore": ("hjax.run.trainer", "Trainer", "_restore"),
    "warm start": ("hjax.run.reporter", "Reporter", "warm_start"),
    "generate": ("hjax.controller.worker_host", "WorkerHost", "call", "generate_sequences"),
    "prepare": ("hjax.controller.worker_host", "WorkerHost", "call", "compute_ref_log_prob"),
    "update": ("hjax.controller.worker_host", "WorkerHost", "call", "update_actor"),
    "row": ("hjax.run.workdir", "Workdir", "append", "metrics.jsonl"),
    "samples": ("hjax.run.workdir", "Workdir", "append", "samples.jsonl"),
    "save": ("hjax.models.checkpoint", "Checkpoints", "save"),
    "checkpoint": ("hjax.models.checkpoint", "", "write_checksums"),
    "report": ("hjax.show.report", "", "render"),
}


def send(signals: str) -> None:
    """Send this process signals, with pauses between them."""
    for part in signals.split("+"):
        if part[0].isdigit():
            time.sleep(float(part))
        else:
            os.kill(os.getpid(), getattr(signal, f"SIG{part}"))


def arm(moment: str, nth: int, signals: str) -> None:
    """Strike when the moment has come so often."""
    module, owner, name, *which = MOMENTS[moment]
    place = __import__(module, fromlist=["_"])
    place = getattr(place, owner) if owner else place
    function, seen = getattr(place, name), []

    def struck(*arguments, **options):
        if not which or which[0] in (arguments[1], getattr(arguments[1], "method", None)):
            seen.append(moment)
            if len(seen) == nth:
                threading.Thread(target=send, args=(signals,), daemon=True).start()
                time.sleep(0.05)  # it arrives before the function or in it
        return function(*arguments, **options)

    setattr(place, name, struck)


if __name__ == "__main__":
    moment, nth, signals, *arguments = sys.argv[1:]
    os.environ["MALLOC_ARENA_MAX"] = "8"  # or the command would start anew, without this
    sys.orig_argv = [sys.executable, "-m", "hjax.launch", *arguments]
    sys.argv = ["hjax.launch", *arguments]
    arm(moment, int(nth), signals)
    runpy.run_module("hjax.launch", run_name="__main__", alter_sys=True)
