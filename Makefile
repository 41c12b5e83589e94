# The commands of this project. Each makes .venv first where it is missing; `make PYTHON=python3.12 demo` picks a Python.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test lab bench notebooks

demo: $(STAMP)        ## train on real digits up the whole ladder, print the table (5 minutes at most on two cores)
	$(BIN)/python -m mpdemo demo

test: $(STAMP)        ## everything CI runs: lint, import directions, unit tests, worlds of processes, Slurm, notebooks
	$(BIN)/python tests/setup_system.py
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -n 2 --dist loadfile

lab: $(STAMP)         ## open the notebooks in JupyterLab
	$(BIN)/python -m jupyterlab --notebook-dir=. notebooks/00_start_here.ipynb

bench: $(STAMP)       ## measure the speed figures of the README (about 30 minutes, on an otherwise idle machine)
	$(BIN)/python -m mpdemo bench --readme README.md

notebooks: $(STAMP)   ## run every notebook and refresh its saved outputs
	$(BIN)/python tests/notebooks.py

$(STAMP): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	touch $@
