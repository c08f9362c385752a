#!/bin/sh
# All of the paper's figures, from anywhere in the repository; options go to `fxremat paper`, e.g. --full.
set -eu
cd "$(dirname "$0")/../.."
mkdir -p bench/results docs/images
for figure in 5 6 7; do
    fxremat paper --figure "$figure" --json "bench/results/figure$figure.json" \
        --plot "docs/images/figure$figure.png" "$@"
done
