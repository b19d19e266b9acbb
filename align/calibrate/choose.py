"""Which floor judges two recordings: the one that was named, or one of their own circumstances."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from align.calibrate.floor import SUFFIX, Floor, floors_dir, load_floor
from align.compare.floor import FloorRule
from align.errors import UserError

AUTO, NONE = "auto", "none"
#: On the limits of a floor that was calibrated on another model of the same architecture. Weights decide how far
#: roundings are carried: in units of the prediction the tiny qwen3 and SmolLM2-135M are 1.6 times apart in the largest
#: relative L2 of whole tensors, and 3.1 times in that of tokens.
OTHER_MODEL = 3.0
#: On the limits of a floor that was calibrated on a simulated device and judges hardware: kernels accumulate in other
#: orders and use approximations that the simulation does not have. The same factor as the derived bounds leave above
#: the prediction for whole tensors.
HARDWARE = 4.0


def choose_floor(option: str, *manifests: Mapping[str, Any], place: Path | None = None) -> FloorRule | None:
    """The floor for two recordings; ``None`` judges by derived bounds.

    Args:
        option: ``auto``, ``none``, a floor's name or a file.
        manifests: of the recordings.
        place: where floors lie; default: the cache's ``floors/``.

    Raises:
        UserError: a floor that was named is not there, damaged, or of another dtype.
    """
    if option == NONE:
        return None
    about = _Circumstances(manifests)
    folder = floors_dir() if place is None else place
    if option == AUTO:
        return about.automatic(folder)
    file = Path(option).expanduser()
    if not file.is_file():
        file = folder / f"{option}{SUFFIX}"
    if not file.is_file():
        known = ", ".join(sorted(path.stem for path in folder.glob(f"*{SUFFIX}"))) or "there are none in " + str(folder)
        raise UserError(
            f"--floor {option} is no file and no floor",
            f"floors: {known}; make one: align calibrate; or say --floor none",
        )
    return about.named(load_floor(file))


class _Circumstances:
    """What decides whether a floor speaks of two recordings."""

    def __init__(self, manifests: tuple[Mapping[str, Any], ...]) -> None:
        self.dtypes = {str(one["dtype"]) for one in manifests if one.get("dtype")}
        self.devices = {str((one.get("spec") or {}).get("device")) for one in manifests}
        self.simulated = {one.get("simulated") for one in manifests}
        infos = [one.get("model_info") or {} for one in manifests]
        self.fingerprints = {str(one.get("fingerprint")) for one in infos}
        self.architectures = {str(((one.get("model") or {}).get("architectures") or [None])[0]) for one in manifests}

    @property
    def hardware(self) -> bool:
        """Whether neither side is known to be simulated."""
        return True not in self.simulated

    def automatic(self, folder: Path) -> FloorRule | None:
        """Of the same dtype, device and provenance; the same model's before another's, the newest first."""
        found = []
        for file in sorted(folder.glob(f"*{SUFFIX}")):
            try:
                floor = load_floor(file)
            except UserError:
                continue  # a damaged floor judges nothing; one that is named says what is wrong with it
            if self._fits(floor):
                found.append((floor.provenance.fingerprint in self.fingerprints, floor.provenance.created, floor))
        return self.named(max(found, key=lambda one: one[:2])[2]) if found else None

    def _fits(self, floor: Floor) -> bool:
        about = floor.provenance
        return (
            self.dtypes == {floor.dtype}
            and self.devices == {about.device}
            and self.simulated == {about.simulated}
            and self.architectures == {about.architecture}
        )

    def named(self, floor: Floor) -> FloorRule:
        """The floor, widened where it was calibrated in other circumstances.

        Raises:
            UserError: it is of another dtype.
        """
        if self.dtypes - {floor.dtype}:
            raise UserError(
                f"the floor {floor.name} is of {floor.dtype}, the recordings are of {', '.join(sorted(self.dtypes))}",
                f"make one: align calibrate --dtype {sorted(self.dtypes)[0]}; or say --floor none",
            )
        factor, why = 1.0, []
        if self.fingerprints != {floor.provenance.fingerprint}:
            factor *= OTHER_MODEL
            why.append(f"calibrated on {floor.provenance.model}")
        on_hardware = floor.provenance.simulated and self.hardware
        if on_hardware:
            factor *= HARDWARE
            why.append("calibrated on a simulated device")
        return floor.rule(factor, ", ".join(why), wider=on_hardware)
