# A new machine needs Python, make and network access to the package registry.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# More than eight processes only wait for each other's imports; workers in tests are processes of their own.
PARALLEL := -n auto --maxprocesses 8 --dist worksteal
PYTEST := $(BIN)/python -m pytest $(PARALLEL)
# Workers of tests import what others have compiled, also where the environment forbids to keep it.
export PYTHONDONTWRITEBYTECODE :=
comma := ,
# For make compat: names on the PATH, or paths.
OLDEST_PYTHON ?= python3.10
NEWEST_PYTHON ?= python3.13

.PHONY: help test test-all test-tools slow breakages compat compat-pythons compat-oldest compat-newest lint types suite demo accuracy wires learning workbench holes figures bench-net bench-net-long bench-net-nodes bench-gossip bench-faults-net bench-fast bench-shapes bench-time-to-loss bench-optim bench-coding bench-overhead bench-plan plan-nodes bench-faults bench-slow-faults node-learning bench-large-join bench-unequal bench-unequal-sim bench-membership endurance kills chaos-demo bench-checkpoint examples slurm trace gpu gpu-proof docs dist clean

help:  ## lists the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# What each target needs, once: $(call install,extras,what it says).
define install
	@echo "Installing $(2) into $(VENV), this time only."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(1)]'
	@touch $@
endef

$(VENV)/.demo: pyproject.toml constraints.txt
	$(call install,demo,PyTorch and what the demo needs (1.3 GB; about a minute))

$(VENV)/.installed: pyproject.toml constraints.txt
	$(call install,dev$(comma)frameworks$(comma)interpreter,PyTorch$(comma) the tools of the tests$(comma) and the frameworks that are tested: transformers$(comma) Lightning$(comma) Ray (3.4 GB; two to five minutes))

test: lint  ## lint, format, types and the fast tests
	@$(MAKE) --no-print-directory -j2 types suite || { $(MAKE) --no-print-directory types; false; }  # its errors stand last

test-all: lint types $(VENV)/.installed  ## the same with the slow tests: many kills, the network lab, whole examples
	$(PYTEST)

test-tools: $(VENV)/.installed  ## the tests of the upper floor: simulator, planner, analysis, plots, command line
	$(PYTEST) tests/tools

slow: $(VENV)/.installed  ## the fast tests, and which of them take longest
	$(PYTEST) -m "not slow" --durations=40 --durations-min=1

breakages: $(VENV)/.installed  ## deliberate faults, one at a time: which fast test sees each (25 minutes); rows go to docs/results/
	$(BIN)/python -m tests.breakages $(PARALLEL)

compat: compat-oldest compat-newest  ## the fast tests with the oldest versions that are claimed, and with the newest (installs torch twice)

# The deselected test reads what these runs write.
compat-oldest compat-newest: compat-%: .compat/%/.installed
	.compat/$*/bin/python -m pytest $(PARALLEL) -m "not slow" -rs -p tests.compat --keep-as $* \
		--deselect tests/test_packaging.py::test_the_metadata_claims_what_was_run

.compat/oldest/.installed: FOUND = $(OLDEST_PYTHON)
.compat/newest/.installed: FOUND = $(NEWEST_PYTHON)
.compat/%/.installed: pyproject.toml constraints-%.txt | compat-pythons
	$(FOUND) -m venv .compat/$*
	.compat/$*/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-$*.txt -e '.[dev]'
	@touch $@

# Before anything is installed.
compat-pythons:
	@$(OLDEST_PYTHON) --version || { echo "There is no $(OLDEST_PYTHON). Install it, or name one: make compat OLDEST_PYTHON=/path/to/python3.10"; exit 1; }
	@$(NEWEST_PYTHON) --version || { echo "There is no $(NEWEST_PYTHON). Install it, or name one: make compat NEWEST_PYTHON=/path/to/python3.13"; exit 1; }

lint: $(VENV)/.installed  ## ruff: lint and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed  ## mypy, strict
	$(BIN)/mypy

suite: $(VENV)/.installed  ## the fast tests
	$(PYTEST) -m "not slow"

demo: $(VENV)/.demo  ## train on real data with 4 workers: DDP, gossip() on five topologies, the wrapper; table, plot and JSON under runs/
	$(BIN)/python -m examples.compare --optimizers GossipAdamW

