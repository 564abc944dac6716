"""A judge: a language model behind OpenAI's API says how good a response is.

    from hjax.rewards.judge import Judge

    reward = Judge(
        "https://api.example.com/v1", "some-model",
        "Question: {prompt}\\nAnswer: {response}\\nHow helpful is the answer? Think, then end with "
        "a line `Score: N`, N from 1 (useless) to 10 (perfect).",
        cache="judge.sqlite", budget=20_000,
    )

in a file of yours, `--config.reward.function=mine.py:reward`. The key is read from the environment.
hjax's own server is such an endpoint (`python -m hjax.launch.serve --protocol=openai`).
What a judge has said is kept in a file, and how often it was asked.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import random
import re
import sqlite3
import string
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hjax.errors import ConfigError, RunError

# Statuses after which another try may do: busy, over its rate, or down.
_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_LONGEST_WAIT = 60.0


class _Failed:
    """A request that got no answer."""

    def __init__(self, why: str):
        self.why = why


class Judge:
    """Asks a model behind OpenAI's chat API about each response; an async reward function.

    A response is unscored (None) where the answer has no score or all tries failed; where that is
    so of all of a call's, the call raises. What was answered is kept and never asked again, and a
    request that stands in a batch several times is sent once.

    Args:
      url: of the API, up to `/v1`.
      model: the model's name there.
      question: what is asked, with `{prompt}`, `{response}` and the data's columns in braces
        (braces of its own doubled).
      scores: worst and best score; the reward is 0 at the worst and 1 at the best, scores beyond
        count as these.
      pattern: regular expression whose last match in the answer has the score as group 1.
      system: a message ahead of the question; empty: none.
      cache: path of the file that keeps answers and the count of requests; None: both are kept in
        memory.
      budget: requests that may be sent at all, retries too, by all that share the cache.
      retries: further tries of a request, after waits that double (or as long as the server asks).
      first_wait_seconds: before the first of them.
      timeout_seconds: of a try. `reward.timeout_seconds` is for the whole batch: set it too.
      at_once: requests on their way at a time.
      key_env: environment variable with the key; without it none is sent.
      options: further fields of the request, such as `max_tokens`.

    Raises:
      ConfigError: a value that cannot be, or httpx is not installed.
    """

    def __init__(
        self,
        url: str,
        model: str,
        question: str,
        *,
        scores: tuple[float, float] = (1, 10),
        pattern: str = r"[Ss]core:?\**\s*(-?\d+(?:\.\d+)?)",
        system: str = "",
        cache: str | os.PathLike[str] | None = None,
        budget: int = 10_000,
        retries: int = 4,
        first_wait_seconds: float = 1.0,
        timeout_seconds: float = 60.0,
        at_once: int = 16,
        key_env: str = "OPENAI_API_KEY",
        options: Mapping[str, Any] | None = None,
    ):
        try:
            import httpx
        except ImportError:
            raise ConfigError(
                "Judge needs httpx, which is not installed: pip install 'hjax[rewards]'"
            ) from None
        self._http = httpx
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"Judge(url={url!r}): must begin with http:// or https://")
        fields = {name for _, name, _, _ in string.Formatter().parse(question) if name is not None}
        if "response" not in fields:
            raise ConfigError(f"Judge(question={question!r}): it must have {{response}} in it")
        if not scores[0] < scores[1]:
            raise ConfigError(f"Judge(scores={scores}): the worst must be below the best")
        least = {"budget": 1, "retries": 0, "at_once": 1, "timeout_seconds": 0}
        given = {"budget": budget, "retries": retries, "at_once": at_once}
        for name, value in (given | {"timeout_seconds": timeout_seconds}).items():
            if value < least[name] or (name == "timeout_seconds" and not value):
                raise ConfigError(f"Judge({name}={value}): must be above {least[name] or 0}")
        self._pattern = re.compile(pattern)
        if self._pattern.groups < 1:
            raise ConfigError(f"Judge(pattern={pattern!r}): it needs a group, the score")
        self._url, self._model, self._question = url.rstrip("/"), model, question
        self._scores, self._system, self._options = scores, system, dict(options or {})
        self._budget, self._retries, self._at_once = budget, retries, at_once
        self._wait, self._timeout, self._key_env = first_wait_seconds, timeout_seconds, key_env
        self.record = JudgeCache(None if cache is None else Path(cache))

    async def __call__(
        self, prompts: Sequence[Any], responses: Sequence[Any], **columns: Sequence[Any]
    ) -> list[float | None]:
        """A reward per response, 0 to 1; None where there is no verdict.

        Raises:
          RunError: the endpoint refuses requests as they are, the budget is used up, or none of
            the batch's requests got an answer.
        """
        rows = [{key: values[i] for key, values in columns.items()} for i in range(len(responses))]
        asked_for = list(zip(prompts, responses, rows, strict=True))
        requests = [self._request(*each) for each in asked_for]
        names = [self.name_of(*each) for each in asked_for]
        waiting = asyncio.Semaphore(self._at_once)
        key = os.environ.get(self._key_env, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with self._http.AsyncClient(timeout=self._timeout, headers=headers) as client:
            once = dict(zip(names, requests, strict=True))
            trouble: list[Exception] = []
            asked = (self._answer(client, waiting, trouble, *each) for each in once.items())
            said = dict(zip(once, await asyncio.gather(*asked), strict=True))
        if trouble:
            raise trouble[0]
        failed = [text for text in said.values() if isinstance(text, _Failed)]
        if failed and len(failed) == len(said):
            raise RunError(f"the judge at {self._url} gave no answer: {failed[0].why}")
        return [self._score(said[name]) for name in names]

    def name_of(self, prompt: Any, response: Any, row: Mapping[str, Any]) -> str:
        """Under what name the answer about a response is kept in ``record``.

        Args:
          prompt, response: as the function gets them.
          row: the columns' entries of this response.
        """
        return JudgeCache.name_of({"url": self._url, **self._request(prompt, response, row)})

    def _request(self, prompt: Any, response: Any, row: Mapping[str, Any]) -> dict[str, Any]:
        try:
            question = self._question.format(**{**row, "prompt": prompt, "response": response})
        except (KeyError, IndexError) as error:
            have = ", ".join(("prompt", "response", *row))
            raise ConfigError(f"Judge's question asks for {error}; there are {have}") from error
        system = [{"role": "system", "content": self._system}] if self._system else []
        messages = [*system, {"role": "user", "content": question}]
        return {"temperature": 0, **self._options, "model": self._model, "messages": messages}

    async def _answer(
        self,
        client: Any,
        waiting: asyncio.Semaphore,
        trouble: list[Exception],
        name: str,
        request: dict[str, Any],
    ) -> str | _Failed:
        """The answer's text: kept, or asked for. What goes wrong for all is added to trouble."""
        if (kept := self.record.said(name)) is not None:
            return kept
        async with waiting:
            if trouble:  # nothing more is sent; what is on its way is kept
                return _Failed("not sent")
            try:
                found = await self._ask(client, request)
            except RunError as error:
                trouble.append(error)
                return _Failed(str(error))
        if isinstance(found, str):
            self.record.keep(name, found)
        return found

    async def _ask(self, client: Any, request: dict[str, Any]) -> str | _Failed:
        why, wait = "", self._wait
        for attempt in range(self._retries + 1):
            if attempt:
                # Not all that failed together come again together.
                await asyncio.sleep(min(wait, _LONGEST_WAIT) * random.uniform(0.75, 1.25))
                wait *= 2
            if not self.record.take(self._budget):
                raise RunError(
                    f"the judge has been asked {self.record.calls} times, its budget: give "
                    "Judge(budget=...) a higher one and go on"
                )
            try:
                answer = await client.post(f"{self._url}/chat/completions", json=request)
            except self._http.TransportError as error:
                why = f"{type(error).__name__}: {error}".rstrip(": ")
                continue
            if answer.status_code in _AGAIN:
                why = f"status {answer.status_code}: {_first_line(answer.text)}"
                wait = max(wait, _asked_to_wait(answer.headers.get("retry-after")))
                continue
            if answer.status_code != 200:
                raise RunError(
                    f"the judge at {self._url} refuses requests with status "
                    f"{answer.status_code}: {_first_line(answer.text)}"
                )
            try:
                return answer.json()["choices"][0]["message"]["content"] or ""
            except (ValueError, LookupError, TypeError):
                raise RunError(
                    f"the judge at {self._url} gives no chat completions: "
                    f"{_first_line(answer.text)}"
                ) from None
        return _Failed(f"{self._retries + 1} tries, the last: {why}")

    def _score(self, text: str | _Failed) -> float | None:
        found = [] if isinstance(text, _Failed) else list(self._pattern.finditer(text))
        if not found:
            return None
        worst, best = self._scores
        return min(max((float(found[-1][1]) - worst) / (best - worst), 0.0), 1.0)


