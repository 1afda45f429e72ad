"""Layouts of the output channels, the card that records them, and when two outputs agree."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fp4deploy.errors import InputError
from fp4deploy.models import InstanceHead, ModelCard
from fp4deploy.models.heads import CLOSE
from fp4deploy.models.meaning import Classes

CARD = ModelCard("fp16", 0.25, ("background", "cell"), 32, 32, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), True)
CENTRES = InstanceHead("centres", 2, stuff=(1,), max_detections=500)
SET = InstanceHead("set", 3, masks=4)


def test_channels() -> None:
    assert CARD.channels == 2
    assert dataclasses.replace(CARD, head=CENTRES).channels == 5
    assert SET.channels == 7
    outputs = torch.arange(7.0).view(1, 7, 1, 1)
    assert SET.semantic(outputs).flatten().tolist() == [0, 1, 2]
    assert SET.mask_logits(outputs).flatten().tolist() == [3, 4, 5, 6]
    outputs = torch.arange(5.0).view(5, 1, 1)
    assert CENTRES.semantic(outputs).flatten().tolist() == [0, 1]
    assert CENTRES.heatmap(outputs).flatten().tolist() == [2]
    assert CENTRES.offsets(outputs).flatten().tolist() == [3, 4]


@pytest.mark.parametrize("head", [None, CENTRES, SET])
def test_the_card_records_the_head(head: InstanceHead | None) -> None:
    names = ("background", "cell", "debris")[: head.classes if head else 2]
    card = dataclasses.replace(CARD, class_names=names, task="instance" if head else "semantic", head=head)
    assert ModelCard.from_json(card.to_json()) == card


def test_cards_written_before_there_were_tasks_are_semantic() -> None:
    text = CARD.to_json().replace(', "task": "semantic"', "").replace('"head": null, ', "")
    assert "task" not in text
    assert "head" not in text
    assert ModelCard.from_json(text) == CARD


@pytest.mark.parametrize("text", ['"method": "boxes"', '"method": "set", "colour": 3'])
def test_a_head_of_another_version_is_refused(text: str) -> None:
    whole = dataclasses.replace(CARD, head=SET).to_json().replace('"method": "set"', text)
    with pytest.raises(InputError, match=r"model card"):
        ModelCard.from_json(whole)


def outputs(head: InstanceHead | None) -> torch.Tensor:
    channels = head.channels if head else 4
    return torch.randn(2, channels, 6, 5, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("head", [None, CENTRES, SET])
def test_what_agrees_and_what_does_not(head: InstanceHead | None) -> None:
    expected, meaning = outputs(head), head or Classes(1)
    assert meaning.agreeing(expected, expected.clone()).all()
    classes = head.classes if head else 4
    other = expected.clone()
    other[0, :classes, 2, 3] = expected[0, :classes, 2, 3].flip(0) * torch.tensor(-1.0)
    other[0, int(expected[0, :classes, 2, 3].argmin()), 2, 3] = 50.0
    same = meaning.agreeing(expected, other)
    assert (~same).nonzero().tolist() == [[0, 2, 3]]
    broken = expected.clone()
    broken[1, 0, 0, 0] = float("nan")
    assert (~meaning.agreeing(expected, broken)).nonzero().tolist() == [[1, 0, 0]]


def test_centres_and_offsets_agree_within_a_third_of_a_pixel() -> None:
    expected = outputs(CENTRES)
    for channel in (2, 3, 4):
        other = expected.clone()
        other[0, channel, 1, 1] += 0.9 * CLOSE
        assert CENTRES.agreeing(expected, other).all()
        other[0, channel, 1, 1] += 0.2 * CLOSE
        assert (~CENTRES.agreeing(expected, other)).nonzero().tolist() == [[0, 1, 1]]


def test_a_mask_agrees_where_the_same_channel_holds_the_pixel() -> None:
    expected = outputs(SET)
    expected[:, 3:, 1, 1] = torch.tensor([-1.0, 2.0, 1.0, -3.0])
    other = expected.clone()
    other[0, 3:, 1, 1] = torch.tensor([-5.0, 0.5, 0.1, -9.0])
    assert SET.agreeing(expected, other).all()
    other[0, 5, 1, 1] = 0.6
    assert (~SET.agreeing(expected, other)).nonzero().tolist() == [[0, 1, 1]]
    other[0, 3:, 1, 1] = -1.0
    assert (~SET.agreeing(expected, other)).nonzero().tolist() == [[0, 1, 1]]
