"""How alike two images look: published measures that need no trained network."""

import torch
import torch.nn.functional as F

WINDOW, SIGMA = 11, 1.5  # of SSIM, as published
FLAT = 170 / 255**2  # of GMSD, as published for images in 0..255: gradients below it count for little


def ssim(image: torch.Tensor, other: torch.Tensor) -> float:
    """Mean structural similarity of two images (N, C, H, W) in 0..1, averaged over channels; 1 for equal ones.

    Wang, Bovik, Sheikh and Simoncelli, "Image quality assessment: from error visibility to structural similarity",
    2004: Gaussian window of 11 pixels, sigma 1.5, where it fits whole; a smaller one where the image is smaller.
    """
    channels, size = image.shape[1], min(WINDOW, *image.shape[2:])
    size -= 1 - size % 2
    offsets = torch.arange(size, dtype=torch.float64, device="cpu") - size // 2
    line = torch.exp(-(offsets**2) / (2 * SIGMA**2))
    window = torch.outer(line, line) / line.sum() ** 2
    window = window.expand(channels, 1, size, size).contiguous()

    def mean(x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, window, groups=channels)

    a, b = image.double().cpu(), other.double().cpu()
    mean_a, mean_b = mean(a), mean(b)
    var_a, var_b = mean(a * a) - mean_a**2, mean(b * b) - mean_b**2
    covariance = mean(a * b) - mean_a * mean_b
    c1, c2 = 0.01**2, 0.03**2
    luminance = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
    structure = (2 * covariance + c2) / (var_a + var_b + c2)
    return float((luminance * structure).mean())


def gmsd(image: torch.Tensor, other: torch.Tensor) -> float:
    """Gradient magnitude similarity deviation of two images (N, C, H, W) in 0..1: 0 for equal ones, and the larger the
    more unevenly edges and textures were changed. The mean over images, each by its luminance.

    Xue, Zhang, Mou and Bovik, "Gradient magnitude similarity deviation: a highly efficient perceptual image quality
    index", 2014: averages of 2x2 pixels, every second of them, Prewitt's gradients, standard deviation of their
    similarity. A loss as people see it, as LPIPS is, without that measure's trained network. It takes no notice of the
    brightness or tint of the whole, which PSNR does.
    """
    a, b = (_gradients(x.double().cpu()) for x in (image, other))
    similarity = (2 * a * b + FLAT) / (a * a + b * b + FLAT)
    return float(similarity.flatten(1).std(1, correction=0).mean())


def _gradients(image: torch.Tensor) -> torch.Tensor:
    """The magnitude of gradients of the luminance at half the size, (N, 1, H / 2, W / 2). Luminance is the mean of what
    has not three channels; what is one pixel high or wide stays so; zeros lie around the image, as published.
    """
    share = (0.299, 0.587, 0.114) if image.shape[1] == 3 else (1 / image.shape[1],) * image.shape[1]
    gray = (image * torch.tensor(share, dtype=image.dtype, device="cpu").view(1, -1, 1, 1)).sum(1, keepdim=True)
    height, width = (min(2, size) for size in gray.shape[2:])
    line = torch.tensor([1.0, 0.0, -1.0], dtype=image.dtype, device="cpu") / 3
    across = line.expand(3, 3)
    kernels = torch.stack([across, across.t()])[:, None]
    found = F.conv2d(F.avg_pool2d(gray, (height, width), stride=2), kernels, padding=1)
    return found.square().sum(1).sqrt()
