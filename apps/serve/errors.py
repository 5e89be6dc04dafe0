"""Requests that are refused, in the shape of OpenAI's errors: {"error": {"message", "type", "param", "code"}}."""

from typing import Any

from ...face import ErrorCode, RowFailure

_NOT_THE_CALLERS = (ErrorCode.NUMERICAL_ERROR, ErrorCode.WORKER_CRASHED)
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """What a request gets instead of an answer. Never leaves this folder."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: int = 0
    ) -> None:
        """`status` is the HTTP status; below 500 the request is at fault, and `param` names its field.

        `retry_after` are seconds after which the same request may be taken, 0 if nobody knows.
        """
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = {"retry-after": str(retry_after)} if retry_after else {}

    def as_json(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def refused(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Of a request whose field `param` cannot be taken as it is."""
    return ApiError(400, message, param=param, code=code)


def not_found(what: str, name: str) -> ApiError:
    return ApiError(404, f"there is no {what} {name[:64]!a}", param="id", code="not_found")


def of_failure(failure: RowFailure) -> ApiError:
    """The error that a row of a file would get, as that of a request."""
    status = 500 if failure.code in _NOT_THE_CALLERS else 400
    return ApiError(status, failure.message, param=failure.param, code=str(failure.code))
