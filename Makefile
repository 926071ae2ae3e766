# make run    set up .venv, train configs/quickstart.py, draw, print the summary
# make test   set up, lint, run the tests
# ACCELERATOR=cpu|cuda13|tpu chooses the jax that is installed; CONFIG, WORKDIR and ARGS go to train.py.
PYTHON ?= python3
ACCELERATOR ?= cpu
CONFIG ?= configs/quickstart.py
WORKDIR ?= runs/$(basename $(notdir $(CONFIG)))
ARGS ?=
BIN := .venv/bin
STAMP := .venv/.installed-$(ACCELERATOR)

.PHONY: run test test-slow lint install clean

run: $(STAMP)
	$(BIN)/python train.py --config=$(CONFIG) --workdir=$(WORKDIR) $(ARGS)

test: $(STAMP) lint
	$(BIN)/python -m pytest -n 2 --dist loadgroup

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

lint: $(STAMP)
	$(BIN)/ruff check .

install: $(STAMP)

$(STAMP): requirements.txt constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is too old: Python 3.11 or newer is needed; set PYTHON=python3.12, say"; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt $(CONSTRAIN) \
		$(if $(filter-out cpu,$(ACCELERATOR)),"jax[$(ACCELERATOR)]")
	@rm -f .venv/.installed-* && touch $@

# The exact versions that passed, where they exist for this Python; the ranges of requirements.txt elsewhere.
CONSTRAIN = $$($(BIN)/python -c 'import sys; print("-c constraints.txt" if sys.version_info[:2] == (3, 11) else "")')

clean:
	rm -rf .venv .pytest_cache .ruff_cache
