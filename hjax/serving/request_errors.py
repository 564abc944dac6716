"""Errors of a refused request: HTTP status, and the error body in OpenAI's format."""

import dataclasses
import re
from typing import Any, Self

from starlette.responses import JSONResponse

from hjax.data.limited_process import ComputationFailed
from hjax.errors import ConfigError, truncate
from hjax.rollout.sampling_params import SamplingParams

# Sampling options by their field names in requests.
_FIELDS = {field.name: field.name for field in dataclasses.fields(SamplingParams)}
_FIELDS |= {"stop": "stop_token_ids", "max_tokens": "max_tokens"}
# Characters of a message.
_LONGEST = 1000
_KINDS = {401: "authentication_error", 429: "rate_limit_error"}


class RequestRefused(Exception):
    """A request that gets an error instead of an answer.

    Args:
      message: one line for the client.
      status: of HTTP.
      param: the field that is wrong.
      code: OpenAI's code of the error, if it has one.
      retry_after: seconds after which the same request may succeed.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.message = truncate(message, _LONGEST)  # it may quote what the client sent
        self.status = status
        self.param = None if param is None else truncate(param, _LONGEST)
        self.code = code
        self.retry_after = retry_after

    @classmethod
    def from_config_error(cls, error: ConfigError) -> Self:
        """The refusal of an invalid option; most messages begin with its name."""
        text = " ".join(str(error).split())
        name = re.split(r"[ =:]", text, maxsplit=1)[0]
        return cls(text, param=_FIELDS.get(name))

    @classmethod
    def of_field(cls, field: str, error: Exception) -> Self:
        """The refusal of a field's value; a tokenizer that fails is the server's own error."""
        status = 500 if isinstance(error, ComputationFailed) else 400
        return cls(f"{field}: {error}", status, param=field)

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _KINDS.get(self.status, usual)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """The error as an HTTP response."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)
