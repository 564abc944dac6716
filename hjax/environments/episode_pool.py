"""Episodes in processes of their own: many at a time, each call under a deadline.

A process that is late or dies is killed and replaced, and its episodes are played again from their
seed and actions, which nobody sees. Only the episode whose call is late, or ends a second process
too, is lost.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import logging
import pickle
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from hjax.environments.adapted_environment import ADAPTERS
from hjax.environments.environment import Environment
from hjax.environments.episode_server import load_environment, takes_sandbox
from hjax.errors import ConfigError, one_line
from hjax.isolated_process import DeadlineExceeded, IsolatedProcess, ProcessDied, TaskFailed
from hjax.sandbox.sandbox_settings import THIS_MACHINE, SandboxSettings
from hjax.user_code import file_and_name, imported

_LOG = logging.getLogger(__name__)
# Why an episode may leave baseline and loss: the environment's faults.
FAULTS = ("timeout", "exception", "killed")
# How long the end of a pool waits for the closing of episodes that have ended.
CLOSING_SECONDS = 5.0
# The run occupies the accelerators, so JAX in an environment's process uses the CPU.
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu"}


@dataclasses.dataclass(frozen=True)
class EpisodeAnswer:
    """What an environment answered to a reset or a step, or its fault.

    Attributes:
      observation: text that the policy sees next; ``stop``: strings that end its next turn.
      anchor: 16 bytes that are equal for equal states; None: no state to compare.
      messages, tools, template_arguments: as in ``Observation``.
      reward, done, valid, fresh, metrics: as in ``Step``; after a reset as if nothing had happened.
      fault: one of ``FAULTS``; empty: none.
      text: of a fault, what happened.
      seconds: that the environment took; 0 where it gave none.
    """

    observation: str = ""
    stop: tuple[str, ...] = ()
    anchor: bytes | None = None
    messages: Sequence[dict[str, Any]] = ()
    tools: Sequence[dict[str, Any]] = ()
    template_arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reward: float = 0.0
    done: bool = False
    valid: bool = True
    fresh: bool = False
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    fault: str = ""
    text: str = ""
    seconds: float = 0.0


AnswerFuture = concurrent.futures.Future[EpisodeAnswer]


@dataclasses.dataclass
class _Episode:
    """An episode's inputs so far, from which it can be played again, and the digest of each answer.

    ``process_number``: of the process in which its environment lives, counted by its host.
    """

    host: _EpisodeHost
    task: Mapping[str, Any]
    seed: int
    actions: list[str] = dataclasses.field(default_factory=list)
    digests: list[bytes] = dataclasses.field(default_factory=list)
    process_number: int = -1
    lost: str = ""


class EpisodePool:
    """Plays episodes of one environment in several processes.

    Calls return at once; those of one process run one after another. Errors of the environment are
    answers. It ends with ``close``, and with this process.

    Args:
      environment: a class in a file, or a name of ``load_environment``.
      options: arguments of its constructor.
      processes: how many; episodes are shared out over them.
      step_seconds: deadline of each call.
      memory_bytes: limit of each process's data; 0: none.
      setting: what names the environment, for messages.
      sandbox: of environments that run programs (``takes_sandbox``).

    Raises:
      ConfigError: a class that another process cannot import, a number out of its range, or a
        sandbox that this machine cannot make.
    """

    def __init__(
        self,
        environment: str | type[Environment],
        options: Mapping[str, Any] | None = None,
        *,
        processes: int = 1,
        step_seconds: float = 60.0,
        memory_bytes: int = 0,
        setting: str = "environment.function",
        sandbox: SandboxSettings = THIS_MACHINE,
    ):
        if processes < 1 or step_seconds <= 0:
            raise ConfigError(
                f"environment.processes={processes}, environment.step_seconds={step_seconds:g}: "
                "1 or more, and above 0"
            )
        spec, options = _importable(environment, setting), dict(options or {})
        if "sandbox" not in options and takes_sandbox(load_environment(spec, setting)):
            sandbox.make()
            options["sandbox"] = sandbox
        setup = pickle.dumps(
            {
                "spec": spec,
                "options": options,
                "files": imported(),
                "step_seconds": step_seconds,
                "memory_bytes": memory_bytes,
            }
        )
        self._hosts = [_EpisodeHost(setup, step_seconds) for _ in range(processes)]
        self._episodes: dict[int, _Episode] = {}
        self._closing: list[concurrent.futures.Future[None]] = []
        self._lock = threading.Lock()

    def reset(self, episode: int, task: Mapping[str, Any], seed: int) -> AnswerFuture:
        """Begin an episode; ``episode`` is a number that no open one has.

        The future fails with ConfigError if the environment cannot be loaded.
        """
        with self._lock:
            if episode in self._episodes:
                raise ConfigError(f"episode {episode} is open already")
            host = min(self._hosts, key=lambda each: each.open_episodes)
            host.open_episodes += 1
            self._episodes[episode] = _Episode(host, dict(task), seed)
        return self._submit(episode, None)

    def step(self, episode: int, action: str) -> AnswerFuture:
        """Play a turn of an open episode."""
        return self._submit(episode, action)

    def end(self, episode: int) -> None:
        """Close an episode's environment, without waiting; does nothing if it is not open."""
        with self._lock:
            found = self._episodes.pop(episode, None)
            if found is None:
                return
            found.host.open_episodes -= 1
            closing = found.host.submit(found.host.close_episode, episode, found)
            self._closing = [each for each in self._closing if not each.done()] + [closing]

    def close(self) -> None:
        """End all processes. Of calls in progress only the closing of episodes is waited for, at
        most ``CLOSING_SECONDS``."""
        with self._lock:
            closing = list(self._closing)
        concurrent.futures.wait(closing, timeout=CLOSING_SECONDS)
        for host in self._hosts:
            host.shut_down()

    def __enter__(self) -> EpisodePool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def pids(self) -> list[int]:
        """Process ids of the supervisors of those processes that run."""
        return [pid for host in self._hosts if (pid := host.process.pid()) is not None]

    def _submit(self, episode: int, action: str | None) -> AnswerFuture:
        with self._lock:
            found = self._episodes.get(episode)
        if found is None:
            raise ConfigError(f"episode {episode} is not open")
        return found.host.submit(found.host.play, episode, found, action)


