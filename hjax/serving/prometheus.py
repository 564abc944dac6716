"""Prometheus metrics of a server."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class PrometheusMetrics:
    """Counts of requests, and the engine's statistics.

    Args:
      stats: of the service.

    Attributes:
      first_token: observes seconds from reading a request to its first token.
      reloads: counts how often the weights were read again.
    """

    def __init__(self, stats: Callable[[], Mapping[str, float]]):
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "hjax_requests",
            "Requests that were answered, by path and HTTP status (499: the client went away)",
            ["path", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "hjax_request_seconds",
            "From the headers to the end of the answer",
            ["path"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.first_token = Histogram(
            "hjax_first_token_seconds",
            "From a request's being read to its first token",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.reloads = Counter(
            "hjax_reloads", "Times that new weights were read and taken", registry=self._registry
        )
        self._registry.register(_Engine(stats))

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Count an answer."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def text(self) -> bytes:
        """All metrics, in Prometheus' text format."""
        return generate_latest(self._registry)


class _Engine(Collector):
    """The service's statistics at the time of a scrape."""

    gauges = {
        "running": "Responses that are being drawn",
        "waiting": "Responses that wait for a slot",
        "slots": "Responses that can be drawn at a time",
        "kept_tokens": "Tokens kept for prompts that begin with them",
        "kept_room": "Tokens that there is room for",
    }
    counters = {
        "prompt_tokens": "Tokens of prompts",
        "cached_tokens": "Tokens of prompts that were kept, and so not read again",
        "generated_tokens": "Tokens drawn",
        "guessed_tokens": "Tokens guessed by looking them up",
        "right_tokens": "Guessed tokens that were drawn",
    }

    def __init__(self, stats: Callable[[], Mapping[str, float]]):
        self._stats = stats

    def describe(self) -> Iterator[Metric]:
        """Metric names, without calling the engine."""
        return self._families({})

    def collect(self) -> Iterator[Metric]:
        """Current values."""
        return self._families(self._stats())

    def _families(self, stats: Mapping[str, float]) -> Iterator[Metric]:
        for kind, texts in ((GaugeMetricFamily, self.gauges), (CounterMetricFamily, self.counters)):
            for name, text in texts.items():
                yield kind(f"hjax_{name}", text, value=stats.get(name))
