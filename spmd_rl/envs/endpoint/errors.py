"""What a client of the endpoint is told when it can't be served, in OpenAI's form.

It refuses to know about HTTP libraries. Invariant: an `ApiError` is the client's business (its request, its key, a
limit it ran into), never a failure of this program.
"""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """A request that is refused.

    Args:
        status: of HTTP.
        message: for people; says the way out.
        code: for programs, as OpenAI has it; "" for none.
        param: the parameter that is wrong, as a path into the body.
        again: whether the same request may have another answer; OpenAI's clients are told not to repeat it otherwise.
    """

    def __init__(self, status: int, message: str, *, code: str = "", param: str = "", again: bool = False) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.again = status, message, code, param, again

    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        said = {"message": self.message, "type": kind, "param": self.param or None, "code": self.code or None}
        return {"error": said}


def no_room(why: str) -> ApiError:
    """The conversation is as long as engine and trainer hold."""
    return ApiError(400, f"the conversation is too long: {why}", code="context_length_exceeded", param="messages")


def over() -> ApiError:
    """The rollout that the key belongs to has ended."""
    return ApiError(503, "the rollout of this key is over: nothing more can be asked in its name", code="rollout_over")


def wrong(param: str, message: str) -> ApiError:
    """A parameter that can't be taken as it is."""
    return ApiError(400, f"{param}: {message}", param=param)


def shown(value: Any) -> str:
    """A value of the client's, as part of a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"
