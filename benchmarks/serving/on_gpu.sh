#!/bin/bash
# vLLM with the qtool plugin on a GPU machine without a network: see on_gpu.md.
#   bash benchmarks/serving/on_gpu.sh check|small|two|bench|both|kv|requests|profile|tasks|text|alone [ARGUMENT ...]
# Archives lie in .vllm/; logs go to $OUT; the last lines are a short table.
set -u
cd "$(dirname "$0")/../.."
OUT=${OUT:-out/serving}
SITE=${SITE:-/tmp/site}
DATA=${DATA:-/tmp/serving}
mkdir -p "$OUT" "$SITE" "$DATA"
export PYTHONPATH=$PWD:$SITE PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-INFO} TOKENIZERS_PARALLELISM=false
export OMP_NUM_THREADS=4 TORCHINDUCTOR_COMPILE_THREADS=4
summary=$OUT/summary.txt
CHECK=${CHECK:-} # --eager
: > "$summary"

step() { # step NAME SECONDS COMMAND ...: run it, log it, say how it ended
    local name=$1 limit=$2 start=$SECONDS status
    shift 2
    timeout -k 5 "$limit" "$@" > "$OUT/$name.log" 2>&1
    status=$?
    printf '%-28s status %3d  %4d s  %s\n' "$name" $status $((SECONDS - start)) \
        "$(grep -E '^(RESULT|OK)' "$OUT/$name.log" | tail -1)" | tee -a "$summary"
    if [ $status -ne 0 ]; then grep -vE '^\s*$' "$OUT/$name.log" | tail -${TAIL:-12}; fi
    return $status
}

