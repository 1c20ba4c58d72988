#!/usr/bin/env bash
# A longer run on one language: DAP on Swahili news, measured on news and on Tatoeba, before and after.
#   scripts/swahili.sh LAFAND TATOEBA [OUTPUT]
# LAFAND contains sw-en.{train,test}.tsv.gz (LAFAND-MT), TATOEBA contains sw-en.tsv.gz (Tatoeba v1 of LASER).
set -euo pipefail
(($# >= 2)) || { sed -n 's/^# //p' "$0" >&2; exit 2; }
bin=${BIN-.venv/bin/}  # BIN= uses the commands on PATH
lafand=$1 tatoeba=$2 output=${3:-out/swahili}
"$bin"metaphrase train --recipe dap --model starter --corpus "$lafand/sw-en.train.tsv.gz" --languages sw \
    --freeze_word_embeddings --vocabulary english --max_steps 90 --save_steps 45 \
    --test "$lafand" "$tatoeba" --output_dir "$output"
"$bin"python "$(dirname "$0")/update_tables.py" --swahili "$output/report.json"
