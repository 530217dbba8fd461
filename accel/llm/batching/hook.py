"""The patch of `init_continuous_batching` of one model, which `generate_batch` calls: it returns our manager."""

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, ContinuousBatchingManager, GenerationConfig, PreTrainedModel

from accel.cuda_graphs.adapter_group import adapted_layers, known_adapter
from accel.cuda_graphs.runner import GraphRunner
from accel.errors import Refused, Unfit
from accel.libraries.adapters import BASE_ROW
from accel.libraries.batching import CACHED, INIT, logger, steady_tokens
from accel.llm.batching.engine import Engine, unfit_reason
from accel.llm.batching.limits import limits_of, sets_of, within_budget
from accel.llm.batching.manager import BatchManager
from accel.llm.batching.ranks import CALL, AllRanks, OneRank
from accel.llm.batching.request import BY_PROMPT, prompt_of
from accel.llm.batching.sampling import SamplingDefaults
from accel.llm.batching.spread import head_device
from accel.llm.batching.trial import refusal
from accel.llm.generation.decoder import DecoderForward
from accel.llm.generation.loop.hooks import MethodHook
from accel.llm.pipeline.stretch import StretchGraphs
from accel.offload.call_hooks import streamed_model
from accel.parallel.agreement import require_agreement
from accel.parallel.lockstep import Lockstep
from accel.patching.rule import Context, Patch, StayingPatch
from accel.planning.plan import StageResult

NEVER = (lambda: None), None
PLAIN = (bool, int, float, str, list, tuple, type(None))
REFUSED = f"{CALL}: adapter= and pictures are not for stock's own batching, which is to run"
ENDED = "the model is no longer optimized as it was: accel.restore, optimize or verify was called; make a new manager"


