"""Requests of many models, run one at a time by one thread."""

import collections
import threading
from collections.abc import Callable


class TrainingQueue:
    """Runs the requests of each model in the order of their arrival, and models in turn.

    So one client's long queue does not keep others waiting.
    """

    def __init__(self) -> None:
        # By model, its requests; the model whose turn is next comes first.
        self._waiting: collections.OrderedDict[str, collections.deque[Callable[[], None]]] = (
            collections.OrderedDict()
        )
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="training", daemon=True)
        self._thread.start()

    def submit(self, model_id: str, work: Callable[[], None]) -> None:
        """Append a request, a function that must not raise."""
        with self._changed:
            self._waiting.setdefault(model_id, collections.deque()).append(work)
            self._changed.notify()

    def drop(self, model_id: str) -> None:
        """Forget a model's requests that have not begun."""
        with self._changed:
            self._waiting.pop(model_id, None)

    def close(self, seconds: float) -> None:
        """Begin nothing more, and wait so long for what runs."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(seconds)

    def _run(self) -> None:
        while (work := self._next()) is not None:
            work()

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._closed:
                if self._waiting:
                    model_id, requests = self._waiting.popitem(last=False)
                    work = requests.popleft()
                    if requests:
                        self._waiting[model_id] = requests
                    return work
                self._changed.wait()
        return None
