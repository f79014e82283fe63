#!/usr/bin/env bash
# Does pretraining help? Pretrain each family on unlabelled text, fine-tune it on labelled sets with few and all labels,
# beside the same nets from scratch, the majority class and a linear SVM; print the tables as Markdown.
#
#   tools/reproduce_downstream.sh DATA OUT [--models bert,gpt,t5] [--sets movies,...] [--quick] [WORD...]
#
# DATA holds wiki_en.txt, sotu.txt and wordnet.txt (pretraining), and wiki_topic_en, movies, reuters_r8, conll2003 and
# zh_reviews .jsonl (text or tokens, label or tags, split). OUT gets all runs; what is done in it is not done again.
# --models, --sets: some of them (conll2003 has no t5, which reads no tags). --quick: a few steps of each run, to try it
# all out. WORD: of lmzoo.train, for all runs, such as trainer.precision=bf16-mixed. Needs pip install 'lmzoo[bench]'.
set -euo pipefail

usage="usage: tools/reproduce_downstream.sh DATA OUT [--models bert,gpt,t5] [--sets movies,...] [--quick] [WORD...]"
[[ ${1:-} && ${2:-} ]] || { echo "$usage" >&2; exit 2; }
data=$1 out=$2
shift 2
models=(bert gpt t5) sets=(wiki_topic_en movies zh_reviews reuters_r8 conll2003) words=() quick=()
seeds=1,2,3 sizes=10:120,50:200,all:600
while (($#)); do
  case $1 in
    --models) IFS=, read -ra models <<<"${2:-}"; shift; shift $(($# > 0)) ;;
    --sets) IFS=, read -ra sets <<<"${2:-}"; shift; shift $(($# > 0)) ;;
    --quick)
      quick=(model.d_model=32 model.n_layers=1 model.n_heads=2 model.d_ff=64 model.max_len=64 trainer.max_steps=4)
      seeds=1 sizes=3:4; shift ;;
    -*) echo "unknown: $1" >&2; exit 2 ;;
    *) words+=("$1"); shift ;;
  esac
done
python=${PYTHON:-python}
((${#models[@]})) || { echo "--models: name some of bert, gpt, t5" >&2; exit 2; }
((${#sets[@]})) || { echo "--sets: name some of wiki_topic_en, movies, zh_reviews, reuters_r8, conll2003" >&2; exit 2; }
for model in "${models[@]}"; do
  [[ $model =~ ^(bert|gpt|t5)$ ]] || { echo "--models: $model is not one of bert, gpt, t5" >&2; exit 2; }
done
for name in "${sets[@]}"; do
  [[ $name =~ ^(wiki_topic_en|movies|zh_reviews|reuters_r8|conll2003)$ ]] || { echo "--sets: there is no $name" >&2; exit 2; }
done
for name in {wiki_en,sotu,wordnet}.txt "${sets[@]/%/.jsonl}"; do
  [[ -f $data/$name ]] || { echo "$data/$name is missing" >&2; exit 2; }
done
mkdir -p "$out"

# LANGUAGE MODEL WORD...: pretrain, unless that is done. A tiny encoder with post-norm and learned positions predicts no
# more than unigrams for over a thousand steps, one with pre-norm and rotary positions for some hundreds
pretrained() {
  local folder=$out/$1-$2 own steps
  [[ -f $folder/result.json ]] && return
  case $1-$2 in en-bert) steps=8000 ;; en-*) steps=4500 ;; zh-bert) steps=3000 ;; zh-*) steps=2000 ;; esac
  case $2 in
    bert) own=(task=mlm optim.lr=2e-3 model/position=rotary model/block=pre) ;;
    gpt) own=(task=clm optim.lr=2e-3) ;;
    t5) own=(task=span_corruption) ;;
  esac
  if [[ -f $folder/checkpoints/MANIFEST.json ]]; then
    "$python" -m lmzoo.train ckpt="$folder"
  else
    "$python" -m lmzoo.train model="$2" size=tiny model.max_len=128 data.batch_size=32 \
      trainer.max_steps=$steps "${own[@]}" run_dir="$folder" logger.wandb.mode=disabled "${words[@]}" "${@:3}" "${quick[@]}"
  fi
}

# SET METRIC INIT... -- WORD...: some lines of the table of a labelled set
lines() {
  local set=$1 metric=$2 folder=$out/$1-$model inits=()
  shift 2
  while [[ $1 != -- ]]; do inits+=("$1"); shift; done
  "$python" -m lmzoo.tools.learning_curve "$folder" --init "${inits[@]}" --sizes $sizes --seeds $seeds --metric "test/$metric" \
    data=jsonl data.path="$data/$set.jsonl" data.split_column=split checkpoint.monitor="val/$metric" \
    trainer.val_every_n_steps=40 logger.wandb.mode=disabled \
    "${@:2}" "${words[@]}" >"$folder.log" 2>&1 || { tail -5 "$folder.log" >&2; exit 1; }
  grep '^|' "$folder.log"
}

mixture=(data=mixture tokenizer.vocab_size=8192)
for name in wiki_en sotu wordnet; do
  mixture+=("data.sources.$name.path=$data/$name.txt" "data.sources.$name.weight=$(($(wc -c <"$data/$name.txt") / 100000 + 1))")
done

for set in "${sets[@]}"; do
  language=en metric=accuracy also=(majority svm) own=(task=classification task.head.pool=mean) skipped=0
  case $set in
    zh_reviews)
      language=zh
      [[ -s $out/zh.txt ]] || "$python" - "$data/zh_reviews.jsonl" "$out/zh.txt" <<'PYTHON'
import json, sys
rows = map(json.loads, open(sys.argv[1], encoding="utf-8"))
texts = [" ".join(row["text"].split()) for row in rows if row["split"] == "train"]
open(sys.argv[2], "w", encoding="utf-8").write("\n\n".join(texts) + "\n")
PYTHON
      ;;
    conll2003)
      metric=entity_f1 also=()
      own=(task=token_classification data.words_column=tokens data.tags_column=tags) ;;
  esac
  for model in "${models[@]}"; do
    [[ $set == conll2003 && $model == t5 ]] && continue
    net=$out/$language-$model optim=(optim.lr=1e-3)
    [[ $model == t5 ]] && optim=(optim=adafactor optim.lr=1e-2)
    if [[ $language == en ]]; then pretrained en "$model" "${mixture[@]}" >&2
    else pretrained zh "$model" data=text data.path="$out/zh.txt" tokenizer=char >&2; fi
    ((skipped)) || printf '\n**%s: %s**\n\n' "$set" "$metric"
    lines "$set" "$metric" "$net" "scratch:$net" "${also[@]}" -- "${own[@]}" "${optim[@]}" | tail -n +$((skipped + 1))
    skipped=2 also=()  # the table's head
  done
done
