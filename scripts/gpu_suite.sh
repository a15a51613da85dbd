#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Everything that needs a GPU, for a machine that cannot build.
#   gpu_suite.sh stage [--python PYTHON] [--vllm] FOLDER [ARCHITECTURES]
#       here: builds, and puts into FOLDER all that the tests and benchmarks take ("90a-real" by default; under 64 MiB).
#       With an interpreter also the Python package for its series and newer ones, and its tests in torch and
#       transformers; other wheels that the machine lacks may be put into FOLDER/python. With --vllm also vLLM without its
#       kernels (stage_vllm.py), for the tests in that
#   FOLDER/gpu_suite.sh run [--quick | --faces] [RESULTS]
#       there: tests, compute-sanitizer where it is, benchmarks; goes on after a failure, the table comes last. Logs and
#       JSON in RESULTS ($OUT or ./results by default). --faces: the tests in torch, transformers and vLLM alone
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)

usage() {
  sed -n '5,13s/^# \{0,1\}//p' "$0" >&2
  exit 2
}

limit_mib=64

stage() {
  local python='' vllm=0
  if [[ $1 == --python ]]; then
    python=$2
    shift 2
  fi
  if [[ $1 == --vllm ]]; then
    vllm=1
    shift
  fi
  (($# >= 1 && $# <= 2)) || usage
  if ((vllm)) && [[ -z $python ]]; then usage; fi
  local folder=$1 architectures=${2:-90a-real}
  cd "$here/.." || exit 2
  local build=build/gpu-suite
  # Small: every program holds the kernels.
  cmake --preset cuda -B "$build" -DCMAKE_CUDA_ARCHITECTURES="$architectures" -DESPALIER_TEST_ROOT=. \
    -DCMAKE_CUDA_FLAGS_RELWITHDEBINFO="-O3 --compress-mode=size" \
    -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O2 -D_GLIBCXX_ASSERTIONS -ffunction-sections -fdata-sections" \
    -DCMAKE_EXE_LINKER_FLAGS="-Wl,--gc-sections" -DESPALIER_MPI=OFF -DESPALIER_NCCL=AUTO || return
  # Those that run something on a GPU.
  local tests=(tests/cuda_{moe,linear,graph,load,partition,probes}_test.cc tests/{backend_conformance,bench_command,linear,cli}_test.cc)
  local targets=(espalier_cli cuda_linear_bench)
  local test
  for test in "${tests[@]}"; do targets+=("$(basename "$test" .cc)"); done
  if cmake --build "$build" --target help | grep '^nccl_test:' >/dev/null; then targets+=(nccl_test); fi
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
  if [[ -n $python ]]; then stage_faces "$python" "$build" "$folder" || return; fi
  if ((vllm)); then "$python" scripts/stage_vllm.py "$folder/python/vllm.tar.xz" || return; fi
  # Every program holds the library: packed, they are a third.
  tar -C "$folder" -czf "$folder/programs.tar.gz" bin lib && rm -r "${folder:?}"/{bin,lib} || return
  local mib
  mib=$(du -sm "$folder" | cut -f1)
  echo "$folder: $mib MiB of at most $limit_mib"
  ((mib <= limit_mib))
}

# The package as a wheel around the library of the build, and what its tests read.
stage_faces() {
  local python=$1 build=$2 folder=$3
  cmake --build "$build" -j "$(nproc)" --target espalier_c &&
    PYTHON=$python scripts/wheel.sh --build "$build" --out "$folder/python" || return
  rm -f "$folder"/python/*.tar.gz
  mkdir -p "$folder"/{bench,docs,tests/python} &&
    cp tests/python/{package_support,transformers_checkpoints,vllm_engine,test_{torch,transformers,vllm}}.py \
      "$folder/tests/python/" &&
    mkdir -p "$folder/tests/data/golden" && cp tests/data/golden/model_golden.safetensors "$folder/tests/data/golden/" &&
    cp data/heldout.txt "$folder/data/" &&
    cp docs/{torch,transformers}.md "$folder/docs/" &&
    cp bench/serve_bench.py "$folder/bench/"
}

# What a bare machine lacks. The C library and its loader must be its own, and NCCL alone is 200 MB.
copy_libraries() {
  ldd "$1" | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' |
    grep -Ev '/(libc|libm|libdl|librt|libpthread|ld-linux[^/]*|libresolv|libutil|libnccl)\.so' |
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
    if [[ $program == bin/nccl_test ]]; then continue; fi
    step "test-$(basename "$program" _test)" 240 "$program" --gtest_filter='*Cuda*:*cuda*:*Gpu*' --gtest_brief=0
  done
}

# The package in the torch and transformers of the machine, which bring their own libraries, and in the vLLM that was
# brought along or is there. A GPU that cannot be used fails here.
run_faces() {
  local site face
  site=$(mktemp -d)
  step faces-install 120 env -u LD_LIBRARY_PATH python3 -m pip install --quiet --no-index --no-deps --no-compile \
    --no-cache-dir --target "$site" python/*.whl
  for face in torch transformers; do
    step "faces-$face" 400 env -u LD_LIBRARY_PATH PYTHONPATH="$site" ESPALIER_REQUIRE_GPU=1 \
      python3 -m pytest -q -rfEs -p no:cacheprovider --durations=10 --junitxml="$results/faces-$face.xml" \
      "tests/python/test_$face.py"
  done
  if [[ -f python/vllm.tar.xz ]]; then step vllm-unpack 60 tar -xJf python/vllm.tar.xz -C "$site"; fi
  if env -u LD_LIBRARY_PATH PYTHONPATH="$site" python3 -c 'import importlib.util as u, sys; sys.exit(u.find_spec("vllm") is None)'; then
    step faces-vllm 400 env -u LD_LIBRARY_PATH PYTHONPATH="$site" ESPALIER_REQUIRE_GPU=1 \
      python3 -m pytest -q -rfEs -p no:cacheprovider --durations=10 --junitxml="$results/faces-vllm.xml" \
      -k test_gpu_ tests/python/test_vllm.py
  else
    summary+=("vllm                                   not here")
  fi
  rm -rf "$site"
}

# A world of one GPU, with the machine's NCCL or that of its torch.
run_nccl() {
  local folder
  folder=$(python3 -c 'import nvidia.nccl as n; print(n.__path__[0] + "/lib")' 2>/dev/null)
  local path=$LD_LIBRARY_PATH${folder:+:$folder}
  if [[ ! -x bin/nccl_test ]] || LD_LIBRARY_PATH=$path ldd bin/nccl_test | grep 'not found' >/dev/null; then
    summary+=("nccl                                   not here")
    return
  fi
  step test-nccl 60 env LD_LIBRARY_PATH="$path" bin/nccl_test
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
  for file in "$results"/faces-{torch,transformers,vllm}.log; do
    [[ -s $file ]] || continue
    printf '\n%s\n' "$(basename "$file" .log)"
    grep -E '^(FAILED|ERROR|SKIPPED) |^[0-9]+ (passed|failed|skipped)' "$file" | cut -c1-300
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
  local quick=0 only_faces=0
  case ${1:-} in
    --quick) quick=1 ;;
    --faces) only_faces=1 ;;
  esac
  if ((quick || only_faces)); then shift; fi
  (($# <= 1)) || usage
  results=${1:-${OUT:-$PWD/results}}
  mkdir -p "$results" && results=$(cd "$results" && pwd) || return 2
  cd "$here" || return 2
  if [[ ! -d bin ]]; then tar -xzf programs.tar.gz || return 2; fi
  export LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  step doctor 30 bin/espalier doctor
  if ((!only_faces)); then
    step verify 60 bin/espalier verify data/tiny-qwen3moe-exl3-mixed --device cuda
    run_tests
    run_nccl
  fi
  if ((only_faces)) || [[ -d python ]]; then run_faces; fi
  if ((!only_faces)); then
    if [[ $quick == 0 ]]; then run_sanitizer; fi
    run_benchmarks "$quick"
  fi
  print_tables
  echo
  printf '%s\n' "${summary[@]}"
  printf '%d s in all, %d failed, logs in %s\n' "$SECONDS" "$failures" "$results"
  ((failures == 0))
}

case ${1:-} in
  stage)
    (($# >= 2)) || usage
    stage "${@:2}"
    ;;
  run) run "${@:2}" ;;
  *) usage ;;
esac
