"""Human-readable numbers and texts: times, counts, sizes, samples; ticks of an axis.

Ticks have round values and exact texts, so no two ticks have the same text.
"""

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple


def number(value: float) -> str:
    """A number with three decimals, from 10 on with one, from 1000 on with an exponent."""
    if abs(value) >= 1000:
        return f"{value:.1e}"
    # Adding 0 turns a rounded -0.0 into 0.0.
    return f"{round(value, 3) + 0:.3f}" if abs(value) < 10 else f"{value:.1f}"


def duration(value: float) -> str:
    """Seconds: `0.25 s`, `12.3 s`, `3:05`."""
    if value >= 60:
        return clock(value)
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def seconds(value: float) -> str:
    """Seconds of any size: `1.24 s`, `12.3 ms`, `85 µs`."""
    for power, unit in ((0, "s"), (-3, "ms")):
        if value >= 10.0**power:
            return f"{value / 10.0**power:.3g} {unit}" if value < 1000 else clock(value)
    return f"{value * 1e6:.3g} µs"


def clock(value: float) -> str:
    """Minutes and seconds, or hours: `3:05`, `2:00:00`."""
    whole = int(value + 0.5)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def elapsed_and_left(gone: float, left: float | None) -> str:
    """Elapsed and remaining time of a job: `0:06 gone, 1:11 left`; ``left`` None: unknown yet."""
    return f"{clock(gone)} gone" + ("" if left is None else f", {clock(left)} left")


def job_times(gone: float, done: float, total: float) -> str:
    """Elapsed and remaining time of a job that proceeds at constant speed."""
    return elapsed_and_left(gone, gone / done * (total - done) if 0 < done < total else None)


def count(value: float) -> str:
    """A large count: `812`, `12.3k`, `4.5M`, `13.0B`."""
    return _in_units(value, {1e9: "B", 1e6: "M", 1e3: "k"}, "{:.1f}", "{:.0f}")


def size(value: float) -> str:
    """Bytes: `512 B`, `3.2 MiB`, `12.9 GiB`."""
    units = {2.0**30: " GiB", 2.0**20: " MiB", 2.0**10: " KiB"}
    return _in_units(value, units, "{:.1f}", "{:.0f} B")


def flop_count(value: float) -> str:
    """FLOPs: `1.24 TFLOP`, `812 MFLOP`."""
    units = {1e15: " PFLOP", 1e12: " TFLOP", 1e9: " GFLOP", 1e6: " MFLOP", 1e3: " kFLOP"}
    return _in_units(value, units, "{:.3g}", "{:.3g} FLOP")


def _in_units(value: float, units: Mapping[float, str], form: str, small: str) -> str:
    """Format in the first unit that is not larger; smaller values by ``small``."""
    for least, unit in units.items():
        if abs(value) >= least:
            return form.format(value / least) + unit
    return small.format(value)


def one_line(text: Any) -> str:
    """A model's text, safe to print on one line: line breaks as ⏎, no control characters.

    Lists of token ids (where there is no tokenizer) are written as such.
    """
    return printable(str(text).translate({ord("\n"): "⏎", ord("\t"): " "}))


def printable(text: str) -> str:
    """A model's text, safe to print: its lines and tabs, other control characters as ·."""
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)


def spread_samples(samples: Sequence[Mapping[str, Any]], n: int) -> list[Mapping[str, Any]]:
    """``n`` of the samples, spread from the lowest to the highest reward."""

    def reward(sample: Mapping[str, Any]) -> float:
        value = sample.get("reward")
        return float("-inf") if value is None else value

    ordered = sorted(samples, key=reward)
    if len(ordered) <= n:
        return ordered
    if n == 1:
        return ordered[-1:]
    return [ordered[round(i * (len(ordered) - 1) / (n - 1))] for i in range(n)]


