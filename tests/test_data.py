"""The data sets in their real formats, and the loaders: every image once an epoch, whoever trains on it."""

import os
import re
import shutil
import struct
import warnings

import numpy as np
import pytest
import torch
from jpegs import make_jpeg_folder
from PIL import Image
from worlds import forked

from mpdemo.data import Loaders, SplitDataset, images, load
from mpdemo.data.datasets import LAYOUTS, PIXELS
from mpdemo.data.loaders import labels_of
from mpdemo.errors import UserError


@pytest.fixture
def mnist(tmp_path):
    """MNIST's four files with 20 and 10 images, in the format of yann.lecun.com/exdb/mnist."""
    raw, rng = tmp_path / "MNIST" / "raw", np.random.default_rng(0)
    raw.mkdir(parents=True)
    for name, count in (("train", 20), ("t10k", 10)):
        arrays = {
            "images-idx3": rng.integers(0, 256, (count, 28, 28)),
            "labels-idx1": np.arange(count) % 10,
        }
        for kind, array in arrays.items():  # two zero bytes, type 8 (bytes), dimensions, sizes, bytes
            header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (raw / f"{name}-{kind}-ubyte").write_bytes(header + array.astype(np.uint8).tobytes())
    return tmp_path


@pytest.fixture
def imagenet(tmp_path):
    """Three of ImageNet's classes, with the meta.bin that torchvision makes of the devkit."""
    wnids = {
        "n01440764": ("tench",),
        "n01443537": ("goldfish", "Carassius auratus"),
        "n01484850": ("great white",),
    }
    for split, wnid, count in [
        (split, wnid, count) for split, count in (("train", 3), ("val", 1)) for wnid in wnids
    ]:
        (tmp_path / split / wnid).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (50, 40), (90 * i, 40, 200)).save(tmp_path / split / wnid / f"{wnid}_{i}.JPEG")
    torch.save((wnids, list(wnids)), tmp_path / "meta.bin")
    return tmp_path


def facts(dataset):
    """Images to train on, to validate on, classes and channels."""
    return len(dataset.train), len(dataset.validation), dataset.classes, dataset.channels


def test_digits():
    """1,797 real images, normalised with the training images' own statistics, split for good."""
    dataset = load("digits")
    pixels, labels = dataset.train.tensors
    assert facts(dataset) == (1536, 261, 10, 1)
    assert pixels.shape == (1536, 1, 28, 28) and abs(pixels.mean()) < 1e-2 and abs(pixels.std() - 1) < 1e-2
    assert labels.bincount().min() > 100 and dataset.validation.tensors[1].bincount().min() > 10
    everything = torch.cat([pixels, dataset.validation.tensors[0]]).flatten(1)
    assert len(torch.unique(everything, dim=0)) == 1797  # no image is in both
    assert torch.equal(pixels, load("digits", seed=7).train.tensors[0])
    assert load("digits", image_size=32).train.tensors[0].shape[2:] == (32, 32)


@pytest.mark.filterwarnings("error::DeprecationWarning")
def test_mnist_in_its_real_format(mnist):
    dataset = load("mnist", mnist)
    assert facts(dataset) == (20, 10, 10, 1)
    path, (image, label) = mnist / "MNIST/raw/train-images-idx3-ubyte", dataset.train[3]
    pixels = np.frombuffer(path.read_bytes(), np.uint8, 784, 16 + 3 * 784).reshape(28, 28)
    assert label == 3 and np.allclose(image[0], (pixels / 255 - 0.1307) / 0.3081, atol=1e-6)
    path.write_bytes(path.read_bytes()[:1000])  # half a download
    with pytest.raises(UserError, match="is not a mnist set"):
        load("mnist", mnist)


def test_imagenet_also_where_jean_zay_has_it(imagenet, tmp_path_factory, monkeypatch):
    """DSDIR/imagenet/RawImages is taken without --data; MPDEMO_DATA comes first, --data before both."""
    dsdir = tmp_path_factory.mktemp("dsdir")
    (dsdir / "imagenet").mkdir()
    (dsdir / "imagenet" / "RawImages").symlink_to(imagenet)
    monkeypatch.delenv("MPDEMO_DATA", raising=False)
    monkeypatch.setenv("DSDIR", str(dsdir))
    dataset = load("imagenet", image_size=32)
    assert facts(dataset) == (9, 3, 1000, 3)
    assert dataset.train[0][0].shape == dataset.validation[0][0].shape == (3, 32, 32)
    assert labels_of(dataset.train) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    monkeypatch.setenv("MPDEMO_DATA", "/nowhere")
    with pytest.raises(UserError, match="/nowhere does not exist"):
        load("imagenet")
    assert len(load("imagenet", imagenet, 32).train) == 9


