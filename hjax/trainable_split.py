"""A nested dict in two: what learns, and what is frozen."""

from collections.abc import Mapping
from typing import Any

Tree = Any


class TrainableSplit:
    """Splits trees of one structure, and puts them together again.

    Args:
      learned: nested dict of bool; None: everything learns.
    """

    def __init__(self, learned: Mapping[str, Any] | None = None):
        self._learned = learned or {}
        self.everything = all(_leaves(self._learned))

    def split(self, tree: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What learns of a tree, and the rest; whatever its leaves are, and where some lack."""
        if self.everything:
            return dict(tree), {}
        return _chosen(tree, self._learned, True), _chosen(tree, self._learned, False)

    def join(self, learned: Mapping[str, Any], rest: Mapping[str, Any]) -> dict[str, Any]:
        """The tree that was split so."""
        return _joined(learned, rest)


def _leaves(tree: Any) -> list[Any]:
    if not isinstance(tree, Mapping):
        return [tree]
    return [leaf for value in tree.values() for leaf in _leaves(value)]


def _chosen(tree: Any, learned: Any, which: bool) -> Any:
    found: dict[str, Any] = {}
    for name, of in learned.items():
        if name not in tree:
            continue
        if isinstance(of, Mapping):
            if part := _chosen(tree[name], of, which):
                found[name] = part
        elif of is which:
            found[name] = tree[name]
    return found


def _joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    joined = dict(first)
    for name, value in second.items():
        joined[name] = _joined(joined[name], value) if name in joined else value
    return joined
