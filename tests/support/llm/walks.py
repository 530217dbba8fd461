"""A walk: whatever may be done with a model and a cache, in random order, by ours and by stock side by side."""

import copy

import torch

from support.llm.calls import new_cache
from support.llm.families import padded, prompt
from support.llm.outputs import same


class Walker:
    """One conversation with a model over one cache; every action draws its numbers from the generator it is given."""

    def __init__(self, model, other, lengths):
        self.model, self.other = model, other  # the other may take a step on the same cache
        self.ids, self.mask = (tensor.to(model.device) for tensor in padded(lengths))
        if bool(self.mask.all()):
            self.mask = None
        self.cache = new_cache(model)
        self.seen = self.step(self.ids, model)

    def step(self, words, model, **call):
        output = model(words, attention_mask=self.mask, past_key_values=self.cache, **call)
        logits = output.logits[:, -words.shape[1] :]
        return logits if self.mask is None else logits[self.mask[:, -words.shape[1] :].bool()]

    def words(self, number, model=None, count=None, **call):
        words = prompt(len(self.ids), count or number(1, 5), number(0, 999)).to(self.ids)
        self.ids = torch.cat([self.ids, words], 1)
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(words.shape)], 1)
        self.seen = self.step(words, model or self.model, **call)

    def word(self, number):
        self.words(number, count=1)

    def by_stock(self, number):
        self.words(number, model=self.other)

    def with_hidden_states(self, number):
        self.words(number, output_hidden_states=True)

    def with_gradients(self, number):
        with torch.enable_grad():
            self.words(number)
        self.seen = self.seen.detach()
        for layer in self.cache.layers:
            if layer.keys is not None and layer.keys.requires_grad:
                layer.keys, layer.values = layer.keys.detach(), layer.values.detach()

    def generated(self, number):
        ids, mask = self.ids, self.mask
        words = prompt(len(ids), 1, number(0, 999)).to(ids)
        ids = torch.cat([ids, words], 1)
        mask = None if mask is None else torch.cat([mask, mask.new_ones(words.shape)], 1)
        call = {"do_sample": False, "max_new_tokens": number(2, 4), "past_key_values": self.cache}
        self.ids = self.model.generate(ids, attention_mask=mask, **call)[:, :-1]  # the last was not read yet
        if mask is not None:
            self.mask = torch.cat([mask, mask.new_ones(len(ids), self.ids.shape[1] - mask.shape[1])], 1)
        self.seen = self.ids.float()

    def rows(self, index):
        self.ids = self.ids[index]
        self.mask = None if self.mask is None else self.mask[index]

    def reordered(self, number):
        index = torch.tensor([number(0, len(self.ids) - 1) for _ in self.ids], device=self.ids.device)
        self.cache.reorder_cache(index)
        self.rows(index)

    def repeated(self, number):
        if len(self.ids) <= 3:
            self.cache.batch_repeat_interleave(2)
            self.rows(torch.arange(len(self.ids), device=self.ids.device).repeat_interleave(2))

    def selected(self, number):
        index = [number(0, len(self.ids) - 1) for _ in range(number(1, len(self.ids)))]
        index = torch.tensor(index, device=self.ids.device)
        self.cache.batch_select_indices(index)
        self.rows(index)

    def cropped(self, number):
        if getattr(self.model.config, "sliding_window", None) is None:  # stock's forget what a cut brings back
            count = number(1, 3)
            self.cache.crop(-count)
            self.ids = self.ids[:, :-count]
            self.mask = None if self.mask is None else self.mask[:, :-count]

    def copied(self, number):
        self.kept = self.cache  # still there, and read by nobody
        self.cache = copy.deepcopy(self.cache)

    def forked(self, number):
        """Another continuation on a copy, then on with the first."""
        cache, ids, mask = self.cache, self.ids, self.mask
        self.cache = copy.deepcopy(cache)
        self.words(number)
        self.cache, self.ids, self.mask = cache, ids, mask

    def shown(self, number):
        """Somebody looks at the keys."""
        layer = self.cache.layers[number(0, len(self.cache.layers) - 1)]
        self.seen = torch.stack([layer.keys[:, :, -2:], layer.values[:, :, -2:]])

    def edited(self, number):
        """Somebody writes the keys of a layer."""
        layer = self.cache.layers[number(0, len(self.cache.layers) - 1)]
        layer.keys = layer.keys * 1.5

    def anew(self, number):
        self.cache = new_cache(self.model, plain=number(0, 1) == 1)
        self.mask = None
        self.seen = self.step(self.ids, self.model)


ACTIONS = (
    *(["word"] * 6), *(["words"] * 2), *(["generated"] * 2), "by_stock", "with_hidden_states", "with_gradients",
    "reordered", "repeated", "selected", "cropped", "copied", "forked", "shown", "edited", "anew",
)  # fmt: skip


def walk(ours, stock, seed: int, steps: int = 14, share: float = 2e-5) -> None:
    """Takes both through the same actions; says after which they differ."""
    lengths = ((6, 4), (5,), (5, 5, 5), (3, 7))[seed % 4]
    mine, theirs = Walker(ours, stock, lengths), Walker(stock, stock, lengths)
    chooser, done = torch.Generator().manual_seed(seed), []

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=chooser))

    for _ in range(steps):
        done.append(ACTIONS[number(0, len(ACTIONS) - 1)])
        state = chooser.get_state()
        for walker in (theirs, mine):
            chooser.set_state(state)  # the same numbers for both
            getattr(walker, done[-1])(number)
        try:
            assert torch.equal(mine.ids, theirs.ids)
            assert mine.cache.get_seq_length() == theirs.cache.get_seq_length()
            same({"seen": mine.seen}, {"seen": theirs.seen}, share)
        except AssertionError as error:
            raise AssertionError(f"after {', '.join(done)}: {error}") from error