ls .vllm/*.tar.xz > /dev/null 2>&1 || { echo "no archives in .vllm: see benchmarks/serving/on_gpu.md"; exit 1; }

unpack() {
    for archive in .vllm/*.tar.xz; do
        done=$SITE/.$(basename "$archive")
        [ -e "$done" ] || { tar -C "$SITE" -xJf "$archive" && touch "$done"; } &
    done
    wait
    for archive in .vllm/*.tar.xz; do [ -e "$SITE/.$(basename "$archive")" ] || return 1; done
    # an entry point, for the processes that vLLM starts
    mkdir -p "$SITE/qtool-0.dist-info"
    printf 'Metadata-Version: 2.1\nName: qtool\nVersion: 0\n' > "$SITE/qtool-0.dist-info/METADATA"
    printf '[vllm.general_plugins]\nqtool = qtool.serving.vllm:register\n' > "$SITE/qtool-0.dist-info/entry_points.txt"
    du -sh "$SITE"
}

smoke_code='
import torch, vllm, vllm._C_stable_libtorch
x = torch.randn(4, 512, device="cuda", dtype=torch.bfloat16)
out = torch.empty(4, 256, device="cuda", dtype=torch.bfloat16)
torch.ops._C.silu_and_mul(out, x)
assert torch.allclose(out, torch.nn.functional.silu(x[:, :256]) * x[:, 256:], atol=0.02)
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
print("OK", torch.cuda.get_device_name(), "vllm", vllm.__version__, "FlashAttention", get_flash_attn_version())
'

quantize() { # quantize NAME SCHEME: the demo or $DATA/NAME by $RECIPE, in $DATA/NAME-SCHEME
    local model=$DATA/$1 options=(--scheme "$2" --recipe "$RECIPE")
    [ "$1" = demo ] && model=demo
    [[ $2 = kv* ]] && options=(--scheme w4a8-lqq --recipe "$RECIPE" --kv "$2")
    [[ $2 = kv* || $2 = w4ax* || $RECIPE != fast ]] && options+=(--calib demo)
    [ "$RECIPE" = fast ] || options+=(--samples 32 --seqlen 256 --device cuda)
    [ -e "$DATA/$1-$2" ] || python3 -m qtool quantize "$model" "${options[@]}" --out "$DATA/$1-$2"
}
check() { # check NAME SCHEME [OPTION ...]
    quantize "$1" "$2" &&
        python3 benchmarks/serving/check_vllm.py "$DATA/$1-$2" --text qtool/demo/heldout.txt "${@:3}"
}
export -f quantize check
export DATA
export RECIPE=${RECIPE:-fast} # best rotates the inputs of down at run time

memorize() {
    [ -e "$DATA/sure" ] || step memorize 240 python3 benchmarks/serving/memorize.py qtool/demo "$DATA/sure"
}

bench_code='
import json, sys
from dataclasses import asdict
from pathlib import Path
from qtool.serving.bench import bench_serve, table
directory, against, batches, out = sys.argv[1:5]
rows = []
for row in bench_serve(Path(directory), against=[n for n in against.split(",") if n], batches=list(map(int, batches.split(",")))):
    rows.append(row)
    Path(out).write_text(json.dumps([asdict(row) for row in rows], indent=1))
print(table(rows))
print("RESULT", len(rows), "rows")
'

shape_code='
import json, sys
from pathlib import Path
config = json.loads(Path(sys.argv[1], "config.json").read_text())
del config["quantization_config"]
Path(sys.argv[2], "config.json").write_text(json.dumps(config))
'

alone_code='
import json, os, sys
from pathlib import Path
from qtool.serving.bench import BASELINES, measure
directory, engine, batches, out = sys.argv[1:5]
memory = float(sys.argv[5]) if sys.argv[5:] else None
name, options = "qtool w4a8-lqq kv4", {"kv_cache_dtype": "auto"}
if engine == "fp8":
    name, options = engine, BASELINES["fp8"][1] | {"kv_cache_dtype": "fp8", "load_format": "dummy"}
if sizes := os.environ.get("GRAPHS"):
    options["compilation_config"] = {"cudagraph_capture_sizes": list(map(int, sizes.split(",")))}
    name += ", graphs to " + sizes.split(",")[-1]
rows = measure(directory, options, list(map(int, batches.split(","))), 1024, 512, memory)
Path(out).write_text(json.dumps([{"engine": name} | row for row in rows], indent=1))
'

small_code='
import shutil, sys
from pathlib import Path
import torch
from transformers import AutoConfig, AutoModelForCausalLM
kind, out = sys.argv[1:3]
torch.manual_seed(0)
sizes = dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8,
             num_key_value_heads=4, head_dim=64, num_local_experts=8, vocab_size=4096, sliding_window=64,
             max_position_embeddings=512, tie_word_embeddings=kind == "gemma2")
if kind == "mixtral":
    del sizes["sliding_window"]
model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
model.to(torch.bfloat16).save_pretrained(out)
for file in Path("qtool/demo").glob("tokenizer*"):
    shutil.copy(file, out)
'

evaluate() { # evaluate FILE OPTION ...: JSON of the perplexity of $TEXT, by default the demo's
    python3 -m qtool eval "${TEXT:-demo}" --json "${@:2}" > "$1"
}
export -f evaluate

questions_code='
import json, sys
from pathlib import Path
from qtool.data import corpora
from qtool.eval.demo_choice import questions
from qtool.runtime.load import load_tokenizer
model, folder = Path(sys.argv[1]), Path(sys.argv[2])
folder.mkdir(exist_ok=True)
rows = questions(corpora.load("demo", split=corpora.TEST).text, load_tokenizer(model))
(folder / "demo_questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
task = {"task": "demo_questions", "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice",
        "dataset_kwargs": {"data_files": {"test": str(folder / "demo_questions.jsonl")}}, "doc_to_text": "query",
        "doc_to_choice": "choices", "doc_to_target": "gold", "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]}
(folder / "demo_questions.yaml").write_text(json.dumps(task))  # JSON is YAML
'

compare() { # compare NAME MODE: the evaluations in $OUT as a table of the docs, in $OUT/NAME.json
    step compare 20 python3 benchmarks/serving/compare.py "$OUT" "$OUT/$1.json" \
        --command "OUT=out/serving bash benchmarks/serving/on_gpu.sh $2"
}

step unpack 120 bash -c "$(declare -f unpack); SITE=$SITE; unpack" || exit 1
[[ ${1:-check} =~ both|requests|alone|text ]] || step smoke 120 python3 -c "$smoke_code" || exit 1
case ${1:-check} in
check) # every scheme at once, on the demo and on a model that is sure of every token
    schemes=${2:-w4a8-lqq w8a8 w4a16 w4a8-qoq w4a8-qoq-g128 w4a4-g128 w4ax-fmpq w4a16-24}
    memorize
    for scheme in $schemes; do
        step "demo-$scheme" 400 bash -c "check demo $scheme --prompts 32 --prompt-tokens 256 $CHECK" &
    done
    wait
    for scheme in $schemes; do
        step "sure-$scheme" 400 bash -c "check sure $scheme $CHECK" &
    done
    wait
    ;;
small) # random models: experts (needs moe.tar.xz), sliding windows and soft caps over quantized caches
    for kind in mixtral mistral gemma2; do step "$kind" 60 python3 -c "$small_code" $kind "$DATA/$kind" & done
    wait
    cases=${2:-mixtral:w4a8-lqq mixtral:w4a8-qoq mixtral:w8a8 mixtral:w4a16 mistral:kv4 mistral:kv8 gemma2:kv4 gemma2:kv8}
    for case in $cases; do
        step "$case" 300 bash -c "quantize ${case/:/ } &&
            python3 benchmarks/serving/check_vllm.py $DATA/${case/:/-} $CHECK" &
    done
    wait
    ;;
two) # the same split over two GPUs, and random models (needs moe.tar.xz); of the demo a rank has one group of w4a16
    split="w4a8-lqq w8a8 w4a8-qoq w4a8-qoq-g128 w4a4-g128 kv4 kv8"
    random="mixtral:w4a8-lqq mixtral:w4a8-qoq mixtral:w8a8 mixtral:w4a16 mistral:w4a16 mistral:w4a16-24 mistral:kv4"
    cases=${2:-$(printf ' demo:%s' $split) $(printf ' sure:%s' $split) $random}
    for kind in mixtral mistral; do step "$kind" 60 python3 -c "$small_code" $kind "$DATA/$kind" & done
    memorize
    wait
    for case in $cases; do
        while [ "$(jobs -rp | wc -l)" -ge 10 ]; do wait -n; done
        step "two-$case" 400 bash -c "check ${case/:/ } --tensor-parallel 2 $CHECK" &
    done
    wait
    ;;
both) # all that needs two GPUs, side by side; LIMIT is for everything, seconds
    LIMIT=${LIMIT:-560}
    schemes=${2:-w4a8-lqq w8a8 w4a16 w4a8-qoq-g128 w4a8-qoq w4a4-g128 w4ax-fmpq w4a16-24}
    CUDA_VISIBLE_DEVICES=1 step random-8b 150 \
        python3 benchmarks/serving/random_packed.py llama-3-8b w4a8-lqq "$DATA/8b" &
    CUDA_VISIBLE_DEVICES=0 step random-8b-w4a16 150 \
        python3 benchmarks/serving/random_packed.py llama-3-8b w4a16 "$DATA/8b-w4a16" &
    waiting=()
    step mixture-model 60 bash -c 'python3 -c "$0" mixtral "$DATA/mixtral" && quantize mixtral w4a8-lqq' "$small_code" &
    waiting+=($!)
    for scheme in $schemes; do
        step "quantize-$scheme" 60 bash -c "quantize demo $scheme" &
        waiting+=($!)
    done
    wait "${waiting[@]}"
    lqq=$DATA/demo-w4a8-lqq
    step two-verify 240 python3 -m qtool verify "$lqq" --engine vllm --tensor-parallel 2 &
    step two-eval 240 bash -c "evaluate $OUT/w4a8-lqq-vllm-two.json --model $lqq --engine vllm --tensor-parallel 2" &
    export CUDA_VISIBLE_DEVICES=0
    step verify 240 python3 -m qtool verify "$lqq" --engine vllm -v &
    for scheme in $schemes; do
        model=$DATA/demo-$scheme
        step "vllm-$scheme" 240 bash -c "evaluate $OUT/$scheme-vllm.json --model $model --engine vllm" &
        step "ours-$scheme" 100 bash -c "evaluate $OUT/$scheme-ours.json --model $model --device cuda" &
        export CUDA_VISIBLE_DEVICES=$((1 - CUDA_VISIBLE_DEVICES))
    done
    CUDA_VISIBLE_DEVICES=1 step mixture 240 python3 -m qtool verify "$DATA/mixtral-w4a8-lqq" --engine vllm &
    wait
    compare agreement both
    tail -n 25 "$OUT"/{two-verify,verify,mixture,compare}.log
    rest=$((LIMIT - SECONDS))
    CUDA_VISIBLE_DEVICES=0 step bench-w4a8-lqq $rest python3 -c "$bench_code" "$DATA/8b" fp8 1,16,64,256 "$OUT/w4a8-lqq.json" &
    CUDA_VISIBLE_DEVICES=1 step bench-w4a16 $rest python3 -c "$bench_code" "$DATA/8b-w4a16" w4a16 1,16 "$OUT/w4a16.json" &
    wait
    grep -h '"batch"' "$OUT"/bench-*.log
    ;;
kv) # the quantized cache: kernels, perplexity beside our runtime's (on two GPUs too, where there are), speed
    step kernels 150 python3 -m pytest -q -n 8 -m cuda tests/kernels/test_kv_paged.py tests/kernels/test_kv_attention.py &
    waiting=($!)
    for kv in kv4 kv8; do
        step "quantize-$kv" 100 bash -c "quantize demo $kv" &
        waiting+=($!)
    done
    wait "${waiting[@]}"
    for kv in kv4 kv8; do
        step "vllm-$kv" 180 bash -c "evaluate $OUT/$kv-vllm.json --model $DATA/demo-$kv --engine vllm" &
        step "ours-$kv" 100 bash -c "evaluate $OUT/$kv-ours.json --model $DATA/demo-$kv --device cuda" &
        [ "$(nvidia-smi --list-gpus | wc -l)" -lt 2 ] || step "vllm-$kv-two" 180 bash -c \
            "evaluate $OUT/$kv-vllm-two.json --model $DATA/demo-$kv --engine vllm --tensor-parallel 2" &
    done
    wait
    compare agreement-kv kv
    tail -n 5 "$OUT"/{kernels,compare}.log
    step speed 60 python3 benchmarks/kernels/bench_kv_paged.py --shapes "${2:-64x4096x8x32x128}"
    cat "$OUT/speed.log"
    step memcheck 90 compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 python3 -m pytest -q -m cuda \
        tests/kernels/test_kv_paged.py -k "kv4-128-4 or kv8-64-16 or captured"
    tail -n 5 "$OUT/memcheck.log"
    ;;
requests) # random requests, all at once and one at a time, and a model that is sure of its tokens
    for kv in kv4 kv8; do
        { step "random-$kv" 120 python3 benchmarks/serving/random_packed.py llama-3-8b w4a8-lqq "$DATA/random-$kv" \
            --kv $kv --layers 8 &&
            step "requests-$kv" ${LIMIT:-170} python3 benchmarks/serving/requests_vllm.py "$DATA/random-$kv" --requests ${2:-2000} \
                --alone 100; } &
    done
    memorize
    for kv in kv4 kv8; do
        step "sure-$kv" 170 bash -c "check sure $kv" &
    done
    wait
    tail -n 3 "$OUT"/requests-*.log "$OUT"/sure-*.log
    ;;
profile) # a step of the 8B shape in w4a8-lqq with kv4, kernel by kernel
    step random-kv4 90 python3 benchmarks/serving/random_packed.py llama-3-8b w4a8-lqq "$DATA/8b-kv4" --kv kv4
    step profile ${LIMIT:-240} python3 benchmarks/serving/step_profile.py "$DATA/8b-kv4" --batches "${2:-1,64,256}" \
        --json "$OUT/step-profile.json"
    cat "$OUT/profile.log" | grep -A60 '^batch'
    ;;
tasks) # zero-shot: by qtool eval in vLLM and in our runtime, and by lm-eval's own command; needs lm-eval.tar.xz
    model=$DATA/demo-w4a8-lqq
    quantize demo w4a8-lqq && python3 -c "$questions_code" "$model" "$DATA/tasks"
    export TEXT=demo_choice
    step eval-vllm 240 bash -c "evaluate $OUT/w4a8-lqq-vllm.json --model $model --engine vllm" &
    step eval-ours 240 bash -c "evaluate $OUT/w4a8-lqq-ours.json --model $model --device cuda" &
    step lm-eval 240 python3 -m lm_eval run --model vllm --tasks demo_questions --include_path "$DATA/tasks" \
        --model_args "pretrained=$model,gpu_memory_utilization=0.05,max_model_len=512" --output_path "$OUT/lm-eval" &
    wait
    compare tasks tasks
    tail -n 30 "$OUT"/{lm-eval,compare}.log
    ;;
text) # perplexity of a text file in vLLM and in our runtime
    export TEXT=$2
    for scheme in ${3:-w4a4-g128 w4ax-fmpq}; do
        step "quantize-$scheme" 60 bash -c "quantize demo $scheme"
        model=$DATA/demo-$scheme
        step "vllm-$scheme" 240 bash -c "evaluate $OUT/$scheme-vllm.json --model $model --engine vllm" &
        step "ours-$scheme" 240 bash -c "evaluate $OUT/$scheme-ours.json --model $model --device cuda" &
    done
    wait
    compare agreement-text "text $2"
    tail -n 5 "$OUT/compare.log"
    ;;
alone) # one engine: a shape in w4a8-lqq with kv4, or in FP8, at batches, in a number of GB; GRAPHS: sizes of CUDA graphs
    shape=${2:-llama-3-8b} engine=${3:-kv4}
    [ -e "$DATA/$shape" ] || step "random-$shape" 300 python3 benchmarks/serving/random_packed.py "$shape" w4a8-lqq \
        "$DATA/$shape" --kv kv4
    mkdir -p "$DATA/$shape-fp8"
    python3 -c "$shape_code" "$DATA/$shape" "$DATA/$shape-fp8"
    case $engine in kv4) model=$DATA/$shape ;; *) model=$DATA/$shape-$engine ;; esac
    step "$shape-$engine" ${LIMIT:-560} python3 -c "$alone_code" "$model" "$engine" "${4:-1,16,64,256}" \
        "$OUT/$shape-$engine.json" ${5:-}
    grep -E '"batch"|left out' "$OUT/$shape-$engine.log"
    ;;
bench)
    scheme=${2:-w4a8-lqq}
    against=${3-fp8}
    step "random-8b-$scheme" 200 python3 benchmarks/serving/random_packed.py llama-3-8b "$scheme" "$DATA/8b-$scheme"
    step "bench-$scheme" ${LIMIT:-420} python3 -c "$bench_code" "$DATA/8b-$scheme" "$against" "${4:-1,16,64}" "$OUT/bench-$scheme.json"
    grep -A40 '^engine' "$OUT/bench-$scheme.log" | tee -a "$summary"
    ;;
esac
echo; echo "---- summary"; cat "$summary"
