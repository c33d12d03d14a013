# Every target sets up what it needs: `make test` and `make demo` work from an empty checkout, without a GPU.

VENV := .venv
MEGATRON := .venv-megatron
HUGGINGFACE := .venv-huggingface
PY := $(VENV)/bin/python
SUPPORTED := import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c '$(SUPPORTED)' 2>/dev/null && { echo $$python; break; }; done)
CSRC = $(shell find ep_plugin/csrc tests/emulation -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu')

.PHONY: venv build check test test-megatron test-huggingface torches test-pytorch demo lint docs format mutate gpu wheel clean
.DELETE_ON_ERROR:
# A module is compiled when it is first imported, and kept. Otherwise each process would compile PyTorch, in 13 seconds.
unexport PYTHONDONTWRITEBYTECODE

venv: $(VENV)/requirements.stamp

$(VENV)/requirements.stamp: requirements/dev.txt requirements/constraints.txt requirements/no-deps.txt
	@test -x $(PY) || test -n "$(PYTHON)" || \
		{ echo "make: expected Python 3.11 to 3.13, found $$(python3 --version 2>&1); set PYTHON=" >&2; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-compile -r requirements/dev.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-compile --no-deps \
		-r requirements/no-deps.txt
	touch $@

# Editable: Python files take effect as they are, and `build` brings _C up to date.
$(VENV)/install.stamp: $(VENV)/requirements.stamp setup.py pyproject.toml
	$(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	touch $@

build: $(VENV)/install.stamp
	$(PY) setup.py --quiet build_ext --inplace

# In the order of the folders, which end with short files. xdist would end with the files of few and long tests, and
# leave a worker without work. Three workers for 2 cores, since many tests wait.
PYTEST := $(PY) -m pytest -n 3 --dist loadfile --no-loadscope-reorder

check: build
	$(PYTEST) -m "not deadline and not slow and not gpu" $(PYTEST_FLAGS)

test: build
	@if test -f tests/gpu/receipt.py; then $(PY) tests/gpu/receipt.py --check || true; fi
	$(PYTEST) $(PYTEST_FLAGS)

# The newest Megatron-core needs Python 3.12, and is installed beside a PyTorch that is not for CPUs only: 5 GB.
$(MEGATRON)/install.stamp: requirements/megatron.txt requirements/constraints.txt setup.py pyproject.toml
	test -x $(MEGATRON)/bin/python || python3.12 -m venv $(MEGATRON)
	$(MEGATRON)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/megatron.txt
	EP_PLUGIN_BUILD_CUDA=0 $(MEGATRON)/bin/python -m pip install --quiet --disable-pip-version-check \
		--no-build-isolation --no-deps -e .
	touch $@

# Each of these versions in turn, as in: make test-megatron MEGATRON_CORE="0.16.1 0.17.1"
MEGATRON_CORE ?= $(shell sed -n 's/^megatron-core==//p' requirements/megatron.txt)
test-megatron: $(MEGATRON)/install.stamp
	EP_PLUGIN_BUILD_CUDA=0 $(MEGATRON)/bin/python setup.py --quiet build_ext --inplace
	set -e; for version in $(MEGATRON_CORE); do \
		$(MEGATRON)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps megatron-core==$$version; \
		$(MEGATRON)/bin/python -m pytest -n 2 -p tests.integrations.megatron_receipt \
			tests/integrations/test_megatron*.py tests/integrations/test_scripts.py tests/integrations/test_switches.py \
			tests/integrations/test_fallback.py tests/examples/test_examples.py -k megatron; \
	done

# TRL, PEFT, datasets and DeepSpeed, 300 MB, and the packages of .venv as they are. pip says that torchtitan asks for other datasets.
PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
$(HUGGINGFACE)/install.stamp: requirements/huggingface.txt requirements/constraints.txt $(VENV)/install.stamp
	test -x $(HUGGINGFACE)/bin/python || $(PY) -m venv $(HUGGINGFACE)
	echo "import site; site.addsitedir('$$($(PY) $(PURELIB))')" > "$$($(HUGGINGFACE)/bin/python $(PURELIB))/beside.pth"
	$(HUGGINGFACE)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/huggingface.txt
	touch $@

test-huggingface: build $(HUGGINGFACE)/install.stamp
	$(HUGGINGFACE)/bin/python -m pytest tests/huggingface $(PYTEST_FLAGS)

# The oldest supported PyTorch and the newest, each before the packages of .venv. The builds for CUDA are the only ones
# that every index has. They load without a GPU, and share NVIDIA's libraries, which take half of the 5 GB.
NEWEST_TORCH := $(shell sed -n 's/^torch==//p' requirements/torch.txt)
TORCH ?= 2.11.0 $(NEWEST_TORCH)
TORCH_STAMPS = $(TORCH:%=.venv-torch-%/install.stamp)
TORCH_PIP = PIP_CONSTRAINT=requirements/constraints.txt $(PY) -m pip --python $(@D)/bin/python install \
	--quiet --disable-pip-version-check --no-compile --no-deps
.venv-torch-%/install.stamp: requirements/torch.txt requirements/constraints.txt $(VENV)/requirements.stamp
	test -x $(@D)/bin/python || $(PY) -m venv --without-pip $(@D)
	echo "import site; site.addsitedir('$$($(PY) $(PURELIB))')" > "$$($(@D)/bin/python $(PURELIB))/beside.pth"
	if test $* = $(NEWEST_TORCH); then $(TORCH_PIP) -r requirements/torch.txt; else \
		ln -sfn "$$(.venv-torch-$(NEWEST_TORCH)/bin/python $(PURELIB))/nvidia" "$$($(@D)/bin/python $(PURELIB))/nvidia"; \
		$(TORCH_PIP) torch==$*; fi
	touch $@
$(filter-out %-$(NEWEST_TORCH)/install.stamp,$(TORCH_STAMPS)): .venv-torch-$(NEWEST_TORCH)/install.stamp

torches: $(TORCH_STAMPS)

# Each of these versions in turn, as in: make test-pytorch TORCH="2.14.1 2.15.0"
test-pytorch: build torches
	set -e; for version in $(TORCH); do \
		.venv-torch-$$version/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_FLAGS) \
			tests/integrations/test_fsdp2_uses.py tests/integrations/test_fsdp2_one_rank.py \
			tests/integrations/test_fsdp2_in_place.py tests/integrations/test_token_switch.py \
			tests/transport/test_rails.py tests/moe/test_autograd.py tests/moe/test_known_calls.py \
			tests/collectives/test_modes.py; \
	done

demo: build
	$(PY) -m examples.compare qwen3_moe --ranks 4 --out runs/demo $(DEMO_FLAGS)

lint: venv docs
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror $(CSRC)
	$(PY) -m mypy
	PYTHONPATH=. $(VENV)/bin/lint-imports

docs: venv
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

format: venv
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(CSRC)

mutate: build
	$(PY) tests/mutation/mutate.py

gpu: venv
	PYTHON=$(CURDIR)/$(PY) bash scripts/gpu.sh

wheel: venv
	scripts/wheels.sh

clean:
	rm -rf $(VENV) $(MEGATRON) $(HUGGINGFACE) .venv-torch-* build dist runs *.egg-info ep_plugin/_C.*.so .mypy_cache .pytest_cache .ruff_cache
	find ep_plugin integrations examples tests -name __pycache__ -prune -exec rm -rf {} +
