#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Everything that needs a GPU, for a machine that cannot build.
#   gpu_suite.sh stage FOLDER [ARCHITECTURES]   here: builds, and puts into FOLDER all that the tests and
#                                               benchmarks take ("90a-real" by default; under 64 MiB)
#   FOLDER/gpu_suite.sh run [--quick] [RESULTS] there: tests, compute-sanitizer where it is, benchmarks; goes on
#                                               after a failure, the table comes last. Logs and JSON in RESULTS
#                                               ($OUT or ./results by default)
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)

usage() {
  sed -n '5,10s/^# \{0,1\}//p' "$0" >&2
  exit 2
}

limit_mib=64

stage() {
  local folder=$1 architectures=${2:-90a-real}
  cd "$here/.." || exit 2
  local build=build/gpu-suite
  # Small: every program holds the kernels.
  cmake --preset cuda -B "$build" -DCMAKE_CUDA_ARCHITECTURES="$architectures" -DESPALIER_TEST_ROOT=. \
    -DCMAKE_CUDA_FLAGS_RELWITHDEBINFO="-O3 --compress-mode=size" \
    -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O2 -D_GLIBCXX_ASSERTIONS -ffunction-sections -fdata-sections" \
    -DCMAKE_EXE_LINKER_FLAGS="-Wl,--gc-sections" -DESPALIER_MPI=OFF -DESPALIER_NCCL=OFF || return
  # Those that run something on a GPU.
  local tests=(tests/cuda_{moe,linear,graph,load}_test.cc tests/{backend_conformance,linear,cli}_test.cc)
  local targets=(espalier_cli cuda_linear_bench)
  local test
  for test in "${tests[@]}"; do targets+=("$(basename "$test" .cc)"); done
  cmake --build "$build" -j "$(nproc)" --target "${targets[@]}" || return
  rm -rf "$folder"
  mkdir -p "$folder"/{bin,lib,data,tests} || return
  for target in "${targets[@]}"; do
    local program
    case $target in
      espalier_cli) program=$build/espalier ;;
      *_bench) program=$build/bench/$target ;;
      *) program=$build/tests/$target ;;
    esac
    strip -o "$folder/bin/$(basename "$program")" "$program" || return
    copy_libraries "$program" "$folder/lib" || return
  done
  # Of the test data what the command line runs on a GPU.
  mkdir -p "$folder/tests/data" && cp -r tests/data/fixtures "$folder/tests/data/" &&
    cp -r data/tiny-qwen3moe-exl3-mixed "$folder/data/" &&
    cp bench/torch_{grouped,linear}.py scripts/gpu_suite.sh "$folder/" || return
  local mib
  mib=$(du -sm "$folder" | cut -f1)
  echo "$folder: $mib MiB of at most $limit_mib"
  ((mib <= limit_mib))
}

# What a bare machine lacks. The C library and its loader must be its own.
copy_libraries() {
  ldd "$1" | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' |
    grep -Ev '/(libc|libm|libdl|librt|libpthread|ld-linux[^/]*|libresolv|libutil)\.so' |
    while read -r library; do cp -L "$library" "$2/" || exit 1; done
}

summary=()
failures=0

# Runs a command with its output in a log, and notes how it ended.
step() {
  local name=$1 seconds=$2 started=$SECONDS status outcome
  shift 2
  printf '%s ... ' "$name"
  timeout "$seconds" "$@" >"$results/$name.log" 2>&1 </dev/null
  status=$?
  outcome=ok
  if ((status != 0)); then
    outcome="FAILED ($status)"
    failures=$((failures + 1))
  fi
  # A test program in which nothing ran has shown nothing.
  if [[ $status == 0 && $name == test-* ]] && ! grep -Eq '\[  PASSED  \] [1-9]' "$results/$name.log"; then
    outcome="nothing ran"
    failures=$((failures + 1))
  fi
  printf '%s, %d s\n' "$outcome" $((SECONDS - started))
  if ((status != 0)); then tail -n 12 "$results/$name.log"; fi
  summary+=("$(printf '%-38s %-12s %4d s' "$name" "$outcome" $((SECONDS - started)))")
}

# bench NAME SECONDS ARGUMENT...: the JSON in NAME.json, and the table of it where there is Python.
bench() {
  local name=$1 seconds=$2
  shift 2
  # shellcheck disable=SC2016  # expanded by the inner shell
  step "$name" "$seconds" bash -c 'json=$1; shift; "$@" >"$json"' _ "$results/$name.json" \
    bin/espalier bench --device cuda --json "$@"
}

