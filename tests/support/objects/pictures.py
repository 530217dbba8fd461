"""Calls of encoders of pictures, with random pixels."""

import torch


def images(batch=3, height=16, width=16):
    return {"pixel_values": torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(1))}


def patches(batch=3):
    """Of three sizes."""
    sizes = torch.tensor([[3, 4], [4, 2], [1, 2]])[:batch]
    mask = (torch.arange(12) < sizes.prod(1, keepdim=True)).long()
    pixels = torch.randn(batch, 12, 48, generator=torch.Generator().manual_seed(1))
    return {"pixel_values": pixels, "spatial_shapes": sizes, "pixel_attention_mask": mask}


def grids(*sizes):
    """Of images and videos of these frames, heights and widths in patches, all in one row."""
    count = sum(frames * height * width for frames, height, width in sizes)
    pixels = torch.randn(count, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(1))
    return {"hidden_states": pixels, "grid_thw": torch.tensor(sizes)}


def renamed(call):
    return {name.replace("hidden_states", "pixel_values"): one for name, one in call.items()}


def merged(*sizes):
    """As of `grids`, whose patches are put together later, or not."""
    given = grids(*sizes)
    merges = {"merge_sizes": torch.tensor([2, 1, 2][: len(sizes)]), "grid_thw": given["grid_thw"]}
    return {"pixel_values": given["hidden_states"][:, :48].contiguous()} | merges


def sized(*sizes):
    """Images of these heights and widths."""
    return images(len(sizes)) | {"image_sizes": torch.tensor(sizes)}


def shown(batch=3):
    """Images of which the first 3, then 2 rows and so on are shown, and as many columns less one."""
    mask = torch.zeros(batch, 4, 4, dtype=torch.bool)
    for at, one in enumerate(mask):
        one[: 3 - at, : 4 - at] = True
    return images(batch) | {"patch_attention_mask": mask}


def placed(*sizes):
    """Pictures of these widths and heights in patches."""
    places = [torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(1) for width, height in sizes]
    padded = torch.nn.utils.rnn.pad_sequence(places, batch_first=True, padding_value=-1)
    pixels = torch.rand(len(sizes), padded.shape[1], 48, generator=torch.Generator().manual_seed(1))
    return {"pixel_values": pixels, "pixel_position_ids": padded}
