# Everything a newcomer and CI need. Nothing but Python 3.11, Java 17 and make has to be there before.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.synced
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help sync fmt check test demo up audit bench bench-steps bench-jit chaos broker sbom pip-audit secure-test scale-test chart chart-test images kafka-image container-test clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

sync: $(STAMP) ## create .venv and install the pinned dependencies and joinmesh itself (only when something changed)

$(STAMP): requirements.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "joinmesh needs Python 3.11 and no $(PYTHON) is on the PATH; install it (Debian: apt install python3.11 python3.11-venv) or say make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "joinmesh needs Python 3.11, but $(PYTHON) is $$($(PYTHON) -V); say make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) cannot create a virtual environment; install its venv module (Debian: apt install python3.11-venv)" >&2; rm -rf $(VENV); exit 1; }
	@echo "installing the pinned dependencies into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

fmt: sync ## format, tidy imports and mend what ruff can mend by itself
	$(BIN)/ruff format schemas topology services tests
	$(BIN)/ruff check --fix schemas topology services tests

check: sync ## ruff (rules and format) and mypy --strict
	$(BIN)/ruff format --check schemas topology services tests
	$(BIN)/ruff check schemas topology services tests
	$(BIN)/mypy

test: sync ## all tests, on a real broker (JOINMESH_TEST_BOOTSTRAP, Docker, or one started for it)
	$(BIN)/python -m pytest $(ARGS)

demo: sync ## a small shop end to end: broker, events, join, audit (ARGS="--events 600000")
	$(BIN)/joinmesh demo $(ARGS)

up: sync ## run the mesh of MESH=mesh.yaml in the foreground
	$(BIN)/joinmesh up -f $(or $(MESH),mesh.yaml) $(ARGS)

audit: sync ## audit the mesh of MESH=mesh.yaml with Spark
	$(BIN)/joinmesh audit -f $(or $(MESH),mesh.yaml) $(ARGS)

bench: sync ## throughput, CPU, latency and memory, beside a hand-written join
	$(BIN)/python -m tests.benchmarks $(ARGS)

bench-steps: sync ## CPU of small steps: a node's, the sink's, ingest's, one with many values suspended (ARGS="--before DIR": beside another checkout)
	$(BIN)/python -m tests.benchmarks.steps $(ARGS)

bench-jit: sync ## the experiments of the JIT paper with feedback off and on; tables and plots in docs/benchmarks (about half an hour; ARGS=--quick: a minute)
	$(BIN)/python -m tests.benchmarks.jit $(ARGS)

chaos: sync ## the long fault runs, each audited: kills, points of the step, broker, pauses, workers, lost volumes, full disks (about an hour)
	$(BIN)/joinmesh chaos --seed 1 --events 300000 --rate 1400 --faults kill:50
	for point in before_batch after_batch after_send after_trim; do $(BIN)/joinmesh chaos --seed 2 --events 60000 --rate 600 --faults none --failpoints node.$$point:9 || exit 1; done
	$(BIN)/joinmesh chaos --seed 3 --events 60000 --rate 600 --faults none --failpoints ingest.before_send:9,sink.before_send:9
	$(BIN)/joinmesh chaos --seed 3 --events 60000 --rate 600 --faults none --failpoints ingest.after_send:9,sink.after_send:9
	$(BIN)/joinmesh chaos --seed 3 --events 60000 --rate 600 --faults none --failpoints ingest.before_commit:3,sink.before_commit:9
	$(BIN)/joinmesh chaos --seed 3 --events 60000 --rate 600 --faults none --failpoints ingest.after_commit:3,sink.after_commit:9
	$(BIN)/joinmesh chaos --seed 4 --events 140000 --rate 500 --faults broker-kill:5,broker-restart:5
	$(BIN)/joinmesh chaos --seed 5 --events 100000 --rate 400 --faults pause:10
	$(BIN)/joinmesh chaos --seed 6 --events 60000 --rate 400 --faults workers:5,wipe:3
	$(BIN)/joinmesh chaos --seed 7 --events 60000 --rate 600 --faults disk-full:3
	$(BIN)/joinmesh chaos --seed 8 --events 60000 --rate 600 --faults kill:20,wipe:3,broker-kill:1 --feedback on
	$(BIN)/joinmesh chaos --seed 9 --events 60000 --rate 600 --faults kill:20,workers:2,pause:2 --feedback auto

sbom: sync ## the bill of materials of what runs (CycloneDX JSON) into dist/
	@$(BIN)/python -m tests.supply.sbom dist

pip-audit: sync ## look up every package of the lock for known vulnerabilities (needs the advisory service; ARGS="-s osv")
	@$(BIN)/python -m tests.supply.advisories $(ARGS)

secure-test: sync ## the demo and fault runs on a broker with TLS, one password a service, and ACLs, each audited (about ten minutes)
	$(BIN)/python -m pytest tests/services/test_security.py tests/integration/test_secured.py
	$(BIN)/joinmesh demo --secure --dir .joinmesh/demo-secure
	$(BIN)/joinmesh chaos --secure --seed 1 --events 60000 --rate 800 --faults kill:12,broker-restart:1,wipe:1,workers:1
	$(BIN)/joinmesh chaos --secure --seed 8 --events 40000 --rate 600 --faults kill:8,broker-kill:1,migrate:2 --feedback on

scale-test: sync ## 2 million events with 3 workers a node, 2 of ingest and sink: rolling restart of everything, audited; then 1 to 4 workers and back, and a drain
	$(BIN)/python -m tests.benchmarks.scale rolling
	$(BIN)/python -m tests.benchmarks.scale scale --events 600000
	$(BIN)/python -m tests.benchmarks.scale drain --events 600000

chart: sync ## write the generated files of helm/joinmesh anew: values.yaml, its schema, the README's table, the dashboard
	$(BIN)/python -m services.chart

chart-test: sync ## install, upgrade, roll back and uninstall the chart on a real API server (needs Go; builds it the first time, 10 minutes or so)
	$(BIN)/python -m tests.cluster $(ARGS)

images: ## build the images joinmesh and joinmesh-spark with docker or podman (BASE=your/base; docs/images.md)
	helm/containers/build

kafka-image: sync images ## the image joinmesh-kafka, from the local broker's jars; then JOINMESH_TEST_KAFKA_IMAGE=joinmesh-kafka make test
	tests/containers/kafka/build $(BIN)/python

container-test: sync images ## the chart's pods as containers: 100,000 events, every pod killed, audited; plain and with TLS, SCRAM, ACLs (4 to 9 minutes)
	$(BIN)/python -m pytest tests/containers -s $(ARGS)

broker: sync ## a Kafka broker on localhost:9092 (stop it: .venv/bin/joinmesh broker down)
	$(BIN)/joinmesh broker up $(ARGS)

clean: ## remove .venv, caches and local state (stops the local broker and the demo's first)
	@for dir in .joinmesh/broker .joinmesh/demo/broker; do if [ -x $(BIN)/joinmesh ] && [ -d $$dir ]; then $(BIN)/joinmesh broker down --dir $$dir; fi; done
	rm -rf $(VENV) .joinmesh .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build spark-warehouse metastore_db derby.log
	find schemas topology services tests -name __pycache__ -type d -prune -exec rm -rf {} +
