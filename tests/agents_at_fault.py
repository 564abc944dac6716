"""An agent that does what its row says."""

import asyncio
import os
import time

from agents_double import said, user


async def agent(task, url, key, seed):
    what = task["prompt"]
    if what == "silent":
        return 1.0
    if what == "sleeps":
        await asyncio.sleep(2)
    message = await said(url, key, [user(what)])
    if what == "raises":
        raise ValueError("a fault of its own")
    if what == "exits":
        raise SystemExit(3)
    if what == "none":
        return None
    if what == "words":
        return "good"
    if what == "late":
        await asyncio.sleep(60)
    if what == "blocks":
        time.sleep(60)
    if what == "dies":
        os._exit(7)
    if what == "floods":
        some = [said(url, key, [user(f"{what} {i}")]) for i in range(20)]
        await asyncio.gather(*some, return_exceptions=True)
    return len(message["content"]) + seed


def plain(task, url, key):
    return 1.0


async def two(task, url):
    return 1.0
