# The commands of this project. Each makes .venv first where it is missing; `make PYTHON=python3.12 demo` picks a Python.
PYTHON ?= python3
BIN := .venv/bin
MINUTES ?= 30
SEED ?= 0
STAMP := .venv/.installed

# Five workers for two cores: more than half of the time a test waits, for Slurm, for a process or for a time limit.
PYTEST := $(BIN)/python -m pytest -n 5 --no-loadscope-reorder
PROCESSES := $(wildcard tests/test_world_*.py tests/test_jobs*.py) tests/test_ranks.py tests/test_cluster.py \
	tests/test_training.py

.PHONY: demo test nightly night-notebooks night-answers night-tests night-rounds floor gpu gpu-record lint lab bench soak notebooks site release lock clean

demo: $(STAMP)        ## train on real digits with every strategy, print the table (60 s at most on two idle cores)
	$(BIN)/python -m mpdemo demo

test: $(STAMP)        ## everything CI runs: lint, unit tests, worlds of processes, Slurm, notebooks
	$(BIN)/python tests/setup_system.py
	$(MAKE) lint
# Not last: without a GPU its last line says that all tests were skipped, which reads as if none had run.
	$(MAKE) gpu
# PyTorch without its compiler until something is compiled: half of the time of each process that starts. And Python
# keeps what it has compiled, also where the environment forbids that.
	PYTHONDONTWRITEBYTECODE= PYTHONPATH=$(CURDIR)/tests/lean $(PYTEST)

nightly:              ## what is slow and rare, in five parts, each of which is a command of its own
	$(MAKE) --keep-going night-notebooks night-answers night-tests night-rounds floor

night-notebooks: $(STAMP)  # each notebook whole, on this machine and on a Slurm
	$(PYTEST) -m nightly tests/test_notebooks.py

night-answers: $(STAMP)    # every wrong answer to an exercise, and the longest solutions
	$(PYTEST) -m nightly tests/test_exercises.py

night-tests: $(STAMP)      # everything else that has the mark
	$(PYTEST) -m "nightly and not soak" --ignore=tests/test_notebooks.py --ignore=tests/test_exercises.py

night-rounds: $(STAMP)     # the tests that start processes, ten times: one that fails once in twenty runs has found something
	failed=; for round in 1 2 3 4 5 6 7 8 9 10; do $(PYTEST) -q $(PROCESSES) || failed="$$failed $$round"; done; \
	echo "failed rounds:$${failed:- none}"; [ -z "$$failed" ]

floor:                ## the oldest PyTorch that is allowed, in an environment of its own: equality, plan, training
	$(PYTHON) -m venv .venv-floor
	.venv-floor/bin/python -m pip install --quiet "torch==2.11.*" "torchvision==0.26.*" --editable ".[test]"
	.venv-floor/bin/python -m pytest -n 3 tests/test_private_pytorch.py tests/test_rungs.py tests/test_plan_*.py \
		tests/test_training.py tests/test_world_*.py

gpu: $(STAMP)         ## what needs GPUs, on those that are here; without one all of it is skipped
	$(BIN)/python -m pytest tests/gpu

gpu-record: $(STAMP)  ## record in 16 minutes what your GPU can show, as JSON; without one: make gpu-record RECORD="--on cpu"
	$(BIN)/python tests/gpu/record.py --out runs/gpu/$$(date +%Y-%m-%d-%H%M%S)/record.json $(RECORD)

lint: $(STAMP)        ## style, form, types, import directions and the notebooks' house rules (seconds; executes none)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyrefly check --summary=none
	$(BIN)/python tests/notebooks.py --check

lab: $(STAMP)         ## open the notebooks in JupyterLab; options for it: make lab LAB="--port=9999 --no-browser"
# No pop-up that asks about news; `--LabApp.news_url=None` leaves it there.
	-$(BIN)/jupyter labextension disable --level=sys_prefix "@jupyterlab/apputils-extension:announcements" >/dev/null 2>&1
# Trust is each user's own. Without it, a page that is reloaded in the middle of a job shows its view as text.
	-$(BIN)/jupyter trust notebooks/*.ipynb >/dev/null
	@echo "If no browser opens, click the address below that begins with http://127.0.0.1 or copy it into your browser."
	$(BIN)/python -m jupyterlab --notebook-dir=. $(LAB) notebooks/10_two_devices.ipynb

bench: $(STAMP)       ## measure the speed figures, each beside its limit (on an otherwise idle machine)
	$(BIN)/python tests/bench/bench.py

soak: $(STAMP)        ## kill, cancel and requeue the scripts to take home at random, for MINUTES (30); nothing may be lost
	$(BIN)/python -m pytest -m soak
	$(BIN)/python tests/soak_scripts.py --minutes $(MINUTES) --seed $(SEED)

notebooks: $(STAMP)   ## run every notebook and refresh its saved outputs
	$(BIN)/python tests/notebooks.py

site: $(STAMP)        ## build the course as a web site, from the saved outputs: build/site/index.html
	$(BIN)/python tests/site/build.py

clean:                ## remove all runs, their logs and all caches; answers, batch scripts and .venv stay
	rm -rf runs build/failed_notebooks .pytest_cache .ruff_cache .import_linter_cache .coverage htmlcov
	rm -f slurm-*.out slurm-*.err slurm/slurm-*.out slurm/slurm-*.err notebooks/slurm-*.out notebooks/slurm-*.err
	find mpdemo notebooks tests -type d \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +
	@echo "kept: work/ (your answers), slurm/ (batch scripts and sites), .venv (rm -rf .venv installs anew)"

release: $(STAMP)     ## build what a release of TAG consists of, in build/release; refused where versions disagree
	$(BIN)/python tests/release.py "$(TAG)"

lock: $(STAMP)        ## write what is installed now to requirements.lock, for a class: make demo LOCKED=1 installs exactly that
	$(BIN)/python -m pip freeze --exclude-editable > requirements.lock

$(STAMP): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(if $(LOCKED),--constraint requirements.lock) --editable ".[test]"
	touch $@
