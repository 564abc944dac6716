"""usage: python -m hjax.launch.check [--config=NAME.py] [--deadline=60] [--json]
                                   [--config.a.b=VALUE ...]

Try every kernel and collective of this machine's devices on small and odd cases (values, gradients,
padding, windows, packs, decode caches, transitions between layouts) beside the plain form, each in
a process of its own, and record which ones `auto` takes from now on. On an accelerator each is then
timed beside its alternatives, and bandwidths of memory and links are measured.

  --config=NAME.py      time the forms at this run's sizes; otherwise at common ones
  --deadline=60         seconds for a case; one that takes longer counts as hung
  --json                print one line of JSON as the last line of the output
  --help                print this

On a CPU the kernels are interpreted, and their verdict concerns no run.

exit status: 0 nothing was wrong; 1 something was wrong, hung or crashed; 2 wrong input, or JAX does
not start on the devices
"""

import dataclasses
import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hjax.errors import ConfigError
from hjax.files import json_line, replace_file
from hjax.kernels.verdict import (
    CRASHED,
    FORMS,
    HUNG,
    RIGHT,
    UNSUITED,
    WRONG,
    FormVerdict,
    forms_of,
    runtime_versions,
)
from hjax.launch.command import define_flags, parse_flags, run_or_help, split_config_flag
from hjax.launch.form_checks.checked_process import (
    TABLE,
    CaseResult,
    CheckedProcess,
    joined_result,
)
from hjax.launch.process_exit import run_and_exit
from hjax.rules import deadline
from hjax.sandbox.local_sandbox import probed_layers, sandbox_layers
from hjax.settings.config_loading import check_config, load_config
from hjax.show.format import duration, seconds, size

