"""A pipeline of transformers for every task that it knows, around tiny random models, and a call of each."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from accel.bench.llm.tiny import tiny_configs
from support.compatibility.tiny_language_models import DEMANDS
from support.llm.multimodal import words as words_and_image

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
IMAGE = {"input_ids": words_and_image(True), "pixel_values": torch.ones(2, 3, 16, 16), "max_new_tokens": 3}
SOUND = np.sin(np.arange(1600) / 7).astype(np.float32)
PICTURE = Image.fromarray((np.arange(16 * 16 * 3) * 7 % 256).astype(np.uint8).reshape(16, 16, 3))
TASKS: dict[str, Callable[[], tuple[Any, Callable]]] = {}


def model(name: str, inner: dict | None = None, **demanded):
    """demanded: of its configuration; inner: of others inside, by model type."""
    kind = getattr(transformers, name)
    demands = DEMANDS | {kind.config_class.model_type: demanded} | (inner or {})
    config = next(one for one in tiny_configs(kind, demands) if not isinstance(one, Exception))
    torch.manual_seed(0)
    made = kind(config).eval()
    for parameter in made.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape)
    return made


def words(**more):
    vocabulary = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    numbered = {word: number for number, word in enumerate(vocabulary)}
    return transformers.BertTokenizer(vocab=numbered, model_max_length=64, **more)


def pictures(name: str, **more):
    return getattr(transformers, f"{name}ImageProcessorPil")(size={"height": 16, "width": 16}, **more)


def reading(name: str, **demanded):
    return {"model": model(name, **demanded), "tokenizer": words()}


def seeing(name: str, kind: str, **demanded):
    return {"model": model(name, **demanded), "image_processor": pictures(kind)}


def hearing(name: str, **demanded):
    return {"model": model(name, **demanded), "feature_extractor": transformers.Wav2Vec2FeatureExtractor()}


def writing():
    from support.llm.calls import tokenizer
    from support.llm.families import make

    return {"model": make("llama"), "tokenizer": tokenizer()}


def deciding():
    from transformers.decision import DecisionConfig

    return writing() | {"decision_config": DecisionConfig(labels={"noul": ["Y", "N"]})}


def describing():
    from support.llm.multimodal import make

    return make("internvl")[0]


def task(name: str, given: Any, make: Callable[[], dict], **call) -> None:
    """make: a dictionary of the model, and what prepares its inputs."""

    def made():
        pipe = transformers.pipeline(name, device="cpu", **make())
        return pipe, lambda pipe: pipe(given, **call)

    TASKS[name] = made


def prepared(name: str, make: Callable[[], Any], *, call: str = "__call__", **inputs) -> None:
    """A task whose inputs are prepared by packages that are not installed: its pipeline calls its model so."""

    def made():
        kind = transformers.pipelines.SUPPORTED_TASKS[name]["impl"]
        if isinstance(kind, str):  # since transformers 5.24
            kind = getattr(importlib.import_module(kind.rpartition(".")[0]), kind.rpartition(".")[2])
        pipe = kind.__new__(kind)
        vars(pipe).update(model=make(), device=torch.device("cpu"), tokenizer=None)
        return pipe, lambda pipe: getattr(pipe.model, call)(**inputs)

    TASKS[name] = made


LABELS = {"candidate_labels": ["a", "b"]}
LEVELS = {"hidden_sizes": [8] * 4, "num_attention_heads": [1] * 4, "depths": [1] * 4, "sr_ratios": [1] * 4,
          "decoder_hidden_size": 8}  # fmt: skip
SPECTRUM = {"spec_size": 256, "patch_embeds_hidden_size": 8, "depths": [2, 2, 2, 2], "num_classes": 527}
KEYPOINTS = {"keypoint_decoder_dim": 65, "descriptor_decoder_dim": 64, "keypoint_threshold": 0.0, "max_keypoints": 4}
PAIRER = {"gnn_layers_types": ["self", "cross"], "keypoint_encoder_sizes": [32]}
task("text-classification", "abc", lambda: reading("BertForSequenceClassification", num_labels=3))
task("zero-shot-classification", "abc", lambda: reading("BertForSequenceClassification", num_labels=3), **LABELS)
task("token-classification", "abc def", lambda: reading("DebertaForTokenClassification"))
task("feature-extraction", "abc", lambda: reading("BertModel"))
task("fill-mask", "ab [MASK]", lambda: reading("ConvBertForMaskedLM"))
task("text-generation", "abc", writing, max_new_tokens=4, do_sample=False)
task(
    "document-question-answering",
    {"image": None, "question": "abc", "word_boxes": [["de", [1, 2, 3, 4]]]},
    lambda: reading("LayoutLMForQuestionAnswering", max_2d_position_embeddings=1024),
)
task("audio-classification", SOUND, lambda: hearing("WavLMForSequenceClassification"))
task("image-classification", PICTURE, lambda: seeing("ViTForImageClassification", "ViT"))
task("image-feature-extraction", PICTURE, lambda: seeing("ViTModel", "ViT"))
task(
    "zero-shot-image-classification",
    PICTURE,
    lambda: {
        "model": model("CLIPModel"),
        "tokenizer": words(model_input_names=["input_ids", "attention_mask"]),  # as that of CLIP
        "image_processor": pictures("CLIP", crop_size=16),
    },
    candidate_labels=["a"],  # two have scores that only rounding tells apart
)
task(
    "automatic-speech-recognition",
    SOUND,
    lambda: hearing("Wav2Vec2ForCTC", vocab_size=57) | {"tokenizer": words()},
)
task(
    "zero-shot-audio-classification",
    SOUND,
    lambda: {
        "model": model("ClapModel", {"clap_audio_model": SPECTRUM}),
        "tokenizer": words(model_input_names=["input_ids", "attention_mask"]),
        "feature_extractor": transformers.ClapFeatureExtractor(truncation="rand_trunc"),
    },
    **LABELS,
)
task(
    "object-detection",
    PICTURE,
    lambda: seeing("YolosForObjectDetection", "Yolos", image_size=[16, 16]),
    threshold=0.0,
)
task("image-segmentation", PICTURE, lambda: seeing("SegformerForSemanticSegmentation", "Segformer", **LEVELS))
task(
    "depth-estimation",
    PICTURE.resize((64, 64)),
    lambda: {
        "model": model("GLPNForDepthEstimation", head_in_index=-1, **LEVELS),
        "image_processor": transformers.GLPNImageProcessorPil(),
    },
)
task(
    "zero-shot-object-detection",
    PICTURE,
    lambda: reading("OwlViTForObjectDetection") | {"image_processor": pictures("OwlViT")},
    **LABELS,
)
VOCODER = {"upsample_initial_channel": 16, "upsample_rates": [2, 2], "upsample_kernel_sizes": [4, 4]}
VOCODER |= {"resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3]]}
task("text-to-audio", "abc", lambda: reading("VitsModel", **VOCODER))
task("decision", {"state": "abc", "questions": {"q": {"type": "noul", "instructions": "def"}}}, deciding)
prepared(
    "video-classification",
    lambda: model("VideoMAEForVideoClassification", num_frames=2),
    pixel_values=torch.ones(1, 2, 3, 16, 16),
)
prepared(
    "mask-generation",
    lambda: model("SamModel", {"sam_vision_model": {"output_channels": 64, "num_pos_feats": 32}}),
    pixel_values=torch.ones(1, 3, 16, 16),
    input_points=torch.ones(1, 1, 1, 2),
)
prepared(
    "table-question-answering",
    lambda: model("TapasForQuestionAnswering"),
    input_ids=torch.ones(1, 4, dtype=torch.long),
)
prepared(
    "keypoint-matching",
    lambda: model("SuperGlueForKeypointMatching", {"superpoint": KEYPOINTS}, **PAIRER),
    pixel_values=torch.ones(1, 2, 3, 16, 16),
)
for name in ("image-text-to-text", "any-to-any"):
    prepared(name, describing, call="generate", **IMAGE)
