"""The router of a mixture of experts: from its logits to the experts that each token takes, and their shares.

s = score(logits). The k experts with the largest s + bias are chosen, of all or of the best groups. Their shares are s,
divided by their sum or not, or a softmax over the chosen logits, times a factor. Shazeer et al. 2017; sigmoid, bias and
groups: DeepSeek-AI, "DeepSeek-V3 technical report", 2024; softmax of the chosen: OpenAI, "gpt-oss model card", 2025.
"""

from typing import NamedTuple

import torch

from accel_kernels.op import dtype_reason, make_op, random_cases

MOST_EXPERTS = 4096  # whose scores one program holds in registers
MOST_CHOSEN = 64  # each of which is one search
SCORES, SHARES = ("softmax", "sigmoid", "none"), ("score", "sum", "softmax")


class Routing(NamedTuple):
    """How experts are chosen and what each counts.

    chosen: k, of each token. score: a name of SCORES; "none" leaves the logits. share: a name of SHARES, "score" as it
    is, "sum" divided by max(sum of the chosen + eps, floor), "softmax" over the logits of the chosen. scale: all shares
    times this. groups: experts stand in so many groups of equal size. Only the `kept` groups with the largest sum of
    their `best` largest s + bias are chosen from; of all others s + bias counts as `outside`. rounded: scores are
    rounded to the dtype of the logits. by_logits: the bias is added to logits, not to s; of one group.
    """

    chosen: int
    score: str = "softmax"
    share: str = "score"
    eps: float = 0.0
    floor: float = 0.0
    scale: float = 1.0
    groups: int = 1
    kept: int = 1
    best: int = 2
    outside: float = -torch.inf
    rounded: bool = False
    by_logits: bool = False

    def reason(self, experts: int) -> str | None:
        """Why so many experts cannot be chosen from like this."""
        if self.score not in SCORES or self.share not in SHARES:
            return f"score {self.score!r} or share {self.share!r}"
        if not 1 <= self.chosen <= experts:
            return f"{self.chosen} of {experts} experts"
        if self.groups < 1 or experts % self.groups or not 1 <= self.kept <= self.groups:
            return f"{self.kept} of {self.groups} groups of {experts} experts"
        if self.groups > 1 and self.by_logits:
            return "groups by logits"
        if self.groups > 1 and self.best not in range(1, experts // self.groups + 1):
            return f"the {self.best} best of {experts // self.groups} experts in a group"
        return None


def reference(logits, routing, bias=None, dtype=None, *, gains=None):
    """logits: (T, E) of floats, computed in fp32; routing: Routing; bias: (E,), added for the choice alone; gains:
    (E,), by which shares are multiplied at last.

    Returns (index, shares): (T, k) int64, the largest first, and (T, k) in `dtype`, that of the logits where None. Of
    equal scores the lower index comes first. Where nothing is added and nothing is grouped, logits are compared
    instead, which are in the same order. NaN counts as the largest number.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    scores = scores_of(wide, routing, logits.dtype)
    index = _largest(preferences_of(wide, scores, routing, bias), routing.chosen)
    shares = shares_of(wide, scores, index, routing)
    shares = shares if gains is None else shares * gains.to(shares.dtype)[index]
    return index, shares.to(dtype or logits.dtype)


def scores_of(logits: torch.Tensor, routing: Routing, dtype: torch.dtype) -> torch.Tensor:
    """(T, E), of logits in fp32 or fp64; rounded to `dtype` if at all."""
    if routing.score == "none":
        return logits
    scores = logits.sigmoid() if routing.score == "sigmoid" else logits.softmax(-1)
    return scores.to(dtype).to(scores.dtype) if routing.rounded else scores


def preferences_of(
    logits: torch.Tensor, scores: torch.Tensor, routing: Routing, bias: torch.Tensor | None
) -> torch.Tensor:
    """What the largest k of are chosen, (T, E)."""
    if bias is None and routing.groups == 1:
        return logits
    found = logits if routing.by_logits else scores
    found = found if bias is None else found + bias.to(found.dtype)
    if routing.groups == 1:
        return found
    grouped = found.view(len(found), routing.groups, -1)
    of_groups = grouped.gather(2, _largest(grouped, routing.best)).sum(-1)
    kept = torch.zeros_like(of_groups, dtype=torch.bool).scatter(1, _largest(of_groups, routing.kept), True)
    return torch.where(kept[:, :, None], grouped, routing.outside).view_as(found)


def shares_of(logits: torch.Tensor, scores: torch.Tensor, index: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Of the chosen, (T, k), not rounded."""
    if routing.share == "softmax":
        return logits.gather(1, index).softmax(-1) * routing.scale
    shares = scores.gather(1, index)
    if routing.share == "sum":
        shares = shares / (shares.sum(-1, keepdim=True) + routing.eps).clamp(min=routing.floor)
    return shares * routing.scale


def _largest(x: torch.Tensor, many: int) -> torch.Tensor:
    """Places of the largest along the last dimension, the lower one first of equals; NaN is the largest."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :many]


def supports(logits, routing, bias=None, dtype=None, *, gains=None) -> str | None:
    if logits.dim() != 2 or logits.numel() == 0:
        return f"logits of shape {tuple(logits.shape)}"
    experts = logits.shape[1]
    if (reason := routing.reason(experts)) is not None:
        return reason
    if experts > MOST_EXPERTS or routing.chosen > MOST_CHOSEN:
        return f"{routing.chosen} of {experts} experts, more than {MOST_CHOSEN} of {MOST_EXPERTS}"
    if logits.stride(1) != 1:
        return "experts not contiguous"
    if bias is not None and (bias.shape != (experts,) or not bias.is_contiguous()):
        return "a bias of another shape than (E,), or not contiguous"
    if gains is not None and (gains.shape != (experts,) or not gains.is_contiguous()):
        return "gains of another shape than (E,), or not contiguous"
    return dtype_reason(logits, bias, gains, torch.empty(0, dtype=dtype or logits.dtype, device=logits.device))


@random_cases
def _case(rand, tokens, experts, routing, bias=False, dtype=None, wide=1, gains=False):
    """wide: times the experts, the logits being a part of wider rows."""
    logits = rand(tokens, wide * experts, spread=2.0)[:, :experts]
    more = {"gains": rand(experts)} if gains else {}
    return (logits, routing, rand.uniform(experts) - 0.5 if bias else None, dtype), more


DEEPSEEK = Routing(8, "sigmoid", "sum", eps=1e-20, scale=2.5, groups=8, kept=4)
CASES = (
    _case("mixtral", 3, 8, Routing(2, share="sum"), small=True),
    _case("one", 1, 1, Routing(1), small=True),
    _case("all", 2, 5, Routing(5, "sigmoid", "sum", eps=1e-6), small=True),
    _case("odd", 3, 77, Routing(6, share="sum"), wide=2, small=True),
    _case("softmax-after", 3, 32, Routing(4, "none", "softmax"), small=True),
    _case("logits", 2, 33, Routing(3, "none"), bias=True, small=True),
    _case("deepseek-v3", 2, 40, DEEPSEEK, bias=True, dtype=torch.float32, small=True),
    _case("deepseek-v2", 2, 18, Routing(3, scale=16.0, groups=3, kept=2, best=1, outside=0.0), small=True),
    _case("gemma4", 3, 12, Routing(3, share="sum"), dtype=torch.float32, gains=True, small=True),
    _case("ernie", 3, 12, Routing(3, share="sum", floor=1e-12), bias=True, small=True),
    _case("by-logits", 3, 12, Routing(3, "sigmoid", "sum", by_logits=True), bias=True, small=True),
    _case("qwen3-moe", 1, 128, Routing(8, share="sum")),
    _case("qwen3-moe-512", 512, 128, Routing(8, share="sum")),
    _case("qwen3-next", 32, 512, Routing(10, share="sum")),
    _case("gpt-oss-20b", 4, 32, Routing(4, "none", "softmax")),
    _case("deepseek-v3-256", 16, 256, DEEPSEEK, bias=True, dtype=torch.float32),
    _case("glm4-moe", 1, 160, Routing(8, "sigmoid", "sum", eps=1e-20, scale=2.5), bias=True, dtype=torch.float32),
    _case("kimi-k2", 2, 384, Routing(8, "sigmoid", "sum", eps=1e-20, scale=2.827), bias=True, dtype=torch.float32),
    _case("many", 7, 3000, Routing(32, "sigmoid", "sum"), bias=True),
)

route = make_op("route", reference, supports, CASES)