accuracy: $(VENV)/.demo  ## the demo with three seeds; its table is what the documents quote
	$(BIN)/python -m examples.compare --seeds 0 1 2 --out runs/accuracy
	mkdir -p docs/results
	cp runs/accuracy/digits.json runs/accuracy/digits.md runs/accuracy/digits.png docs/results/

wires: $(VENV)/.demo  ## digits and characters with each compression, three seeds: table, plot and JSON
	$(BIN)/python -m examples.wires --seeds 0 1 2 --out runs/wires
	mkdir -p docs/results
	cp runs/wires/wires.json runs/wires/wires.md runs/wires/wires.png docs/results/

learning: $(VENV)/.installed  ## whether replicas learn as DDP does: three tasks, 4 to 64 workers, even and uneven data (40 minutes)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[learning]'
	$(BIN)/python -m benchmarks.learning

examples: $(VENV)/.installed  ## the short examples with 4 workers, and DDP beside gossip (5 minutes): table and JSON under docs/results/
	$(BIN)/python -m benchmarks.examples

workbench: $(VENV)/.installed  ## topologies, simulated learning and predicted steps: tables, plots and JSON under docs/results/
	$(BIN)/python -m benchmarks.workbench

holes: $(VENV)/.installed  ## what workers that die cost the others (90 seconds): tables, plot and JSON under docs/results/
	$(BIN)/python -m benchmarks.holes

figures: $(VENV)/.installed  ## the figures of how-it-works.md and watch.md, under docs/figures/
	$(BIN)/python -m benchmarks.figures

trace: $(VENV)/.installed  ## the profiler's ranges of two updates over fast and slow links (root, iproute2): JSON under benchmarks/results/
	$(BIN)/python -m benchmarks.trace

bench-net: $(VENV)/.installed  ## training steps over slow links (root, iproute2; 40 minutes): table, chart and JSON under benchmarks/results/
	$(BIN)/python -m benchmarks.net

bench-net-long: $(VENV)/.installed  ## the same three times in rotating order, medians: what the documents quote
	$(BIN)/python -m benchmarks.net --repeat 3

bench-net-nodes: $(VENV)/.installed  ## nodes of two workers: a node as one replica, and other ways (40 minutes)
	$(BIN)/python -m benchmarks.net --setup 3x2-100 4x2-100 --repeat 3 --out benchmarks/results/nodes --contender alone ddp \
		'gossip:base-2*' worker:base-2

bench-gossip: $(VENV)/.installed  ## gossip() and the wrapper over slow links (7 minutes)
	$(BIN)/python -m benchmarks.net --setup 8x1-60 --out benchmarks/results/gossip --contender alone 'ours:one-peer-exp*' \
		'gossip:one-peer-exp*'

bench-faults-net: $(VENV)/.installed  ## what faults=Tolerate() costs over slow links (root, iproute2; 8 minutes)
	$(BIN)/python -m benchmarks.net --setup 8x1-200 --out benchmarks/results/faults --repeat 5 --contender \
		gossip:base-2 tolerant:base-2

bench-fast: $(VENV)/.installed  ## exchanges over fast links, beside gloo and DDP (root, iproute2; 10 minutes): table and JSON under benchmarks/results/
	$(BIN)/python -m benchmarks.fast

bench-shapes: $(VENV)/.installed  ## steps with pairs for many numbers of workers, sizes and rates, beside their limits (root; 10 minutes)
	$(BIN)/python -m benchmarks.shapes

bench-time-to-loss: $(VENV)/.installed  ## time to the same loss at any bandwidth, 8 workers (root, iproute2; hours; finished runs are kept)
	$(BIN)/python -m benchmarks.time_to_loss train times whole report

bench-optim: $(VENV)/.installed  ## updates of GossipAdamW and AccumAdamW compared with torch's fused AdamW
	$(BIN)/python -m benchmarks.optim --compiled

bench-coding: $(VENV)/.installed  ## encoding and mixing by each compression, with the kernels of [fast] and without (2 minutes)
	$(BIN)/python -m benchmarks.coding

