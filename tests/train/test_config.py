"""Configuration files, --set, and every mistake reported at once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from fp4deploy.errors import InputError
from fp4deploy.train import Config, load_config, save_config, with_settings
from fp4deploy.train.config import changed_settings
from fp4deploy.train.losses.loss import LabelLoss
from fp4deploy.train.tasks import TrainingTask

CONFIGS = sorted(
    path for path in (Path(__file__).parents[2] / "configs").glob("*.yaml") if not path.name.startswith("sweep_")
)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configs_are_valid_and_open_with_their_command(path: Path) -> None:
    load_config(path)
    assert f"fp4deploy train --config configs/{path.name}" in path.read_text().splitlines()[0]


def test_shapes_yaml_writes_out_the_defaults() -> None:
    assert load_config(next(path for path in CONFIGS if path.name == "shapes.yaml")) == Config()


def test_later_settings_win_and_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("train: {epochs: 7, lr: 1e-3}\n")
    config = load_config(
        path, ["train.epochs=9", "data.classes=[cat, dog]", "model.scale=0.5", "train.finetune_lr=1e-4"]
    )
    assert (config.train.epochs, config.train.lr, config.model.scale) == (9, 1e-3, 0.5)
    assert config.data.classes == ["cat", "dog"]
    assert config.train.finetune_lr == 1e-4
    save_config(config, path)
    assert load_config(path) == config
    assert with_settings(config, ["seed=3"]).seed == 3


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(InputError) as caught:
        load_config(None, ["train.lrr=1", "model.scale=0.2", "recipe=nvfp4_qta", "data.height=17", "train.epochs=many"])
    text = str(caught.value)
    for part in (
        "train.lrr (did you mean train.lr?)",
        "multiples of 0.125",
        "Did you mean 'nvfp4_qat'",
        "data.height = 17",
    ):
        assert part in text
    assert "train.epochs = many" in text


@pytest.mark.parametrize(
    ("content", "message"), [("train: [", "not valid YAML"), ("- 3", "no settings"), ("b: 1", "unknown setting b")]
)
def test_files_that_are_no_configuration(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        load_config(path)


def test_wrong_use_of_set_and_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"section\.key=value"):
        load_config(None, ["epochs"])
    with pytest.raises(InputError, match="not a section"):
        load_config(None, ["seed=1", "seed.a=2"])
    with pytest.raises(InputError, match=r"section\.key=value.*train\.lr = nan.*train\.lrr"):
        load_config(None, ["epochs", "train.lrr=1", "train.lr=.nan"])
    with pytest.raises(InputError, match=r"train is a section; set one of train\.epochs, "):
        load_config(None, ["train=3"])
    with pytest.raises(InputError, match="no configuration file"):
        load_config(tmp_path / "none.yaml")


def test_an_empty_section_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("train:\ndata:\n")
    assert load_config(path, ["train.epochs=5"]) == with_settings(Config(), ["train.epochs=5"])


def test_class_weights_are_names_with_weights() -> None:
    config = load_config(None, ["train.class_weights.cat=2", "train.class_weights.dog=0.5"])
    assert config.train.class_weights == {"cat": 2.0, "dog": 0.5}
    assert changed_settings(config, with_settings(config, ["train.class_weights.cat=3"])) == [
        "train.class_weights.cat: 2.0 -> 3.0"
    ]
    with pytest.raises(InputError, match=r"train\.class_weights\.cat = -1"):
        load_config(None, ["train.class_weights.cat=-1"])


def test_what_a_resume_may_change() -> None:
    old = Config()
    assert changed_settings(old, with_settings(old, ["data.workers=4", "data.root=/elsewhere"])) == []
    assert changed_settings(old, with_settings(old, ["train.lr=0.5"])) == [f"train.lr: {old.train.lr} -> 0.5"]


def test_fp4_products_need_a_recipe_that_quantises_gradients() -> None:
    assert load_config(None, ["train.products=fp4", "recipe=tetrajet"]).train.products == "fp4"
    with pytest.raises(InputError, match=r"'nvfp4_qat' cannot train with train\.products=fp4.*nvfp4_train"):
        load_config(None, ["train.products=fp4"])
    with pytest.raises(InputError, match=r"train\.products = fp8: input should be 'emulated' or 'fp4'"):
        load_config(None, ["train.products=fp8"])


@pytest.mark.parametrize(
    ("sets", "rates"),
    [
        (["model.spec=torchvision:fcos_resnet50_fpn"], (2e-4, 5e-5)),
        (["model.spec=torchvision:retinanet_resnet50_fpn", "train.lr=1e-3"], (1e-3, 5e-5)),
        (["model.spec=timm:resnet18"], (2e-3, 5e-4)),
        ([], (2e-3, 5e-4)),
    ],
)
def test_detectors_of_torchvision_have_learning_rates_of_their_own(
    tmp_path: Path, sets: list[str], rates: tuple[float, float]
) -> None:
    """With the usual one, features between pyramid and towers grow beyond the largest FP16 number."""
    config = load_config(None, ["task=detection", *sets])
    assert (config.train.lr, config.train.finetune_lr) == rates
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config == with_settings(config, [])


@pytest.mark.parametrize("task", ["semantic", "instance"])
def test_a_mosaic_is_of_boxes(task: str) -> None:
    assert load_config(None, ["task=detection", "augment.mosaic=0.5"]).augment.mosaic == 0.5
    with pytest.raises(InputError, match="augment.mosaic = 0.5: it joins images with boxes, and this task has masks"):
        load_config(None, [f"task={task}", "augment.mosaic=0.5"])


@pytest.mark.parametrize("task", ["instance", "detection", "classification"])
def test_precision_and_recall_of_pixels_are_of_maps_of_classes(task: str) -> None:
    with pytest.raises(InputError, match="train.auprc = True: it is of pixels, and this task"):
        load_config(None, [f"task={task}", "train.auprc=true"])


def test_precision_and_recall_are_not_of_volumes() -> None:
    card = SimpleNamespace(volume=object(), task="semantic")
    with pytest.raises(InputError, match="volumes are scored by Dice"):
        TrainingTask(LabelLoss(), card, None, auprc=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["2024", "1e3", "nan"])
def test_a_text_in_quotes_stays_one(name: str) -> None:
    assert load_config(None, [f'data.root="{name}"']).data.root == name
