"""The command `hjax`: `hjax train ...` is `python -m hjax.launch ...`, and so on.

It replaces itself by the command that it names, so signals, exit status and process id are that
command's. Has no slow imports.
"""

import difflib
import os
import sys
from typing import NoReturn

# By name: the module that runs, and what it does.
COMMANDS = {
    "train": ("hjax.launch", "train a model as a config says, or go on with a run"),
    "check": ("hjax.launch.check", "try every kernel and collective on this machine's devices"),
    "compare": ("hjax.launch.compare", "write one page on several runs"),
    "compile": ("hjax.launch.compile", "compile a step for hardware that is not there"),
    "evaluate": ("hjax.launch.evaluate", "answer questions, or play episodes, and score them"),
    "export": ("hjax.launch.export", "write a model as a Hugging Face directory"),
    "generate": ("hjax.launch.generate", "sample responses, chat, or watch episodes"),
    "plan": ("hjax.launch.plan", "choose which devices and layouts each model gets"),
    "serve": ("hjax.launch.serve", "serve a model by OpenAI's API, or JetStream's"),
    "transition": ("hjax.launch.transition", "what moving from training to generation costs"),
}


def usage() -> str:
    """The help text: every command in a line."""
    lines = "\n".join(f"  {name:<12}{what}" for name, (_, what) in COMMANDS.items())
    return (
        "usage: hjax COMMAND [--flag=value ...]\n"
        "       python -m hjax COMMAND [--flag=value ...]\n\n"
        f"{lines}\n\n"
        "`hjax COMMAND --help` explains a command, `hjax --version` prints versions.\n"
    )


def main() -> NoReturn:
    """Run the command that the first argument names; exit status 2 where it names none."""
    name, rest = (sys.argv[1] if sys.argv[1:] else ""), sys.argv[2:]
    if name in ("--help", "-help", "-h", "help") and not rest:
        print(usage(), end="")
        sys.exit(0)
    if name == "help":  # hjax help COMMAND
        name, rest = rest[0], ["--help"]
    if name in ("--version", "-version"):
        name, rest = "train", ["--version"]
    if name not in COMMANDS:
        if name.startswith("-") or not name:
            said = f"name a command first, as in hjax train {name or '--config=ppo.py'}"
        elif near := difflib.get_close_matches(name, COMMANDS, n=1):
            said = f"no command {name!r}; did you mean {near[0]}?"
        else:
            said = f"no command {name!r}; one of {', '.join(COMMANDS)}"
        print(f"hjax: error: {said} (hjax --help)", file=sys.stderr)
        sys.exit(2)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", COMMANDS[name][0], *rest])


if __name__ == "__main__":
    main()
