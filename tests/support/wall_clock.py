"""A wall clock that tests move: a library that programs load before the C library."""

from __future__ import annotations

import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

_SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile const long long *seconds;

__attribute__((constructor)) static void map(void)
{
    const char *path = getenv("WALL_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file >= 0) {
        void *mapped = mmap(NULL, sizeof *seconds, PROT_READ, MAP_SHARED, file, 0);
        if (mapped != MAP_FAILED)
            seconds = mapped;
        close(file);
    }
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int result = (int)syscall(SYS_clock_gettime, clock, now);
    if (result == 0 && seconds && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *seconds;
    return result;
}

time_t time(time_t *now)
{
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (now)
        *now = found.tv_sec;
    return found.tv_sec;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}
"""


@dataclass
class WallClock:
    """The wall clock of the programs that are started with ``environment``."""

    file: Path
    library: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self.library), "WALL_CLOCK": str(self.file)}

    def jump(self, seconds: int) -> None:
        """Move it so far from the true one, of all these programs at once."""
        with self.file.open("r+b") as file:
            file.write(struct.pack("<q", seconds))


def wall_clock(folder: Path) -> WallClock:
    """Compile the library; skips the test where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler here")
    source, library, file = (folder / f"wall_clock{suffix}" for suffix in (".c", ".so", ""))
    source.write_text(_SOURCE)
    file.write_bytes(bytes(8))
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source], check=True, timeout=60)
    return WallClock(file, library)
