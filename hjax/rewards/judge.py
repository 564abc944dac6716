"""LLM as a judge: a language model behind OpenAI's API scores responses.

    from hjax.rewards.judge import Judge

    reward = Judge(
        "https://api.example.com/v1", "some-model",
        "Question: {prompt}\\nAnswer: {response}\\nHow helpful is the answer? Think, then end with "
        "a line `Score: N`, N from 1 (useless) to 10 (perfect).",
        cache="judge.sqlite", budget=20_000,
    )

in a file of yours, `--config.reward.function=mine.py:reward`. The API key is read from the
environment. hjax's server has that API (`python -m hjax.launch.serve --protocol=openai`).
Answers and the number of requests are cached in a file.
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
from hjax.files import StrPath

# HTTP statuses that are retried: busy, over the rate limit, or down.
_RETRY_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_MAX_WAIT_SECONDS = 60.0


class _Failed:
    """A request without an answer."""

    def __init__(self, reason: str):
        self.reason = reason


class Judge:
    """Asks a model behind OpenAI's chat API about each response; an async reward function.

    A response is unscored (None) if the answer contains no score or all tries failed. A call raises
    if all its requests failed. Answers are cached and never requested again, and duplicate requests
    in a batch are sent once.

    Args:
      url: of the API, up to `/v1`.
      model: the model's name there.
      question: prompt template, with `{prompt}`, `{response}` and dataset columns in braces (double
        other braces).
      scores: worst and best score, mapped to rewards 0 and 1; scores outside are clipped.
      pattern: regular expression; group 1 of its last match in the answer is the score.
      system: system message; empty: none.
      cache: path of the file that caches answers and the number of requests; None: in memory.
      budget: maximum number of requests, including retries, of all that share the cache.
      retries: further tries of a request, with exponential backoff (or as the server asks).
      first_wait_seconds: wait before the first retry.
      timeout_seconds: for one try. `reward.timeout_seconds` is for the whole batch: set it too.
      at_once: maximum number of concurrent requests.
      key_env: environment variable with the API key; if it is not set, none is sent.
      options: further fields of the request, such as `max_tokens`.

    Raises:
      ConfigError: an invalid value, or httpx is not installed.
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
        cache: StrPath | None = None,
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
        minimum = {"budget": 1, "retries": 0, "at_once": 1, "timeout_seconds": 0}
        limits = {"budget": budget, "retries": retries, "at_once": at_once}
        for name, value in (limits | {"timeout_seconds": timeout_seconds}).items():
            if value < minimum[name] or (name == "timeout_seconds" and not value):
                raise ConfigError(f"Judge({name}={value}): must be above {minimum[name] or 0}")
        self._pattern = re.compile(pattern)
        if self._pattern.groups < 1:
            raise ConfigError(f"Judge(pattern={pattern!r}): it needs a group, the score")
        self._url, self._model, self._question = url.rstrip("/"), model, question
        self._scores, self._system, self._options = scores, system, dict(options or {})
        self._budget, self._retries, self._at_once = budget, retries, at_once
        self._wait, self._timeout, self._key_env = first_wait_seconds, timeout_seconds, key_env
        self.cache = JudgeCache(None if cache is None else Path(cache))

    async def __call__(
        self, prompts: Sequence[Any], responses: Sequence[Any], **columns: Sequence[Any]
    ) -> list[float | None]:
        """A reward per response, 0 to 1; None where there is no score.

        Raises:
          RunError: the endpoint rejects the requests, the budget is exhausted, or no request of the
            batch got an answer.
        """
        rows = [{key: values[i] for key, values in columns.items()} for i in range(len(responses))]
        cases = list(zip(prompts, responses, rows, strict=True))
        requests = [self._request(prompt, response, row) for prompt, response, row in cases]
        names = [self.request_key(prompt, response, row) for prompt, response, row in cases]
        semaphore = asyncio.Semaphore(self._at_once)
        key = os.environ.get(self._key_env, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with self._http.AsyncClient(timeout=self._timeout, headers=headers) as client:
            unique = dict(zip(names, requests, strict=True))
            errors: list[Exception] = []
            calls = (
                self._answer(client, semaphore, errors, name=name, request=request)
                for name, request in unique.items()
            )
            answers = dict(zip(unique, await asyncio.gather(*calls), strict=True))
        if errors:
            raise errors[0]
        failed = [text for text in answers.values() if isinstance(text, _Failed)]
        if failed and len(failed) == len(answers):
            raise RunError(f"the judge at {self._url} gave no answer: {failed[0].reason}")
        return [self._score(answers[name]) for name in names]

    def request_key(self, prompt: Any, response: Any, row: Mapping[str, Any]) -> str:
        """The key of a response's answer in ``cache``.

        Args:
          prompt, response: as the reward function receives them.
          row: this response's entry of each column.
        """
        return JudgeCache.request_key({"url": self._url, **self._request(prompt, response, row)})

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
        semaphore: asyncio.Semaphore,
        errors: list[Exception],
        name: str,
        request: dict[str, Any],
    ) -> str | _Failed:
        """The answer's text, from the cache or the API. Fatal errors are added to ``errors``."""
        if (cached := self.cache.get(name)) is not None:
            return cached
        async with semaphore:
            if errors:  # nothing more is sent; answers to requests in flight are cached
                return _Failed("not sent")
            try:
                found = await self._ask(client, request)
            except RunError as error:
                errors.append(error)
                return _Failed(str(error))
        if isinstance(found, str):
            self.cache.put(name, found)
        return found

    async def _ask(self, client: Any, request: dict[str, Any]) -> str | _Failed:
        reason, wait = "", self._wait
        for attempt in range(self._retries + 1):
            if attempt:
                # Jitter, so that requests that failed together are not retried together.
                await asyncio.sleep(min(wait, _MAX_WAIT_SECONDS) * random.uniform(0.75, 1.25))
                wait *= 2
            if not self.cache.count_request(self._budget):
                raise RunError(
                    f"the judge has been asked {self.cache.calls} times, its budget: set a "
                    "higher Judge(budget=...) to go on"
                )
            try:
                answer = await client.post(f"{self._url}/chat/completions", json=request)
            except self._http.TransportError as error:
                reason = f"{type(error).__name__}: {error}".rstrip(": ")
                continue
            if answer.status_code in _RETRY_STATUSES:
                reason = f"status {answer.status_code}: {_first_line(answer.text)}"
                wait = max(wait, _retry_after_seconds(answer.headers.get("retry-after")))
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
        return _Failed(f"{self._retries + 1} tries, the last: {reason}")

    def _score(self, text: str | _Failed) -> float | None:
        found = [] if isinstance(text, _Failed) else list(self._pattern.finditer(text))
        if not found:
            return None
        worst, best = self._scores
        return min(max((float(found[-1][1]) - worst) / (best - worst), 0.0), 1.0)


