"""The JSON requests of the Tinker API, as SDK 0.38 sends them."""

from __future__ import annotations

import json
from typing import Annotated, Any

import pydantic
from pydantic import AfterValidator, Field

from hjax.errors import ConfigError
from hjax.serving.fields import RequestFields
from hjax.training_service.snapshot_sampler import SampleRequest

_SEQ = 2**53
# Characters of an id, a name or a path: each is kept as long as its session or result.
ID_LENGTH = 256
# Characters of a client's metadata, as JSON.
_METADATA_LENGTH = 2**14
# Stop strings and tokens of one request.
_STOPS = 128
# Log-probs of top tokens that one request may ask for, over all its responses.
_TOP_LOG_PROBS = 2**22


def _short(metadata: dict[str, Any]) -> dict[str, Any]:
    try:
        length = len(json.dumps(metadata))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if length > _METADATA_LENGTH:
        raise ValueError(f"{length} characters of JSON; at most {_METADATA_LENGTH}")
    return metadata


Id = Annotated[str, Field(max_length=ID_LENGTH)]
Metadata = Annotated[dict[str, Any], AfterValidator(_short)]


class TinkerFields(RequestFields):
    """An object of a request. Every one may name its ``type``."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid", protected_namespaces=())
    type: Id = ""


class ConfigFields(TinkerFields):
    sdk_version: Id


class SessionFields(TinkerFields):
    sdk_version: Id
    tags: list[str] = []
    user_metadata: Metadata = {}
    project_id: Id = ""
    display_name: Id = ""


class HeartbeatFields(TinkerFields):
    session_id: Id


class LoraFields(TinkerFields):
    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def targets(self) -> tuple[str, ...]:
        """The matrices with adapters; ConfigError if there are none."""
        attention = ("q", "k", "v", "o") if self.train_attn else ()
        mlp = ("gate", "up", "down") if self.train_mlp else ()
        if not attention + mlp:
            raise ConfigError(
                "lora_config: train_attn and train_mlp are both false; adapters are of layers alone"
            )
        return attention + mlp


class OptimizerFields(TinkerFields):
    type: Id = "adamw"
    version: int = 1

    def check(self) -> None:
        """Raise ConfigError for another optimizer than AdamW."""
        if self.type != "adamw":
            raise ConfigError(f"optimizer {self.type[:50]!r} is not supported: adamw alone")


class CreateModelFields(TinkerFields):
    session_id: Id
    model_seq_id: int = Field(ge=0, lt=_SEQ)
    base_model: Id
    user_metadata: Metadata = {}
    lora_config: LoraFields | None = None
    optimizer_config: OptimizerFields = OptimizerFields()


class LoadFields(TinkerFields):
    path: Id
    optimizer: bool
    model_id: Id = ""
    seq_id: int | None = Field(None, ge=0, lt=_SEQ)
    session_id: Id = ""
    model_seq_id: int | None = Field(None, ge=0, lt=_SEQ)
    base_model: Id = ""
    user_metadata: Metadata = {}
    optimizer_config: OptimizerFields = OptimizerFields()
    weights_access_token: Id = ""


class ModelFields(TinkerFields):
    model_id: Id


class AdamFields(TinkerFields):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimFields(TinkerFields):
    model_id: Id
    seq_id: int = Field(ge=0, lt=_SEQ)
    adam_params: AdamFields | None = None
    optimizer_params: dict[str, Any] | None = None

    def settings(self) -> dict[str, float]:
        """Of ``AdamParams``; ConfigError for another optimizer."""
        if self.adam_params is None:
            kind = str((self.optimizer_params or {}).get("type", "none"))[:50]
            raise ConfigError(f"optimizer {kind!r} is not supported: adamw alone (adam_params)")
        return self.adam_params.model_dump(exclude={"type"})


class SaveFields(TinkerFields):
    model_id: Id
    seq_id: int = Field(ge=0, lt=_SEQ)
    path: Id = ""
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Annotated[dict[str, str], AfterValidator(_short)] = {}


class SaveForSamplerFields(TinkerFields):
    model_id: Id
    seq_id: int = Field(ge=0, lt=_SEQ)
    path: Id = ""
    sampling_session_seq_id: int | None = Field(None, ge=0, lt=_SEQ)
    kind: Id = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: Annotated[dict[str, str], AfterValidator(_short)] = {}


class SamplingSessionFields(TinkerFields):
    session_id: Id
    sampling_session_seq_id: int = Field(ge=0, lt=_SEQ)
    base_model: Id = ""
    model_path: Id = ""


class ChunkFields(RequestFields):
    type: Id = "encoded_text"
    tokens: list[int] = []
    # Of images and others, which are refused by their type.
    data: Any = None
    format: Any = None
    location: Any = None
    expected_tokens: Any = None
    dimensions: Any = None


class PromptFields(TinkerFields):
    chunks: list[ChunkFields]

    def tokens(self) -> tuple[int, ...]:
        """The prompt's token ids; ConfigError for images."""
        for chunk in self.chunks:
            if chunk.type != "encoded_text":
                raise ConfigError(
                    f"prompt: chunks of type {chunk.type[:50]!r} are not supported: text alone"
                )
        return tuple(token for chunk in self.chunks for token in chunk.tokens)


