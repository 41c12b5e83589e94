"""Write a checkpoint's weights into one safetensors file, for a program that runs on one device.

python export.py train_gpt-220 [FILE]    (of train_gpt.py or train_fsdp.py, whatever mesh has saved it)

It needs PyTorch 2.10 or newer. One process does it, a tensor at a time, and reads no moments. The
names are those of the model:
GPT(...).load_state_dict(safetensors.torch.load_file("train_gpt-220.safetensors"))"""

import contextlib
import json
import sys
from math import prod
from pathlib import Path

import job
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

TYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
TYPES |= {torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"}


def header(weights):
    """Return the beginning of a safetensors file: its length, then where each tensor lies."""
    described, end = {"__metadata__": {"format": "pt"}}, 0
    for key, weight in weights.items():
        kind = weight.properties.dtype
        begin, end = end, end + prod(weight.size) * kind.itemsize
        place = {"dtype": TYPES[kind], "shape": [*weight.size], "data_offsets": [begin, end]}
        described[key.removeprefix("model.")] = place
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)  # numbers of eight bytes may follow
    return len(text).to_bytes(8, "little") + text


def export(folder, file):
    """Write the file; it appears under its name only when it is whole."""
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    weights = {key: entry for key, entry in saved.items() if key.startswith("model.")}
    if not weights:
        sys.exit(f"{folder} has no model, only {', '.join(sorted(saved)[:3]) or 'nothing'}")
    for key, entry in weights.items():
        if getattr(getattr(entry, "properties", None), "dtype", None) not in TYPES:
            sys.exit(f"{folder}: {key} is no tensor of a type that safetensors has")
    part = file.with_name(f"{file.name}.part")
    try:
        with part.open("wb") as out:
            out.write(header(weights))
            for key, weight in weights.items():
                state = {key: torch.empty(weight.size, dtype=weight.properties.dtype)}
                dcp.load(state, checkpoint_id=folder)  # puts it together from its shards
                out.write(state[key].flatten().view(torch.uint8).numpy())
        part.replace(file)
    except OSError as error:  # as for a full disk
        with contextlib.suppress(OSError):
            part.unlink()
        sys.exit(f"{file} cannot be written ({error})")
    print(f"{file}: {len(weights)} tensors, {file.stat().st_size / 2**20:,.1f} MiB")


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit("python export.py CHECKPOINT [FILE]")
    folder = Path(sys.argv[1])
    if not (folder / ".metadata").is_file():  # it is written last
        others = ", ".join(sorted(str(file.parent) for file in folder.parent.glob("*/.metadata")))
        sys.exit(f"no complete checkpoint {folder}; there is {others or 'none'}")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # of itself
    if damage := job.damage(folder):
        sys.exit(f"{folder} is damaged ({damage})")
    export(folder, Path(sys.argv[2] if sys.argv[2:] else f"{folder}.safetensors"))


if __name__ == "__main__":
    main()
