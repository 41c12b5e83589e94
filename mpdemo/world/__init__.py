"""Who am I, who started me, how do I end: the processes of a training on this machine and on many."""