class InitContinuousBatching(MethodHook):
    """Stands in `vars(module)["init_continuous_batching"]`; gives stock's manager where the model cannot be batched.

    runner: of the CUDA graphs that engines replay, kept from one to the next; None for none.
    """

    name = INIT

    def __init__(
        self, module: PreTrainedModel, forward: DecoderForward, runner: GraphRunner | StretchGraphs | None = None
    ):
        super().__init__(module, forward)
        self.runner = runner
        self.managers: weakref.WeakSet[BatchManager] = weakref.WeakSet()
        self.tried: tuple[Callable[[], object], str | None] = NEVER  # the model as it was then, and why it was refused
        self.sizes: dict[str, float] | None = None  # of the engine that was made last
        self.lockstep: Lockstep | None = None  # of ranks that share the model, from their first manager on

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "forward": self.forward, "runner": self.runner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def forget(self) -> None:
        self.tried = NEVER

    @torch.no_grad()
    def call(self, *args: Any, **kwargs: Any) -> ContinuousBatchingManager:
        cached = vars(self.module).get(CACHED)
        if isinstance(cached, ContinuousBatchingManager) and not isinstance(cached, BatchManager):
            return self._stock_manager("the model keeps a manager of stock's", args, kwargs)
        self.module.eval()  # as stock does
        reason = self.refused() if self.forward.ranks is None else self._agreed(cached, self.arguments(args, kwargs))
        if reason is None:
            try:
                return self.manager(cached, **self.arguments(args, kwargs))
            except (ValueError, TypeError, Unfit) as error:  # settings that only stock has an answer to
                reason = str(error)
        if cached is not None:
            cached.destroy()
            delattr(self.module, CACHED)
        self.forward.log.fell_back(self.forward.path, f"generate_batch: {reason}")
        return self._stock_manager(reason, args, kwargs)

    def _stock_manager(self, reason: str | None, args: tuple, kwargs: dict) -> ContinuousBatchingManager:
        if BY_PROMPT.get() is not None:
            raise Refused(f"{REFUSED}: {reason}")
        given = self.arguments(args, kwargs)
        return self.stock(**given | within_budget(self.forward, **given))

    def refused(self) -> str | None:
        """Why stock is to batch the model as it is now. Tried anew where the model has changed."""
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):  # as on the thread of steps
            reason = unfit_reason(self.forward)
            if reason is None and self.tried[0]() is not self._state():
                reason = refusal(self.forward)
                self.tried = weakref.ref(self._state()), reason
            return reason or self.tried[1]

    def _state(self) -> Any:
        """What is another once the model has changed; that weights stream from other places is no change."""
        placed = streamed_model(self.module)
        return placed.pieces[-1] if placed is not None and placed.pieces else self.forward.seen

    def _agreed(self, cached: ContinuousBatchingManager | None, given: dict[str, Any]) -> str | None:
        """`refused` of all ranks, which then make the same manager. Raises errors.Refused where they cannot agree."""
        ranks = self.forward.ranks
        assert ranks is not None
        reason, taken, lockstep = unfit_reason(self.forward), ranks.taken, self.lockstep
        meets = lockstep is not None and lockstep.channel.whole
        told: dict[str, object] = {
            "the model": reason or "fit",
            "a trial of it": "past" if self.tried[0]() is self.forward.seen else "due",
            "whether they have met before": meets,
            "what computes with these ranks already": taken,
            "a manager that was kept": cached is not None,
        }
        config = given.get("generation_config") or self.module.generation_config
        for name, one in (given | {"generation_config": config}).items():
            plain = {} if one is None else {key: value for key, value in vars(one).items() if isinstance(value, PLAIN)}
            told |= {f"{name}.{key}": value for key, value in plain.items()}
        require_agreement(ranks, CALL, told)
        if taken:
            raise Refused(f"{CALL}: {taken} computes with all ranks; stop it before another one")
        if reason is not None:
            return reason
        if lockstep is None or not meets:
            self.close()
            self.lockstep = lockstep = Lockstep(ranks)
        reason = self.refused()
        return lockstep.reasons(reason or "") if lockstep.most([reason is not None])[0] else None

    def manager(
        self,
        cached: BatchManager | None,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: Any = None,
    ) -> BatchManager:
        """The one that was kept, or a new one. Raises ValueError or TypeError for settings that are not understood."""
        self._check_lengths(workload_hints)
        if cached is not None:
            logger.info("Cached continuous batching manager found: it will be re-used instead of creating a new one.")
            if generation_config is not None:
                cached.configure(_ended(generation_config))
            self.resize(cached, workload_hints)
            return cached
        given = self.module.generation_config if generation_config is None else generation_config
        if given is None:
            raise ValueError("A GenerationConfig must be provided or set in the model.")
        batching = continuous_batching_config
        if batching is None:
            batching = getattr(given, "continuous_batching_config", None)
            if isinstance(batching, ContinuousBatchingConfig):
                logger.warning(
                    "Passing ContinuousBatchingConfig through GenerationConfig is deprecated. Please pass it separately"
                    " using the continuous_batching_config kwarg."
                )
            else:
                batching = ContinuousBatchingConfig()
        made = BatchManager(
            self.module,
            _ended(given),
            batching,
            partial(self.build, batching, workload_hints),
            partial(_defaults, self.forward, batching),
            OneRank() if self.lockstep is None else AllRanks(self.lockstep),
        )
        self.managers.add(made)
        return made

    def _check_lengths(self, hints: Any) -> None:
        """Raises ValueError where texts to come would change the rotary frequencies of one another."""
        steady = steady_tokens(self.module.config)
        most = limits_of(self.forward, ContinuousBatchingConfig(), hints).context
        if steady is None or most <= steady:
            return
        reason = f"texts of more than {steady} tokens change the rotary frequencies of all that are computed with them"
        if hints is not None:
            raise ValueError(reason)
        logger.warning(f"{reason}, by accel as by transformers")

    def build(self, config: ContinuousBatchingConfig, hints: Any) -> Engine:
        """An engine of the size that these ask for; on ranks, one on each with as many blocks as the rank has room for
        that has the least. Raises torch.OutOfMemoryError, ValueError for numbers that make no sense.
        """
        limits, shapes = limits_of(self.forward, config, hints), self.forward.shapes()
        on_gpu = shapes[0].device.type == "cuda"  # the model may have been moved
        engine_of = partial(Engine, self.forward, runner=self.runner if on_gpu else None)
        if self.lockstep is None:
            engine = engine_of(limits=limits)
        else:
            room = partial(limits.fitted, shapes, sets_of(self.forward))
            own = self.lockstep.all_do("memory for keys and values", room)
            rows, blocks, slots = map(self.lockstep.least, (own.rows, own.blocks or 0, own.slots or 0))
            fitted = replace(limits, rows=rows, blocks=blocks, slots=slots if own.slots else None)
            engine = self.lockstep.all_do("an engine", partial(engine_of, limits=fitted))
            engine.asked = limits
        engine.sampler.prepare(self.forward.embeddings().dtype)
        self.sizes = engine.sizes()
        return engine

    def report_row(self) -> dict[str, Any] | None:
        """What the engine that was made last holds, for the report; None where there was none."""
        return None if self.sizes is None else {"path": self.forward.path} | self.sizes

    def resize(self, manager: BatchManager, hints: Any) -> None:
        """Where the engine it keeps is too small for what comes, it makes another one at its next start."""
        engine, config = manager.engine, manager.continuous_batching_config
        if hints is not None and engine is not None and not manager.is_running():
            wanted, has = limits_of(self.forward, config, hints), engine.asked
            if wanted.context > has.context or wanted.rows > has.rows:
                manager.rebuild(partial(self.build, config, hints))

    def leave(self) -> None:
        """Ends all managers that compute by the fused forward: it is about to be taken apart."""
        for manager in list(self.managers):
            manager.end(ENDED)
        if isinstance(vars(self.module).get(CACHED), BatchManager):
            delattr(self.module, CACHED)
        self.close()

    def close(self) -> None:
        """Gives back the connections to other ranks."""
        if self.lockstep is not None:
            self.lockstep.close()
            self.lockstep = None


