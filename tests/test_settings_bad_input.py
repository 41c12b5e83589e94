"""A user's mistake is one line on stderr that says what is allowed, and exit status 2; never a traceback."""

import argparse
import json
import random
import re
import socket

import pytest

from mpdemo.__main__ import Parser
from mpdemo.errors import UserError
from mpdemo.options import add_options, options_from
from mpdemo.paths import root
from mpdemo.settings import MODELS, RUNGS, Settings, checked


@pytest.fixture
def refused(run_mpdemo, tmp_path):
    """Run ``python -m mpdemo train``, check that it ends as a mistake, and return the line."""

    def run(*words, **environment):
        done = run_mpdemo("train", "--out", str(tmp_path / "out"), *words, **environment)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        return done.stderr

    return run


ODD = ["", " ", " 2", "a\nb", "\0", "é", "１", str(2**64), str(10**30), "a" * 10_000, "1" * 5000]
ODD += ["-1", "0", "1", "2", "3", "1e999", "nan", "inf", "1.5", "+1", "0x10", "1_000", "1,2", ",", "1,,2", "..", "/"]
ODD += ["~", "[", "{}", "*", "-", "--", "--out", "--seed", "True", "None", "auto", "GPipe", "1F1B", "bf16"]
ODD += ["layer1", "layer9.9", "block.3", "block.99"]


def test_random_command_lines_are_settings_or_one_line(capsys):
    """Whatever is typed: checked settings, or a line of a readable length. No process is started for it."""
    parser, chance = Parser(prog="mpdemo"), random.Random(0)
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
        except SystemExit as end:
            line = capsys.readouterr().err.removesuffix("\n")
            assert end.code == 2, words
        assert "\n" not in line and len(line) < 800, words
    assert 50 < accepted < 1000