_BAD = (WRONG, HUNG, CRASHED)


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """What was found on the devices.

    Attributes:
      devices: platform, kind, number, memory, bandwidth.
      verdict: by form.
      cases: every case's result.
      seconds: that the check took.
    """

    devices: dict[str, Any]
    verdict: FormVerdict
    cases: list[CaseResult]
    seconds: float

    @property
    def taken(self) -> list[str]:
        """The forms that ``auto`` takes on these devices from now on."""
        possible = forms_of(self.devices["platform"])
        return [name for name in possible if name in self.verdict.taken]

    @property
    def failed(self) -> bool:
        """Whether anything was wrong, hung or crashed."""
        return any(result in _BAD for result in self.verdict.results.values())

    def record(self) -> dict[str, Any]:
        """As data, for ``--json`` and the verdict's file."""
        return {
            **self.devices,
            "versions": dict(self.verdict.versions),
            "results": dict(self.verdict.results),
            "taken": self.taken,
            "sandbox": probed_layers(),
            "cases": [dataclasses.asdict(case) for case in self.cases],
            "seconds": self.seconds,
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    return run_or_help(arguments, lambda: str(__doc__), _run)


def _run(arguments: list[str]) -> int:
    args = define_flags(deadline=60.0, json=False)
    sizes: dict[str, int] = {}
    if any(re.match(r"--?config\b", argument) for argument in arguments):
        name, rest = split_config_flag(arguments)
        sizes = run_sizes(check_config(load_config(name, rest, args)))
    else:
        parse_flags(args, arguments)
    if not deadline().holds(args.deadline):
        raise ConfigError(f"--deadline={args.deadline}: must be {deadline().text}")
    report = check_forms(args.deadline, sizes, show=lambda text: print(text, flush=True))
    print(summary(report))
    if args.json:
        print(json_line(report.record()))
    sys.stdout.flush()
    return int(report.failed)


def run_sizes(config: Any) -> dict[str, int]:
    """The sizes of a run's actor that forms are timed at (``timings.TimedSizes``)."""
    from hjax.dryrun.shape_inputs import shape_inputs

    inputs = shape_inputs(config)
    model = inputs.model
    return {
        "rows": config.actor.micro_batch or config.rollout.prompts * config.rollout.samples,
        "prompt": inputs.prompt_length,
        "response": config.rollout.max_response_length,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "dim": model.head_dim,
        "hidden": model.hidden_size,
        "mlp": model.mlp_size,
        "experts": model.experts,
    }


def check_forms(
    deadline: float,
    sizes: Mapping[str, int] | None = None,
    table: str = TABLE,
    names: Sequence[str] | None = None,
    show: Callable[[str], None] = lambda text: None,
) -> CheckReport:
    """Try the forms of this machine's devices, and write the verdict into the user's cache.

    Args:
      deadline: seconds of a case.
      sizes: at which forms are timed on accelerators; None: common ones.
      table: module with the cases, ``CASES``.
      names: of the forms; None: all of the table that the platform can take or interpret.
      show: called with a line for each form.

    Raises:
      ConfigError: JAX does not start, in one line with the remedy.
    """
    start = time.monotonic()
    process = CheckedProcess(deadline, table)
    try:
        devices = process.devices()
        listed = process.forms() if names is None else list(names)
    finally:
        process.close()
    platform = devices["platform"]
    cases: list[CaseResult] = []
    results: dict[str, str] = {}
    for form in listed:
        if platform != "cpu" and form in FORMS and form not in forms_of(platform):
            continue
        process = CheckedProcess(deadline, table)
        try:
            found = list(process.results(form))
        finally:
            process.close()
        cases += found
        results[form] = joined_result(found)
        show(form_line(form, found))
    if platform != "cpu":
        process = CheckedProcess(deadline, table)
        try:
            devices["times"] = process.times(sizes or {})
        finally:
            process.close()
    verdict = FormVerdict(devices["device_kind"], runtime_versions(), results)
    report = CheckReport(devices, verdict, cases, round(time.monotonic() - start, 1))
    verdict.path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(verdict.path, json.dumps(report.record(), indent=1) + "\n")
    return report


def form_line(form: str, cases: Sequence[CaseResult]) -> str:
    """One line for a form, and one more for each case that is not right."""
    taken = duration(sum(case.seconds for case in cases))
    right = sum(case.result == RIGHT for case in cases)
    result = joined_result(list(cases))
    lines = [f"{form:<32} {result:<20} {right} of {len(cases)} cases  {taken:>8}"]
    shown = [case for case in cases if case.result in _BAD]
    shown = shown or [case for case in cases if result == case.result == UNSUITED][:1]
    return "\n".join([*lines, *(f"    {c.case}: {c.result}, {c.detail}" for c in shown)])


def summary(report: CheckReport) -> str:
    """The last lines of the output: the devices, what ``auto`` takes, and the verdict's file."""
    found, platform = report.devices, report.devices["platform"]
    memory = f" of {size(found['memory_bytes'])}" if found["memory_bytes"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in report.verdict.versions.items())
    lines = [f"\n{found['devices']} {found['device_kind']}{memory} ({versions})"]
    lines += [sandbox_layers(), *time_lines(found.get("times", {}))]
    if platform == "cpu":
        lines.append("on a CPU kernels are interpreted, and runs take none of them")
    else:
        lines.append(f"auto takes from now on: {', '.join(report.taken) or 'plain forms'}")
        left = [name for name in forms_of(platform) if name not in report.taken]
        lines += [f"  not {name}: {FORMS[name].instead}" for name in left]
    done = "something was wrong" if report.failed else "nothing was wrong"
    lines.append(f"{done}, in {duration(report.seconds)}; verdict in {report.verdict.path}")
    return "\n".join(lines)


def time_lines(times: Mapping[str, Any]) -> list[str]:
    """Bandwidths and seconds of forms, a line for each thing that is computed."""
    if "failed" in times:
        return [f"times: {times['failed']}"]
    lines = [
        f"{name.removesuffix('_bytes_per_second')}: {size(value)}/s"
        for name, value in times.get("bandwidths", {}).items()
    ]
    for title, forms in times.get("seconds", {}).items():
        each = (
            f"{name} {taken if isinstance(taken, str) else seconds(taken)}"
            for name, taken in forms.items()
        )
        lines.append(f"{title}: {', '.join(each)}")
    return lines


if __name__ == "__main__":
    run_and_exit(main)
