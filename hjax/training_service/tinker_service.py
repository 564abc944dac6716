"""The training service: sessions, models, samplers and saved states behind the Tinker API."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import math
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from hjax.errors import ConfigError, RunError
from hjax.serving.request_errors import RequestRefused
from hjax.training_service.learner import Learner
from hjax.training_service.request_futures import FutureResult, RequestFutures
from hjax.training_service.shared_base import SharedBase
from hjax.training_service.state_store import (
    SAMPLER_WEIGHTS,
    WEIGHTS,
    StateName,
    StateStore,
    expiry,
)
from hjax.training_service.tinker_messages import (
    ForwardBackwardRequest,
    read_data,
    write_output,
)
from hjax.training_service.tinker_requests import (
    CreateModelFields,
    LoadFields,
    OptimFields,
    SamplingSessionFields,
    SaveFields,
    SaveForSamplerFields,
)
from hjax.training_service.tinker_samplers import TinkerSamplers
from hjax.training_service.training_queue import TrainingQueue

LORA_ALPHA = 32.0
# The name that stands for whatever model is served.
ANY = "any"
# Models that are remembered once they are gone.
_REMEMBERED = 1000


@dataclasses.dataclass(frozen=True)
class TinkerLimits:
    """Limits of a training service.

    Attributes:
      session_seconds: without a heartbeat after which a session ends, with its models and samplers.
      sessions: at a time.
      models: at a time.
      rank: of adapters at most.
      futures: requests that wait for their results at a time.
      futures_bytes: of gradients' requests that wait, and of all results that are kept.
      samples: responses that wait or are drawn at a time, over all samplers.
    """

    session_seconds: float = 600.0
    sessions: int = 1024
    models: int = 64
    rank: int = 256
    futures: int = 4096
    futures_bytes: int = 2**30
    samples: int = 16384


@dataclasses.dataclass
class _Session:
    seen: float
    metadata: Mapping[str, Any]
    name: str
    models: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass
class LoadedModel:
    """A model that a session trains.

    Attributes:
      learner: the model.
      session: that it belongs to.
      base_model: as the client named it.
      train_mlp, train_attn: which matrices have adapters.
      metadata: of the client.
      seen: time of its last request, seconds since 1970.
    """

    learner: Learner
    session: str
    base_model: str
    train_mlp: bool
    train_attn: bool
    metadata: Mapping[str, Any]
    seen: float = dataclasses.field(default_factory=time.time)


class TinkerService:
    """What the Tinker API's routes call; made and called on an event loop.

    Args:
      base: the model that everything is trained over.
      names: by which requests may name it; ``any`` among them: by any name.
      store: of saved states.
      limits: of the service.
      kept: whether the store outlives the server.

    Attributes:
      futures: of its requests.
      samplers: of its sessions.
      models: those that are loaded, by id.
    """

    def __init__(
        self,
        base: SharedBase,
        names: tuple[str, ...],
        store: StateStore,
        limits: TinkerLimits = TinkerLimits(),
        kept: bool = True,
    ):
        self.base, self.names, self.store, self.limits, self.kept = base, names, store, limits, kept
        self.futures = RequestFutures(
            asyncio.get_running_loop(), limits.futures, limits.futures_bytes
        )
        self._queue = TrainingQueue()
        self._sessions: dict[str, _Session] = {}
        self.models: dict[str, LoadedModel] = {}
        self.samplers = TinkerSamplers(base, store, self.futures, limits.samples)
        # Sessions of models, those that are being made included.
        self._opened: dict[str, str] = {}
        self._gone: collections.OrderedDict[str, str] = collections.OrderedDict()

    # Sessions

    def create_session(self, metadata: Mapping[str, Any], name: str) -> str:
        """Open a session; returns its id. RequestRefused (429) if too many are open."""
        if len(self._sessions) >= self.limits.sessions:
            raise RequestRefused(
                f"{self.limits.sessions} sessions are open, as many as may", 429, retry_after=10
            )
        session = uuid.uuid4().hex
        self._sessions[session] = _Session(time.monotonic(), metadata, name)
        return session

    def session(self, session_id: str) -> _Session:
        """A session that is open, which has been heard of now; RequestRefused (410) if it is not.

        The SDK stops at that status.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise RequestRefused(
                f"session {session_id[:80]!r} is not open: it was finished, fell silent, or "
                "the server has started anew",
                410,
            )
        session.seen = time.monotonic()
        return session

    def sessions(self) -> list[str]:
        """Ids of the sessions that are open, the oldest first."""
        return list(self._sessions)

    def about_session(self, session_id: str) -> dict[str, Any]:
        """What is known of a session; RequestRefused (404) if it is not open."""
        session = self._sessions.get(session_id)
        if session is None:
            raise RequestRefused(f"session {session_id[:80]!r} is not open", 404)
        return {
            "training_run_ids": sorted(session.models),
            "sampler_ids": self.samplers.ids(session_id),
            "display_name": session.name or None,
            "user_metadata": session.metadata or None,
        }

    def end_session(self, session_id: str, why: str) -> None:
        """Drop a session's models, samplers and results."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        for model_id in session.models:
            self._queue.drop(model_id)
            self.models.pop(model_id, None)
            self._opened.pop(model_id, None)
            self._gone[model_id] = why
        while len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)
        self.samplers.drop_session(session_id)
        self.futures.drop_session(session_id)

    def sweep(self) -> None:
        """End silent sessions, and drop old results and expired states; called now and then."""
        late = time.monotonic() - self.limits.session_seconds
        for session_id in [i for i, session in self._sessions.items() if session.seen < late]:
            self.end_session(
                session_id, f"its session sent no heartbeat for {self.limits.session_seconds:g} s"
            )
        self.futures.drop_old()

    def close(self, seconds: float) -> None:
        """End everything; what runs has so long."""
        self._queue.close(seconds)
        self.base.close()

    # Models

    def create_model(self, fields: CreateModelFields) -> str:
        """Make a model with new adapters; returns the future's id."""
        model_id = f"{fields.session_id}:train:{fields.model_seq_id}"

        def create() -> FutureResult:
            fields.optimizer_config.check()
            self.check_name(fields.base_model)
            lora = fields.lora_config
            if lora is None:
                learner = Learner(self.base, 0)
            else:
                if not 1 <= lora.rank <= self.limits.rank:
                    raise ConfigError(f"lora_config: rank={lora.rank}: 1 to {self.limits.rank}")
                learner = Learner(
                    self.base,
                    lora.rank,
                    lora_alpha=LORA_ALPHA,
                    lora_targets=lora.targets(),
                    seed=(lora.seed or 0) % 2**32,
                )
            self._add(
                model_id,
                LoadedModel(
                    learner,
                    fields.session_id,
                    fields.base_model,
                    train_mlp=lora is None or lora.train_mlp,
                    train_attn=lora is None or lora.train_attn,
                    metadata=fields.user_metadata,
                ),
            )
            return FutureResult.of_json({"type": "create_model", "model_id": model_id})

        return self._open(model_id, fields.session_id, create)

    def load_model(self, fields: LoadFields) -> str:
        """Make a model from a saved state; returns the future's id."""
        model_id = f"{fields.session_id}:train:{fields.model_seq_id}"

        def load() -> FutureResult:
            fields.optimizer_config.check()
            name, about = self._state_to_train(fields)
            if fields.base_model:
                self.check_name(fields.base_model)
            folder = self.store.folder(name)
            learner = Learner.from_saved(self.base, folder, optimizer=fields.optimizer)
            self._add(
                model_id,
                LoadedModel(
                    learner,
                    fields.session_id,
                    fields.base_model or about["base_model"],
                    train_mlp=about["train_mlp"],
                    train_attn=about["train_attn"],
                    metadata=fields.user_metadata,
                ),
            )
            return FutureResult.of_json(
                {"type": "load_weights", "path": fields.path, "model_id": model_id}
            )

        return self._open(model_id, fields.session_id, load)

    def load_into(self, fields: LoadFields) -> str:
        """Load a saved state into a model that there is; returns the future's id."""

        def load(model: LoadedModel) -> FutureResult:
            name, _ = self._state_to_train(fields)
            model.learner.load(self.store.folder(name), optimizer=fields.optimizer)
            return FutureResult.of_json({"type": "load_weights", "path": fields.path})

        return self._submit(fields.model_id, fields.seq_id or 0, load)

    def info(self, model_id: str) -> dict[str, Any]:
        """What ``get_info`` answers; RequestRefused (404) if there is no such model."""
        model = self.models.get(model_id)
        if model is None:
            raise RequestRefused(self._why_gone(model_id), 404)
        lora = model.learner.lora
        return {
            "type": "get_info",
            "model_id": model_id,
            "model_name": model.base_model,
            "is_lora": lora is not None,
            "lora_rank": None if lora is None else lora.rank,
            "model_data": {"model_name": model.base_model, "tokenizer_id": self.base.path},
        }

    def forward_backward(self, request: ForwardBackwardRequest) -> str:
        """Compute a loss, and its gradients if they are wanted; returns the future's id."""

        def compute(model: LoadedModel) -> FutureResult:
            run = model.learner.forward if request.forward_only else model.learner.forward_backward
            output = run(read_data(request.data), request.loss, request.config)
            return FutureResult(write_output(output), protobuf=True)

        return self._submit(
            request.model_id, request.seq_id, compute, size=sum(map(len, request.data))
        )

    def optim_step(self, fields: OptimFields) -> str:
        """Take a step; returns the future's id."""

        def step(model: LoadedModel) -> FutureResult:
            metrics = model.learner.optim_step(**fields.settings())
            # JSON has no infinity; a step on such a gradient says "skipped".
            finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
            return FutureResult.of_json({"metrics": finite})

        return self._submit(fields.model_id, fields.seq_id, step)

    def save_weights(self, fields: SaveFields) -> str:
        """Save a state to train on; returns the future's id."""

        def save(model: LoadedModel) -> FutureResult:
            name = StateName(fields.model_id, WEIGHTS, fields.path or f"{fields.seq_id:06d}")
            if not fields.overwrite and self.store.folder(name).exists():
                raise ConfigError(f"{name} exists; overwrite=True replaces it")
            self._save(model, name, fields, optimizer=True)
            return FutureResult.of_json({"type": "save_weights", "path": str(name)})

        return self._submit(fields.model_id, fields.seq_id, save)

    def save_for_sampler(self, fields: SaveForSamplerFields) -> str:
        """Save a named snapshot, or make a sampler of one in memory; returns the future's id."""

        def save(model: LoadedModel) -> FutureResult:
            made: dict[str, Any] = {"type": "save_weights_for_sampler"}
            if fields.path or fields.sampling_session_seq_id is None:
                stem = fields.path or f"{fields.seq_id:06d}"
                name = StateName(fields.model_id, SAMPLER_WEIGHTS, stem)
                self._save(model, name, fields, optimizer=False)
                return FutureResult.of_json(made | {"path": str(name)})
            sampler_id = f"{model.session}:sample:{fields.sampling_session_seq_id}"
            snapshot = model.learner.snapshot()

            def add() -> None:
                if model.session in self._sessions:
                    self.samplers.add(sampler_id, model.session, model.base_model, snapshot)

            self.futures.call(add)
            return FutureResult.of_json(made | {"sampling_session_id": sampler_id})

        return self._submit(fields.model_id, fields.seq_id, save)

    def _save(self, model: LoadedModel, name: StateName, fields: Any, *, optimizer: bool) -> None:
        about = {
            "path": str(name),
            "base_model": model.base_model,
            "train_mlp": model.train_mlp,
            "train_attn": model.train_attn,
            "saved_at": time.time(),
            "expires_at": expiry(fields.ttl_seconds),
            "user_metadata": fields.user_metadata,
            "model_metadata": model.metadata,
        }
        model.learner.save(self.store.folder(name), optimizer=optimizer, about=about)

    def _state_to_train(self, fields: LoadFields) -> tuple[StateName, dict[str, Any]]:
        name = StateName.parse(fields.path)
        about = self.store.about(name)
        if fields.optimizer and not about["optimizer"]:
            raise ConfigError(f"{name} has no optimizer state; load it without, or give one of "
                              f"{WEIGHTS}")  # fmt: skip
        return name, about

    def check_name(self, name: str) -> None:
        """Raise ConfigError unless the served model goes by this name."""
        if name not in self.names and ANY not in self.names:
            raise ConfigError(
                f"base_model={name[:200]!r}: this server has {', '.join(self.names)}; start it "
                "with --name=NAME for another name, --name=any for all"
            )

    # Called by the training thread

    def _add(self, model_id: str, model: LoadedModel) -> None:
        self.models[model_id] = model
        if model_id not in self._opened:  # its session has ended meanwhile
            self.models.pop(model_id, None)

    # Requests in order

    def _open(self, model_id: str, session_id: str, work: Callable[[], FutureResult]) -> str:
        """A future of a model that is being made."""
        request_id = f"{model_id}:create"
        if request_id in self.futures:
            return request_id
        self.check_room()
        self.futures.add(request_id, session_id)
        session = self._sessions.get(session_id)
        if session is None:
            self._fail(request_id, RunError(f"session {session_id[:80]!r} is not open"))
            return request_id
        if len(self._opened) >= self.limits.models:
            self._fail(
                request_id, RunError(f"{self.limits.models} models are open, as many as may")
            )
            return request_id
        session.models.add(model_id)
        self._opened[model_id] = session_id

        def run() -> None:
            try:
                result = work()
            except Exception as error:
                self.futures.call(lambda: self._opened.pop(model_id, None))
                result = self._failure(error)
            self.futures.resolve(request_id, result)

        self._queue.submit(model_id, run)
        return request_id

    def _submit(
        self,
        model_id: str,
        seq_id: int,
        work: Callable[[LoadedModel], FutureResult],
        size: int = 0,
    ) -> str:
        """A future of a model's request of so many bytes, which runs after those that came before
        it."""
        request_id = f"{model_id}:{seq_id}"
        if request_id in self.futures:
            return request_id
        self.check_room()
        session_id = self._opened.get(model_id)
        self.futures.add(request_id, session_id or "", size)
        if session_id is None:
            self._fail(request_id, RunError(self._why_gone(model_id)))
            return request_id
        self.session(session_id)

        def run() -> None:
            model = self.models.get(model_id)
            try:
                if model is None:
                    raise RunError(self._why_gone(model_id))
                model.seen = time.time()
                result = work(model)
            except Exception as error:
                result = self._failure(error, model_id)
            self.futures.resolve(request_id, result)

        self._queue.submit(model_id, run)
        return request_id

    def refuse(self, request_id: str, error: Exception) -> str:
        """A future that has failed already, for a request that may not be made."""
        if request_id not in self.futures:
            self.check_room()
            self.futures.add(request_id, "")
            self._fail(request_id, error)
        return request_id

    def _fail(self, request_id: str, error: Exception) -> None:
        self.futures.resolve(request_id, FutureResult.of_error(error))

    def check_room(self) -> None:
        """Raise RequestRefused (429) while too many requests wait."""
        if self.futures.full:
            raise RequestRefused("too many requests wait; try again later", 429, retry_after=2)

    def lost_result(self, request_id: str) -> RunError:
        """Why a result is not here, and the last saved state of the model that was to give it."""
        last = self.store.last_saved(request_id.rpartition(":")[0])
        return RunError(
            f"the result of {request_id[:200]} is not here: the server has started anew, the "
            "session has ended, or the result was dropped"
            + (f"; the model's last saved state is {last}" if last else "")
        )

    def _why_gone(self, model_id: str) -> str:
        why = self._gone.get(model_id, "this server has no such model; it may have started anew")
        last = self.store.last_saved(model_id)
        after = f"its last saved state is {last}" if last else "it has no saved state"
        return f"model {model_id[:200]} is not loaded: {why}; {after}"

    def _failure(self, error: Exception, model_id: str = "") -> FutureResult:
        """The result of a request that failed; the server's own errors are logged."""
        if not isinstance(error, ConfigError | RunError):
            traceback.print_exception(error)
            error = RunError(f"{type(error).__name__}: {error}")
        last = self.store.last_saved(model_id) if model_id and isinstance(error, RunError) else ""
        if last and last not in str(error):
            error = RunError(f"{error}; its last saved state is {last}")
        return FutureResult.of_error(error)

    async def create_sampler(self, fields: SamplingSessionFields) -> str:
        """Make a sampler of the base model or of a saved state; returns its id.

        Raises:
          ConfigError: another model, or no such state.
          RequestRefused: the session is not open.
        """
        session = fields.session_id
        self.session(session)
        sampler_id = f"{session}:sample:{fields.sampling_session_seq_id}"
        if fields.base_model or not fields.model_path:
            self.check_name(fields.base_model)
        if fields.model_path:
            await self.samplers.add_saved(sampler_id, session, fields.model_path)
        else:
            self.samplers.add_base(sampler_id, session, fields.base_model)
        return sampler_id
