#!/bin/sh
# The same job on every host of a TPU VM slice:
#   scripts/tpu_vm.sh NAME ZONE --mesh data=4,model=4 --target WHERE --draft WHERE --input gs://B/rows.jsonl --output gs://B/out/
# Call it again after a preemption: it resumes. Install once, in the same way:
#   gcloud compute tpus tpu-vm ssh NAME --zone ZONE --worker=all --command 'pip install "specjax[tpu]"'
set -eu
[ $# -gt 2 ] || { echo "usage: $0 NAME ZONE OPTIONS of specjax generate" >&2; exit 2; }
name=$1 zone=$2
shift 2
quoted=
for word in "$@"; do
    quoted="$quoted '$(printf %s "$word" | sed "s/'/'\\\\''/g")'"
done
exec gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker=all \
    --command "specjax generate --distributed auto --resume$quoted"
