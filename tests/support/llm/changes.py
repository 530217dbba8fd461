"""What users do to a language model between two calls, as a table: stock and ours go through it side by side.

What is changed in one module of a layer is in `support.module_changes`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from support.llm.edits import modules, weights
from support.llm.edits.modules import around, config, hook, unhook
from support.llm.edits.places import (
    choose,
    delete,
    do,
    first,
    lora,
    matrix,
    merge,
    mlp,
    prefix,
    switch,
    unmerge,
    wrapped,
)
from support.llm.edits.weights import in_place, through_data


@dataclass(frozen=True)
class Change:
    """steps: functions of a model, a call after each; where one returns another model, that one is called from then on.

    reverse: how users take the change back; None where they cannot. shows: whether stock computes something else after
    the first step. slack: where rounding is coarser, how much more may differ. only: the families that can have it.
    """

    name: str
    steps: tuple[Callable, ...]
    reverse: Callable | None = None
    shows: bool = True
    slack: float = 1
    only: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


LLAMA_LIKE = ("llama", "gpt-neox")  # made of nn.Linear
CHANGES = (
    Change("lora", (lora("style"), switch(False), switch(True)), reverse=delete),
    Change("two-loras", (lora("style"), lora("tone", 1), choose("style")), reverse=delete),
    Change("lora-merged", (lora("style"), do(merge), do(unmerge)), reverse=delete),
    Change("lora-with-dropout-and-bias", (lora("style", lora_dropout=0.5, use_rslora=True),), reverse=delete),
    Change("dora", (lora("style", use_dora=True),), reverse=delete, only=LLAMA_LIKE),
    Change("peft-model", (wrapped, lambda m: m.merge_and_unload())),
    Change("peft-model-taken-off", (wrapped, lambda m: m.unload())),
    Change("prefix-tuning", (prefix,)),
    Change("other-weights", (do(weights.other_weights), do(weights.other_weights))),
    Change("assigned-weights", (do(weights.assigned_weights),)),
    Change("new-data", (do(weights.new_data),)),
    Change("new-data-of-the-second", (do(weights.new_data_of_the_second),), only=LLAMA_LIKE),
    Change("through-data", (do(through_data),), reverse=through_data),
    Change("matrix-in-place", (in_place(matrix), in_place(lambda m: matrix(m, -1)))),
    Change("head-in-place", (in_place(lambda m: m.get_output_embeddings()),)),
    Change("words-in-place", (in_place(lambda m: m.get_input_embeddings()),)),
    Change("new-bias", (do(weights.new_bias),)),
    Change("double", (do(lambda m: m.double()),), reverse=lambda m: m.float(), shows=False),
    Change("bfloat16", (do(lambda m: m.bfloat16()),), shows=False, slack=2**12),
    Change("quantized", (do(modules.quantized),), only=LLAMA_LIKE),
    Change("around-a-matrix", (around(matrix),)),
    Change("around-the-mlp", (around(mlp),)),
    Change("another-layer", (do(modules.another_layer),)),
    Change("fewer-layers", (do(modules.fewer_layers),)),
    Change("layers-in-another-order", (do(modules.layers_in_another_order),)),
    *(
        Change(f"hook-on-{name}", (hook(find), do(unhook)))
        for name, find in {
            "the-model": lambda m: m.get_submodule(m.base_model_prefix),
            "the-words": lambda m: m.get_input_embeddings(),
            "the-head": lambda m: m.get_output_embeddings(),
        }.items()
    ),
    *(
        Change(f"hook-before-{name}", (hook(find, before=True), do(unhook)))
        for name, find in {"a-layer": first, "the-mlp": mlp, "a-matrix": lambda m: matrix(m, -1)}.items()
    ),
    Change("pruned", (do(modules.pruned),)),
    Change("parametrized", (do(modules.parametrized),), only=LLAMA_LIKE),
    Change("more-words", (do(modules.more_words),), shows=False),
    Change("other-head", (do(modules.other_head),)),
    Change("other-words", (do(modules.other_words),)),
    Change(
        "other-attention",
        (do(lambda m: m.set_attn_implementation("eager")),),
        reverse=lambda m: m.set_attn_implementation("sdpa"),
        shows=False,
    ),
    Change("no-cache", (config("use_cache", False),), reverse=config("use_cache", True), shows=False),
    Change(
        "hidden-states-always",
        (config("output_hidden_states", True),),
        reverse=config("output_hidden_states", False),
        shows=False,
    ),
    Change("trained", (do(lambda m: m.train()), do(lambda m: m.eval())), shows=False),
    Change("checkpointing", (do(lambda m: m.gradient_checkpointing_enable()),), shows=False),
    Change("frozen", (do(lambda m: m.requires_grad_(False)),), shows=False),
)