def test_folders_of_images_and_their_split(jpegs):
    """Without train/ and val/ a tenth is kept for validation; no image is in both; the seed says which."""
    dataset = load("folder", jpegs, image_size=32)
    assert facts(dataset) == (40, 10, 10, 3)
    assert labels_of(dataset.train) == [c for c in range(10) for _ in range(4)]
    dataset = load("folder", jpegs / "train", image_size=32)
    assert facts(dataset) == (36, 4, 10, 3)
    train, validation = dataset.train.dataset.indices, dataset.validation.indices
    assert sorted(train + validation) == list(range(40))
    assert load("folder", jpegs / "train", image_size=32, seed=1).validation.indices != validation


def read_by_pil(path, size):
    """What PIL alone makes of the middle of an image, (3, S, S)."""
    image = Image.open(path).convert("RGB")
    side = round(min(image.size) * 0.875)
    left, top = ((edge - side) // 2 for edge in image.size)
    part = image.crop((left, top, left + side, top + side)).resize((size, size), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(part)).permute(2, 0, 1).float()


@pytest.mark.filterwarnings("error::DeprecationWarning")
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK", "P", "RGBA"])
def test_every_kind_of_image_file_becomes_the_same_rgb(jpegs, tmp_path, mode):
    """JPEG where the format allows, else PNG; within what rounding changes."""
    image = (
        Image.open(next((jpegs / "train" / "3").iterdir())).resize((90, 70), Image.BICUBIC).convert(mode)
    )
    path = tmp_path / ("image.png" if mode in ("P", "RGBA") else "image.jpg")
    image.save(path)
    pixels = images.plain(path, 32)
    assert pixels.shape == images.augmented(path, 32).shape == (3, 32, 32) and pixels.dtype == torch.uint8
    assert (pixels.float() - read_by_pil(path, 32)).abs().max() <= 2


def test_a_large_jpeg_is_decoded_at_a_reduced_size_and_shows_the_same(tmp_path):
    smooth, path = (
        np.random.default_rng(0).integers(0, 256, (6, 6, 3), dtype=np.uint8),
        tmp_path / "big.jpg",
    )
    Image.fromarray(smooth).resize((1200, 1200), Image.BICUBIC).save(path, quality=95)
    for size, decoded in ((70, 300), (150, 600), (200, 1200)):
        assert images.pixels(path, size).shape == (3, decoded, decoded)
        assert (images.plain(path, size).float() - read_by_pil(path, size)).abs().mean() < 2


def test_batches_are_normalised_late(jpegs):
    """Samples are bytes; what a loader gives is what torchvision's transforms make of each of them."""
    from torchvision.transforms.v2 import functional as F

    data = load("folder", jpegs, 32)
    batch, _ = next(iter(Loaders(data, 8).validation))
    one = F.to_dtype(data.validation[0][0], torch.float32, scale=True)
    assert torch.allclose(batch[0], F.normalize(one, *PIXELS["imagenet"]), atol=1e-5)
    assert batch.is_contiguous() and batch.dtype == torch.float32
    assert torch.equal(next(iter(Loaders(data, 8, device=torch.device("cpu")).validation))[0], batch)


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"<html>404</html>", "cannot identify image file"), (None, "image file is truncated")],
)
def test_a_bad_file_is_named_in_one_line(tmp_path, content, said):
    make_jpeg_folder(tmp_path, classes=2, images=2, size=40)
    bad = tmp_path / "train" / "1" / "0001.jpg"
    bad.write_bytes(content or bad.read_bytes()[:-200])
    loaders = Loaders(load("folder", tmp_path, 32), 2)
    loaders.start_epoch(0)
    with pytest.raises(
        UserError, match=f"^image file {bad} cannot be read \\(.*{said}.*; replace it or remove it$"
    ):
        list(loaders.train)


def test_augmentation_depends_on_seed_epoch_and_image_only(jpegs):
    def crop(seed, epoch, index):
        train = load("folder", jpegs, 32, seed).train
        train.epoch = epoch
        return train[index][0]

    wanted = crop(0, 2, 5)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert torch.equal(crop(0, 2, 5), wanted)
    assert torch.equal(torch.get_rng_state(), state)  # the training's own random numbers are left alone
    assert not any(torch.equal(crop(*other), wanted) for other in [(1, 2, 5), (0, 3, 5), (0, 2, 6)])


