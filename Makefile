# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` do everything on a fresh Debian 12+ or Ubuntu 24.04+; see README.md.
.PHONY: help demo test build dev format tidy clean

help:
	@echo 'make demo    install what it needs, build, and try the bundled checkpoint'
	@echo 'make test    install what it needs and run every check; the last line counts them'
	@echo 'make build   build/release: library, command line, example'
	@echo 'make dev     build/dev: the same with tests, warnings are errors'
	@echo 'make format  clang-format-19 over all sources'
	@echo 'make tidy    clang-tidy-19 over the library and the command line'
	@echo 'make clean   remove build/'

demo:
	scripts/install_deps.sh build
	$(MAKE) --no-print-directory build
	scripts/demo.sh

test:
	scripts/install_deps.sh build test
	scripts/test.sh

build:
	cmake --preset release
	cmake --build --preset release

dev:
	cmake --preset dev
	cmake --build --preset dev

format:
	scripts/format.sh -i

tidy: dev
	run-clang-tidy-19 -quiet -p build/dev '$(CURDIR)/(src|cli|examples)/.*\.cc'

clean:
	rm -rf build .venv
