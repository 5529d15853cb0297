#!/usr/bin/env bash
# Everything that needs a GPU, in one call: the gpu tests, compute-sanitizer on small shapes, the benchmark, the record.
#
#   tools/gpu_check.sh [--lib libsage_cuda.so] [--portable-lib libsage_cuda.so] [--wheels DIR] [--tests-only | --no-bench]
#                      [--sanitizer] [-- PYTEST OPTIONS]
#
# Without --lib the library is built here for this machine's GPU (nvcc, cmake). On compute capability 9.0 the kernel fp16 has
# code of its own; the tests of fp16 run again with a library for plain 9.0, whose fp16 is what all other GPUs run. cffi comes
# from DIR (default .whl) where Python lacks it. Results go to benchmarks/results/gpu_check.json and attention.json, and to $OUT
# where that is set.
set -euo pipefail
cd "$(dirname "$0")/.."

lib="" portable="" wheels=.whl bench=yes sanitizer=no pytest_options=()
while [ $# -gt 0 ]; do
    case $1 in
        --lib) lib=$2; shift 2 ;;
        --portable-lib) portable=$2; shift 2 ;;
        --wheels) wheels=$2; shift 2 ;;
        --tests-only | --no-bench) bench=no; shift ;;
        --sanitizer) sanitizer=yes; shift ;;
        --) shift; pytest_options=("$@"); break ;;
        *) sed -n '2,10p' "$0" >&2; exit 2 ;;
    esac
done
python=${PYTHON:-python3}
build=build/gpu-check
mkdir -p "$build" benchmarks/results

if ! "$python" -c "import cffi" 2> /dev/null; then
    ls "$wheels"/*.whl > /dev/null || { echo "gpu_check.sh: Python has no cffi, and $wheels no wheels of it" >&2; exit 1; }
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$PWD/$build/site" "$wheels"/*.whl
    export PYTHONPATH="$PWD/$build/site${PYTHONPATH:+:$PYTHONPATH}"
fi

arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader -i 0 | tr -d .)
build_lib() { # DIR ARCHITECTURE
    cmake -S native/sage_cuda -B "$1" -DCMAKE_BUILD_TYPE=Release -DSAGE_CUDA_SHARED=ON "-DCMAKE_CUDA_ARCHITECTURES=$2" \
        > "$build/configure.log" || { cat "$build/configure.log" >&2; exit 1; }
    cmake --build "$1" -j "$(nproc)" > "$build/build.log" 2>&1 || { tail -40 "$build/build.log" >&2; exit 1; }
    find "$1" -name 'libsage_cuda.so' | head -1
}
if [ -z "$lib" ]; then
    lib=$(build_lib "$build/sage" "$([ "$arch" -ge 90 ] && echo "${arch}a" || echo "$arch")")
fi
if [ -z "$portable" ] && [ "$arch" = 90 ]; then
    portable=$(build_lib "$build/portable" 90)
fi
[ -f "$lib" ] || { echo "gpu_check.sh: no library at '$lib'" >&2; exit 1; }
[ -z "$portable" ] || [ -f "$portable" ] || { echo "gpu_check.sh: no library at '$portable'" >&2; exit 1; }
SAGE_CUDA_LIB=$(realpath "$lib")
export SAGE_CUDA_LIB PYTHONUNBUFFERED=1
rm -f benchmarks/results/gpu_check.json "$build"/{sanitizer,portable}.log "$build/portable.xml"

copy_out() {
    if [ -n "${OUT:-}" ]; then
        cp benchmarks/results/gpu_check.json benchmarks/results/attention.json "$OUT"/ 2> /dev/null || true
        cp "$build"/{pytest,portable,chooser,sanitizer,bench}.log "$OUT"/ 2> /dev/null || true
    fi
}
trap copy_out EXIT

# The record is of the whole suite: options that select tests make none.
status=0
"$python" -m pytest -q -p no:cacheprovider -m gpu tests/sage --junitxml "$build/junit.xml" -o junit_family=xunit2 \
    --durations=8 ${pytest_options[@]+"${pytest_options[@]}"} 2>&1 | tee "$build/pytest.log" || status=$?
"$python" -m pytest -q -p no:cacheprovider tests/sage/test_chooser.py > "$build/chooser.log" 2>&1 || { status=1; tail -30 "$build/chooser.log"; }

if [ -n "$portable" ]; then
    SAGE_CUDA_LIB=$(realpath "$portable") "$python" -m pytest -q -p no:cacheprovider -m gpu tests/sage -k fp16 \
        --junitxml "$build/portable.xml" -o junit_family=xunit2 2>&1 | tee "$build/portable.log" | tail -3 || status=1
fi

if [ $sanitizer = yes ]; then
    for tool in memcheck racecheck initcheck; do
        echo "compute-sanitizer $tool"
        compute-sanitizer --tool $tool --error-exitcode 9 "$python" tests/sage/small.py 2>&1 |
            tee -a "$build/sanitizer.log" | tail -3 || status=1
    done
fi

[ $bench = no ] || "$python" benchmarks/attention.py 2>&1 | tee "$build/bench.log" || status=1

if [ $status != 0 ]; then
    echo "gpu_check.sh: failed, no record" >&2
elif [ ${#pytest_options[@]} != 0 ]; then
    echo "gpu_check.sh: passed; a selection of tests makes no record"
else
    "$python" tests/sage/record.py kernels write "$build/junit.xml" "$SAGE_CUDA_LIB" ${portable:+"$build/portable.xml"}
fi
exit $status
