#!/usr/bin/env bash
# The default suite in surroundings that differ from the usual ones (CONTRIBUTING.md, "Any machine").
#
#   tests/surroundings.sh [--short] [NAME...] [tests/FILE...]
#
#   user       not root, in a folder of mode 0700 whose path has a blank and an umlaut, umask 077, a /dev/shm of 64 MiB
#   bare       no C compiler, a HOME in which nobody can write, no network, another time zone and locale
#   processor  another instruction set and number of threads
#   beside     two runs at the same time, of what --short runs (if it is named)
#
# What a machine refuses (another user, mounts, a network of its own) is left out, and the output says so.
set -euo pipefail
cd "$(dirname "$0")/.."
readonly ROOT=$PWD

# What depends on its surroundings most: users, folders, memory, compilers, arithmetic.
readonly SHORT=(tests/attach/test_refusals.py tests/tracing/test_surroundings.py tests/tracing/test_native.py
	tests/cli/test_doctor.py tests/runtime/test_models.py)

selection=()
names=()
for word in "$@"; do
	case $word in
	--short) selection=("${SHORT[@]}") ;;
	tests/*) selection+=("$word") ;;
	user | bare | processor | beside) names+=("$word") ;;
	*) echo "unknown surroundings: $word; choose from user, bare, processor, beside" >&2 && exit 2 ;;
	esac
done
((${#names[@]})) || names=(user bare processor)

scratch=$(mktemp -d "${TMPDIR:-/tmp}/surroundings.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
chmod 755 "$scratch"

left_out() { echo "--- left out on this machine: $*"; }

is_root() { [[ $EUID == 0 ]]; }

# suite PREFIX...: the tests of the folder that it is called in, behind a command such as `env` or `unshare`
suite() {
	"$@" .venv/bin/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder -p no:cacheprovider \
		"${selection[@]}"
}

# The checkout with all that is not ignored, and an environment that another user can read.
copy() {
	local folder=$1 base prefix site
	git ls-files -z --cached --others --exclude-standard |
		tar --null --no-recursion --ignore-failed-read -cf - -T - | tar -C "$folder" -xf -
	base=$(.venv/bin/python -c 'import os, sys; print(os.path.realpath(sys._base_executable))')
	prefix=$(.venv/bin/python -c 'import sys; print(sys.base_prefix)')
	site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	if ! "${as_user[@]}" "$base" -c '' 2>/dev/null; then
		cp -al "$prefix" "$scratch/python" 2>/dev/null || cp -a "$prefix" "$scratch/python"
		base=$scratch/python${base#"$prefix"}
		as_user+=(LD_LIBRARY_PATH="$scratch/python/lib")
	fi
	"$base" -m venv --without-pip "$folder/.venv"
	site=$folder/${site#"$ROOT/"}
	rmdir "$site"
	cp -al "${site/#"$folder"/"$ROOT"}" "$site" 2>/dev/null || cp -a "${site/#"$folder"/"$ROOT"}" "$site"
	rm -rf "$site"/*sgl_aspects-* # of the checkout, which the other user may not enter: installed anew
}

user() {
	local folder="$scratch/a folder für tests" memory=()
	as_user=(env HOME="$scratch/home")
	mkdir "$folder" "$scratch/home"
	if is_root; then
		as_user=(setpriv --reuid=65534 --regid=65534 --clear-groups --no-new-privs env HOME="$scratch/home" USER=nobody)
	fi
	if ! "${as_user[@]}" true; then
		left_out "another user: setpriv is refused"
		return
	fi
	copy "$folder"
	if is_root; then
		find "$folder" "$scratch/home" ! -type f -exec chown -h 65534:65534 {} +
		find "$folder" -path "$folder/.venv" -prune -o -type f -exec chown 65534:65534 {} +
		# Installed with umask 077: a copy of the user's own, since the files are links to this checkout's.
		if [[ -n $(find "$folder/.venv" -type f ! -perm -o=r -print -quit) ]]; then
			cp -a "$folder/.venv" "$folder/.own" && rm -rf "$folder/.venv" && mv "$folder/.own" "$folder/.venv"
			chown -R -h 65534:65534 "$folder/.venv"
		fi
	fi
	chmod 700 "$folder" "$scratch/home"
	if unshare --mount mount -t tmpfs -o size=64m tmpfs /dev/shm 2>/dev/null; then
		memory=(unshare --mount sh -c 'mount -t tmpfs -o size=64m,mode=1777 tmpfs /dev/shm && exec "$@"' sh)
	else
		left_out "a /dev/shm of 64 MiB: mounts are refused"
	fi
	cd "$folder"
	umask 077
	"${as_user[@]}" .venv/bin/python -m pip install --quiet --disable-pip-version-check \
		--no-deps --no-build-isolation -e .
	suite "${memory[@]}" "${as_user[@]}" OMP_NUM_THREADS=1
}

bare() {
	local network=() tools=$scratch/tools
	mkdir "$tools"
	local IFS=: file
	for folder in $PATH; do
		for file in "$folder"/*; do
			case ${file##*/} in
			cc | c++ | c[89]9 | *gcc* | *g++* | *clang* | tcc) ;;
			*) [[ -x $file && ! -e $tools/${file##*/} ]] && ln -s "$file" "$tools/" ;;
			esac
		done
	done
	unset IFS
	if unshare --net ip link set lo up 2>/dev/null; then
		network=(unshare --net sh -c 'ip link set lo up && exec "$@"' sh)
	else
		left_out "no network: a network of its own is refused"
	fi
	suite "${network[@]}" env -u CC -u XDG_CACHE_HOME PATH="$tools" HOME=/proc TZ=Asia/Kathmandu LC_ALL=C \
		OMP_NUM_THREADS=1
}

processor() {
	local other=(ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2)
	if [[ $(.venv/bin/python -c 'import torch; print(torch.backends.cpu.get_cpu_capability())') != AVX512 ]]; then
		other=(ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41)
	fi
	suite env "${other[@]}" OMP_NUM_THREADS=2
}

beside() {
	selection=("${SHORT[@]}")
	suite env OMP_NUM_THREADS=1 >"$scratch/other" 2>&1 &
	local status=0
	suite env OMP_NUM_THREADS=4 || status=1
	wait $! || status=1
	cat "$scratch/other"
	return $status
}

status=0
for name in "${names[@]}"; do
	echo "=== $(date -u +%H:%M:%S) surroundings: $name"
	("$name") 2>&1 | tee "$scratch/log.$name" || status=1
	grep -E '^[0-9]+ (passed|failed)|passed|^--- ' "$scratch/log.$name" | sed "s/^/$name: /" >>"$scratch/summary" || true
done
echo "=== $(date -u +%H:%M:%S) summary"
cat "$scratch/summary"
exit $status
