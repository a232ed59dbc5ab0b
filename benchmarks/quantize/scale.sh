#!/bin/sh
# What docs/scale.md says, measured again: sh benchmarks/quantize/scale.sh WORK [8b] [70b] [distill]
# Each line of it is one fresh process; random checkpoints are made in WORK and kept (8B: 16 GB, 70B: 7.4 and 14.2 GB).
set -e
export PYTORCH_ALLOC_CONF=expandable_segments:True
here=$(dirname "$0") work=$1
shift
bench() { python3 -m qtool bench quantize "$@" --scheme w4a8-lqq --device cuda --work "$work" 2>"$work/log" || tail "$work/log"; }
mkdir -p "$work"
for what in "${@:-8b}"; do
    case $what in
    8b) for recipe in "$here/paper-gptq.yaml" paper "$here/gptq.yaml"; do # the first compiles the kernels
            echo "llama-3-8b, $recipe"; bench llama-3-8b --recipe "$recipe"
        done ;;
    70b) for layers in 8 4; do # the first compiles the kernels
            echo "llama-2-70b, $layers blocks"; bench llama-2-70b --layers $layers --recipe "$here/paper-gptq.yaml"
        done ;;
    distill) echo "llama-3-8b, 1 block, distill"
        bench llama-3-8b --layers 1 --recipe "$here/distill.yaml" --samples 256 ;;
    esac
done
