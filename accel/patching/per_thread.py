"""State that every thread has of its own."""

import threading


class PerThread:
    """Keeps in `_local` what copies and pickles do not take along: a copy begins with nothing."""

    def __init__(self):
        self._local = threading.local()

    def __getstate__(self):
        return {}

    def __setstate__(self, state):
        vars(self).update(vars(type(self)()))
