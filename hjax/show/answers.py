"""Printing of responses as they stream, and of evaluation results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich.text import Text

from hjax.show.format import printable
from hjax.show.tables import rows_table

if TYPE_CHECKING:
    from hjax.rewards.estimators import Estimate
    from hjax.rollout.language_model import Completion


def print_piece(console: Any, piece: Any, style: str = "") -> None:
    """Print a piece of text or token ids directly after the last one, without wrapping lines.

    Args:
      console: of rich.
      piece: a string (its terminal control characters are replaced), or a list of ids.
      style: of rich.
    """
    text = piece if isinstance(piece, str) else " ".join(map(str, piece))
    console.print(Text(printable(text), style=style), end="", soft_wrap=True)
    console.file.flush()


def print_response(console: Any, pieces: Iterable[Completion]) -> str:
    """Print a response as it streams and then a line with its length; returns its text."""
    text, tokens, truncated = "", 0, False
    for piece in pieces:
        if piece.text is None:
            for token in piece.tokens:
                print_piece(console, f"{' ' if tokens else ''}{token}")
                tokens += 1
        else:
            print_piece(console, piece.text)
            tokens += len(piece.tokens)
        text += piece.text or ""
        truncated = piece.finish_reason == "length"
    remark = ", cut at the length limit" if truncated else ""
    print_piece(console, f"\n[{tokens} token{'s' if tokens != 1 else ''}{remark}]\n", "dim")
    return text


def print_measures(
    console: Any, measures: Mapping[str, Estimate], rewards: Iterable[float | None]
) -> None:
    """A table: a measure, its mean, its standard error. Without accuracy a line says which of the
    rewards (None: unscored) is neither right nor wrong, if one is."""
    rows = [(name, _figure(found.mean), _figure(found.stderr)) for name, found in measures.items()]
    console.print(rows_table(("", "mean", "stderr"), rows, right=("mean", "stderr")))
    partial = next((each for each in rewards if each not in (None, 0.0, 1.0)), None)
    if "accuracy" not in measures and partial is not None:
        console.print(f"no accuracy and pass@k: a reward is {partial:g}, neither 0 nor 1")


def _figure(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4f}"
