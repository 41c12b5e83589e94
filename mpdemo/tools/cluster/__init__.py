"""A throw-away Slurm cluster on this machine, for tests and for rehearsing: ``mpdemo cluster``."""

from mpdemo.tools.cluster.cluster import Cluster

__all__ = ["Cluster"]
