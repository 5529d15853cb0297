# Two commands: `make demo` builds everything and makes a video, `make test` builds everything and runs the suite.
# Both need Python >= 3.11, a C++17 compiler and access to a Python package index; everything else goes into .venv.

PYTHON ?= python3
VENV   := .venv
BUILD  := build/make
BIN    := $(VENV)/bin
SOURCES := $(shell find CMakeLists.txt pyproject.toml native sdsage -type f -not -path '*/__pycache__/*' -not -path 'sdsage/_lib/*')
# Whatever a test may look at.
TESTED := $(shell find Makefile *.md .ci tests examples docs benchmarks tools licenses -type f -not -path '*/__pycache__/*')

export PATH := $(CURDIR)/$(BIN):$(PATH)
# The wheel is built in the folder that plain CMake builds in, with the tools of the environment: nothing compiles twice.
INSTALL := pip install --quiet --disable-pip-version-check --no-build-isolation -C build-dir=$(BUILD)
CONFIGURE := cmake -S . -B $(BUILD) -G Ninja -DSD_CUDA=OFF -DSD_USE_UPSTREAM_GGML=OFF

# The CUDA compiler of the machine, else NVIDIA's wheels: installed here when they are needed, joined to a toolkit in build/cuda.
CUDA_TOOLKIT := python native/cmake/cuda_toolkit.py
GET_CUDA := $(CUDA_TOOLKIT) --system > /dev/null || pip install --quiet --disable-pip-version-check --group cuda-build
GET_CUBLAS := $(CUDA_TOOLKIT) --system --cublas > /dev/null || pip install --quiet --disable-pip-version-check --group cuda-engine
WITH_NVCC := nvcc=$$($(CUDA_TOOLKIT) --into build/cuda) && CUDACXX=$$nvcc

.PHONY: demo test retest test-slow test-matrix test-windows test-browser tiny-quality soak lint types format native kernels kernels-all cuda-glue bump-check wheel wheel-cpu wheel-cuda test-wheel test-sdist docs clean

demo: $(VENV)/installed
	sdsage vid-gen --preset tiny -p "a red circle moves to the right" -o demo.mp4 --overwrite

test: lint native kernels cuda-glue types build/tests-passed
	@echo "test: passed with these files; make retest runs every test again"

# Tests that have passed run again when a file has changed.
build/tests-passed: $(SOURCES) $(TESTED) $(VENV)/dev $(VENV)/installed | native kernels cuda-glue
	SAGE_CUDA_LIB=build/kernels/libsage_cuda.so pytest -n auto --dist worksteal -m "not slow and not gpu"
	SAGE_CUDA_LIB=build/kernels/libsage_cuda.so pytest -q -m gpu -r fE
	touch $@

retest:
	rm -f build/tests-passed
	$(MAKE) test

# What a quick run leaves out: a second engine with the sizes edits alone (about 5 minutes), and many more examples.
test-slow: $(VENV)/dev native $(VENV)/installed
	pytest -m slow
	pytest -n auto -m hypothesis --hypothesis-profile=thorough

# The engine for Windows, by mingw-w64, under Wine: Debian's g++-mingw-w64-x86-64-posix and wine64. The first build takes 10 minutes.
test-windows: $(VENV)/dev $(VENV)/installed
	cmake --preset mingw > build/mingw-configure.log 2>&1 || (cat build/mingw-configure.log; exit 1)
	cmake --build --preset mingw
	SDSAGE_WINDOWS_BUILD=build/mingw pytest tests/test_windows.py -s -r fE

# The contact sheet of a batch in headless Chromium (Debian's chromium); photographs in build/browser.
test-browser: $(VENV)/dev $(VENV)/installed
	SDSAGE_SCREENSHOTS=$(CURDIR)/build/browser pytest tests/test_browser.py -s -r fEs

# 200 captions that the tiny model was not trained on, with plain attention and with SageAttention's arithmetic on the CPU: 400 clips of
# 10 to 20 s of processor time. Writes benchmarks/results/tiny_model.json, and the table and contact sheet of docs/tiny-model.md.
tiny-quality: $(VENV)/dev $(VENV)/installed native
	SDSAGE_LIB_DIR=$(CURDIR)/$(BUILD)/test-lib python -m tools.tiny_model.quality cpu

# 100 kills over 1,000 jobs of a batch, and what a job costs; the figures go to benchmarks/results/soak.json.
soak: $(VENV)/dev $(VENV)/installed
	python tests/batch_soak.py

# What compiles with which CUDA toolkit and which host compiler: docs/builds.md. Hours on two cores and 13 GB the first time; goes on
# where it was interrupted. PARTS="nvrtc host" runs a part of it and writes nothing.
test-matrix: $(VENV)/dev
	python tools/matrix $(PARTS)

lint: $(VENV)/dev
	ruff format --check .
	ruff check .
	clang-format --dry-run --Werror $(shell find native examples -name '*.[ch]' -o -name '*.[ch]pp' -o -name '*.inl' -o -name '*.cu' -o -name '*.cuh')

# Needs the package's own dependencies. As it is here, and as it would be on Windows: nothing that only POSIX has.
types: $(VENV)/dev $(VENV)/installed
	mypy
	mypy --platform win32 --cache-dir .mypy_cache/win32

