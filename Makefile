# Faceoff. `make help` lists the commands; DESIGN and method: docs/.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PROFILE ?= sim
ARMS ?=
USERS ?=
PLAN ?= smoke
RUN ?= latest
# The rest is passed on only where it is given.
WORKLOADS ?=
REPEATS ?=
SESSIONS ?=
SEED ?=
MODEL ?=
CORPUS ?=
SLO ?=
MIX ?=
MARGIN ?=
DRY_RUN ?=
PROXY ?=
SWAP ?=
PARALLEL_ARMS ?=
PYTHON ?= python3
PY := .venv/bin/python
STAMP := $(shell date -u +%Y%m%dT%H%M%SZ)

# A switch that is said to be off is off.
OFF := 0 n N no No NO off Off OFF false False FALSE
override DRY_RUN := $(filter-out $(OFF),$(DRY_RUN))
override PROXY := $(filter-out $(OFF),$(PROXY))
override SWAP := $(filter-out $(OFF),$(SWAP))
override PARALLEL_ARMS := $(filter-out $(OFF),$(PARALLEL_ARMS))

# Everything that a make variable says reaches the shell through the environment, never as shell text.
export PROFILE ARMS USERS PLAN RUN WORKLOADS REPEATS SESSIONS SEED MODEL CORPUS DRY_RUN PROXY SWAP PARALLEL_ARMS SLO MIX MARGIN

.PHONY: help
help: ## list the commands
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	echo
	echo '  e.g. make load USERS=16'
	echo '       make load USERS=16 ARMS="a=http://127.0.0.1:8001 b=http://127.0.0.1:8002"'
	echo '       make load USERS=16 PROXY=1     a LiteLLM proxy over the arms as one more arm'
	echo '       make load USERS=16 SWAP=1      every arm on every device (docs/servers.md)'

# -- set-up ---------------------------------------------------------------------------------------------

.venv/.installed: requirements.lock pyproject.toml
	@if [ ! -x $(PY) ]; then
	    echo 'Setting up .venv (once, about half a minute) …' >&2
	    $(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Faceoff needs Python 3.11 or newer: pass PYTHON=/path/to/python3.11")'
	    $(PYTHON) -m venv .venv
	fi
	.venv/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	# The project itself: a path entry is all that an editable install would come to, and needs no build tools.
	$(PY) -c 'import os, pathlib, site; pathlib.Path(site.getsitepackages()[0], "faceoff.pth").write_text(os.getcwd() + "\n")'
	touch $@

.venv/.dev: requirements-dev.lock .venv/.installed
	@echo 'Installing the development tools …' >&2
	.venv/bin/pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.lock
	touch $@

# -- the main job ---------------------------------------------------------------------------------------

judging = $${SLO:+--slo "$$SLO"} $${MIX:+--mix "$$MIX"} $${MARGIN:+--margin "$$MARGIN"}
judge = $(PY) -m reports build $(judging)

# Run $PLAN against running (URLs in ARMS) or freshly started arms, then judge it.
define sweep
	PLAN=$${PLAN:-smoke}
	out="results/$(STAMP)-$$(basename "$$PLAN" .toml)"
	knobs=(--plan "$$PLAN" --users "$$USERS" --workloads "$$WORKLOADS" --repeats "$$REPEATS")
	knobs+=(--sessions "$$SESSIONS" --seed "$$SEED" --model "$$MODEL" --corpus "$$CORPUS")
	knobs+=($${SWAP:+--swap} $${PARALLEL_ARMS:+--parallel-arms} $${DRY_RUN:+--dry-run})
	# What can be wrong without a server is said before servers start.
	$(PY) -m locustfiles.sweep "$${knobs[@]}" --check
	$(PY) -m reports check $(judging)
	case "$${PROXY:+proxy }$$ARMS" in
	    "proxy "*://*) start=(bash servers/proxy.sh "$$ARMS" --) ;;
	    "proxy "*) start=(bash servers/proxy.sh "$$PROFILE" "$$ARMS" --) ;;
	    *://*) start=(env "FACEOFF_ARMS=$$ARMS") ;;
	    *) start=(bash servers/with_arms.sh "$$PROFILE" "$$ARMS" --) ;;
	esac
	# PROXY=1: a LiteLLM proxy over the arms is measured as one more; PROXY="proxy affinity": these proxies.
	case "$$PROXY" in 1 | yes) PROXY=proxy ;; esac
	export FACEOFF_PROXIES=$$PROXY
	code=0
	"$${start[@]}" $(PY) -m locustfiles.sweep "$${knobs[@]}" --out "$$out" || code=$$?
	if [ -e "$$out/manifest.json" ]; then
	    $(judge) "$$out" || { [ "$$code" -ne 0 ] || code=1; }
	fi
	exit "$$code"
endef

.PHONY: load
load: override PLAN = load
load: .venv/.installed ## the main job: three workloads against every arm, three times, and the verdict (USERS=16)
	@# A profile may be too slow for 16 users (real vLLM on the CPU): it then has its own default.
	if [ -z "$$USERS" ]; then USERS=$$(cat "servers/profiles/$$PROFILE/default.users" 2>/dev/null || echo 16); fi
	$(sweep)

.PHONY: compare
compare: .venv/.installed ## a whole plan: PLAN=smoke|seed|nightly|small_pool|path.toml (DRY_RUN=1 lists its cells)
	@$(sweep)

.PHONY: report
report: .venv/.installed ## judge and render a run again, from its files alone: RUN=latest
	@$(judge) "$${RUN:-latest}"

# -- servers --------------------------------------------------------------------------------------------

.PHONY: servers
servers: .venv/.installed ## bring a profile's arms up and leave them up (PROFILE= ARMS=)
	@# shellcheck disable=SC2086
	bash servers/up.sh "$$PROFILE" $$ARMS

.PHONY: stop
stop: ## stop them
	@bash servers/down.sh "$$PROFILE" $$ARMS

.PHONY: status
status: ## show them, one line per arm
	@bash servers/status.sh "$$PROFILE"

.PHONY: selftest
selftest: .venv/.installed ## measure this load generator; writes the certificate that runs carry
	@$(PY) -m locustfiles.selftest

.PHONY: ui
ui: .venv/.installed ## Locust's web UI on 127.0.0.1:8089, against one running arm (HOST=http://127.0.0.1:8101)
	@exec .venv/bin/locust -f locustfiles/single_turn.py,locustfiles/shared_prefix.py,locustfiles/multi_turn.py \
	    --class-picker --web-host 127.0.0.1 --host "$${HOST:-http://127.0.0.1:8101}"

# -- development ----------------------------------------------------------------------------------------

.PHONY: lint
lint: .venv/.dev ## ruff, mypy, shellcheck
	@.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	git ls-files '*.sh' .ci/run | xargs .venv/bin/shellcheck -x

.PHONY: test
test: .venv/.dev ## everything that needs no GPU, no browser and no vLLM
	@.venv/bin/pytest -m 'not vllm and not ui'

.PHONY: bench
bench: .venv/.dev ## what measuring costs and how wrong it is, beside plain Locust; the simulator's speed
	@$(PY) -m tests.bench
	$(PY) -m servers.sim.bench

.PHONY: test-vllm
test-vllm: .venv/.dev ## real vLLM on the CPU (installs it once: minutes, 2.5 GB)
	@bash servers/setup_cpu.sh
	.venv/bin/pytest -m vllm tests/real
