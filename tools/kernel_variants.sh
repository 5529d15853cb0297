#!/usr/bin/env bash
# Variants of the kernels side by side, so that one call on a GPU decides between designs.
#
#   tools/kernel_variants.sh build DIR ARCH NAME=SOURCE ...    SOURCE: a commit, . for the working tree, or .:FLAGS with flags for nvcc
#   tools/kernel_variants.sh run DIR [KERNEL] [ROUNDS]         checks each one, then times those that are right, by turns
#
# For example: tools/kernel_variants.sh build build/variants 90a before=HEAD now=. "deeper=.:-DSTAGES=4"
# DIR may be built on a machine without a GPU and carried to one: NAME in it is a program of its own (native/sage_cuda/tests/check.cu).
set -euo pipefail
usage() {
    sed -n '4,8p' "$0" >&2
    exit 2
}
[ $# -ge 2 ] || usage
what=$1 dir=$2
shift 2
case $what in
build)
    [ $# -ge 2 ] || usage
    root=$(cd "$(dirname "$0")/.." && pwd) arch=$1
    shift
    mkdir -p "$dir"
    for variant in "$@"; do
        name=${variant%%=*} source=${variant#*=} flags=""
        [ "$name" != "$variant" ] && [ -n "$source" ] || usage
        tree=$root/native/sage_cuda
        case $source in
        .) ;;
        .:*) flags=${source#.:} ;;
        *)
            tree=$dir/$name.source
            rm -rf "$tree"
            mkdir -p "$tree"
            git -C "$root" archive "$source:native/sage_cuda" | tar -x -C "$tree"
            ;;
        esac
        cmake -S "$tree" -B "$dir/$name.build" -DCMAKE_BUILD_TYPE=Release -DSAGE_CUDA_TESTS=ON "-DCMAKE_CUDA_ARCHITECTURES=$arch" \
            "-DCMAKE_CUDA_FLAGS=$flags" > "$dir/$name.log" || { cat "$dir/$name.log" >&2; exit 1; }
        cmake --build "$dir/$name.build" --target sage_check -j "$(nproc)" >> "$dir/$name.log" 2>&1 || { tail -40 "$dir/$name.log" >&2; exit 1; }
        cp "$dir/$name.build/sage_check" "$dir/$name"
        echo "$name: built from $source for $arch"
    done
    ;;
run)
    kernel=${1:-hopper} rounds=${2:-2} right=() status=0
    for program in "$dir"/*; do
        [ -f "$program" ] && [ -x "$program" ] || continue
        if "$program" all "$kernel" > "$program.checked" 2>&1; then
            right+=("$program")
        else
            status=1
            echo "${program##*/}: wrong, not timed"
            head -5 "$program.checked"
        fi
    done
    for round in $(seq "$rounds"); do
        for program in ${right[@]+"${right[@]}"}; do
            "$program" time "$kernel" | sed "s/^/$round ${program##*/}: /"
        done
    done
    exit $status
    ;;
*) usage ;;
esac
