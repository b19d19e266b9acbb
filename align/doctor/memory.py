"""Memory that is available, and the size of shared memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from align.doctor import cgroup
from align.doctor.types import Check, Machine, Needs, gb


def examine_memory(machine: Machine, needs: Needs) -> Iterator[Check]:
    """The least of what the kernel and the control group (of a container) give."""
    lines = (machine.proc / "meminfo").read_text(encoding="ascii").splitlines()
    known = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    total, available = (int(known[name][0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    limit = cgroup.memory(machine.proc, machine.cgroup)
    if limit is not None and limit.left < available:
        yield memory(limit.left, limit.most, needs, "of the container's limit")
    else:
        yield memory(available, total, needs, "of the machine's memory")


def memory(available: int, total: int, needs: Needs, which: str) -> Check:
    """Args: bytes that may be taken, and bytes of which they are a part."""
    usable = max(0, available - round((1 - needs.full) * total))
    found = f"{gb(available)} available {which} ({gb(total)})"
    mend = (
        "ps -eo pid,rss,args --sort=-rss | head  # end what is not needed"
        if "machine" in which
        else "docker run --memory=8g …"
    )
    if usable < needs.memory_least:
        kept = f"{gb(total - round(needs.full * total))} of it is the reserve below which Ray kills workers"
        return Check("memory", "missing", f"{found}, {kept}; the smallest run takes {gb(needs.memory_least)}", mend)
    if usable < needs.memory:
        return Check("memory", "warning", f"{found}; enough for qwen3, smollm2 takes {gb(needs.memory)}", mend)
    return Check("memory", "ok", found)


def examine_shared(machine: Machine, needs: Needs) -> Iterator[Check]:
    """Shared memory; containers often have 64 MB."""
    if not machine.shm.is_dir():
        found = f"{machine.shm} is not there"
        yield Check("/dev/shm", "missing", found, f"mount -t tmpfs -o size=1g tmpfs {machine.shm}")
    else:
        usage = shutil.disk_usage(machine.shm)
        yield shared(usage.free, usage.total, needs)


def shared(available: int, total: int, needs: Needs) -> Check:
    """Args: free bytes of ``/dev/shm``, and all."""
    found = f"{gb(available)} of {gb(total)} free"
    if available < needs.shared_memory:
        found += f", Ray and several ranks want {gb(needs.shared_memory)}: slower, and TP may fail"
        return Check(
            "/dev/shm",
            "warning",
            found,
            "mount -o remount,size=1g /dev/shm  # of a container: docker run --shm-size=1g …",
        )
    return Check("/dev/shm", "ok", found)
