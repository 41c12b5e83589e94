"""Who am I, who started me, how do I end: the processes of a training run on this machine and on many."""
