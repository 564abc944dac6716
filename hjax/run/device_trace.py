"""A trace of what the devices do in some steps, by JAX's profiler, and a summary by program.

The trace (``profile/`` in the workdir) is in the form that TensorBoard's and XProf's profile pages
read. Its summary, ``profile.json``, is what the report shows.
"""

import collections
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hjax.errors import ConfigError, RunError
from hjax.files import PROFILE, json_line, replace_file
from hjax.rules import whole_number

# Operations listed of each program.
MOST_OPERATIONS = 5
# Operations that contain others.
_CONTROL_FLOW = ("while", "call", "conditional")


def parse_step_range(text: str) -> range:
    """The steps that ``--profile`` names: ``5``, or ``5-7``.

    Raises:
      ConfigError: something else.
    """
    first, dash, last = text.partition("-")
    begin, end = whole_number(first), whole_number(last if dash else first)
    if begin is None or end is None:
        raise ConfigError(f"--profile={text[:60]}: a step, or the first and the last, as 5-7")
    steps = range(begin, end + 1)
    if not steps or not steps[0]:
        raise ConfigError(f"--profile={text}: steps count from 1, the first before the last")
    return steps


class DeviceTrace:
    """Traces this process's devices during some steps of a run.

    Args:
      steps: that are traced, one after another.
      workdir: gets ``profile/`` and profile.json.
    """

    def __init__(self, steps: range, workdir: Path):
        self._steps, self._workdir = steps, workdir
        self._running, self._taken = False, 0

    def begin(self, step: int) -> None:
        """A step begins."""
        if self._running:
            self._taken = step
        if step != self._steps[0]:
            return
        import jax

        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # a step's calls of Python functions are too many
        options.host_tracer_level = 1
        try:
            jax.profiler.start_trace(str(self._workdir / "profile"), profiler_options=options)
        except (OSError, RuntimeError) as error:
            raise RunError(f"--profile: the trace cannot begin: {error}") from error
        self._running, self._taken = True, step

    def end(self, step: int) -> str:
        """A step has ended; returns a line on the trace if it was the last one, else nothing."""
        return self._finish() if self._running and step >= self._steps[-1] else ""

    def close(self) -> str:
        """The run ends; returns a line if that is before the last step to trace."""
        if self._running:
            return self._finish()
        first, last = self._steps[0], self._steps[-1]
        return "" if self._taken else f"profile: none of the steps {first} to {last} was taken"

    def _finish(self) -> str:
        """Stop the trace and write its summary; returns a line on it."""
        import jax

        self._running = False
        jax.profiler.stop_trace()
        folder = self._workdir / "profile"
        files = sorted(folder.rglob("*.xplane.pb"), key=_written)
        if not files:
            raise RunError(f"{folder}: the profiler has written no trace")
        summary = summarize_trace(read_trace_events(files[-1]))
        record = {"steps": [self._steps[0], self._taken], **summary}
        replace_file(self._workdir / PROFILE, json_line(record) + "\n")
        first, last = record["steps"]
        traced = f"step {first} is" if first == last else f"steps {first} to {last} are"
        return (
            f"{traced} traced in {folder}: devices were busy "
            f"{record['busy_seconds']:.3g} of {record['seconds']:.3g} s"
        )


def _written(path: Path) -> float:
    return path.stat().st_mtime


def read_trace_events(file: Path) -> list[dict[str, Any]]:
    """The operations in an ``.xplane.pb``: ``device``, ``program``, ``operation``, ``run`` (a
    number), ``start`` and ``end`` in seconds."""
    import jax

    found = []
    with warnings.catch_warnings():
        # jaxlib's iterators are types without a module, which Python 3.13 calls deprecated when the
        # first is made; a filter that makes an error of it would end the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for line in plane.lines:
                for event in line.events:
                    facts = dict(event.stats)
                    if "hlo_op" not in facts or "hlo_module" not in facts:
                        continue
                    start = event.start_ns / 1e9
                    found.append({
                        "device": f"{plane.name} {facts.get('device_ordinal', '')}",
                        "program": str(facts["hlo_module"]).removeprefix("jit_"),
                        "operation": str(facts["hlo_op"]),
                        "run": facts.get("run_id"),
                        "start": start,
                        "end": start + event.duration_ns / 1e9,
                    })  # fmt: skip
    return found


def summarize_trace(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What took the devices' time.

    Args:
      events: of ``read_trace_events``.

    Returns:
      ``seconds`` from the first operation's start to the last one's end; ``busy_seconds``, in which
      a device computes, a mean over devices; and ``programs``, the longest first: ``name``,
      ``runs``, ``seconds`` (busy, a mean over the devices that run it) and ``operations``, name and
      seconds of those that took longest, without what contains others.
    """
    if not events:
        return {"seconds": 0.0, "busy_seconds": 0.0, "programs": []}
    by_program: dict[str, list[Mapping[str, Any]]] = collections.defaultdict(list)
    for event in events:
        by_program[event["program"]].append(event)
    programs = []
    for name, own in by_program.items():
        operations: collections.Counter[str] = collections.Counter()
        for event in own:
            if not event["operation"].startswith(_CONTROL_FLOW):
                operations[event["operation"]] += event["end"] - event["start"]
        programs.append({
            "name": name,
            "runs": len({event["run"] for event in own}),
            "seconds": _busy(own),
            "operations": [list(pair) for pair in operations.most_common(MOST_OPERATIONS)],
        })  # fmt: skip
    return {
        "seconds": max(e["end"] for e in events) - min(e["start"] for e in events),
        "busy_seconds": _busy(events),
        "programs": sorted(programs, key=lambda program: -program["seconds"]),
    }


def _busy(events: Sequence[Mapping[str, Any]]) -> float:
    """Seconds in which a device runs any of the events, a mean over their devices."""
    spans: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    for event in events:
        spans[event["device"]].append((event["start"], event["end"]))
    return sum(map(_union, spans.values())) / len(spans)


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, until), 0.0)
        until = max(until, end)
    return total
