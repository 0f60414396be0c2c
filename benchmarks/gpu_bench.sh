#!/usr/bin/env bash
# The measurements of benchmarks/README.md, from prebuilt artifacts; short tables last.
#
#   QDSL_ARTIFACTS=out/gpu benchmarks/gpu_bench.sh OUT [DIR with vllm_C.so] [commit]
#
# Tunes copies of the artifacts first, so that what is timed is what their tables choose: OUT/ARCH.json belongs into
# codegen/cuda/tables.
set -uo pipefail
cd "$(dirname "$0")/.."
: "${1:?usage: benchmarks/gpu_bench.sh OUT [DIR with vllm_C.so] [commit]}"
: "${QDSL_ARTIFACTS:?names no artifacts; make some with benchmarks/gpu_artifacts.py, see benchmarks/README.md}"
out=$(mkdir -p "$1" && cd "$1" && pwd)
peers=${2:+--peers $2}
commit=${3:+--commit $3}
tuned=$(mktemp -d)
for folder in ${QDSL_ARTIFACTS//:/ }; do cp -r "$folder"/. "$tuned"; done
export QDSL_ARTIFACTS=$tuned

(cd /tmp && python3 -m qdsl tune "$tuned" --out "$out/tables.json") >"$out/tune.txt" 2>&1 || tail -3 "$out/tune.txt"
# shellcheck disable=SC2086
python3 benchmarks/w4a16.py $peers $commit --out "$out/w4a16-h200.json" | tee "$out/w4a16.txt" | grep absent
python3 benchmarks/w4a16.py $commit --sweep --out "$out/w4a16-sweep-h200.json" >"$out/sweep.txt" 2>&1
python3 benchmarks/w4a16.py $commit --granularity --out "$out/w4a16-granularity-h200.json" >"$out/granularity.txt" 2>&1
# shellcheck disable=SC2086
python3 benchmarks/weight_only.py $peers $commit --out "$out/weight-only-h200.json" >"$out/weight_only.txt" 2>&1
# shellcheck disable=SC2086
python3 benchmarks/a8.py $peers $commit --out "$out/a8-h200.json" >"$out/a8.txt" 2>&1
python3 benchmarks/host_cost.py >"$out/host_cost.txt" 2>&1

sed -n '/cliffs/,$p' "$out/sweep.txt" | head -20
grep missed "$out/granularity.txt" | head -20
tail -4 "$out/host_cost.txt"
python3 benchmarks/goals.py "$out/w4a16-h200.json" | grep -E "goals met|missed" | head -60
python3 benchmarks/goals.py --weight-only "$out/weight-only-h200.json" | grep -E "goals met|\*\*" | head -60
python3 benchmarks/goals.py --a8 "$out/a8-h200.json" | grep -F "**" | head -20
