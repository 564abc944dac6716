"""What recipes of the Tinker cookbook need and cannot load here: a model that knows a little of
their tasks, and local folders under the names of their data sets."""

import contextlib
import gzip
import json
import multiprocessing
import os
import re
import runpy
import shutil
import subprocess
import sys

import numpy as np

# A model's name that the cookbook knows, whose renderer is role_colon. A folder of that name in the
# working directory is what it reads; so it does with the names of data sets.
KNOWN = "Qwen/Qwen3-8B-Base"
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
STRAWBERRY = (
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r "
    "9) r 10) y. We have r's at positions 3, 8, and 9. \\boxed{3}"
)

# What a model is warmed up on, in turn.
TASKS = ("summed", "boxed", "summed", "guessed")


def message(role, content):
    return {"role": role, "content": content}


def demonstrations(tokenizer_path, count, *, tasks=TASKS, mistakes=0.0, seed=0):
    """Rows of prompts, as the recipes render them, and answers, of the ``tasks`` in turn: sums up
    to 100 + 100, a share of which (``mistakes``) is one too large, sums of digits in boxes, and
    guesses of a number."""
    from tinker_cookbook.recipes.multiplayer_rl.guess_number.env import SYSTEM_PROMPT
    from tinker_cookbook.renderers import get_renderer
    from transformers import AutoTokenizer

    renderer = get_renderer("role_colon", AutoTokenizer.from_pretrained(tokenizer_path))
    draw = np.random.default_rng(seed)

    def summed():
        x, y = draw.integers(0, 101, 2)
        shot = [message("user", "What is 4 + 5?"), message("assistant", "9")]
        said = x + y + (draw.random() < mistakes)
        return [*shot, message("user", f"What is {x} + {y}?")], str(said)

    def boxed():
        x, y = draw.integers(0, 10, 2)
        shot = [
            message("user", "How many r's are in strawberry?" + SUFFIX),
            message("assistant", STRAWBERRY),
        ]
        return [*shot, message("user", f"What is {x} + {y}?{SUFFIX}")], f"\\boxed{{{x + y}}}"

    def guessed():
        low, high, target = 0, 1024, draw.integers(0, 1025)
        turns = [message("system", SYSTEM_PROMPT)]
        for _ in range(draw.integers(0, 3)):
            guess = (low + high) // 2
            said = "Too low" if guess < target else "Too high"
            low, high = (guess + 1, high) if guess < target else (low, guess - 1)
            turns += [message("player", f"Guess: {guess}"), message("user", said)]
        return turns, f"Guess: {(low + high) // 2}"

    makers = {"summed": summed, "boxed": boxed, "guessed": guessed}
    for number in range(count):
        turns, answer = makers[tasks[number % len(tasks)]]()
        prompt = renderer.build_generation_prompt(turns).to_ints()
        yield {"prompt_tokens": prompt, "response": f" {answer}\n\nUser:"}


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@contextlib.contextmanager
def served(model, store):
    """URL of a training service, which takes every name for the model."""
    process = subprocess.Popen(
        [
            sys.executable, "-m", "hjax.launch.serve", "--protocol=tinker", f"--model={model}",
            f"--store={store}", "--name=any", "--port=0",
        ],
        stdout=subprocess.PIPE, text=True, env=os.environ,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.callback(process.stdout.close)
        stack.callback(process.wait)
        stack.callback(process.kill)
        yield process.stdout.readline().rstrip("\n").rpartition(" on ")[2]


# A process that has imported what takes long, from which each program is forked.
FORKS = multiprocessing.get_context("forkserver")
OFFLINE = {
    "TINKER_API_KEY": "tml-test", "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
}  # fmt: skip


def run_program(url, folder, program, *arguments, before=""):
    """Run a Python program against a server, offline; returns what it printed.

    Args:
      url: of the server.
      folder: working directory.
      program: a file's path, or a module's name.
      *arguments: of its command line.
      before: source to execute first.
    """
    os.environ.update(OFFLINE)
    FORKS.set_forkserver_preload(["tinker_cookbook.rl.train", "datasets"])
    output = folder / "output.txt"
    process = FORKS.Process(
        target=_run, args=(url, str(folder), str(output), [str(program), *arguments], before)
    )
    process.start()
    process.join(1700)
    process.kill()
    process.join()
    said = output.read_text()
    assert process.exitcode == 0, said[-3000:]
    return said


def _run(url, folder, output, command, before):
    os.environ.update(OFFLINE | {"TINKER_BASE_URL": url})
    os.chdir(folder)
    sys.path.insert(0, folder)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(file, number)
    sys.argv = command
    exec(before, {})
    run = runpy.run_path if command[0].endswith(".py") else runpy.run_module
    run(command[0], run_name="__main__")


def run_recipe(url, folder, name, **options):
    """Run a recipe of the cookbook; returns the rows of its metrics.

    Args:
      url, folder: as of ``run_program``; the recipe's log is in ``folder/log``.
      name: of its module, below ``tinker_cookbook.recipes``.
      **options: of its command line.
    """
    options = {"log_path": folder / "log"} | options
    flags = [f"{key}={value}" for key, value in options.items()]
    run_program(url, folder, f"tinker_cookbook.recipes.{name}", *flags)
    lines = (folder / "log" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def with_positions(stories, folder, count=8192):
    """A copy of stories260K for longer texts; its positions are relative, but it learned 512."""
    folder.mkdir()
    for file in stories.iterdir():
        shutil.copyfile(file, folder / file.name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": count}))
    return folder


def warm_model(stories, folder, *, steps=120, tasks=TASKS, mistakes=0.0):
    """A Hugging Face directory: stories260K after supervised training by hjax (`sft.py`).

    Args:
      stories: the directory of stories260K.
      folder: to work in.
      steps: updates, of 16 demonstrations each.
      tasks, mistakes: of the demonstrations.
    """
    start, rows, run, output = (folder / name for name in ("start", "rows.jsonl", "run", "model"))
    with_positions(stories, start)
    write_lines(rows, demonstrations(start, 17 * steps, tasks=tasks, mistakes=mistakes))
    launch = [sys.executable, "-m", "hjax.launch"]
    subprocess.run(
        [
            *launch, "--config=sft.py", f"--config.actor.path={start}", f"--workdir={run}",
            f"--config.data.path={rows}", f"--config.steps={steps}",
            "--config.warm_start.batch=16", "--config.rollout.max_response_length=24",
            "--config.actor.learning_rate=2e-3", "--config.eval.every=0",
            f"--config.checkpoint.every={steps}", "--config.display.enabled=False",
        ],
        check=True,
    )  # fmt: skip
    export = [sys.executable, "-m", "hjax.launch.export"]
    subprocess.run([*export, f"--model={run}", f"--output={output}"], check=True)
    return output


def write_data_sets(folder, dialogues, rows=512):
    """Folders with the names of data sets: sums as gsm8k has problems, and dialogues.

    Args:
      folder: working directory of the recipes.
      dialogues: a file of hh-rlhf.
      rows: of each at most.
    """
    sums = [(x, y) for x in range(10) for y in range(10)]
    order = np.random.default_rng(1).permutation(len(sums))
    problems = [
        {"question": f"What is {x} + {y}?", "answer": f"{x} + {y} = {x + y}\n#### {x + y}"}
        for x, y in (sums[i] for i in order)
    ] * 5
    gsm8k = folder / "openai" / "gsm8k"
    for split in ("train", "test"):
        write_lines(gsm8k / f"{split}.jsonl", problems)
    (gsm8k / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n"
        "    path: train.jsonl\n  - split: test\n    path: test.jsonl\n---\n"
    )
    with gzip.open(dialogues, "rt") as file:
        pairs = [json.loads(line) for line, _ in zip(file, range(4 * rows))]
    short = [pair for pair in pairs if max(map(len, pair.values())) < 300][:rows]
    for split, part in (("train", short[32:]), ("test", short[:32])):
        write_lines(folder / "Anthropic" / "hh-rlhf" / f"{split}.jsonl", part)
        chats = [{"messages": messages_of(pair["chosen"])} for pair in part]
        write_lines(folder / "HuggingFaceH4" / "no_robots" / f"{split}.jsonl", chats)


def messages_of(text):
    """The messages of a dialogue of hh-rlhf."""
    parts = re.split(r"\n\n(Human|Assistant): ?", text)[1:]
    roles = {"Human": "user", "Assistant": "assistant"}
    return [message(roles[who], said) for who, said in zip(parts[::2], parts[1::2])]
