"""The data sets in their real formats, and the loaders: every image once an epoch, whoever trains on it."""

import io
import struct

import numpy as np
import pytest
import torch
from jpegs import make_jpeg_folder
from PIL import Image

from mpdemo.data import Loaders, SplitDataset, images, load
from mpdemo.data.datasets import PIXELS, SeededAugmentation
from mpdemo.data.loaders import LabelsOnly, labels_of
from mpdemo.errors import UserError


@pytest.fixture(scope="module")
def jpegs(tmp_path_factory):
    """A folder of 40 training and 10 validation images in 10 classes."""
    path = tmp_path_factory.mktemp("jpegs")
    make_jpeg_folder(path, images=4, size=40)
    return path


def write_idx(path, array):
    """Write the format of yann.lecun.com/exdb/mnist: two zero bytes, type 8, dimensions, sizes, bytes."""
    header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


@pytest.fixture
def mnist(tmp_path):
    """MNIST's four files with 20 and 10 images."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name, count in (("train", 20), ("t10k", 10)):
        write_idx(raw / f"{name}-images-idx3-ubyte", rng.integers(0, 256, (count, 28, 28)))
        write_idx(raw / f"{name}-labels-idx1-ubyte", np.arange(count) % 10)
    return tmp_path


@pytest.fixture
def imagenet(tmp_path):
    """Three of ImageNet's classes, with the meta.bin that torchvision makes of the devkit."""
    wnids = {"n01440764": ("tench",), "n01443537": ("goldfish", "Carassius auratus"), "n01484850": ("great white",)}
    for split, count in (("train", 3), ("val", 1)):
        for wnid in wnids:
            (tmp_path / split / wnid).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (50, 40), (90 * i, 40, 200)).save(tmp_path / split / wnid / f"{wnid}_{i}.JPEG")
    torch.save((wnids, list(wnids)), tmp_path / "meta.bin")
    return tmp_path


def test_digits():
    """1,797 real images, normalised with the training images' own statistics, split for good."""
    dataset = load("digits")
    images, labels = dataset.train.tensors
    assert (len(dataset.train), len(dataset.validation), dataset.classes, dataset.channels) == (1536, 261, 10, 1)
    assert images.shape == (1536, 1, 28, 28)
    assert all(1536 % batch == 0 for batch in (64, 96, 128, 192, 256, 384, 512))
    assert abs(images.mean()) < 1e-2 and abs(images.std() - 1) < 1e-2
    assert labels.bincount().min() > 100 and dataset.validation.tensors[1].bincount().min() > 10
    everything = torch.cat([images, dataset.validation.tensors[0]]).flatten(1)
    assert len(torch.unique(everything, dim=0)) == 1797  # no image is in both
    assert torch.equal(images, load("digits", seed=7).train.tensors[0])
    assert load("digits", image_size=32).train.tensors[0].shape[2:] == (32, 32)


def test_mnist_in_its_real_format(mnist):
    dataset = load("mnist", mnist)
    assert (len(dataset.train), len(dataset.validation), dataset.classes, dataset.channels) == (20, 10, 10, 1)
    image, label = dataset.train[3]
    stored = (mnist / "MNIST/raw/train-images-idx3-ubyte").read_bytes()[16 + 3 * 784 : 16 + 4 * 784]
    pixels = torch.frombuffer(bytearray(stored), dtype=torch.uint8).reshape(28, 28)
    assert label == 3
    assert torch.allclose(image[0], (pixels / 255 - 0.1307) / 0.3081, atol=1e-6)


def test_imagenet_through_torchvision(imagenet):
    dataset = load("imagenet", imagenet, image_size=32)
    assert (len(dataset.train), len(dataset.validation), dataset.classes, dataset.channels) == (9, 3, 1000, 3)
    assert dataset.train[0][0].shape == dataset.validation[0][0].shape == (32, 32, 3)
    assert dataset.prepare(dataset.train[0][0][None]).shape == (1, 3, 32, 32)
    assert labels_of(dataset.train) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_imagenet_of_jean_zay(imagenet, tmp_path_factory, monkeypatch):
    """DSDIR/imagenet/RawImages is dataset without --data; MPDEMO_DATA comes first, --data before both."""
    dsdir = tmp_path_factory.mktemp("dsdir")
    (dsdir / "imagenet").mkdir()
    (dsdir / "imagenet" / "RawImages").symlink_to(imagenet)
    monkeypatch.delenv("MPDEMO_DATA", raising=False)
    monkeypatch.setenv("DSDIR", str(dsdir))
    assert len(load("imagenet", image_size=32).train) == 9
    monkeypatch.setenv("MPDEMO_DATA", "/nowhere")
    with pytest.raises(UserError, match="/nowhere does not exist"):
        load("imagenet")
    assert len(load("imagenet", imagenet, 32).train) == 9


