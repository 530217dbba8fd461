"""Schedulers without host reads: the stock step, given the value of its timestep on the host.

A pipeline hands `step` an element of `scheduler.timesteps`, which lies on the GPU, and stock reads it back to index its
tables. Its value was known when `set_timesteps` ran, so the host's copy is handed to the stock method instead. A scalar
tensor on the host mixes with any device and goes into a kernel as an argument: same numbers, nothing waits.
"""

import contextlib
import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch

from accel.errors import reason_of
from accel.libraries.code import comes_from
from accel.libraries.diffusion import STEP
from accel.patching.fallback_log import FallbackLog
from accel.patching.owner import InstanceMethod, PartlyCopied
from accel.patching.rule import Context, Match, Patch, Rule, Site, Skip
from accel.planning.targets import is_scheduler

ARGUMENTS = {"model_output", "timestep", "sample"}
# Updates that are linear in their tensors, and the argument whose dtype the result has (UniPC, arXiv:2302.04867).
LINEAR = {"multistep_uni_p_bh_update": "sample", "multistep_uni_c_bh_update": "last_sample"}
UNKNOWN = "its timestep is not an element of scheduler.timesteps, so it is read from the device"
WHOLE = "whole numbers as timesteps, which this scheduler takes from a device alone"
HOST_NOISE = "noise drawn by a CPU generator is copied to the device (a generator on the device needs no copy)"


class HostSchedule(PartlyCopied):
    """The values of `scheduler.timesteps` on the host, valid for the tensor object and version they were copied from.

    Empty where that tensor is on the host itself, or where a change of it in place could not be noticed.
    """

    copied = ("scheduler",)

    def __init__(self, scheduler: object):
        self.scheduler = scheduler
        self.renew()

    def renew(self) -> None:
        self.source: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self.version = 0

    def refresh(self) -> None:
        """Copies the timesteps from the device, if they are not those that were copied last."""
        source = vars(self.scheduler).get("timesteps")
        if not isinstance(source, torch.Tensor) or source.device.type == "cpu" or source.is_inference():
            self.source = self.values = None
        elif source.dim() != 1 or not source.is_contiguous():
            self.source = self.values = None
        elif source is not self.source or source._version != self.version:
            self.source, self.version, self.values = source, source._version, source.cpu()

    def find(self, timestep: Any) -> Any:
        """The timestep on the host, without reading the device; None where only the device knows it.

        A tensor on the device is known by its place: pipelines go through scheduler.timesteps, or a slice of it.
        """
        if not isinstance(timestep, torch.Tensor) or timestep.device.type == "cpu":
            return timestep
        if self.source is None or self.values is None or timestep.dim() > 0 or timestep.dtype != self.source.dtype:
            return None
        if timestep.untyped_storage()._cdata != self.source.untyped_storage()._cdata:
            return None
        index = timestep.storage_offset() - self.source.storage_offset()
        return self.values[index] if 0 <= index < len(self.values) else None

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """scheduler.timesteps is the copy on the host meanwhile: stock looks for the first step's index in it."""
        attributes = vars(self.scheduler)
        if self.source is None:
            yield
            return
        attributes["timesteps"] = self.values
        try:
            yield
        finally:
            if attributes["timesteps"] is self.values:
                attributes["timesteps"] = self.source


class SchedulerCall(InstanceMethod):
    """Stands in `vars(scheduler)[name]`: of a module-level class, so that pickle and deepcopy rebind it to copies."""

    def __init__(self, scheduler: Any, name: str):
        self.scheduler, self.name = scheduler, name

    @property
    def owner(self) -> Any:
        return self.scheduler


class SetTimesteps(SchedulerCall):
    """Stock's set_timesteps; the host's copy is made here, before the loop."""

    def __init__(self, scheduler: Any, name: str, schedule: HostSchedule):
        super().__init__(scheduler, name)
        self.schedule = schedule

    def call(self, *args: Any, **kwargs: Any) -> Any:
        result = self.stock(*args, **kwargs)
        timesteps = vars(self.scheduler).get("timesteps")
        if isinstance(timesteps, torch.Tensor) and timesteps.is_inference():
            with torch.inference_mode(False), torch.no_grad():  # an ordinary tensor counts its changes in place
                vars(self.scheduler)["timesteps"] = timesteps.clone()
        self.schedule.refresh()
        return result


