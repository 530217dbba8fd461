"""Gluon kernels with specialized warps run as plain Python over numpy: a thread to each partition.

Barriers count arrivals and bytes as the hardware does. Products and stores happen as late as they may, when they are
waited for; loads at once or, like them, late. So a slot that is loaded anew too early, or read too early, gives wrong
sums, and a phase that never comes raises.
"""

import random
import threading
import time

import numpy as np

from support.kernels.warpgroups import Array, Barriers, Gluon, Ring

PATIENCE = 20.0  # seconds, after which a wait counts as one without end


class CountingBarrier:
    """A barrier of arrivals and bytes; `loads` are those that it will count."""

    def __init__(self, changed: threading.Condition):
        self.changed, self.phase, self.count, self.missing, self.owed, self.loads = changed, 0, 0, 0, 0, []

    def _turn(self):
        if self.missing == 0 and self.owed == 0:
            self.phase, self.missing = self.phase + 1, self.count
            self.changed.notify_all()

    def arrive(self, owed=0):
        with self.changed:
            assert self.missing > 0, "more arrivals than a phase has"
            self.missing, self.owed = self.missing - 1, self.owed + owed
            self._turn()

    def loaded(self, size):
        with self.changed:
            self.owed -= size
            self._turn()

    def wait(self, parity):
        with self.changed:
            until = time.monotonic() + PATIENCE
            while self.phase % 2 == parity:
                while self.loads and self.missing == 0:
                    self.loads.pop(0)()
                if self.phase % 2 == parity and not self.changed.wait(until - time.monotonic()):
                    raise TimeoutError("a wait for a phase that does not come")


class Partitions(Gluon):
    """Stands for `gl`, and for the instructions of Hopper. dtype: of the operands. seed: of who runs when."""

    int8, int32, float32 = "int8", "int32", "float32"

    def __init__(self, at_once, dtype, seed=0):
        super().__init__(at_once)
        self.dtype, self.random, self.changed = dtype, random.Random(seed), threading.Condition(threading.RLock())
        self.local, self.barriers = threading.local(), []

    to_tensor = staticmethod(int)

    def pause(self):
        if self.random.random() < 0.2:
            time.sleep(self.random.random() * 1e-3)

    def allocate_shared_memory(self, dtype, shape, layout):
        if shape[1:] == [1]:
            return Barriers(CountingBarrier(self.changed) for _ in range(shape[0]))
        return Ring(np.full(shape, np.nan), dtype)

    def init(self, barrier, count):
        barrier.count = barrier.missing = count

    def expect(self, barrier, size):
        barrier.arrive(size)

    def arrive(self, barrier, pred=True):
        if pred:
            self.pause()
            barrier.arrive()

    def wait(self, barrier, parity):
        self.pause()
        barrier.wait(int(parity))

    def start_load(self, descriptor, place, barrier, buffer):
        place = [int(one) for one in place]
        size = buffer.data.size * descriptor.size
        assert list(buffer.shape) == descriptor.block_type.shape

        filling = descriptor.loading(place, buffer)

        def load():
            filling()
            barrier.loaded(size)

        if self.at_once:
            load()
        else:
            with self.changed:
                barrier.loads.append(load)
                self.changed.notify_all()

    def start_store(self, descriptor, place, buffer):
        def store():
            to = descriptor.part(place)
            to[...] = buffer.data[: to.shape[0], : to.shape[1]]

        self.local.stores.append(store)

    def store_wait(self, pending):
        while len(self.local.stores) > pending:
            self.local.stores.pop(0)()

    def warpgroup_mma(self, left, right, acc, is_async, use_acc=True):
        chain = getattr(acc, "chain", object())  # of sums that one product after the other is added to
        acc = Array(acc.data.copy() if use_acc else np.zeros_like(acc.data))
        acc.chain = chain
        self.local.products.append((acc, left, right))
        return acc

    def warpgroup_mma_wait(self, left_over, deps):
        while len(self.local.products) > left_over:
            acc, left, right = self.local.products.pop(0)
            acc.data += left.data @ right.data
            for later, *_ in self.local.products:  # begun from sums that were not there yet
                if later.chain is acc.chain:
                    later.data += left.data @ right.data
        return deps[0] if len(deps) == 1 else deps

    def warp_specialize(self, partitions, warps, registers):
        assert len(warps) == len(registers) == len(partitions) - 1
        errors = []

        def run(function, args):
            self.local.stores, self.local.products = [], []
            try:
                function(*args)
                assert not self.local.stores and not self.local.products, "left under way"
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=one, daemon=True) for one in partitions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE)
        if errors:
            raise errors[0]
        assert not any(thread.is_alive() for thread in threads)
