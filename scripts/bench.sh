#!/usr/bin/env bash
# All benchmarks, so many times in a row; a line of JSON for each into benchmarks/bench.jsonl.
set -euo pipefail
cd "$(dirname "$0")/.."
holdfast=${HOLDFAST:-.venv/bin/holdfast}
for ((run = 1; run <= ${1:-3}; run++)); do
  for name in engine clients reconstruct data; do
    picture=$([ $name = engine ] && echo "--picture docs/images/round.png" || true)
    # shellcheck disable=SC2086
    found=$($holdfast bench $name --json $picture)
    echo "{\"bench\": \"$name\", \"run\": $run, \"found\": $found}" | tee -a benchmarks/bench.jsonl
  done
done
