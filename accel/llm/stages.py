"""What comes before the rules for a language model: place, import, round, analyze, quantize. None changes the model."""

from functools import partial

from torch import nn
from transformers import PreTrainedModel

from accel.errors import SkippedSite, reason_of
from accel.llm.batching.hook import adapters_by_prompt
from accel.llm.family import RULES
from accel.llm.generation.pace import pace
from accel.llm.moe.experts import find_formula
from accel.llm.pipeline.placement import LiftedHooks, Placement, layer_placement
from accel.llm.ptq.formats.prequantized_import import PrequantizedImport
from accel.llm.ptq.model import LanguageModelQuantization
from accel.llm.ptq.mxfp4 import Mxfp4Experts
from accel.llm.runtime.analyze import Analysis, analyze
from accel.options import STATIC, calibrate
from accel.parallel.agreement import all_agree
from accel.parallel.sharded_layers import ranks_of
from accel.patching.rule import Context, Rule
from accel.planning.plan import Plan, Row, StageReport, StageResult, rows_of
from accel.quantization.activation_quantization import RULE as ROUNDING
from accel.quantization.activation_quantization import Rounding, calibration_notes, rounding_linears
from accel.quantization.activations import weight_dtype_of
from accel.quantization.model import RULE


def language_plan(model: nn.Module, context: Context, towers: tuple[Rule, ...] = ()) -> Plan:
    """The plan of a causal language model. towers: rules for what it sees images by."""
    stages = place, import_prequantized, round_activations, analyze_layers, quantize, adapters_by_prompt
    return Plan(model, (*RULES, *towers), context, stages, pace)


def place(model: PreTrainedModel, context: Context) -> StageResult:
    """Where accelerate has spread its layers; hooks that have nothing to do are taken off."""
    found = layer_placement(model)
    if not isinstance(found, Placement):
        return StageResult()
    context.put(found)
    return StageResult((LiftedHooks(found.layers),))


def import_prequantized(model: nn.Module, context: Context) -> StageResult:
    """Quantized linears it arrived with are repacked. Raises SkippedSite for one left under strict=True."""
    found = PrequantizedImport(model, context.options.activations)
    if context.options.strict and (left := [row for row in found.rows if row[1] == "skipped"]):
        raise SkippedSite(f"strict=True: {left[0][0]} ({RULE}): {left[0][2]}")
    return StageResult(
        (found,) if found.found or found.forwards or found.dequantizes else (),
        lambda: StageReport(rows_of(RULE, found.rows), prequantized=bool(found.found or found.forwards)),
    )


def round_activations(model: PreTrainedModel, context: Context) -> StageResult:
    """Quantized linears round their inputs, if asked for. Raises ValueError where none could, nor will be quantized."""
    options, found = context.options, Rounding(context.options)
    head = model.get_output_embeddings()
    found.find(model, () if head is None else set(head.modules()))  # of few rows, but for all logits
    if options.activations is not None and options.weights is None and not (found.pairs or rounding_linears(model)):
        if options.activations in STATIC:
            raise ValueError(
                f"activations={options.activations!r}: no linear layer of the model holds what it "
                f"needs; {calibrate(options.activations)}"
            )
        raise ValueError(
            f"activations={options.activations!r} needs weights of the same kind, and the model holds none: "
            f"give weights={weight_dtype_of(options.activations)!r} too"
        )

    def report() -> StageReport:
        notes = [Row("", ROUNDING, "patched", line) for line in calibration_notes(model)]
        return StageReport(rows_of(ROUNDING, found.rows) + notes)

    return StageResult((found,) if found.pairs else (), report)


def analyze_layers(model: nn.Module, context: Context) -> StageResult:
    """What every layer computes, in the model's own precision, for the stages after it."""
    try:
        options = context.options
        whole = (options.kv_cache or options.weights) is not None
        context.put(analyze(model, options.kv_cache is not None, whole))
    except Exception as error:  # a model of an unknown make
        context.put(Analysis(reason=f"could not be examined: {reason_of(error)}"))
    ranks = ranks_of(model)
    if ranks is not None and not all_agree(ranks, "what layers compute", context.of(Analysis).outline()):
        context.put(Analysis(reason="ranks that share the model do not understand their parts alike"))
    return StageResult()


def quantize(model: nn.Module, context: Context, stacks: tuple[str, ...] = ()) -> StageResult:
    """The weights the options name: before anything is bound to them. stacks: see `linears`. Raises ValueError for NaN
    or Inf in one, as it is applied, and for one that strict=True forbids to leave out. Where they name none, what came
    in MXFP4 is packed again for kernels.
    """
    weights = context.options.weights
    # A model that was not understood runs stock code over its quantized linears: that is tried.
    find = partial(find_formula, context=context, kernels=(context.kernels.plain(),))
    if weights is None:
        fuses = context.options.cpu == "fuse" or next(model.parameters()).is_cuda
        if not fuses or context.of(Analysis).reason is not None:
            return StageResult()
        packed = Mxfp4Experts(model, find)
        return StageResult((packed,), lambda: StageReport(rows_of(RULE, packed.rows), packed.records))
    tried = not stacks and context.of(Analysis).reason is not None
    routers = context.of(Analysis).routers()
    found = LanguageModelQuantization(model, weights, context.options, find, tried, routers, stacks)
    rounds = () if context.options.activations is None else (Rounding(context.options, found.swap),)
    return StageResult(
        (found.swap, *rounds), lambda: StageReport(rows_of(RULE, found.rows), found.records, found.warnings)
    )
