"""Every model of the zoo against the parameters and multiply-accumulates that are published for it, within 2 %.

The parameters of the networks of today (TODAY) are within 1 %.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from formulas import (
    AMOEBANET_COUNTS,
    DARTS_COUNTS,
    DEEPFM,
    DLRM_MACS,
    EFFICIENTNET_B0,
    EFFICIENTNET_B0_CIFAR10,
    LAST_BLOCK,
    MOBILENET_V2,
    MOBILENET_V2_CIFAR10,
    SAMPLE,
    TRANSLATED,
    gpt2_macs,
    gpt_counts,
    gptj_macs,
    inverted_residuals,
    mixture_parameters,
    resnet50_cifar10,
    retinanet_heads,
    t5_small_macs,
    transformer_macs,
    whisper_encoder,
)
from torch import nn
from torchvision.models.detection import retinanet_resnet50_fpn
from transformers.models.qwen3_moe import Qwen3MoeForCausalLM
from transformers.models.whisper import WhisperModel

import conf
import models
from models import experts, speech

TORCHVISION = "torchvision documentation, table of classification weights"
TABLE_4_1 = "the dissertation, table 4.1; formulas.gpt_counts() for the operations"
NIMBLE = "Nimble (Kwon et al. 2020), table 1"


@dataclass(frozen=True)
class Figure:
    """`parameters` and `macs` of a model, each from `source`; no `macs` where nobody has published them.

    `published` is there where a figure of the paper's is more than 2 % from the network that everyone runs under that
    name; `difference` then says how the two differ.
    """

    model: str
    parameters: float
    macs: float | None
    source: str
    options: dict[str, conf.Value] = field(default_factory=dict)
    published: tuple[float, float] | None = None
    difference: str = ""


def gpt_options(choice: str) -> dict[str, conf.Value]:
    return {key: value for key, value in conf.options("model", choice).items() if key != "name"}


GPT_J = "the model card of GPT-J 6B: 6,053,381,344 parameters; formulas.gptj_macs()"
TODAY = [
    Figure("clip_vit_b32", 151.28e6, 14.78e9 / 2, "OpenCLIP, model_profile.csv: ViT-B-32, 151.28 M, 14.78 GFLOPs"),
    Figure("dlrm", 540e6, DLRM_MACS, "Naumov et al. 2019, section 5, for the parameters; formulas.DLRM_MACS"),
    Figure("deepfm", *DEEPFM, source="formulas.DEEPFM: the paper has no count"),
    Figure("sd15_unet", 860e6, None, "CompVis/stable-diffusion, README: an 860M UNet"),
    Figure(
        "deeplabv3_resnet50",
        42_004_074 - 2_365_205,
        178.72e9 - (9 * 1024 * 256 + 256 * 21) * 65**2,
        "torchvision documentation, table of segmentation weights, without the auxiliary head",
        published=(42_004_074, 178.72e9),
        difference="torchvision counts the auxiliary head, which only the train form has (checked below).",
    ),
    Figure("retinanet_heads", *retinanet_heads(), source="formulas.retinanet_heads(); the whole network is checked below"),
    Figure("gptj_6b", 6_053_381_344, gptj_macs(128, 128), GPT_J),
    Figure("gptj_6b_decode", 6_053_381_344, gptj_macs(1, 512), GPT_J),
    Figure("whisper_small", *whisper_encoder(), source="formulas.whisper_encoder(); the whole network is checked below"),
    Figure("swin_t", 28_288_354, 4.49e9, TORCHVISION),
    Figure("vit_b16", 86_567_656, 17.56e9, TORCHVISION),
    Figure("convnext_t", 28_589_128, 4.46e9, TORCHVISION),
    Figure("qwen3_moe", mixture_parameters(), None, "formulas.mixture_parameters(); the published size is checked below"),
    Figure("mobilenet_v4", 9.7e6, None, "timm's card of mobilenetv4_conv_medium.e500_r224_in1k"),
]

FIGURES = [
    *TODAY,
    Figure("translated", *TRANSLATED, "closed formulas of models/translated.py's own structure"),
    Figure("nasnet", 5.3e6, 564e6, "Zoph et al. 2018, table 2: NASNet-A (4 @ 1056)"),
    Figure("nasnet_large", 88.9e6, 23.8e9, "Zoph et al. 2018, table 2: NASNet-A (6 @ 4032)"),
    Figure(
        "darts",
        4.7e6,
        DARTS_COUNTS[1],
        "Liu et al. 2019, table 3, for the parameters; formulas.cell_network() for the operations",
        published=(4.7e6, 574e6),
        difference="The repository's own network (4,718,752 parameters, as here) has 530 M in convolutions and the "
        f"classifier. {NIMBLE} has 0.5 B for it beside 0.6 B for NASNet-A's 564 M; readers of the repository measured "
        "523 M, and 544.59 M with norms, activations and pools (its issue 46), which test_darts_as_others_count_it "
        "reproduces. How the paper counted 574 M is not said there.",
    ),
    Figure(
        "amoebanet",
        *AMOEBANET_COUNTS,
        source="formulas.cell_network(): AmoebaNet-A's cells in the DARTS repository's network",
        published=(5.1e6, 555e6),
        difference="Real et al. 2019, table 2, is AmoebaNet-A (N=4, F=50): 12 normal cells with 50 filters after a "
        "stem of two reduction cells. The DARTS repository puts the cells into DARTS's network: 48 filters, and three "
        f"strided convolutions as the stem. {NIMBLE} has 0.5 B for it.",
    ),
    Figure("googlenet", 6_624_904, 1.50e9, TORCHVISION),
    Figure(
        "inception_v3",
        23.9e6,
        5.71e9,
        f"Keras Applications, InceptionV3, for the parameters; {TORCHVISION}, for the operations",
        published=(27_161_264, 5.71e9),
        difference="torchvision counts the auxiliary head, which only the train form has (checked below).",
    ),
    Figure("resnet18", 11_689_512, 1.81e9, TORCHVISION),
    Figure("resnet34", 21_797_672, 3.66e9, TORCHVISION),
    Figure(
        "resnet50",
        25_557_032,
        4.09e9,
        TORCHVISION,
        published=(25.6e6, 3.8e9),
        difference="He et al. 2016, table 1, strides in a block's first 1x1 convolution; torchvision in its 3x3.",
    ),
    Figure(
        "resnet101",
        44_549_160,
        7.80e9,
        TORCHVISION,
        published=(44.5e6, 7.6e9),
        difference="He et al. 2016, table 1, strides in a block's first 1x1 convolution; torchvision in its 3x3.",
    ),
    Figure(
        "mobilenet_v2",
        3_504_872,
        300e6,
        f"{TORCHVISION}, for the parameters; Sandler et al. 2018, table 4, for the operations",
        published=(3.4e6, 300e6),
        difference="Sandler et al. 2018, table 4, says 3.4 M; its table 2 adds up to 3.50 M (checked below).",
    ),
    Figure("efficientnet_b0", 5.3e6, 0.39e9, "Tan & Le 2019, table 2"),
    Figure(
        "efficientnet_b5",
        30e6,
        10.27e9,
        f"Tan & Le 2019, table 2, for the parameters; {TORCHVISION}, for the operations",
        published=(30e6, 9.9e9),
        difference="Tan & Le 2019, table 2, says 9.9 B; its own scaling (width 1.6, depth 2.2, 456 pixels) gives the "
        "10.27 B that torchvision publishes, from the same parameters.",
    ),
    Figure("ios_sample", *SAMPLE, source="formulas.SAMPLE: the paper has no count"),
    Figure("inception_v3_last_block", *LAST_BLOCK, source="formulas.LAST_BLOCK, from Szegedy et al. 2016, figure 7"),
    Figure("squeezenet", 1_248_424, 0.82e9, f"Iandola et al. 2016, table 1, for the parameters; {TORCHVISION}"),
    Figure("vgg16", 138_357_544, 15.47e9, TORCHVISION),
    Figure("randwire", 5.6e6, 583e6, "Xie et al. 2019, table 2: WS(4, 0.75), the mean over graphs"),
    Figure("randwire", 61.5e6, 7.9e9, "Xie et al. 2019, table 4: WS(4, 0.75), C = 154", options={"size": "large"}),
    Figure(
        "bert",
        110e6,
        22.5e9 / 2,
        "Devlin et al. 2019, section 3, for the parameters, pooler included; Sun et al. 2020 (MobileBERT), table 4: "
        "22.5 B FLOPs at sequence 128",
    ),
    Figure("t5", 60e6, t5_small_macs(128), "Raffel et al. 2020, section 3.8 (small); formulas.t5_small_macs()"),
    Figure(
        "gpt2",
        124e6,
        gpt2_macs(128),
        "openai/gpt-2, README, for the parameters; formulas.gpt2_macs()",
        published=(117e6, gpt2_macs(128)),
        difference="Radford et al. 2019, table 2, says 117 M, which the README takes back: 124 M.",
    ),
    Figure("gpt", *gpt_counts(4, 128, 512), source="formulas.gpt_counts(): it is ours"),
    *(
        Figure("gpt", parameters, gpt_counts(layers, hidden, 50257)[1], TABLE_4_1, gpt_options(choice))
        for choice, parameters, layers, hidden in [
            *[("gpt_13b", 13e9, 40, 5120), ("gpt_101b", 101e9, 80, 10240)],
            *[("gpt_175b", 175e9, 96, 12288), ("gpt_341b", 341e9, 120, 15360)],
        ]
    ),
    Figure("resnet50_cifar10", *resnet50_cifar10(), source="formulas.resnet50_cifar10(), from torchvision's ResNet-50"),
    Figure("mobilenet_v2_cifar10", *MOBILENET_V2_CIFAR10, source="formulas.inverted_residuals()"),
    Figure("efficientnet_b0_cifar10", *EFFICIENTNET_B0_CIFAR10, source="formulas.inverted_residuals()"),
]


def close(measured: float, expected: float, share: float = 0.02) -> bool:
    return abs(measured - expected) <= share * expected


def counts(name: str, *, training: bool = False, **options: str) -> models.Counts:
    model = models.load(name, 1, training=training, device="meta", **options)
    return models.count(model.module, model.inputs)


def name_of(figure: Figure) -> str:
    return "_".join([figure.model, *map(str, figure.options.values())])


LARGE = ("gptj_6b", "gptj_6b_decode", "sd15_unet", "nasnet_large", "efficientnet_b5", "darts", "amoebanet", "randwire_large")
LARGE += ("resnet34", "resnet101", "mobilenet_v2_cifar10", "efficientnet_b0_cifar10")  # the last two are counted below too
MOST_LAYERS = 12  # of a GPT that is no slow test


def marks_of(figure: Figure) -> list[pytest.MarkDecorator]:
    is_large = name_of(figure) in LARGE or int(str(figure.options.get("layers", 0))) > MOST_LAYERS
    return [pytest.mark.slow] * is_large


@pytest.mark.parametrize("figure", [pytest.param(figure, id=name_of(figure), marks=marks_of(figure)) for figure in FIGURES])
def test_counts_are_the_published_ones(figure: Figure) -> None:
    measured = counts(figure.model, **figure.options)
    assert close(measured.parameters, figure.parameters, 0.01 if figure in TODAY else 0.02), figure.source
    assert figure.macs is None or close(measured.macs, figure.macs), figure.source
    if figure.published is not None:
        # The second figure has its place here only while it is a different one.
        assert figure.difference
        assert not (close(measured.parameters, figure.published[0]) and close(measured.macs, figure.published[1]))


def test_every_model_has_a_figure() -> None:
    assert sorted({figure.model for figure in FIGURES}) == models.names()


@pytest.mark.parametrize(
    ("blocks", "squeeze", "published"),
    [(MOBILENET_V2, False, (3_504_872, 300e6)), (EFFICIENTNET_B0, True, (5_288_548, 0.39e9))],
    ids=["mobilenet_v2", "efficientnet_b0"],
)
def test_the_formula_agrees_with_the_imagenet_figures(
    blocks: list[tuple[int, ...]], squeeze: bool, published: tuple[float, float]
) -> None:
    parameters, macs = inverted_residuals(112, blocks, 1280, 1000, squeeze)
    assert parameters == published[0]
    assert close(macs, published[1])


def test_formulas_are_exact_on_our_own_networks() -> None:
    assert (4_718_752, DARTS_COUNTS[1]) == DARTS_COUNTS
    for name, expected in [
        ("darts", DARTS_COUNTS),
        ("amoebanet", AMOEBANET_COUNTS),
        ("mobilenet_v2_cifar10", MOBILENET_V2_CIFAR10),
        ("efficientnet_b0_cifar10", EFFICIENTNET_B0_CIFAR10),
    ]:
        measured = counts(name)
        assert (measured.parameters, measured.macs) == expected, name


def test_convolutions_are_counted_apart_from_the_layers_after_them() -> None:
    vgg16, bert = counts("vgg16"), counts("bert")
    assert vgg16.macs - vgg16.convolution_macs == 25088 * 4096 + 4096 * 4096 + 4096 * 1000
    assert bert.macs > 0 and bert.convolution_macs == 0


def test_the_train_form_of_inception_has_the_published_parameters() -> None:
    module = models.load("inception_v3", 2, training=True, device="meta").module
    assert sum(parameter.numel() for parameter in module.parameters()) == 27_161_264


def test_what_the_networks_of_today_are_parts_of_has_the_published_parameters() -> None:
    """Each by the class of which the zoo has a part, or other sizes."""
    auxiliary = models.load("deeplabv3_resnet50", 2, training=True, device="meta")
    with torch.device("meta"):
        retinanet = retinanet_resnet50_fpn(weights=None, weights_backbone=None)
        whisper = WhisperModel(speech.configured("full"))
        qwen3 = Qwen3MoeForCausalLM(experts.configured("full", layers=48, experts=128, vocabulary=151936))
    norms = sum(p.numel() for m in retinanet.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters())

    def parameters(module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    assert parameters(auxiliary.module) == 42_004_074
    assert parameters(retinanet) - norms == 34_014_999  # torchvision's are frozen where the weights are trained
    assert close(parameters(whisper), 244e6, 0.01)  # openai/whisper, README
    assert close(parameters(qwen3), 30.5e9, 0.01)  # the model card of Qwen3-30B-A3B


def test_darts_as_others_count_it() -> None:
    """544.59 M with two per normed element, one per activation and one per pool's input (DARTS's issue 46)."""
    model = models.load("darts", 1, device="meta")
    total = models.count(model.module, model.inputs).macs

    def add(module: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        nonlocal total
        if isinstance(module, nn.BatchNorm2d):
            total += 2 * output.numel()
        elif isinstance(module, nn.ReLU):
            total += output.numel()
        elif isinstance(module, nn.MaxPool2d):
            total += inputs[0].numel()

    for module in model.module.modules():
        module.register_forward_hook(add)
    model.module(*model.inputs)
    assert total == pytest.approx(544.59e6, rel=2e-3)


def test_counting_computes_and_changes_nothing() -> None:
    model = models.load("resnet18", 2, training=True)
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    measured = models.count(model.module, model.inputs)
    assert (measured.parameters, measured.macs) == (11_689_512, 2 * counts("resnet18").macs)
    assert all(torch.equal(value, before[name]) for name, value in model.module.state_dict().items())
    assert not any(isinstance(value, torch._subclasses.FakeTensor) for value in model.module.parameters())


def test_counting_sees_attention() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True).eval()
    inputs = (torch.randn(1, 10, 64),)
    assert models.count(layer, inputs).macs == transformer_macs(1, 64, 256, 10)


def test_counting_is_the_same_in_each_precision() -> None:
    loaded = models.load("qwen3_moe", 1, device="meta", size="small")
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    assert len({models.count(loaded.module.to(dtype), loaded.inputs) for dtype in dtypes}) == 1
