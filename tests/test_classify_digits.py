"""The example on patches of images, made small."""

import keras
import numpy as np
import pytest
import scripts


@pytest.fixture(scope="module")
def example():
    return scripts.load("examples/classify_digits.py")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("made") / "by" / "example"


@pytest.fixture(scope="module")
def result(example, out):
    return example.main(
        f"--out {out} --patch 4 --layers 1 --heads 2 --dim 24 --epochs 4 "
        "--batch 100 --learning-rate 0.01".split()
    )


def test_everything_promised_is_there(example, result, out):
    scripts.check_results(example, result, out, "attention.png")


def test_it_learns(result):
    losses = result["history"]["loss"]
    assert losses[-1] < 0.9 * losses[0]
    assert result["accuracy"] > 0.3  # 0.1 by chance
    assert result["held_out"] == 397


def test_the_support_vector_machine_is_the_one_of_the_issue(result):
    assert result["baseline"] == pytest.approx(0.965, abs=0.003)


def test_the_saved_model_has_the_accuracy_that_was_told(example, result, out):
    images, digits = example.read_images()
    model = keras.models.load_model(out / "model.keras")
    at_once = model.predict_on_batch(images[1400:])
    again = example.looked_at_again(model, images[1400:])
    np.testing.assert_allclose(again.sum(axis=-1), 1)
    for chances, told in ((at_once, "accuracy_at_one_look"), (again, "accuracy")):
        share = np.mean(chances.argmax(axis=-1) == digits[1400:])
        assert share == pytest.approx(result[told])


def test_a_patch_is_a_square_of_the_image_and_a_margin(example):
    options = example.parse(["--patch=4", "--layers=1", "--heads=2", "--dim=8"])
    model = example.build(options)
    upto = keras.Model(model.input, model.get_layer("position").input)
    images = np.zeros((4, 8, 8), "float32")
    for image, pixel in enumerate([(0, 0), (0, 7), (7, 0), (4, 4)]):
        images[image][pixel] = 1
    patches = upto.predict_on_batch(images)
    assert patches.shape == (4, 4, 8)
    reached = np.abs(patches).max(axis=-1) > 0
    one, all_four = np.eye(4, dtype=bool), np.ones((1, 4), bool)
    np.testing.assert_array_equal(reached, np.concatenate([one[:3], all_four]))


def test_images_do_not_vary_by_nothing(example):
    images, _ = example.read_images()
    rng = np.random.default_rng(0)
    same = example.vary(images[:5], rng, shift=0, turn=0, stretch=0)
    np.testing.assert_allclose(same, images[:5], atol=1e-6)
    other = example.vary(images[:5], rng)
    assert other.shape == (5, 8, 8) and other.dtype == "float32"
    assert np.abs(other - images[:5]).max() > 0.1
    assert other.min() >= 0 and other.max() <= 1


def test_a_pixel_that_leaves_the_image_is_black(example):
    class Far:
        """Draws the same for everybody, as if by chance."""

        def normal(self, mean, deviation, shape):
            return np.full(shape, deviation)

    ones = np.ones((2, 8, 8), "float32")
    moved = example.vary(ones, Far(), shift=3, turn=0, stretch=0)
    np.testing.assert_allclose(moved[:, :5, :5], 1, atol=1e-6)
    np.testing.assert_allclose(moved[:, 5:], 0, atol=1e-6)
    assert example.vary(ones, Far(), shift=500, turn=1, stretch=2).max() == 0


def test_training_sees_the_first_images_only_and_each_once_an_epoch(example):
    images = np.zeros((10, 8, 8), "float32")
    digits = np.arange(10)
    seen = example.batches(images, digits, batch=5, seed=0)
    epoch = np.concatenate([next(seen)[1].argmax(axis=-1) for _ in range(2)])
    assert sorted(epoch) == list(range(10))


@pytest.mark.parametrize(
    "option",
    ["--epochs=0", "--patch=3", "--learning-rate=0", "--dropout=1", "--color=red"],
)
def test_bad_options_end_in_one_line(example, tmp_path, capsys, option):
    line = scripts.last_line(example, capsys, "--out", tmp_path, option)
    assert option.split("=")[0] in line


def test_sizes_that_do_not_fit_end_in_one_line(example, tmp_path, capsys):
    def line(*options):
        return scripts.last_line(example, capsys, "--out", tmp_path, *options)

    assert "do not divide" in line("--heads=3", "--dim=16")
    assert "--batch 1401 is more than the 1400 images" in line("--batch=1401")


def test_unwritable_output_ends_in_one_line(example, tmp_path, capsys):
    scripts.check_unwritable(example, tmp_path, capsys)


@pytest.mark.parametrize("package", ["sklearn", "matplotlib"])
def test_missing_packages_are_named(example, tmp_path, capsys, monkeypatch, package):
    scripts.check_missing(example, tmp_path, capsys, monkeypatch, package)


def test_the_command_ends_in_one_line_and_a_non_zero_exit(tmp_path):
    done = scripts.run("examples/classify_digits.py", "--batch", "5000", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("classify_digits.py: --batch 5000 is more than")
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