def _asked_to_wait(text: str | None) -> float:
    """Seconds of a Retry-After header; 0 where it is a date or absent."""
    try:
        return max(float(text or 0), 0.0)
    except ValueError:
        return 0.0


def _first_line(text: str) -> str:
    return " ".join(text.split())[:200] or "(empty)"


class JudgeCache:
    """Answers by request, and a count of requests; several processes may share one file.

    Args:
      path: of an SQLite file, which is made; None: in memory, for as long as the process lives.

    Raises:
      ConfigError: the file cannot be opened or is no such file.
    """

    def __init__(self, path: Path | None):
        self._path = path
        self._lock = threading.Lock()
        # In memory there is one connection; of a file each use has its own.
        self._kept = sqlite3.connect(":memory:", check_same_thread=False) if path is None else None
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            with self._open() as database:
                database.execute("CREATE TABLE IF NOT EXISTS said (request TEXT PRIMARY KEY, text)")
                database.execute("CREATE TABLE IF NOT EXISTS spent (name TEXT PRIMARY KEY, calls)")
                database.execute("INSERT OR IGNORE INTO spent VALUES ('all', 0)")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"Judge(cache={str(path)!r}): {error}") from error

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        if self._kept is not None:
            with self._lock, self._kept:
                yield self._kept
            return
        assert self._path is not None
        with contextlib.closing(sqlite3.connect(self._path, timeout=60)) as database, database:
            yield database

    @staticmethod
    def name_of(request: Mapping[str, Any]) -> str:
        """What a request is called here: the same for the same content."""
        return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()

    def said(self, request: str) -> str | None:
        """The answer to a request, None where there is none yet."""
        with self._open() as database:
            row = database.execute("SELECT text FROM said WHERE request = ?", [request]).fetchone()
        return None if row is None else row[0]

    def keep(self, request: str, text: str) -> None:
        """Keep an answer."""
        with self._open() as database:
            database.execute("INSERT OR REPLACE INTO said VALUES (?, ?)", [request, text])

    def take(self, budget: int) -> bool:
        """Count a request that is about to be sent; False if there have been as many as allowed."""
        with self._open() as database:
            done = database.execute("UPDATE spent SET calls = calls + 1 WHERE calls < ?", [budget])
            return done.rowcount == 1

    @property
    def calls(self) -> int:
        """Requests that were sent."""
        with self._open() as database:
            return int(database.execute("SELECT calls FROM spent").fetchone()[0])
