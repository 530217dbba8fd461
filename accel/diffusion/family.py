"""What makes a model a diffusion model, the rules for it, and which of its forwards are worth a CUDA graph."""

from collections.abc import Callable
from functools import partial

from torch import nn

from accel.cuda_graphs.rule import match_graph
from accel.diffusion.blocks.attention import match_attention
from accel.diffusion.blocks.convolution import match_convolution, match_resample, match_upsample_pair
from accel.diffusion.blocks.resnet import match_resnet
from accel.diffusion.blocks.transformer_2d import match_transformer_block, match_transformer_stack
from accel.diffusion.blocks.up_block import match_up_block
from accel.diffusion.blocks.video_convolution import match_video_convolution
from accel.diffusion.blocks.video_convolution_kind import VideoConvolutions
from accel.diffusion.blocks.video_norm import VideoNorms, match_video_norm
from accel.diffusion.blocks.video_resnet import match_video_resnet
from accel.diffusion.dit.block import match_block
from accel.diffusion.overflow_guard import match_overflow_guard
from accel.diffusion.parallel.guidance import NAME as GUIDANCE
from accel.diffusion.parallel.guidance import match_guidance
from accel.diffusion.parallel.tiles import NAME as TILES
from accel.diffusion.parallel.tiles import match_tiles
from accel.diffusion.step_cache.cache import NAME as STEP_CACHE
from accel.diffusion.step_cache.rule import match_step_cache
from accel.fusion.channels_last import ChannelsLast, over_video
from accel.fusion.norms import match_group_norm, match_layer_norm
from accel.patching.rule import Context, Match, Rule, Site, Skip
from accel.patching.structure import holds, meta_weights


def match_layout(site: Site, context: Context) -> Match | Skip | None:
    """The root of a model with convolutions over images or video: their weights go channels-last on a GPU, by name on a
    CPU too. Of those over images exactly Conv2d; causal ones over video are classes of their own.
    """
    if site.path:
        return None
    convolutions = [m for m in site.module.modules() if type(m) is nn.Conv2d or over_video(m)]
    if not convolutions:
        return None
    if context.options.layout == "keep":
        return Skip('layout="keep"')
    everywhere = context.options.layout == "channels_last"
    if any(map(over_video, convolutions)):
        context.put(VideoConvolutions())
        context.put(VideoNorms())
    layout = context.put(ChannelsLast(site.module, convolutions, everywhere))
    where = "" if everywhere else " on a GPU"
    return Match(patches=(layout,), note=f"{len(convolutions)} convolutions channels-last{where}")


def unless_layout_kept(
    match: Callable[[Site, Context], Match | Skip | None],
) -> Callable[[Site, Context], Match | Skip | None]:
    """The rule `match`, for blocks that work channels-last: not where the user keeps the layout."""

    def matched(site: Site, context: Context) -> Match | Skip | None:
        answer = match(site, context)
        if isinstance(answer, Skip) and meta_weights(site.module):
            return Skip("weights are not loaded (meta device)")
        if isinstance(answer, Match) and context.options.layout == "keep":
            return Skip('layout="keep"')
        return answer

    return matched


FORWARDS = (
    Rule("CUDA graph", match_graph),
    Rule("video resnet block", unless_layout_kept(match_video_resnet)),
    Rule("resnet block", unless_layout_kept(match_resnet)),
    Rule("upward block", unless_layout_kept(match_up_block)),
    Rule("transformer stack", unless_layout_kept(match_transformer_stack)),
    Rule("transformer block", match_transformer_block),
    Rule("attention", match_attention),
    Rule("diffusion transformer block", match_block),
    Rule("resampling", unless_layout_kept(match_resample)),
    Rule("resampling", unless_layout_kept(match_upsample_pair)),
    Rule("convolution", unless_layout_kept(match_convolution)),
    Rule("video convolution", unless_layout_kept(match_video_convolution)),
    Rule("video norm", unless_layout_kept(match_video_norm)),
    Rule("group norm", match_group_norm),
    Rule("layer norm", match_layer_norm),
)
UNDIVIDED = (Rule(STEP_CACHE, partial(match_step_cache, beneath=FORWARDS)), *FORWARDS)
RULES = (
    Rule("channels-last weights", match_layout),
    Rule(TILES, match_tiles),
    Rule("overflow guard", match_overflow_guard),
    Rule(GUIDANCE, partial(match_guidance, beneath=UNDIVIDED)),
    *UNDIVIDED,
)


def graph_paths(root: nn.Module) -> tuple[str, ...]:
    """An autoencoder's two halves, since its own forward is not what a pipeline calls; else the model itself."""
    if next(root.parameters(), None) is None:
        return ()
    if holds(root, "encoder", "decoder") and hasattr(root, "decode"):
        return ("encoder", "decoder")
    generates = getattr(root, "can_generate", None)
    return () if generates is not None and generates() else ("",)
