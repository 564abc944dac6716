"""Stop strings: a search through the whole text, one character at a time, is the truth."""

import random

import numpy as np
import pytest
from helpers import trainer_of

from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError
from hjax.rollout.prompt_encoding import StopConditions
from hjax.rollout.stop_strings import StopStrings


def searched(text: str, strings: list[str]) -> tuple[str, str | None]:
    """The text before the first stop string to be completed, and that string."""
    for end in range(1, len(text) + 1):
        done = [each for each in strings if text[:end].endswith(each)]
        if done:
            found = max(done, key=len)
            return text[: end - len(found)], found
    return text, None


def begins(text: str, strings: list[str]) -> bool:
    """Whether a stop string begins with ``text`` and goes on."""
    return any(each != text and each.startswith(text) for each in strings)


def fed(stop: StopStrings, pieces: list[str]) -> str:
    return "".join(map(stop.feed, pieces))


def random_string(source: random.Random, letters: str, least: int, most: int) -> str:
    return "".join(source.choices(letters, k=source.randint(least, most)))


@pytest.mark.parametrize("letters", ["a", "ab", "abc", "é\n🙂"])
def test_text_ends_where_a_search_through_all_of_it_says(letters):
    source = random.Random(letters)
    endings = set()
    for _ in range(1000):
        strings = [random_string(source, letters, 1, 5) for _ in range(source.randint(0, 4))]
        pieces = [random_string(source, letters, 0, 6) for _ in range(source.randint(0, 8))]
        stop, shown, whole = StopStrings(strings), "", ""
        for piece in pieces:
            shown += stop.feed(piece)
            whole += piece
            expected, found = searched(whole, strings)
            assert stop.found == found
            if found is None:
                # No more is held back than what may become a stop string.
                ends = (i for i in range(len(whole)) if begins(whole[i:], strings))
                expected = whole[: next(ends, len(whole))]
            assert shown == expected
        shown += stop.close()
        assert (shown, stop.found) == searched(whole, strings)
        endings.add(stop.found is None)
    assert endings == {True, False}


def test_what_ends_does_not_depend_on_the_pieces_nor_on_the_order():
    text, strings = "so far. Question: what?", ["tion: what", "Question:", "Q!"]
    for order in (strings, strings[::-1]):
        for cut in range(len(text)):
            stop = StopStrings(order)
            assert fed(stop, [text[:cut], text[cut:]]) == "so far. "
            assert stop.found == "Question:"


def test_a_possible_beginning_is_held_back_and_shown_when_it_is_none():
    stop = StopStrings(["</answer>"])
    steps = [("x < 2 <", "x < 2 "), ("/ans", ""), ("er>", "</anser>"), (" </answer", " ")]
    assert [stop.feed(piece) for piece, _ in steps] == [shown for _, shown in steps]
    assert stop.found is None


def test_what_comes_after_the_end_is_not_shown():
    stop = StopStrings(["\n\n"])
    assert fed(stop, ["one\n", "\ntwo", "three\n"]) == "one"
    assert stop.found == "\n\n"
    assert stop.close() == ""


def test_what_was_held_back_is_shown_when_no_more_comes():
    stop = StopStrings(["###"])
    assert stop.feed("title ##") == "title "
    assert stop.close() == "##"
    assert stop.close() == ""


def test_with_no_strings_all_is_shown_at_once():
    stop = StopStrings([])
    assert [stop.feed("any"), stop.feed("thing")] == ["any", "thing"]
    assert stop.found is None


@pytest.mark.parametrize(
    "strings, line",
    [
        ([""], "stop string '': text of one character or more"),
        (["a", 3], "stop string 3"),
        ("END", "stop strings 'END': a list of strings, not one string"),
    ],
)
def test_impossible_stop_strings_are_refused(strings, line):
    with pytest.raises(ConfigError, match=line):
        StopStrings(strings)


