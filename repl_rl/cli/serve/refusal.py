"""What is not done, and why: an HTTP status and an error in the shape that OpenAI's clients read."""

import math
from collections.abc import Mapping

PATIENCE_S = 10
"""Seconds that a client may take to begin a request, to send its head or its body, and to take the next piece of an
answer."""
_MOST_RETRY_S = 60


class Refusal(Exception):
    """A request that is not carried out."""

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
        """The field of the request that is meant; None: it is no field."""
        self.code = code
        self.retry_after_s = retry_after_s
        """When to try again, whole seconds; None: it will not help."""
        self.allow = allow
        """The methods that are there, where another was used; None: it is not about that."""

    @property
    def headers(self) -> Mapping[str, str]:
        """What goes into the answer's headers."""
        found = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        found |= {} if self.allow is None else {"Allow": self.allow}
        return found | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})

    @property
    def body(self) -> Mapping[str, object]:
        """What goes into the answer's body."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def whole_seconds(seconds: float) -> int:
    """For Retry-After: neither none nor many."""
    return min(_MOST_RETRY_S, max(1, math.ceil(seconds)))
