"""Split of a nested dict of parameters into trainable and frozen ones."""

from collections.abc import Mapping
from typing import Any

Tree = Any


class TrainableSplit:
    """Splits trees of one structure, and joins them again.

    Args:
      learned: nested dict of bool, True if trainable; None: everything is.
    """

    def __init__(self, learned: Mapping[str, Any] | None = None):
        self._learned = learned or {}
        self.everything = all(_leaves(self._learned))

    def split(self, tree: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(trainable part, frozen part) of a tree with any leaves, some of which may be missing."""
        if self.everything:
            return dict(tree), {}
        return _select(tree, self._learned, True), _select(tree, self._learned, False)

    def join(self, learned: Mapping[str, Any], rest: Mapping[str, Any]) -> dict[str, Any]:
        """The tree from its two parts."""
        return _joined(learned, rest)


def _leaves(tree: Any) -> list[Any]:
    if not isinstance(tree, Mapping):
        return [tree]
    return [leaf for value in tree.values() for leaf in _leaves(value)]


def _select(tree: Any, learned: Any, trainable: bool) -> Any:
    found: dict[str, Any] = {}
    for name, flag in learned.items():
        if name not in tree:
            continue
        if isinstance(flag, Mapping):
            if part := _select(tree[name], flag, trainable):
                found[name] = part
        elif flag is trainable:
            found[name] = tree[name]
    return found


def _joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    joined = dict(first)
    for name, value in second.items():
        joined[name] = _joined(joined[name], value) if name in joined else value
    return joined
