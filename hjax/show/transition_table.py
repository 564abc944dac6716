"""Who holds what of a model before and after a transition, drawn in characters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LEGEND = "█ its training shard  ▓ gathered for generation  ░ training shard kept beside  · not held"
MOST_PARTS = 32


def marks(found: Mapping[str, Any], rank: int) -> tuple[str, str]:
    """What a rank holds before and after, a mark per training shard of the model."""
    before, after = (set(stage[rank]) for stage in found["holdings"])
    parts = range(found["train"][0] * found["train"][1])
    if found["method"] == "gather_all":
        before = set()  # a share of every array, none of whole shards

    def mark(part: int) -> str:
        if part in before:
            return "█" if part in after else "░"
        return "▓" if part in after else "·"

    return "".join("█" if i in before else "·" for i in parts), "".join(map(mark, parts))


def picture(found: Mapping[str, Any]) -> str:
    """A line per rank of the first training replica.

    Args:
      found: what ``transition_cost.measure`` returns.
    """
    pipe, tensor, data = found["train"]
    parts = pipe * tensor
    if parts > MOST_PARTS:
        return f"(a model in {parts} shards is too wide to draw)"
    lines = [LEGEND, "rank  " + "before".ljust(max(parts, 6)) + "  after"]
    if found["method"] == "gather_all":
        lines.insert(1, f"before: each rank 1/{found['devices']} of every array (ZeRO-3), kept")
    for rank in range(parts):
        before, after = marks(found, rank)
        lines.append(f"{rank:>4}  {before:<6}  {after}")
    if data > 1:
        lines.append(f"(and the same in {data - 1} more)")
    return "\n".join(lines)
