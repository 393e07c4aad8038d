#!/usr/bin/env bash
# Fill .whl/ of this checkout with everything that the GPU machine lacks:
#     bash tools/gpu_kit/prepare.sh [DATA]   DATA: shards of rows of 512 tokens (`albert-ds shards`)
# Without DATA shards are built from TEXT="a.txt b.xz ..." (TEXT_MB megabytes of it), or from Python's own manual.
# Then, on the GPU machine, in the same root:  bash .whl/run.sh 540
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
ROOT=$(git rev-parse --show-toplevel); cd "$ROOT"
PY=${PY:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
# What on_device.txt does not list, at the versions of constraints.txt. sentencepiece is there as 0.2.2; the
# project asks for 0.2.3. `--upgrade --target` puts these before the machine's own.
NEEDED=(megatron-core webdataset braceexpand sentencex tenacity backports.zstd hjson pydantic pydantic_core
    annotated-types typing-inspection sentencepiece)
PLATFORMS=$(for n in 28 27 24 17; do printf -- '--platform manylinux_2_%s_x86_64 ' $n; done; echo --platform manylinux2014_x86_64 --platform manylinux1_x86_64)
mkdir -p .whl

pin() { sed -n "s/^$1==\([^; ]*\).*/\1/p" constraints.txt | head -1; }
for name in "${NEEDED[@]}"; do
    version=$(pin "$name"); [ -n "$version" ] || version=$(pin "${name//_/-}")
    stem=${name//[-.]/_}
    compgen -G ".whl/${stem}-$version-*.whl" > /dev/null && continue
    rm -f ".whl/${stem}"-[0-9]*.whl
    # shellcheck disable=SC2086
    "$PY" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp $PLATFORMS \
        -d .whl "$name==$version" 2>&1 | { grep -v WARNING || true; }
done
# DeepSpeed is published as source only. Without compiled operators its wheel fits every Python.
version=$(pin deepspeed)
if ! compgen -G ".whl/deepspeed-$version-py3-none-any.whl" > /dev/null; then
    rm -f .whl/deepspeed-*.whl
    DS_BUILD_OPS=0 "$PY" -m pip wheel -q --no-deps --no-build-isolation "deepspeed==$version" -w .whl 2>&1 | { grep -v WARNING || true; }
fi
# One version of each, and every need of theirs is either here or on the machine.
"$PY" - "$HERE/on_device.txt" <<'P'
import re, sys, zipfile
from pathlib import Path
name = lambda text: re.sub(r"[-_.]+", "-", text).lower()
kinds = Path(sys.argv[1])
there = {name(line) for line in kinds.read_text().split("\n") if line and not line.startswith("#")}
carried, needs = {}, {}
for path in sorted(Path(".whl").glob("*.whl")):
    with zipfile.ZipFile(path) as wheel:
        meta = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        text = wheel.read(meta).decode().split("\n\n")[0]
    own = name(re.search(r"^Name: (.*)$", text, re.M)[1])
    assert own not in carried, f"two versions of {own}: the install would stop"
    carried[own] = path
    for line in re.findall(r"^Requires-Dist: (.*)$", text, re.M):
        if "extra ==" in line or re.search(r"python_version\s*<\s*['\"]3\.(8|9|10|11|12)['\"]", line) or "sys_platform == 'win" in line or 'sys_platform == "win' in line:
            continue
        needs.setdefault(name(re.match(r"[A-Za-z0-9._-]+", line)[0]), []).append(own)
# what the project itself imports there
for line in re.findall(r'^    "([^"]+)",$', Path("pyproject.toml").read_text().split("dependencies = [")[1].split("]")[0], re.M):
    needs.setdefault(name(re.match(r"[A-Za-z0-9._-]+", line)[0]), []).append("the project")
lost = {n: by for n, by in needs.items() if n not in carried and there and n not in there}
print("carried:", ", ".join(sorted(carried)))
print("double (also on the GPU machine, another version wins):", ", ".join(sorted(set(carried) & there)) or "none")
if lost:
    sys.exit(f"missing on the GPU machine: {lost}")
P
# The data: shards, as one archive.
DATA=${1:-}
if [ -n "$DATA" ] || [ ! -f .whl/data.tar.xz ]; then
    if [ -z "$DATA" ]; then
        made=.whl/build; rm -rf $made; mkdir $made;
        for file in ${TEXT:-}; do case $file in *.tar.xz) tar xJOf "$file" ;; *.xz) xz -dc "$file" ;; *) cat "$file" ;; esac; done \
            | head -c "$(( ${TEXT_MB:-40} * 1000000 ))" > $made/text.txt || true
        [ -s $made/text.txt ] || "$PY" tools/demo/demo_corpus.py --max-bytes 4000000 --output $made/text.txt
        "$PY" -m albert_ds vocab --input $made/text.txt --vocab-size "${VOCAB:-30000}" --output $made/vocab
        "$PY" -m albert_ds shards --input $made/text.txt --vocab $made/vocab/spiece.model --sequence-length 512 \
            --holdout 0.01 --output $made/data
        DATA=$made/data
    fi
    (cd "$DATA" && tar c -- *.tar index.json spiece.model tokenizer_config.json) | xz -6 -T0 > .whl/data.tar.xz
fi
git archive HEAD -- albert_ds tools tests ds_configs pyproject.toml constraints.txt | gzip -9 > .whl/project.tar.gz
cp "$HERE"/run.sh "$HERE"/gpu_day.py "$HERE"/report.py "$HERE"/exact.py .whl/
tree=$(git ls-files -z --cached --others --exclude-standard | xargs -0 du -cb 2> /dev/null | tail -1 | cut -f1)
kit=$(du -sb .whl | cut -f1)
printf 'wheels %s MB, data %s MB, project %s MB; .whl %s MB + working tree %s MB of 64 MiB\n' \
    $(( $(cat .whl/*.whl | wc -c) / 1000000 )) $(( $(stat -c %s .whl/data.tar.xz) / 1000000 )) \
    $(( $(stat -c %s .whl/project.tar.gz) / 1000000 )) $(( kit / 1000000 )) $(( tree / 1000000 ))
[ $(( kit + tree )) -lt 66000000 ] || { echo "too large to travel" >&2; exit 1; }
