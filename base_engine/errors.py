"""What the engine can refuse or fail.

EngineError
├── PromptTooLong     prompt (plus what must be generated) can never fit
├── NotInvoked        the prompt lacks the tokens that its activated LoRA waits for
├── QueueFull         too many requests are waiting; carries `retry_after` seconds
├── EngineStopped     the engine is shutting down or has failed
├── StepFailed        the forward pass this request was in raised
└── ModelUnsupported  the base model cannot be served exactly
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all engine failures."""


class PromptTooLong(EngineError):
    """The request can never fit, even into an empty engine."""


class NotInvoked(EngineError):
    """The adapter applies from its invocation tokens on, and the prompt does not have them."""


class QueueFull(EngineError):
    """The waiting queue is at its bound; try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineStopped(EngineError):
    """The engine does not take or finish requests any more."""


class StepFailed(EngineError):
    """A step raised; the requests that were in it end with this error."""


class ModelUnsupported(EngineError):
    """The model would not be computed exactly, so it is not served."""
