#!/usr/bin/env bash
# Measures kernel cases and writes their lines here. From the root of a clone with the package installed, on a quiet machine.
set -euo pipefail
nestpipe=${NESTPIPE:-.venv/bin/nestpipe}
results=$(cd "$(dirname "$0")" && pwd)

rm -f "$results/kernels_keys.jsonl"
for case in dedup intersect; do
  "$nestpipe" bench $case --peers --threads 1 2 --repeat 9 --json "$results/kernels_keys.jsonl" > /dev/null
done

rm -f "$results/kernels_rows.jsonl"
"$nestpipe" bench row_sync --peers --threads 1 2 --repeat 9 --json "$results/kernels_rows.jsonl" > /dev/null

# 12 GB of memory for the table and its two peers, 15 GB for the large table of `capacity`.
rm -f "$results/kernels_store.jsonl"
for threads in 1 2; do
  for mix in hits misses half; do
    "$nestpipe" bench find_or_insert --mix $mix --peers --threads $threads --repeat 7 --json "$results/kernels_store.jsonl" > /dev/null
  done
done
"$nestpipe" bench growth --peers --threads 2 --json "$results/kernels_store.jsonl" > /dev/null
"$nestpipe" bench capacity --threads 2 --json "$results/kernels_store.jsonl" > /dev/null

rm -f "$results/kernels_pool.jsonl"
for shape in default dim8 dim128 dim512 single small hot; do
  "$nestpipe" bench lookup_pool --shapes $shape --peers --threads 2 --repeat 7 --json "$results/kernels_pool.jsonl" > /dev/null
done
for shape in default dim8 dim128 dim512 single small hot; do
  "$nestpipe" bench train_step --shapes $shape --peers --threads 2 --repeat 7 --json "$results/kernels_pool.jsonl" > /dev/null
done
for shape in default dim8 dim128 dim512 single small hot; do
  "$nestpipe" bench train_step --shapes $shape --optimizer adam --peers --threads 2 --repeat 7 --json "$results/kernels_pool.jsonl" > /dev/null
done
"$nestpipe" bench lookup_pool --peers --threads 1 --repeat 7 --json "$results/kernels_pool.jsonl" > /dev/null
"$nestpipe" bench train_step --peers --threads 1 --repeat 7 --json "$results/kernels_pool.jsonl" > /dev/null
"$nestpipe" bench row_update --peers --threads 1 2 --repeat 7 --json "$results/kernels_pool.jsonl" > /dev/null
