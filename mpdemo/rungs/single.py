"""One process, one device: the reference. Every other rung computes the same gradients, up to rounding.

    python -m mpdemo.rungs.single --model transformer --epochs 2

Taught in notebooks/12_one_step.ipynb.
"""

from torch.nn.functional import cross_entropy

from mpdemo.run import Rung, main, score


def build(run):
    model = run.model().to(run.device)
    optimizer = run.optimizer(model.parameters())

    def step(images, labels):
        optimizer.zero_grad()
        parts = run.split(images, labels)  # one part, unless --microbatches asks for more
        total = 0
        for part, target in parts:
            outputs = model(part)
            loss = cross_entropy(outputs, target) / len(parts)  # the parts' losses add up to the mean
            loss.backward()  # adds to parameter.grad
            total += score(loss, outputs, target)
        optimizer.step()
        return total

    return Rung(model, optimizer, step)


if __name__ == "__main__":
    main(__doc__, build)
