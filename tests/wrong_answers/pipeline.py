"""Typical wrong answers to the exercises of notebook 05."""

HEAD = "import torch\nimport torch.distributed as dist\nfrom torch.nn.functional import cross_entropy\n\n\n"
RECEIVE = """def last_stage(stage, labels, microbatches):
    parts, inputs = labels.chunk(microbatches), []
    for part in parts:
        received = torch.empty(len(part), 6)
        dist.recv(received, 0)
        inputs.append(received.requires_grad_())
"""
COMPUTE = """    for received, part in zip(inputs, parts):
        (cross_entropy(stage(received), part) / microbatches).backward()
"""
SEND = """    for received in inputs:
        dist.send(received.grad, 0)
"""
IN_TURN = """def last_stage(stage, labels, microbatches):
    for part in labels.chunk(microbatches):
        received = torch.empty(len(part), 6)
        dist.recv(received, 0)
        received.requires_grad_()
        (cross_entropy(stage(received), part) / microbatches).backward()
        dist.send(received.grad, 0)
"""
TORCHRUN = "torchrun --standalone --nproc-per-node=4 -m mpdemo train --rung pipeline --model transformer \\\n"
SIXTEEN = "--batch-size 64 --schedule 1f1b --microbatches 4 --cut block.1,block.3,block.5\n"


def forgets_to_divide(first, second, loss_fn, images, labels, microbatches):
    for x, y in zip(images.chunk(microbatches), labels.chunk(microbatches), strict=True):
        output = first(x)
        received = output.detach().requires_grad_()
        loss_fn(second(received), y).backward()
        output.backward(received.grad)


def sends_nothing_back(first, second, loss_fn, images, labels, microbatches):
    for x, y in zip(images.chunk(microbatches), labels.chunk(microbatches), strict=True):
        (loss_fn(second(first(x).detach()), y) / microbatches).backward()


def whole_batch(first, second, loss_fn, images, labels, microbatches):
    loss_fn(second(first(images)), labels).backward()


def fails_without_a_word(*_):
    raise RuntimeError


def forgets_to_ask_for_gradients(first, second, loss_fn, images, labels, microbatches):
    for x, y in zip(images.chunk(microbatches), labels.chunk(microbatches), strict=True):
        output = first(x)
        received = output.detach()
        (loss_fn(second(received), y) / microbatches).backward()
        output.backward(received.grad)


GPIPE = ["F0", "F1", "F2", "F3", "B0", "B1", "B2", "B3"]
LAST = ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"]
MIDDLE = ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"]

WRONG = {
    "05.1": [forgets_to_divide, sends_nothing_back, whole_batch, forgets_to_ask_for_gradients, fails_without_a_word],
    "05.2": [
        HEAD + RECEIVE + COMPUTE.replace(" / microbatches", "") + SEND,
        HEAD + RECEIVE + COMPUTE.replace("/ microbatches", "/ microbatches ** 2") + SEND,
        HEAD + RECEIVE + COMPUTE.replace("(cross", "(0 * cross") + SEND,
    ],
    "05.3": [3 / 8, 4 / 11, 0.25, 27.3, 0.1],
    "05.4": [133, 140, 8],
    "05.5": [(8, 8), (8, 1), (4, 8), (8, 3), (1, 4)],
    "05.6": [
        [GPIPE, GPIPE, GPIPE],
        [LAST, LAST, LAST],
        [GPIPE, LAST],
        [GPIPE, ["F0", "B1", "F1", "B0", *GPIPE[2:4], "B2", "B3"], LAST],
        [["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"], MIDDLE, LAST],
        [GPIPE[:4], GPIPE, GPIPE],
        [["F0", "F1", "F2", "B0", "B1", "B2", "F3", "B3"], MIDDLE, LAST],
    ],
    "05.7": [
        HEAD + IN_TURN,
        HEAD + RECEIVE + COMPUTE,
        HEAD + RECEIVE + COMPUTE + SEND.replace("in inputs", "in reversed(inputs)"),
        HEAD + RECEIVE + COMPUTE.replace(" / microbatches", "") + SEND,
    ],
    "05.8": [
        TORCHRUN + SIXTEEN.replace("microbatches 4", "microbatches 3"),
        TORCHRUN + SIXTEEN.replace("block.1,block.3,block.5", "block.3"),
        TORCHRUN + SIXTEEN.replace("microbatches 4", "microbatches 6"),
        TORCHRUN + SIXTEEN.replace("block.5", "block.4").replace("64", "60"),
        TORCHRUN.replace("=4", "=2") + SIXTEEN.replace("block.1,block.3,block.5", "block.3"),
        TORCHRUN + SIXTEEN.replace("1f1b --microbatches 4", "gpipe --microbatches 2"),
        TORCHRUN + SIXTEEN.replace("block.1,block.3,block.5", "block.0,block.1,block.2"),
    ],
    "05.9": [(4, 8), (3, 6), (3, 8)],
    "05.10": [2, 1.6, 1 / 9, 1.2],
    "05.11": [1, 4, 32, 5],
    "05.12": [[3, 6], [3, 5], [2], [0, 4], [2, 5]],
    "05.13": ["--cut 3", "--cut 3 6 --microbatches 2", "--cut 1 3", "--cut 2 5", "--cut 6 3"],
}