WORLD = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29876"}
ONE_PROCESS = "--rung model_parallel --form one-process --model convnet"
REFUSED = [  # options of train, what is said
    ("", "--rung is missing"),
    ("--rung zero", f"--rung zero is not allowed; allowed: {', '.join(RUNGS)}"),
    ("--rung ddp --model vgg", f"--model vgg is not allowed; allowed: {', '.join(MODELS)}"),
    ("--rung ddp --batch-size many", "--batch-size many is not allowed: it should be a valid integer"),
    ("--rung ddp --optimizer adam", "--optimizer adam is not allowed; allowed: sgd, adamw"),
    ("--rung ddp --lr-schedule step", "--lr-schedule step is not allowed; allowed: constant, cosine"),
    ("--rung ddp --warmup-steps -1", "--warmup-steps -1 is not allowed: it should be greater than or equal to 0"),
    ("--rung single --faster", "takes no '--faster'"),
    ("--rung single --form per-device", "no form 'per-device'; allowed: one-process"),
    ("--rung single --batch-size 0", "--batch-size 0 is not allowed: it should be greater than or equal to 1"),
    ("--rung single --lr -1", "--lr -1 is not allowed: it should be greater than 0"),
    ("--rung single --lr inf", "--lr inf is not allowed: it should be a finite number"),
    ("--rung single --seed 99999999999", "is not allowed: it should be less than 4294967296"),
    ("--rung single --image-size 100000", "is not allowed: it should be less than or equal to 4096"),
    ("--rung single --precision fp16", "--precision fp16 is not allowed; allowed: fp32, bf16"),
    ("--rung single --resume=", "what follows --resume= is empty; give a value"),
    (f"--rung single --out {'x' * 300}", "allowed: a path that is not empty, of names of at most 255 bytes"),
    ("--rung single --processes 2", "was started as 2 processes; start 1"),
    ("--rung ddp --batch-size 10 --processes 3", "10 (all processes together) does not divide by 3"),
    ("--rung data_parallel --batch-size 9 --devices 2", "9 (all processes together) does not divide by 2"),
    ("--rung pipeline --batch-size 12 --microbatches 5", "12 does not divide into 5 microbatches; allowed: 2, 3, 4, 6"),
    ("--rung pipeline --microbatches 1", "1F1B needs at least as many microbatches as stages"),
    ("--rung pipeline --microbatches 1 --schedule GPipe", "fewer than the 2 devices"),
    ("--rung pipeline --microbatches 1 --form one-process", "fewer than the 2 devices"),
    ("--rung pipeline --schedule gipe", "unknown schedule 'gipe'; allowed: GPipe, 1F1B"),
    ("--rung model_parallel --microbatches 4", "takes no --microbatches 4: with them it is --rung pipeline"),
    ("--rung ddp --batch-size 12 --microbatches 4", "does not divide by 4 microbatches on 2 devices"),
    ("--rung hybrid --processes 5", "5 processes do not make 2 replicas of 2 or more devices each; allowed: a"),
    ("--rung hybrid --processes 4 --replicas 4", "4 processes do not make 4 replicas of 2 or more devices"),
    ("--rung hybrid --batch-size 9", "9 (all processes together) does not divide by 2 replicas; allowed: a multi"),
    ("--rung hybrid --batch-size 12 --microbatches 4", "a batch of 6 does not divide into 4 microbatches"),
    ("--rung pipeline --replicas 2", "--replicas belongs to --rung hybrid alone"),
    ("--rung hybrid --mesh pp-dp", "takes no '--mesh'"),
    ("--rung fsdp --reshard never", "takes no '--reshard'"),
    ("--rung ddp --channels-last", "takes no '--channels-last'"),
    ("--rung ddp --tensorboard", "takes no '--tensorboard'"),
    (f"{ONE_PROCESS} --devices 4", "4 stages do not fit a model of 3 blocks; allowed: 1 to 3"),
    (f"{ONE_PROCESS} --cut layer7", "cannot cut after 'layer7'"),
    ("--rung single --dataset mnist --data {tmp}/empty", "is empty; expected: PATH/MNIST/raw"),
    ("--rung single --dataset folder --data {tmp}/no", "no does not exist; expected: PATH/train/CLASS/*.jpg"),
    ("--rung single --batch-size 5000", "batch of 5000 images, but only 1536 to train on"),
    ("--rung single --lr-schedule cosine --warmup-steps 12", "12 leaves no step of 12 to the cosine; allowed: 0 to 11"),
    ("--rung single --out {tmp}/file/run", "cannot write to --out"),
    ("--rung single --resume {tmp}/empty", "no checkpoint in {tmp}/empty/checkpoints"),
    ("--rung single --out {tmp}/old", "holds the checkpoints of a run; give --resume"),
    ("--rung single --resume {tmp}/old", "not a checkpoint of mpdemo or is damaged"),
    ("--rung single --resume {tmp}/old/checkpoints", "no checkpoint in {tmp}/old/checkpoints/checkpoints; give"),
    ("--rung hybrid --replicas 1 --sharded", "--sharded divides stages among replicas; allowed: --replicas 2 or more"),
    ("--rung pipeline --batch-size 254 --processes 200 --microbatches 3", "microbatches; allowed: 254"),
]
UNDER_A_LAUNCHER = [  # its environment as well
    ("--rung ddp --processes 3", WORLD, "--processes 3 contradicts the launcher's 2"),
    ("--rung data_parallel", WORLD, "was started as 2 processes; start 1"),
    ("--rung ddp", WORLD | {"RANK": "2"}, "RANK=2, WORLD_SIZE=2"),
    ("--rung ddp", {"RANK": "0"}, "RANK=0, WORLD_SIZE=, "),
    ("--rung ddp", {k: v for k, v in WORLD.items() if k[:6] != "MASTER"}, "MASTER_ADDR and MASTER_PORT not set"),
    ("--rung ddp", WORLD | {"MASTER_ADDR": ""}, "MASTER_ADDR not set"),
    ("--rung ddp", WORLD | {"MASTER_PORT": "99999"}, "MASTER_PORT 99999 is not a port; allowed: 1 to 65535"),
    ("--rung ddp", WORLD | {"MASTER_PORT": "{port}"}, "port {port} on 127.0.0.1 is in use; set MASTER_PORT to another"),
]
CASES = [(words, {}, said) for words, said in REFUSED] + UNDER_A_LAUNCHER


@pytest.fixture(scope="module")
def ended(tmp_path_factory, run_once):
    """What the texts of CASES stand for here, and how the commands ended; they share one import of PyTorch."""
    tmp = tmp_path_factory.mktemp("bad")
    (tmp / "empty").mkdir()
    (tmp / "file").write_text("")
    (tmp / "old" / "checkpoints" / "step-000004").mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as holder:
        here, cases = {"tmp": tmp, "port": holder.getsockname()[1]}, []
        for words, environment, _ in CASES:
            words = ["train", *words.format(**here).split()]
            words += [] if "--out" in words else ["--out", str(tmp / "out")]
            environment = {name: value.format(**here) for name, value in environment.items()}
            cases.append({"words": words, "environment": environment})
        (tmp / "cases").write_text(json.dumps(cases))
        done = run_once("tests/programs/commands.py", str(tmp / "cases"), timeout=120, PYTHONPATH=str(root()))
    assert done.returncode == 0, done.stderr
    return here, json.loads((tmp / "cases.results").read_text())


