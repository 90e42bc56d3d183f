# Everything runs in a virtual environment of the checkout, made on first use (about 10 GB: SGLang
# brings its own torch). To use an environment you have: make test VENV=/path/to/venv.
PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
DEMO_ARGS ?=
BUILD ?= build
NVCC ?= nvcc
CUDA_ARCHS ?= 90a 120

.PHONY: test demo kernels kernel-tests mutants fuzz clean

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

# The ops against their references without torch: on the CPU, and on the GPU if there is one.
SUITE_CASES := $(BUILD)/suite
SUITE_SOURCES := csrc/tests/kernel_suite.h $(wildcard csrc/include/kdtree/*)

kernel-tests: $(VENV)/.kdtree-installed $(BUILD)/kernel_suite_cpu
	rm -rf $(SUITE_CASES)
	$(VENV)/bin/python tests/suite/suite_cases.py $(SUITE_CASES)
	$(BUILD)/kernel_suite_cpu $(SUITE_CASES)/*.kdtr
	@if command -v $(NVCC) >/dev/null; then \
		$(MAKE) $(BUILD)/kernel_suite_cuda && \
		{ $(BUILD)/kernel_suite_cuda $(SUITE_CASES)/*.kdtr || [ $$? -eq 77 ]; }; \
	else \
		echo "no $(NVCC): the CUDA kernels were neither built nor run"; \
	fi

$(BUILD)/kernel_suite_cpu: csrc/tests/kernel_suite.cpp $(SUITE_SOURCES)
	mkdir -p $(@D)
	$(CXX) -std=c++17 -O2 -Wall -ffp-contract=off $(CXXFLAGS) -Icsrc/include $< -o $@

$(BUILD)/kernel_suite_cuda: csrc/tests/kernel_suite.cu $(SUITE_SOURCES)
	mkdir -p $(@D)
	$(NVCC) -std=c++17 -O3 -fmad=false -Icsrc/include \
		$(foreach arch,$(CUDA_ARCHS),-gencode=arch=compute_$(arch),code=sm_$(arch)) $< -o $@

# Small faults in copies of the kernels and references, each of which a suite must notice.
mutants: $(VENV)/.kdtree-installed
	$(VENV)/bin/python tests/mutants/mutants.py

$(VENV)/.kdtree-installed: pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@

clean:
	rm -rf .venv build
