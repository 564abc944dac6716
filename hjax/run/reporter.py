"""Reporting of a run: progress and messages to the user, rows to the workdir, the final report."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from hjax.batches import real_rows, response_lengths, sample_rows
from hjax.controller import join
from hjax.files import HISTOGRAMS, METRICS, SAMPLES, WARM_START
from hjax.run.health_checks import HealthChecks, SamplerCheck, TruncationWarning
from hjax.run.run_metadata import save_skipped_batch
from hjax.run.workdir import Workdir

KEPT_SAMPLES = 8  # rows of each training batch and evaluation in samples.jsonl
BINS = 20


class Reporter:
    """Reports what a run does.

    Args:
      config: of the run.
      display: shows progress; None shows nothing.

    Attributes:
      display: the argument, or in a notebook a temporary display during ``run``.
      workdir: receives rows; None writes nothing.
      last_message: the last one shown.
    """

    def __init__(self, config: ConfigDict, display: Any):
        self.display = display
        self.workdir: Workdir | None = None
        self.last_message = ""
        self._config = config
        self._sampler_check = SamplerCheck(config)

    def start_health_checks(self, token_seconds: float, longest: int | None) -> None:
        """Start the health checks.

        Args:
          token_seconds: see ``HealthChecks``.
          longest: see ``TruncationWarning``.
        """
        self._health_checks = HealthChecks(self._config, token_seconds)
        self._truncation = TruncationWarning(self._config.rollout.max_response_length, longest)

    def message(self, text: str) -> None:
        """Show a line."""
        self.last_message = text
        if self.display is not None:
            self.display.message(text)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show the block under a name while it runs."""
        with contextlib.nullcontext() if self.display is None else self.display.phase(name):
            yield

    def compiling(self, name: str, seconds: float | None) -> None:
        """A compilation begins (``seconds`` is None) or has ended; displays may ignore it."""
        if show := getattr(self.display, "compiling", None):
            show(name, seconds)

    def loading(self, what: str, done: int, total: int) -> None:
        """Progress of reading weights; displays may ignore it."""
        if show := getattr(self.display, "loading", None):
            show(what, done, total)

    def sessions(self, counts: Any) -> None:
        """How far the sessions of an agent are (``SessionCounts``); displays may ignore it."""
        if show := getattr(self.display, "sessions", None):
            show(counts)

    @contextlib.contextmanager
    def in_notebook(self, total: int) -> Iterator[None]:
        """In a notebook without a given display, draw a table and curves during the block."""
        display = self._start_notebook_display(total)
        yield
        if display is not None:
            display.close()
            self.display = None

    def _start_notebook_display(self, total: int) -> Any:
        if self.display is not None or not self._config.display.enabled:
            return None
        from hjax.show.live import Display
        from hjax.show.notebook import in_notebook

        if not in_notebook():
            return None
        self.display = Display(self._config, total)
        where = "" if self.workdir is None else f"  {self.workdir.path}"
        self.display.start(f"{self._config.algorithm.name}{where}")
        return self.display

    def warm_start(self, updates: Sequence[tuple[int, Any]], total: int) -> None:
        """Report updates of the warm start: (number, metrics) of each, out of ``total``."""
        rows = [
            {"step": step, "loss": float(metrics["loss"]), "grad_norm": float(metrics["grad_norm"])}
            for step, metrics in ((step, join(future)) for step, future in updates)
        ]
        if self.workdir is not None:
            self.workdir.append(WARM_START, rows)
        if self.display is not None:
            self.display.warm_start(rows[-1]["step"], total, rows[-1]["loss"])

    def check_sampler(self, metrics: Mapping[str, float], step: int) -> None:
        """Check the sampler's log-probs of a step, before the step counts.

        Raises:
          RunError: see ``SamplerCheck``.
        """
        if warning := self._sampler_check.message(metrics):
            self.message(f"step {step}: {warning}")

    def row(self, metrics: Mapping[str, float]) -> None:
        """Write a step's metrics row."""
        if self.workdir is not None:
            self.workdir.append(METRICS, [metrics])

    def step(self, metrics: Mapping[str, float], batch: Mapping[str, Any], samples: int) -> None:
        """Report a step's warnings, sample responses and histograms; ``samples`` is the number of
        responses per prompt, 0 if the step generated nothing."""
        if self.display is not None:
            self.display.step(metrics)
        if warning := self._truncation.message(metrics):
            self.message(warning)
        for warning in self._health_checks.messages(metrics, batch):
            self.message(warning)
        step = int(metrics["step"])
        if samples:
            self.samples(batch, step, "train", samples)
        if samples and self.workdir is not None:
            self.workdir.append(HISTOGRAMS, [histogram_row(batch, step)])

    def samples(self, batch: Mapping[str, Any], step: int, kind: str, samples: int) -> None:
        """Report rows of a batch with ``samples`` responses per prompt; kind: train or eval."""
        if "responses" not in batch:
            return
        chosen = spread_rows(len(sample_rows(batch)), samples, KEPT_SAMPLES)
        rows = [sample_row(batch, i, step, kind) for i in chosen]
        if self.workdir is not None:
            self.workdir.append(SAMPLES, rows)
        shown = kind == "train" and (step == 1 or step % self._config.display.samples_every == 0)
        if self.display is not None and shown:
            self.display.samples(rows)

    def keep_batch(self, batch: Mapping[str, Any], step: int) -> None:
        """Save the batch of a step that failed or skipped an update, unless it is empty."""
        if self.workdir is not None and batch:
            with self.workdir.writing("skipped"):
                save_skipped_batch(self.workdir.path, step, batch)

    def end(self, timeline: Any) -> None:
        """Write timeline.json and the report."""
        if self.workdir is None:
            return
        self.workdir.write_json("timeline.json", timeline.chrome_trace())
        if self._config.display.report:
            from hjax.show.report import write_report

            with self.workdir.writing("report.html"):
                write_report(self.workdir.path)


