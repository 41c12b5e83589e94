"""A user's mistake is one line on stderr that says what is allowed, and exit status 2; never a traceback."""

import argparse
import random
import runpy
import socket
import sys
import time

import pytest
from jpegs import make_jpeg_folder
from worlds import forked

from mpdemo.errors import UserError
from mpdemo.options import LineParser, add_options, options_from
from mpdemo.settings import MODELS, RUNGS, Settings, checked

WORDS = """é １ -1 0 1 2 3 1e999 nan inf 1.5 +1 0x10 1_000 1,2 , 1,,2 .. / ~ [ {} * - -- --out --seed True None
GPipe 1F1B layer1 layer9.9 block.3 block.99"""
ODD = [*WORDS.split(), "", " ", " 2", "a\nb", "\0", str(2**64), str(10**30), "a" * 10_000, "1" * 5000]


def test_random_command_lines_are_settings_or_one_line():
    """Whatever is typed: checked settings, or a line of a readable length. No process is started for it."""
    parser, chance = LineParser(prog="mpdemo"), random.Random(0)
    add_options(parser, Settings)
    names = [f"--{name.replace('_', '-')}" for name in Settings.__dataclass_fields__]
    accepted, line = 0, ""
    for _ in range(5000):
        words = ["--rung", chance.choice(list(RUNGS))]
        for _ in range(chance.randrange(1, 5)):
            words += [chance.choice(names), *chance.choices(ODD, k=chance.random() < 0.9)]
        try:
            checked(options_from(parser.parse_args(words), Settings), chance.choice([None, None, 1, 2, 4]))
            accepted += 1
        except UserError as error:
            line = str(error)
        assert "\n" not in line and len(line) < 800, words
    assert 50 < accepted < 1500


