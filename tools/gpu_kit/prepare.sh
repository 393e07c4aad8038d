#!/usr/bin/env bash
# Fill .whl/ of this checkout with everything that the GPU machine lacks:
#     bash tools/gpu_kit/prepare.sh [DATA]     DATA: shards of rows of 512 tokens (albert-ds shards)
# Without DATA it builds shards of TEXT="a.txt b.xz c.tar.xz", TEXT_MB megabytes of it; without
# TEXT of Python's own manual. With MINUTES="shards more-shards" it packs these instead, of rows of 128
# tokens, a file each, for minutes.sh. Then, on the GPU machine, in the same root: bash .whl/run.sh 540
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
cd "$HERE/../.."
PY=${PY:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
# What on_device.txt does not list, at the versions of constraints.txt.
NEEDED="megatron-core webdataset braceexpand sentencex tenacity backports.zstd hjson pydantic
    pydantic_core annotated-types typing-inspection sentencepiece"
WHEELS="--only-binary=:all: --python-version 3.12 --implementation cp"
for platform in manylinux_2_{28,27,24,17} manylinux2014 manylinux1; do
    WHEELS="$WHEELS --platform ${platform}_x86_64"
done

mkdir -p .whl
for name in $NEEDED deepspeed; do
    version=$(sed -n "s/^${name//_/[-_]}==\([^; ]*\).*/\1/p" constraints.txt | head -1)
    stem=.whl/${name//[-.]/_}
    compgen -G "$stem-$version-*.whl" > /dev/null && continue
    rm -f "$stem"-[0-9]*.whl
    if [ "$name" = deepspeed ]; then
        # It is published as source only. Without compiled operators its wheel fits every Python.
        DS_BUILD_OPS=0 "$PY" -m pip wheel -q --no-deps --no-build-isolation -w .whl \
            "$name==$version"
    else
        # shellcheck disable=SC2086
        "$PY" -m pip download -q --no-deps $WHEELS -d .whl "$name==$version"
    fi
done
"$PY" "$HERE/check_wheels.py" .whl "$HERE/on_device.txt" pyproject.toml

read_text() {
    for file in $TEXT; do
        case $file in
            *.tar.xz) tar xJOf "$file" ;;
            *.xz) xz -dc "$file" ;;
            *) cat "$file" ;;
        esac
    done
}

DATA=${1:-}
number=0
for folder in ${MINUTES:-}; do
    number=$((number + 1))
    # Token ids have two bytes: these settings spare 3 % beside -6 alone.
    (cd "$folder" && tar c -- *.tar index.json spiece.model tokenizer_config.json) |
        xz -T0 --lzma2=preset=6,lp=1,pb=1,lc=3 > ".whl/minutes-data-$number.tar.xz"
done
if [ -n "$DATA" ] || { [ ! -f .whl/data.tar.xz ] && [ -z "${MINUTES:-}" ]; }; then
    MADE=$(mktemp -d)
    trap 'rm -rf "$MADE"' EXIT
    if [ -z "$DATA" ]; then
        if [ -n "${TEXT:-}" ]; then
            # `head` closes the pipe early, which is no failure.
            { read_text || true; } | head -c "${TEXT_MB:-40}000000" > "$MADE/text.txt"
        else
            "$PY" tools/demo/demo_corpus.py --max-bytes 4000000 --output "$MADE/text.txt"
        fi
        "$PY" -m albert_ds vocab --input "$MADE/text.txt" --output "$MADE/vocab" \
            --vocab-size "${VOCAB:-$([ -n "${TEXT:-}" ] && echo 30000 || echo 8000)}"
        "$PY" -m albert_ds shards --input "$MADE/text.txt" --vocab "$MADE/vocab/spiece.model" \
            --sequence-length 512 --holdout 0.01 --output "$MADE/data"
        DATA=$MADE/data
    fi
    (cd "$DATA" && tar c -- *.tar index.json spiece.model tokenizer_config.json) |
        xz -6 -T0 > .whl/data.tar.xz
fi
git archive HEAD -- albert_ds tools ':!tools/demo' tests ds_configs pyproject.toml |
    gzip -9 > .whl/project.tar.gz
cp "$HERE/run.sh" .whl/
du -bc .whl/*.whl | tail -1 | sed 's/total/bytes of wheels/'
du -b .whl/*.tar.?z