def _retry_after_seconds(text: str | None) -> float:
    """Seconds of a Retry-After header; 0 where it is a date or absent."""
    try:
        return max(float(text or 0), 0.0)
    except ValueError:
        return 0.0


def _first_line(text: str) -> str:
    return " ".join(text.split())[:200] or "(empty)"


class JudgeCache:
    """Cache of answers by request, and a count of requests; processes may share a file.

    Args:
      path: of an SQLite file, created if missing; None: in memory, for the process's lifetime.

    Raises:
      ConfigError: the file cannot be opened or is not an SQLite file.
    """

    def __init__(self, path: Path | None):
        self._path = path
        self._lock = threading.Lock()
        # One connection in memory; a file is opened for each use.
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
    def request_key(request: Mapping[str, Any]) -> str:
        """The cache key of a request, a hash of its content."""
        return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()

    def get(self, request: str) -> str | None:
        """The cached answer to a request; None if there is none."""
        with self._open() as database:
            row = database.execute("SELECT text FROM said WHERE request = ?", [request]).fetchone()
        return None if row is None else row[0]

    def put(self, request: str, text: str) -> None:
        """Cache an answer."""
        with self._open() as database:
            database.execute("INSERT OR REPLACE INTO said VALUES (?, ?)", [request, text])

    def count_request(self, budget: int) -> bool:
        """Count a request that is about to be sent; False if the budget is exhausted."""
        with self._open() as database:
            done = database.execute("UPDATE spent SET calls = calls + 1 WHERE calls < ?", [budget])
            return done.rowcount == 1

    @property
    def calls(self) -> int:
        """Number of requests sent."""
        with self._open() as database:
            return int(database.execute("SELECT calls FROM spent").fetchone()[0])
