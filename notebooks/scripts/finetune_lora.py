"""Fine-tune the model of train_fsdp.py with LoRA, also sharded, until it writes in capitals.

One machine:     torchrun --standalone --nproc-per-node=2 finetune_lora.py  (after train_fsdp.py)
Several nodes:   sbatch train.sbatch, with finetune_lora.py --checkpoint "$CHECKPOINT" in it

--base NAME      how the names of the base model's checkpoints begin: it reads the newest one
All other flags, and how it saves, stops and resumes, are those of train_fsdp.py.
It needs PyTorch 2.10 or newer."""

import argparse

import job
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import GPT, make_datasets, sample  # yours: a model of blocks, and its data
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from train_fsdp import fill, make_mesh, prepare, read_flags, train


class Adapter(nn.Module):
    """B A x, scaled by alpha / rank: what is added to W x of a frozen layer."""

    def __init__(self, layer, rank=8, alpha=8):
        super().__init__()
        self.a = nn.Parameter(torch.empty(rank, layer.in_features))
        self.b = nn.Parameter(torch.empty(layer.out_features, rank))
        self.scale = alpha / rank

    def reset_parameters(self):
        nn.init.normal_(self.a, std=self.a.shape[1] ** -0.5)
        nn.init.zeros_(self.b)  # so it starts as W x

    def forward(self, x):
        return self.scale * (x @ self.a.T @ self.b.T)


def with_adapters(model):
    """Freeze a model and add an adapter to its blocks' linear layers; call it before fully_shard."""
    model.requires_grad_(False)
    for block in model.blocks:
        for layer in (block.qkv, block.out, block.up, block.down):
            layer.adapter = Adapter(layer)
            layer.register_forward_hook(lambda own, x, out: out + own.adapter(x[0]))
    return model


def make_model(args, device, mesh, base):
    """Return a model of which this process has its shards, with the weights of a checkpoint."""
    with torch.device("meta"):  # shapes only: no device ever holds the whole model
        sizes = args.width, args.blocks, args.heads
        model, shapes = GPT(*sizes, args.recompute), GPT(*sizes)
        model, shapes = with_adapters(model), with_adapters(shapes)
    prepare(model, args, device, mesh)
    model.operations = shapes.flops_per_token()
    fill(model, shapes, device)
    frozen = {name: value for name, value in model.state_dict().items() if "adapter" not in name}
    dcp.load({"model": frozen}, checkpoint_id=base)  # each rank reads into its shards
    return model


@record  # torchrun then shows this process's error, not only its exit status
def main(arguments=None):
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = job.refuse
    parser.add_argument("--base", type=job.start_of, default="train_fsdp")
    own, others = parser.parse_known_args(arguments)
    args = read_flags(["--checkpoint=finetune_lora", *others])
    device = job.join()
    if not (base := job.newest(own.base)):
        job.end(f"no model {own.base}-NUMBER: train it with train_fsdp.py, or give its name as --base")
    mesh = make_mesh(args, device)
    model = make_model(args, device, mesh, base)
    run = train(args, device, mesh, model, make_datasets(bytes.upper))
    if not run.stopping:
        job.say(f"the model writes:\n{sample(model, device)}")  # all ranks sample, and one speaks
    run.finish()
    dist.barrier()  # no rank leaves while another still needs it
    dist.destroy_process_group()


if __name__ == "__main__":  # the loader's workers may import this file again
    main()
