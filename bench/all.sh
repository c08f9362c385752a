#!/bin/sh
# The results of bench/results that a CPU can give, one after the other. It takes hours: README.md has the minutes
# that are known. `bench/all.sh planning times` makes only those again. What fails does not stop the rest.
set -u
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
results=bench/results
wanted=" $* "
failed=""

make() { # make NAME COMMAND...: runs the command if NAME was asked for, or nothing was
    name=$1
    shift
    case "$wanted" in "  " | *" $name "*) ;; *) return ;; esac
    printf '\n== %s: %s\n' "$name" "$*"
    started=$(date +%s)
    "$@" || failed="$failed $name"
    printf '== %s: %d s\n' "$name" $(($(date +%s) - started))
}

make planning python bench/planning.py --nodes 1500 6000 --json $results/planning.json
make planning-12000 python bench/planning.py --nodes 12000 --json $results/planning-12000.json
make times python bench/times.py --json $results/times.json
make cold python bench/cold.py --json $results/cold.json
make ablation-networks python bench/ablation.py --drawn 0 --chains --json $results/ablation-networks.json
make ablation-drawn python bench/ablation.py --drawn 40 --models --chains --json $results/ablation-drawn.json
make ablation-chains python bench/ablation.py --drawn 0 --models --json $results/ablation-chains.json
make ablation-variants python bench/ablation.py --drawn 0 --chains \
    --parts 'values computed again' 'values worth keeping' --json $results/ablation-variants.json
make ablation-model python bench/ablation.py --drawn 0 --chains --models unet densenet resnet transformer \
    --parts layout concatenation pooling 'in place' --json $results/ablation-model.json
make ablation-inplace python bench/ablation.py --drawn 0 --chains --fusion inplace \
    --models gated_mlp tanh_mlp resnet transformer unet --parts 'in place' --json $results/ablation-inplace.json
make budgets-eager python bench/budgets.py --compiler eager --scale full --json $results/budgets-eager.json
make budgets-inductor python bench/budgets.py --compiler inductor --json $results/budgets-inductor.json
make unseen-cpu python bench/unseen.py --no-loops --json $results/unseen-cpu.json
make unseen-h100 python bench/unseen.py --device h100 --json $results/unseen-h100.json
make steps-eager python bench/steps.py --compiler eager --json $results/steps-eager.json
make steps-inductor python bench/steps.py --compiler inductor --json $results/steps-inductor.json
make no-regret python bench/no_regret.py --scale full --json $results/no-regret.json
for network in transformer llama resnet densenet unet encoder_decoder vision_transformer lstm; do
    make "frontier-$network" python bench/frontier.py --models $network --scale full --json "$results/frontier-$network.json"
done
make paper bench/paper/run.sh

[ -z "$failed" ] || { printf '\nfailed:%s\n' "$failed"; exit 1; }
