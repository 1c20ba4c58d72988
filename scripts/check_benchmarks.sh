#!/usr/bin/env bash
# Compares benchmark scores of the starter with those of scripts/check_benchmarks.py: 10 minutes on two cores.
#   scripts/check_benchmarks.sh DATA [OUTPUT]
# DATA contains sib200, xquad-r, alignment-gold and tatoeba. The comparison is stored in scripts/results/check_benchmarks.txt.
set -euo pipefail
(($# >= 1)) || { sed -n 's/^# //p' "$0" >&2; exit 2; }
bin=${BIN-.venv/bin/}  # BIN= uses the commands on PATH
data=$(realpath "$1") output=${2:-out/check} here=$(dirname "$0")
mkdir -p "$output"/{data,xsimpp}
for name in sib200 xquad-r alignment-gold; do ln -sfn "$data/$name" "$output/data/$name"; done
ln -sfn "$data/tatoeba" "$output/xsimpp/tatoeba"
evaluate() {  # suite, folder, other options
    "$bin"metaphrase evaluate starter --suite "$1" --data "$output/$2" --output "$output/$1.json" "${@:3}"
}
evaluate sib200 data --prompt none --languages de sw
evaluate answer-retrieval data --prompt none --languages de en --answer_text sentence
evaluate word-alignment data
evaluate xsim++ xsimpp --prompt none --languages de
"$bin"python - "$output" <<'PYTHON'
import gzip, sys
from pathlib import Path

from metaphrase import load_encoder
from metaphrase.evaluation.distractors import distractors

output = Path(sys.argv[1])
load_encoder("starter").save_pretrained(str(output / "starter"))
lines = gzip.decompress((output / "xsimpp/tatoeba/de-en.tsv.gz").read_bytes()).decode().splitlines()[1:]
targets = [line.split("\t")[1] for line in lines]
rows = [f"{kind}\t{one}\t{new}\n" for one in targets for kind, new in distractors(one).items()]
(output / "changed.tsv").write_text("".join(rows))
PYTHON
embed() { "$bin"python "$here/embed_benchmarks.py" "$output/starter" "$output/$1" "$output/embeddings" "${@:2}"; }
embed data --languages de,en --sib200 deu_Latn,swh_Latn
embed xsimpp --languages de --xsimpp tatoeba "$output/changed.tsv"
"$bin"python "$here/check_benchmarks.py" "$data" "$output/embeddings" --results "$output"/*.json |
    tee "$output/check_benchmarks.txt"
cp "$output/check_benchmarks.txt" "$here/results/"
