"""Samplers of a training service: snapshots of its sessions, in memory or of saved states."""

import asyncio
import collections
import dataclasses
import threading
from typing import Any

from hjax.errors import ConfigError, RunError
from hjax.rollout.sampling_params import MOST_TOP
from hjax.serving.request_errors import RequestRefused
from hjax.training_service.learner import Snapshot
from hjax.training_service.request_futures import FutureResult, RequestFutures
from hjax.training_service.saved_state import read_saved, saved_lora
from hjax.training_service.shared_base import SharedBase
from hjax.training_service.snapshot_sampler import SampleResult
from hjax.training_service.state_store import StateName, StateStore
from hjax.training_service.tinker_messages import write_samples
from hjax.training_service.tinker_requests import SampleFields

# Snapshots of a session that stay in memory; those of saved states are read again.
SNAPSHOTS = 16
# Samplers of all sessions at a time; of more the least used are dropped.
_MOST_SAMPLERS = 2**14


@dataclasses.dataclass
class _Sampler:
    session: str
    base_model: str
    snapshot: Snapshot | None
    path: StateName | None = None


class TinkerSamplers:
    """The samplers of all sessions.

    Args:
      base: the model.
      store: of saved states.
      futures: of requests.
      most: responses that wait or are drawn at a time, of each kind of model.
    """

    def __init__(self, base: SharedBase, store: StateStore, futures: RequestFutures, most: int):
        self._base, self._store, self._futures, self._most = base, store, futures, most
        # By id, the last used ones last.
        self._samplers: collections.OrderedDict[str, _Sampler] = collections.OrderedDict()
        self._reading = threading.Lock()

    def ids(self, session: str) -> list[str]:
        """The samplers of a session."""
        return [i for i, sampler in self._samplers.items() if sampler.session == session]

    def drop_session(self, session: str) -> None:
        """Drop the samplers of a session."""
        for sampler_id in self.ids(session):
            del self._samplers[sampler_id]

    def about(self, sampler_id: str) -> dict[str, Any]:
        """What is known of a sampler; RequestRefused (404) if there is none."""
        sampler = self._samplers.get(sampler_id)
        if sampler is None:
            raise RequestRefused(f"there is no sampler {sampler_id[:200]}", 404)
        found = {"sampler_id": sampler_id, "base_model": sampler.base_model}
        return found if sampler.path is None else found | {"model_path": str(sampler.path)}

    def add(self, sampler_id: str, session: str, base_model: str, snapshot: Snapshot) -> None:
        """Add a sampler of a snapshot."""
        self._add(sampler_id, _Sampler(session, base_model, snapshot))

    def add_base(self, sampler_id: str, session: str, base_model: str) -> None:
        """Add a sampler of the base model."""
        snapshot = Snapshot(self._base.programs(None), self._base.frozen)
        self.add(sampler_id, session, base_model, snapshot)

    async def add_saved(self, sampler_id: str, session: str, path: str) -> None:
        """Add a sampler of a saved state; ConfigError if there is none."""
        if sampler_id in self._samplers:
            return
        name = StateName.parse(path)
        sampler = _Sampler(session, self._store.about(name)["base_model"], None, name)
        sampler.snapshot = await asyncio.to_thread(self._read, name)
        self._add(sampler_id, sampler)

    def _add(self, sampler_id: str, sampler: _Sampler) -> None:
        if sampler_id in self._samplers:
            return
        self._samplers[sampler_id] = sampler
        if len(self._samplers) > _MOST_SAMPLERS:
            self._samplers.popitem(last=False)
        loaded = [
            each
            for each in self._samplers.values()
            if each.session == sampler.session
            and each.snapshot is not None
            and each.snapshot.learned is not self._base.frozen
        ]
        for old in loaded[:-SNAPSHOTS]:
            old.snapshot = None

    async def sample(self, request_id: str, fields: SampleFields) -> None:
        """Draw responses, and resolve a new future with them."""
        sampler = self._samplers.get(fields.sampling_session_id)
        self._futures.add(request_id, "" if sampler is None else sampler.session)
        if sampler is None:
            error = RunError(
                f"there is no sampler {fields.sampling_session_id[:200]}: its session has ended or "
                "the server has started anew; make one of a saved state (model_path)"
            )
            self._futures.resolve(request_id, FutureResult.of_error(error))
            return
        self._samplers.move_to_end(fields.sampling_session_id)
        try:
            await asyncio.to_thread(self._sample, request_id, sampler, fields)
        except Exception as error:
            self._futures.resolve(request_id, FutureResult.of_error(error))

    def _sample(self, request_id: str, sampler: _Sampler, fields: SampleFields) -> None:
        """Submit a request to the sampler of its snapshot; in a thread of its own."""
        request = fields.request(self._base.config.max_length, MOST_TOP)
        snapshot = sampler.snapshot
        if snapshot is None and sampler.path is not None:
            snapshot = sampler.snapshot = self._read(sampler.path)
        if snapshot is None:
            raise RunError(
                f"this sampler's snapshot is gone: {SNAPSHOTS} of a session stay in memory, the "
                "last used; save one under a name to keep it"
            )

        def finish(result: SampleResult | Exception) -> None:
            if isinstance(result, Exception):
                self._futures.resolve(request_id, FutureResult.of_error(result))
                return
            body = write_samples(
                result,
                top=fields.topk_sample_logprobs,
                prompt_logprobs=fields.prompt_logprobs,
                prompt_top=fields.topk_prompt_logprobs,
                last=fields.prompt_logprobs_last_n,
            )
            self._futures.resolve(request_id, FutureResult(body, protobuf=True))

        drawing = snapshot.programs.sampler()
        if drawing.waiting + request.num_samples > self._most:
            raise RunError(f"more than {self._most} responses would wait; ask for fewer at a time")
        # Of a session that has ended nothing more is begun.
        drawing.submit(snapshot.weights, request, finish, lambda: request_id in self._futures)

    def _read(self, name: StateName) -> Snapshot:
        """A saved snapshot; samplers of one state share it."""
        about = self._store.about(name)
        with self._reading:
            for other in list(self._samplers.values()):
                if other.path == name and other.snapshot is not None:
                    if other.snapshot.label == about["saved_at"]:
                        return other.snapshot
            programs = self._base.programs(saved_lora(about))
            folder = self._store.folder(name)
            learned, _ = read_saved(folder, programs.network, programs.abstract, optimizer=False)
            return Snapshot(programs, learned, label=about["saved_at"])


def check_samples(fields: SampleFields, most: int) -> dict[str, Any]:
    """The answer to a request for samples: its future's id, and one of each response.

    Raises:
      ConfigError: it names no sampler or number, or asks for more responses than ``most``.
    """
    if not fields.sampling_session_id or fields.seq_id is None:
        raise ConfigError("asample needs sampling_session_id and seq_id")
    request_id = f"{fields.sampling_session_id}:{fields.seq_id}"
    if fields.num_samples > most:
        raise ConfigError(f"num_samples={fields.num_samples}: at most {most}")
    numbers = range(max(fields.num_samples, 1))
    return {
        "request_id": request_id,
        "sample_sequence_ids": [f"{request_id}:{i}" for i in numbers],
    }