def sample_texts(sample: Mapping[str, Any], width: int) -> tuple[str, str]:
    """Prompt and response, together at most ``width`` characters.

    A long prompt loses its beginning (at most half is the prompt's), a long response its end.
    """
    prompt, response = one_line(sample["prompt"]), one_line(sample["response"])
    if len(prompt) > width // 2:
        prompt = "…" + prompt[len(prompt) - width // 2 + 1 :]
    room = width - len(prompt)
    return prompt, response if len(response) <= room else response[: room - 1] + "…"


def score_texts(sample: Mapping[str, Any]) -> list[str]:
    """A sample's reward and advantage as aligned texts."""
    texts = []
    for key in ("reward", "advantage"):
        value = sample.get(key)
        texts.append(f"{key} {'  – ' if value is None else signed(value)}")
    return texts


def signed(value: float) -> str:
    """A score with its sign; adding 0 turns a rounded -0.0 into 0.0."""
    return f"{round(value, 2) + 0.0:+.2f}"


Row = Mapping[str, Any]


def start_row(start: Row) -> dict[str, str]:
    """A row of starts.jsonl as texts: ``time``, ``step``, ``command``, ``commit``, ``versions`` and
    ``hardware``."""
    commits = [
        f"{name} {start[key]}"
        for name, key in (("hjax", "hjax_commit"), ("folder", "commit"))
        if start.get(key)
    ]
    if start.get("commit") == start.get("hjax_commit"):
        commits = commits[:1]
    devices = [f"{count} × {kind}" for kind, count in start.get("devices", {}).items()]
    return {
        "time": str(start.get("time", "")).replace("T", " ").replace("Z", " UTC"),
        "step": str(start.get("step", "")),
        "command": str(start.get("command", "")),
        "commit": ", ".join(commits) or "none",
        "versions": ", ".join(f"{k} {v}" for k, v in start.get("versions", {}).items()),
        "hardware": ", ".join(
            [*devices, str(start.get("processor", "")), f"{start.get('cores', '?')} cores"]
        ),
    }


# Steps between ticks, times a power of ten.
_ROUND = (Decimal("1"), Decimal("2"), Decimal("2.5"), Decimal("5"), Decimal("10"))
# Plain figures are used up to so many characters and below this value; else the shortest notation.
_PLAIN_LENGTH = 6
_PLAIN_BELOW = 10_000
_UNITS = {"T": Decimal("1e12"), "G": Decimal("1e9"), "M": Decimal("1e6"), "k": Decimal(1000)}


class Tick(NamedTuple):
    """A tick of an axis: its value and text."""

    value: float
    text: str


def ticks(low: float, high: float, wanted: int, whole: bool = False) -> list[Tick]:
    """Round numbers from ``low`` to ``high``, about ``wanted`` of them and two at least.

    Args:
      low, high: the axis' ends; finite, ``low`` below ``high``.
      wanted: how many parts the axis should have, about.
      whole: only whole numbers, however few.
    """
    bottom, top = Decimal(low), Decimal(high)
    step = _step((top - bottom) / wanted, whole)
    # An end that float rounding has moved slightly still has its tick.
    tolerance = Decimal("1e-9")
    first = math.ceil(bottom / step - tolerance)
    values = [step * number for number in range(first, math.floor(top / step + tolerance) + 1)]
    return [Tick(float(v), text) for v, text in zip(values, _texts(values), strict=True)]


def _step(rough: Decimal, whole: bool) -> Decimal:
    """The smallest round step that is not (much) below ``rough``."""
    if whole and rough < 1:
        return Decimal(1)
    power = Decimal(1).scaleb(rough.adjusted())
    steps = [factor * power for factor in _ROUND]
    if whole:
        steps = [step for step in steps if step == step.to_integral_value()]
    return next(step for step in steps if step >= rough * Decimal("0.999"))


def _texts(values: Sequence[Decimal]) -> list[str]:
    """Exact texts of ticks: plain, in thousands, millions, ..., or with an exponent."""
    plain = _plain(values)
    if _longest(plain) <= _PLAIN_LENGTH and all(abs(value) < _PLAIN_BELOW for value in values):
        return plain
    notations = (plain, [_with_unit(value) for value in values], [_scientific(v) for v in values])
    return min(notations, key=_longest)


def _longest(texts: Sequence[str]) -> int:
    return max(map(len, texts), default=0)


def _plain(values: Sequence[Decimal]) -> list[str]:
    """Plain decimal texts, all with as many decimals as the longest needs."""
    decimals = max((len(_exact(value).partition(".")[2]) for value in values), default=0)
    return [f"{value:.{decimals}f}" for value in values]


def _exact(value: Decimal) -> str:
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _with_unit(value: Decimal) -> str:
    for unit, least in _UNITS.items():
        if abs(value) >= least:
            return f"{_exact(value / least)}{unit}"
    return _exact(value)


def _scientific(value: Decimal) -> str:
    if value == 0:
        return "0"
    exponent = value.adjusted()
    return f"{_exact(value.scaleb(-exponent))}e{exponent}"
