"""Every exception that sgl-aspects raises on purpose.

    AspectsError
    ├── TargetError (ValueError)            a target that cannot be read
    ├── HookError (TypeError)               a hook that cannot work on its target
    ├── MissingTargetError (LookupError)    the module is there, the attribute is not
    ├── ConfigError (ValueError)            a setting, file or environment variable that is wrong
    ├── AttachError (RuntimeError)          a running process that cannot be asked, attached to or detached
    ├── PlatformError (RuntimeError)        no platform, several, or one that fails
    │   └── PlatformTypeError (TypeError)   what a platform plugin names is not a platform class
    ├── OperatorError (RuntimeError)        an operator that cannot be registered, chosen or run
    │   ├── OperatorSignatureError (TypeError)  its function takes other arguments than the operator
    │   └── UnsupportedCallError (NotImplementedError)  an implementation refuses a call, having done nothing
    └── EngineError (RuntimeError)          the embedded engine cannot serve
        ├── ModelLoadError                  a model folder or file that is missing or broken
        ├── InvalidRequestError (ValueError)  a request that can never be served as it is
        ├── QueueFullError                  the queue is full: it can be served later
        └── SchedulerDiedError (ConnectionError)  the scheduler process is gone

    SystemExit
    └── Stop                                a required feature cannot work: the process ends

Each doubles a standard type, so that callers who do not know this package catch what they expect. A message
names the offender, the alternatives, and the next step.
"""

from __future__ import annotations


class AspectsError(Exception):
    """Base class of all of them."""


class Stop(SystemExit):
    """Raised to end the process if the engine would otherwise serve without a required feature.

    Not an error that the engine might catch; a plugin's own SystemExit is contained, this one is not.
    """

    def __init__(self, reason: object) -> None:
        super().__init__(f"sgl-aspects: {reason}")


class TargetError(AspectsError, ValueError):
    """Raised when a target string cannot be parsed, at the moment it is passed."""


class HookError(AspectsError, TypeError):
    """Raised when a hook cannot work on its target: not callable, wrong type, an unsuitable class."""


class MissingTargetError(AspectsError, LookupError):
    """Raised when a required hook finds the module of its target but not the attribute."""


class ConfigError(AspectsError, ValueError):
    """Raised when an environment variable, flag or configuration file has a value that is not allowed."""


class AttachError(AspectsError, RuntimeError):
    """Raised when a running process cannot be asked or attached to; names what helps."""


class PlatformError(AspectsError, RuntimeError):
    """Raised when no platform can be chosen, or the chosen one does not work."""


class PlatformTypeError(PlatformError, TypeError):
    """Raised when a platform plugin or SGLANG_PLATFORM names something that is not an SRTPlatform class."""


class OperatorError(AspectsError, RuntimeError):
    """Raised when an operator is unknown, cannot be registered, or has no implementation that may serve."""


class OperatorSignatureError(OperatorError, TypeError):
    """Raised when an implementation is registered whose function takes other arguments than the operator."""


class UnsupportedCallError(OperatorError, NotImplementedError):
    """Raised by an implementation, before it writes anything, for a call that it does not support."""


class EngineError(AspectsError, RuntimeError):
    """Raised when the embedded engine cannot serve; the subclasses give the reason."""


class ModelLoadError(EngineError):
    """Raised when a model folder or file is missing, incomplete, damaged, or of an unknown architecture."""


class InvalidRequestError(EngineError, ValueError):
    """Raised when a request can never be served: too long a prompt, a sampling value out of range."""


class QueueFullError(EngineError):
    """Raised when ``max_queued_requests`` requests are waiting: try again later."""


class SchedulerDiedError(EngineError, ConnectionError):
    """Raised to every waiting caller when the scheduler process has ended, with its exit code or error."""