@pytest.mark.parametrize("number", range(len(CASES)), ids=[said for _, _, said in CASES])
def test_a_mistake_is_one_line_that_says_what_is_allowed(ended, number):
    here, results = ended
    status, stdout, stderr = results[number]
    assert (status, stdout) == (2, ""), stderr
    assert stderr.startswith("mpdemo: error: ") and stderr.count("\n") == 1
    assert CASES[number][2].format(**here) in stderr


MANY = "--processes 64 --microbatches 64 --batch-size 64"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("trian", "no command 'trian'; there are"),
        (f"train --rung pipeline --model convnet {MANY}", "64 stages do not fit a model of 3 blocks; allowed: 1 to 3"),
        ("train --rung hybrid --processes 4096 --batch-size 8192", "2048 stages do not fit a model of 3 blocks"),
        ("train --rung hybrid --model toy --replicas 32", "64 processes need 64 CPU cores"),
        ("train --rung ddp --batch-size 4096 --processes 4096", "4096 CPU cores and 1638400 MiB"),
    ],
)
def test_the_parent_refuses_before_it_starts_a_process(run_once, words, said):
    """PyTorch is not even imported for it."""
    blocked = "import sys; sys.modules['torch'] = None; from mpdemo.__main__ import main; sys.exit(main())"
    done = run_once("-c", blocked, *words.split(), timeout=60)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_what_only_rank_0_sees_is_said_once(refused, tmp_path):
    (tmp_path / "file").write_text("")
    words = ["--rung", "ddp", "--processes", "2", "--out", str(tmp_path / "file" / "run")]
    assert "cannot write to --out" in refused(*words)


TWO_GPUS = """
import torch
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 2
torch.cuda.set_device = lambda index: None
"""


SMALL = "import resource as r\nr.setrlimit(r.RLIMIT_AS, (2**31, 2**31))\n"
CLASH = "raise RuntimeError('operator torchvision::nms does not exist')\n"


@pytest.mark.parametrize(
    ("file", "code", "words", "said"),
    [
        ("torchvision", CLASH, "ddp --processes 2 --model resnet18", "nms does not exist.*the same index: pip install"),
        ("sitecustomize", TWO_GPUS, "ddp --processes 3 --batch-size 12 --oversubscribe", "3 processes need 3 GPUs, 2"),
        ("sitecustomize", SMALL, "single", "ulimit -v 2097152 is too small for PyTorch"),
    ],
    ids=["torch and torchvision do not fit", "more ranks than GPUs", "too small a limit of addresses"],
)
def test_what_is_wrong_with_a_machine_is_named(refused, tmp_path, file, code, words, said):
    (tmp_path / f"{file}.py").write_text(code)
    assert re.search(said, refused("--rung", *words.split(), PYTHONPATH=str(tmp_path)))


def test_settings_go_through_the_command_line():
    """The arguments that `Settings.arguments` gives are read back as the same settings."""
    parser = argparse.ArgumentParser()
    add_options(parser, Settings)
    for settings in (
        Settings(
            rung="pipeline", model="resnet18", schedule="ZBVZeroBubble", microbatches=8, cut="1,2,3", timeline=True
        ),
        Settings(rung="single", optimizer="adamw", warmup_steps=5, lr_schedule="cosine", epochs=4, steps=20),
        Settings(rung="ddp", lr=0.5, steps=7, resume="runs/x", seed=0, log_every=1),
        checked(Settings(rung="ddp", processes=3, batch_size=12)),
        checked(Settings(rung="pipeline", form="one-process", devices=3, steps=4, batch_size=12)),
        checked(Settings(rung="hybrid", processes=6, replicas=3, batch_size=24, microbatches=2)),
    ):
        assert options_from(parser.parse_args(settings.arguments()), Settings) == settings


def test_a_wrong_name_of_a_setting_is_refused_with_its_neighbour():
    with pytest.raises(UserError, match="unknown name 'batchsize'; allowed: .*; did you mean 'batch_size'?"):
        Settings(rung="ddp", batchsize=128)


def test_the_help_shows_description_default_and_choices():
    parser = argparse.ArgumentParser()
    add_options(parser, Settings)
    text = " ".join(parser.format_help().split())
    assert "--batch-size BATCH_SIZE images per step, over all processes together (default 128)" in text
    assert "--optimizer {sgd,adamw} what updates the weights" in text and "(default None)" not in text
    assert "--timeline record what each rank did when" in text
