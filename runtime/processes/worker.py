"""The entry point of the scheduler process.

Plugins come first: they may hook anything in the scheduler, the model runner and the models, so that this
module and all that it needs at import time (the pickled ServerArgs) must not load those.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import traceback
from multiprocessing.connection import Connection

from sgl_aspects.errors import Stop
from sgl_aspects.plugins import load_plugins
from sgl_aspects.runtime.messages import FailureMessage, RankLinks
from sgl_aspects.runtime.server_args import ServerArgs

logger = logging.getLogger(__name__)

#: Signals that the worker processes ignore.
LEFT_TO_OWNER = (signal.SIGINT, signal.SIGTERM)


def run_scheduler_process(server_args: ServerArgs, connection: Connection, ranks: RankLinks) -> None:
    """Load the model and serve until a stop message. An error is sent to the owner, which raises it."""
    # Ctrl-C reaches every process of the terminal, and systemd's SIGTERM every process of the service: the
    # owner decides how to end, and this process ends with it.
    for number in LEFT_TO_OWNER:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_OWNER)
    # OpenMP's threads spin for their next work by default: beside one busy neighbour that costs tenfold.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    scheduler = None
    try:
        load_plugins(compatible=True)
        # Importing torch makes some 300,000 objects that stay. Searching them for garbage takes 0.3 s
        # meanwhile, 0.7 s when the process ends, and a tenth of a second between steps, now and then.
        gc.disable()
        from sgl_aspects.runtime.scheduling.scheduler import Scheduler

        gc.freeze()
        gc.enable()
        scheduler = Scheduler(server_args, connection, ranks)
        scheduler.event_loop()
    except Stop:  # of a plugin that is required
        raise
    except BaseException as error:  # a platform that exits, too: the owner needs the reason
        logger.debug("the scheduler ends", exc_info=True)
        line = traceback.extract_tb(error.__traceback__)[-1]
        failure = FailureMessage(
            type(error).__name__,
            str(error),
            traceback.format_exc(),
            f"{os.path.basename(line.filename)}:{line.lineno}, in {line.name}",
            [] if scheduler is None else scheduler.at_work_on,
        )
        try:
            connection.send(failure)
        except OSError:
            logger.exception("the scheduler failed, and its owner is gone")
        raise SystemExit(1) from None
    finally:
        connection.close()
