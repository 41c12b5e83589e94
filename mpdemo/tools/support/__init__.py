"""What a trainer or the support of a cluster runs: ``mpdemo env``, ``render`` and ``rehearse``."""
