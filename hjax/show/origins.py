"""By which command, versions, commit and hardware a run was made, as texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