class SchedulerStep(SchedulerCall):
    """Stock's step, or scale_model_input, given timestep and schedule on the host.

    A timestep on the device that is no part of scheduler.timesteps is left to stock, which reads it.
    """

    def __init__(self, scheduler: Any, name: str, schedule: HostSchedule, log: FallbackLog | None):
        super().__init__(scheduler, name)
        self.schedule, self.log = schedule, log
        self.place = list(self.__signature__.parameters).index("timestep")

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.stock(*args, **kwargs)
        by_name = "timestep" in kwargs
        if not by_name and len(args) <= self.place:
            return self.stock(*args, **kwargs)
        self.schedule.refresh()
        timestep = self.schedule.find(kwargs["timestep"] if by_name else args[self.place])
        if timestep is None:
            self._fell_back(UNKNOWN)
            return self.stock(*args, **kwargs)
        if by_name:
            here, named = args, kwargs | {"timestep": timestep}
        else:
            here, named = (*args[: self.place], timestep, *args[self.place + 1 :]), kwargs
        try:
            with self.schedule.in_place(), self._watched(here, named):
                return self.stock(*here, **named)
        except ValueError:  # some schedulers refuse whole numbers on the host, and on a device let them pass
            if timestep.is_floating_point():
                raise
        self._fell_back(WHOLE)
        return self.stock(*args, **kwargs)

    def _fell_back(self, reason: str) -> None:
        if self.log is not None:
            self.log.fell_back("", reason)

    @contextlib.contextmanager
    def _watched(self, args: tuple, kwargs: dict) -> Iterator[None]:
        """Counts steps whose noise a generator on the host drew for tensors elsewhere: the one copy left in a loop."""
        generator = kwargs.get("generator")
        generator = generator[0] if isinstance(generator, list) and generator else generator
        output = args[0] if args else kwargs.get("model_output")
        elsewhere = isinstance(output, torch.Tensor) and output.device.type != "cpu"
        if not elsewhere or not isinstance(generator, torch.Generator) or generator.device.type != "cpu":
            yield
            return
        before = generator.get_state()
        yield
        if not torch.equal(before, generator.get_state()):
            self._fell_back(HOST_NOISE)


class LinearUpdate(SchedulerCall):
    """An update that is a sum of tensors, each times a number: stock finds the numbers on the host.

    Stock computes them on the device, with a copy for every sigma and a solver that reads back whether it failed. Here
    it is run with unit vectors in the place of the tensors, so that its result holds their coefficients; then the
    tensors are added up, in fp32 at least. Tensors on the host are left to stock.
    """

    def call(self, *args: Any, **kwargs: Any) -> Any:
        like = kwargs.get(LINEAR[self.name])
        if args or like is None or like.device.type == "cpu":
            return self.stock(*args, **kwargs)
        if "sample" in kwargs and vars(self.scheduler).get("solver_p") is not None:  # another scheduler's step
            return self.stock(**kwargs)
        tensors = list({id(tensor): tensor for tensor in self._tensors(kwargs)}.values())
        if any(tensor.shape != like.shape for tensor in tensors):
            return self.stock(**kwargs)
        return _weighted_sum(tensors, self.coefficients(tensors, kwargs)).to(like.dtype)

    def _tensors(self, kwargs: dict) -> list[torch.Tensor]:
        given = (*kwargs.values(), *vars(self.scheduler)["model_outputs"])
        return [value for value in given if isinstance(value, torch.Tensor)]

    def coefficients(self, tensors: list[torch.Tensor], kwargs: dict) -> list[float]:
        """What each of the tensors, found among the arguments and the scheduler's model_outputs, is multiplied by."""
        attributes = vars(self.scheduler)
        units = dict(
            zip(map(id, tensors), torch.eye(len(tensors), dtype=torch.float64, device="cpu").unsqueeze(1), strict=True)
        )
        outputs = attributes["model_outputs"]
        attributes["model_outputs"] = [units.get(id(output), output) for output in outputs]
        try:
            sums = self.stock(**{name: units.get(id(value), value) for name, value in kwargs.items()})
        finally:
            attributes["model_outputs"] = outputs
        return sums.flatten().tolist()

    def agrees(self) -> bool:
        """Whether the update is such a sum: one of random tensors, both ways, on a copy of the scheduler."""
        update = LinearUpdate(copy.copy(self.scheduler), self.name)
        names = [name for name in self.__signature__.parameters if name.endswith(("_output", "sample"))]
        generator = torch.Generator().manual_seed(0)
        try:
            order = self.scheduler.config.solver_order
            tensors = list(torch.randn(order + 3, 1, 2, 3, generator=generator, dtype=torch.float64, device="cpu"))
            state = {"sigmas": torch.linspace(0.9, 0.1, order + 2, device="cpu"), STEP: order, "solver_p": None}
            vars(update.scheduler).update(state, model_outputs=tensors[3:])
            kwargs = dict(zip(names, tensors, strict=False)) | {"order": order}
            used = update._tensors(kwargs)
            return torch.allclose(_weighted_sum(used, update.coefficients(used, kwargs)), update.stock(**kwargs))
        except Exception as error:  # whatever an update may raise that is not the one we know
            reason_of(error)
            return False


