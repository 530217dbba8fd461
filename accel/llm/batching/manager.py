"""The manager of continuous batching that callers meet: transformers' public surface over an engine of ours."""

import asyncio
import copy
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, filterfalse, islice
from time import perf_counter
from typing import Any

from transformers import ContinuousBatchingConfig, ContinuousBatchingManager, GenerationConfig, PreTrainedModel

from accel.cuda_graphs.adapter_group import known_adapter
from accel.libraries.batching import CACHED, GenerationOutput, logger
from accel.llm.batching.engine import Engine
from accel.llm.batching.engine_thread import EngineThread
from accel.llm.batching.ranks import OneRank, Stop
from accel.llm.batching.request import BY_PROMPT, Request, StopStrings, checked_ids, finish, prompt_of, token_set
from accel.llm.batching.results import Results
from accel.llm.batching.sampling import SamplingDefaults

UNREAD = 2**14  # outputs that a rank keeps which follows another, and may have no reader


class BatchManager(ContinuousBatchingManager):
    """Takes requests, runs them on a thread of its own, and hands out their results, as stock's manager does.

    A subclass of stock's, because what frees cached managers asks for that. No code of stock's runs: its constructor is
    not called, and every public method is overridden.

    Other than stock: a request that is wrong fails alone; cancelled requests come out, failed; what a step raises fails
    the requests in that step, not all; a stop during KeyboardInterrupt waits for nobody; settings are each request's
    own.

    model: in evaluation mode from here on. build: makes an engine, at the first `warmup` or `start` and again after one
    was given back. settings: gives what a generation configuration asks for; raises ValueError or TypeError for what
    is not understood. continuous_batching_config: of its fields only those that say how much and which results matter;
    those about stock's kernels change nothing. ranks: by which managers of ranks that share the model go together. The
    first rank's requests run on all of them, and all give their results; what the others add is not taken, as in stock.
    """

    takes_settings = True  # a server asks: `add_request` takes settings of each request

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        continuous_batching_config: ContinuousBatchingConfig,
        build: Callable[[], Engine],
        settings: Callable[[GenerationConfig], SamplingDefaults],
        ranks: OneRank | None = None,
    ) -> None:
        self.model = model.eval()
        self.continuous_batching_config = copy.deepcopy(continuous_batching_config)
        self._ranks = ranks or OneRank()
        self.is_tp_driver = self._ranks.leads
        self._settings = settings
        self.configure(generation_config)
        self._vocabulary = model.get_input_embeddings().weight.shape[0]
        self._results = Results(None if self.is_tp_driver else UNREAD)
        self._lock, self._numbers = threading.Lock(), count()
        most_waiting = self.continuous_batching_config.max_queue_size
        devices = list(dict.fromkeys([model.device, *(one.device for one in model.parameters())]))
        self._thread = EngineThread(build, devices, self._results, most_waiting, self._ranks)
        weakref.finalize(self, self._thread.ending.abandon)

    def __reduce__(self) -> tuple:
        return type(None), ()  # a copy of the model has none; it makes its own

    def configure(self, generation_config: GenerationConfig) -> None:
        """What requests get from now on that do not say otherwise. Raises ValueError or TypeError."""
        self._defaults = self._ranks.settings = self._settings(generation_config)
        if generation_config.stop_strings:
            logger.warning("stop_strings count for requests that are added with a tokenizer, and for no others.")
        self.generation_config = generation_config
        self.num_return_sequences: int = getattr(generation_config, "num_return_sequences", None) or 1

    # -- the thread ----------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine | None:
        """The one that is there, if one is."""
        return self._thread.engine

    @property
    def warmed_up(self) -> bool:
        """Whether the engine is there, with its memory."""
        return self.engine is not None

    @property
    def background_thread_status(self) -> EngineThread:
        """What servers ask for `fatal_error`: what ended the thread."""
        return self._thread

    @property
    def batch_processor(self) -> None:
        """Stock's inner works, of which there are none."""

    @property
    def current_batch(self) -> int:
        """Steps that have run."""
        return self._thread.steps

    def switch_to_cb_friendly_attn(self, model: PreTrainedModel, auto_switch_to_flash: bool = True) -> None:
        """Does nothing: any attention that the model was optimized with will do."""

    def warmup(self) -> None:
        """Makes the engine. Raises what that raises, such as torch.OutOfMemoryError."""
        if not self.is_running():
            self._ranks.free()
            self._thread.ready()

    def is_running(self) -> bool:
        """Whether the thread was started and has not ended."""
        return self._thread.running

    def start(self) -> None:
        """Starts the thread. Does nothing but warn where it runs."""
        if self.is_running():
            logger.warning("Manager thread is already running.")
        else:
            self._thread.start()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Ends the thread once all requests are finished; at once with hard_stop or while a KeyboardInterrupt is on its
        way: the requests then fail.

        block: waits for that, up to `timeout` seconds. keep_for_next_session: the memory is kept, and the manager in
        the model, for the next `init_continuous_batching`. Raises RuntimeError inside a `pause` of the same thread.
        """
        loop = self._thread
        if loop.ending.thread is None:
            kept = " Hence the unstarted manager will not be kept for next session." if keep_for_next_session else ""
            logger.warning(f"Manager not started.{kept}")
            return
        if loop.is_pausing():
            raise RuntimeError(
                "Cannot stop the manager from inside a pause: the generation loop is paused and cannot exit, so "
                "this would wait forever. Leave the `pause` context before calling `stop`."
            )
        loop.keeps = keep_for_next_session
        begun, interrupted = perf_counter(), isinstance(sys.exc_info()[1], KeyboardInterrupt | SystemExit)
        loop.stop(Stop.NOW if hard_stop or interrupted else Stop.WHEN_DONE)
        if block:
            self.join(begun, timeout)
        if keep_for_next_session:
            logger.info("Continuous batching manager will be kept for next session.")
            setattr(self.model, CACHED, self)
        elif not self.is_running():
            loop.close()

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        """Waits for the thread to end, up to `timeout` seconds, and warns where it does not."""
        thread = self._thread.ending.thread
        if thread is None:
            return
        thread.join(timeout)
        if thread.is_alive():
            logger.warning(f"Generation thread did not exit after join timeout ({timeout}).")
        else:
            logger.info(f"Background generation thread stopped after {perf_counter() - stop_trigger_time:.2f}s.")
            self._thread.ending.thread = None

    def destroy(self) -> None:
        """Stops, and gives all memory back. Any number of times."""
        if self.is_running():
            self.stop()
        self._thread.close()

    def end(self, reason: str) -> None:
        """Ends the thread now; requests that are not finished fail for this reason. Any number of times."""
        self._thread.keeps = False
        self._thread.stop(Stop.NOW, reason)
        if self._thread.ending.thread is not None:
            self._thread.ending.thread.join()
        self._thread.close()

    def rebuild(self, build: Callable[[], Engine]) -> None:
        """Engines are made so from now on; the one that is there is given back."""
        self.destroy()
        self._thread.build = build

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside, no step runs, and the device has done all that was begun: the model may be changed in place. Requests
        go on afterwards. Raises RuntimeError where no thread runs.
        """
        if not self.is_running():
            raise RuntimeError("Cannot pause generation while no generation loop is running.")
        with self._thread.pause():
            yield

    # -- requests ------------------------------------------------------------------------------------------------------

    def add_request(
        self,
        input_ids: Iterable[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | Iterable[int] | None = None,
        stop_strings: str | Iterable[str] | None = None,
        tokenizer: Any = None,
        generated: Sequence[int] = (),
        adapter: str | None = None,
        **logit_processor_kwargs: Any,
    ) -> str | None:
        """Puts a request in line. Its id; None, with a warning, where no more are taken, and on a rank that follows.

        input_ids: numbers of tokens, a list, array or tensor of one dimension; or a mapping of what generate() takes
        for one text with pictures, as a processor gives it. max_new_tokens, eos_token_id: those of
        the generation configuration where None. streaming: an output comes with every token. stop_strings: the request
        ends with the token that completes one of them, as the tokenizer decodes its answer; None for those of the
        generation configuration, which stock leaves out, and so does this without a tokenizer. logit_processor_kwargs:
        this request's own settings. generated: tokens that the answer begins with, drawn elsewhere with equal settings;
        it goes on as it would have there. adapter: peft's, by its name, "__base__" for none, None for those that are
        active. A request that makes no sense comes out failed. Raises ValueError for an id that is under way,
        queue.Full where `max_queue_size` others wait for ten seconds.
        """
        if not self.is_tp_driver:
            return None
        made = self.request(
            input_ids, request_id, max_new_tokens, streaming, record_timestamps, eos_token_id, stop_strings, tokenizer,
            generated, adapter, **logit_processor_kwargs,
        )  # fmt: skip
        return made.id if self._thread.add(made) else None

    def request(
        self,
        input_ids: Iterable[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | Iterable[int] | None = None,
        stop_strings: str | Iterable[str] | None = None,
        tokenizer: Any = None,
        generated: Sequence[int] = (),
        adapter: str | None = None,
        **settings: Any,
    ) -> Request:
        """What `add_request` puts in line for these arguments; where they make no sense, it has failed already."""
        config, answers = self.generation_config, self.num_return_sequences
        made = Request(
            id=self._ids(1)[0] if request_id is None else request_id,
            prompt=[],
            max_new_tokens=config.max_new_tokens if max_new_tokens is None else max_new_tokens,
            eos=token_set(config.eos_token_id if eos_token_id is None else eos_token_id),
            sampling=None,
            streaming=streaming,
            record_timestamps=record_timestamps,
            settings=settings,
        )
        if stop_strings is None and tokenizer is not None:
            stop_strings = config.stop_strings
        try:
            input_ids = prompt_of(input_ids)
            made.prompt = checked_ids(input_ids, self._vocabulary)
            made.given = dict(getattr(input_ids, "given", {}))
            if made.max_new_tokens is not None and made.max_new_tokens < 0:
                raise ValueError(f"max_new_tokens={made.max_new_tokens!r}: give a number from 0 on, or None")
            if len(generated):
                if answers > 1:
                    raise ValueError(f"generated={generated!r}: num_return_sequences={answers} answers begin alike")
                made.tokens = checked_ids(generated, self._vocabulary)
            made.adapter = None if adapter is None else known_adapter(self.model, adapter)
            made.sampling = self._defaults.request(made.prompt, made.max_new_tokens, sorted(made.eos), **settings)
            if stop_strings:
                made.stopping_criterion = StopStrings(stop_strings, tokenizer, len(made.prompt))
        except (ValueError, TypeError) as error:
            finish(made, str(error))
        return made.with_children(answers - 1)

    def add_requests(
        self,
        inputs: Sequence[Iterable[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        stop_strings: str | Iterable[str] | None = None,
        tokenizer: Any = None,
        **logit_processor_kwargs: Any,
    ) -> list[str]:
        """Puts many in line, those that begin alike behind one another where prompts may be shared. Their ids, in the
        order of the inputs; also on a rank that follows, where their results come too if the first rank adds as many.
        """
        eos = self.generation_config.eos_token_id
        eos = self.model.config.eos_token_id if eos is None else eos
        eos = -1 if eos is None else eos
        common = max_new_tokens, streaming, record_timestamps, eos, stop_strings, tokenizer
        # In the order of the inputs, by which those that sample get their seeds: no answer hangs on its company.
        ids = self._ids(len(inputs))
        given = zip(inputs, ids, BY_PROMPT.get() or [None] * len(inputs), strict=True)
        asked = [self.request(one, id_, *common, adapter=name, **logit_processor_kwargs) for one, id_, name in given]
        if not self.is_tp_driver:
            self._results.ask(one.id for request in asked for one in request.family)
            return ids
        if self.continuous_batching_config.allow_block_sharing:
            asked.sort(key=lambda request: request.prompt, reverse=True)
        for request in asked:
            self._thread.add(request)
        return ids

    def cancel_request(self, request_id: str) -> None:
        """The request ends where it is, and comes out as failed. Ids that are not under way are ignored."""
        self._thread.cancel(request_id)

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """The next result, or this request's. Waits up to `timeout` seconds, or as long as one may come; else None."""
        return self._results.take(request_id, timeout, lambda: self._thread.goes_on)

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Results as they come, until the thread has ended and none is left."""
        return iter(self.get_result, None)

    def request_id_iter(self, request_id: str) -> Generator[GenerationOutput]:
        """Results of this request as they come, the last one included."""
        while (result := self.get_result(request_id)) is not None:
            yield result
            if result.is_finished():
                return

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], object]) -> None:
        """Results of this request are given to the callback, on the event loop that runs here, instead of the queue.

        Before or after the request is added. What the callback raises is logged. Raises RuntimeError where no event
        loop runs, ValueError for a request that is under way and has one.
        """
        self._results.handle(request_id, callback, asyncio.get_running_loop())

    def _ids(self, number: int) -> list[str]:
        """Names that no request under way has; on a rank that follows, it may be the one meant."""
        names: Iterator[str] = map("req_{}".format, self._numbers)
        if self.is_tp_driver:
            names = filterfalse(self._results.is_under_way, names)
        with self._lock:
            return list(islice(names, number))