WORLD = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29876",
}
FOUR = WORLD | {"WORLD_SIZE": "4"}
REFUSED = [  # strategy and options, what is said
    (
        "ddp",
        "rung ddp has one process per device, and this is one alone; start them by torchrun --standalone --nproc-",
    ),
    ("single --model vgg", f"--model vgg is not allowed; allowed: {', '.join(MODELS)}"),
    ("single --batch-size many", "--batch-size many is not allowed: it should be a valid integer"),
    ("single --optimizer adam", "--optimizer adam is not allowed; allowed: sgd, adamw"),
    (
        "single --warmup-steps -1",
        "--warmup-steps -1 is not allowed: it should be greater than or equal to 0",
    ),
    ("single --faster", "mpdemo.rungs.single: unknown argument '--faster'"),
    ("single --form per-device", "no form 'per-device'; allowed: one-process"),
    ("single --batch-size 0", "--batch-size 0 is not allowed: it should be greater than or equal to 1"),
    ("single --lr -1", "--lr -1 is not allowed: it should be greater than 0"),
    ("single --lr inf", "--lr inf is not allowed: it should be a finite number"),
    ("single --lr", "argument --lr: expected one argument"),
    ("single --seed 99999999999", "is not allowed: it should be less than 4294967296"),
    ("single --image-size 100000", "is not allowed: it should be less than or equal to 4096"),
    ("single --out=", "allowed: a path that is not empty"),
    (f"single --out {'x' * 300}", "allowed: a path that is not empty, of names of at most 255 bytes"),
    ("data_parallel --batch-size 9 --devices 2", "9 (all processes together) does not divide by 2"),
    ("pipeline --microbatches 1 --form one-process", "fewer than the 2 devices"),
    ("pipeline --schedule gipe", "unknown schedule 'gipe'; allowed: GPipe, 1F1B"),
    (
        "model_parallel --form one-process --model convnet --devices 4",
        "4 stages do not fit a model of 3 blocks",
    ),
    ("model_parallel --form one-process --model convnet --cut layer7", "cannot cut after 'layer7'"),
    ("single --dataset mnist --data {tmp}/empty", "is empty; expected: PATH/MNIST/raw"),
    ("single --dataset folder --data {tmp}/no", "no does not exist; expected: PATH/train/CLASS/*.jpg"),
    ("single --batch-size 5000", "batch of 5000 images, but only 1536 to train on"),
    (
        "single --epochs 1 --warmup-steps 24",
        "--warmup-steps 24 leaves no step of 24 to the cosine; allowed: 0 to 23",
    ),
    ("single --out {tmp}/file/run", "cannot write to --out"),
]
UNDER_A_LAUNCHER = [  # its environment as well
    ("data_parallel", WORLD, "was started as 2 processes; start 1"),
    ("single", WORLD, "was started as 2 processes; start 1"),
    ("ddp --batch-size 9", WORLD, "9 (all processes together) does not divide by 2"),
    ("ddp --batch-size 12 --microbatches 4", WORLD, "does not divide by 4 microbatches on 2 devices"),
    (
        "pipeline --batch-size 12 --microbatches 5",
        WORLD,
        "12 does not divide into 5 microbatches; allowed: 1, 2, 3",
    ),
    (
        "pipeline --schedule 1F1B --microbatches 1",
        WORLD,
        "1F1B needs at least as many microbatches as stages",
    ),
    ("pipeline --schedule GPipe --microbatches 1", WORLD, "fewer than the 2 devices"),
    ("model_parallel --microbatches 4", WORLD, "takes no --microbatches 4: with them it is rung pipeline"),
    ("pipeline --replicas 2", WORLD, "--replicas belongs to rung hybrid alone"),
    ("hybrid", WORLD, "2 processes do not make 2 replicas of 2 or more devices each; allowed: a"),
    (
        "hybrid --batch-size 9",
        FOUR,
        "9 (all processes together) does not divide by 2 replicas; allowed: a multi",
    ),
    ("hybrid --batch-size 12 --microbatches 4", FOUR, "a batch of 6 does not divide into 4 microbatches"),
    ("hybrid --replicas 4", FOUR, "4 processes do not make 4 replicas of 2 or more devices"),
    (
        "hybrid --replicas 1 --sharded",
        FOUR,
        "--sharded divides stages among replicas; allowed: --replicas 2 or more",
    ),
    ("ddp", WORLD | {"RANK": "2"}, "RANK=2, WORLD_SIZE=2"),
    ("ddp", {"RANK": "0"}, "RANK=0, WORLD_SIZE=, "),
    ("ddp", {k: v for k, v in WORLD.items() if k[:6] != "MASTER"}, "MASTER_ADDR and MASTER_PORT not set"),
    ("ddp", WORLD | {"MASTER_ADDR": ""}, "MASTER_ADDR not set"),
    ("ddp", WORLD | {"MASTER_PORT": "99999"}, "MASTER_PORT 99999 is not a port; allowed: 1 to 65535"),
    (
        "ddp",
        WORLD | {"MASTER_PORT": "{port}"},
        "port {port} on 127.0.0.1 is in use; set MASTER_PORT to another",
    ),
]
CASES = [(words, {}, said) for words, said in REFUSED] + UNDER_A_LAUNCHER


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """What the texts of CASES stand for here, and how the programs ended; they share one import of PyTorch."""
    tmp = tmp_path_factory.mktemp("bad")
    (tmp / "empty").mkdir()
    (tmp / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as holder:
        here, results = {"tmp": tmp, "port": holder.getsockname()[1]}, []
        for words, environment, _ in CASES:
            words = words.format(**here).split()
            words += [] if "--out" in " ".join(words) else ["--out", str(tmp / "out")]
            environment = {name: value.format(**here) for name, value in environment.items()}
            results.append(forked(tmp, run_strategy, *words, timeout=120, **environment))
    return here, results


def run_strategy(rung, *words):
    """In a new process: run a strategy's program."""
    sys.argv[1:], program = words, f"mpdemo.rungs.{rung}"
    sys.modules.pop(program, None)  # which the server may have imported: runpy warns of it
    runpy.run_module(program, run_name="__main__")


@pytest.mark.parametrize("number", range(len(CASES)), ids=[said for _, _, said in CASES])
def test_a_mistake_is_one_line_that_says_what_is_allowed(ended, number):
    here, results = ended
    done, said = results[number], CASES[number][2].format(**here)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("mpdemo: error: ") and done.stderr.count("\n") == 1
    assert said in done.stderr


def test_a_command_that_does_not_exist_is_refused_before_anything_is_imported(run_once):
    blocked = "import sys; sys.modules['torch'] = None; from mpdemo.__main__ import main; sys.exit(main())"
    done = run_once("-c", blocked, "trian", timeout=60)
    assert (
        done.returncode == 2
        and "no command 'trian'; there are" in done.stderr
        and done.stderr.count("\n") == 1
    )


@pytest.mark.parametrize(("options", "said", "seconds"), [
    pytest.param("--batch-size 9", "--batch-size 9 (all processes together) does not divide by 2 devices", 0, id="all"),
    pytest.param("--out {tmp}/file/run", "cannot write to --out", 0, id="rank 0", marks=pytest.mark.nightly),
    pytest.param("--dataset folder --data {tmp}/some --batch-size 2 --image-size 7", "cannot be read", 10, id="rank 1"),
])  # fmt: skip
def test_two_processes_say_a_mistake_once(run_once, tmp_path, options, said, seconds):
    """Of all by rank 0, and torchrun ends the others meanwhile; of one alone by that one."""
    (tmp_path / "file").write_text("")
    make_jpeg_folder(tmp_path / "some", classes=2, images=1, size=16)
    max((tmp_path / "some" / "val").rglob("*.jpg")).write_bytes(b"no image")  # which rank 1 validates
    words = options.format(tmp=tmp_path).split()
    words += [] if "--out" in words else ["--out", str(tmp_path / "run")]
    launch = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "mpdemo.rungs.ddp",
        *words,
    ]
    begin = time.monotonic()
    done = run_once(*launch, timeout=120)
    assert done.returncode == 1, done.stderr  # torchrun's own, for its processes' 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("mpdemo: ")]
    assert len(lines) == 1 and said in lines[0], done.stderr
    assert time.monotonic() - begin > seconds


def test_a_wrong_name_of_a_setting_is_refused_with_its_neighbour():
    with pytest.raises(
        UserError, match="unknown name 'batchsize'; allowed: .*; did you mean 'batch_size'?"
    ):
        Settings(rung="ddp", batchsize=128)


def test_the_help_shows_description_default_and_choices():
    parser = argparse.ArgumentParser()
    add_options(parser, Settings)
    text = " ".join(parser.format_help().split())
    assert "--batch-size BATCH_SIZE images per step, over all processes together (default 64)" in text
    assert "--optimizer {sgd,adamw} what updates the weights" in text and "(default None)" not in text
    assert "--timeline record what each rank did when" in text
