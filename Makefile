# Everything runs in a virtual environment of the checkout, made on first use (about 10 GB: SGLang
# brings its own torch). To use an environment you have: make test VENV=/path/to/venv.
PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
DEMO_ARGS ?=

.PHONY: test demo kernels fuzz clean

test: $(VENV)/.kdtree-installed
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

demo: $(VENV)/.kdtree-installed
	$(VENV)/bin/kdtree-sglang demo $(DEMO_ARGS)

# A million damaged KDTR files for each reader; for the C++ one under the sanitizers.
fuzz: $(VENV)/.kdtree-installed
	mkdir -p build
	$(CXX) -std=c++17 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all \
		-Icsrc/include csrc/tests/kdtr_fuzz.cpp -o build/kdtr_fuzz
	build/kdtr_fuzz 1000000
	$(VENV)/bin/python tests/kdtr/fuzz_python.py 1000000

# The CUDA ops for Hopper and for consumer Blackwell; needs nvcc, no GPU.
kernels: $(VENV)/.kdtree-installed
	$(VENV)/bin/kdtree-sglang build --cuda-archs 90a,120 --dest build/kernels

$(VENV)/.kdtree-installed: pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@

clean:
	rm -rf .venv build
