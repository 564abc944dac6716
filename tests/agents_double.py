"""Agents for tests, and a client of the standard library: agents need no package of OpenAI's."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any


def asked(url: str, key: str, headers: dict[str, str] | None = None, **body: Any) -> Any:
    """The answer to a chat completion, or the text of its stream; raises HTTPError."""
    request = urllib.request.Request(
        f"{url}/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **(headers or {})},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        text = answer.read().decode()
    return text if body.get("stream") else json.loads(text)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def said(url: str, key: str, messages: list[Any], **body: Any) -> dict[str, Any]:
    """The message that answers."""
    try:
        found = await asyncio.to_thread(asked, url, key, messages=messages, **body)
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{error.code}: {error.read().decode()}") from error
    return found["choices"][0]["message"]


async def two_questions(task: Any, url: str, key: str) -> float:
    """Asks the row's prompt, then another question; rewards even lengths of what was said."""
    messages: list[Any] = [user(task["prompt"])]
    first = await said(url, key, messages, max_tokens=6)
    messages += [first, user("more?")]
    second = await said(url, key, messages, max_tokens=6, temperature=0.3)
    return float(len(first["content"] + second["content"]) % 2)


async def forced_call(task: Any, url: str, key: str) -> float:
    """Asks with a form that an untrained policy meets only where it is enforced."""
    told = {"type": "function", "function": {"name": "add", "parameters": {}}}
    found = await said(url, key, [user(task["prompt"])], tools=[told], tool_choice="required")
    return float(bool(found.get("tool_calls"))) + len(found["content"] or "") % 2