def test_jpeg_folder(jpegs):
    """Real JPEG files; classes can be told apart; validation images are not augmented, training images are."""
    file = next((jpegs / "train" / "0").iterdir())
    assert file.read_bytes()[:3] == b"\xff\xd8\xff"
    assert Image.open(io.BytesIO(file.read_bytes())).size == (40, 40)
    dataset = load("folder", jpegs, image_size=32)
    assert (len(dataset.train), len(dataset.validation), dataset.classes, dataset.channels) == (40, 10, 10, 3)
    assert labels_of(dataset.train) == [c for c in range(10) for _ in range(4)]
    assert torch.equal(dataset.validation[0][0], dataset.validation[0][0])
    dataset.train.epoch = 1
    later = dataset.train[0][0]
    dataset.train.epoch = 0
    assert not torch.equal(dataset.train[0][0], later)


def big_jpeg(path, side=1200):
    """A JPEG file so large that its crops may be decoded at a reduced size: smooth colours, and noise on top."""
    rng = np.random.default_rng(0)
    smooth = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)).resize((side, side), Image.BICUBIC)
    noise = rng.integers(-20, 20, (side, side, 3))
    Image.fromarray((np.asarray(smooth) + noise).clip(0, 255).astype(np.uint8)).save(path, quality=95)
    return path


def read_by_pil(path, size):
    """What PIL alone makes of the middle of an image, (S, S, 3)."""
    image = Image.open(path).convert("RGB")
    left, top, width, height = images.middle_box(*image.size)
    box = (left, top, left + width, top + height)
    return torch.from_numpy(np.array(image.crop(box).resize((size, size), Image.BILINEAR))).float()


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK", "P", "RGBA"])
def test_every_kind_of_image_file_becomes_the_same_rgb(jpegs, tmp_path, mode):
    """JPEG where the format allows, else PNG; within what rounding changes."""
    image = Image.open(next((jpegs / "train" / "3").iterdir())).resize((90, 70), Image.BICUBIC).convert(mode)
    path = tmp_path / ("image.png" if mode in ("P", "RGBA") else "image.jpg")
    image.save(path)
    pixels = images.plain(path, 32)
    assert pixels.shape == (32, 32, 3) and pixels.dtype == torch.uint8
    assert (pixels.float() - read_by_pil(path, 32)).abs().max() <= 2


def test_a_large_file_is_decoded_at_a_reduced_size(tmp_path, monkeypatch):
    """And shows the same: at half, a quarter or an eighth of its size, or, for a large result, at its full size."""
    path = big_jpeg(tmp_path / "big.jpg")
    assert path.stat().st_size > images.LARGE
    content = np.fromfile(path, np.uint8)
    for size, side in ((100, 150), (200, 300), (400, 600), (1000, 1200)):
        pixels, box = images.decode(content, size, images.middle_box)
        assert pixels.shape == (3, side, side) and min(box[2:]) >= size
        assert (images.plain(path, size).float() - read_by_pil(path, size)).abs().mean() < 3
    monkeypatch.setattr(images, "jpeg_decoder", lambda: None)  # a torchvision without one
    assert torch.equal(images.decode(content, 1000, images.middle_box)[0], pixels)


def test_random_boxes_are_those_of_torchvision():
    """Inside the image, of the wanted shapes and areas, also of images that allow none of them."""
    torch.manual_seed(0)
    boxes = torch.tensor([images.random_box(300, 200) for _ in range(2000)])
    left, top, width, height = boxes.T
    assert (boxes >= 0).all() and (left + width <= 300).all() and (top + height <= 200).all()
    area, ratio = width * height / 60000, width / height
    assert 0.07 < area.min() < 0.1 and 0.8 < area.max() <= 1
    assert 0.7 < ratio.min() < 0.78 and 1.3 < ratio.max() < 1.4
    assert images.middle_box(400, 300) == (69, 19, 262, 262)  # 7/8 of 300
    assert images.random_box(400, 2) == (198, 0, 3, 2) and images.random_box(1, 1) == (0, 0, 1, 1)