format: $(VENV)/dev
	ruff format .
	ruff check --fix .
	clang-format -i $(shell find native examples -name '*.[ch]' -o -name '*.[ch]pp' -o -name '*.inl' -o -name '*.cu' -o -name '*.cuh')

# The engine by CMake alone, as somebody without Python packaging would build it, and an installed tree for the C example.
native: $(VENV)/build-tools
	$(CONFIGURE) -DSDSAGE_TESTS=ON > $(BUILD)-configure.log || (cat $(BUILD)-configure.log; exit 1)
	cmake --build $(BUILD) --config Release
	cmake --install $(BUILD) --prefix build/prefix > /dev/null

# The CUDA kernels for two of their architectures.
kernels: build/kernels/build.ninja
	cmake --build build/kernels

# Configured once: Ninja does it again when a file that counts has changed.
build/kernels/build.ninja: | $(VENV)/build-tools
	@$(GET_CUDA)
	@$(WITH_NVCC) cmake -S native/sage_cuda -B build/kernels -G Ninja -DSAGE_CUDA_SHARED=ON "-DCMAKE_CUDA_ARCHITECTURES=89;90a"

# Every documented architecture, as for `SAGE_CUDA_LIB=build/kernels-all/libsage_cuda.so pytest tests/sage/test_sass.py`.
kernels-all: $(VENV)/build-tools
	@$(GET_CUDA)
	@$(WITH_NVCC) cmake -S native/sage_cuda -B build/kernels-all -G Ninja -DSAGE_CUDA_SHARED=ON
	cmake --build build/kernels-all

# Configures the CUDA engine and compiles what we add for CUDA; the rest of ggml-cuda takes an hour on two cores.
cuda-glue: build/cuda-glue/build.ninja
	ninja -C build/cuda-glue $$(ninja -C build/cuda-glue -t targets all | sed -nE 's/^(.*\/((ggml-cuda|sage_node|levers|linear|conv|conv_node)\.cu|(attention_run|coverage)\.cpp)\.o):.*/\1/p')

build/cuda-glue/build.ninja: | $(VENV)/build-tools
	@$(GET_CUBLAS)
	cmake -S . -B build/cuda-glue -G Ninja -DSD_CUDA=ON -DSD_USE_UPSTREAM_GGML=OFF -DSDSAGE_CUDA_ARCHS=90a > build/cuda-glue.log 2>&1 || \
	    (cat build/cuda-glue.log; exit 1)

# How our edits fit another upstream: make bump-check UPSTREAM=stable_diffusion_cpp_python-0.4.8.tar.gz (or a checkout).
bump-check:
	@test -n "$(UPSTREAM)" || (echo "make bump-check UPSTREAM=...: a source package, or a checkout of stable-diffusion.cpp"; exit 2)
	$(PYTHON) native/ggml-patched/bump_check.py "$(UPSTREAM)"

# The wheels that travel, with SHA256SUMS and manifest.json in dist/ (docs/wheels.md). The one for CUDA has every architecture
# unless SDSAGE_CUDA_ARCHS names some. WHEEL_OPTIONS=--dirty builds with files that are not committed.
wheel: $(VENV)/wheel-tools
	@$(GET_CUBLAS)
	python tools/make_wheels.py $(WHEEL_OPTIONS) cpu cuda

wheel-cpu: $(VENV)/wheel-tools
	python tools/make_wheels.py $(WHEEL_OPTIONS) cpu

wheel-cuda: $(VENV)/wheel-tools
	@$(GET_CUBLAS)
	python tools/make_wheels.py $(WHEEL_OPTIONS) cuda

# Installs a wheel into an empty virtual environment and runs the tests there: make test-wheel WHEEL=dist/....whl
test-wheel:
	@test -n "$(WHEEL)" || (echo "make test-wheel WHEEL=...: a wheel, as make wheel-cpu leaves it in dist/"; exit 2)
	$(PYTHON) tools/try_wheel.py "$(WHEEL)" -n auto --dist worksteal

# The source package builds a wheel where nothing of the checkout is, and that wheel passes the same tests.
test-sdist: $(VENV)/wheel-tools
	rm -rf build/sdist
	python tools/make_wheels.py $(WHEEL_OPTIONS) --into build/sdist sdist
	SDSAGE_NATIVE=OFF pip wheel --quiet --disable-pip-version-check --no-deps -w build/sdist build/sdist/*.tar.gz
	$(PYTHON) tools/try_wheel.py build/sdist/*.whl -n auto --dist worksteal

docs: $(VENV)/installed
	python -m sdsage.cli.docs > docs/cli.md

$(VENV)/build-tools: pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	pip install --quiet --disable-pip-version-check --group build
	mkdir -p build
	touch $@

$(VENV)/dev: $(VENV)/build-tools
	pip install --quiet --disable-pip-version-check --group dev
	touch $@

$(VENV)/wheel-tools: $(VENV)/build-tools
	pip install --quiet --disable-pip-version-check --group wheel
	touch $@

$(VENV)/installed: $(VENV)/build-tools $(SOURCES)
	$(INSTALL) ".[video,hub,plot,batch,ray,storage]"
	touch $@

clean:
	rm -rf build
