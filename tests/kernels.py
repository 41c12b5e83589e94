"""A kernel whose channels are files: of ports, one may be taken after it was chosen and before the kernel listens."""

import tempfile
import uuid

from jupyter_client.manager import KernelManager


class FileKernelManager(KernelManager):
    """Takes the options of Jupyter's own."""

    def __init__(self, **options):
        super().__init__(
            transport="ipc",
            ip=f"{tempfile.gettempdir()}/kernel-{uuid.uuid4().hex[:8]}",  # a socket's path: at most 107 letters
            **options,
        )


def start_new_kernel(env) -> tuple:
    """Start a kernel of this Python; return its manager and a client that it has answered."""
    manager = FileKernelManager()
    manager.start_kernel(env=env)
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(60)
    return manager, client
