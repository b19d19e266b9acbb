# `make help` explains everything. All that is built lies outside of this directory, in ALIGN_HOME.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help align isolate drill nightly doctor env path test lint browser unit integration extended format clean-env

ifndef PYTHON
PYTHON := $(shell command -v python3.11 || command -v python3 || echo python3)
endif

define NEWLINE


endef
# Quotes one value for the shell. $(value NAME) keeps a dollar sign that the user typed.
q = $(if $(findstring $(NEWLINE),$(1)),$(error a value contains a line break: give it on one line),'$(subst ','\'',$(1))')
# Was NAME given: on the command line of make (even empty), or in the environment and not empty?
given = $(if $(filter command,$(firstword $(origin $(1)))),yes,$(if $(filter environment,$(firstword $(origin $(1)))),$(value $(1))))
# NAME=value as an option of the command, or nothing.
option = $(if $(call given,$(1)),$(2)=$(call q,$(value $(1))))

# A variable that was misspelt would be ignored, and the run would be another than the one that was meant.
VARIABLES = MODEL PROMPTS CASE DEVICE DTYPE TP DP EP MIN_TP LAYOUTS MAX_NEW OUT LADDER FA PLAN ARGS
VARIABLES += PYTHON ALIGN_HOME LMDEPLOY_PYTHON VLLM_PYTHON RAY_ADDRESS
TYPED = $(foreach name,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(name)))),$(name)))
UNKNOWN := $(firstword $(filter-out $(VARIABLES) PIP_% SHELL,$(TYPED)))
ifdef UNKNOWN
CLOSEST := import difflib, sys; print(*difflib.get_close_matches(sys.argv[1].upper(), sys.argv[2:], n=1))
MEANT := $(shell $(call q,$(PYTHON)) -c $(call q,$(CLOSEST)) $(call q,$(UNKNOWN)) $(VARIABLES) 2>/dev/null)
$(error there is no variable $(UNKNOWN)$(if $(MEANT),: did you mean $(MEANT)?,.) \
  There are $(VARIABLES); one for the environment goes in front: $(UNKNOWN)=value make)
endif

OPTIONS = $(strip \
  $(call option,MODEL,--model) \
  $(call option,PROMPTS,--prompts) \
  $(call option,CASE,--case) \
  $(call option,DEVICE,--device) \
  $(call option,DTYPE,--dtype) \
  $(call option,TP,--tp) \
  $(call option,DP,--dp) \
  $(call option,EP,--ep) \
  $(call option,MIN_TP,--min-tp) \
  $(call option,LAYOUTS,--layouts) \
  $(call option,MAX_NEW,--max-new-tokens) \
  $(call option,OUT,--out))
# Arguments of attention are recorded unless FA says no.
FA_OFF = $(if $(filter 0 no off false,$(value FA)),--no-fa)
# By itself a ladder starts where a parallel layout diverges.
CLIMB = $(if $(value LADDER),$(if $(filter-out 0 no off false,$(value LADDER)),--ladder,--no-ladder))

NO_PYTHON = there is no $(PYTHON): install Python 3.11 or name one: PYTHON=/path/to/python3.11 make env
BOOTSTRAP = $(if $(shell command -v $(call q,$(PYTHON))),,$(error $(NO_PYTHON)))$(call q,$(PYTHON)) -m envs.bootstrap
# The engines' environments are needed on the simulated device alone.
ENVIRONMENTS = $(if $(filter-out simnpu,$(value DEVICE)),driver,all)
# Sets $driver to the driver's interpreter and puts this checkout on its path.
WITH_DRIVER = driver="$$($(BOOTSTRAP) $(1) --print-python)" && PYTHONPATH=$(call q,$(CURDIR)) && export PYTHONPATH
# -P: the current directory is not searched for modules.
DRIVER = "$$driver" -P -m
TESTS = OMP_NUM_THREADS=1; export OMP_NUM_THREADS; $(WITH_DRIVER)

