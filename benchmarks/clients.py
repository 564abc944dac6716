"""Public clients of OpenAI's API against a served tiny model, each in an environment of its own.

    python benchmarks/clients.py [--environments=DIR] [--only=openai,litellm,lm-eval] [--write]

For each client it makes a virtual environment, installs the client's newest release from PyPI (some
1.3 GB for all), and runs the calls below in it against `python -m hjax.launch.serve`: a model of
random weights with a token for each byte and a chat template with calls of tools. A call counts as
right if what the client returns is what the API says: a stream is the whole answer in parts,
arguments and formats are JSON of their schema, an echoed answer is read, a harness scores every
row. `--write` replaces the dated table in RESULTS.md. Prints one JSON line; exit status 1 if a call
failed or a client could not be installed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import machine

NAME = "tiny"
MARK = "CALLS "
# What pip installs for each client; the first is the client's own distribution.
PACKAGES = {
    "openai": ("openai",),
    "litellm": ("litellm",),
    "lm-eval": ("lm-eval[api]", "transformers"),  # transformers, without torch, for a tokenizer
}
RESULTS = pathlib.Path(__file__).resolve().parent / "RESULTS.md"
HEADING = "## Clients of the server"
TEMPLATE = (
    "{% if tools %}Tools: {{ tools | tojson }}\n"
    '<tool_call>{"name": ..., "arguments": ...}</tool_call>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESSAGES = [{"role": "user", "content": "What is 3 + 4?"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "add", "strict": True, "parameters": SCHEMA}}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
# Digits come rarely, so that random weights end a number.
FIELDS = {"seed": 7, "logit_bias": {str(ord(digit)): -4 for digit in "0123456789"}}
SIX_STOPS = ["Question:", "Q:", "</s>", "<|im_end|>", "\n\n", "User:"]


def openai_calls(url: str, folder: pathlib.Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Calls of OpenAI's own client."""
    import openai

    client: Any = openai.OpenAI(base_url=url, api_key="none", max_retries=0)

    def create(**fields: Any) -> Any:
        fields = {"messages": MESSAGES, "max_tokens": 200} | fields
        return client.chat.completions.create(model=NAME, **FIELDS, **fields)

    def stream() -> None:
        whole = create(max_tokens=24).choices[0].message.content
        chunks = create(max_tokens=24, stream=True, stream_options={"include_usage": True})
        parts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
        assert len(parts) > 2 and "".join(parts) == whole

    def completions() -> None:
        found = client.completions.create(
            model=NAME,
            prompt="3 + 4 =",
            max_tokens=8,
            echo=True,
            stop=SIX_STOPS,
            best_of=1,
            suffix="",
        )
        assert found.choices[0].text.startswith("3 + 4 =")

    def logprobs() -> None:
        [choice] = create(max_tokens=5, logprobs=True, top_logprobs=3).choices
        assert all(len(each.top_logprobs) == 3 for each in choice.logprobs.content)
        scored = client.completions.create(
            model=NAME, prompt="3 + 4 =", max_tokens=1, echo=True, logprobs=1
        )
        assert len(scored.choices[0].logprobs.token_logprobs) >= len("3 + 4 =")

    def parse() -> None:
        import pydantic

        class Sum(pydantic.BaseModel):
            a: int
            b: int

        found = client.chat.completions.parse(
            model=NAME, messages=MESSAGES, response_format=Sum, max_tokens=200, **FIELDS
        )
        assert isinstance(found.choices[0].message.parsed, Sum)

    yield "models", lambda: check([model.id for model in client.models.list()] == [NAME])
    yield "chat", lambda: check(create().usage.completion_tokens > 0)
    yield "stream", stream
    yield "tools, and the answer sent back", lambda: check_tools(create)
    yield "streamed tools", lambda: check_streamed_tools(create)
    yield "response_format", lambda: check_format(create)
    yield "parse with a pydantic class", parse
    yield "completions, 6 stops", completions
    yield "logprobs of both forms", logprobs