class SamplingFields(TinkerFields):
    max_tokens: int | None = None
    seed: int | None = None
    stop: Any = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0

    def stops(self) -> tuple[int | str, ...] | None:
        """Stop strings and tokens; None: the model's own end."""
        if self.stop is None:
            return None
        values = [self.stop] if isinstance(self.stop, str | int) else self.stop
        fits = isinstance(values, list) and all(
            isinstance(x, str | int) and not isinstance(x, bool) for x in values
        )
        if not fits:
            raise ConfigError("stop: a string, or a list of strings or token ids")
        if len(values) > _STOPS:
            raise ConfigError(f"{len(values)} stop strings and tokens: at most {_STOPS}")
        return tuple(values)


class SampleFields(TinkerFields):
    prompt: PromptFields
    sampling_params: SamplingFields
    num_samples: int = 1
    base_model: Id = ""
    model_path: Id = ""
    sampling_session_id: Id = ""
    seq_id: int | None = Field(None, ge=0, lt=2**63)
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = Field(0, ge=0)
    topk_sample_logprobs: int = Field(0, ge=0)
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool = False

    def request(self, longest: int, most_top: int) -> SampleRequest:
        """What the sampler is asked for.

        Args:
          longest: tokens of a prompt at most.
          most_top: tokens that can be reported of a position.

        Raises:
          ConfigError: what is not supported, by name.
        """
        for name in ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info"):
            if getattr(self, name):
                raise ConfigError(f"{name} is not supported here; leave it out")
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
            if getattr(self, name) > most_top:
                raise ConfigError(f"{name}={getattr(self, name)}: at most {most_top}")
        prompt, params = self.prompt.tokens(), self.sampling_params
        if len(prompt) > longest:
            raise ConfigError(f"a prompt of {len(prompt)} tokens: at most {longest}")
        drawn = longest if params.max_tokens is None else min(params.max_tokens, longest)
        count = self.num_samples * drawn * self.topk_sample_logprobs
        if count > _TOP_LOG_PROBS:
            raise ConfigError(
                f"topk_sample_logprobs={self.topk_sample_logprobs}: {count} log-probs of all "
                f"responses; at most {_TOP_LOG_PROBS}, so give a smaller max_tokens or num_samples"
            )
        last = self.prompt_logprobs_last_n
        if last is not None and not 1 <= last < max(len(prompt), 2):
            raise ConfigError(
                f"prompt_logprobs_last_n={last}: from 1 to the prompt's {len(prompt)} tokens less 1"
            )
        return SampleRequest(
            prompt,
            self.num_samples,
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            stop=params.stops(),
            seed=params.seed,
            prompt_logprobs=self.prompt_logprobs or self.topk_prompt_logprobs > 0,
            top=self.topk_sample_logprobs,
        )


class RetrieveFields(TinkerFields):
    request_id: Id
    allow_metadata_only: bool = False
    model_id: Id = ""


class PathFields(TinkerFields):
    tinker_path: Id
    weights_access_token: Id = ""


class TtlFields(TinkerFields):
    ttl_seconds: int | None = None
