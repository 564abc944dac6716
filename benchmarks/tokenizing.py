"""Time to encode a thousand prompts, beside the plain library's in the same run: one line of JSON.

Say where real tokenizers and texts are with HJAX_TEST_DATA, as for the tests:

    HJAX_TEST_DATA=... python benchmarks/tokenizing.py
"""

import json
import os
import pathlib
import statistics
import sys
import time

import tokenizers

from hjax.data.tokenizer import Tokenizer

FOLDERS = ("tokenizers/gpt2", "tokenizers/minimind", "weights/stories260K-hf")
PROMPTS, ROUNDS = 1000, 25


def compare(folder: pathlib.Path, texts: list[str]) -> dict[str, float]:
    """Milliseconds here and in the library, and the median over rounds of their ratio."""
    plain = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ours = Tokenizer.load(folder)
    rounds = []
    for _ in range(ROUNDS):
        here = library = 0.0
        for text in texts:  # in turns, so that a change of the machine's speed meets both
            begun = time.thread_time()
            ours.encode(text)
            between = time.thread_time()
            _ = plain.encode(text, add_special_tokens=False).ids
            here, library = here + between - begun, library + time.thread_time() - between
        rounds.append((here, library))
    return {
        "ms": round(statistics.median(here for here, _ in rounds) * 1e3, 1),
        "library_ms": round(statistics.median(library for _, library in rounds) * 1e3, 1),
        "ratio": round(statistics.median(here / library for here, library in rounds), 3),
    }


def main() -> None:
    data = pathlib.Path(os.environ.get("HJAX_TEST_DATA") or sys.exit("HJAX_TEST_DATA is not set"))
    lines = (data / "gsm8k" / "train.jsonl").read_text().splitlines()[:PROMPTS]
    texts = [json.loads(line)["question"] for line in lines]
    print(json.dumps({folder: compare(data / folder, texts) for folder in FOLDERS}))


if __name__ == "__main__":
    main()
