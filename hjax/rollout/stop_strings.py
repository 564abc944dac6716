"""Stop strings: where streamed text ends, and how much of it may be shown."""

from collections.abc import Sequence

from hjax.errors import ConfigError


class StopStrings:
    """Ends one response's text before the first stop string to be completed.

    If one character completes several, the longest counts. So where a text ends depends neither on
    the pieces in which it arrives nor on the order of the strings. Text that may be the beginning
    of a stop string is held back.

      >>> stop = StopStrings(["END"])
      >>> stop.feed("the E"), stop.feed("N"), stop.feed("d. EN"), stop.feed("D of it")
      ('the ', '', 'ENd. ', '')
      >>> stop.found
      'END'

    Args:
      strings: none of them empty; with none the text never ends.

    Attributes:
      found: the stop string that ended the text; None: none so far.

    Raises:
      ConfigError: an empty string, or what is not a string.
    """

    def __init__(self, strings: Sequence[str]):
        if isinstance(strings, str):
            raise ConfigError(f"stop strings {strings!r}: a list of strings, not one string")
        for each in strings:
            if not isinstance(each, str) or not each:
                raise ConfigError(f"stop string {each!r}: text of one character or more")
        self._strings = tuple(strings)
        self._held = ""
        self.found: str | None = None

    def feed(self, piece: str) -> str:
        """The text that may be shown after ``piece``; '' once the text has ended."""
        if self.found is not None:
            return ""
        text = self._held + piece
        ends = [(at + len(s), at, s) for s in self._strings if (at := text.find(s)) >= 0]
        if ends:
            _, at, self.found = min(ends)
            self._held = ""
            return text[:at]
        shown = len(text) - self._partial_match(text)
        self._held = text[shown:]
        return text[:shown]

    def close(self) -> str:
        """The text that is still held back, when no more arrives."""
        held, self._held = self._held, ""
        return held

    def _partial_match(self, text: str) -> int:
        """How many characters at the end of ``text`` may be the beginning of a stop string."""
        longest = max(map(len, self._strings), default=1) - 1
        return next(
            (
                count
                for count in range(min(longest, len(text)), 0, -1)
                if any(each.startswith(text[-count:]) for each in self._strings)
            ),
            0,
        )
