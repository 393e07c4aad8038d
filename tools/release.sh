#!/bin/bash
# make release: build sdist and wheel in build/release, check them, and install each in an empty
# environment. Nothing is uploaded. The packages that they need are those of the PYTHON given.
set -euo pipefail
unset PYTHONPATH  # what lies there counts as installed
python=$1 output=build/release
rm -rf "$output"
"$python" -m build --no-isolation --outdir "$output" > /dev/null
"$python" -m twine check --strict "$output"/*
others=$("$python" -c 'import site; print(*site.getsitepackages(), sep="\n")')
for file in "$PWD/$output"/*; do
    folder=$(mktemp -d)
    "$python" -m venv --without-pip "$folder"
    # Of a .pth file in these folders nothing is read, so that of a clone leads nowhere.
    echo "$others" > "$("$folder/bin/python" -c 'import site; print(site.getsitepackages()[0])')/others.pth"
    "$python" -m pip --python "$folder/bin/python" --disable-pip-version-check install --quiet \
        --no-deps --no-index --no-build-isolation "$file"
    (
        cd "$folder"
        bin/albert-ds --help > /dev/null
        echo "${file##*/}: $(bin/python -c 'import albert_ds as a; print(a.__version__, a.__file__)')"
    )
    rm -r "$folder"
done
