"""Refused requests: an HTTP status, and an error in the format of OpenAI's API."""

import math
from collections.abc import Mapping

PATIENCE_S = 10
"""Timeout of a client, seconds: to begin a request, to send its head or body, to receive a piece of an answer."""
_MAX_RETRY_S = 60
"""Longest time of the header Retry-After, seconds."""


class RequestError(Exception):
    """Request that the server does not carry out."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        """Field of the request that is wrong, or None if no field is."""
        self.code = code
        self.retry_after_s = retry_after_s
        """Whole seconds until a retry may succeed. None means that a retry does not help."""
        self.allowed_methods = allow
        """Methods that the path supports, if the request used another one, else None."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of the error response."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        headers |= {} if self.allowed_methods is None else {"Allow": self.allowed_methods}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})

    @property
    def body(self) -> Mapping[str, object]:
        """JSON body of the error response."""
        error_types = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        error_type = error_types.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": error_type, "param": self.param, "code": self.code}}


def round_retry_after(seconds: float) -> int:
    """Return whole seconds for the header Retry-After, from 1 to `_MAX_RETRY_S`."""
    return min(_MAX_RETRY_S, max(1, math.ceil(seconds)))