def test_batches_are_normalised_late(jpegs):
    """Samples are bytes; what a loader gives is what torchvision's transforms make of each of them."""
    from torchvision.transforms.v2 import functional as F

    data = load("folder", jpegs, 32)
    batch, _ = next(iter(Loaders(data, 8).validation))
    one = F.to_dtype(data.validation[0][0].permute(2, 0, 1), torch.float32, scale=True)
    assert torch.allclose(batch[0], F.normalize(one, *PIXELS["imagenet"]), atol=1e-5)
    assert batch.is_contiguous() and batch.dtype == torch.float32
    assert torch.equal(next(iter(Loaders(data, 8, device=torch.device("cpu")).validation))[0], batch)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda content: content[: len(content) // 2], "damaged or cut off"),
        (lambda content: b"", "it is empty or of no known format"),
        (lambda content: b"<html>404</html>", "it is empty or of no known format"),
    ],
    ids=["cut off", "empty", "no image"],
)
def test_a_bad_file_is_named_in_one_line(tmp_path, spoil, said, workers):
    make_jpeg_folder(tmp_path, classes=2, images=2, size=40)
    bad = tmp_path / "train" / "1" / "0001.jpg"
    bad.write_bytes(spoil(bad.read_bytes()))
    loaders = Loaders(load("folder", tmp_path, 32), 2, workers=workers)
    loaders.start_epoch(0)
    with pytest.raises(UserError) as refusal:
        list(loaders.train)
    assert str(refusal.value) == f"image file {bad} cannot be read: {said}; replace it or remove it"


def test_folder_without_a_split(jpegs):
    """A tenth is kept for validation; no image is in both; the seed says which."""
    dataset = load("folder", jpegs / "train", image_size=32)
    assert (len(dataset.train), len(dataset.validation), dataset.classes) == (36, 4, 10)
    train, validation = dataset.train.dataset.indices, dataset.validation.indices
    assert sorted(train + validation) == list(range(40))
    assert load("folder", jpegs / "train", image_size=32, seed=1).validation.indices != validation
    assert len(labels_of(dataset.train)) == 36


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
    assert not any(torch.equal(crop(*other), wanted) for other in [(1, 2, 5), (0, 3, 5)])
    same_image = SeededAugmentation([torch.zeros(1)] * 40, 0)
    same_image.dataset = RandomNumbers()
    assert len({same_image[i].item() for i in range(40)}) == 40  # each image draws its own numbers


class RandomNumbers:
    """A data set whose samples are fresh random numbers."""

    def __getitem__(self, index):
        return torch.rand(())


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


def epoch_of(all_loaders, epoch, steps_done=0):
    """The images of every step, over all replicas together: a list of lists."""
    for one in all_loaders:
        one.start_epoch(epoch, steps_done)
    steps = zip(*[[images.tolist() for images, _ in one.train] for one in all_loaders], strict=True)
    return [[image for part in parts for image in part] for parts in steps]


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_every_image_once(replicas):
    parts = loaders(48, 12, replicas)
    first, second = epoch_of(parts, 0), epoch_of(parts, 1)
    assert [len(step) for step in first] == [12] * 4 == [12] * parts[0].steps_per_epoch
    for steps in (first, second):
        assert sorted(sum(steps, [])) == list(range(48))
    assert first != second
    assert epoch_of(parts, 0) == first
    assert epoch_of(loaders(48, 12, replicas, seed=1), 0) != first


@pytest.mark.parametrize("count", [48, 50, 59])
def test_a_step_sees_the_same_images_on_any_number_of_replicas(count):
    """Also where the images do not divide: the rest is left out, the same number of steps for all."""
    wanted = [set(step) for step in epoch_of(loaders(count, 12, 1), 3)]
    assert len(wanted) == 4
    for replicas in (2, 3):
        assert [set(step) for step in epoch_of(loaders(count, 12, replicas), 3)] == wanted


@pytest.mark.parametrize(("replicas", "batch"), [(1, 12), (2, 12), (3, 12), (2, 16), (3, 15), (2, 2)])
def test_validation_sees_each_image_once(replicas, batch):
    """17 images do not divide by 2 or 3, none is repeated to even out, and every replica has as many batches."""
    batches = [[images.tolist() for images, _ in one.validation] for one in loaders(48, batch, replicas)]
    assert sorted(sum(sum(batches, []), [])) == list(range(17))
    assert len({len(own) for own in batches}) == 1


