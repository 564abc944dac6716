"""usage: python -m hjax.launch.generate --model=DIR|WORKDIR --prompt=TEXT [--json]
       python -m hjax.launch.generate --model=DIR|WORKDIR --prompts=FILE [--json]
       python -m hjax.launch.generate --model=DIR|WORKDIR
       python -m hjax.launch.generate --model=DIR|WORKDIR --task=NAME [--human]
       python -m hjax.launch.generate --model=DIR|WORKDIR --environment=PATH.py:NAME --data=FILE

Sample a response to a prompt or to each prompt of a file; or, in a terminal, chat; or play an
environment, turn by turn.

  --model=DIR|WORKDIR   a workdir (its actor's newest checkpoint), a Hugging Face directory or name
  --family=PATH.py:NAME a class of yours that reads the model's family (docs/families.md)
  --prompt=TEXT         the prompt; of a model without tokenizer its token ids: 3,4,5
  --prompts=FILE        a prompt per line (.txt), or per row (.jsonl) `prompt`: text, chat messages
                        or token ids; other keys of a row come back with --json
  --max_new_tokens=N    length limit of a response, in tokens ({length}, or what the model's
                        positions leave)
{sampling}\
  --regex=PATTERN       what a whole response must match; Rust's syntax, no lookarounds
  --json_schema=FILE    a JSON schema: responses are JSON that it allows
  --grammar=FILE        a grammar of Lark's syntax, which a whole response must follow
  --choice=TEXT         a whole response is this text, or that of another --choice
  --json                print one line of JSON as the last line of the output: `completions`, each
                        with `text`, `tokens`, `logprobs` and `finish_reason`
  --task=NAME           a built-in task that is played over many turns, with its options as
                        --task=maze:min_size=3; its held-out prompts are played one by one
  --environment=PATH.py:NAME  an environment of yours, which plays with each row of --data, or one
                        of another package (docs/agents.md)
  --data=FILE           rows that it plays with, jsonl or parquet
  --human               you act in the model's place; its weights are not read
{environment}\
  --help                print this

Without prompts it chats: by the model's chat template, or, of a model without one, it goes on with
each line by itself. /new forgets what was said, Ctrl-D ends. With an environment it prints each
turn, what was observed and rewarded, and after an episode Enter plays the next; /next leaves one in
which you act, /exit or Ctrl-D ends.

exit status: 0 done; 1 failed; 2 wrong input, nothing generated; 130 stopped by Ctrl-C
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hjax.errors import ConfigError
from hjax.files import json_line
from hjax.launch.command import run_or_help, status_on_ctrl_c
from hjax.launch.episodes import ENVIRONMENT_FLAGS, ENVIRONMENT_HELP, ENVIRONMENT_RULES
from hjax.launch.process_exit import run_and_exit
from hjax.launch.sampling_flags import (
    ModelInfo,
    all_options,
    existing_file,
    generate_options,
    read_flags,
    sampling_help,
    token_ids,
)
from hjax.launch.watch_episodes import check_episode_flags, watch_episodes
from hjax.show.answers import print_piece, print_response
from hjax.show.tables import wide_console

if TYPE_CHECKING:
    from hjax.data.dataset import Dataset
    from hjax.rollout.constraint import Constraint
    from hjax.rollout.language_model import Completion, LanguageModel

LENGTH = 64
# Fields of a completion in the JSON output; a row's other keys are kept with them.
FIELDS = ("text", "tokens", "logprobs", "finish_reason")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    sampling = sampling_help("logits are divided by it; 0 is greedy (1)")
    text = str(__doc__).format(sampling=sampling, length=LENGTH, environment=ENVIRONMENT_HELP)
    return status_on_ctrl_c(lambda: run_or_help(arguments, lambda: text, _run))


def parse(arguments: Sequence[str]) -> Any:
    """Read the command line.

    Raises:
      ConfigError: a wrong flag or value.
    """
    constraints = dict(regex=str, json_schema=str, grammar=str, choice=list)
    own = dict(prompt=str, prompts=str, human=False, **constraints)
    args = read_flags(arguments, ENVIRONMENT_RULES, **own, **ENVIRONMENT_FLAGS)
    if args.task or args.environment or args.tools:
        check_episode_flags(args)
        return args
    for flag in ("data", "human", "max_turns", "turn_tokens"):
        if getattr(args, flag):
            raise ConfigError(
                f"--{flag} is for episodes; give --task=NAME or --environment=PATH.py:NAME"
            )
    if args.prompt is not None and args.prompts is not None:
        raise ConfigError("--prompt and --prompts: give one of them")
    if args.prompt is None and args.prompts is None:
        if args.json:
            raise ConfigError("--json needs --prompt=TEXT or --prompts=FILE")
        if not sys.stdin.isatty():
            raise ConfigError(
                "--prompt=TEXT or --prompts=FILE is missing, and a chat needs a terminal"
            )
    return args


def _run(arguments: Sequence[str]) -> int:
    args = parse(arguments)
    if args.task or args.environment or args.tools:
        return watch_episodes(args)
    if args.prompts is not None:
        existing_file("prompts", args.prompts)
    info = ModelInfo.read(args.model)
    chosen = generate_options(args, info, temperature=1.0) | {"constraint": _constraint(args, info)}
    if args.prompt is None and args.prompts is None:
        if args.chat:
            info.check_chat()
        limit = args.max_new_tokens or LENGTH
        return Chat(info.load(args, args.copies), args.seed, limit, chosen).run()
    prompts = _prompts(args, info)
    from hjax.run.batched_generation import length_limit

    limit = length_limit(prompts, info.config, args.max_new_tokens, LENGTH)
    chosen["max_new_tokens"] = limit
    if len(prompts) == 1 and not args.json:
        _stream(info.load(args, args.copies), prompts, args.seed, chosen)
        return 0
    start = time.monotonic()
    completions = _complete(info.load(args, args.copies), prompts, args, chosen)
    seconds = time.monotonic() - start
    if args.json:
        print(json_line(_json_result(args, prompts, completions, chosen, seconds)))
    else:
        _show(prompts, completions)
    return 0


def _constraint(args: Any, info: ModelInfo) -> Constraint | None:
    """The constraint of constrained decoding, from the flags; checked before loading weights."""
    from hjax.rollout.constrained_decoding import ConstraintCompiler
    from hjax.rollout.constraint import Constraint
    from hjax.rollout.sampling_params import SamplingParams

    names = "regex", "json_schema", "grammar", "choice"
    present = [name for name in names if getattr(args, name) is not None]
    if not present:
        return None
    if len(present) > 1:
        raise ConfigError(f"{' and '.join(f'--{name}' for name in present)}: give one of them")
    [name] = present
    try:
        if args.choice is not None:
            found = Constraint.of_choice(args.choice)
        elif args.regex is not None:
            found = Constraint(regex=args.regex)
        else:
            text = existing_file(name, getattr(args, name)).read_text(encoding="utf-8")
            found = Constraint(**{name: text})
        ConstraintCompiler(info.tokenizer, info.vocab_size).matcher(found, SamplingParams(), ())
    except (ConfigError, UnicodeDecodeError) as error:
        text = str(error)
        raise ConfigError(text if text.startswith("--") else f"--{name}: {text}") from error
    return found


def _prompts(args: Any, info: ModelInfo) -> Dataset:
    from hjax.data.dataset import Dataset

    wording = info.wording(args.chat)
    if args.prompts is not None:
        path = existing_file("prompts", args.prompts)
        if path.suffix not in (".txt", ".jsonl"):
            raise ConfigError(f"--prompts={args.prompts}: its name must end in .txt or .jsonl")
        found = Dataset.from_file(
            path, info.tokenizer, vocab_size=info.vocab_size, format_prompt=wording
        )
        hidden = next((name for name in FIELDS if name in found.columns), None)
        if hidden is not None:
            raise ConfigError(
                f"--prompts={args.prompts}: the response's {hidden!r} would hide a key of that "
                "name; rename the key"
            )
        return found
    if info.tokenizer is None:
        return Dataset([token_ids(args.prompt, info.vocab_size)], None, {"prompt": [args.prompt]})
    text = args.prompt
    tokens = info.tokenizer.encode(text)
    if wording is not None:
        text = info.tokenizer.chat(wording(args.prompt))
        tokens = info.tokenizer.encode(text, add_special=False)
    if not tokens:
        raise ConfigError("--prompt= is empty, and the model has no token to begin with")
    return Dataset([tokens], [text], {"prompt": [args.prompt]})


def _complete(
    model: LanguageModel, prompts: Dataset, args: Any, options: dict[str, Any]
) -> list[Completion]:
    from hjax.run.batched_generation import generate_in_batches
    from hjax.show.progress_bar import PartsDisplay

    several = len(prompts) > args.batch and sys.stderr.isatty()
    with PartsDisplay("generating", several, sys.stderr) as progress:
        tokens = prompts.prompt_tokens
        calls = generate_in_batches(model, tokens, args.batch, args.seed, progress, **options)
        return [completion for call in calls for completion in call]


def _stream(model: LanguageModel, prompts: Dataset, seed: int, options: dict[str, Any]) -> None:
    """Print a prompt and stream the response."""
    console = wide_console()
    [tokens] = prompts.prompt_tokens
    _say_prompt(console, prompts.prompt_text[0] if prompts.prompt_text else tokens)
    print_response(console, model.stream(tokens, seed=seed, **options))


def _say_prompt(console: Any, prompt: Any) -> None:
    print_piece(console, prompt, "dim")
    # A response continues the prompt's text; after token ids comes an arrow.
    print_piece(console, "" if isinstance(prompt, str) else " → ")


def _json_result(
    args: Any,
    prompts: Dataset,
    completions: Sequence[Completion],
    options: dict[str, Any],
    seconds: float,
) -> dict[str, Any]:
    rows = [dict(zip(prompts.columns, values)) for values in zip(*prompts.columns.values())]
    return {
        "model": args.model,
        "max_new_tokens": options["max_new_tokens"],
        **all_options(options),
        "seed": args.seed,
        "completions": [
            row | {field: getattr(completion, field) for field in FIELDS}
            for row, completion in zip(rows, completions, strict=True)
        ],
        "seconds": seconds,
    }


def _show(prompts: Dataset, completions: Sequence[Completion]) -> None:
    """Print each prompt and its response."""
    console = wide_console()
    shown = prompts.prompt_text or prompts.prompt_tokens
    for i, (prompt, completion) in enumerate(zip(shown, completions, strict=True)):
        print_piece(console, f"{i + 1} of {len(prompts)}\n", "bold")
        _say_prompt(console, prompt)
        print_response(console, [completion])
        if i + 1 < len(prompts):
            print_piece(console, "\n")


# Lines that are commands of the chat.
_NEW, _END = "/new", "/exit"


class Chat:
    """Chat by the model's chat template; without a template every line is a separate prompt.

    Args:
      model: with or without a tokenizer.
      seed: of the first answer; the seeds of later answers are derived from it.
      limit: maximum tokens of an answer; fewer where the model's context is shorter.
      options: arguments of ``model.generate``.
    """

    def __init__(self, model: LanguageModel, seed: int, limit: int, options: dict[str, Any]):
        self.model = model
        self.seed = seed
        self.limit = limit
        self.options = options
        self.turns = 0
        self.messages: list[dict[str, str]] = []
        tokenizer = model.tokenizer
        self._templated = tokenizer is not None and bool(tokenizer.chat_template)
        self._console = wide_console(sys.stdout)

    def run(self) -> int:
        """Chat until the input ends; returns the command's exit status."""
        if self.model.tokenizer is None:
            mode = "no tokenizer: a line is token ids, as 3,4,5"
        elif self._templated:
            mode = "by its chat template"
        else:
            mode = "no chat template: it goes on with each line by itself"
        with contextlib.suppress(ImportError):  # line editing for `input`
            import readline  # noqa: F401
        print_piece(self._console, f"{mode}; {_NEW} begins anew, Ctrl-D ends\n", "dim")
        while True:
            try:
                line = input("> ")
            except EOFError:
                print_piece(self._console, "\n")
                return 0
            if line.strip() == _END:
                return 0
            if line.strip() == _NEW:
                self.messages.clear()
            elif line.strip():
                try:
                    self.answer(line)
                except ConfigError as error:  # this line is invalid; the chat goes on
                    print_piece(self._console, f"{error}\n", "red")

    def answer(self, line: str) -> None:
        """Answer a line and print the answer.

        Raises:
          ConfigError: the model cannot take the line; the conversation is unchanged.
        """
        from hjax.run.batched_generation import call_seed

        messages = [*self.messages, {"role": "user", "content": line}]
        seed = call_seed(self.seed, self.turns)
        prompt = self._prompt(line, messages)
        limit = max(min(self.limit, self.model.config.max_length - len(prompt)), 1)
        pieces = self.model.stream(prompt, seed=seed, max_new_tokens=limit, **self.options)
        text = print_response(self._console, pieces)
        self.turns += 1
        if self._templated:
            self.messages = [*messages, {"role": "assistant", "content": text}]

    def _prompt(self, line: str, messages: list[dict[str, str]]) -> list[int]:
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            return token_ids(line, self.model.config.vocab_size)
        if not self._templated:
            return tokenizer.encode(line)
        return tokenizer.encode(tokenizer.chat(messages), add_special=False)


if __name__ == "__main__":
    run_and_exit(main)
