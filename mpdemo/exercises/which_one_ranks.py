"""What a rank runs to check the program of notebooks/11_which_one.ipynb; the checks are in which_one.py."""


def drive_checkpointed(program, rank, world_size):
    """Run the reader's forward on eight blocks, and the blocks alone; compare gradients, calls and peak memory."""
    import torch
    from torch import nn

    from mpdemo.plan.counting import LiveMemory

    def step(forward):
        torch.manual_seed(0)
        with LiveMemory() as meter:
            blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8)]
            calls = []
            for block in blocks:
                block.register_forward_pre_hook(lambda *_: calls.append(1))
            meter.start()
            before = meter.live["cpu"]
            y = forward(blocks, torch.randn(512, 64))
            if y.requires_grad:
                y.square().mean().backward()
            peak, shape = meter.peak() - before, list(y.shape)
        return [p.grad for block in blocks for p in block.parameters()], len(calls), peak, shape

    def plain_forward(blocks, x):
        for block in blocks:
            x = block(x)
        return x

    wanted, _, plain, shape = step(plain_forward)
    gradients, calls, peak, own_shape = step(program.forward)
    missing = sum(gradient is None for gradient in gradients)
    pairs = zip(gradients, wanted, strict=True)
    difference = 1.0 if missing else max(((a - b).norm() / b.norm()).item() for a, b in pairs)
    return {"shape": own_shape == shape, "missing": missing, "difference": difference, "calls": calls, "blocks": 8,
            "peak": peak, "plain": plain}  # fmt: skip
