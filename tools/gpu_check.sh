#!/usr/bin/env bash
# Everything that only a CUDA machine can tell, within 8 minutes: tools/gpu_check.sh [FOLDER for what it measures]
# Not run on a GPU yet: written and held together on a CPU, where it skips the tests and says so.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-gpu_check}
mkdir -p "$out"
export LMZOO_CACHE=${LMZOO_CACHE:-$out/cache} TOKENIZERS_PARALLELISM=false

part() {  # part SECONDS NAME COMMAND...: one check, its output kept, its verdict on one line
    local seconds=$1 name=$2 begin=$SECONDS
    shift 2
    timeout "$seconds" "$@" >"$out/$name.txt" 2>&1
    local code=$?
    printf '%-12s %s after %d s\n' "$name" "$([ $code = 0 ] && echo passed || echo "FAILED with code $code")" $((SECONDS - begin))
    tail -n "${LINES_SHOWN:-4}" "$out/$name.txt"
    return $code
}

failed=0
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader || echo "no CUDA device: tests marked gpu are skipped"

# Tests marked gpu: kernels beside each other in outputs and gradients, precision, checkpoints, memory.
part 120 tests python -m pytest -n 0 -q -m gpu tests || failed=1

# Which kernels attention takes for plain rows (FlashAttention) and for documents that see only themselves (FlexAttention),
# and what each costs beside a dense mask.
part 90 attention python - <<'PYTHON' || failed=1
import time

import torch
from torch.profiler import ProfilerActivity, profile

from lmzoo.blocks.attention import Attention
from lmzoo.blocks.layout import Layout

device = "cuda" if torch.cuda.is_available() else "cpu"
n, rows, rounds = (1024, 8, 20) if device == "cuda" else (128, 2, 1)
x = torch.randn(rows, n, 768, device=device, requires_grad=True)
documents = (torch.arange(n, device=device) // (n // 4)).expand(rows, n)
kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


for facts, backend in [("plain", "auto"), ("documents", "auto"), ("documents", "sdpa")]:
    attn = Attention(768, 12, 12, 64, backend=backend).to(device)

    def step():
        with torch.autocast(device, torch.bfloat16):
            layout = Layout.of(x, None, documents if facts == "documents" else None, causal=True)
            attn(x, layout).sum().backward()

    for _ in range(3):
        step()
    wait()
    begin = time.perf_counter()
    for _ in range(rounds):
        step()
    wait()
    seconds = (time.perf_counter() - begin) / rounds
    with profile(activities=kinds) as seen:
        step()
    ops = {event.key for event in seen.key_averages() if "attention" in event.key}
    print(f"{facts:<10} {backend:<5} {1000 * seconds:8.2f} ms a layer  {', '.join(sorted(ops))[:160]}")
    if device == "cuda" and facts == "plain":
        assert any("flash" in op or "cudnn" in op for op in ops), "plain rows do not take FlashAttention"
PYTHON

rm -f "$out/train.json" "$out/train.png"
# GPT-2 124M in bf16, rows of 1024: tokens/s, MFU and memory, eager and compiled, beside Hugging Face's.
LINES_SHOWN=8 part 270 train python -m lmzoo.tools.benchmark train --families gpt --dtype bf16 --peers transformers \
    --rounds 3 --steps 5 --json "$out/train.json" --png "$out/train.png" || failed=1

# A default run, as a user starts it.
part 60 run python -m lmzoo.train model=gpt task=clm trainer.max_steps=50 "run_dir=$out/run" logger.wandb.mode=disabled || failed=1

echo "all of it in $SECONDS s, in $out"
exit $failed
