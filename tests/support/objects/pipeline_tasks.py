"""A pipeline of transformers for every task that it knows, around tiny random models, and a call of each."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from support.compatibility.tiny_configs import tiny_of
from support.llm.multimodal import words as words_and_image

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
IMAGE = {"input_ids": words_and_image(True), "pixel_values": torch.ones(2, 3, 16, 16), "max_new_tokens": 3}
SOUND = np.sin(np.arange(1600) / 7).astype(np.float32)
PICTURE = Image.fromarray((np.arange(16 * 16 * 3) * 7 % 256).astype(np.uint8).reshape(16, 16, 3))
TASKS: dict[str, Callable[[], tuple[Any, Callable]]] = {}


def model(name: str, **demanded):
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    made = kind(tiny_of(kind.config_class, demanded)).eval()
    for parameter in made.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape)
    return made


def words(**more):
    vocabulary = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    numbered = {word: number for number, word in enumerate(vocabulary)}
    return transformers.BertTokenizer(vocab=numbered, model_max_length=64, **more)


def task(name: str, given: Any, **call):
    """The function makes a dictionary: the model, and what prepares its inputs."""

    def add(make):
        def made():
            pipe = transformers.pipeline(name, device="cpu", **make())
            return pipe, lambda pipe: pipe(given, **call)

        TASKS[name] = made
        return make

    return add


def prepared(name: str, *, call: str = "__call__", **inputs):
    """A task whose inputs are prepared by packages that are not installed: its pipeline calls its model so."""

    def add(make):
        def made():
            kind = transformers.pipelines.SUPPORTED_TASKS[name]["impl"]
            if isinstance(kind, str):  # since transformers 5.24
                kind = getattr(importlib.import_module(kind.rpartition(".")[0]), kind.rpartition(".")[2])
            pipe = kind.__new__(kind)
            vars(pipe).update(model=make(), device=torch.device("cpu"), tokenizer=None)
            return pipe, lambda pipe: getattr(pipe.model, call)(**inputs)

        TASKS[name] = made
        return make

    return add


@task("text-classification", "abc")
@task("zero-shot-classification", "abc", candidate_labels=["a", "b"])
def classifier():
    return {"model": model("BertForSequenceClassification", num_labels=3), "tokenizer": words()}


@task("token-classification", "abc def")
def tagger():
    return {"model": model("BertForTokenClassification"), "tokenizer": words()}


@task("feature-extraction", "abc")
def embedder():
    return {"model": model("BertModel"), "tokenizer": words()}


@task("fill-mask", "ab [MASK]")
def filler():
    return {"model": model("BertForMaskedLM"), "tokenizer": words()}


@task("text-generation", "abc", max_new_tokens=4, do_sample=False)
def writer():
    from support.llm.calls import tokenizer
    from support.llm.families import make

    return {"model": make("llama"), "tokenizer": tokenizer()}


@task("document-question-answering", {"image": None, "question": "abc", "word_boxes": [["de", [1, 2, 3, 4]]]})
def reader():
    return {"model": model("LayoutLMForQuestionAnswering"), "tokenizer": words()}


@task("audio-classification", SOUND)
def listener():
    return {"model": model("Wav2Vec2ForSequenceClassification"),
            "feature_extractor": transformers.Wav2Vec2FeatureExtractor()}  # fmt: skip


@task("image-classification", PICTURE)
def viewer():
    return {"model": model("ViTForImageClassification"), "image_processor": pictures("ViT")}


@task("image-feature-extraction", PICTURE)
def image_embedder():
    return {"model": model("ViTModel"), "image_processor": pictures("ViT")}


def pictures(name: str, **more):
    size = {"height": 16, "width": 16}
    return getattr(transformers, f"{name}ImageProcessorPil")(size=size, **more)


@task("zero-shot-image-classification", PICTURE, candidate_labels=["a", "b"])
def matcher():
    return {"model": model("CLIPModel"), "tokenizer": words(), "image_processor": pictures("CLIP", crop_size=16)}


@task("automatic-speech-recognition", SOUND)
def transcriber():
    return {"model": model("Wav2Vec2ForCTC", vocab_size=57), "tokenizer": words(),
            "feature_extractor": transformers.Wav2Vec2FeatureExtractor()}  # fmt: skip


@task("zero-shot-audio-classification", SOUND, candidate_labels=["a", "b"])
def audio_matcher():
    plain = words(model_input_names=["input_ids", "attention_mask"])
    processor = transformers.ClapFeatureExtractor(truncation="rand_trunc")
    clap = model("ClapModel", audio_config={"patch_embeds_hidden_size": 8})
    return {"model": clap, "tokenizer": plain, "feature_extractor": processor}


@task("object-detection", PICTURE, threshold=0.0)
def detector():
    return {"model": model("YolosForObjectDetection", image_size=[16, 16]), "image_processor": pictures("Yolos")}


LEVELS = {"hidden_sizes": [8] * 4, "num_attention_heads": [1] * 4, "depths": [1] * 4, "sr_ratios": [1] * 4,
          "decoder_hidden_size": 8}  # fmt: skip


@task("image-segmentation", PICTURE)
def segmenter():
    return {"model": model("SegformerForSemanticSegmentation", **LEVELS), "image_processor": pictures("Segformer")}


@task("depth-estimation", PICTURE.resize((64, 64)))
def measurer():
    processor = transformers.GLPNImageProcessorPil()
    return {"model": model("GLPNForDepthEstimation", **LEVELS), "image_processor": processor}


@task("zero-shot-object-detection", PICTURE, candidate_labels=["a", "b"])
def finder():
    return {"model": model("OwlViTForObjectDetection"), "tokenizer": words(), "image_processor": pictures("OwlViT")}


@task("text-to-audio", "abc")
def speaker():
    return {"model": model("VitsModel"), "tokenizer": words()}


@task("decision", {"state": "abc", "questions": {"q": {"type": "noul", "instructions": "def"}}})
def decider():
    from transformers.decision import DecisionConfig

    return writer() | {"decision_config": DecisionConfig(labels={"noul": ["Y", "N"]})}


@prepared("video-classification", pixel_values=torch.ones(1, 2, 3, 16, 16))
def watcher():
    return model("VideoMAEForVideoClassification", num_frames=2)


@prepared("mask-generation", pixel_values=torch.ones(1, 3, 16, 16), input_points=torch.ones(1, 1, 1, 2))
def cutter():
    sizes = {"image_size": 16, "patch_size": 4}
    return model(
        "SamModel", vision_config=sizes | {"output_channels": 64, "num_pos_feats": 32}, prompt_encoder_config=sizes
    )


@prepared("table-question-answering", input_ids=torch.ones(1, 4, dtype=torch.long))
def table_reader():
    return model("TapasForQuestionAnswering")


@prepared("keypoint-matching", pixel_values=torch.ones(1, 2, 3, 16, 16))
def pairer():
    detector = {"descriptor_decoder_dim": 64, "keypoint_threshold": 0.0, "max_keypoints": 4}
    kinds = {"gnn_layers_types": ["self", "cross"], "keypoint_encoder_sizes": [32]}
    return model("SuperGlueForKeypointMatching", keypoint_detector_config=detector, **kinds)


@prepared("image-text-to-text", call="generate", **IMAGE)
@prepared("any-to-any", call="generate", **IMAGE)
def describer():
    from support.llm.multimodal import make

    return make("llava")[0]
