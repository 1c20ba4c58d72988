#!/usr/bin/env bash
# Train the released model metaphrase-e5-small; an interrupted run resumes.
#   scripts/metaphrase_e5_small.sh BENCHMARKS [OUTPUT]
# BENCHMARKS contains software/xx-en.{train,dev}.tsv.gz, and stsb and mlqa as guards. Of each language, at most 12,000 pairs are drawn,
# without repeated sentences on either side, and the tenth that the starter scores lowest is removed.
set -euo pipefail
(($# >= 1)) || { sed -n 's/^# //p' "$0" >&2; exit 2; }
bin=${BIN-.venv/bin/}  # BIN= uses the commands on PATH
data=$1 output=${2:-runs/metaphrase-e5-small}
corpus=$output/corpus
mkdir -p "$corpus"
for train in "$data"/software/??-en.train.tsv.gz; do
    name=$(basename "$train" .train.tsv.gz)
    [[ -f $corpus/$name.train.tsv.gz ]] && continue
    zcat "$data/software/$name.dev.tsv.gz" | sed -n 1,101p | gzip -n > "$corpus/$name.dev.tsv.gz"
    sample=$output/$name.train.tsv
    zcat "$train" | sed -n 1p > "$sample"
    zcat "$train" | awk -F '\t' 'NR > 1 && !source[$1]++ && !target[$2]++' | shuf -n 12000 --random-source="$train" >> "$sample"
    "$bin"metaphrase filter "$sample" --top $((($(wc -l < "$sample") - 1) * 9 / 10)) --bf16 --output "$corpus/$name.train.tsv.gz"
    rm "$sample"
done
"$bin"torchrun --nproc_per_node 2 -m metaphrase train --config "$(dirname "$0")/../configs/metaphrase-e5-small.yaml" \
    --corpus "$corpus" --dev "$corpus" --guard "$data/stsb" "$data/mlqa" --resume_from_checkpoint true --output_dir "$output/model"
"$bin"python "$(dirname "$0")/build_model_package.py" "$output/model" models/metaphrase-e5-small