def litellm_calls(url: str, folder: pathlib.Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Calls of LiteLLM with its provider `openai`."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is read from a web page
    import litellm  # type: ignore[import-not-found]

    about = {"model": f"openai/{NAME}", "api_base": url, "api_key": "none", "max_retries": 0}

    def create(**fields: Any) -> Any:
        fields = {"messages": MESSAGES, "max_tokens": 200} | fields
        return litellm.completion(**about, **FIELDS, **fields)

    def stream() -> None:
        whole = create(max_tokens=24).choices[0].message.content
        parts = [c.choices[0].delta.content or "" for c in create(max_tokens=24, stream=True)]
        assert len(parts) > 2 and "".join(parts) == whole

    def text() -> None:
        about_text = about | {"model": f"text-completion-openai/{NAME}"}
        found = litellm.text_completion(
            prompt="3 + 4 =", max_tokens=8, stop=SIX_STOPS, **about_text
        )
        assert isinstance(found.choices[0].text, str)

    yield "completion", lambda: check(create().usage.completion_tokens > 0)
    yield "stream", stream
    yield "tools, and the answer sent back", lambda: check_tools(create)
    yield "streamed tools", lambda: check_streamed_tools(create)
    yield "response_format", lambda: check_format(create)
    yield "text_completion, 6 stops", text


def harness_calls(url: str, folder: pathlib.Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Runs of lm-evaluation-harness over a task of a local file."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder)}
    import lm_eval  # type: ignore[import-not-found]
    from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]

    rows = [{"question": f"{i} + {i} =", "answer": f" {2 * i}"} for i in range(6)]
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    usual = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "Question: {{question}}",
        "doc_to_target": "{{answer}}",
    }
    sums = usual | {
        "task": "sums",
        "output_type": "generate_until",
        "generation_kwargs": {"until": SIX_STOPS, "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    choices = usual | {
        "task": "sum_choices",
        "output_type": "multiple_choice",
        "doc_to_choice": ["0", "4", "6"],
        "doc_to_target": 1,
        "metric_list": [{"metric": "acc"}],
    }

    def run(kind: str, path: str, task: dict[str, Any], metric: str, **more: Any) -> None:
        about = {"model": NAME, "base_url": f"{url}/{path}", "num_concurrent": 2, "max_retries": 1}
        chat = kind == "local-chat-completions"
        found = lm_eval.simple_evaluate(
            model=kind, model_args=about | more, tasks=[task], task_manager=TaskManager(),
            apply_chat_template=chat, bootstrap_iters=0, log_samples=True,
        )  # fmt: skip
        assert len(found["samples"][task["task"]]) == len(rows)
        assert 0 <= found["results"][task["task"]][f"{metric},none"] <= 1

    untokenized = {"tokenizer_backend": None, "tokenized_requests": False}
    tokenized = {"tokenizer_backend": "huggingface", "tokenizer": str(folder / "model")}
    completions, chats = "local-completions", "local-chat-completions"
    yield (
        "local-completions, generate_until with 6 stops",
        lambda: run(completions, "completions", sums, "exact_match", **untokenized),
    )
    yield (
        "local-completions, multiple_choice by log-probs",
        lambda: run(completions, "completions", choices, "acc", **tokenized),
    )
    yield (
        "local-chat-completions, generate_until",
        lambda: run(chats, "chat/completions", sums, "exact_match", **untokenized),
    )


CALLS = {"openai": openai_calls, "litellm": litellm_calls, "lm-eval": harness_calls}


def check(true: bool) -> None:
    assert true


def check_sum(text: str) -> None:
    value = json.loads(text)
    assert value.keys() == {"a", "b"} and all(type(number) is int for number in value.values())


def check_tools(create: Callable[..., Any]) -> None:
    """A required call, and a chat that goes on after it with all fields that the client has."""
    [choice] = create(tools=TOOLS, tool_choice="required", parallel_tool_calls=False).choices
    [call] = choice.message.tool_calls
    assert call.function.name == "add" and choice.finish_reason == "tool_calls"
    check_sum(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "7"}
    messages = [*MESSAGES, choice.message.model_dump(), result]
    check(bool(create(messages=messages, tools=TOOLS, max_tokens=8).choices))


def check_streamed_tools(create: Callable[..., Any]) -> None:
    chunks = create(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, stream=True)
    calls = [call for c in chunks if c.choices for call in c.choices[0].delta.tool_calls or []]
    assert calls[0].function.name == "add"
    check_sum("".join(call.function.arguments or "" for call in calls))


def check_format(create: Callable[..., Any]) -> None:
    check_sum(create(response_format=FORMAT).choices[0].message.content)
    # The text has the format; a call instead of it has the function's, which is the same here.
    beside = create(response_format=FORMAT, tools=TOOLS, parallel_tool_calls=False)
    message = beside.choices[0].message
    check_sum(message.tool_calls[0].function.arguments if message.tool_calls else message.content)


def run_calls(client: str, url: str, folder: pathlib.Path) -> None:
    """In the client's environment: make its calls, and print what became of each."""
    rows = []
    for name, call in CALLS[client](f"{url}/v1", folder):
        began = time.perf_counter()
        try:
            call()
            error = ""
        except Exception as failure:  # of any client's own kind
            error = " ".join(f"{type(failure).__name__}: {failure}".split())[:200]
        rows.append({"call": name, "error": error, "seconds": time.perf_counter() - began})
    package = PACKAGES[client][0].partition("[")[0]
    version = machine.versions(package)[package]
    print(f"{MARK}{json.dumps({'version': version, 'calls': rows})}", flush=True)


def make_model(folder: pathlib.Path) -> str:
    """A model of random weights, with a token for each byte and two special ones."""
    import jax
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    from hjax.data.tokenizer import Tokenizer
    from hjax.models.export import export_weights
    from hjax.models.model_config import ModelConfig
    from hjax.models.parameters import decoder_network
    from hjax.sharding.layout import make_layouts

    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(letters, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    about = {"eos_token": "<|im_end|>", "add_bos_token": False}
    tokenizer = Tokenizer(backend, about, name="bytes", chat_templates={"default": TEMPLATE})
    config = ModelConfig(
        vocab_size=260, hidden_size=64, mlp_size=128, layers=2, heads=4, kv_heads=2, head_dim=16,
        max_length=1024,
    )  # fmt: skip
    params = decoder_network(config).create(0, make_layouts(jax.devices()[:1]).generate)
    return str(export_weights(folder / "model", config, params, tokenizer=tokenizer))


def install(client: str, folder: pathlib.Path) -> tuple[pathlib.Path, str]:
    """The interpreter of a client's environment, and why there is none."""
    place = folder / client
    python = place / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--upgrade", *PACKAGES[client]]
    for command in ([sys.executable, "-m", "venv", str(place)], pip):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = (done.stdout + done.stderr).strip().splitlines() or ["no reason given"]
            return python, lines[-1][:200]
    return python, ""


def measure(client: str, environments: pathlib.Path, url: str, folder: pathlib.Path) -> Any:
    """Version and calls of a client, or the error that kept it away."""
    python, missing = install(client, environments)
    if missing:
        print(f"{client}: not installed, {missing}", file=sys.stderr)
        return {"version": None, "calls": [], "error": missing}
    command = [str(python), __file__, f"--run={client}", f"--url={url}", f"--folder={folder}"]
    own = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=own)
    found = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not found:
        last = " ".join((done.stdout + done.stderr).split())[-200:]
        return {"version": None, "calls": [], "error": f"exit status {done.returncode}: {last}"}
    return json.loads(found[-1][len(MARK) :]) | {"error": ""}


def table(results: dict[str, Any]) -> str:
    """The section of RESULTS.md."""
    about = machine.describe()
    lines = [
        HEADING,
        "",
        f"`benchmarks/clients.py --write`, {datetime.date.today()}, at {about['commit']}, "
        f"{about['cores']} cores, {about['cpu']}, Python {about['python']}: each client in an "
        "environment of its own, against a served model of random weights.",
        "",
        "| client | version | call | result | s |",
        "|---|---|---|---|---|",
    ]
    for client, found in results.items():
        if found["error"]:
            lines.append(f"| {client} | – | – | {found['error']} | – |")
        for call in found["calls"]:
            result = call["error"].replace("|", "\\|") or "right"
            seconds = f"{call['seconds']:.1f}"
            lines.append(
                f"| {client} | {found['version']} | {call['call']} | {result} | {seconds} |"
            )
    return "\n".join(lines) + "\n"


def write(section: str) -> None:
    """Put the section into RESULTS.md, in place of the one that is there."""
    text = RESULTS.read_text()
    before, found, after = text.partition(f"{HEADING}\n")
    _, following, rest = after.partition("\n## ") if found else ("", "", "")
    RESULTS.write_text(before.rstrip("\n") + "\n\n" + section + following + rest)


def main() -> None:
    """Run the clients, and print the line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--environments", help="folder to keep the environments in; a passing one")
    parser.add_argument("--only", default=",".join(PACKAGES), help="clients, separated by commas")
    parser.add_argument("--write", action="store_true", help="the table of RESULTS.md")
    parser.add_argument("--run", choices=CALLS, help=argparse.SUPPRESS)  # in the environment
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        return run_calls(args.run, args.url, pathlib.Path(args.folder))
    from serving import Server

    results = {}
    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(made)
        environments = pathlib.Path(args.environments or folder / "environments").resolve()
        flags = [f"--name={NAME}"]
        with Server.started(make_model(folder), flags, folder) as server:
            for client in args.only.split(","):
                results[client] = measure(client, environments, server.url, folder)
    if args.write:
        write(table(results))
    failed = [f for f in results.values() if f["error"] or any(c["error"] for c in f["calls"])]
    print(json.dumps({"benchmark": "clients", "clients": results, **machine.describe()}))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
