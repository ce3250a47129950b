#!/usr/bin/env bash
# Measures kernel cases and writes their lines here. From the root of a clone with the package installed, on a quiet machine.
set -euo pipefail
nestpipe=${NESTPIPE:-.venv/bin/nestpipe}
results=$(cd "$(dirname "$0")" && pwd)

rm -f "$results/kernels_rows.jsonl"
"$nestpipe" bench intersect row_sync --peers --threads 1 2 --repeat 9 --json "$results/kernels_rows.jsonl" > /dev/null

# 12 GB of memory for the table and its two peers.
rm -f "$results/kernels_store.jsonl"
"$nestpipe" bench find_or_insert --peers --threads 1 2 --repeat 7 --json "$results/kernels_store.jsonl" > /dev/null
