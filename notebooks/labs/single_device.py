"""What several labs share: images that come slowly, and what a rank keeps between two steps."""

import time

from torch.utils.data import Dataset

from mpdemo.plan.dry_run import local


class RemoteImages(Dataset):
    """Images that come one by one from a slow file system: each takes `seconds`, in which no core works."""

    def __init__(self, dataset, seconds):
        self.dataset, self.seconds = dataset, seconds

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return self.dataset[index]


def stored(trial) -> dict:
    """Return the bytes of the weights, gradients and optimizer states that this rank keeps between two steps."""
    weights = list(trial.rung.model.parameters())
    states = [value for state in trial.rung.optimizer.state.values() for value in state.values()]
    states = [state for state in states if state.dim()]  # not the count of steps, a scalar
    kept = {"weights": weights, "gradients": [weight.grad for weight in weights], "optimizer": states}
    return {name: sum(local(t).nbytes for t in tensors) for name, tensors in kept.items()}
