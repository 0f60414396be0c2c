#!/usr/bin/env bash
# Everything that only a GPU can tell, from prebuilt artifacts; a short table last.
#
#   QDSL_ARTIFACTS=out/gpu:out/gputest benchmarks/gpu_tests.sh [DIR for the full logs]
#
# out/gpu and out/gputest are made on a machine with the compiler (benchmarks/README.md). What a tool is missing for is
# named, not passed over.
set -uo pipefail
cd "$(dirname "$0")/.."
: "${QDSL_ARTIFACTS:?names no artifacts; make some with benchmarks/gpu_artifacts.py, see benchmarks/README.md}"
logs=${1:-$(mktemp -d)}
table=()

# name, words to look for in a good run, command
step() {
    local name=$1 good=$2 start=$SECONDS
    shift 2
    "$@" >"$logs/$name.txt" 2>&1
    local code=$? verdict=FAILED
    if [[ $code == 0 ]] && grep -qE "$good" "$logs/$name.txt"; then verdict=ok; fi
    table+=("$(printf '%-28s %-7s %5d s  %s' "$name" "$verdict" $((SECONDS - start)) "$(grep -E "$good|failed|error|SUMMARY" "$logs/$name.txt" | tail -1 | cut -c1-80)")")
}

step tests "passed" pytest -q -m gpu tests/test_gpu.py tests/test_gpu_sizes.py tests/test_bench.py -p no:cacheprovider
step verify " ok$" python3 benchmarks/verify_gpu.py
step host_cost "met|missed" python3 benchmarks/host_cost.py
for tool in memcheck racecheck; do
    if command -v compute-sanitizer >/dev/null; then
        step "$tool" "SUMMARY: 0" timeout 300 compute-sanitizer --tool "$tool" --error-exitcode 1 python3 benchmarks/sanitized.py
    else
        table+=("$(printf '%-28s no compute-sanitizer on PATH' "$tool")")
    fi
done

printf '%s\n' "${table[@]}"
[[ ! "${table[*]}" =~ FAILED ]]
