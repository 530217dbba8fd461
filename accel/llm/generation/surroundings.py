"""What is found out about a language model beside its layers, once they are tried: by stock runs that are looked at."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from accel.in_flight import Here
from accel.libraries.cache import DynamicCache
from accel.libraries.generation import ARGUMENTS, OUTPUTS
from accel.llm.generation.decoder import DecoderForward
from accel.llm.generation.model_guard import ModelGuard, reading, relevant
from accel.llm.generation.trial import PROMPT, fused_layers, pieces_of, plainly, written
from accel.llm.recording.inputs import within_positions
from accel.llm.recording.recorder import resting


def guard_of(forward: DecoderForward, call: Callable | None = None) -> ModelGuard:
    """What stock reads in a prompt and a step, of which the fused forward does not ask.

    call: runs pieces of a text fused, where stock layers are between; else all layers are. Then modules around them are
    shown what only the fused forward has; between stock layers they are shown what stock would show them.
    """
    pieces = list(pieces_of(forward, within_positions(forward.most_positions, (PROMPT, 1))))
    with resting(forward.module):
        with reading(forward.module) as stock, _calling(forward) as around:
            cache = DynamicCache() if call is None else DynamicCache(config=forward.module.config)
            with plainly(forward):
                for piece in pieces:
                    forward.reference(**piece, **forward.given_cache(cache))
        with fused_layers(forward):
            forward.apart = True
            try:
                with reading(forward.module) as fused:
                    forward.ready()
                    (partial(written, forward) if call is None else call)(pieces)
            finally:
                forward.apart = False
    forward.seen = None
    shown = around - {""} if call is None else ()
    return ModelGuard(forward.module, relevant(stock, fused, (*ARGUMENTS, *OUTPUTS)), shown)


@contextmanager
def _calling(forward: DecoderForward) -> Iterator[set[str]]:
    """Inside, notes the paths of modules that are called, but for those inside layers."""
    inside = {module for layer in forward.layers for module in layer.module.modules() if module is not layer.module}
    found: set[str] = set()
    with ExitStack() as undo:
        for path, module in forward.module.named_modules():
            if module not in inside:
                note = Here(partial(_note, found, path))
                undo.callback(module.register_forward_pre_hook(note).remove)
        yield found


def _note(found: set[str], path: str, *_: object) -> None:
    found.add(path)
