#!/bin/sh
# Trains the tiny model on a machine with a GPU, in two calls of under 9 minutes; weights, log, scores and a contact
# sheet come to $OUT, and from there into STATE before the next call.
#   gpu.sh probe                    a minute and a half: speed of all stages, and each of them for a few steps
#   gpu.sh vae STATE [options]      the VAE, and what it makes of clips
#   gpu.sh model STATE [options]    text encoder and transformers, and what they make of the held-out captions
#   gpu.sh "trunk:6" STATE [options]    other pieces; "" only renders
# Options are train.py's; --compile is the default for `model`. STATE is copied, not written to.
set -eu
: "${OUT:?is the folder for results}"
what=${1?is probe, vae, model or a list of pieces}
state=${2:-}
[ $# -lt 2 ] && shift || shift 2
cd "$(dirname "$0")/../.."
export PYTHONPATH=. PYTHONUNBUFFERED=1
work=$(mktemp -d)
if [ -d "$state" ]; then cp "$state"/* "$work"/; fi
begun=$(date +%s)
passed() { echo "-- $1: $(($(date +%s) - begun)) s"; }
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
case "$what" in
probe)
    python3 -m tools.tiny_model.speed --steps 15 2>&1 | tee "$OUT/speed.txt"
    passed speed
    python3 -m tools.tiny_model.train --state "$work" --compile --pool 1024 \
        pictures:1:20 vae:1:20 stills:1:40 trunk:1:20 low:1:10 high:1:10
    passed training
    python3 -m tools.tiny_model.reconstruct --state "$work" --out "$work/vae" --count 4
    python3 -m tools.tiny_model.evaluate --state "$work" --out "$work/eval" --count 20 --also 16:2.5
    passed evaluation
    ls -l "$work" "$work/vae" "$work/eval"
    exit
    ;;
vae) set -- pictures:0.9 vae:3.8 "$@" ;;
model) set -- --compile stills:1.2 trunk:3.4 low:1.2 high:0.9 "$@" ;;
*)
    # shellcheck disable=SC2086
    set -- $what "$@"
    ;;
esac
save() { # what is new; as it comes, because a call that takes too long is cut off
    for file in "$work"/*.safetensors "$work"/*.json* "$work"/*.png; do
        [ -f "$file" ] || continue
        ! cmp -s "$file" "$state/${file##*/}" && ! cmp -s "$file" "$OUT/${file##*/}" || continue
        cp "$file" "$OUT"/
    done
    for file in "$OUT"/*.safetensors; do # finished stages leave no moments, and stills are in the trunk
        [ -f "$work/${file##*/}" ] || rm -f "$file"
    done
}
while sleep 15; do save; done >/dev/null 2>&1 &
saver=$!
trap 'kill $saver; save' EXIT
if [ -n "$what" ]; then python3 -m tools.tiny_model.train --state "$work" "$@"; fi
passed training
if ls "$work"/trunk.ema.* >/dev/null 2>&1; then rm -f "$work"/stills.*; fi
if [ "$what" = vae ] && python3 -m tools.tiny_model.reconstruct --state "$work" --out "$work/eval" --count 32; then
    mv "$work"/eval/vae.json "$work"/eval/vae.png "$work"/
fi
if ls "$work"/text.ema.* >/dev/null 2>&1; then
    python3 -m tools.tiny_model.evaluate --state "$work" --out "$work/eval" --also 12:2.5 12:5 16:2.5 16:3.5 16:5
    mv "$work"/eval/scores.json "$work"/eval/sheet.png "$work"/
fi
passed "all"
