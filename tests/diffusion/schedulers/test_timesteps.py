"""Timesteps on the device: those that a scheduler is known to hold are never read back, others are, and counted."""

import pytest
import torch

from accel.diffusion.schedulers import HOST_NOISE, UNKNOWN
from support.diffusion.emulated_device import EmulatedDevice, Far
from support.diffusion.scheduler_loops import equal, make, optimized


class OnDevice:
    """A scheduler with its timesteps on the emulated device, and a loop over whatever tensors one likes."""

    def __init__(self, name: str, steps: int = 6, **config):
        self.stock = make(name, **config)
        self.ours, self.plan = optimized(self.stock)
        self.sample = torch.randn(1, 4, 8, 8)
        self.steps = steps
        self.stock.set_timesteps(steps)

    def loop(self, timesteps=None, **step):
        """All samples, and accesses; timesteps: a function of scheduler.timesteps."""
        with EmulatedDevice() as device:
            self.ours.set_timesteps(self.steps, device="meta")
            sample, outputs = EmulatedDevice.put(self.sample), []
            times = self.ours.timesteps if timesteps is None else timesteps(self.ours)
            device.accesses.clear()
            for t in times:
                given = self.ours.scale_model_input(sample, t)
                sample = self.ours.step(0.5 * given, t, sample, **step).prev_sample
                outputs.append(sample.value)
        return outputs, device.accesses

    def wanted(self, timesteps=None):
        sample, outputs = self.sample, []
        for t in self.stock.timesteps if timesteps is None else timesteps:
            sample = self.stock.step(0.5 * self.stock.scale_model_input(sample, t), t, sample).prev_sample
            outputs.append(sample)
        return outputs


@pytest.mark.parametrize("name", ["DDIM", "DPMSolverMultistep"])
def test_a_timestep_that_is_no_element_is_read_and_counted(name):
    pair = OnDevice(name)
    got, accesses = pair.loop(lambda scheduler: [t.clone() for t in scheduler.timesteps])
    assert accesses and equal(got, pair.wanted())
    assert pair.plan.ledger.rows() == [("", UNKNOWN, 6)]


def test_elements_are_found_however_they_are_taken():
    pair = OnDevice("DDIM")
    got, accesses = pair.loop(
        lambda scheduler: [t for pair in scheduler.timesteps.view(3, 2) for t in pair[1:].squeeze(0)[None]]
    )
    assert accesses == []
    assert equal(got, pair.wanted(pair.stock.timesteps[1::2]))
    assert pair.plan.ledger.rows() == []


def test_a_tensor_of_one_timestep_is_left_to_stock():
    """On the host it would not mix with tensors on the device, as a scalar does."""
    pair = OnDevice("EulerDiscrete")
    got, _ = pair.loop(lambda scheduler: [t[None] for t in scheduler.timesteps])
    assert equal(got, pair.wanted([t[None] for t in pair.stock.timesteps]))
    assert pair.plan.ledger.rows() == [("", UNKNOWN, 6)]


def test_timesteps_set_by_hand_are_copied_once():
    pair = OnDevice("DDIM")

    def by_hand(scheduler):
        scheduler.timesteps = (scheduler.timesteps + 3)[1:]
        return scheduler.timesteps

    got, accesses = pair.loop(by_hand)
    assert accesses == ["_to_copy"]
    assert equal(got, pair.wanted(pair.stock.timesteps[1:] + 3))


def test_timesteps_changed_in_place_are_noticed():
    pair = OnDevice("DDIM")

    def changed(scheduler):
        for number, t in enumerate(scheduler.timesteps):
            if number == 3:
                scheduler.timesteps.sub_(5)
            yield t

    got, accesses = pair.loop(changed)
    assert accesses == ["_to_copy"]
    assert equal(got, pair.wanted([t - 5 * (n >= 3) for n, t in enumerate(pair.stock.timesteps)]))
    assert pair.plan.ledger.rows() == []


def test_under_inference_mode():
    """Tensors made there do not count their changes: set_timesteps leaves one that does."""
    pair = OnDevice("DDIM")
    with torch.inference_mode():
        got, accesses = pair.loop()
    assert accesses == [] and not pair.ours.timesteps.is_inference()
    assert equal(got, pair.wanted())


def test_noise_from_a_generator_on_the_host_is_counted():
    pair = OnDevice("DDIM")
    for eta, copies in ((0.0, 0), (1.0, 6)):
        _, accesses = pair.loop(generator=torch.Generator().manual_seed(0), eta=eta)
        assert accesses == ["copy to the device"] * copies
    assert pair.plan.ledger.rows() == [("", HOST_NOISE, 6)]


def test_an_error_in_a_step_leaves_the_timesteps_on_the_device():
    pair = OnDevice("DDIM")
    with pytest.raises(RuntimeError), EmulatedDevice():
        pair.ours.set_timesteps(6, device="meta")
        pair.ours.step(torch.zeros(3, 3), pair.ours.timesteps[0], EmulatedDevice.put(pair.sample))
    assert isinstance(pair.ours.timesteps, Far)
