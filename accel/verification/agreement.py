"""How far two language models agree: their next-token distributions on the same tokens, and the text they write."""

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F

CHUNK = 64  # positions compared at once: a large vocabulary in float64 is half a megabyte a position


@dataclass(frozen=True)
class Agreement:
    """Stock against optimized, both given the same tokens, and both left to write greedily.

    kl, worst_kl: Kullback-Leibler divergence of the optimized next-token distribution from stock's in nats, mean and
    largest over `positions`. top1: share of positions where both hold the same token most likely. own_kl, own_top1:
    the same of stock from `own_from`, which says how far it is off by itself; None where that was not computed.
    perplexity, stock_perplexity: of the text that was given, None where none was.
    equal, tokens: greedily written tokens that are stock's, counted in each row up to the first that differs, and how
    many were written. margin: by how much stock's logits preferred its own token where a row first differs, the
    largest over rows, None where none does; margin_allowed: what the errors of the logits explain of that.
    """

    kl: float
    worst_kl: float
    top1: float
    positions: int
    equal: int
    tokens: int
    margin: float | None = None
    margin_allowed: float | None = None
    own_kl: float | None = None
    own_top1: float | None = None
    own_from: str = "full precision"
    perplexity: float | None = None
    stock_perplexity: float | None = None

    @property
    def failure(self) -> str | None:
        """Why greedy text differs by more than rounding explains, or None."""
        if self.margin is None or self.margin_allowed is None or self.margin <= self.margin_allowed:  # nan fails too
            return None
        return (
            f"greedy text differs where stock preferred its own token by {self.margin:.1e}, "
            f"more than the {self.margin_allowed:.1e} that rounding explains"
        )

    def to_dict(self) -> dict:
        return asdict(self)

    def lines(self) -> list[str]:
        """Plain sentences, each short enough for a terminal."""
        found = [
            f"next token: KL {self.kl:.1e} nats, worst {self.worst_kl:.1e}; same most likely one at {self.top1:.2%} of "
            f"{self.positions} positions"
        ]
        if self.own_kl is not None:
            found.append(f"(stock against {self.own_from}: KL {self.own_kl:.1e} nats, same one at {self.own_top1:.2%})")
        if self.perplexity is not None and self.stock_perplexity is not None:
            more = self.perplexity / self.stock_perplexity - 1
            found.append(
                f"perplexity of the given text: {self.perplexity:.2f}, stock {self.stock_perplexity:.2f} ({more:+.2%})"
            )
        return [*found, f"greedy text: {self.equal} of {self.tokens} tokens equal"]

    def __str__(self) -> str:
        return "; ".join(self.lines())


@torch.no_grad()
def distributions(stock: torch.Tensor, ours: torch.Tensor) -> tuple[float, float, float]:
    """Mean and largest KL divergence of `ours` from `stock` in nats, and the share of equal most likely tokens.

    Both: logits (positions, vocabulary), at least one position.
    """
    divergences, same = [], 0
    for wanted, got in zip(stock.split(CHUNK), ours.split(CHUNK), strict=True):
        p, q = (logits.double().log_softmax(-1) for logits in (wanted, got.to(wanted.device)))
        terms = p.exp() * (p - q)
        # A token that stock forbids (minus infinity) has no weight.
        divergences.append(terms.masked_fill(p == -torch.inf, 0.0).sum(-1).clamp_min(0.0).cpu())
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
    each = torch.cat(divergences)
    return each.mean().item(), each.max().item(), same / len(each)


def perplexity(logits: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor) -> float | None:
    """exp of the mean loss of next tokens in nats; None where no token follows another.

    tokens, mask: (rows, tokens), mask 0 for padding; logits: (positions, vocabulary), of the unmasked ones row by row.
    """
    mask = mask.bool().cpu()
    follows = torch.zeros_like(mask)
    follows[:, :-1] = mask[:, :-1] & mask[:, 1:]
    chosen = follows[mask].nonzero().flatten()
    if not len(chosen):
        return None
    wanted = tokens.cpu().roll(-1, dims=1)[follows]
    losses = [
        F.cross_entropy(logits[at.to(logits.device)].double().cpu(), target, reduction="none")
        for at, target in zip(chosen.split(CHUNK), wanted.split(CHUNK), strict=True)
    ]
    return float(torch.cat(losses).mean().exp())
