"""A layer of GPT-Neo that does more than its parts."""

from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoBlock


class LouderBlock(GPTNeoBlock):
    """A layer that may bend what it gives, as none of a model's own does."""

    def forward(self, *args, **kwargs):
        result = super().forward(*args, **kwargs)
        first = result[0] if isinstance(result, tuple) else result
        louder = first + self.louder * first.sin()
        return (louder, *result[1:]) if isinstance(result, tuple) else louder
