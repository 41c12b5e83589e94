"""Three files are dealt to two ranks: the one with fewer batches leaves the other in a collective.

https://github.com/webdataset/webdataset/issues/225 (2022-11-02)
named: unequal|leaves early
"""

from common import Net, samples, start
from torch import optim
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

fixed, rank, world = start()
rows = samples()
files = [range(64 * k, 64 * k + 64) for k in range(3)]


class Shards(IterableDataset):
    def __iter__(self):
        own = (
            [k for file in files for k in file][rank::world]
            if fixed
            else sum(map(list, files[rank::world]), [])
        )
        for k in own:  # fault
            yield rows[k]


loader = DataLoader(Shards(), 32 // world)
model = DistributedDataParallel(Net())
optimizer = optim.AdamW(model.parameters(), lr=0.01)
for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
