# Two commands do everything: `make run` and `make test`. Both set up their own .venv first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
export OMP_WAIT_POLICY ?= passive
export TACIT_TEST_DATA ?= $(abspath $(wildcard ../shared/data))

.PHONY: run test install lint types unit cpus docs bench evidence protocols kills clean help

help:            ## what can be made
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(VENV)/.core: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing tacit into $(VENV) (once; the first time takes a minute or two) ..."
	@$(PIP) install -q -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@echo "Installing what the tests need ..."
	@$(PIP) install -q -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.browser: $(VENV)/.dev
	@if command -v chromium || command -v chromium-browser || command -v google-chrome; then true; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "Installing Chromium, which the tests of the report need ..."; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
			chromium fonts-dejavu-core >/dev/null; \
	else false; fi >&2 && touch $@ || \
	echo "There is no Chromium, and it cannot be installed here: the tests of the report page will be skipped." >&2

install: $(VENV)/.core   ## make .venv and install tacit into it
	@echo "Done. Try: $(BIN)/tacit --help"

run: $(VENV)/.core       ## the main job: a semi-supervised method between its lower and upper bound
	@$(BIN)/tacit demo --out runs/demo

test: lint types unit    ## lint, types, doctests and tests

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

unit: $(VENV)/.dev $(VENV)/.browser
	$(BIN)/python -m pytest -n 2 --dist worksteal -rs

cpus: $(VENV)/.dev $(VENV)/.browser   ## the tests as on three types of CPU: no vector instructions, AVX2, all there are
	$(BIN)/python -m pytest -n 2 --dist worksteal -rs
	ATEN_CPU_CAPABILITY=avx2 $(BIN)/python -m pytest -n 2 --dist worksteal -rs
	ATEN_CPU_CAPABILITY=default $(BIN)/python -m pytest -n 2 --dist worksteal -rs

docs: $(VENV)/.dev       ## the site, written to site/ (open site/index.html)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(VENV)/.dev      ## speed and memory as ratios within one run (ONLY=round: one part)
	$(BIN)/python -m benchmarks $(ONLY)

evidence: $(VENV)/.dev  ## slower evidence: real data, several seeds
	$(BIN)/python -m benchmarks.evidence PART=$(PART) SEEDS=$(SEEDS) AGAIN=$(AGAIN) ROWS="$(ROWS)"

protocols: $(VENV)/.dev  ## docs/protocols.md: the papers' values beside those of the recipes
	$(BIN)/python -m benchmarks.protocols

kills: $(VENV)/.dev      ## runs killed at random moments and damaged folders (N=100 SEED=0 ONLY=kills|damage)
	$(BIN)/python -m benchmarks.kills N=$(N) SEED=$(SEED) ONLY=$(ONLY)

clean:
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache
