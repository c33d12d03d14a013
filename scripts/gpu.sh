#!/usr/bin/env bash
# On a machine with GPUs: builds, runs the GPU tests, which write tests/gpu/receipt.json, and benches. See --help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat <<'END'
scripts/gpu.sh [step]...    default: build tests bench

build     the extension with its CUDA kernels
tests     the GPU tests, and tests/gpu/receipt.json
sanitize  a small case under compute-sanitizer
part      the GPU tests in TESTS, and an entry under also_passed in tests/gpu/receipt.json
stress    the tests once under each of three settings
evidence  all of these tests on one, two and four of four GPUs
bench     ep-bench moe
links     ep-bench's suites whose figures are of the links between GPUs: low-latency, send-receive, overlap, collectives
more      ep-bench's other suites but layers
nodes     the tests on two emulated nodes; with 2 GPUs or more, ep-bench allgather and moe on two nodes of half of them
train     a Qwen3-MoE of 30B-A3B's widths through both exchanges
deepseek  DeepSeek-V3 of transformers and of Megatron-core, a dense model of Megatron-core, and ep-bench layers

PYTHON    the interpreter (.venv/bin/python where there is one)
OUT       a folder that gets what is written, too
TESTS     what `part` runs: files below tests/gpu, and options of pytest without blanks in them
LAYERS    decoder layers of what trains, in place of 36 (more: fsdp2), 4 (train, deepseek), 1 (deepseek: DeepSeek-V3
          of Megatron-core); its dense model always has 24
STEPS     optimizer steps of train and deepseek, in place of their presets'

benchmarks/results/h200x2 has fsdp2.json of LAYERS=8 and train_deepseek_v3_hf_2_layers.json of LAYERS=2 STEPS=8.
Repetitions are in the `command` of what ep-bench wrote, and in the `steps` of what trained.
END
}

read -ra steps <<<"${*:-build tests bench}"
for step in "${steps[@]}"; do
  case $step in
    build | tests | sanitize | part | stress | evidence | bench | links | more | nodes | train | deepseek) ;;
    -h | --help) usage; exit 0 ;;
    *) echo "gpu.sh: expected a step, got '$step'" >&2; usage >&2; exit 2 ;;
  esac
done
PYTHON=${PYTHON:-$( [ -x .venv/bin/python ] && echo "$PWD/.venv/bin/python" || echo python3 )}
GPUS=$(nvidia-smi -L 2>/dev/null | wc -l) || true
if [ "$GPUS" = 0 ]; then echo "gpu.sh: expected NVIDIA GPUs, found none that nvidia-smi lists" >&2; exit 1; fi
RESULTS=benchmarks/results/h200x$GPUS
export PYTHONUNBUFFERED=1

build() { EP_PLUGIN_BUILD_CUDA=1 $PYTHON -m pip install -q --no-build-isolation --no-deps -e .; }

tests() { $PYTHON -m pytest -m gpu tests/gpu -v -n 4 --dist loadgroup; }

# The same tests where launches block, where all streams share one hardware queue, and on the plain kernels. Each has an
# entry of its own in the receipt.
stress() {
  for setting in CUDA_LAUNCH_BLOCKING=1 CUDA_DEVICE_MAX_CONNECTIONS=1 EP_PLUGIN_PLAIN_KERNELS=1; do
    (export "$setting"; tests)
  done
}

sanitize() { $PYTHON tests/gpu/sanitize.py; }

# A part of the suite, such as the tests of Megatron with another version of it, or DeepEP's own scripts.
part() { $PYTHON -m pytest -m gpu ${TESTS:?expected files below tests/gpu} -v -n 4 --dist loadgroup --also-passed; }

# On four GPUs: what one and two of them show, the stress settings and the sanitizers, side by side, each in a copy of
# the tree, since a run writes its own receipt; then four GPUs together.
evidence() {
  local place commit; place=$(mktemp -d)
  commit=${EP_PLUGIN_COMMIT:-$(git rev-parse HEAD 2> /dev/null || true)}
  in_copy() {  # name, setting..., command
    local name=$1; shift
    mkdir -p "$place/$name" && cp -r ep_plugin integrations tests scripts examples pyproject.toml "$place/$name/"
    rm -f "$place/$name/tests/gpu/receipt.json"
    (cd "$place/$name" && env PYTHONPATH="$PWD" EP_PLUGIN_COMMIT="$commit" OUT= PYTHON="$PYTHON" "$@" \
      > "$place/$name.txt" 2>&1) ||
      echo "failed: $name" | tee -a "$place/failed"
    tail -1 "$place/$name.txt"
  }
  (in_copy two CUDA_VISIBLE_DEVICES=0,1 bash scripts/gpu.sh tests
   in_copy plain CUDA_VISIBLE_DEVICES=0 EP_PLUGIN_PLAIN_KERNELS=1 bash scripts/gpu.sh tests) &
  (in_copy blocking CUDA_VISIBLE_DEVICES=2 CUDA_LAUNCH_BLOCKING=1 bash scripts/gpu.sh tests
   in_copy one CUDA_VISIBLE_DEVICES=2 bash scripts/gpu.sh tests) &
  (in_copy connection CUDA_VISIBLE_DEVICES=3 CUDA_DEVICE_MAX_CONNECTIONS=1 bash scripts/gpu.sh tests
   in_copy sanitize CUDA_VISIBLE_DEVICES=3 bash scripts/gpu.sh sanitize) &
  wait
  tests
  $PYTHON tests/gpu/receipt.py --merge "$place"/*/tests/gpu/receipt.json
  if [ -n "${OUT:-}" ]; then cp "$place"/*.txt "$OUT/"; fi
  test ! -e "$place/failed"
}

bench() {
  $PYTHON -m ep_plugin.bench moe --backend cuda --out benchmarks/results/
  $PYTHON -m pytest -m gpu tests/gpu/test_trace.py -q # once more, on an idle machine
}

# Gathers and sums also of sizes that Megatron-core's buckets have.
links() {
  local suite
  for suite in low-latency send-receive overlap \
    "allgather $(sizes) --size 80000000" "reduce-scatter $(sizes)" "reduce-scatter --size 160000000 --dtype float32"; do
    $PYTHON -m ep_plugin.bench $suite --backend cuda --out benchmarks/results/
  done
}

# 64 KiB to 1 GiB.
sizes() {
  local power
  for power in 16 18 20 22 24 26 28 30; do printf -- '--size %d ' $((1 << power)); done
}

more() {
  local suite fsdp2="fsdp2 --compile --unit 2 --compared 50 ${LAYERS:+--layers $LAYERS}"
  local sweep="moe --sweep hidden=2048,2880,4096,5120,8192 --sweep topk=1,2,4,6,10,16 --sweep experts=8,64,128,384,512"
  sweep+=" --sweep tokens=128,512,1024,2048,8192 --sweep skew=1.25,1.5,2 --sweep sms=4,8,12,16,24,48,96"
  for suite in wire "$sweep" low-latency-stand-in "$fsdp2"; do
    $PYTHON -m ep_plugin.bench $suite --backend cuda --out benchmarks/results/
  done
}

# The launcher tells NCCL and ep_plugin that the two are hosts of their own, which only sockets join.
nodes() {
  $PYTHON -m pytest -m gpu tests/gpu/test_across_nodes.py -q
  if [ "$GPUS" -lt 2 ]; then return; fi
  local suite each=$((GPUS / 2))
  for suite in "allgather --size $((64 << 20))" "moe --dtype bfloat16"; do
    $PYTHON -m ep_plugin.testing.nodes --device cuda --nodes 2 --ranks $each -- $PYTHON -m ep_plugin.bench $suite \
      --backend cuda --ranks $((2 * each)) --nodes 2 --out benchmarks/results/
  done
}

# The name of its result, the model and its options.
train_one() {
  local name=$1; shift
  $PYTHON -m examples.compare "$@" --ranks "$GPUS" ${STEPS:+--steps "$STEPS"} --out "runs/$name"
  mkdir -p "$RESULTS" && cp "runs/$name/metrics.json" "$RESULTS/$name.json"
}

train() {
  train_one "train_qwen3_30b_a3b_${LAYERS:-4}_layers" qwen3_moe --preset 30b-a3b --layers "${LAYERS:-4}" --no-fsdp2
}

deepseek() {
  local layers=${LAYERS:+_${LAYERS}_layers}
  train_one "train_deepseek_v3_hf$layers" deepseek_v3 --preset v3 ${LAYERS:+--layers "$LAYERS"}
  # Its optimizer keeps 12 bytes per parameter in float32: a layer takes 53 GB of each of 4 GPUs, 104 GB of each of 2.
  train_one "train_deepseek_v3_megatron$layers" megatron ${LAYERS:+--layers "$LAYERS"}
  train_one train_megatron_dense megatron_dense --preset 4b
  local framework
  for framework in megatron torchtitan; do
    $PYTHON -m ep_plugin.bench layers --framework $framework --backend cuda --out benchmarks/results/
  done
}

began=$(mktemp)
for step in "${steps[@]}"; do "$step"; done
if [ -n "${OUT:-}" ]; then
  # What was there before is no result of this run.
  find tests/gpu "$RESULTS" -name '*.json' -newer "$began" -exec cp {} "$OUT/" \; 2>/dev/null || true
fi
