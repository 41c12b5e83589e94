"""One process, one device: the reference. Every other rung computes the same gradients, up to rounding.

    python -m mpdemo.rungs.single --model transformer --epochs 2

Taught in notebooks/01_single_device.ipynb.
"""

from torch.nn.functional import cross_entropy

from mpdemo.run import Run


def train(run):
    model = run.model().to(run.device)
    optimizer = run.optimizer(model.parameters())
    for images, labels in run.batches(model, optimizer):
        optimizer.zero_grad()
        parts = run.split(images, labels)  # one part, unless --microbatches asks for more
        for part, target in parts:
            outputs = model(part)
            loss = cross_entropy(outputs, target) / len(parts)  # the parts' losses add up to the mean
            loss.backward()  # adds to parameter.grad
            run.log(loss, outputs, target)
        optimizer.step()


if __name__ == "__main__":
    Run.main(__doc__, train)
