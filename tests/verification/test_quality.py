"""Figures of images and texts that agree, and the noise that rounding makes."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
from diffusers.pipelines.wan.pipeline_output import WanPipelineOutput
from PIL import Image
from torch import nn

from accel.comparison import first_differences
from accel.verification.agreement import CHUNK, Agreement, distributions
from accel.verification.image_metrics import gmsd, ssim
from accel.verification.metrics import Quality, compare
from accel.verification.model_record import ModelRecord
from accel.verification.noise import with_rounding


def test_a_model_that_comes_to_a_gpu_for_its_calls_is_judged_as_on_it():
    given = [((torch.empty(2, 3, device="meta"), torch.tensor(1)), {})]
    assert ModelRecord(nn.Linear(3, 3), given).device.type == "meta"
    assert ModelRecord(nn.Linear(3, 3)).device.type == "cpu"


def slow_kl(stock: list[float], ours: list[float]) -> float:
    p, q = ([math.exp(x) / sum(map(math.exp, logits)) for x in logits] for logits in (stock, ours))
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)


def test_divergence_is_the_formula_over_more_positions_than_a_chunk():
    stock = torch.randn(CHUNK + 7, 11)
    ours = stock + 0.3 * torch.randn(CHUNK + 7, 11)
    wanted = [slow_kl(a, b) for a, b in zip(stock.double().tolist(), ours.double().tolist(), strict=True)]
    mean, worst, top1 = distributions(stock, ours)
    assert mean == pytest.approx(sum(wanted) / len(wanted), rel=1e-9)
    assert worst == pytest.approx(max(wanted), rel=1e-9)
    assert top1 == pytest.approx((stock.argmax(-1) == ours.argmax(-1)).double().mean().item())


def test_equal_logits_do_not_diverge_and_forbidden_tokens_have_no_weight():
    logits = torch.randn(3, 5)
    logits[:, 2] = -torch.inf
    assert distributions(logits, logits.clone()) == (0.0, 0.0, 1.0)


def test_tokens_count_up_to_a_rows_first_difference():
    stock = torch.tensor([[1, 2, 3], [1, 2, 0], [3, 0, 0]])
    ours = torch.tensor([[1, 2, 3], [1, 3, 0], [2, 0, 0]])
    logits = torch.zeros(3, 3, 4)
    logits[1, 1] = torch.tensor([0.0, 0.0, 2.0, 1.75])
    logits[2, 0] = torch.tensor([0.0, 0.0, 1.0, 1.5])
    equal, found = first_differences(stock, ours, logits)
    assert equal == 3 + 1 + 0 and [margin for margin, _ in found] == [0.25, 0.5]
    assert [at.tolist() for _, at in found] == [logits[1, 1].tolist(), logits[2, 0].tolist()]
    assert first_differences(stock, stock, logits) == (9, [])


class Tuple(nn.Module):
    def forward(self, x):
        return x, None, 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_every_number_is_moved_by_so_many_eps_of_itself(dtype):
    x = torch.randn(5, 999, dtype=dtype).exp()
    x[:, 7] *= 1e4
    with with_rounding([module := nn.Identity()], 8):
        got = module(x)
    moved = (got.double() - x.double()) / x.double() / torch.finfo(dtype).eps
    assert got.dtype == dtype and 7.5 < moved.std() < 8.5 and moved[:, 7].abs().max() > 2
    assert torch.equal(module(x), x)


def test_modules_are_moved_apart_and_each_alike_in_every_run():
    x, modules = torch.ones(2, 64), [nn.Identity(), Tuple(), nn.Identity()]

    def run():
        with with_rounding(modules, 4):
            first, (second, *rest), third = (module(x) for module in modules)
        assert rest == [None, 3]
        return first, second, third

    first, second, third = run()
    assert all(map(torch.equal, run(), (first, second, third)))
    assert abs(torch.corrcoef(torch.stack([first - 1, second - 1, third - 1]).flatten(1)).triu(1)).max() < 0.4


def slow_ssim(a: np.ndarray, b: np.ndarray, size: int = 11) -> float:
    """Equations 5 to 13 of Wang et al., 2004, window by window, for one channel in 0..1."""
    offsets = np.arange(size) - size // 2
    weights = np.exp(-(offsets[:, None] ** 2 + offsets[None] ** 2) / (2 * 1.5**2))
    weights /= weights.sum()
    values = []
    for i in range(a.shape[0] - size + 1):
        for j in range(a.shape[1] - size + 1):
            x, y = a[i : i + size, j : j + size], b[i : i + size, j : j + size]
            mx, my = (weights * x).sum(), (weights * y).sum()
            vx, vy = (weights * (x - mx) ** 2).sum(), (weights * (y - my) ** 2).sum()
            vxy = (weights * (x - mx) * (y - my)).sum()
            values.append(
                (2 * mx * my + 0.01**2) * (2 * vxy + 0.03**2) / ((mx**2 + my**2 + 0.01**2) * (vx + vy + 0.03**2))
            )
    return float(np.mean(values))


def noisy(shape, strength=0.2):
    first = torch.rand(shape, dtype=torch.float64)
    return first, (first + strength * torch.randn(shape, dtype=torch.float64)).clamp(0, 1)


@pytest.mark.parametrize("size, window", [((20, 17), 11), ((11, 30), 11), ((10, 8), 7), ((5, 64), 5), ((1, 4), 1)])
def test_ssim_is_the_published_formula(size, window):
    first, second = noisy((2, 3, *size))
    wanted = np.mean(
        [
            slow_ssim(a, b, window)
            for i, j in zip(first, second, strict=True)
            for a, b in zip(i.numpy(), j.numpy(), strict=True)
        ]
    )
    assert ssim(first, second) == pytest.approx(wanted, abs=1e-12)
    assert ssim(first, first) == pytest.approx(1.0, abs=1e-12)


def slow_gmsd(a: np.ndarray, b: np.ndarray) -> float:
    """Equations 1 to 5 of Xue et al., 2014, pixel by pixel, for one image (3, H, W) in 0..255."""

    def magnitudes(image: np.ndarray) -> np.ndarray:
        gray = 0.299 * image[0] + 0.587 * image[1] + 0.114 * image[2]
        small = np.array([[gray[i : i + 2, j : j + 2].mean() for j in range(0, gray.shape[1] - 1, 2)]
                          for i in range(0, gray.shape[0] - 1, 2)])  # fmt: skip
        wide, found = np.pad(small, 1), np.zeros_like(small)
        for i, j in np.ndindex(small.shape):
            part = wide[i : i + 3, j : j + 3]
            across, down = (part[:, 0] - part[:, 2]).sum() / 3, (part[0] - part[2]).sum() / 3
            found[i, j] = math.hypot(across, down)
        return found

    x, y = magnitudes(a), magnitudes(b)
    similarity = (2 * x * y + 170) / (x**2 + y**2 + 170)
    return float(np.sqrt(np.mean((similarity - similarity.mean()) ** 2)))


@pytest.mark.parametrize("size", [(20, 18), (11, 30), (4, 5)])
def test_gmsd_is_the_published_formula(size):
    first, second = noisy((2, 3, *size))
    pairs = zip(255 * first.numpy(), 255 * second.numpy(), strict=True)
    assert gmsd(first, second) == pytest.approx(np.mean([slow_gmsd(*pair) for pair in pairs]), abs=1e-12)
    assert gmsd(first, first) == 0


def test_gmsd_of_images_without_colors_and_of_a_pixel():
    first, second = noisy((2, 1, 12, 12))
    assert gmsd(first, second) == pytest.approx(gmsd(first.expand(2, 3, 12, 12), second.expand(2, 3, 12, 12)))
    assert gmsd(torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 1, 1)) == 0


def test_frames_of_videos_count_as_images():
    video = np.random.default_rng(0).random((1, 4, 8, 8, 3))
    frames = torch.from_numpy(video).permute(0, 1, 4, 2, 3)
    pictures = [[Image.fromarray((frame * 255).round().astype(np.uint8)) for frame in video[0]]]
    for whole, worse in ((video, 0.9 * video), (frames, 0.9 * frames), (pictures, [pictures[0][::-1]])):
        quality = compare(WanPipelineOutput(frames=whole), WanPipelineOutput(frames=worse))
        assert quality.ssim is not None and quality.gmsd > 0


def test_figures_of_plain_tensors():
    stock = {"a": torch.tensor([3.0, 4.0]), "b": [torch.full((2, 2), 10.0), "text", None]}
    ours = {"a": torch.tensor([3.0, 4.5]), "b": [torch.full((2, 2), 10.0), "text", None]}
    quality = compare(stock, ours)
    assert quality.max_error == 0.5 and quality.relative_error == pytest.approx(0.05)
    assert quality.relative_rms == pytest.approx(0.1)  # 0.5 by the norm 5, in the tensor where it is worst
    assert quality.psnr_db == pytest.approx(10 * math.log10(10**2 / (0.25 / 6)))
    assert quality.ssim is None and quality.finite and quality.stock_finite


def test_images_of_every_kind_count_as_0_to_1():
    array = np.linspace(0, 0.5, 16 * 16 * 3).reshape(1, 16, 16, 3)
    other = array + 0.01
    tensors = [torch.from_numpy(a).permute(0, 3, 1, 2) for a in (array, other)]
    pictures = [Image.fromarray((a[0] * 255).round().astype(np.uint8)) for a in (array, other)]
    wanted = ssim(*tensors)
    for pair, tolerance in (((array, other), 1e-9), (tensors, 1e-9), (pictures, 2e-3)):
        stock, ours = (ImagePipelineOutput(images=[part] if pair is pictures else part) for part in pair)
        quality = compare(stock, ours)
        assert quality.ssim == pytest.approx(wanted, abs=tolerance)
        assert quality.max_error == pytest.approx(0.01, abs=tolerance)
        assert quality.psnr_db == pytest.approx(40, abs=0.6 if pair is pictures else 1e-6)


def test_latents_are_no_images():
    latents = torch.randn(1, 4, 8, 8)
    assert compare(ImagePipelineOutput(latents), ImagePipelineOutput(latents + 0.1)).ssim is None
    three = torch.randn(1, 3, 8, 8)
    assert compare(ImagePipelineOutput(three), ImagePipelineOutput(three + 0.1)).ssim is None


def test_nothing_to_compare_and_other_shapes_are_errors():
    with pytest.raises(ValueError, match="nothing to compare in an output of type SimpleNamespace"):
        compare(SimpleNamespace(), SimpleNamespace())
    with pytest.raises(ValueError, match=r"stock gives \(2,\), optimized \(3,\)"):
        compare(torch.ones(2), torch.ones(3))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["ours", "stock", "both"])
def test_nan_and_infinity_are_told_and_left_out_of_the_figures(bad, where):
    stock, ours = torch.ones(4), torch.ones(4)
    ours[1] = 1.5
    if where in ("ours", "both"):
        ours[0] = bad
    if where in ("stock", "both"):
        stock[0] = bad
    quality = compare(stock, ours)
    assert quality.max_error == 0.5 and math.isfinite(quality.psnr_db)
    assert quality.finite == (where == "stock") and quality.stock_finite == (where == "ours")
    assert quality.passed == (where != "ours")
    words = {"ours": "FAILED: the output: NaN or Inf where stock has none", "stock": "accel's output is finite"}
    assert words.get(where, "stock itself gives NaN or Inf, so does accel") in quality.verdict


GOOD = Quality(1e-3, 1e-3, 60.0, True, error=1e-3, allowed=2e-3, measure="relative RMS")
BAD = replace(GOOD, error=3e-3)
LOSSY = replace(BAD, lossy="step_cache=2")
WHOLE = replace(LOSSY, ssim=0.97, gmsd=0.02, parts={"unet": LOSSY})
SAME = Agreement(kl=1e-9, worst_kl=1e-8, top1=1.0, positions=40, equal=32, tokens=32)
NEAR = replace(SAME, equal=20, margin=0.01, margin_allowed=0.02)  # stock hardly preferred its own token
TEXT = replace(compare(torch.ones(2), torch.ones(2)), parts={"prompt": GOOD}, agreement=SAME)
FAR = "FAILED: greedy text differs where stock preferred its own token by 3.0e-02"
EXPLAINED = "passed: no further apart than rounding explains"
VERDICTS = [
    (GOOD, True, EXPLAINED),
    (BAD, False, "FAILED: relative RMS 3.0e-03, more than the 2.0e-03 that rounding explains"),
    (replace(GOOD, error=math.nan), False, "FAILED: relative RMS nan"),
    (replace(GOOD, max_error=0.0), True, "passed: bit-equal to stock"),
    (compare(torch.ones(2), 2 * torch.ones(2)), True, "not judged"),
    (compare(torch.ones(3), torch.full((3,), math.nan)), False, "FAILED: the output: NaN"),
    (replace(GOOD, parts={"unet": GOOD, "vae.decoder": BAD}), False, "FAILED: vae.decoder: relative RMS"),
    (WHOLE, True, "lossy, as asked for (step_cache=2): max error"),
    (replace(WHOLE, finite=False), False, "FAILED: the output: NaN"),
    (replace(WHOLE, parts={"unet": replace(LOSSY, finite=False)}), False, "FAILED: unet: NaN"),
    (replace(WHOLE, parts={"unet": BAD}), False, "FAILED: unet"),  # judged against what is as lossy
    (TEXT, True, "passed: bit-equal to stock"),
    (replace(TEXT, agreement=NEAR), True, "passed: bit-equal to stock"),
    (replace(TEXT, agreement=replace(NEAR, margin=0.03)), False, FAR),
    (replace(TEXT, agreement=replace(NEAR, margin=math.nan)), False, "FAILED: greedy text differs"),
]


@pytest.mark.share(1)  # they cost nothing
@pytest.mark.parametrize(("quality", "passed", "verdict"), VERDICTS)
def test_verdicts(quality, passed, verdict):
    assert quality.passed == passed and quality.verdict.startswith(verdict)


def test_what_is_lossy_and_texts_are_told():
    assert "SSIM 0.9700, GMSD 0.0200" in WHOLE.verdict
    assert all(words in str(TEXT) for words in ("KL 1.0e-09 nats", "32 of 32 tokens equal", "prompt"))
    assert "SSIM" not in str(TEXT)
    assert json.loads(json.dumps(TEXT.to_dict()))["agreement"]["top1"] == 1.0


def test_it_prints_as_a_line_or_as_a_table():
    assert str(
        compare(torch.ones(2), torch.ones(2))
    ) == "max error 0.00e+00 (0.0e+00 of the largest value), identical" + ("; passed: bit-equal to stock")
    text = str(replace(GOOD, ssim=0.5, gmsd=0.0123, parts={"unet": GOOD, "vae.decoder": BAD}, note="something"))
    for word in (
        "unet",
        "vae.decoder",
        "whole output",
        "60.0 dB",
        "0.5000",
        "0.0123",
        "something",
        "FAILED: vae.decoder",
    ):
        assert word in text


def test_to_dict_is_plain():
    data = replace(GOOD, psnr_db=math.inf, parts={"unet": BAD}).to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["psnr_db"] is None and data["parts"]["unet"]["passed"] is False
