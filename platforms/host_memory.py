"""The host's memory for this process: the machine's, or less if a cgroup limits it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROC_CGROUP = Path("/proc/self/cgroup")


def available_and_total() -> tuple[int, int]:
    """(available, total) bytes, the tightest of the machine and every cgroup above this process."""
    machine = psutil.virtual_memory()
    available, total = machine.available, machine.total
    for limit, used in cgroup_limits(PROC_CGROUP, CGROUP_ROOT):
        total = min(total, limit)
        available = min(available, max(limit - used, 0))
    return available, total


def peak_resident() -> int:
    """The most bytes that this process has had resident; the present ones if the system keeps no peak."""
    try:
        status = Path("/proc/self/status").read_text(errors="replace")
    except OSError:  # no procfs: macOS, Windows
        return int(psutil.Process().memory_info().rss)
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return int(psutil.Process().memory_info().rss)


def cgroup_limits(proc_cgroup: Path, root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, used) bytes of each limited memory cgroup above this process, versions 1 and 2.

    ``used`` leaves out file pages that the kernel can drop.
    """
    try:
        lines = proc_cgroup.read_text().splitlines()
    except OSError:  # no cgroups on this system
        return
    for line in lines:
        # Each line is "hierarchy:controllers:path"; version 2 is hierarchy 0 with no controllers.
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            yield from _limits_above(root, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _limits_above(
                root / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )


def _limits_above(
    root: Path, path: str, limit_file: str, used_file: str, reclaimable_key: str
) -> Iterator[tuple[int, int]]:
    # A container often sees the host's path, which is not mounted inside it: missing folders are skipped, and
    # the root, which is then the container's own group, is always read.
    folder = root / path.lstrip("/")
    for group in (folder, *folder.parents):
        limit = _number(group / limit_file)
        used = _number(group / used_file)
        if limit is not None and used is not None:
            yield limit, max(used - _reclaimable(group / "memory.stat", reclaimable_key), 0)
        if group == root:
            return


def _number(file: Path) -> int | None:
    """Read a number; None for "max" (no limit), or if the file does not exist."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(stat_file: Path, key: str) -> int:
    try:
        lines = stat_file.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0
