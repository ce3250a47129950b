#!/usr/bin/env bash
# Measures kernel cases and writes their lines here. From the root of a clone with the package installed, on a quiet machine.
set -euo pipefail
nestpipe=${NESTPIPE:-.venv/bin/nestpipe}
results=$(cd "$(dirname "$0")" && pwd)

rm -f "$results/kernels_rows.jsonl"
"$nestpipe" bench intersect row_sync --peers --threads 1 2 --repeat 9 --json "$results/kernels_rows.jsonl" > /dev/null
