"""A thread that brings new rows onto a device before a recall asks for them.

It spares recalls a wait and is needed for nothing: each recall follows the store by itself.
"""

import atexit
import logging
import threading
import weakref

from kalos_ctx._vectors import StoreMoved
from kalos_ctx.errors import StoreClosed

# Pauses in seconds: while rows arrive, at most, and behind an error.
SHORTEST_PAUSE, LONGEST_PAUSE, ERROR_PAUSE = 0.002, 0.05, 1.0
# So long, in seconds, whoever ends the thread waits for it.
STOP_WAIT = 5.0

LOG = logging.getLogger(__name__)

# Those that run when the interpreter ends: a thread in the driver would crash it then.
RUNNING = weakref.WeakSet()


class RowFollower:
    """Bring new rows over every few milliseconds while there are some, seldom while there are none.

    The thread ends with `stop`, and by itself when the rows are gone or closed, when the store is
    closed, or when it goes on in another generation.

    Parameters
    ----------
    rows : DeviceRows
        Not kept alive.
    newest : callable
        Called with the RowMap that it gave before (None at first), gives the newest.
    """

    def __init__(self, rows, newest):
        self.ended = threading.Event()
        self.thread = threading.Thread(
            target=keep_following, args=(weakref.ref(rows), newest, self.ended),
            name="kalos-rows", daemon=True)
        self.thread.start()
        RUNNING.add(self)

    @property
    def runs(self):
        """Whether the thread has not ended yet."""
        return self.thread.is_alive()

    def stop(self):
        """End the thread; idempotent."""
        self.ended.set()
        # It may be waiting for a writer that opens the store; it then ends behind that.
        if self.thread is not threading.current_thread():
            self.thread.join(STOP_WAIT)


@atexit.register
def stop_all():
    """End every such thread; called when the interpreter ends."""
    for follower in list(RUNNING):
        follower.stop()


def keep_following(rows_ref, newest, ended):
    """Bring new rows over until `ended` is set, or the rows or their generation are gone."""
    pause, known, failed = SHORTEST_PAUSE, None, False
    while not ended.wait(pause):
        rows = rows_ref()
        if rows is None:
            return
        try:
            known = newest(known)
            came = rows.bring_newest(known)
        except (StoreMoved, StoreClosed):
            return
        except Exception as error:  # the next recall that needs the rows raises it to its caller
            if not failed:
                LOG.warning("new vectors cannot be brought onto the GPU: %s", error)
            pause, failed = ERROR_PAUSE, True
        else:
            pause, failed = SHORTEST_PAUSE if came else min(pause * 2, LONGEST_PAUSE), False
        finally:
            del rows
