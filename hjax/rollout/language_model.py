"""``hjax.load_model``: a model to inspect, score with and sample from."""

import dataclasses
import functools
import math
import queue
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hjax.config_aliases import refuse_arguments
from hjax.data.response_text import ResponseText
from hjax.data.tokenizer import Tokenizer
from hjax.data.tokenizer_files import holds_tokenizer
from hjax.errors import ConfigError, DataError, RunError
from hjax.files import StrPath
from hjax.kernels.int8_cache import AUTO
from hjax.kernels.verdict import local_forms
from hjax.models.compute import Compute
from hjax.models.families import load_family
from hjax.models.forward import sequence_states, token_log_probs
from hjax.models.model_config import ModelConfig
from hjax.models.parameters import decoder_network
from hjax.models.weights import (
    load_params,
    model_directory,
    newest_checkpoint,
    read_config,
    read_eos_ids,
)
from hjax.rollout.constraint import Constraint
from hjax.rollout.engine import Engine
from hjax.rollout.generator import Generator, bucket_length
from hjax.rollout.prefix_cache import CachedPrefix, uncached_tokens, why_no_blocks
from hjax.rollout.prompt_encoding import StopConditions, StopWatcher, encode_prompt, encode_rows
from hjax.rollout.requests import Request, ResponseChunk
from hjax.rollout.rollout_job import GenerationConfig
from hjax.rollout.sampling_params import OPTIONS, SamplingParams, takes_options
from hjax.rollout.service import GenerationService
from hjax.rollout.weight_update import check_same_model
from hjax.sharding.layout import Layout, fit_layout, make_layouts


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sampled response.

    Attributes:
      tokens: prompt excluded, the end-of-sequence token included if it was drawn.
      text: None without a tokenizer.
      logprobs: natural log, of the distribution sampled; as many as tokens.
      finish_reason: "stop" (an end or stop token) or "length".
    """

    tokens: list[int]
    text: str | None
    logprobs: list[float]
    finish_reason: str


class LanguageModel:
    """A decoder with its weights on one device or several, and its tokenizer if it has one.

    Args:
      config: shapes.
      params: float32 parameters.
      tokenizer: or None.
      dtype: of compute and of matrices.
      eos_ids: token ids that end a response.
      path: where the weights were read; empty: from nowhere.
      tensor: local devices over which heads, MLPs and vocabulary are split, the first ones. With
        several, only one thread at a time may call the model.
      copies: of the model, each on ``tensor`` devices; they share the rows of a call.
      cache_dtype: of the KV cache while generating: ``auto``, the dtype; or ``int8``.

    Raises:
      ConfigError: another dtype, or more devices than there are or a number that does not divide
        the model.

    Attributes:
      params: as decoding reads them: matrices in the compute dtype and, where layers are unrolled
        on GPUs, an array per layer.
    """

    def __init__(
        self,
        config: Any,
        params: Any,
        tokenizer: Tokenizer | None = None,
        dtype: str = "float32",
        eos_ids: Sequence[int] = (),
        path: StrPath = "",
        tensor: int = 1,
        copies: int = 1,
        cache_dtype: str = AUTO,
    ):
        dtypes = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
        if dtype not in dtypes:
            raise ConfigError(f"dtype={dtype!r}; allowed: float32, bfloat16")
        self.config = config
        self.tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        self.path = path
        self._network = decoder_network(config)
        self._layout, self._copies = local_layout(config, tensor, copies), copies
        forms = local_forms(self._layout.mesh.devices.flat[0])
        self._compute = Compute(dtype=dtypes[dtype], forms=forms).for_layout(self._layout)
        self._generator = Generator(
            self._network, self._layout, self._compute, cache_dtype=cache_dtype
        )
        self.params = self._place(params)
        self._programs = {"logits": jax.jit(self._logits), "log_probs": jax.jit(self._log_probs)}

    def place_params(self, params: Any) -> Any:
        """Place parameters as ``params``, in the same dtypes; those already there are not copied.

        Raises:
          ConfigError: other names, shapes or dtypes than this model's.
        """
        check_same_model(params, self._network.shapes)
        return self._place(params)

    def _place(self, params: Any) -> Any:
        read = self._network.with_shapes(self._network.compute_shapes(self._compute.dtype))
        placed = read.place(params, self._layout)
        return self._generator.decoding_params(placed)

    @property
    def engine(self) -> Engine:
        """The engine for concurrent requests, see ``hjax.rollout.service``."""
        return self.engine_for(0)

    def engine_for(self, lookup: int) -> Engine:
        """The engine with this many draft tokens, see ``hjax.rollout.prompt_lookup``."""
        return self._generator.engine_for(lookup)

    def reread_weights(self) -> tuple[Any, int | None]:
        """Read the weights that are at its path now; they are not used yet.

        Returns:
          parameters as ``params``, and of a workdir the step of their checkpoint, its newest.

        Raises:
          ConfigError: no path, nothing there any more, a damaged file or checkpoint, or a model
            that differs in more than its weights.
        """
        if not self.path:
            raise ConfigError("this model was not read from a path; hjax.load_model reads one")
        found = read_config(self.path)
        for field in dataclasses.fields(found):
            new, old = (getattr(config, field.name) for config in (found, self.config))
            if field.compare and new != old:
                raise ConfigError(
                    f"{self.path}: its {field.name} is {new} now and was {old}; load it as another "
                    "model"
                )
        step = newest_checkpoint(self.path)
        return load_params(self.path, self._network, self._layout, checkpoint=step), step

    def logits(self, tokens: Any) -> jax.Array:
        """The logits of the token after each position.

        Args:
          tokens: texts, chats or lists of token ids, of any lengths; or ids int [batch, length].

        Returns:
          float32 [batch, length, vocab], NaN behind the end of a shorter row.
        """
        return self._scored("logits", tokens)

    def log_probs(self, tokens: Any) -> jax.Array:
        """The log-prob of each token given those before it.

        Args:
          tokens: texts, chats or lists of token ids, of any lengths; or ids int [batch, length].

        Returns:
          float32 [batch, length - 1], NaN behind the end of a shorter row.
        """
        return self._scored("log_probs", tokens)

    def _scored(self, program: str, tokens: Any) -> jax.Array:
        rows, lengths = encode_rows(tokens, self.tokenizer, self.config.vocab_size)
        if self.config.learned_positions and rows.shape[1] > self.config.max_length:
            raise DataError(
                f"{rows.shape[1]} tokens; this model has learned {self.config.max_length} positions"
            )
        more = -len(rows) % self._copies  # equally many per copy
        filled = np.concatenate([rows, np.zeros((more, rows.shape[1]), np.int32)])
        found = self._programs[program](self.params, filled)[: len(rows)]
        if not lengths.size or lengths.min() == rows.shape[1]:
            return found
        # Attention is causal: padding behind the end changes nothing before it.
        beyond = np.arange(rows.shape[1])[None] >= lengths[:, None]
        beyond = beyond[:, rows.shape[1] - found.shape[1] :]
        return jnp.where(beyond.reshape(beyond.shape + (1,) * (found.ndim - 2)), jnp.nan, found)

    @takes_options
    def generate(
        self,
        prompts: Sequence[Any],
        max_new_tokens: int = 64,
        temperature: float = 1.0,
        seed: int = 0,
        *,
        stop: Sequence[int | str] | str = (),
        constraint: Constraint | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Sample one response per prompt.

        Args:
          prompts: strings, chats (lists of messages, rendered by the template), or lists of token
            ids used as given.
          max_new_tokens: length limit of a response, in tokens.
          temperature: 0 is greedy; its log-probs are untempered.
          seed: a prompt's draws follow from it and the prompt's index in the list.
          stop: token ids, and strings, that end a response, besides the model's own; the response
            ends with them.
          constraint: that each response's text must match; a response cut at its length is a prefix
            of a match.
          **options: of ``hjax.rollout.sampling_params.OPTIONS`` (docs/sampling.md), off by default:
            ``top_k``, sample among the k likeliest tokens, 0: all; ``top_p``, sample among the
            likeliest tokens of this total probability; ``min_p``, ``repetition_penalty``,
            ``presence_penalty``, ``frequency_penalty``, ``min_tokens``; ``logit_bias``, a dict of
            biases by token id.

        Raises:
          ConfigError: text without a tokenizer, an empty prompt, ids outside the vocabulary, more
            tokens than the model has positions, a constraint that cannot be met, or an option out
            of its range.
          RunError: a response that no token may continue though it does not match.
        """
        if isinstance(prompts, str):
            raise ConfigError("prompts is one string; give a list of prompts")
        stops, sampling = self._stops_and_sampling("generate", stop, options, temperature)
        rows = self._encode_prompts(prompts, max_new_tokens)
        if not rows:
            return []
        if constraint is not None:
            requests = [
                Request(tuple(row), max_new_tokens, sampling, seed, i, constraint)
                for i, row in enumerate(rows)
            ]
            found = self._constrained(requests)
        else:
            found = self._generate_batch(rows, GenerationConfig(max_new_tokens, 1, sampling), seed)
        return [self._with_text(row, stops, one) for row, one in zip(rows, found)]

    def _generate_batch(
        self, rows: list[list[int]], config: GenerationConfig, seed: int
    ) -> Iterator[Completion]:
        """Responses without their texts."""
        length = bucket_length(max(map(len, rows)), self.config.max_length - config.max_new_tokens)
        filled = [*rows, *[rows[-1]] * (-len(rows) % self._copies)]  # as many for each copy
        tokens, mask, _ = uncached_tokens(filled, [CachedPrefix()] * len(filled), length, 0)
        numbers = np.arange(len(filled), dtype=np.int32)
        rollout = self._generator.generate(self.params, tokens, mask, numbers, config, seed=seed)
        names = "response_mask", "responses", "logprobs", "truncated"
        for there, drawn, logprobs, cut in zip(*(np.asarray(rollout[name]) for name in names)):
            reason = "length" if cut else "stop"
            yield Completion(drawn[there].tolist(), None, logprobs[there].tolist(), reason)

    def _stops_and_sampling(
        self, function: str, stop: Any, options: dict[str, Any], temperature: float
    ) -> tuple[StopConditions, SamplingParams]:
        """The stop conditions and sampling options, from the arguments of ``function``."""
        unknown = {name: value for name, value in options.items() if name not in OPTIONS}
        refuse_arguments(function, unknown)
        stops = StopConditions(stop, self.tokenizer, options.get("min_tokens", 0))
        ends = *self.eos_ids, *stops.ids
        sampling = SamplingParams(temperature=temperature, **options, stop=ends)
        sampling.check_vocabulary(self.config.vocab_size)
        return stops, sampling

    def _with_text(self, prompt: list[int], stops: StopConditions, found: Completion) -> Completion:
        """A response with its text, cut at the first stop string."""
        if self.tokenizer is None:
            return found
        cut = stops.cut(self.tokenizer, prompt, found.tokens)
        if cut is None:
            text = self.tokenizer.decode_response(prompt, found.tokens)
            return dataclasses.replace(found, text=text)
        tokens, text = cut
        return Completion(tokens, text, found.logprobs[: len(tokens)], "stop")

    @takes_options
    def stream(
        self,
        prompt: Any,
        max_new_tokens: int = 64,
        temperature: float = 1.0,
        seed: int = 0,
        *,
        stop: Sequence[int | str] | str = (),
        constraint: Constraint | None = None,
        **options: Any,
    ) -> Iterator[Completion]:
        """The response that ``generate`` gives to one prompt, streamed as it is drawn.

        Keys and values of the conversation are kept (prefix cache): a prompt that continues an
        earlier one and its response is prefilled from there.

        Args:
          prompt: a string, a chat, or token ids used as given.
          max_new_tokens, temperature, seed, stop, constraint, **options: as in ``generate``.

        Yields:
          chunks: the new ``tokens``, ``text`` and ``logprobs``; ``finish_reason`` is empty but in
            the last. Text is held back until its characters are whole and it cannot be the
            beginning of a stop string.

        Raises:
          ConfigError, RunError: as ``generate``.
        """
        stops, sampling = self._stops_and_sampling("stream", stop, options, temperature)
        (row,) = self._encode_prompts([prompt], max_new_tokens)
        request = Request(tuple(row), max_new_tokens, sampling, seed, 0, constraint)
        text = (
            None
            if self.tokenizer is None
            else StopWatcher(stops, ResponseText(self.tokenizer, row))
        )
        arrived: queue.SimpleQueue[ResponseChunk] = queue.SimpleQueue()
        handle = self._stream_service.submit(request, arrived.put)
        try:
            finish = ""
            while not finish:
                piece = arrived.get()
                finish = piece.finish
                if finish not in ("", "stop", "length"):
                    raise RunError(f"the response: {finish}")
                said, tokens = None, list(piece.tokens)
                if text is not None:
                    before = len(text.text)
                    if (count := text.take(tokens)) is not None:
                        tokens, finish = tokens[:count], "stop"
                    if finish:
                        text.close()
                    said = text.text[before:]
                yield Completion(tokens, said, list(piece.logprobs[: len(tokens)]), finish)
        finally:
            handle.cancel()

    @functools.cached_property
    def _stream_service(self) -> GenerationService:
        """The service of ``stream``."""
        kept = 0 if why_no_blocks(self.engine) else self.config.max_length
        return GenerationService(self, slots=1, prefix_tokens=kept)

    def _encode_prompts(self, prompts: Sequence[Any], max_new_tokens: int) -> list[list[int]]:
        """Prompts as token ids; ConfigError for what cannot be answered."""
        if not isinstance(max_new_tokens, int | np.integer) or max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens={max_new_tokens}: a whole number of 1 or more")
        tokenizer, size = self.tokenizer, self.config.vocab_size
        rows = [encode_prompt(p, f"prompt {i}", tokenizer, size) for i, p in enumerate(prompts)]
        longest = max(map(len, rows), default=0)
        room = self.config.max_length - max_new_tokens
        if rows and longest > room:
            raise ConfigError(
                f"a prompt of {longest} and max_new_tokens={max_new_tokens} exceed the model's "
                f"{self.config.max_length} positions; "
                + (f"shorten the prompt to {room} tokens" if room > 0 else "lower max_new_tokens")
            )
        return rows

    def _constrained(self, requests: list[Request]) -> Iterator[Completion]:
        """Responses under a constraint, token by token, by a service of their own."""
        found: list[list[ResponseChunk]] = [[] for _ in requests]
        service = GenerationService(
            self, slots=len(requests), max_queue=len(requests), prefix_tokens=0
        )
        try:
            for request, pieces in zip(requests, found):
                service.submit(request, pieces.append)
        except ConfigError:
            service.close(seconds=0)
            raise
        service.close(seconds=math.inf)  # when all have ended
        for request, pieces in zip(requests, found):
            finish = pieces[-1].finish
            if finish not in ("stop", "length"):
                raise RunError(f"response {request.choice}: {finish}")
            tokens = [token for piece in pieces for token in piece.tokens]
            logprobs = [logprob for piece in pieces for logprob in piece.logprobs]
            yield Completion(tokens, None, logprobs, finish)

    def _hidden(self, params: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        model = self._network.bind(params)
        return model, sequence_states(model, tokens, jnp.ones_like(tokens, bool), self._compute)

    def _logits(self, params: Any, tokens: jax.Array) -> jax.Array:
        model, hidden = self._hidden(params, tokens)
        return model.logits(hidden)

    def _log_probs(self, params: Any, tokens: jax.Array) -> jax.Array:
        model, hidden = self._hidden(params, tokens)
        score = functools.partial(token_log_probs, with_entropy=False)
        return score(model, hidden[:, :-1], tokens[:, 1:])[0]


def local_layout(config: ModelConfig, tensor: int, copies: int = 1) -> Layout:
    """The generate layout of copies of a model; each copy's heads, MLPs and vocabulary are split
    over ``tensor`` devices.

    Raises:
      ConfigError: there are not so many devices here, or they do not divide the model.
    """
    axes = {"tensor": tensor, "copies": copies}
    check_local_devices(axes)
    sizes = {"data": copies, "tensor": tensor}
    devices = jax.local_devices()[: tensor * copies]
    layout = make_layouts(devices, sizes, {"tensor": tensor}).generate
    return fit_layout(layout, config.dimensions, f"tensor={tensor}")


def check_local_devices(axes: Mapping[str, int]) -> None:
    """Raise ConfigError if this process has fewer devices than the product of these sizes."""
    have, before = len(jax.local_devices()), 1
    for i, (name, size) in enumerate(axes.items()):
        if not 1 <= size <= have // before:
            each = f"by {before} each of the {have}" if i else "the"
            raise ConfigError(
                f"{name}={size}: 1 to {have // before}, {each} devices of this process"
            )
        before *= size


def load_model(
    path: StrPath,
    dtype: str = "float32",
    tensor: int = 1,
    copies: int = 1,
    cache_dtype: str = AUTO,
    family: str = "",
) -> LanguageModel:
    """Load a model.

    Args:
      path: a Hugging Face directory (with or without a tokenizer), a Hugging Face model name
        (``owner/name``, cached or downloaded), or an hjax workdir (its newest checkpoint).
      dtype: ``float32`` or ``bfloat16``, of compute and of the matrices that are kept.
      tensor: local devices over which heads, MLPs and vocabulary are split, the first ones.
      copies: of the model, each on ``tensor`` devices; they share the prompts of a call.
      cache_dtype: of the KV cache while generating: ``auto``, that of compute; or ``int8``.
      family: one in a file of yours that reads the model, ``path.py:Class`` (docs/families.md).

    Raises:
      ConfigError: nothing there, a model this version does not support, or a number of devices that
        does not exist or does not divide the model.
    """
    if family:
        load_family(family, "family")
    directory = model_directory(path)
    config = read_config(path)
    layout = local_layout(config, tensor, copies)
    params = load_params(path, decoder_network(config), layout)
    tokenizer = None
    if holds_tokenizer(directory):
        tokenizer = Tokenizer.load(directory)
        tokenizer.check_fits(config.vocab_size, directory)
    eos = tokenizer.eos_ids if tokenizer is not None else read_eos_ids(directory)
    eos = [i for i in eos if i < config.vocab_size]
    return LanguageModel(
        config, params, tokenizer, dtype, eos, path,
        tensor=tensor, copies=copies, cache_dtype=cache_dtype,
    )  # fmt: skip