run_tests() {
  local program
  for program in bin/*_test; do
    step "test-$(basename "$program" _test)" 240 "$program" --gtest_filter='*Cuda*:*cuda*:*Gpu*' --gtest_brief=0
  done
}

run_sanitizer() {
  local sanitizer tool program
  sanitizer=$(PATH=$PATH:/usr/local/cuda/bin command -v compute-sanitizer)
  if [[ -z $sanitizer ]]; then
    summary+=("compute-sanitizer                      not here")
    return
  fi
  for tool in memcheck racecheck; do
    # All but what takes the sanitizer minutes: thousands of rows, every count of tokens, gigabytes.
    for program in bin/cuda_{moe,graph,linear}_test bin/backend_conformance_test; do
      step "$tool-$(basename "$program" _test)" 60 "$sanitizer" --tool "$tool" --error-exitcode 9 \
        "$program" --gtest_filter='*Cuda*:*cuda*-*4GiB*:*EveryTokenCount*:*ADecodedMatrix'
    done
    # 17 tokens over both rates of a layer of 256 x 512; then one token, which takes other kernels.
    step "$tool-verify" 90 "$sanitizer" --tool "$tool" --error-exitcode 9 \
      bin/espalier verify data/tiny-qwen3moe-exl3-mixed --layers 0 --device cuda
    step "$tool-one-token" 60 "$sanitizer" --tool "$tool" --error-exitcode 9 \
      bin/espalier run data/tiny-qwen3moe-exl3-mixed --layer 1 --tokens 1 --device cuda
    step "$tool-many-tokens" 60 "$sanitizer" --tool "$tool" --error-exitcode 9 \
      bin/espalier run data/tiny-qwen3moe-exl3-mixed --layer 2 --tokens 300 --device cuda
  done
}

run_benchmarks() {
  local quick=$1 codebook
  local mixed=(--geometry glm-5.2-tp4 --tiers '3:192,4:64')
  if [[ $quick == 1 ]]; then
    bench bench-glm-mixed 120 "${mixed[@]}" --tokens 1,8,64 --samples 20
    return
  fi
  bench bench-glm-mixed 150 "${mixed[@]}" --tokens 1,2,4,8,16,32,64,128,512,1024,3072 --samples 20
  bench bench-kimi 90 --geometry kimi-k3-tp8 --tokens 1,8,64 --samples 20
  for codebook in mul1 3inst; do
    bench "bench-glm-$codebook" 60 "${mixed[@]}" --codebook "$codebook" --tokens 1,8,64 --samples 20
  done
  step linears-mcg 120 bin/cuda_linear_bench mcg cuda
  if python3 -c 'import torch' 2>/dev/null; then
    # Without our libraries: torch brings its own.
    # shellcheck disable=SC2016
    step grouped-glm 120 env -u LD_LIBRARY_PATH bash -c 'python3 torch_grouped.py "$1" >"$2"' _ \
      "$results/bench-glm-mixed.json" "$results/grouped-glm.json"
    step linears-torch 90 env -u LD_LIBRARY_PATH python3 torch_linear.py "$results/linears-mcg.log"
  else
    summary+=("torch                                  not here")
  fi
}

print_tables() {
  local file
  for file in "$results"/bench-*.json; do
    [[ -s $file ]] || continue
    echo
    local grouped=''
    if [[ $file == *bench-glm-mixed.json && -s $results/grouped-glm.json ]]; then
      grouped=$results/grouped-glm.json
    fi
    env -u LD_LIBRARY_PATH python3 torch_grouped.py "$file" --table ${grouped:+"$grouped"} 2>/dev/null ||
      grep -E '"(geometry|tokens|median_us|serial_median_us|failure)"' "$file"
  done
  if [[ -s $results/linears-mcg.log ]]; then
    echo
    cat "$results/linears-mcg.log"
  fi
  if [[ -s $results/linears-torch.log ]]; then
    echo
    cat "$results/linears-torch.log"
  fi
}

run() {
  local quick=0
  if [[ ${1:-} == --quick ]]; then
    quick=1
    shift
  fi
  results=${1:-${OUT:-$PWD/results}}
  mkdir -p "$results" && results=$(cd "$results" && pwd) || return 2
  cd "$here" || return 2
  export LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  step doctor 30 bin/espalier doctor
  step verify 60 bin/espalier verify data/tiny-qwen3moe-exl3-mixed --device cuda
  run_tests
  if [[ $quick == 0 ]]; then run_sanitizer; fi
  run_benchmarks "$quick"
  print_tables
  echo
  printf '%s\n' "${summary[@]}"
  printf '%d s in all, %d failed, logs in %s\n' "$SECONDS" "$failures" "$results"
  ((failures == 0))
}

case ${1:-} in
  stage)
    (($# >= 2 && $# <= 3)) || usage
    stage "${@:2}"
    ;;
  run)
    (($# <= 3)) || usage
    run "${@:2}"
    ;;
  *) usage ;;
esac