def histogram(values: Any) -> dict[str, Any] | None:
    """Histogram of values, in ``BINS`` equal bins from the smallest to the largest.

    Args:
      values: any shape; non-finite ones are ignored.

    Returns:
      ``low``, ``high``, ``counts``, ``sum`` and ``squares`` (sum of squares); None without values.
    """
    found = np.asarray(values, np.float64).ravel()
    found = found[np.isfinite(found)]
    if not found.size:
        return None
    counts, edges = np.histogram(found, BINS)
    return {
        "low": float(edges[0]),
        "high": float(edges[-1]),
        "counts": counts.tolist(),
        "sum": float(found.sum()),
        "squares": float(np.square(found).sum()),
    }


def histogram_row(batch: Mapping[str, Any], step: int) -> dict[str, Any]:
    """A row of histograms.jsonl: ``histogram`` of the step's ``reward``, ``cost`` and ``length``,
    as far as the batch has them."""
    found: dict[str, Any] = {}
    samples = sample_rows(batch) if "episode" in batch else slice(None)
    for name, key in (("reward", "rewards"), ("cost", "costs")):
        if key in batch:
            found[name] = histogram(np.asarray(batch[key])[samples])
    if "response_mask" in batch:
        found["length"] = histogram(np.asarray(response_lengths(batch))[real_rows(batch)])
    return {"step": step} | {name: said for name, said in found.items() if said is not None}


def spread_rows(rows: int, samples: int, count: int) -> list[int]:
    """Rows of a batch to show, spread over as many prompts as possible.

    Args:
      rows: of the batch; the ``samples`` rows of a prompt are adjacent.
      count: most rows to return.

    Returns:
      row indices, ascending; with more than one sample at least two rows per prompt.
    """
    prompts = max(rows // max(samples, 1), 1)
    each = min(max(2, -(-count // prompts)), samples) if samples > 1 else 1
    return [i for i in range(rows) if i % samples < each][:count]


def sample_row(batch: Mapping[str, Any], index: int, step: int, kind: str) -> dict[str, Any]:
    """A row of samples.jsonl.

    Args:
      index: of the sample: of a row, or of an episode, which may have several rows.

    Returns:
      its advantage is the mean over the tokens that the policy drew; an episode has its ``turns``
      (``hjax.environments.episode.Episode.turn_records``) and its ``stop_reason``; an agent's
      session its ``calls`` too.
    """
    row = sample_rows(batch)[index]
    sample: dict[str, Any] = {"step": step, "index": index, "kind": kind}
    if "response_text" in batch:
        sample |= {"prompt": batch["prompt_text"][row], "response": batch["response_text"][row]}
    else:
        prompt = np.asarray(batch["prompts"][row])[np.asarray(batch["prompt_mask"][row], bool)]
        response = np.asarray(batch["responses"][row])[: int(response_lengths(batch)[row])]
        sample |= {"prompt": str(prompt.tolist()), "response": str(response.tolist())}
    if "rewards" in batch:
        sample["reward"] = float(batch["rewards"][row])
    if "costs" in batch:
        sample["cost"] = float(batch["costs"][row])
    numbers = batch.get("episode")
    rows = [row] if numbers is None else np.flatnonzero(numbers == numbers[row])
    mask = np.asarray(batch["response_mask"], bool)[rows]
    if "advantages" in batch and mask.any():
        sample["advantage"] = float(np.asarray(batch["advantages"])[rows][mask].mean())
    sample["truncated"] = bool(batch["truncated"][row])
    if numbers is not None:
        sample |= {"stop_reason": batch["stop_reason"][row], "turns": batch["turn_records"][row]}
        if "calls" in batch:
            sample["calls"] = batch["calls"][row]
        sample["response"] = "".join(t["action"] + t["observation"] for t in sample["turns"])
    return sample
