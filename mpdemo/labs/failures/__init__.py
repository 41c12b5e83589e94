"""Programs that fail, each in one known way and within seconds: the jobs of notebooks/10_when_it_breaks.ipynb."""
