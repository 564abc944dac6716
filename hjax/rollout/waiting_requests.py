"""Requests that wait for slots: what the prefix cache has of them, chunks, and who enters next."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hjax.models.append_attention import BLOCK
from hjax.rollout.bucketing import PREFILL_CHUNK
from hjax.rollout.prefix_cache import CachedPrefix, PrefixCache
from hjax.rollout.requests import RequestHandle


class WaitingRequests:
    """Requests in order of arrival, also those whose prompts are prefilled in chunks.

    Args:
      prefixes: the prefix cache; None: there is none.
      parts: data-parallel parts.
      limit: most tokens of a prompt and its response.

    Attributes:
      requests: those that wait.
    """

    def __init__(self, prefixes: PrefixCache | None, parts: int, limit: int):
        self._prefixes, self._parts, self._limit = prefixes, parts, limit
        self.requests: list[RequestHandle] = []

    def discard_progress(self) -> None:
        """Forget what was computed of them by other weights."""
        for handle in self.requests:
            self.release_prefix(handle)
            handle.prefilled_tokens, handle.scores = 0, None
            handle.unchunked = handle.chunking = False

    def prefill_chunk(self, params: Any) -> None:
        """Prefill a chunk of the first long prompt, if there is one."""
        handle = next((handle for handle in self.requests if handle.chunking), None)
        if handle is None:
            return
        assert self._prefixes is not None
        if self._uncached(handle) > PREFILL_CHUNK:  # unless another request cached it meanwhile
            prompts: list[Sequence[int] | None] = [None] * self._parts
            prompts[handle.part] = handle.request.prompt
            there = self._prefixes.prefill_chunk(params, prompts, PREFILL_CHUNK, self._limit)
            handle.unchunked = not there
            handle.prefilled_tokens += 0 if handle.unchunked else PREFILL_CHUNK
        handle.chunking = self._uncached(handle) > PREFILL_CHUNK and not handle.unchunked

    def take(self, free: np.ndarray, most: int) -> list[RequestHandle]:
        """Waiting requests that may enter, in order of arrival, each with the part that it enters
        and its cached prefix there acquired.

        Of several whose prompts continue alike, one enters now and the others once that is cached.

        Args:
          free: int [parts], free rows of each.
          most: requests that may enter a part now.
        """
        entering: list[RequestHandle] = []
        continued: set[tuple] = set()
        free, quota = free.copy(), np.minimum(free, most)
        for handle in self.requests:
            if not quota.any():
                break
            if handle.chunking or handle.needs_scores:
                continue
            if not handle.prefilled_tokens:  # else its part has the chunks
                self.release_prefix(handle)
                handle.part = self._choose_part(handle, free)
            if not quota[handle.part]:
                continue
            if self._prefixes is not None:
                rest, known = self._uncached(handle), handle.cached_prefix.tokens
                handle.chunking = rest > PREFILL_CHUNK and not handle.unchunked
                ahead = handle.part, handle.cached_prefix, handle.request.prompt[known:][:BLOCK]
                later = rest > BLOCK and ahead in continued
                if handle.chunking or later:
                    continue
                continued.add(ahead)
            free[handle.part] -= 1
            quota[handle.part] -= 1
            entering.append(handle)
        self.requests = [handle for handle in self.requests if handle not in entering]
        return entering

    def release_prefix(self, handle: RequestHandle) -> None:
        """Release its cached prefix."""
        if self._prefixes is not None:
            self._prefixes.release(handle.cached_prefix, handle.part)
            handle.cached_prefix = CachedPrefix()

    def _uncached(self, handle: RequestHandle) -> int:
        """Number of uncached tokens of its prompt; the cached prefix of its part is acquired."""
        prompt = handle.request.prompt
        if self._prefixes is not None:
            self.release_prefix(handle)
            handle.cached_prefix = self._prefixes.match(prompt, handle.part)
        return len(prompt) - handle.cached_prefix.tokens

    def _choose_part(self, handle: RequestHandle, free: np.ndarray) -> int:
        """Of the parts with free rows the one that has most of the prompt, or most free rows."""
        open_parts = np.flatnonzero(free).tolist()
        if len(open_parts) == 1:
            return int(open_parts[0])
        known = [0] * len(free)
        for part in open_parts if self._prefixes is not None else ():
            assert self._prefixes is not None
            found = self._prefixes.match(handle.request.prompt, part)
            known[part] = found.tokens
            self._prefixes.release(found, part)
        return int(max(open_parts, key=lambda part: (known[part], free[part], -part)))
