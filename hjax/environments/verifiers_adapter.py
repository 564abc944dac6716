"""Tasks of verifiers: its harness asks an endpoint of this process, and the policy answers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import http.server
import itertools
import json
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

from hjax.data.tool_call_forms import TAGGED, split_calls
from hjax.environments.adapted_environment import AdaptedEnvironment, adapter_package
from hjax.environments.environment import Observation, Step
from hjax.errors import ConfigError, DataError, RunError, one_line, short_repr

# The header by which a request names its episode.
SESSION_HEADER = "X-Session-ID"
# A request of a harness: its body, and what takes the answer; None: the episode has ended.
Asked = tuple[Mapping[str, Any], "queue.SimpleQueue[Mapping[str, Any] | None]"] | None


class VerifiersEnvironment(AdaptedEnvironment):
    """Plays a task of verifiers (0.4), by the id of its taskset.

    The row's column ``index`` is the task's place in the taskset; the prompt is the task's own, not
    the row's. The task's harness runs as verifiers runs it. Each of its requests for a chat
    completion is an observation of chat messages, and the policy's turn is the answer; so runs play
    it with a chat template. A request that does not go on from the last one replaces the history.
    A turn may call the request's tools in the form ``<tool_call>{"name": ..., "arguments": {...}}
    </tool_call>``, after text or without; calls that cannot be read are text, and not valid.

    The reward is that of verifiers' trace, at the last turn; an episode that is stopped before has
    0. Its rewards (``reward_NAME``) and metrics are metrics. An error that verifiers records raises
    RunError.

    Attributes:
      taskset: keys of the taskset's config beside its id.
      agent: keys of the agent's config: its harness, and where that runs.
    """

    taskset: ClassVar[Mapping[str, Any]] = {}
    agent: ClassVar[Mapping[str, Any]] = {
        "harness": {"id": "null"},
        "runtime": {"type": "subprocess"},
    }
    _runner: ClassVar[_HarnessRunner]
    _run: concurrent.futures.Future[Any] | None = None
    _reply: queue.SimpleQueue[Mapping[str, Any] | None] | None = None

    @classmethod
    def check_target(cls) -> None:
        vf = adapter_package("verifiers.v1", "verifiers")
        config = {"taskset": {"id": cls.target, **cls.taskset}, "agent": dict(cls.agent)}
        key = json.dumps(config, sort_keys=True, default=repr)
        if key not in _HARNESSES:
            try:
                made = vf.SingleAgentEnv(vf.SingleAgentEnvConfig(**config))
            except Exception as error:  # of the taskset's own
                said = f"{type(error).__name__}: {one_line(error)}"
                raise ConfigError(f"verifiers cannot make the taskset: {said}") from error
            _HARNESSES[key] = _HarnessRunner(made)
        cls._runner = _HARNESSES[key]

    def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        self.close()
        self._begin_call()
        self.check_target()
        index = task.get("index")
        if type(index) is not int or index < 0:
            raise DataError(
                f"index is {short_repr(index)}; it must be the place of a task in its taskset, "
                "from 0"
            )
        self._asked: queue.SimpleQueue[Asked] = queue.SimpleQueue()
        self._run = self._runner.begin(index, self._asked)
        self._seen, self._turn = Observation(), 0
        step = self._next(True)
        if step.done:
            raise RunError(f"verifiers:{self.target} has asked nothing in task {index}")
        return step.observation

    def step(self, action: str) -> Step:
        self._begin_call()
        self._turn += 1
        names = [str(tool["function"]["name"]) for tool in self._seen.tools]
        self._said = assistant_message(action, names, f"call_{self._turn}")
        valid = "tool_calls" in self._said or not (names and TAGGED.begin in action)
        self._answer(self._said)
        return self._next(valid)

    def close(self) -> None:
        self._answer(None)
        run, self._run = self._run, None
        if run is not None:
            run.cancel()

    def _answer(self, message: Mapping[str, Any] | None) -> None:
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.put(message)

    def _next(self, valid: bool) -> Step:
        """The harness's next request, or the end of the episode."""
        try:
            asked = self._asked.get(timeout=self._left())
        except queue.Empty:
            what = f"verifiers:{self.target} has not gone on in {self._seconds:g} s"
            raise RunError(what) from None
        if asked is None:
            return self._ended(valid)
        body, self._reply = asked
        before = self._seen
        self._seen = Observation(messages=body["messages"], tools=body.get("tools") or ())
        if not self._turn:
            return Step(self._seen)
        count = len(before.messages)
        if self._goes_on(before, count):
            return Step(Observation(messages=self._seen.messages[count:]), valid=valid)
        return Step(self._seen, valid=valid, fresh=True)

    def _goes_on(self, before: Observation, count: int) -> bool:
        """Whether the request is what was seen, what was said, and more."""
        messages = self._seen.messages
        return (
            len(messages) > count
            and messages[:count] == before.messages
            and self._seen.tools == before.tools
            and messages[count] == Observation(messages=[self._said]).messages[0]
        )

    def _ended(self, valid: bool) -> Step:
        assert self._run is not None
        try:
            episode = self._run.result()
        except Exception as error:
            said = f"{type(error).__name__}: {one_line(error)}"
            raise RunError(f"verifiers:{self.target} fails: {said}") from error
        errors = [*episode.errors, *(each for trace in episode.traces for each in trace.errors)]
        if errors or not episode.traces:
            said = f"{errors[0].type}: {errors[0].message}" if errors else "nothing was traced"
            raise RunError(f"verifiers:{self.target} fails: {one_line(RunError(said))}")
        trace = episode.traces[0]
        metrics = {f"reward_{name}": each.value for name, each in trace.rewards.items() if each}
        metrics |= {name: value for name, value in trace.metrics.items() if value is not None}
        end = Observation(f"[{trace.stop_condition}]" if trace.stop_condition else "")
        return Step(end, reward=trace.reward, done=True, valid=valid, metrics=metrics)