bench-overhead: $(VENV)/.installed  ## the Python part of a step, per parameter tensor
	$(BIN)/python -m benchmarks.overhead

bench-plan: $(VENV)/.installed  ## the planner against the lab's results and a published table
	$(BIN)/python -m benchmarks.plan

plan-nodes: $(VENV)/.installed  ## predicted steps of 4 nodes of 8 GPUs by the bandwidth between them: table and JSON under docs/results/
	$(BIN)/python -m benchmarks.workbench nodes

bench-faults: $(VENV)/.installed  ## what faults=Tolerate() costs, and what each kind of fault costs the others (6 minutes)
	$(BIN)/python -m benchmarks.faults

bench-slow-faults: $(VENV)/.installed  ## faults=Tolerate() at 1, 5 and 10 Mbit/s while a process joins (root, iproute2; 40 minutes)
	$(BIN)/python -m benchmarks.slow_faults

node-learning: $(VENV)/.installed  ## nodes as replicas beside workers as replicas and DDP: loss after as many steps (10 minutes)
	$(BIN)/python -m benchmarks.node_learning

bench-large-join: $(VENV)/.installed  ## processes join a run with 2 GB of state (root, iproute2; 10 minutes)
	$(BIN)/python -m benchmarks.large_join

bench-unequal: $(VENV)/.installed  ## what a slow worker costs the others, waiting and with faults=Tolerate() (7 minutes)
	$(BIN)/python -m benchmarks.unequal

bench-unequal-sim: $(VENV)/.installed  ## the same for 64 workers with log-normal speeds, in virtual time (8 minutes)
	$(BIN)/python -m benchmarks.unequal_sim

bench-membership: $(VENV)/.installed  ## the protocol of members with 64 to 1,000 seats under churn, in virtual time (8 minutes)
	$(BIN)/python -m benchmarks.membership

endurance: $(VENV)/.installed  ## 32 workers under kills, freezes, cuts and slow links, and 32 without (MINUTES=30; 20 GB of memory; root and iproute2 for the cuts)
	$(BIN)/python -m benchmarks.endurance --minutes $(or $(MINUTES),30)

kills: $(VENV)/.installed  ## kills in one run of 8 workers: no hang, no error, no wrong mean (KILLS=1000; 25 minutes)
	$(BIN)/python -m benchmarks.kills --kills $(or $(KILLS),1000)

chaos-demo: $(VENV)/.installed  ## one minute: four workers, one is killed, and a new process takes its place
	$(BIN)/python -m benchmarks.endurance --demo

bench-checkpoint: $(VENV)/.installed  ## the cost of saving, resuming and other numbers of workers (12 GiB of memory, 7 GB of disk)
	$(BIN)/python -m benchmarks.checkpoint

# Installs no packages of the system.
slurm: $(VENV)/.installed  ## the tests under a real Slurm of two nodes on this machine (root, slurm-wlm, munge, iproute2; 10 minutes)
	$(BIN)/python -m pytest -n 0 -rs --durations=0 --durations-min=1 tests/test_slurm.py

# Installs nothing, because machines with a GPU have their own torch.
gpu gpu-proof: OUT ?= runs
gpu:  ## the situations of real scripts on one GPU, with PYTHON as it is (10 minutes at most): table, and JSON in OUT
	PYTHONPATH=src $(PYTHON) -m benchmarks.gpu --out $(OUT)/gpu.json

gpu-proof:  ## loss against steps of 8 replicas of 25 million parameters on one GPU, with PYTHON as it is (10 minutes)
	PYTHONPATH=src:. $(PYTHON) -m benchmarks.gpu.proof --out $(OUT)/gpu-proof.json

docs: $(VENV)/.installed  ## the pages as a site under runs/site, with the reference generated from docstrings; broken links are errors
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	# The variable silences an advertisement of a successor, which --strict would not fail on and readers would ask about.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

dist: $(VENV)/.installed  ## the sdist and the wheel under runs/dist, checked; publishes nothing
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[release]'
	rm -rf runs/dist
	$(BIN)/python -m hatchling build -d runs/dist
	$(BIN)/python -m twine check --strict runs/dist/*

clean:  ## removes the environment and the outputs of runs
	rm -rf $(VENV) .compat runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
