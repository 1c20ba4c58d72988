#!/usr/bin/env bash
# The examples of docs/my-language.md: trains each language on a few thousand pairs for eight minutes and prints the verdicts.
#   scripts/my_language.sh LAFAND SOFTWARE [OUTPUT]
# LAFAND contains sw-en.train.tsv.gz (LAFAND-MT), SOFTWARE xx-en.train.tsv.gz of Basque and Kazakh (translations inside free
# software). Each file starts with the header `source target`. An interrupted run resumes.
set -euo pipefail
(($# >= 2)) || { sed -n 's/^# //p' "$0" >&2; exit 2; }
bin=${BIN-.venv/bin/}  # BIN= uses the commands on PATH
lafand=$1 software=$2 output=${3:-out/my-language}
mkdir -p "$output"
first() {  # language, pairs, folder
    zcat "$3/$1-en.train.tsv.gz" | cut -f1,2 | sed -n "1,$(($2 + 1))p" > "$output/$1.tsv"
    "$bin"metaphrase adapt --corpus "$output/$1.tsv" --languages "$1" --output_dir "$output/adapt-$1"
}
first sw 5000 "$lafand"
first eu 3000 "$software"
first kk 3000 "$software"
"$bin"python "$(dirname "$0")/update_tables.py" --adapted "$output"/adapt-{sw,eu,kk}
