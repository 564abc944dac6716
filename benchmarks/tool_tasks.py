"""Conversations with tools that small models learn: data, a tokenizer, tools and a reward.

Three tasks, each with files in `DIR/TASK`:

- `calculator`: two steps of arithmetic (`(47+38)*6`) by the tool `calc`.
- `interpreter`: the sum of the digits of a number's square, and the like, by `python`.
- `lookup`: the age of a person's friend: the tool `friend`, then the tool `age` with what it said.

    python benchmarks/tool_tasks.py DIR [--tasks=calculator,...] [--count=2000]

`train.jsonl` and `eval.jsonl` have prompts and answers, `demonstrations.jsonl` conversations for a
warm start, of which a share makes mistakes, `tokenizer/` a byte-level BPE with a chat template that
writes calls as Qwen's do, `tools.py` the tools and the reward. With `--plain` the demonstrations
answer at once, for runs without tools.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t.function.name }} {% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>"
    "{{ m.content }}</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = '''"""Tools of small tasks, and their reward."""

import json
import pathlib
import re

PEOPLE = json.loads((pathlib.Path(__file__).parent / "people.json").read_text())
_STEPS = re.compile(r"\\(?(\\d+)([-+*])(\\d+)\\)?(?:([-+*])(\\d+))?")


def calc(e: str) -> int:
    """Computes one or two steps with + - *, such as (12+3)*4."""
    found = _STEPS.fullmatch(e)
    if found is None:
        raise ValueError("not an expression")
    value = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    first = value[found[2]](int(found[1]), int(found[3]))
    return first if found[4] is None else value[found[4]](first, int(found[5]))


def friend(name: str) -> str:
    """The friend of a person."""
    return PEOPLE[name]["friend"]


def age(name: str) -> int:
    """The age of a person."""
    return PEOPLE[name]["age"]


def reward(prompts, responses, answer, **columns):
    """1 for the answer, as it is."""
    pairs = zip(responses, answer, strict=True)
    return [float(said.strip() == str(right)) for said, right in pairs]
'''
NAMES = "Ann Bob Cid Dan Eva Fay Gus Hal Ida Jon Kim Lea Max Ned Oda Pia Quy Rex Sam Tom".split()
Turn = dict[str, Any]
# Share of demonstrations whose first call is wrong.
MISTAKES = 0.4


def people() -> dict[str, dict[str, Any]]:
    """Friends and ages."""
    rng = random.Random(5)
    return {n: {"friend": rng.choice(NAMES), "age": rng.randint(10, 99)} for n in NAMES}


def call(tool: str, **arguments: Any) -> Turn:
    """A turn that calls a tool."""
    function = {"name": tool, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": function}]}  # fmt: skip


def result(value: Any) -> Turn:
    """What the tool says."""
    return {"role": "tool", "content": str(value)}


def answer(value: Any) -> Turn:
    """The last turn."""
    return {"role": "assistant", "content": str(value)}


def calculator(rng: random.Random) -> tuple[str, str, list[Turn]]:
    """A prompt, its answer, and the turns of a good conversation."""
    a, b, c = rng.randint(10, 99), rng.randint(10, 99), rng.randint(2, 9)
    inner, outer = rng.choice("+-"), rng.choice("*+-")
    text = f"({a}{inner}{b}){outer}{c}"
    right = str(eval(text))
    said = text
    if rng.random() < MISTAKES:
        said = text.replace(str(a), str(rng.randint(10, 99)), 1)
    return text, right, [call("calc", e=said), result(eval(said)), answer(eval(said))]


def interpreter(rng: random.Random) -> tuple[str, str, list[Turn]]:
    """As ``calculator``."""
    n, k = rng.randint(100, 999), rng.randint(2, 5)
    right = str(sum(map(int, str(n**k))))
    power = rng.randint(2, 5) if rng.random() < MISTAKES else k
    shown = sum(map(int, str(n**power)))
    code = f"sum(map(int,str({n}**{power})))"
    return f"{n}^{k}", right, [call("python", code=code), result(shown), answer(shown)]


def lookup(rng: random.Random) -> tuple[str, str, list[Turn]]:
    """As ``calculator``."""
    known, name = people(), rng.choice(NAMES)
    friend = known[name]["friend"]
    asked = rng.choice(NAMES) if rng.random() < MISTAKES else friend
    return f"{name}'s friend", str(known[friend]["age"]), [
        call("friend", name=name), result(friend),
        call("age", name=asked), result(known[asked]["age"]), answer(known[asked]["age"]),
    ]  # fmt: skip


TASKS: dict[str, Callable[[random.Random], tuple[str, str, list[Turn]]]] = {
    "calculator": calculator,
    "interpreter": interpreter,
    "lookup": lookup,
}


def rows(task: str, count: int, seed: int, plain: bool) -> Iterator[dict[str, Any]]:
    """Conversations of a task, each with its prompt and answer."""
    rng = random.Random(seed)
    for _ in range(count):
        prompt, right, turns = TASKS[task](rng)
        if plain:  # as often right as those with the tool are
            wrong = rng.random() < MISTAKES
            turns = [answer(int(right) + rng.randint(1, 9) if wrong else right)]
        yield {"prompt": prompt, "answer": right, "turns": turns}


def make(folder: Path, task: str, count: int, plain: bool) -> None:
    """Write a task's files."""
    folder.mkdir(parents=True)
    (folder / "tools.py").write_text(TOOLS)
    (folder / "people.json").write_text(json.dumps(people()))
    for name, seed, many in (("train", 1, count), ("eval", 2, 128)):
        lines = [
            json.dumps({"prompt": row["prompt"], "answer": row["answer"]})
            for row in rows(task, many, seed, plain)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(dict.fromkeys(lines)) + "\n")
    demonstrations = [
        {"messages": [{"role": "user", "content": row["prompt"]}, *row["turns"]]}
        for row in rows(task, count, 3, plain)
    ]
    if not plain:
        names = {"calculator": ("calc",), "interpreter": ("python",), "lookup": ("friend", "age")}
        for row in demonstrations:
            row["tools"] = [
                {"type": "function", "function": {"name": name}} for name in names[task]
            ]
    (folder / "demonstrations.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in demonstrations)
    )
    make_tokenizer(folder / "tokenizer", demonstrations)


def make_tokenizer(folder: Path, demonstrations: list[dict[str, Any]]) -> None:
    """Train a byte-level BPE on the conversations, and write it with the template."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    folder.mkdir()
    library = tokenizers.Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    library.pre_tokenizer = pre_tokenizers.Sequence([
        digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    library.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + 150,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    texts = [
        f'<tool_call>{{"name": "{c["function"]["name"]}", "arguments": '
        f"{json.dumps(c['function']['arguments'])}}}</tool_call>"
        for row in demonstrations
        for turn in row["messages"]
        for c in turn.get("tool_calls", ())
    ]
    fixed = ["user\n", "assistant\n", "system\n", "<tool_response>", "</tool_response>"]
    said = [turn["content"] for row in demonstrations for turn in row["messages"]]
    library.train_from_iterator([*texts, *said, *(fixed * len(texts))], trainer)
    library.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    for task in options.tasks.split(","):
        make(options.folder / task, task, options.count, options.plain)
        print(options.folder / task)


if __name__ == "__main__":
    main()
