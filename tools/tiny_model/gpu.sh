#!/bin/sh
# Trains pieces of the tiny model on a machine with a GPU, renders the held-out captions with what there is, and leaves
# weights, log, scores and a contact sheet in $OUT.
#   tools/tiny_model/gpu.sh STATE "pictures:1.5 vae:6" [options of train.py]
# STATE is a folder with the weights of earlier pieces; it is copied, not written to. "" trains nothing: it only renders.
# Where the VAE is trained the fastest way to compute it is measured first.
set -eu
: "${OUT:?is the folder for results}"
state=${1:?is the folder with earlier weights}
pieces=${2?is a list of stage:minutes}
shift 2
cd "$(dirname "$0")/../.."
export PYTHONPATH=. PYTHONUNBUFFERED=1
work=$(mktemp -d)
if [ -d "$state" ]; then cp "$state"/* "$work"/; fi
save() { # finished weights of other stages are with the caller already
    for file in "$work"/*; do
        [ ! -f "$state/${file##*/}" ] || ! cmp -s "$file" "$state/${file##*/}" || continue
        cp "$file" "$OUT"/
    done
}
trap save EXIT
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
case "$pieces" in
*pictures:* | *vae:*)
    fastest=$(python3 -m tools.tiny_model.speed)
    # shellcheck disable=SC2086
    set -- $fastest "$@"
    ;;
esac
for piece in $pieces; do
    python3 -m tools.tiny_model.train --stage "${piece%%:*}" --minutes "${piece##*:}" --state "$work" "$@"
done
case "$pieces" in
*vae:*) # not there if the piece ended early: the last line of its log says so
    if python3 -m tools.tiny_model.reconstruct --state "$work" --out "$work/eval" --count 32; then
        mv "$work"/eval/vae.json "$work"/eval/vae.png "$work"/
        rm -r "$work/eval"
    fi
    ;;
esac
if ls "$work"/text.ema.* >/dev/null 2>&1; then
    python3 -m tools.tiny_model.evaluate --state "$work" --out "$work/eval"
    mv "$work"/eval/scores.json "$work"/eval/sheet.png "$work"/
    rm -r "$work/eval"
fi
