"""`python -m hjax.launch.serve`: a model over HTTP, in OpenAI's form."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from hjax.errors import ConfigError, exit_status
from hjax.launch.command import parse_flags, stopped_by_ctrl_c
from hjax.launch.sampling_flags import ModelFront
from hjax.rules import Rule, above, at_least, between

if TYPE_CHECKING:
    from hjax.serving.limits import Limits

HELP = """\
usage: python -m hjax.launch.serve --model=DIR|WORKDIR --protocol=openai

Serve a model: /v1/completions, /v1/chat/completions, /v1/models, /health and /metrics
(docs/serving.md). Once it answers it prints `serving DIR on http://HOST:PORT`.

  --model=DIR|WORKDIR   a workdir (its actor's newest checkpoint), a Hugging Face directory or name
  --protocol=openai     OpenAI's API over HTTP
  --host=127.0.0.1      address to listen on; 0.0.0.0: for other machines too
  --port=8000           0 is a free one
  --api_key_env=NAME    environment variable with the key that clients must bring
  --dtype=float32       of compute: float32 or bfloat16
  --slots=0             responses drawn at a time (0: chosen)
  --prefix_tokens=-1    whose keys and values are kept for prompts that begin with them: a system
                        prompt, earlier turns (-1: chosen; 0: none)
  --lookup=0            tokens guessed at a time from what a text said before; answers are the same
                        (0: none)
  --max_queue=1024      responses that wait for a slot at most; more are told to come again (429)
  --max_body_bytes=N    of a request ({body_bytes})
  --max_connections=N   at a time ({connections})
  --header_seconds=S    for a request's headers ({header_seconds:g})
  --idle_seconds=S      for a connection without requests, and for a client to read what was
                        answered ({idle_seconds:g})
  --help                print this

exit status: 0 ended by SIGTERM, requests answered; 1 failed; 2 wrong input, nothing served;
130 ended by Ctrl-C
"""
_RULES: dict[str, Rule] = {
    "port": between(0, 65535),
    "slots": at_least(0),
    "prefix_tokens": at_least(-1),
    "lookup": at_least(0),
    "max_queue": at_least(1),
    "max_body_bytes": at_least(1),
    "max_connections": at_least(1),
    "header_seconds": above(0),
    "idle_seconds": at_least(1),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if any(a in ("--help", "-help", "-h") for a in arguments):
        from hjax.serving.limits import Limits

        print(HELP.format(**dataclasses.asdict(Limits())), end="")
        return 0
    return stopped_by_ctrl_c(lambda: exit_status(lambda: _run(arguments)))


def parse(arguments: Sequence[str]) -> flags.FlagValues:
    """Read the command line.

    Raises:
      ConfigError: a wrong flag or value.
    """
    from hjax.serving.limits import Limits

    usual = Limits()
    own = flags.FlagValues()
    flags.DEFINE_string("model", "", "see --help", flag_values=own)
    flags.DEFINE_enum("protocol", None, ["openai", "jetstream"], "see --help", flag_values=own)
    flags.DEFINE_string("host", "127.0.0.1", "see --help", flag_values=own)
    flags.DEFINE_integer("port", 8000, "see --help", flag_values=own)
    flags.DEFINE_string("api_key_env", "", "see --help", flag_values=own)
    flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "see --help", flag_values=own)
    flags.DEFINE_integer("slots", 0, "see --help", flag_values=own)
    flags.DEFINE_integer("prefix_tokens", -1, "see --help", flag_values=own)
    flags.DEFINE_integer("lookup", 0, "see --help", flag_values=own)
    flags.DEFINE_integer("max_queue", 1024, "see --help", flag_values=own)
    flags.DEFINE_integer("max_body_bytes", usual.body_bytes, "see --help", flag_values=own)
    flags.DEFINE_integer("max_connections", usual.connections, "see --help", flag_values=own)
    flags.DEFINE_float("header_seconds", usual.header_seconds, "see --help", flag_values=own)
    flags.DEFINE_float("idle_seconds", usual.idle_seconds, "see --help", flag_values=own)
    flags.DEFINE_bool("admin", False, "see --help", flag_values=own)
    parse_flags(own, arguments)
    if not own["model"].value:
        raise ConfigError("--model is missing; see --help")
    own["model"].value = os.path.expanduser(own["model"].value)
    if own["protocol"].value is None:
        raise ConfigError("--protocol is missing; allowed: openai")
    if own["protocol"].value == "jetstream":
        raise ConfigError("--protocol=jetstream: not built yet; allowed: openai")
    if own["admin"].value:
        raise ConfigError("--admin: a server that reloads is not built yet; start another one")
    for name, rule in _RULES.items():
        if not rule.holds(own[name].value):
            raise ConfigError(f"--{name}={own[name].value}: must be {rule.text}")
    return own


def _run(arguments: Sequence[str]) -> int:
    own: Any = parse(arguments)
    key = _key(own.api_key_env)
    front = ModelFront.read(own.model)
    try:
        from hjax.serving.server import Server, address_of, bind, run
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed; the extra `serve` has what serving needs: "
            "pip install 'hjax[serve]'"
        ) from error
    # Before the weights: a port that is taken should not cost their reading.
    bound = bind(own.host, own.port)
    _remark(bound.getsockname()[0], key)
    from hjax.rollout.service import Service
    from hjax.serving.served import Served

    model = front.load(own.dtype)
    prefix_tokens = None if own.prefix_tokens < 0 else own.prefix_tokens
    service = Service(model, own.slots, own.max_queue, prefix_tokens, own.lookup)
    served = Served(own.model, service, model.tokenizer, model.config.vocab_size, model.eos_ids)
    address = address_of(bound)
    limits = _limits(own)

    def started() -> None:
        print(f"serving {own.model} on http://{address}", flush=True)

    return run(Server(served, bound, limits, key, started), limits)


def _limits(own: Any) -> Limits:
    from hjax.serving.limits import Limits

    return Limits(
        body_bytes=own.max_body_bytes,
        connections=own.max_connections,
        header_seconds=own.header_seconds,
        idle_seconds=own.idle_seconds,
    )


def _key(name: str) -> str:
    if not name:
        return ""
    key = os.environ.get(name, "").strip()
    if not key:
        raise ConfigError(f"--api_key_env={name}: that environment variable is not set, or empty")
    return key


def _remark(host: str, key: str) -> None:
    if not key and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        print(
            f"hjax: {host} can be reached by other machines, and no key is asked for; "
            "--api_key_env=NAME",
            file=sys.stderr,
        )


if __name__ == "__main__":
    sys.exit(main())
