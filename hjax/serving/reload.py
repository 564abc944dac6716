"""Weight reload: reads a served model's weights again from its path."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from hjax.errors import ConfigError, RunError
from hjax.serving.request_errors import RequestRefused

if TYPE_CHECKING:
    from hjax.rollout.language_model import LanguageModel
    from hjax.rollout.service import GenerationService

_LOG = logging.getLogger(__name__)


class WeightReload:
    """Reads and replaces the weights. Called off the event loop: it takes as long as reading, and
    then as the running requests.

    Args:
      model: that was read from a path.
      service: the only one of this model.
    """

    def __init__(self, model: LanguageModel, service: GenerationService):
        self._model, self._service = model, service
        self._busy = threading.Lock()

    def __call__(self, seconds: float | None = None) -> dict[str, Any]:
        """Read the weights, and answer with them from now on.

        Args:
          seconds: that running requests have to finish once the weights are read; None: no limit.

        Returns:
          ``reloaded``, ``seconds`` that it took, and of a workdir the ``checkpoint``'s step.

        Raises:
          RequestRefused: another reload is running, or it failed; then the old weights stay.
        """
        if not self._busy.acquire(blocking=False):
            raise RequestRefused("the weights are being read already; ask when that has ended", 409)
        try:
            began = time.monotonic()
            step = self._replace(seconds)
            took = round(time.monotonic() - began, 3)
        finally:
            self._busy.release()
        known = {} if step is None else {"checkpoint": step}
        return {"reloaded": True, "seconds": took} | known

    def _replace(self, seconds: float | None) -> int | None:
        try:
            params, step = self._model.reread_weights()
            self._service.replace(params, seconds)
        except ConfigError as error:
            raise RequestRefused(f"{_line(error)}; the old weights go on", 422) from None
        except RunError as error:
            raise RequestRefused(_line(error), 503, retry_after=10) from None
        except Exception as error:  # of files, or out of device memory for both
            _LOG.exception("the weights could not be read again")
            said = f"{type(error).__name__}: {_line(error)}"
            raise RequestRefused(
                f"reading failed ({said[:200]}); the old weights go on", 500
            ) from None
        return step


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
