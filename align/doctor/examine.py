"""All examinations, in the order in which their answers are shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from align.doctor import ascend, disk, environments, leftovers, limits, memory, models, network, python, variables
from align.doctor.types import Check, Examination, Machine, Needs
from align.errors import UserError

#: Name of the answer if an examination raises, and the examination.
EXAMINATIONS: tuple[tuple[str, Examination], ...] = (
    ("Python", python.examine),
    ("ALIGN_HOME", disk.examine_home),
    ("runs", disk.examine_runs),
    ("temporary files", disk.examine_temporary),
    ("memory", memory.examine_memory),
    ("/dev/shm", memory.examine_shared),
    ("open files", limits.examine_files),
    ("threads", limits.examine_threads),
    ("limits", limits.examine_sizes),
    ("environments", environments.examine),
    ("older environments", environments.examine_older),
    ("models", models.examine),
    ("loopback", network.examine_loopback),
    ("RAY_ADDRESS", network.examine_ray_address),
    ("variables", variables.examine),
    ("earlier runs", leftovers.examine_processes),
    ("Ray sessions", leftovers.examine_sessions),
    ("Ascend", ascend.examine),
)


def examine(
    machine: Machine, needs: Needs, examinations: Sequence[tuple[str, Examination]] = EXAMINATIONS
) -> Iterator[Check]:
    """Every answer about a machine, as soon as it is known. One examination that fails never ends the others."""
    for name, examination in examinations:
        try:
            yield from examination(machine, needs)
        except UserError as error:
            yield Check(name, "unknown", error.message, error.hint)
        except Exception as error:
            reason = str(error).strip().splitlines()
            yield Check(name, "unknown", f"{type(error).__name__}: {reason[0] if reason else 'no message'}")
