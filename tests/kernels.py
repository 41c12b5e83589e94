"""A kernel whose channels are files: of ports, one may be taken after it was chosen and before the kernel listens."""

import tempfile
import uuid
from unittest.mock import patch

from jupyter_client import manager


class FileKernelManager(manager.KernelManager):
    """Takes the options of Jupyter's own."""

    def __init__(self, **options):
        super().__init__(
            transport="ipc",
            ip=f"{tempfile.gettempdir()}/kernel-{uuid.uuid4().hex[:8]}",  # a socket's path: at most 107 letters
            **options,
        )


def start_new_kernel(env) -> tuple:
    """Start a kernel as Jupyter does; return its manager and a client that it has answered."""
    with patch.object(manager, "KernelManager", FileKernelManager):
        return manager.start_new_kernel(env=env)
