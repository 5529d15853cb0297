#!/usr/bin/env bash
# The CUDA engine on this machine's GPU: builds it, then runs its tests.
#
#   tools/gpu_engine.sh [--build DIR] [--lib DIR] [--wheels DIR] [--sanitizer] [--no-tests] [-- PYTEST OPTIONS]
#
# With --lib nothing is built: DIR holds libsdsage.so, sd-cli, cdef.h, and for the attention cases bin/probe_attention. cffi comes from the wheels of DIR (default .whl) where Python lacks it; SDSAGE_UPSTREAM_SDIST names the engine's source
# where there is no network. Logs go to build/gpu-engine.
set -euo pipefail
cd "$(dirname "$0")/.."

build=build/gpu-engine lib="" wheels=.whl sanitizer=no tests=yes pytest_options=()
while [ $# -gt 0 ]; do
    case $1 in
        --build) build=$2; shift 2 ;;
        --lib) lib=$(realpath "$2"); shift 2 ;;
        --wheels) wheels=$2; shift 2 ;;
        --sanitizer) sanitizer=yes; shift ;;
        --no-tests) tests=no; shift ;;
        --) shift; pytest_options=("$@"); break ;;
        *) sed -n '2,8p' "$0" >&2; exit 2 ;;
    esac
done
python=${PYTHON:-python3}
mkdir -p "$build"

if ! "$python" -c "import cffi" 2> /dev/null; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$PWD/$build/site" "$wheels"/*.whl
    export PYTHONPATH="$PWD/$build/site${PYTHONPATH:+:$PYTHONPATH}"
fi

if [ -z "$lib" ] && [ ! -f "$build/lib/libsdsage.so" ]; then
    start=$SECONDS
    # with CUDA graphs, which a variable turns off at run time: both ways are tested
    cmake -S . -B "$build/cmake" -G Ninja -DSD_CUDA=ON -DSD_USE_UPSTREAM_GGML=OFF -DSDSAGE_TESTS=ON -DSD_WEBP=OFF -DSD_WEBM=OFF \
        -DGGML_CUDA_GRAPHS=ON > "$build/configure.log" 2>&1 || { tail -40 "$build/configure.log" >&2; exit 1; }
    cmake --build "$build/cmake" --target sdsage sd-cli probe_attention > "$build/build.log" 2>&1 || { grep -E "error|FAILED" -A8 "$build/build.log" | head -60 >&2; exit 1; }
    mkdir -p "$build/lib/bin"
    cp "$build"/cmake/bin/libsdsage.so "$build"/cmake/bin/sd-cli "$build"/cmake/native/sd_cli/generated/cdef.h "$build/lib/"
    cp "$build"/cmake/bin/probe_attention "$build/lib/bin/"
    strip "$build"/lib/libsdsage.so "$build"/lib/sd-cli "$build"/lib/bin/probe_attention
    echo "engine built in $((SECONDS - start)) s"
fi
lib=${lib:-$PWD/$build/lib}
export SDSAGE_LIB_DIR="$lib" SDSAGE_BUILD_DIR="$lib" SDSAGE_CACHE_DIR="$PWD/$build/cache" PYTHONUNBUFFERED=1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
[ $tests = yes ] || exit 0

status=0
"$python" -m pytest -q -p no:cacheprovider -m gpu tests/test_gpu_engine.py tests/test_gpu_worker.py tests/test_gpu_verify.py --durations=5 --junitxml "$build/engine.xml" ${pytest_options[@]+"${pytest_options[@]}"} 2>&1 |
    tee "$build/engine.log" || status=1
probe=""
if [ -x "$lib/bin/probe_attention" ]; then
    probe=$build/probe.xml
    SDSAGE_PROBE_DEVICE=cuda:0 "$python" -m pytest -q -p no:cacheprovider tests/test_attention.py --junitxml "$probe" 2>&1 | tee "$build/probe.log" || status=1
else
    echo "no $lib/bin/probe_attention: the attention cases of tests/test_attention.py are left out, and so is the record"
fi
# What the levers compute, by itself: exact results, and times of the real shapes. DIR of --lib may have these programs in bin.
check() { # NAME SOURCE [LIBRARY]
    if [ -x "$lib/bin/$1_check" ]; then
        cp "$lib/bin/$1_check" "$build/"
    else
        nvcc -std=c++17 -O3 -arch=native -cudart static -I native/ggml-patched/cuda -o "$build/$1_check" "native/tests/$1_check.cu" "$2" ${3:-} || return 1
    fi
    "$build/$1_check" > "$build/$1.log" 2>&1 || return 1
}
check conv native/ggml-patched/cuda/conv.cu || status=1
check linear native/ggml-patched/cuda/linear.cu -lcublasLt || status=1
tail -3 "$build/conv.log"
tail -5 "$build/linear.log"
if [ $sanitizer = yes ]; then
    echo "compute-sanitizer memcheck"
    compute-sanitizer --tool memcheck --error-exitcode 9 "$build/conv_check" small 2>&1 | tail -2 || status=1
    compute-sanitizer --tool memcheck --error-exitcode 9 "$build/linear_check" small 2>&1 | tail -2 || status=1
    LD_LIBRARY_PATH="$lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" compute-sanitizer --tool memcheck --error-exitcode 9 "$lib/sd-cli" -M vid_gen $("$python" tests/tiny_options.py) \
        -p "a lovely cat" --steps 1 --high-noise-steps 1 --cfg-scale 1 --high-noise-cfg-scale 1 --sage-attn -W 64 -H 64 \
        --video-frames 5 -o "$build/memcheck_%03d.png" 2>&1 | tail -4 || status=1
fi

# The record is of the whole suite: options that select tests make none.
if [ $status != 0 ]; then
    echo "gpu_engine.sh: failed, no record" >&2
elif [ ${#pytest_options[@]} = 0 ] && [ -n "$probe" ]; then
    "$python" tests/sage/record.py engine write "$build/engine.xml" "$SDSAGE_LIB_DIR/libsdsage.so" "$probe"
    [ -z "${OUT:-}" ] || cp benchmarks/results/gpu_engine.json "$OUT"/
fi
exit $status
