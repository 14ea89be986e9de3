"""Exporters that other packages register with OpenTelemetry: made within a time limit, named in errors."""

from __future__ import annotations

import threading
from typing import Any

from sgl_aspects.errors import ConfigError
from sgl_aspects.tracing.settings import installed_exporter

#: Seconds that an exporter may take to be made: the other exporters wait for it.
_SECONDS = 10.0


def make_registered(signal: str, name: str, methods: tuple[str, ...]) -> Any:
    """Make the exporter of the entry point ``name``; ``signal``: traces or metrics.

    :raises ConfigError: it is not installed, raises, takes too long, or lacks one of ``methods``.
    """
    point = installed_exporter(signal, name)
    if point is None:
        raise ConfigError(f"OTEL_{signal.upper()}_EXPORTER names {name!r}, which is no longer installed")
    distribution = point.dist.name if point.dist is not None else "an unknown distribution"
    exporter = f"the exporter {name!r} ({point.value} of {distribution})"
    made: list[Any] = []
    faults: list[BaseException] = []

    def make() -> None:
        try:
            made.append(point.load()())
        except BaseException as error:  # noqa: BLE001  # sys.exit among them: reported below
            faults.append(error)

    maker = threading.Thread(target=make, name=f"make {name}", daemon=True)
    maker.start()
    maker.join(_SECONDS)
    if faults:
        raise ConfigError(f"{exporter} cannot be made: {type(faults[0]).__name__}: {faults[0]}") from faults[
            0
        ]
    if not made:
        raise ConfigError(f"{exporter} was not made within {_SECONDS:g} s")
    lacking = [method for method in methods if not callable(getattr(made[0], method, None))]
    if lacking:
        raise ConfigError(f"{exporter} made {made[0]!r}, which has no {lacking[0]}()")
    return made[0]