help:
	@echo 'make align MODEL=qwen3   run lmdeploy and vllm on the same prompts and compare what they generate'
	@echo '                         MODEL    qwen3, smollm2 or the directory of a Hugging Face checkpoint'
	@echo '                         PROMPTS  file.jsonl with text, messages or token_ids in each line'
	@echo '                         CASE     case.json of an earlier run, to repeat it'
	@echo '                         DEVICE   simnpu (simulated NPU, default) or ascend'
	@echo '                         DTYPE    bfloat16 (default) or float16'
	@echo '                         TP DP EP layout;  MAX_NEW tokens to generate;  OUT directory of the run'
	@echo '                         LADDER=1 also simpler layouts, to say which dimension is wrong; LADDER=0 never'
	@echo '                                  (by itself when a parallel layout diverges)'
	@echo '                         FA=0     do not record and check the arguments of attention and cache operators'
	@echo '                         ARGS     anything else for the command, as typed: ARGS="--debug"'
	@echo '                                  ARGS="--patch candidate=fix.py", ARGS="--no-tensors"'
	@echo '                         On Ascend name the interpreters: LMDEPLOY_PYTHON=/path VLLM_PYTHON=/path'
	@echo 'make isolate MODEL=… TP=2 DP= EP=   the same with LADDER=1: TP, DP, EP or none of them introduces it'
	@echo '                         MIN_TP   where it begins (the smallest TP that fits the device)'
	@echo '                         LAYOUTS  any others instead: LAYOUTS="tp1, tp2, tp2 dp2"'
	@echo 'make drill               known faults in real runs, and what is said of each (hours; ARGS=--quick: minutes)'
	@echo 'make nightly             a plan of cases, what is new since the last night; PLAN=plan.toml, ARGS="--fail-on any"'
	@echo 'make test                environments, lint, types, unit and integration tests'
	@echo 'make lint | unit | integration | format'
	@echo 'make browser             as root: Chromium by apt, for the tests of report.html (make test does it)'
	@echo 'make extended            the integration tests that make test leaves out (three hours; a part: ARGS="-k silence")'
	@echo 'make doctor              say what is missing on this machine, and the command that mends it (DEVICE=ascend)'
	@echo 'make env                 build the environments now (align and test do it when needed)'
	@echo 'make path                print the path of the align command of this checkout, for its other commands:'
	@echo '                         runs, resume, replay, reduce, capture (one engine alone), compare (two traces), next,'
	@echo '                         diff, export, taps, report, open, checklist, explain, golden, calibrate, drill,'
	@echo '                         schema, fa, doctor, env'
	@echo 'make clean-env           remove the environments'
	@echo
	@echo 'ALIGN_HOME   where environments and models are kept (default: ~/.cache/align)'
	@echo 'PYTHON       the Python 3.11 that environments are made with'
	@echo
	@echo 'The command answers 0 aligned, 1 diverged, 2 could not compare. make turns every answer but 0 into 2;'
	@echo 'for the exact one:  "$$(make -s path)" run --model qwen3'

align:
	@$(call WITH_DRIVER,$(ENVIRONMENTS)) && $(DRIVER) align run $(OPTIONS) $(CLIMB) $(FA_OFF) $(value ARGS)

isolate:
	@$(call WITH_DRIVER,$(ENVIRONMENTS)) && $(DRIVER) align isolate $(OPTIONS) $(FA_OFF) $(value ARGS)

drill:
	@$(call WITH_DRIVER,$(ENVIRONMENTS)) && $(DRIVER) align drill $(call option,MODEL,--model) \
		$(call option,DEVICE,--device) $(call option,OUT,--out) $(value ARGS)

nightly:
	@$(call WITH_DRIVER,$(ENVIRONMENTS)) && $(DRIVER) align nightly $(if $(call given,PLAN),$(call q,$(value PLAN))) \
		$(call option,DEVICE,--device) $(call option,OUT,--out) $(value ARGS)

doctor:
	@$(call WITH_DRIVER,driver) && $(DRIVER) align doctor $(call option,DEVICE,--device) $(value ARGS)

env:
	@$(BOOTSTRAP) all
	@echo 'The environments are ready; next: make align MODEL=qwen3'

path:
	@$(BOOTSTRAP) driver --print-launcher

lint:
	@$(call WITH_DRIVER,driver) && $(DRIVER) ruff check . && $(DRIVER) ruff format --check . && $(DRIVER) mypy

format:
	@$(call WITH_DRIVER,driver) && $(DRIVER) ruff format . && $(DRIVER) ruff check --fix .

# Tests of report.html need Chromium and its driver; where these cannot be had, they are skipped and say so.
browser:
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then :; \
	elif [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
		echo 'no Chromium here: tests of report.html are skipped; they run after: apt-get install chromium chromium-driver'; \
	else \
		echo 'installing Chromium and its driver, for the tests of report.html'; \
		{ apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends \
			chromium chromium-driver; } >/dev/null || \
		echo 'Chromium could not be installed (apt-get says why, above): tests of report.html are skipped'; \
	fi

unit:
	@$(call TESTS,driver) && $(DRIVER) pytest tests/unit -n auto --dist loadfile $(value ARGS)

integration:
	@$(call TESTS,all) && $(DRIVER) pytest tests/integration -m 'not extended' $(value ARGS)

extended:
	@$(call TESTS,all) && $(DRIVER) pytest tests/integration -m extended $(value ARGS)

# One after the other, also with -j: the machine's cores are shared.
test:
	@$(BOOTSTRAP) all
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory browser
	@$(MAKE) --no-print-directory unit
	@$(MAKE) --no-print-directory integration

clean-env:
	@$(BOOTSTRAP) clean
