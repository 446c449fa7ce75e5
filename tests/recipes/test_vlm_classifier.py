"""Image classifiers on folders of plain colours, with the recipe's tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from recipes.tiny_models.vlm import RENDERER, make_tiny_vlm
from recipes.vlm_classifier import data, eval, eval_sweep, sweep, train
from recipes.vlm_classifier.images import image_data, split_of
from tinker_cookbook.exceptions import ConfigurationError, DataError
from tinker_cookbook.run.config import load_config

COLOURS = {"Deep_Red": (200, 0, 0), "green": (0, 200, 0), "blue.sky": (0, 0, 200)}
NAMES = ["blue sky", "deep red", "green"]
WORDS = image_data("folder")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder of images, ``images``, and a model, ``model``."""
    folder = tmp_path_factory.mktemp("classifier")
    for split, count in (("train", 6), ("test", 2)):
        for name, (red, green, blue) in COLOURS.items():
            target = folder / "images" / split / name
            target.mkdir(parents=True)
            for i in range(count):
                image = Image.new("RGB", (20, 12), (red + i, green + i, blue + i))
                image.putpixel((0, 0), (255, 255, 255))  # the side shows what is mirrored
                image.save(target / f"{i}.png")
    make_tiny_vlm(str(folder / "model"), [WORDS.question, *map(WORDS.answer, NAMES)])
    return folder


def builder(place: Path, **settings) -> data.ClassifierDatasetBuilder:
    names = str(place / "images"), str(place / "model"), RENDERER
    return data.get_dataset_builder(*names, **{"batch_size": 4, **settings})


def plain(datum) -> tuple[list[list[int]], bytes, list[int]]:
    """The texts around the image, the image, and the targets of a datum."""
    before, image, after = datum.model_input.chunks
    targets = datum.loss_fn_inputs["target_tokens"].tolist()
    return [before.tokens, after.tokens], image.data, targets


def test_rows_depend_on_the_epoch_only_and_say_the_class(place):
    dataset, test = builder(place, run_nll_evaluator=True, max_image_size=16)()
    assert (len(dataset), len(test), len(test.get_batch(1))) == (5, 2, 2)
    once = [plain(datum) for i in range(5) for datum in dataset.get_batch(i)]
    dataset.set_epoch(1)
    second = [plain(datum) for i in range(5) for datum in dataset.get_batch(i)]
    dataset.set_epoch(0)
    # Also from a new dataset, as in a resumed run, and in another order of requests.
    again, _ = builder(place, max_image_size=16)()
    assert [plain(d) for i in (4, 0) for d in again.get_batch(i)] == once[16:] + once[:4]
    assert once != second
    images, others = {image for _, image, _ in once}, {image for _, image, _ in second}
    assert len(images) == len(others) == 18
    assert 0 < len(images - others) < 18  # some are mirrored in one epoch and not in the other
    text = again.renderer.tokenizer.decode([token for token in once[0][2] if token])
    assert text.endswith(tuple(f"{WORDS.answer(name)}<|im_end|>" for name in NAMES))


def test_examples_per_class_repeats_and_known_names(place):
    few, _ = builder(place, examples_per_class=2, num_repeats=1.5)()
    labels = few.dataset["label"]
    assert sorted(labels) == [0, 0, 1, 1, 2, 2]
    assert len(few.shuffled_indices) == 9
    other, _ = builder(place, examples_per_class=2, subset_seed=1)()
    assert [row["image"].tobytes() for row in other.dataset] != [
        row["image"].tobytes() for row in few.dataset
    ]
    for name, kind in data.DATASETS.items():
        built = data.get_dataset_builder(name, "model", "renderer")
        assert type(built) is kind
        assert built.dataset == name


def test_a_missing_split_is_said(place):
    with pytest.raises(DataError, match="has the splits train, expected 'test' among them"):
        split_of(str(place / "images" / "test" / "green"), "test")


def test_the_tiny_model_is_made_for_digits():
    with pytest.raises(ConfigurationError, match="model_name=tiny is made for digits"):
        train.with_model(train.ExperimentConfig(dataset="pets"))


def settings(place: Path, kind: type, **more):
    return kind(
        experiment_dir=str(place / "runs"),
        model_name=str(place / "model"),
        renderer_name=RENDERER,
        lora_rank=8,
        batch_size=6,
        device="cpu",
        dtype="float32",
        **more,
    )


def test_a_sweep_learns_colours_and_is_evaluated(place):
    """In 24 steps; 5 s."""
    config = settings(
        place,
        sweep.SweepConfig,
        datasets=[str(place / "images")],
        examples_per_class=[4],
        num_repeats=3,
        learning_rate=1e-2,
        train_vision=True,
        eval_every=100,
    )
    sweep.run_sweep(config)
    (run,) = (place / "runs").iterdir()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["accuracy"] == 1
    built = load_config(run).evaluator_builders[0]  # the record has the whole config
    assert type(built).__name__ == "ClassifierEvaluatorBuilder"
    eval_sweep.run_eval_sweep(
        eval_sweep.EvalConfig(
            experiment_dir=str(place / "runs"),
            output_file=str(place / "results.json"),
            device="cpu",
            dtype="float32",
        )
    )
    (result,) = json.loads((place / "results.json").read_text()).values()
    assert result["accuracy"] == 1
    expected = {"dataset": "images", "examples_per_class": 4, "lora_rank": 8, "batch_size": 6}
    assert expected.items() <= result.items()
    picture = place / "confusion.png"
    eval.run_eval(
        eval.EvalConfig(
            dataset=str(place / "images"),
            model_path=str(run),
            confusion=str(picture),
            device="cpu",
            dtype="float32",
        )
    )
    assert picture.stat().st_size > 1000
