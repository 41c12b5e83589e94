"""A toy of a GPU: it takes its work from a queue; to compute is to wait. Taught in notebooks/01_single_device.ipynb."""

import time
from concurrent.futures import ThreadPoolExecutor


class ToyDevice:
    """A device with a queue, which needs `seconds` for each piece of work and runs beside the host.

    `launched` counts the pieces of work put into the queue so far. `waits` has an entry for each time that the host
    waited for a result: how many pieces had been launched by then.
    """

    def __init__(self, seconds):
        self.seconds, self.launched, self.waits = seconds, 0, []
        self.queue = ThreadPoolExecutor(1)
        self.last = None

    def launch(self, result=0.0):
        """Put work into the queue and return at once; ``item()`` of what is returned waits for `result`."""
        self.launched += 1
        self.last = Result(self, self.queue.submit(self._compute, result))
        return self.last

    def _compute(self, result):
        time.sleep(self.seconds)
        return result

    def wait(self):
        """Wait until all work in the queue is done, as ``torch.cuda.synchronize()`` does."""
        if self.last:
            self.last.item()


class Result:
    """A number that is not computed yet."""

    def __init__(self, device, future):
        self.device, self.future = device, future

    def item(self):
        """Return the number; wait until it is computed."""
        if not self.future.done():
            self.device.waits.append(self.device.launched)
        return self.future.result()
