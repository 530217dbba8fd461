"""Every bound by which two results count as the same, with its reason. A bound nobody can explain hides an error.

All but one are relative. `eps` is `torch.finfo(dtype).eps`, the distance from 1 to the next number: 1.2e-7 in float32,
9.8e-4 in float16, 7.8e-3 in bfloat16. Tables name dtypes; their `None` serves all others.
"""

import torch

Bounds = dict[torch.dtype | None, float]


def bound(table: Bounds, dtype: torch.dtype) -> float:
    """The entry of a table for results of this dtype."""
    return table.get(dtype, table[None])


# -- Is it the formula we know? Asked when a model is optimized, of small inputs; a yes replaces its code. --

# A block against its fused form: largest difference by the largest output. A dozen passes each round anew, and the
# worst element of thousands counts: 20 eps in float16, 8 in bfloat16. In float32 the order of sums matters more.
BLOCK: Bounds = {torch.float16: 2e-2, torch.bfloat16: 6e-2, torch.float32: 1e-4, None: 1e-4}

# The same block once more with its weights in float32, where it is in 16 bits: SiLU for GELU is off by 2e-2, which the
# bounds above let pass. Products may be rounded to TF32 on a GPU, inputs alike, so little of that is left: 1 eps of it.
BLOCK_WIDENED: Bounds = {None: 1e-3}

# One step of a formula (attention, MLP, norm) against what was recorded: root mean square, so about one eps where a
# result is rounded once or twice: 2 in float16, 1 in bfloat16. A factor of 1.01 somewhere is more. Models in float64
# hold tables in float32, so the bound is that of float32.
FORMULA: Bounds = {torch.float16: 2e-3, torch.bfloat16: 8e-3, torch.float32: 2e-5, torch.float64: 2e-5, None: 1e-5}

# Shares of experts, and logits, largest difference by the largest of a token: 84 eps in float32, where sums of
# thousands are in another order. In 16 bits a score, their sum, the quotient and a factor may each be rounded: 2 eps.
SHARES: Bounds = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5, None: 1e-5}

# A sum of two: its last rounding is half an eps of it at most, and the terms may have been rounded each before.
SUM_EPS = 1.5

# The logits of a whole model, root mean square: each layer adds its own rounding to the sum that all share. 20 eps in
# float16, 13 in bfloat16. Looser than `TIMES_STOCK`, as nothing runs in full precision here: a wrong formula has been
# refused part by part before, by `FORMULA`; what is left are masks and positions, which put whole rows off.
LOGITS: Bounds = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-4, torch.float64: 1e-4, None: 1e-4}

# Many layers amplify rounding: with 80 of them and random weights, other norms alone put logits in bfloat16 10 % off.
# So rows of logits that are further off than `LOGITS` may be `DRIFT` times as far off as stock's own are moved by noise
# of so many eps of each number that a layer gives. One rounding is 0.2 eps (root mean square), so this is as much as
# six. A layer rounds a dozen times, in stock and in ours: 0.2 eps times the root of 24 is 1 eps, or twice this noise,
# if each were of a number as large as the sum that all layers share; most are of smaller terms. In random models of 16
# to 80 layers, ours are 0.9 to 2.3 times as far off as this noise moves stock.
LAYER_NOISE = 0.5
# And no token may be further off than this. Unrelated logits are 1.4 apart; tokens of random models that see what is
# hidden from them, or stand elsewhere than they do, are 0.6 to 1.8 off.
MOST_MOVED = 0.5

# In 16 bits noise in what layers give says little where a layer amplifies the rounding inside it, as state spaces with
# random weights do. What is further off is right if it is as near to full precision as stock is, but for this and a
# share of `LOGITS`: asked of each row of logits, and of each layer by itself. By the geometric mean of tokens, as a
# single one is chance: of 64 random models with states, ours have 0.6 to 1.4 of stock's, 0.9 on average, and root mean
# squares 0.1 to 3. So these may be `DRIFT` times as large.
AS_GOOD = 1.1
AS_GOOD_SHARE = 0.25