STRINGS = tuple(a + b for a in "0246" for b in "13579")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"rollout.slots": 16}, marks=pytest.mark.slow),
        pytest.param(
            {"rollout.slots": 8, "reward.while_generating": True, "placement": "disaggregate"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"rollout.partial_tokens": 2, "rollout.max_staleness": 1, "placement": "disaggregate"},
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.extended
def test_a_runs_responses_end_behind_a_string_of_several_tokens(changes):
    """They are those of a run without it up to there, and what is behind counts for nothing."""
    keys = {"steps": 1, "warm_start.steps": 0, "rollout.prompts": 16, "rollout.samples": 4}
    made = {}
    for stop in ((), STRINGS):
        with trainer_of("GRPO", keys | changes | {"rollout.stop": stop}) as trainer:
            metrics = trainer.step()
            made[stop] = trainer.batch
    assert metrics["rollout/token_prob_error"] == pytest.approx(1, abs=1e-4)
    plain, cut = made[()], made[STRINGS]
    ended = 0
    for row, (text, whole) in enumerate(zip(cut["response_text"], plain["response_text"])):
        ends = [whole.find(each) + 2 for each in STRINGS if each in whole]
        assert text == whole[: min(ends)] if ends else text == whole
        kept = int(cut["response_mask"][row].sum())
        for key in ("responses", "logprobs"):
            np.testing.assert_array_equal(cut[key][row, :kept], plain[key][row, :kept])
            assert not cut[key][row, kept:].any()
        assert cut["truncated"][row] == (plain["truncated"][row] and not ends)
        ended += bool(ends)
    assert 0 < ended < len(cut["responses"])


def test_a_string_ends_a_response_from_min_tokens_on():
    tokenizer = Tokenizer.characters("ab")
    tokens = tokenizer.encode("ababab", add_special=False)
    for least, text in ((0, "ab"), (1, "abab"), (2, "abab"), (3, "ababab"), (4, "ababab")):
        stops = StopConditions(["ab"], tokenizer, min_tokens=least)
        kept, found = stops.cut(tokenizer, [], tokens)
        assert (found, len(kept)) == (text, len(text))
    assert StopConditions(["ab"], tokenizer, min_tokens=5).cut(tokenizer, [], tokens) is None


@pytest.mark.extended
def test_by_slots_a_row_is_left_behind_once_its_text_has_ended():
    """Of responses of up to 64 tokens the most end within a few; nothing behind is counted."""
    keys = {"steps": 1, "warm_start.steps": 0, "rollout.prompts": 8, "rollout.slots": 8}
    keys |= {"rollout.max_response_length": 64, "rollout.stop": STRINGS}
    with trainer_of("GRPO", keys) as trainer:
        trainer.step()
        batch, worker = trainer.batch, trainer.roles.groups["actor"].worker
        counts = worker.generator.counts
    length = batch["response_mask"].sum(axis=1)
    assert counts.tokens == length.sum()
    # Computed are whole dispatches of whole states, but not 64 tokens for each of the rows.
    assert length.max() < 64 and counts.computed < 64 * len(length) / 2


@pytest.mark.slow
def test_of_surplus_samples_those_are_kept_whose_texts_end_first():
    keys = {"steps": 1, "warm_start.steps": 0, "rollout.prompts": 8, "rollout.stop": STRINGS}
    keys |= {"rollout.slots": 16, "rollout.max_response_length": 32}
    made = []
    for changes in ({"rollout.samples": 4}, {"rollout.samples": 2, "rollout.extra_samples": 2}):
        with trainer_of("GRPO", keys | changes) as trainer:
            trainer.step()
            made.append(trainer.batch)
    every, kept = made
    lengths = every["response_mask"].sum(axis=1).reshape(8, 4)
    shortest = np.sort(np.argsort(lengths, axis=1, kind="stable")[:, :2], axis=1)
    rows = (shortest + 4 * np.arange(8)[:, None]).ravel()
    assert kept["response_text"] == [every["response_text"][row] for row in rows]
