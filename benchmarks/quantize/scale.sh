#!/bin/sh
# What a run costs, phase by phase: sh benchmarks/quantize/scale.sh WORK [fast] [8b] [best] [70b] [qwen] [deepseek] [distill] [tiny] [SCHEME ...]
# Each run is a fresh process and leaves its JSON in WORK; random checkpoints are made in WORK and kept (8B: 16 GB, 70B:
# 7.4 and 14.2 GB, four blocks of Qwen3-235B 22 GB, of DeepSeek-V3 30 GB). Then: python benchmarks/tables.py --keep quantize --command ... --machine ... WORK/*.json
set -e
export PYTORCH_ALLOC_CONF=expandable_segments:True
here=$(dirname "$0") work=$1
shift
bench() { # bench TITLE MODEL [OPTION ...]
    title=$1
    shift
    echo "$title"
    python3 -m qtool bench quantize --scheme w4a8-lqq "$@" --device "${DEVICE:-cuda}" --work "$work" --json \
        >"$work/$title.json" 2>"$work/log" && cat "$work/$title.json" || tail "$work/log"
}
mkdir -p "$work"
for what in "${@:-8b}"; do
    case $what in
    fast) bench "llama-3-8b, 32 blocks, fast" llama-3-8b --recipe fast ;;
    8b) for recipe in "$here/paper-gptq.yaml" paper "$here/gptq.yaml"; do # the first compiles the kernels
            bench "llama-3-8b, 32 blocks, $(basename "$recipe" .yaml)" llama-3-8b --recipe "$recipe"
        done ;;
    70b) for layers in 8 4; do # the first compiles the kernels
            bench "llama-2-70b, $layers blocks, paper-gptq" llama-2-70b --layers $layers --recipe "$here/paper-gptq.yaml"
        done ;;
    best) bench "llama-3-8b, 32 blocks, best in 15.3 GB, the first run on a machine" llama-3-8b --recipe best --device-memory 15.3
        bench "llama-3-8b, 32 blocks, best" llama-3-8b --recipe best ;;
    qwen) for recipe in paper best; do
            bench "qwen3-235b-a22b, 4 blocks, $recipe" qwen3-235b-a22b --layers 4 --recipe $recipe
        done ;;
    deepseek) bench "deepseek-v3, 4 blocks, paper" deepseek-v3 --layers 4 --recipe paper ;;
    tiny) bench "llama-tiny" llama-tiny --samples 1 --seqlen 16 ;; # to try the script
    distill)
        bench "llama-3-8b, 1 block, distill" llama-3-8b --layers 1 --recipe "$here/distill.yaml" --samples 256 ;;
    *) bench "llama-3-8b, 32 blocks, best of $what" llama-3-8b --scheme "$what" --recipe best ;;
    esac
done
