#!/bin/bash
# One rank against several: the 8B shape with random weights, files to files, and how the results differ.
#   benchmarks/quantize/ranks.sh "1 2" [--layers 16] [--recipe FILE] [--shape llama-3-8b] [--device cpu]
# DIR (default /tmp/qtool-ranks) holds the checkpoint and the results; PYTHON is the interpreter with torch.
set -euo pipefail
cd "$(dirname "$0")/../.."
counts=$1
shift
dir=${DIR:-/tmp/qtool-ranks}
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} # one machine
rm -rf "$dir"
mkdir -p "$dir"
script=benchmarks/quantize/ranks.py
timed() { local began=$SECONDS; "$@"; echo "   ($((SECONDS - began)) s with the start of the processes)"; }
timed "$python" $script make "$dir" "$@"
for n in $counts; do
    echo "== $n ranks"
    timed "$python" -m torch.distributed.run --standalone --nproc-per-node "$n" $script run "$dir" "$@"
done
"$python" $script compare "$dir" $counts "$@"
