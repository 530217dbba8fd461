"""A layer of GPT-Neo that does more than its parts."""

from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoBlock


class LouderBlock(GPTNeoBlock):
    """A layer around whose attention something else happens."""

    def forward(self, *args, **kwargs):
        result = super().forward(*args, **kwargs)
        return (self.louder * result[0], *result[1:]) if isinstance(result, tuple) else self.louder * result
