"""A process that runs the cases of forms, and its other end: deadlines, crashes, a new one."""

import dataclasses
import importlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hjax.errors import ConfigError
from hjax.isolated_process import DeadlineExceeded, IsolatedProcess, ProcessDied, TaskFailed
from hjax.kernels.verdict import CRASHED, HUNG, RIGHT, UNSUITED, WRONG

TABLE = "hjax.launch.form_checks.case_table"
_SERVE = "hjax.launch.form_checks.checked_process:serve"


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """What was found of a case.

    Attributes:
      form, case: names.
      result: ``RIGHT``, ``WRONG``, ``HUNG``, ``CRASHED`` or ``UNSUITED``.
      detail: how it differs, or why it does not suit; empty if right.
      seconds: that it took, compilation included.
    """

    form: str
    case: str
    result: str
    detail: str = ""
    seconds: float = 0.0


def serve(setup: bytes) -> Callable[[bytes], bytes]:
    """Entry of the process; ``setup`` names the module with the table ``CASES``."""
    given = json.loads(setup)
    from hjax.launch.jax_setup import prepare_devices

    prepare_devices(1)
    cases = importlib.import_module(given["table"]).CASES
    made: dict[str, dict[str, Any]] = {}

    def answer(request: bytes) -> bytes:
        asked = json.loads(request)
        if asked["ask"] == "devices":
            return json.dumps(_devices()).encode()
        if asked["ask"] == "forms":
            return json.dumps(list(cases)).encode()
        if asked["ask"] == "times":
            return json.dumps(_times(asked["sizes"])).encode()
        form = asked["form"]
        if form not in made:
            made[form] = {case.name: case for case in cases[form]()}
        if asked["ask"] == "cases":
            return json.dumps(list(made[form])).encode()
        return json.dumps(_run(made[form][asked["case"]])).encode()

    return answer


def _run(case: Any) -> list[str]:
    from hjax.launch.form_checks.comparison import Unsuited

    try:
        reason = case.run()
    except Unsuited as error:
        return [UNSUITED, str(error)]
    except Exception as error:  # a compiler or a library may raise anything
        return [WRONG, f"it failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"]
    return [WRONG, reason] if reason else [RIGHT, ""]


def _times(sizes: dict[str, int]) -> dict[str, Any]:
    from hjax.launch.form_checks import timings

    measured = timings.measure(timings.TimedSizes(**sizes))
    return {"bandwidths": timings.bandwidths(), "seconds": measured}


def _devices() -> dict[str, Any]:
    """The local devices."""
    from hjax.machine import device_memory, find_devices

    devices = find_devices()
    found = {"platform": devices[0].platform, "device_kind": devices[0].device_kind,
             "devices": len(devices), "memory_bytes": device_memory(devices[0])}  # fmt: skip
    return found


class CheckedProcess:
    """Runs cases in another process, each with a deadline; a hang or crash costs that case alone.

    Args:
      deadline: seconds of a case.
      table: module with the table ``CASES``.
      environment: variables to set in the process.
    """

    def __init__(
        self, deadline: float, table: str = TABLE, environment: Mapping[str, str] | None = None
    ):
        # Else JAX takes most of a GPU's memory, which a process before may not have freed yet.
        more = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **(environment or {})}
        self._deadline = deadline
        setup = json.dumps({"table": table}).encode()
        self._process = IsolatedProcess(_SERVE, setup, environment=more)

    def _ask(self, seconds: float | None = None, **request: Any) -> Any:
        return json.loads(
            self._process.call(json.dumps(request).encode(), seconds or self._deadline)
        )

    def devices(self) -> dict[str, Any]:
        """Platform, kind, number and memory of the local devices.

        Raises:
          ConfigError: JAX does not start, in one line with the remedy.
        """
        try:
            return dict(self._ask(ask="devices", seconds=max(self._deadline, 120.0)))
        except TaskFailed as error:
            raise ConfigError(str(error).partition(": ")[2] or str(error)) from error
        except (DeadlineExceeded, ProcessDied) as error:
            how = str(error) or "it did not answer"
            raise ConfigError(f"JAX does not start on this machine's devices: {how}") from error

    def forms(self) -> list[str]:
        """The forms of the table."""
        return list(self._ask(ask="forms"))

    def times(self, sizes: Mapping[str, int]) -> dict[str, Any]:
        """Bandwidths, and seconds of forms at these sizes (``timings.TimedSizes``); ``failed`` if
        they hang or crash."""
        try:
            return dict(self._ask(ask="times", sizes=dict(sizes), seconds=4 * self._deadline))
        except (TaskFailed, DeadlineExceeded, ProcessDied) as error:
            return {"failed": ", ".join(_ending(error))}

    def results(self, form: str) -> Iterator[CaseResult]:
        """The result of each case of a form."""
        try:
            names = self._ask(ask="cases", form=form)
        except (TaskFailed, DeadlineExceeded, ProcessDied) as error:
            yield CaseResult(form, "its cases", *_ending(error))
            return
        for name in names:
            start = time.monotonic()
            try:
                result, detail = self._ask(ask="run", form=form, case=name)
            except (TaskFailed, DeadlineExceeded, ProcessDied) as error:
                result, detail = _ending(error)
            yield CaseResult(form, name, result, detail, time.monotonic() - start)

    def close(self) -> None:
        """End the process."""
        self._process.close()


def _ending(error: Exception) -> tuple[str, str]:
    if isinstance(error, DeadlineExceeded):
        return HUNG, "it ran past its deadline"
    if isinstance(error, ProcessDied):
        return CRASHED, str(error)
    return WRONG, " ".join(str(error).split())[-300:]


def joined_result(results: list[CaseResult]) -> str:
    """The result of a form, by those of its cases: the worst one; unsuited if all are."""
    found = {result.result for result in results}
    return next((bad for bad in (CRASHED, HUNG, WRONG, RIGHT) if bad in found), UNSUITED)