# What a layer adds to the sum that all share, by what stock's adds to the same input, root mean square of a token,
# beside the roundings of that sum, which are `SUM_EPS`. Asked of every layer where logits are further off than
# `LOGITS`, and by its bound: random layers are 0.3 to 3 % off in bfloat16; with positions off by one, 47 % and more.
ADDED: Bounds = LOGITS

# Of the experts that a router chooses in one product, the share that it chooses in another too, at least. Of 8 that the
# largest of 128 random logits choose, 91 % are the same where logits are 10 % off, as `LOGITS` has it, and 98 % at 2 %.
SHARED_EXPERTS: Bounds = {torch.bfloat16: 0.85, None: 0.95}

# A norm in float32, largest difference by the largest output: 84 eps, for a mean of squares in another order. An eps of
# 1e-5 in place of 1e-6 is more, on the small inputs that are tried.
NORM = 1e-5
# The same where some of it is rounded to 16 bits: 2.6 eps of bfloat16, as one more rounding may come before the weight.
NORM_NARROW = 2e-2

# An activation in float64 against the formulas by name. The tanh and the erf form of GELU are 5e-4 apart; a module may
# hold its constants in float32 (1.2e-7).
ACTIVATION = 1e-6

# A subclass of nn.Linear against nn.Linear, absolute, of numbers around 1 in float32: 8 eps for 5 summands.
LINEAR = 1e-6

# A layer that came quantized against its dequantized weight, root mean square: an activation that it rounds to 8 bits
# is 1 % off, a zero point that is 1 off 30 %.
PREQUANTIZED = 0.03

# -- Is the optimized model as good as stock? Asked by `accel.verify` and by benchmarks. --

# It may be this many times as far from full precision as stock is in its own dtype.
TIMES_STOCK = 2.0
# In float32 the order of sums matters more than one rounding: root mean square, 84 eps.
FLOOR = 1e-5
# Where full precision cannot be computed: so many units of rounding (half an eps) from stock. SD1.5 and SDXL in fp16
# are at 3.
UNITS = 16
# Two sums of the same products, in such units: routed experts, added in another order.
SUM_UNITS = 4
# In times of the median token's error: one that is further off was sent to other experts. It is counted, not judged.
FAR = 4
# Where routers choose in each run: the token that is judged, by the share of tokens that are nearer. The median one has
# most of its experts in common with stock's, unless there are so many layers that no token has.
MEDIAN = 0.5
# The token that says how far noise puts stock then. With few layers less than a fourth of tokens change their experts,
# and it is an error of rounding. Where as many as half may or may not, chance makes no difference to it.
MOVED = 0.75
# A whole output this near to stock's, root mean square, is the same to the eye: one step of the eight bits of an image.
SEEN = 1 / 256
# Further apart, it may drift this many times as far as stock itself drifts when its models err by their own rounding:
# stock's error is in the difference, and ours.
DRIFT = 1 + TIMES_STOCK

# A product of rounded activations, in times of torch's own error: it is rounded once from float32 in int8; in fp8 after
# torch's product, after the gate and at the end.
PRODUCT: Bounds = {torch.int8: 2.0, torch.float8_e4m3fn: 4.0}
# Of a step of rounding to 8 bits, beside its half: norms are summed in another order before their numbers are rounded.
STEP = 0.01

# -- Do ranks compute the same, and is it what one process computes? --

# Inputs of a loop on two ranks, by the mean of their numbers: text encoders of which each rank chose its kernels by its
# own measurements differ by rounding, as `LOGITS` of a whole model do. Noise of another seed is as far off as it is
# large. Not by root mean squares: a few channels of text encoders are a hundred times the others.
RANKS_INPUT: Bounds = LOGITS
# The share of numbers that may be further apart than that. Prompts that differ in a word differ in all rows after it.
APART = 1 / 16
# The rows of one rank against the same rows of the whole batch, both stock, root mean square: other kernels are chosen
# for another batch, and TF32 has 10 bits of mantissa. A row that was given another's condition is off by more.
ROWS: Bounds = {torch.float16: 2e-2, torch.bfloat16: 1e-1, None: 5e-3}
