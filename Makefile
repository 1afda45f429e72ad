# make demo   train, export, build and measure an FP16 and an NVFP4 UNet on generated data, and print the table;
#             a smaller one: make demo DEMO="--epochs 2 --size 64"
# make test   formatting, lint, types, layers, sizes (make check) and, beside them, tests: of long lists a sample
# make emulate   the whole lists, and long runs; kernels in the PTX emulator, with planted faults, and for every architecture
# make headers   headers of ONNX Runtime and TensorRT from packages that have them, in build/headers: tests compile the C++ examples
# make libraries   tests that skip without headers (make headers) or without libraries of networks, ModelOpt, Ray or trackers, which fail here
# make gpu-log   on a machine with an NVIDIA GPU: the GPU tests, and their log in benchmarks/logs, which a release keeps
# make nightly   what takes installations, compilers or minutes: pins, macros, machine code, engines, torch.compile
# make fuzz   every reader of files on tens of thousands of mutated files, and a table of the outcomes
# make mutants   faults that are known, and mistakes that are drawn: does a test notice? hours of CPU
# make release   what a release publishes, built twice and installed, with SBOM, in dist/; make rehearsal: of any commit
# make docs   the documentation site, in site/
# Each makes its own virtual environment in .venv from nothing.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# pip would compile 16,000 modules on one core.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true

.PHONY: demo test check pytest emulate headers libraries gpu-log nightly fuzz mutants release rehearsal docs \
	install install-dev install-docs clean

demo: install
	$(BIN)/fp4deploy run --demo $(DEMO)

test: install-dev
	$(MAKE) --jobs 2 check pytest

check: install-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pytest --quiet --noconftest -m nightly tests/docs/test_python.py  # mypy, of the package and of the pages
	-$(BIN)/python tools/size.py

pytest: install-dev
	MAKEFLAGS= PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile -m "not (emulate or variants or nightly)"

emulate: install-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "emulate or variants"

LIBRARY_TESTS := tests/models tests/cli/test_quantize_networks.py tests/benchmarks/test_architectures.py \
	tests/benchmarks/test_transformers_table.py \
	tests/interop/test_modelopt.py tests/interop/test_nnunet*.py tests/native/test_examples.py tests/experiments/test_sweep_cluster.py tests/train/test_trackers.py

libraries: install-dev headers
	$(INSTALL) --editable '.[zoo,nnunet,modelopt,distributed,tensorboard,wandb,mlflow,transformers,diffusers]'
	FP4DEPLOY_NEED_LIBRARIES=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile $(LIBRARY_TESTS)

GPU_LOG = benchmarks/logs/gpu-tests-$$($(BIN)/fp4deploy --version | cut -d ' ' -f 2).log

gpu-log: install-dev
	mkdir -p benchmarks/logs
	{ git log -1 --format='%H %cs' && git status --short --untracked-files=no && date -u +%FT%TZ && $(BIN)/fp4deploy doctor \
		&& $(BIN)/pytest -m gpu -rfEs; } > $(GPU_LOG) 2>&1; status=$$?; tail -n 3 $(GPU_LOG); exit $$status

nightly: install-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile -m nightly

fuzz: install-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --jobs 2

mutants: install-dev
	$(INSTALL) --editable '.[mutation]'
	$(BIN)/python -m tests.mutation.seeded --jobs 2
	-for set in FIRST SECOND THIRD FOURTH FIFTH SIXTH SEVENTH EIGHTH NINTH TENTH ELEVENTH TWELFTH THIRTEENTH FOURTEENTH FIFTEENTH; do $(BIN)/python -m tests.mutation.unseen --set $$set --jobs 2; done
	$(BIN)/python -m tests.mutation.reached build/reached
	$(BIN)/python -m tests.mutation.rooms build/reached --count 200 --seed $$(date +%j) --jobs 2

release rehearsal: install-dev
	$(INSTALL) --editable '.[release]'
	$(BIN)/python tools/release.py $(if $(filter rehearsal,$@),--rehearse)

docs: install-docs
	$(BIN)/mkdocs build --strict

install: $(VENV)/.installed

install-dev: $(VENV)/.installed-dev

install-docs: $(VENV)/.installed-docs

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	$(INSTALL) --editable '.[rtx]'
	$(COMPILE)
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed tools/emulator/pyproject.toml
	$(INSTALL) --editable '.[rtx,dev,docs,examples,medical]' --editable ./tools/emulator
	$(COMPILE)
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(INSTALL) --editable '.[rtx,docs]'
	touch $@

# The wheels of ONNX Runtime and TensorRT have libraries alone. These two packages have the headers, of any version whose C
# interface the libraries keep: a package of ONNX Runtime for Unity, 150 MB, and one of plugins for TensorRT.
headers: build/headers/onnxruntime build/headers/tensorrt

build/headers/onnxruntime:
	mkdir -p $@.part
	cd $@.part && npm pack --silent com.github.asus4.onnxruntime@0.4.9 && tar -xzf *.tgz --wildcards --no-anchored \
		--transform='s|.*/||' 'ios-arm64/onnxruntime.framework/Headers/*.h' && rm *.tgz
	mv $@.part $@

build/headers/tensorrt:
	$(PYTHON) -m pip install --quiet --no-deps --target $@.part kernel-lens==2.0.1
	mv $@.part/kernel_lens/include/tensorrt $@
	rm -r $@.part

clean:
	rm -rf $(VENV) build dist site *.egg-info tools/*/build tools/*/*.egg-info .mypy_cache .pytest_cache .ruff_cache