class _EpisodeHost:
    """One process, and the thread that calls it."""

    def __init__(self, setup: bytes, step_seconds: float):
        self.process = IsolatedProcess(
            "hjax.environments.episode_server:serve", setup, _ENVIRONMENT
        )
        self.process.start()
        self.open_episodes = 0
        self._seconds = step_seconds
        self._process_number = 0
        self._closed = self._told_close_fault = False
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "hjax-environment")

    def submit(self, call: Any, *arguments: Any) -> Any:
        """Call a method of this object in its thread; returns the future."""
        return self._thread.submit(call, *arguments)

    def shut_down(self) -> None:
        """End the process and the thread."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.process.interrupt()
        self.process.close()

    def play(self, number: int, episode: _Episode, action: str | None) -> EpisodeAnswer:
        """Reset (``action`` None) or step, after playing the episode again where its process was
        replaced."""
        if episode.lost:
            return EpisodeAnswer(fault=episode.lost, text="the episode has ended by a fault")
        answer = self._answer(number, episode, action)
        if answer.fault == "killed" and episode.process_number != self._process_number:
            # Perhaps from outside, or by what another episode left there.
            answer = self._answer(number, episode, action)
        if answer.fault:
            episode.lost = answer.fault
        else:
            if action is not None:
                episode.actions.append(action)
            episode.digests.append(_digest(answer))
        return answer

    def _answer(self, number: int, episode: _Episode, action: str | None) -> EpisodeAnswer:
        """The environment's answer, in a process that has played the episode up to here."""
        if action is not None and episode.process_number != self._process_number:
            if (fault := self._play_again(number, episode)) is not None:
                return fault
        return self._call(number, episode, action)

    def close_episode(self, number: int, episode: _Episode) -> None:
        """Close its environment, if its process still has it. The first fault of a ``close`` is
        logged: the episode has been counted."""
        if episode.process_number != self._process_number:
            return
        answer = self._request("close", number)
        if answer.fault and not (self._told_close_fault or self._closed):
            self._told_close_fault = True
            _LOG.warning("an environment's close failed (%s): %s", answer.fault, answer.text)

    def _play_again(self, number: int, episode: _Episode) -> EpisodeAnswer | None:
        """Play an episode up to where it was; returns a fault if that fails."""
        for action, digest in zip([None, *episode.actions], episode.digests, strict=True):
            answer = self._call(number, episode, action)
            if answer.fault:
                return answer
            if _digest(answer) != digest:
                text = (
                    "its process was lost through another episode, and played again with the same "
                    "seed and actions it gave something else"
                )
                return EpisodeAnswer(fault="killed", text=text)
        return None

    def _call(self, number: int, episode: _Episode, action: str | None) -> EpisodeAnswer:
        if action is not None:
            return self._request("step", number, action)
        episode.process_number = self._process_number
        return self._request("reset", number, episode.task, episode.seed)

    def _request(self, call: str, number: int, *arguments: Any) -> EpisodeAnswer:
        if self._closed:
            return EpisodeAnswer(fault="killed", text="the environments' processes were ended")
        try:
            request = pickle.dumps((call, number, arguments))
            found = self.process.call(request, self._seconds, grace=0.0)
        except DeadlineExceeded:
            self._process_number += 1
            text = f"{call} took longer than {self._seconds:g} s; its process was ended"
            return EpisodeAnswer(fault="timeout", text=text)
        except ProcessDied as error:
            self._process_number += 1
            return EpisodeAnswer(fault="killed", text=f"{call}: {error}")
        except TaskFailed as error:
            if error.at_start:
                raise ConfigError(one_line(error)) from error
            return EpisodeAnswer(fault="exception", text=f"{call}: {error}")
        return self._read(found)

    def _read(self, found: bytes) -> EpisodeAnswer:
        """An answer from its bytes, which may be anything."""
        try:
            fields = json.loads(found)
            if fields.pop("restart", False):
                self.process.close()
                self._process_number += 1
            if "anchor" in fields and fields["anchor"] is not None:
                fields["anchor"] = bytes.fromhex(fields["anchor"])
            if "stop" in fields:
                fields["stop"] = tuple(fields["stop"])
            return EpisodeAnswer(**fields)
        except (ValueError, TypeError, AttributeError):
            return EpisodeAnswer(fault="killed", text="its process answered something unreadable")


def _importable(environment: str | type[Environment], setting: str) -> str:
    """A name by which another process can import the class; checks that it is one."""
    if isinstance(environment, str):
        spec, environment = environment, load_environment(environment, setting)
        if spec.partition(":")[0] in ADAPTERS:
            return spec
    if environment.__module__.startswith("hjax."):
        return f"{environment.__module__}:{environment.__qualname__}"
    where = file_and_name(environment)
    if where is None:
        raise ConfigError(
            f"environment {environment.__qualname__} cannot be imported by another process; put it "
            "into a file and name it path.py:Class"
        )
    return ":".join(where)


def _digest(answer: EpisodeAnswer) -> bytes:
    """Of what an environment answered, except how long that took."""
    told = dataclasses.replace(answer, seconds=0.0)
    return hashlib.blake2b(repr(told).encode(errors="surrogatepass"), digest_size=16).digest()
