# Short names for scripts/ and CMake's presets, which do the work and can be used directly.
.DEFAULT_GOAL := help
PREFIX ?= /usr/local
SHELL := /bin/bash

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

configure:
	@scripts/setup
	@scripts/build --configure

demo: configure ## install what is missing, build, train the digits twice, compare
	@scripts/build product
	@scripts/demo

build: configure ## build everything into build/
	@scripts/build release

test: build ## build and run the tests (check-all adds those that take long)
	@scripts/run-tests release --require multiproc

fault-test: build ## inject faults into jobs of the launcher; docs/reliability.md has the figures
	@scripts/run-tests release -L fault
	@scripts/fault-test

bench: configure ## build and run the benchmarks
	@scripts/build bench
	@scripts/bench

bench-short: configure ## build the benchmarks, and a smoke run of each
	@scripts/build bench
	@scripts/bench --short

format: ## format the sources with clang-format
	@scripts/format

lint: ## check format, and run clang-tidy on the libraries that do not use libtorch
	@scripts/setup --dev
	@scripts/format --check
	@scripts/tidy tidy-fast

check-all: ## what must pass before a release: lint, tests, sanitizers, clang-tidy on everything
	@scripts/check-all

install: configure ## install to PREFIX (default /usr/local)
	@scripts/build product
	@cmake --install build --prefix $(PREFIX)

docs: ## build the documentation as one site, with search, into build-docs/site
	@command -v doxygen >/dev/null || scripts/setup --dev
	@scripts/docs

clean: ## remove build folders (not .venv)
	rm -rf build build-*

.PHONY: help configure demo build test fault-test bench bench-short format lint check-all install docs clean
