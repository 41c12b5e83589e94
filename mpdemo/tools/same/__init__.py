"""Is a script of the reader's own the same training with several processes, and does it resume?"""