def assistant_message(action: str, names: Sequence[str], ids: str) -> dict[str, Any]:
    """A turn as a message of a chat completion.

    Args:
      action: its text.
      names: of the tools that it may call.
      ids: what the ids of its calls begin with.
    """
    before, calls, _ = split_calls(action, TAGGED, {})
    if not calls or any(call.name not in names for call in calls):
        return {"role": "assistant", "content": action}
    made = [
        {
            "id": f"{ids}_{call.index}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]
    return {"role": "assistant", "content": before.strip() or None, "tool_calls": made}


class _HarnessRunner:
    """Runs a taskset's episodes in a thread, and answers what their harnesses ask.

    Args:
      environment: of verifiers.
    """

    def __init__(self, environment: Any):
        self._environment = environment
        self._tasks: dict[int, Any] = {}
        self._asked: dict[str, queue.SimpleQueue[Asked]] = {}  # by the id of a trace
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self, index: int, asked: queue.SimpleQueue[Asked]) -> concurrent.futures.Future[Any]:
        """Begin an episode of a task; None is put after its last request.

        Raises:
          DataError: there is no such task.
        """
        loop = self._started()
        if index not in self._tasks:
            found = next(itertools.islice(iter(self._environment.taskset), index, None), None)
            if found is None:
                raise DataError(f"index is {index}, and the taskset has fewer tasks")
            self._tasks[index] = found
        run = asyncio.run_coroutine_threadsafe(self._play(self._tasks[index], asked), loop)
        run.add_done_callback(lambda _: asked.put(None))
        return run

    async def _play(self, task: Any, asked: queue.SimpleQueue[Asked]) -> Any:
        [slot] = self._environment.slots(task, 1)
        known: list[str] = []

        def keep_trace(trace: Any) -> None:
            known.append(trace.id)
            self._asked[trace.id] = asked

        try:
            return await self._environment.run_slot(slot, self._context, on_trace=keep_trace)
        finally:
            for name in known:
                del self._asked[name]

    def _started(self) -> asyncio.AbstractEventLoop:
        """The loop of the thread that runs episodes, once they can begin."""
        if self._loop is not None:
            return self._loop
        import verifiers.v1 as vf
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _page(self._asked.get))
        server.daemon_threads = True
        self._server = server
        url = f"http://127.0.0.1:{server.server_port}/v1"
        client = EvalClientConfig(base_url=url, api_key_var="HJAX_NO_API_KEY")
        self._context = ModelContext("policy", client, vf.SamplingConfig())
        loop = asyncio.new_event_loop()

        def run() -> None:
            loop.run_forever()
            loop.close()

        for work in (server.serve_forever, run):
            threading.Thread(target=work, daemon=True).start()
        ready = concurrent.futures.Future[None]()
        # Kept, since a loop refers weakly to its tasks.
        self._serving = asyncio.run_coroutine_threadsafe(self._serve(ready), loop)
        ready.result()
        self._loop = loop
        return loop

    def close(self) -> None:
        """End what episodes share; those that are open are lost."""
        loop, self._loop = self._loop, None
        if loop is not None:
            self._serving.cancel()
            self._server.shutdown()
            self._server.server_close()
            loop.call_soon_threadsafe(loop.call_later, 0.1, loop.stop)

    async def _serve(self, ready: concurrent.futures.Future[None]) -> None:
        """Hold what episodes share, as long as this process lives."""
        try:
            async with self._environment.serving():
                ready.set_result(None)
                await asyncio.Event().wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)


# Those of this process, by their config.
_HARNESSES: dict[str, _HarnessRunner] = {}


def _page(
    find: Callable[[str], queue.SimpleQueue[Asked] | None],
) -> type[http.server.BaseHTTPRequestHandler]:
    """What answers requests for chat completions, by their episode's queue."""

    class Page(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
            asked = find(self.headers.get(SESSION_HEADER) or "")
            if asked is None or not self.path.endswith("/chat/completions"):
                return self.reply(404, {"error": {"message": f"no episode, or no {self.path}"}})
            if body.get("n", 1) not in (1, None):
                return self.reply(400, {"error": {"message": "n must be 1"}})
            answer: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
            asked.put((body, answer))
            message = answer.get()
            if message is None:
                return self.reply(400, {"error": {"message": "the episode has ended"}})
            self.reply(200, completion(message), bool(body.get("stream")))

        def reply(self, status: int, answer: dict[str, Any], stream: bool = False) -> None:
            text = streamed(answer) if stream else json.dumps(answer)
            kind = "text/event-stream" if stream else "application/json"
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *what: Any) -> None:
            pass

    return Page


def completion(message: Mapping[str, Any]) -> dict[str, Any]:
    """A chat completion; the policy's tokens are counted elsewhere."""
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return {
        "id": "chatcmpl-policy",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": [{"index": 0, "message": dict(message), "finish_reason": reason}],
        "usage": dict.fromkeys(names, 0),
    }


def streamed(answer: Mapping[str, Any]) -> str:
    """A chat completion as the events of a stream."""
    [choice] = cast(list[dict[str, Any]], answer["choices"])
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [c | {"index": i} for i, c in enumerate(delta["tool_calls"])]
    rest = {name: answer[name] for name in ("id", "created", "model")}
    rest["object"] = "chat.completion.chunk"
    parts = [
        rest | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        rest | {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
        rest | {"choices": [], "usage": answer["usage"]},
    ]
    return "".join(f"data: {json.dumps(part)}\n\n" for part in parts) + "data: [DONE]\n\n"
