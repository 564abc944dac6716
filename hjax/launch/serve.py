"""usage: python -m hjax.launch.serve --model=DIR|WORKDIR [--protocol=openai|jetstream|tinker]

Serve a model (docs/serving.md), or train it by calls (docs/training_service.md). Once it answers it
prints `serving DIR on http://HOST:PORT`, for jetstream `grpc://`.

  --model=DIR|WORKDIR   a workdir (its actor's newest checkpoint), a Hugging Face directory or name
  --family=PATH.py:NAME a class of yours that reads the model's family (docs/families.md)
  --protocol=openai     OpenAI's API over HTTP: /v1/completions, /v1/chat/completions, /v1/models,
                        /health and /metrics (what is served where this flag is left out)
  --protocol=jetstream  JetStream's over gRPC: Decode and HealthCheck (the extra `jetstream`)
  --protocol=tinker     the Tinker API: models of adapters are trained and sampled by calls
  --host=127.0.0.1      address to listen on; 0.0.0.0: for other machines too
  --port=8000           0 is a free one
  --api_key_env=NAME    environment variable with the key that clients must bring
  --dtype=float32       of compute: float32 or bfloat16
  --cache_dtype=auto    of keys and values: that of compute, or int8: half of bfloat16's memory
  --slots=0             responses drawn at a time (0: chosen)
  --tensor=1            devices of this machine that share the model, split by heads
  --max_queue=1024      responses that wait for a slot at most; more are told to come again
  --max_body_bytes=N    of a request ({body_bytes})
  --prefix_tokens=-1    whose keys and values are kept for prompts that begin with them: a system
                        prompt, earlier turns (-1: chosen; 0: none)
  --lookup=0            tokens guessed at a time from what a text said before; answers are the same
                        (0: none)
  --context=0           tokens of a prompt and its response at most (0: the model's; with jetstream
                        2048 at most)
  --warm_up             compile for all lengths before it answers, not while it does: minutes
                        (with jetstream unless --nowarm_up)

with openai:
  --name=NAME           of the model for requests, instead of --model's
  --cors=ORIGIN,...     whose web pages may ask, as https://example.com, or * for all
  --allowed_hosts=NAME,... names by which a server without a key may be asked, as example.com,
                        beside --host and localhost; * for all
  --admin               POST /admin/reload reads the model's weights again, and answers go on with
                        the new ones
  --max_connections=N   at a time ({connections})
  --header_seconds=S    for a request's headers ({header_seconds:g})
  --idle_seconds=S      for a connection without requests, and for a client to read what was
                        answered ({idle_seconds:g})

with tinker, which also has --name (several, separated by commas; any: every name), --cors,
--allowed_hosts, --max_connections, --header_seconds and --idle_seconds of openai:
  --store=DIR           folder of saved states (left out: one that goes with the server)
  --max_rank=256        of adapters
  --max_models=64       that are trained at a time
  --session_seconds=600 without a heartbeat after which a client's models are dropped
  --micro_batch_tokens=4096 of a forward and backward pass, padding included
  --remat=none          which activations the backward pass computes again (docs/config.md)
  --data=1, --fsdp=1    devices over which a batch's rows are split, and with fsdp the weights too
  --generate_tensor=0   devices that share the model while it samples, a divisor of --tensor
                        (0: --tensor)

with jetstream, whose requests do not say these:
{options}\
  --seed=S              the n-th prompt's draws follow from it and n (left out: from chance)

  --help                print this

exit status: 0 ended by SIGTERM, requests answered; 1 failed; 2 wrong input, nothing served;
130 ended by Ctrl-C
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from hjax.errors import ConfigError
from hjax.launch.command import (
    check_model_flags,
    define_flags,
    parse_flags,
    run_or_help,
    status_on_ctrl_c,
)
from hjax.launch.process_exit import run_and_exit
from hjax.launch.sampling_flags import (
    DTYPES,
    SEEDS,
    UNSET,
    ModelInfo,
    options_help,
    sampling_options,
)
from hjax.rollout.sampling_params import OPTIONS, SamplingParams
from hjax.rules import Rule, at_least, between, deadline
from hjax.serving.address import address_of, bind
from hjax.serving.limits import ServerLimits, allow_connections
from hjax.temporary_folders import TemporaryFolder

if TYPE_CHECKING:
    from hjax.rollout.language_model import LanguageModel
    from hjax.rollout.service import GenerationService
_PROTOCOLS = ("openai", "jetstream", "tinker")
_USUAL = ServerLimits()
# Flags of one protocol alone, with their defaults.
_OPENAI = {
    "name": "",
    "cors": "",
    "allowed_hosts": "",
    "admin": False,
    "max_connections": _USUAL.connections,
    "header_seconds": _USUAL.header_seconds,
    "idle_seconds": _USUAL.idle_seconds,
}
_JETSTREAM = ("seed", *OPTIONS)
_TINKER = {
    "store": "",
    "max_rank": 256,
    "max_models": 64,
    "session_seconds": 600.0,
    "micro_batch_tokens": 4096,
    "remat": "none",
    "data": 1,
    "fsdp": 1,
    "generate_tensor": 0,
}
# Flags of generation alone that the training service does not have.
_NOT_TINKER = ("admin", "cache_dtype", "prefix_tokens", "lookup", "context", "warm_up", "max_queue")
# With which the SDK's keys begin.
_KEY_START = "tml-"
# Default of --context with jetstream.
_JETSTREAM_CONTEXT = 2048
_RULES: Mapping[str, Rule] = {
    "port": between(0, 65535),
    "slots": at_least(0),
    "prefix_tokens": at_least(-1),
    "lookup": at_least(0),
    "tensor": at_least(1),
    "data": at_least(1),
    "fsdp": at_least(1),
    "generate_tensor": at_least(0),
    "max_queue": at_least(1),
    "max_body_bytes": at_least(1),
    "max_connections": at_least(1),
    "header_seconds": deadline(),
    "idle_seconds": deadline(1),
    "context": at_least(0),
    "seed": SEEDS,
    "max_rank": at_least(1),
    "max_models": at_least(1),
    "session_seconds": deadline(30),
    "micro_batch_tokens": at_least(1),
    "cors": Rule(
        "* or origins as https://example.com:8080, without a path, separated by commas",
        lambda text: bool(re.fullmatch(r"\*|(https?://[^/,\s]+(,(?!$)|$))*", text)),
    ),
    "allowed_hosts": Rule(
        "* or names as example.com, without a port, separated by commas",
        lambda text: bool(re.fullmatch(r"\*|([^:/,\s*]+(,(?!$)|$))*", text)),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = options_help("logits are divided by it; 0 is greedy (0)")
    text = str(__doc__).format(options=options, **dataclasses.asdict(_USUAL))
    return status_on_ctrl_c(lambda: run_or_help(arguments, lambda: text, _run))


def parse(arguments: Sequence[str]) -> flags.FlagValues:
    """Read the command line.

    Raises:
      ConfigError: a wrong flag or value.
    """
    args = define_flags(model="", family="", host="127.0.0.1", port=8000, api_key_env="", tensor=1)
    define_flags(args, **DTYPES, slots=0, prefix_tokens=-1, lookup=0, max_queue=1024, context=0)
    define_flags(args, warm_up=bool, max_body_bytes=_USUAL.body_bytes, seed=int, **UNSET)
    define_flags(args, **{name: type(value) for name, value in {**_OPENAI, **_TINKER}.items()})
    flags.DEFINE_enum("protocol", "openai", _PROTOCOLS, "see --help", flag_values=args)
    parse_flags(args, arguments)
    protocol = str(args["protocol"].value)
    for name, reason in _foreign_flags(protocol).items():
        if args[name].present:
            raise ConfigError(f"--{name}: not with --protocol={protocol}; {reason}, see --help")
    for name, value in {**_OPENAI, **_TINKER, "warm_up": protocol == "jetstream"}.items():
        if args[name].value is None:
            args[name].value = value
    check_model_flags(args, _RULES)
    return args


def _foreign_flags(protocol: str) -> dict[str, str]:
    """The flags that a protocol does not have, and why."""
    requests = dict.fromkeys(_JETSTREAM, "requests set it")
    tinker = dict.fromkeys(_TINKER, "only tinker has it")
    if protocol == "jetstream":
        http = dict.fromkeys(_OPENAI, "only openai and tinker have it")
        return {**http, "admin": "only openai has it", **tinker}
    if protocol == "openai":
        return requests | tinker
    return requests | dict.fromkeys(_NOT_TINKER, "the training service does not have it")


def _run(arguments: Sequence[str]) -> int:
    args: Any = parse(arguments)
    key = _key(args.api_key_env)
    info = ModelInfo.read(args.model)
    serve = {"jetstream": _jetstream, "openai": _openai, "tinker": _tinker}[args.protocol]
    return serve(args, key, info)


def _openai(args: Any, key: str, info: ModelInfo) -> int:
    try:
        from hjax.serving.reload import WeightReload
        from hjax.serving.server import Server, run
    except ModuleNotFoundError as error:
        raise _missing(error, "serve") from error
    allow_connections(args.max_connections)
    from hjax.serving.served_model import ServedModel

    with _bind(args, key) as bound:
        model, service = _service(args, info)
        reload = WeightReload(model, service) if args.admin else None
        size, limits = model.config.vocab_size, _limits(args)
        served = ServedModel(args.name or args.model, service, model.tokenizer, size, model.eos_ids)
        started = _started(args, "http", bound)
        return run(Server(served, bound, limits, key, started, reload), limits)


def _tinker(args: Any, key: str, info: ModelInfo) -> int:
    if key and not key.startswith(_KEY_START):
        raise ConfigError(
            f"--api_key_env={args.api_key_env}: the key must begin with {_KEY_START}, or the SDK "
            "refuses it"
        )
    try:
        from hjax.training_service.tinker_server import run_tinker
    except ModuleNotFoundError as error:
        raise _missing(error, "serve") from error
    from hjax.launch.jax_setup import prepare_devices
    from hjax.training_service.shared_base import SharedBase
    from hjax.training_service.state_store import StateStore
    from hjax.training_service.tinker_service import TinkerLimits

    allow_connections(args.max_connections)
    names = tuple(filter(None, args.name.split(","))) or (args.model,)
    with _bind(args, key) as bound, contextlib.ExitStack() as stack:
        folder = args.store or stack.enter_context(TemporaryFolder("hjax-store-")) / "states"
        store = StateStore(folder)
        prepare_devices(args.data * args.fsdp * args.tensor)
        base = SharedBase(
            args.model,
            dtype=args.dtype,
            data=args.data,
            fsdp=args.fsdp,
            tensor=args.tensor,
            generate_tensor=args.generate_tensor,
            micro_batch_tokens=args.micro_batch_tokens,
            remat=args.remat,
            slots=args.slots,
        )
        return run_tinker(
            base, names, store, bound,
            limits=_limits(args),
            service_limits=TinkerLimits(
                session_seconds=args.session_seconds, models=args.max_models, rank=args.max_rank
            ),
            key=key,
            kept=bool(args.store),
            started=_started(args, "http", bound),
        )  # fmt: skip


def _jetstream(args: Any, key: str, info: ModelInfo) -> int:
    options = sampling_options(args, info.config.vocab_size, temperature=0.0)
    args["context"].value = args.context or min(info.config.max_length, _JETSTREAM_CONTEXT)
    try:
        from hjax.serving.jetstream_server import run
    except ModuleNotFoundError as error:
        raise _missing(error, "jetstream") from error
    bound = _bind(args, key)
    model, service = _service(args, info)
    started = _started(args, "grpc", bound)
    address = address_of(bound)
    bound.close()  # gRPC binds the port itself
    sampling = SamplingParams(**options)
    return run(model, service, sampling, args.seed, address, _limits(args), key, started)


def _service(args: Any, info: ModelInfo) -> tuple[LanguageModel, GenerationService]:
    """Load the model and start the generation service."""
    from hjax.rollout.service import GenerationService

    model = info.load(args)
    prefix_tokens = None if args.prefix_tokens < 0 else args.prefix_tokens
    try:
        service = GenerationService(
            model, args.slots, args.max_queue, prefix_tokens, args.lookup, args.context
        )
    except ConfigError as error:
        raise ConfigError(f"--{error}") from error
    if args.warm_up:
        service.warm_up(lambda what: print(f"compiling: {what}", file=sys.stderr, flush=True))
    return model, service


def _missing(error: ModuleNotFoundError, extra: str) -> ConfigError:
    return ConfigError(
        f"{error.name} is not installed; the extra `{extra}` has what serving needs: "
        f"pip install 'hjax[{extra}]'"
    )


def _bind(args: Any, key: str) -> socket.socket:
    """Bind the port, before loading weights: a port in use is reported at once."""
    bound = bind(args.host, args.port)
    host = bound.getsockname()[0]
    if not key and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        print(
            f"hjax: {host} can be reached by other machines, and no key is asked for; "
            "--api_key_env=NAME",
            file=sys.stderr,
        )
    return bound


def _started(args: Any, scheme: str, bound: socket.socket) -> Callable[[], None]:
    line = f"serving {args.model} on {scheme}://{address_of(bound)}"
    return lambda: print(line, flush=True)


def _limits(args: Any) -> ServerLimits:
    return ServerLimits(
        body_bytes=args.max_body_bytes,
        connections=args.max_connections,
        header_seconds=args.header_seconds,
        idle_seconds=args.idle_seconds,
        origins=tuple(filter(None, args.cors.split(","))),
        hosts=tuple(filter(None, [args.host, *args.allowed_hosts.split(",")])),
    )


def _key(name: str) -> str:
    if not name:
        return ""
    key = os.environ.get(name, "").strip()
    if not key:
        raise ConfigError(f"--api_key_env={name}: that environment variable is not set, or empty")
    return key


if __name__ == "__main__":
    run_and_exit(main)
