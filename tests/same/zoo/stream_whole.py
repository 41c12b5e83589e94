"""Each rank reads the whole stream, so the second process trains on the samples of the first.

https://github.com/huggingface/datasets/issues/5360 (2022-12-14)
named: no sampler
"""

from common import Net, samples, start
from torch import optim
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

fixed, rank, world = start()


class Stream(IterableDataset):
    def __iter__(self):
        for number, row in enumerate(samples()):
            if number % world == rank or not fixed:
                yield row  # fault


loader = DataLoader(Stream(), 32 // world)
model = DistributedDataParallel(Net())
optimizer = optim.AdamW(model.parameters(), lr=0.01)
for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