class Numbered(torch.utils.data.Dataset):
    """A data set whose image is its own number, so that what a loader gives can be followed."""

    def __init__(self, count):
        self.targets = list(range(count))

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return torch.tensor(index), self.targets[index]


def loaders(count, batch, replicas, **more):
    data = SplitDataset(Numbered(count), Numbered(count // 3 + 1), 10, 1)
    return [Loaders(data, batch, replicas, replica, **more) for replica in range(replicas)]


def epoch_of(all_loaders, epoch):
    """The images of every step, over all replicas together: a list of lists."""
    for one in all_loaders:
        one.start_epoch(epoch)
    steps = zip(*[[images.tolist() for images, _ in one.train] for one in all_loaders], strict=True)
    return [[image for part in parts for image in part] for parts in steps]


@pytest.mark.parametrize("count", [48, 50, 59])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_every_image_once_and_in_each_step_the_same_on_any_number_of_replicas(replicas, count):
    """Also where the images do not divide: the rest is left out, the same number of steps for all."""
    parts = loaders(count, 12, replicas)
    first, second = epoch_of(parts, 0), epoch_of(parts, 1)
    assert [len(step) for step in first] == [12] * 4 == [12] * parts[0].steps_per_epoch
    assert len(set(sum(first, []))) == len(set(sum(second, []))) == 48
    assert first != second and epoch_of(parts, 0) == first
    assert epoch_of(loaders(count, 12, replicas, seed=1), 0) != first
    assert [set(step) for step in first] == [set(step) for step in epoch_of(loaders(count, 12, 1), 0)]


@pytest.mark.parametrize(("replicas", "batch"), [(1, 12), (2, 12), (3, 12), (2, 16), (3, 15), (2, 2)])
def test_validation_sees_each_image_once(replicas, batch):
    """17 images do not divide by 2 or 3, none is repeated to even out, and every replica has as many batches."""
    batches = [[images.tolist() for images, _ in one.validation] for one in loaders(48, batch, replicas)]
    assert sorted(sum(sum(batches, []), [])) == list(range(17))
    assert len({len(own) for own in batches}) == 1


def test_labels_only_come_in_the_same_order(jpegs):
    """A rank that computes the loss of a cut model reads no image and gets the very labels of the rank that does."""
    data = load("folder", jpegs, 32)
    full, labels = Loaders(data, 8), Loaders(data, 8, images=False)
    for one in (full, labels):
        one.start_epoch(1)
    for name in ("train", "validation"):
        wanted = [batch[1].tolist() for batch in getattr(full, name)]
        batches = list(getattr(labels, name))
        assert [batch[1].tolist() for batch in batches] == wanted
        assert all(batch[0].shape == (len(batch[1]), 0) for batch in batches)
    for ready in (load("digits").validation, load("folder", jpegs / "train", 32).train):
        assert labels_of(ready) == [int(ready[i][1]) for i in range(len(ready))]


def test_loading_takes_no_random_numbers(jpegs):
    """Dropout, say, then draws the same numbers whatever the data."""
    loaders, state = Loaders(load("folder", jpegs, 32), 8), torch.get_rng_state()
    assert len(list(loaders.train)) == 5
    assert torch.equal(torch.get_rng_state(), state)


def test_batches_that_are_refused():
    with pytest.raises(
        UserError, match="batch of 60 images, but only 48 to train on; allowed: 48 or fewer"
    ):
        loaders(48, 60, 1)
    with pytest.raises(
        UserError, match="24 replicas .* only 17 images to validate on; allowed: 17 replicas or fewer"
    ):
        loaders(48, 24, 24)


@pytest.mark.parametrize("dataset", LAYOUTS)
def test_wrong_folders_are_refused_with_the_expected_layout(dataset, tmp_path, monkeypatch):
    for name in ("MPDEMO_DATA", "DSDIR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "readme.txt").write_text("nothing here")
    wrong = {None: "needs --data PATH or MPDEMO_DATA", "nowhere": "does not exist", "empty": "is empty"}
    wrong |= {
        "file": f"is not a {dataset} set",
        "other": f"is not a {dataset} set|does not hold two or more",
    }
    for name, problem in wrong.items():
        with pytest.raises(UserError, match=problem) as refusal:
            load(dataset, name and tmp_path / name)
        assert LAYOUTS[dataset] in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("moved", "to", "problem"),
    [
        ("val", "valid", "No such file or directory: .*val.*; expected: PATH/train/CLASS"),
        ("train/0/0000.jpg", "0000.jpg", "class folder .*train/0 holds no image .*; remove it"),
    ],
)
def test_class_folders_that_do_not_fit_are_refused(moved, to, problem, tmp_path):
    make_jpeg_folder(tmp_path, classes=2, images=1, size=16)
    (tmp_path / moved).rename(tmp_path / to)
    with pytest.raises(UserError, match=problem):
        load("folder", tmp_path)


def test_classes_that_train_and_val_do_not_share_are_named(tmp_path, imagenet):
    """Five of them, and names that differ by case alone side by side."""
    for name in (
        "train/Cat",
        "val/cat",
        *(f"train/dog{number}" for number in range(5)),
        "train/emu",
        "val/emu",
    ):
        (tmp_path / "own" / name).mkdir(parents=True)
        Image.new("RGB", (16, 16)).save(tmp_path / "own" / name / "0.png")
    names = "train/Cat, val/cat, train/dog0, train/dog1, train/dog2 and 2 more (names are case-sensitive); expected:"
    with pytest.raises(UserError, match=f"do not share: {re.escape(names)}"):
        load("folder", tmp_path / "own")
    shutil.rmtree(imagenet / "val" / "n01443537")
    with pytest.raises(UserError, match="do not share: train/n01443537; expected: PATH/ILSVRC2012"):
        load("imagenet", imagenet)


def read_all(folder):
    """In a process of its own that shows all warnings: read the images; print how many batches."""
    warnings.simplefilter("default")
    Image.MAX_IMAGE_PIXELS = 1000  # so that an image of 40 x 40 counts as very large
    print(len(list(Loaders(load("folder", folder, 32), 2).train)))


def test_warnings_of_pillow_do_not_reach_the_user(tmp_path):
    make_jpeg_folder(tmp_path, classes=2, images=2, size=40)
    Image.new("P", (40, 40)).save(tmp_path / "train" / "0" / "palette.png", transparency=b"\x00\x80")
    exif = b"Exif\x00\x00II*\x00\x08\x00\x00\x00\x01\x00\x0f\x01\x02\x00\xff\x00\x00\x00\xf0\x00\x00\x00"
    # 255 bytes that are not there
    Image.new("RGB", (20, 20)).save(tmp_path / "train" / "1" / "exif.jpg", exif=exif)
    done = forked(tmp_path, read_all, tmp_path)
    assert (done.stdout, done.stderr) == ("3\n", "")


@pytest.mark.parametrize(
    ("mode", "dtype", "ending"),
    [
        ("I;16", "<u2", "png"),
        ("I;16", "<u2", "tif"),
        ("I;16B", ">u2", "tif"),
        ("I", "<i4", "tif"),
        ("F", "<f4", "tif"),
    ],
)
def test_deep_images_are_scaled_by_their_depth_or_refused(tmp_path, mode, dtype, ending):
    """A ramp from black to white stays one; of 32 bits nothing says what is white."""
    ramp, path = np.tile(np.linspace(0, 65535, 64), (64, 1)).astype(dtype), tmp_path / f"ramp.{ending}"
    Image.frombytes(mode, (64, 64), ramp.tobytes()).save(path)
    if ramp.itemsize == 4:
        with pytest.raises(UserError, match="has 32 bits per pixel"):
            images.plain(path, 32)
    else:
        row = images.plain(path, 56)[0, 28].float()
        assert row[0] < 20 and row[-1] > 235 and row.diff().min() >= 0


def test_a_folder_with_links_pipes_and_hidden_folders_gives_each_image_once(tmp_path, capsys):
    make_jpeg_folder(tmp_path / "data", classes=2, images=2, size=16)
    top = tmp_path / "data" / "train"
    wanted = load("folder", top, 16).train.dataset.dataset.samples
    links = {"0/again": top, "0/round": top / "0", "1/other": top / "0"}
    links |= {
        "self": top,
        "up": tmp_path / "data",
        "link": top / "1",
        "loop": "loop",
        "1/loop.jpg": "loop.jpg",
    }
    for name, target in links.items():
        (top / name).symlink_to(target)
    for hidden in (top / ".ipynb_checkpoints", top / "1" / ".ipynb_checkpoints"):
        hidden.mkdir()
        (hidden / "copy.jpg").write_bytes(b"")
    os.mkfifo(top / "1" / "pipe.jpg")
    for name in ("a.gif", "b.GIF", "c.heic"):
        (top / "0" / name).write_bytes(b"")
    folders = load("folder", top, 16).train.dataset.dataset
    assert (folders.samples, folders.classes) == (wanted, ["0", "1"])
    assert capsys.readouterr().err == f"mpdemo: 5 files in {top} are not read: 2 .gif, 2 .jpg, 1 .heic\n"
