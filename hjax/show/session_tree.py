"""A session of an agent as a tree: its calls in chains, and chains that branch off.

A chain is a conversation: each call goes on from the one above it. It ends at a call from which
several go on; each of these begins a chain of its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hjax.show.format import printable

# Colours of rows: numbers of the pages' classes c0 ... c13.
_COLORS = 8


def session_tree(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The chains of a session that go on from nothing.

    Args:
      calls: as of ``hjax.agents.call_tree.CallTree.call_records``, in order.

    Returns:
      of each chain its ``calls`` (``said``: (role, text) of what is new, ``answer``, ``head``, a
      line of words, and ``color`` of its row, -1 where none learns from it), and in ``branches``
      the chains that go on from its last call.
    """
    children: dict[int | None, list[Mapping[str, Any]]] = {}
    for call in calls:
        children.setdefault(call["parent"], []).append(call)

    def chain(call: Mapping[str, Any]) -> dict[str, Any]:
        found = [call]
        while len(below := children.get(found[-1]["number"], [])) == 1:
            found.append(below[0])
        return {"calls": list(map(_shown, found)), "branches": list(map(chain, below))}

    return [chain(call) for call in children.get(None, [])]


def _shown(call: Mapping[str, Any]) -> dict[str, Any]:
    row, forced = call["row"], call.get("forced", 0)
    parts = [f"call {call['number'] + 1}"]
    if call["parent"] is not None:
        parts.append(f"after {call['parent'] + 1}")
    parts.append("not learned from" if row is None else f"row {row + 1}")
    if call["label"] != "agent":
        parts.append(call["label"])
    parts.append(f"{call['tokens']} tokens" + (f", {forced} forced" if forced else ""))
    return {
        "head": " · ".join(parts),
        "said": [(role, printable(text)) for role, text in call["said"]],
        "answer": printable(call["answer"]),
        "color": -1 if row is None else row % _COLORS,
    }
