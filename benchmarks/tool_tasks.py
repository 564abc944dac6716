"""Conversations with tools that small models learn: runs, their data, tokenizer, tools and reward.

    python -m hjax.launch --config=benchmarks/tool_tasks.py:lookup --workdir=DIR

trains a model from scratch on demonstrations (the stage `sft`), and then by GRPO on episodes with
tools (`grpo`). The tasks:

- `calculator`: two steps of arithmetic (`(47+38)*6`) by the tool `calc`.
- `interpreter`: the sum of the digits of a number's power, by the tool `python`, an interpreter in
  the sandbox.
- `lookup`: the age of somebody's friend: the tool `friend`, then the tool `age` with what it said.
- `recovery`: a person's age by the tool `age`, whose first call fails in half of the episodes:
  `error: RuntimeError: busy`.

Nobody that is asked about in evaluation is asked about in training.

Most demonstrations make a task's mistake: a product for a sum or a power, the age of the person
asked about, giving up after an error. So the most likely answer of the first policy is
wrong, and what is right is only among those that it draws. `TASK_alone`, without tools, is what to
compare with: the model answers at once, from as many right demonstrations.

`python benchmarks/tool_tasks.py DIR [--tasks=lookup,...]` writes the data alone.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from hjax.errors import ConfigError
from hjax.launch.configs import base, small_model

SFT_STEPS, GRPO_STEPS = 400, 16
EVAL_SEED = 2
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
import random
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


def friend(of: int) -> int:
    """The friend of a person."""
    return PEOPLE[of]["friend"]


def age(of: int) -> int:
    """The age of a person."""
    return PEOPLE[of]["age"]


class BusyAge:
    """The age of a person."""

    name = "age"

    def __init__(self, seed):
        self.busy = random.Random(seed).random() < 0.5

    def __call__(self, of: int) -> int:
        if self.busy:  # once
            self.busy = False
            raise RuntimeError("busy")
        return age(of)


def reward(prompts, responses, answer, **columns):
    """1 for the answer, as it is."""
    pairs = zip(responses, answer, strict=True)
    return [float(said.strip() == str(right)) for said, right in pairs]
'''
PEOPLE = 600
# Share of demonstrations that make the mistake of their task.
MISTAKES = 0.6
Turn = dict[str, Any]
Row = tuple[str, str, list[Turn]]


@functools.cache
def people() -> list[dict[str, int]]:
    """Friend and age of each person, by number."""
    rng = random.Random(5)
    return [
        {"friend": rng.randrange(100, PEOPLE), "age": rng.randint(10, 99)} for _ in range(PEOPLE)
    ]


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


def calculator(rng: random.Random, held_out: bool) -> Row:
    """A prompt, its answer, and the turns of a demonstration."""
    a, b, c = rng.randint(10, 99), rng.randint(10, 99), rng.randint(2, 9)
    inner, outer = rng.choice("+-"), rng.choice("*+-")
    text = f"({a}{inner}{b}){outer}{c}"
    said = text
    if rng.random() < MISTAKES:
        said = text.replace(inner, "*", 1)
    return text, str(eval(text)), [call("calc", e=said), result(eval(said)), answer(eval(said))]


def interpreter(rng: random.Random, held_out: bool) -> Row:
    """As ``calculator``."""
    n, k = rng.randint(100, 999), rng.randint(2, 5)
    sign = "*" if rng.random() < MISTAKES else "**"
    code = f"sum(map(int,str({n}{sign}{k})))"
    shown = eval(code)
    right = str(sum(map(int, str(n**k))))
    return f"{n}^{k}", right, [call("python", code=code), result(shown), answer(shown)]


def asked_about(rng: random.Random, held_out: bool) -> int:
    """A person; others in evaluation than in training."""
    first, last = (PEOPLE - 100, PEOPLE) if held_out else (100, PEOPLE - 100)
    return rng.randrange(first, last)


def lookup(rng: random.Random, held_out: bool) -> Row:
    """As ``calculator``."""
    known, person = people(), asked_about(rng, held_out)
    friend = known[person]["friend"]
    turns = [call("friend", of=person), result(friend)]
    asked = friend
    if rng.random() < MISTAKES:
        asked, turns = person, []
    age = known[asked]["age"]
    return f"{person}'s friend", str(known[friend]["age"]), [
        *turns, call("age", of=asked), result(age), answer(age)
    ]  # fmt: skip


def recovery(rng: random.Random, held_out: bool) -> Row:
    """As ``calculator``."""
    person = 5 * rng.randrange(20, PEOPLE // 5) + (0 if held_out else rng.randint(1, 4))
    age = people()[person]["age"]
    turns = [call("age", of=person), result(age), answer(age)]
    if rng.random() < 0.5:
        after = [answer("?")] if rng.random() < MISTAKES else turns
        turns = [turns[0], result("error: RuntimeError: busy"), *after]
    return f"{person}'s age", str(age), turns


TASKS: dict[str, Callable[[random.Random, bool], Row]] = {
    "calculator": calculator,
    "interpreter": interpreter,
    "lookup": lookup,
    "recovery": recovery,
}
# As in environment.tools.
TOOLS_OF = {
    "calculator": ("calc",),
    "interpreter": ("python",),
    "lookup": ("friend", "age"),
    "recovery": ("BusyAge",),
}


def get_stages(name: str = "lookup") -> dict[str, ConfigDict]:
    """The stages of `--config=tool_tasks.py:TASK` or `TASK_alone`."""
    task = name.removesuffix("_alone")
    if task not in TASKS:
        known = ", ".join(TASKS)
        raise ConfigError(f"tool_tasks.py:{name}: there are {known}, and each with _alone")
    sft = base.get_config()
    sft.algorithm.name = "SFT"
    sft.data.path = "{workdir}/data/demonstrations.jsonl"
    sft.tokenizer.path = "{workdir}/data/tokenizer"
    sft.steps = SFT_STEPS
    small_model(sft)
    sft.model.hidden_size = 64
    sft.model.mlp_size = 192
    sft.model.max_length = 128
    sft.rollout.max_prompt_length = 64
    sft.rollout.max_response_length = 28
    sft.warm_start.batch = 32
    sft.actor.learning_rate = 3e-3
    sft.actor.schedule = "cosine"
    sft.actor.warmup_updates = 20
    sft.eval.every = 0

    grpo = base.get_config()
    grpo.algorithm.kl_coef = 0.0
    grpo.actor.path = "{workdir}/sft"
    grpo.data.path = "{workdir}/data/train.jsonl"
    grpo.data.eval_path = "{workdir}/data/eval.jsonl"
    grpo.reward.function = "{workdir}/data/tools.py:reward"
    grpo.rollout.max_prompt_length = 24
    grpo.rollout.max_response_length = 96
    # Each interpreter is watched by processes of its own.
    grpo.rollout.prompts = 4 if "python" in TOOLS_OF[task] else 8
    grpo.rollout.samples = 8
    grpo.actor.learning_rate = 5e-4
    grpo.eval.every = 8
    grpo.eval.prompts = 32 if "python" in TOOLS_OF[task] else 64
    # What few episodes show, a right answer after an error, takes longer.
    grpo.steps = 3 * GRPO_STEPS if task == "recovery" else GRPO_STEPS
    if task == name:
        files = [t if t == "python" else f"{{workdir}}/data/tools.py:{t}" for t in TOOLS_OF[task]]
        grpo.environment.tools = ",".join(files)
        grpo.environment.max_turns = 4
        grpo.environment.turn_tokens = 28
    else:
        grpo.rollout.max_response_length = 8
    return {"sft": sft, "grpo": grpo}


def prepare(workdir: Path, name: str = "lookup") -> None:
    """Write the data of a task to `workdir/data`."""
    if not (workdir / "data").is_dir():
        made = workdir / ".data"
        make(made, name.removesuffix("_alone"), plain=name.endswith("_alone"))
        made.rename(workdir / "data")


def rows(task: str, count: int, seed: int, plain: bool) -> Iterator[dict[str, Any]]:
    """Conversations of a task, each with its prompt and answer."""
    rng, alone = random.Random(seed), random.Random(seed)
    for _ in range(count):
        prompt, right, turns = TASKS[task](rng, seed == EVAL_SEED)
        if plain:  # as often right as those with the tool are
            wrong = alone.random() < MISTAKES
            turns = [answer(int(right) + alone.randint(1, 9) if wrong else right)]
        yield {"prompt": prompt, "answer": right, "turns": turns}


def data_digest(name: str) -> str:
    """Of a task's data, to tell whether a run would have the same."""
    task, plain = name.removesuffix("_alone"), name.endswith("_alone")
    made = [list(rows(task, 200, seed, plain)) for seed in (1, EVAL_SEED, 3)]
    return hashlib.sha256(json.dumps([made, TEMPLATE, TOOLS]).encode()).hexdigest()[:16]


def make(folder: Path, task: str, plain: bool, count: int = 2000) -> None:
    """Write a task's files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tools.py").write_text(TOOLS)
    (folder / "people.json").write_text(json.dumps(people()))
    for name, seed, many in (("train", 1, count), ("eval", EVAL_SEED, 128)):
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
        for row in demonstrations:
            row["tools"] = [
                {"type": "function", "function": {"name": {"BusyAge": "age"}.get(name, name)}}
                for name in TOOLS_OF[task]
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
    options = parser.parse_args()
    for name in options.tasks.split(","):
        prepare(options.folder / name, name)
        print(options.folder / name / "data")


if __name__ == "__main__":
    main()