@pytest.mark.parametrize("replicas", [1, 3])
def test_resume_in_the_middle_of_an_epoch(replicas):
    parts = loaders(50, 12, replicas)
    whole = epoch_of(parts, 2)
    assert epoch_of(parts, 2, steps_done=3) == whole[3:]
    assert epoch_of(parts, 2, steps_done=4) == []
    assert epoch_of(parts, 3) != whole and len(epoch_of(parts, 3)) == 4  # the next epoch is whole again


def test_loading_leaves_the_random_numbers_alone(jpegs):
    """So a training resumed within an epoch goes on with the random numbers it had."""
    one = Loaders(load("folder", jpegs, 32), 10)
    state = torch.get_rng_state()
    one.start_epoch(0)
    assert len(list(one.train)) == 4 and len(list(one.validation)) == 1
    assert torch.equal(torch.get_rng_state(), state)


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
    for nothing_to_read in (load("digits").validation, load("folder", jpegs / "train", 32).train):
        assert LabelsOnly(nothing_to_read).labels == [int(nothing_to_read[i][1]) for i in range(len(nothing_to_read))]


def test_loader_processes_give_the_same_batches(jpegs):
    data = load("folder", jpegs, 32)
    alone, helped = Loaders(data, 8), Loaders(data, 8, workers=1)
    for epoch in (0, 1):
        for one in (alone, helped):
            one.start_epoch(epoch)
        for own, other in zip(alone.train, helped.train, strict=True):
            assert torch.equal(own[0], other[0]) and torch.equal(own[1], other[1])


@pytest.mark.parametrize(
    ("batch", "replicas", "problem"),
    [
        (10, 3, "batch of 10 images does not divide by 3 replicas"),
        (60, 1, "batch of 60 images, but only 48 .*allowed: 48 or fewer"),
        (24, 24, "24 replicas of the model, but only 17 images to validate on; allowed: 17 replicas or fewer"),
    ],
)
def test_batches_that_are_refused(batch, replicas, problem):
    with pytest.raises(UserError, match=problem):
        loaders(48, batch, replicas)


def an_empty(path):
    path.mkdir()


def a_file(path):
    path.write_text("not a folder")


def other_files(path):
    path.mkdir()
    (path / "readme.txt").write_text("nothing here")


def no_split_folder(path):
    make_jpeg_folder(path, classes=2, images=1, size=16)
    (path / "val").rename(path.with_name("elsewhere"))


def one_class(path):
    make_jpeg_folder(path, classes=1, images=1, size=16)


def an_empty_class(path):
    make_jpeg_folder(path, classes=2, images=1, size=16)
    (path / "train" / "empty").mkdir()
    (path / "val" / "empty").mkdir()


def other_classes(path):
    make_jpeg_folder(path, classes=2, images=1, size=16)
    (path / "val" / "0").rename(path / "val" / "zero")


LAYOUT = {"mnist": "PATH/MNIST/raw/train-images", "imagenet": "PATH/train/n01440764", "folder": "PATH/train/CLASS"}


@pytest.mark.parametrize(
    ("dataset", "made", "problem"),
    [
        *[(dataset, None, "does not exist") for dataset in LAYOUT],
        *[(dataset, an_empty, "is empty") for dataset in LAYOUT],
        *[(dataset, other_files, f"is not a {dataset} set|has one class") for dataset in LAYOUT],
        ("folder", a_file, "is a file"),
        ("folder", no_split_folder, "has train/ only"),
        ("folder", one_class, "has one class, '0'"),
        ("folder", an_empty_class, "is not a folder set .*empty"),
        ("folder", other_classes, "must hold the same class folders"),
    ],
)
def test_wrong_folders_are_refused_with_the_expected_layout(dataset, made, problem, tmp_path):
    path = tmp_path / "data"
    if made:
        made(path)
    with pytest.raises(UserError, match=problem) as refusal:
        load(dataset, path)
    message = str(refusal.value)
    assert LAYOUT[dataset] in message and str(path) in message and "\n" not in message


def test_no_folder_named(monkeypatch):
    for name in ("MPDEMO_DATA", "DSDIR"):
        monkeypatch.delenv(name, raising=False)
    for dataset, layout in LAYOUT.items():
        with pytest.raises(UserError, match="needs --data PATH or MPDEMO_DATA") as refusal:
            load(dataset)
        assert layout in str(refusal.value)


def test_truncated_mnist(mnist):
    """Half a download: the sizes in the header do not fit the file."""
    path = mnist / "MNIST/raw/train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match="is not a mnist set"):
        load("mnist", mnist)
