"""Classifiers of timm and transformers by their specs, with random weights and for the size of the data."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp4deploy.errors import InputError
from fp4deploy.models import ModelCard
from fp4deploy.models.build import build_model, network_for
from fp4deploy.models.heads import ClassHead
from fp4deploy.models.spec import parse_spec
from fp4deploy.models.volumes import NetworkInput
from fp4deploy.qat import layer_plan
from tests.models.libraries import need_library_of

NETWORKS: dict[str, tuple[dict[str, Any], int]] = {  # spec -> arguments, layers in FP4
    "timm:vit_tiny_patch16_224": ({"embed_dim": 64, "depth": 2, "num_heads": 2, "patch_size": 8}, 8),
    "timm:convnext_atto": ({"depths": [1, 1, 1, 1], "dims": [16, 32, 32, 32]}, 11),
    "hf:vit": (
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 128,
            "patch_size": 8,
        },
        12,
    ),
    "hf:convnext": ({"hidden_sizes": [16, 32, 32, 32], "depths": [1, 1, 1, 1]}, 11),
}


@pytest.mark.parametrize("spec", NETWORKS)
def test_a_classifier_is_built_for_the_size_of_the_data(spec: str) -> None:
    need_library_of(spec)
    arguments, layers = NETWORKS[spec]
    inputs = NetworkInput(3, (32, 32))
    network = build_model(parse_spec(spec, arguments), 5, head=ClassHead("label", 5), inputs=inputs).eval()
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 5)
    assert sum(plan.precision == "FP4" for plan in layer_plan(network)) == layers


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hiden_size": 3}, "Did you mean 'hidden_size'"),
        ({"num_labels": 3}, "the name says it"),
        ({"name_or_path": "someone/model"}, "may name a file"),
    ],
)
def test_settings_of_transformers_are_checked(arguments: dict[str, Any], message: str) -> None:
    need_library_of("hf:vit")
    with pytest.raises(InputError, match=message):
        build_model(parse_spec("hf:vit", arguments), 5, head=ClassHead("label", 5), inputs=NetworkInput(3, (32, 32)))


def test_a_classifier_of_transformers_is_no_segmentation_network() -> None:
    with pytest.raises(InputError, match="add --task classification"):
        build_model(parse_spec("hf:vit"), 5)


def test_a_card_says_that_the_classes_are_of_images() -> None:
    names, zeros, ones = ("a", "b"), (0.0,) * 3, (1.0,) * 3
    given: dict[str, Any] = {"architecture": "hf:vit", "task": "classification"}
    card = ModelCard("fp16", 1.0, names, 32, 32, zeros, ones, False, head=ClassHead("label", 2), **given)
    assert ModelCard.from_json(card.to_json()) == card
    for wrong in ({"head": None}, {"head": ClassHead("label", 3)}, {"task": "semantic"}):
        other = ModelCard(**{**vars(card), **wrong})
        with pytest.raises(InputError, match="classifier's head|head.classes = 3"):
            ModelCard.from_json(other.to_json())
    unet = ModelCard(**{**vars(card), "architecture": "unet"})
    with pytest.raises(InputError, match="Take timm:NAME, hf:NAME"):
        network_for(unet)