class GenerateBatch(MethodHook):
    """Stands in `vars(module)["generate_batch"]`.

    A prompt may be a mapping of what generate() takes for one text with pictures, as a processor gives it. adapter: of
    peft, one for all prompts or a list, None in it for none. Raises ValueError or TypeError where they cannot have it.
    """

    name = CALL

    def call(self, *args: Any, adapter: str | Sequence[str | None] | None = None, **kwargs: Any) -> Any:
        kwargs = self.arguments(args, kwargs)
        kwargs |= kwargs.pop("kwargs", {})
        given = kwargs["inputs"]
        kwargs["inputs"] = list(map(prompt_of, given)) if any(isinstance(one, Mapping) for one in given) else given
        count = len(given)
        asked = [adapter] * count if isinstance(adapter, str) or adapter is None else adapter
        if not isinstance(asked, Sequence) or not all(isinstance(one, str | None) for one in asked):
            raise TypeError(f"adapter={adapter!r}: give a name, or a list of one for each prompt")
        if len(asked) != count:
            raise ValueError(f"adapter={adapter!r}: {len(asked)} for {count} prompts; give a name, or one for each")
        names = [] if adapter is None else [BASE_ROW if one is None else one for one in asked]
        for name in set(names):
            known_adapter(self.module, name)
        if names:
            adapted_layers(self.module)
        by_prompt: Sequence[str | None] | None = names or (None if kwargs["inputs"] is given else [None] * count)
        if by_prompt and not isinstance(vars(self.module).get(INIT), InitContinuousBatching):
            raise Refused(f"{REFUSED}: the model runs stock, see accel.report")
        token = BY_PROMPT.set(by_prompt or None)
        try:
            return self.stock(**kwargs)
        finally:
            BY_PROMPT.reset(token)


class BatchingPatch(Patch):
    """A hook that is put in place, and whose managers end before anything of the model is undone."""

    value: InitContinuousBatching

    def leave(self) -> None:
        self.value.leave()


def batching_hook(
    model: PreTrainedModel, forward: DecoderForward, runner: GraphRunner | StretchGraphs | None = None
) -> list[Patch]:
    """For a model whose class has the method. Not where somebody put another method on the model."""
    if INIT in vars(model) or not hasattr(type(model), INIT):
        return []
    return [BatchingPatch(model, INIT, InitContinuousBatching(model, forward, runner))]


def adapters_by_prompt(model: PreTrainedModel, context: Context) -> StageResult:
    """A stage: `generate_batch` hands on what each prompt has beside tokens, or refuses it; stock leaves it unread."""
    found = hasattr(type(model), CALL) and CALL not in vars(model)
    return StageResult((StayingPatch(model, CALL, GenerateBatch(model, None)),) if found else ())


def _ended(config: GenerationConfig) -> GenerationConfig:
    """A copy in which no token ends a text where none was said to, as stock has it."""
    config = copy.copy(config)
    if config.eos_token_id is None:
        logger.warning("`eos_token_id` not set in GenerationConfig. Setting to -1 (disabled).")
        config.eos_token_id = -1
    return config


def _defaults(
    forward: DecoderForward, batching: ContinuousBatchingConfig, config: GenerationConfig
) -> SamplingDefaults:
    """Raises ValueError or TypeError for a configuration that no request could have."""
    found = SamplingDefaults(forward.module, config, batching, head_device(forward))
    found.request([0], seed=0)
    return found
