#!/usr/bin/env bash
# Installs the system libraries that Mooncake, the remote store, loads (Debian and Ubuntu).
#
# Does nothing where they are installed. Where it cannot install them it says so and fails; tests
# of the remote store are skipped then.
set -euo pipefail

packages=(libibverbs1 libnuma1 liburing2 libcurl4)

missing=()
for package in "${packages[@]}"; do
    dpkg-query --show --showformat='${db:Status-Abbrev}' "$package" 2>/dev/null | grep -q '^ii' ||
        missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

root=()
[ "$(id -u)" -eq 0 ] || root=(sudo --non-interactive)
get() {
    "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get --quiet --quiet "$@" >/dev/null
}

echo "installing ${missing[*]} …"
if ! get install --yes --no-install-recommends "${missing[@]}" 2>/dev/null; then
    # Without lists of packages, or with old ones, it has to ask first.
    { get update && get install --yes --no-install-recommends "${missing[@]}"; } || {
        echo "not installed: ${missing[*]}; the remote store cannot be used" >&2
        exit 1
    }
fi
