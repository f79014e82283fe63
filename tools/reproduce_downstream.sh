#!/usr/bin/env bash
# Does pretraining help? Pretrain each family on unlabelled text, fine-tune it on labelled sets with few and all labels,
# beside the same nets from scratch, the majority class and a linear SVM; print the tables as Markdown.
#
#   tools/reproduce_downstream.sh DATA OUT [--minutes 20] [--quick]
#
# DATA holds wiki_en.txt, sotu.txt and wordnet.txt (pretraining), and wiki_topic_en, movies, reuters_r8, conll2003 and
# zh_reviews .jsonl (text or tokens, label or tags, split). OUT gets all runs; what is done in it is not done again.
# --minutes: of pretraining, for each net; --quick: a few steps of each run on a part of the texts, to try it all out.
# Needs pip install 'lmzoo[bench]'.
set -euo pipefail

[[ ${1:-} && ${2:-} ]] || { echo "usage: tools/reproduce_downstream.sh DATA OUT [--minutes N] [--quick]" >&2; exit 2; }
data=$1 out=$2
shift 2
minutes=20 pretrain=() finetune=(trainer.max_steps=700 trainer.val_every_n_steps=50) seeds=1,2,3 sizes=10,50,all
while (($#)); do
  case $1 in
    --minutes) minutes=${2:-}; shift; shift $(($# > 0)) ;;
    --quick)
      tiny=(size=tiny model.d_model=32 model.n_layers=1 model.n_heads=2 model.d_ff=64 model.max_len=64)
      pretrain=("${tiny[@]}" trainer.max_steps=4 data.batch_size=4)
      finetune=(trainer.max_steps=4 trainer.val_every_n_steps=2 data.batch_size=4 trainer.limit_val_batches=4)
      seeds=1 sizes=3; shift ;;
    *) echo "unknown: $1" >&2; exit 2 ;;
  esac
done
python=${PYTHON:-python}
[[ $minutes =~ ^[1-9][0-9]*$ ]] || { echo "--minutes $minutes: give a whole number, 1 or more" >&2; exit 2; }
for name in {wiki_en,sotu,wordnet}.txt {wiki_topic_en,movies,reuters_r8,conll2003,zh_reviews}.jsonl; do
  [[ -f $data/$name ]] || { echo "$data/$name is missing" >&2; exit 2; }
done
mkdir -p "$out"

# LANGUAGE MODEL TASK WORD...: pretrain, unless that is done. The clock ends it; the schedule is for as many steps as tiny
# nets take in that time on two cores
pretrained() {
  local folder=$out/$1-$2
  [[ -f $folder/result.json ]] && return
  if [[ -f $folder/checkpoints/MANIFEST.json ]]; then
    "$python" -m lmzoo.train ckpt="$folder"
  else
    "$python" -m lmzoo.train model="$2" task="$3" run_dir="$folder" logger.wandb.mode=disabled \
      trainer.max_steps=$((minutes * 900)) trainer.max_time="$(printf '00:%02d:%02d:00' $((minutes / 60)) $((minutes % 60)))" \
      "${pretrain[@]}" "${@:4}"
  fi
}

# SET TITLE WORD...: the table of a labelled set, whose metric and beginnings are in $metric and ${inits[@]}
table() {
  "$python" -m lmzoo.tools.learning_curve "$out/$1" --init "${inits[@]}" --sizes $sizes --seeds $seeds --metric "$metric" \
    data=jsonl data.path="$data/$1.jsonl" data.split_column=split "checkpoint.monitor=val/${metric#test/}" \
    logger.wandb.mode=disabled "${finetune[@]}" "${@:3}" >"$out/$1.log" 2>&1 || { tail -5 "$out/$1.log" >&2; exit 1; }
  printf '\n**%s**\n\n' "$2"
  grep '^|' "$out/$1.log"
}

mixture=(data=mixture)
for name in wiki_en sotu wordnet; do
  mixture+=("data.sources.$name.path=$data/$name.txt" "data.sources.$name.weight=$(($(wc -c <"$data/$name.txt") / 100000 + 1))")
done
{
  pretrained en bert mlm "${mixture[@]}"
  pretrained en gpt clm "${mixture[@]}"
  pretrained en t5 span_corruption "${mixture[@]}"
  [[ -s $out/zh.txt ]] || "$python" - "$data/zh_reviews.jsonl" "$out/zh.txt" <<'PYTHON'
import json, sys
rows = map(json.loads, open(sys.argv[1], encoding="utf-8"))
texts = [" ".join(row["text"].split()) for row in rows if row["split"] == "train"]
open(sys.argv[2], "w", encoding="utf-8").write("\n\n".join(texts) + "\n")
PYTHON
  for pair in "bert mlm" "gpt clm" "t5 span_corruption"; do
    pretrained zh $pair data=text data.path="$out/zh.txt" tokenizer=char
  done
} >&2

of() { inits=(); for model in "${@:2}"; do inits+=("$out/$1-$model" "scratch:$out/$1-$model"); done; }
metric=test/accuracy
of en bert gpt t5
inits+=(majority svm)
table wiki_topic_en "wiki_topic_en: 11 topics" task=classification
table movies "movies: negative or positive" task=classification
table reuters_r8 "reuters_r8: 8 topics of news" task=classification
of zh bert gpt t5
inits+=(majority svm)
table zh_reviews "zh_reviews: negative or positive, in Chinese" task=classification
of en bert gpt
metric=test/entity_f1
table conll2003 "conll2003: names, F1 of whole entities" task=token_classification data.words_column=tokens data.tags_column=tags
