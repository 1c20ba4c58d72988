#!/usr/bin/env bash
# Word links for a Swahili corpus, and WACSE on them.
#   scripts/wacse.sh LAFAND [OUTPUT]
# LAFAND contains sw-en.train.tsv.gz (LAFAND-MT). Stores the speed and coverage of the aligner for docs/word_alignment.md.
set -euo pipefail
(($# >= 1)) || { sed -n 's/^# //p' "$0" >&2; exit 2; }
bin=${BIN-.venv/bin/}  # BIN= uses the commands on PATH
lafand=$1 output=${2:-out/wacse}
mkdir -p "$output"
"$bin"metaphrase align "$lafand/sw-en.train.tsv.gz" --languages sw --aligner fast_align \
    --output "$output/sw-en.aligned.tsv.gz" --summary "$output/alignment.json"
"$bin"metaphrase train --recipe wacse --model starter --corpus "$output/sw-en.aligned.tsv.gz" --languages sw \
    --freeze_word_embeddings --max_steps 30 --save_steps 30 --output_dir "$output/model"
"$bin"python "$(dirname "$0")/update_tables.py" --alignment "$output/alignment.json"
