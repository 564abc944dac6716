"""The batch that episodes make: arrays of their rows, and what happened in each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hjax.batches import NO_EPISODE, sample_rows
from hjax.data.dataset import pad_left, pad_right
from hjax.environments.episode import FAULTLESS, Episode, EpisodeRow

# Per-token entries that are floats; others of a turn are added as they come.
LOGPROBS = ("logprobs", "policy_logprobs")
# Numbers of episodes that a clock has told.
_CLOCKED = ("seconds", "waited")


def episode_batch(
    episodes: Sequence[Episode],
    prompt_length: int,
    response_length: int,
    *,
    filler: int = 0,
    least: int = 0,
) -> dict[str, Any]:
    """Arrays of the episodes' rows, in their order; docs/design.md says what each is.

    Where an episode has several rows, others of no episode follow (``episode`` -1), at least one,
    up to a power of two times the number of episodes and at least ``least``, so that there are few
    sizes.

    Args:
      prompt_length, response_length: of the arrays.
      filler: token id that stands for the prompt of an episode that never began.
      least: rows of the batch.

    Returns:
      ``prompts``, ``prompt_mask``, ``responses``, ``response_mask`` (drawn by the policy, and not
      forced by a constraint), ``response_lengths`` (observations included), the turns' log-probs,
      ``truncated`` (an episode that had to stop before its end), ``failed`` (one that its
      environment's fault ended), ``episode`` and ``group`` int32 [rows]; ``turn`` int32
      [rows, length], of each such token its turn in the episode, else -1; ``anchor`` like it, of
      the state in which its turn was taken, numbered from 0 within the group, -1 none;
      ``invalid_action`` bool like it; ``token_rewards`` float32 [rows, length], each turn's at its
      last such token, or the last before it; ``stop_reason`` and ``turn_records``
      (``Episode.turn_records``), lists, and ``episode_metrics``, by name float32 [rows], the same
      in all rows of an episode; ``calls`` of agents' sessions, lists; ``prompt_text`` and
      ``response_text``, as they were seen and said.
    """
    rows = _padded_rows(episodes, filler, least)
    prompts, prompt_mask = pad_left([row.prompt for _, row in rows], prompt_length)
    responses, places = pad_right([row.response for _, row in rows], response_length)
    records = {id(episode): episode.turn_records() for episode, _ in rows}
    tables = _token_tables(rows, _first_turns(episodes), responses.shape)
    return {
        "prompts": prompts,
        "prompt_mask": prompt_mask,
        "responses": responses,
        "response_mask": tables["turn"] >= 0,
        "response_lengths": places.sum(axis=1, dtype=np.int32),
        **tables,
        "truncated": np.array([e.stop_reason in ("max_turns", "context") for e, _ in rows]),
        "failed": np.array([bool(e.fault) for e, _ in rows]),
        "row_mask": np.array([e.number != NO_EPISODE for e, _ in rows]),
        "episode": np.array([e.number for e, _ in rows], np.int32),
        "group": np.array([e.group for e, _ in rows], np.int32),
        "stop_reason": [e.stop_reason for e, _ in rows],
        "turn_records": [records[id(e)] for e, _ in rows],
        **({"calls": [e.calls for e, _ in rows]} if any(e.calls for e in episodes) else {}),
        "episode_metrics": _metrics([e for e, _ in rows]),
        "prompt_text": [row.text for _, row in rows],
        "response_text": [_text(row) for _, row in rows],
    }


def _padded_rows(
    episodes: Sequence[Episode], filler: int, least: int
) -> list[tuple[Episode, EpisodeRow]]:
    """The episodes' rows, and behind them those of no episode."""
    rows = [(episode, row) for episode in episodes for row in _rows(episode, filler)]
    if max(len(rows), least) > len(episodes):
        size = len(episodes)
        while size <= len(rows) or size < least:
            size *= 2
        nobody = Episode(NO_EPISODE, NO_EPISODE, {}, 0)
        rows += [(nobody, EpisodeRow([filler], ""))] * (size - len(rows))
    return rows


def _token_tables(
    rows: Sequence[tuple[Episode, EpisodeRow]],
    first_turns: dict[int, int],
    shape: tuple[int, ...],
) -> dict[str, np.ndarray]:
    """``turn``, ``anchor``, ``invalid_action``, ``token_rewards`` and the log-probs of
    ``episode_batch``."""
    made = {name: np.full(shape, -1, np.int32) for name in ("turn", "anchor")}
    made |= {name: np.zeros(shape, np.float32) for name in ("token_rewards", *LOGPROBS)}
    made["invalid_action"] = np.zeros(shape, bool)
    states: dict[int, dict[bytes, int]] = {}  # by group, numbers of states
    for i, (episode, row) in enumerate(rows):
        at, numbers = len(row.context), states.setdefault(episode.group, {})
        for number, turn in enumerate(row.turns, start=first_turns.get(id(row), 0)):
            own = slice(at, at + len(turn.tokens))
            forced = np.array(turn.forced or [False] * len(turn.tokens), bool)
            made["turn"][i, own] = np.where(forced, -1, number)
            if turn.anchor is not None:
                state = numbers.setdefault(turn.anchor, len(numbers))
                made["anchor"][i, own] = np.where(forced, -1, state)
            made["invalid_action"][i, own] = not turn.valid
            for name in LOGPROBS:
                made[name][i, own] = turn.logprobs.get(name, turn.logprobs["logprobs"])
            if turn.tokens:
                learned = np.flatnonzero(made["turn"][i, : own.stop] >= 0)
                last = learned[-1] if learned.size else own.stop - 1
                made["token_rewards"][i, last] += turn.reward
            at = own.stop + len(turn.observation)
    return made


def _rows(episode: Episode, filler: int) -> list[EpisodeRow]:
    """Rows that have a turn; one of a single token where there is none."""
    return [row for row in episode.rows if row.turns] or [EpisodeRow([filler], "")]


def _first_turns(episodes: Sequence[Episode]) -> dict[int, int]:
    """By row (its id) the number of its first turn in the episode."""
    found: dict[int, int] = {}
    for episode in episodes:
        number = 0
        for row in episode.rows:
            found[id(row)] = number
            number += len(row.turns)
    return found


def _text(row: EpisodeRow) -> str:
    return "".join(
        turn.text + (turn.observed if turn.observation or i + 1 < len(row.turns) else "")
        for i, turn in enumerate(row.turns)
    )


def _metrics(episodes: Sequence[Episode]) -> dict[str, np.ndarray]:
    """By name a number of each episode: turns, invalid actions, seconds, and the environment's own,
    summed over its turns; NaN where it has not said one."""
    found: list[dict[str, float]] = []
    for episode in episodes:
        turns = episode.turns
        own = {
            "turns": float(len(turns)),
            "invalid_actions": float(sum(not turn.valid for turn in turns)),
            "seconds": float(sum(turn.seconds for turn in turns)),
            **({"waited": sum(turn.waited for turn in turns)} if episode.calls else {}),
        }
        for turn in turns:
            for name, value in turn.metrics.items():
                own[name] = own.get(name, 0.0) + value
        found.append(own)
    names = sorted({name for own in found for name in own})
    return {name: np.array([own.get(name, np.nan) for own in found], np.float32) for name in names}


def episode_summary(batch: dict[str, Any]) -> dict[str, float]:
    """Metrics of a batch's episodes: ``episode/return``, ``episode/turns``, the environment's own
    ``episode/<name>``, and ``episode/stop_<reason>``, the share that stopped so."""
    first = sample_rows(batch)
    reasons = [batch["stop_reason"][i] for i in first]
    found = {
        f"episode/{name}": float(np.nanmean(values[first]))
        for name, values in batch["episode_metrics"].items()
        if name not in _CLOCKED and not np.isnan(values[first]).all()
    }
    if "rewards" in batch:
        returns = np.asarray(batch["rewards"], np.float64)[first]
        scored = returns[~np.isnan(returns)]
        found["episode/return"] = float(scored.mean()) if scored.size else float("nan")
    for reason in sorted({*reasons, *FAULTLESS}):
        found[f"episode/stop_{reason}"] = reasons.count(reason) / len(reasons)
    return found
