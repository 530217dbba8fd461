"""How the thread of an engine is told to end."""

import enum
import sys
import threading

AT_EXIT = 10.0  # seconds that the process waits for a step that is under way


class Stop(enum.IntEnum):
    """How soon the loop ends. Within a session it only grows."""

    NO = 0
    WHEN_DONE = 1  # all requests are finished first
    NOW = 2  # requests that are not finished fail
    STOPPED = 3  # the loop has ended


class Ending:
    """How soon a loop is to end, and what requests are told that it leaves unfinished.

    Knows neither engine nor model: what the garbage collector calls for a manager must not keep them alive.
    """

    def __init__(self) -> None:
        self.reset()
        self.thread: threading.Thread | None = None

    def reset(self) -> None:
        self.how, self.why = Stop.NO, "the generation loop ended before this request was finished"

    def ask(self, how: Stop) -> None:
        """It only ever becomes sooner. Waits for no lock."""
        self.how = max(self.how, how)

    def abandon(self) -> None:
        """Nobody is left who could ask for results. The garbage collector may call it, on any thread."""
        if self.how is not Stop.STOPPED:
            self.why = "the manager of this request was deleted before the request was finished; keep a reference to it"
            self.ask(Stop.NOW)
        if self.thread is not None and not threading.main_thread().is_alive():  # the process is about to exit
            self.thread.join(AT_EXIT)


def interrupted() -> bool:
    """Whether the user or the process wants an end while this is called, as in a `finally`."""
    return isinstance(sys.exc_info()[1], KeyboardInterrupt | SystemExit)
