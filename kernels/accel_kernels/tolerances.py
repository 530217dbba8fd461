"""Every bound by which a kernel or a library's choice counts as right, with its reason. Those of models are accel's.

`eps` is `torch.finfo(dtype).eps`: 1.2e-7 in float32, 9.8e-4 in float16, 7.8e-3 in bfloat16.
"""

import torch

# An op against its reference in float64, largest error: in times of what torch itself makes of it in the same dtype.
TIMES_TORCH = 2.0
# Beside it, relative to the largest number: 34 eps in float32, whose sums torch makes in another order, often exactly.
FLOOR = {torch.float32: 4e-6, torch.float16: 0.0, torch.bfloat16: 0.0}
# That number is at least so large: an output of zeros leaves nothing an error could be relative to.
SMALLEST_PEAK = 1e-3

# A backend of attention against another one, of random tensors: largest difference by the largest output. Weights are
# rounded before their product with values, and the result once more: 2.6 eps in bfloat16, 20 in float16. What does not
# scale scores, or scales them twice, is further off.
BACKEND = 0.02
# An algorithm of cuBLASLt against torch's own product: both sum in float32, parts of a split sum may be rounded to 16
# bits before they are added. 1.3 eps in bfloat16, 10 in float16. One that forgets the bias is further off.
ALGORITHM = 0.01
# A largest output below this counts as this: random numbers give more.
SMALLEST_OUTPUT = 1e-6
