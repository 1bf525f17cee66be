#!/bin/bash
# Tests scripts/release in a clone of this repository.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git clone -q --depth=1 "file://$PWD" "$work/clone"
# The present state, committed or not.
cp scripts/release scripts/version "$work/clone/scripts/"
cp CHANGELOG.md CMakeLists.txt "$work/clone/"
cd "$work/clone"
git config user.name tester
git config user.email tester@localhost
git add -A
git commit -q --allow-empty -m "as it is"

refused() { # refused TEXT ARGUMENT
  local output
  if output=$(scripts/release "$2" 2>&1) || [[ $output != *"$1"* ]]; then
    echo "scripts/release $2 was to be refused with \"$1\": $output" >&2
    exit 1
  fi
}
refused "not of the form" 1.2
refused "is older" 0.0.1
touch stray
refused "not committed: ?? stray" 99.0.0
rm stray

scripts/release 99.0.0 >/dev/null
[ "$(scripts/version)" = 99.0.0 ]
[ "$(git describe --exact-match)" = v99.0.0 ]
grep -qx "## \[99.0.0\] - $(date -u +%Y)-..-.." CHANGELOG.md
[ -z "$(git status --porcelain)" ]
(cd dist && sha256sum --quiet -c syncbn-99.0.0.tar.gz.sha256)
[ "$(tar -xzOf dist/syncbn-99.0.0.tar.gz syncbn-99.0.0/CMakeLists.txt | sed -n 's/^  VERSION //p')" = 99.0.0 ]
refused "already" 99.0.0
refused "is empty" 99.0.1