def _weighted_sum(tensors: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    terms = [(tensor, weight) for tensor, weight in zip(tensors, weights, strict=True) if weight != 0]
    (first, weight), *rest = terms or [(tensors[0], 0.0)]
    total = first.to(torch.promote_types(first.dtype, torch.float32)) * weight
    for tensor, weight in rest:
        total = total.add_(tensor, alpha=weight)
    return total


def match_scheduler(site: Site, context: Context) -> Match | Skip:
    """A scheduler of diffusers whose step takes a model's output, a timestep and a sample."""
    if (reason := _unknown(site.module)) is not None:
        return Skip(reason)
    inner = [part for part in vars(site.module).values() if is_scheduler(part) and _unknown(part) is None]
    calls = [call for part in (site.module, *inner) for call in _calls(part, context.log)]
    odd = [call.name for call in calls if isinstance(call, LinearUpdate) and not call.agrees()]
    note = f"{' and '.join(odd)} left stock: not the sum of tensors it is known as" if odd else ""
    patches = tuple(Patch(call.scheduler, call.name, call) for call in calls if call.name not in odd)
    return Match(patches=patches, note=note)


def _calls(scheduler: object, log: FallbackLog) -> list[SchedulerCall]:
    schedule = HostSchedule(scheduler)
    calls: list[SchedulerCall] = [SetTimesteps(scheduler, "set_timesteps", schedule)]
    calls.append(SchedulerStep(scheduler, "step", schedule, log))
    scale = getattr(type(scheduler), "scale_model_input", None)
    if scale is not None and "timestep" in inspect.signature(scale).parameters:
        calls.append(SchedulerStep(scheduler, "scale_model_input", schedule, None))
    return calls + [LinearUpdate(scheduler, name) for name in LINEAR if hasattr(type(scheduler), name)]


def _unknown(scheduler: object) -> str | None:
    """Why the scheduler is left stock: code that is not diffusers', or a step of another kind."""
    kind: Any = type(scheduler)
    if not comes_from(kind, "diffusers"):
        return f"{kind.__module__}.{kind.__name__} is not a scheduler of diffusers"
    replaced = [name for name in vars(scheduler) if inspect.isfunction(getattr(kind, name, None))]
    if replaced:
        return f"{kind.__name__}.{replaced[0]} was replaced"
    parameters = inspect.signature(kind.step).parameters
    if not ARGUMENTS <= set(parameters):
        return f"{kind.__name__}.step takes {', '.join(list(parameters)[1:])}"
    if "timesteps" not in vars(scheduler):
        return f"{kind.__name__} keeps its timesteps elsewhere"
    return None


def fetch_timesteps(scheduler: object) -> None:
    """Before a loop: what the steps need of the device is fetched now, also where set_timesteps was not ours."""
    step = vars(scheduler).get("step")
    if isinstance(step, SchedulerStep):
        step.schedule.refresh()


RULES = (Rule("scheduler", match_scheduler),)
