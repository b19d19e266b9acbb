"""What is installed is read from the files that pip wrote, and every departure from the lock is named."""

from __future__ import annotations

from importlib.metadata import distributions
from pathlib import Path

import pytest

from envs.installed import Departure, departures, versions


def install(site: Path, name: str, version: str, files: dict[str, str], recorded: bool = True) -> Path:
    """A package as pip leaves it; returns its directory of metadata."""
    dist_info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    dist_info.mkdir(parents=True)
    (dist_info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n\nVersion: text\n")
    rows = []
    for file, text in files.items():
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text(text)
        rows.append(f"{file},sha256=x,{len(text)}\n")
    # What every RECORD has besides: no size for itself and for compiled modules, scripts outside.
    rows += [f"{dist_info.name}/RECORD,,\n", f"{name}/__pycache__/a.pyc,,\n", "../../bin/tool,sha256=x,7\n"]
    if recorded:
        (dist_info / "RECORD").write_text("".join(rows))
    return dist_info


@pytest.fixture
def site(tmp_path: Path) -> Path:
    install(tmp_path, "typing-extensions", "4.16.0", {"typing_extensions.py": "x = 1\n"})
    install(tmp_path, "torch", "2.13.0+cpu", {"torch/a.py": "a\n", "torch/lib/b.so": "bbbb"})
    return tmp_path


PINNED = {"typing_extensions": "4.16.0", "torch": "2.13.0"}


def test_an_environment_as_its_lock_says_has_no_departures(site: Path) -> None:
    assert departures(site, PINNED) == ()


def test_versions_agree_with_importlib(site: Path) -> None:
    own = versions(site, ["torch", "Typing.Extensions", "absent"])
    assert own == {"torch": "2.13.0+cpu", "Typing.Extensions": "4.16.0"}
    assert {one.metadata["Name"]: one.version for one in distributions(path=[str(site)])} == {
        "torch": "2.13.0+cpu",
        "typing-extensions": "4.16.0",
    }


def test_another_version_and_an_absent_package(site: Path) -> None:
    found = departures(site, {"torch": "2.12.0", "numpy": "2.4.6", "typing-extensions": "4.16.0"})
    assert found == (Departure("torch", "2.12.0", "2.13.0+cpu"), Departure("numpy", "2.4.6", ""))
    assert [str(one) for one in found] == ["torch is 2.13.0+cpu, the lock says 2.12.0", "numpy is not installed"]


def test_a_version_that_only_begins_like_the_pinned_one_is_another(site: Path) -> None:
    assert [one.found for one in departures(site, {"torch": "2.13"})] == ["2.13.0+cpu"]


@pytest.mark.parametrize("change", ["removed", "shorter", "longer"])
def test_a_changed_file(site: Path, change: str) -> None:
    file = site / "torch" / "lib" / "b.so"
    if change == "removed":
        file.unlink()
    else:
        file.write_text("b" if change == "shorter" else "bbbbb")
    (found,) = departures(site, PINNED)
    assert (found.package, found.file) == ("torch", "torch/lib/b.so")
    assert "torch/lib/b.so is gone or was changed" in str(found)
    assert departures(site, PINNED, files=False) == ()


def test_what_the_build_removes_is_not_missed(site: Path) -> None:
    (site / "torch" / "lib" / "b.so").unlink()
    assert departures(site, PINNED, removed=["torch/lib"]) == ()
    assert departures(site, PINNED, removed=["torch/li"])


def test_metadata_that_cannot_be_read_is_not_installed(site: Path) -> None:
    next(site.glob("torch-*")).joinpath("METADATA").unlink()
    assert versions(site, ["torch"]) == {}
    assert [str(one) for one in departures(site, PINNED)] == ["torch is not installed"]


def test_a_package_without_its_list_of_files_is_changed(tmp_path: Path) -> None:
    install(tmp_path, "torch", "2.13.0", {"torch/a.py": "a\n"}, recorded=False)
    assert [one.file for one in departures(tmp_path, {"torch": "2.13.0"})] == ["torch-2.13.0.dist-info/RECORD"]


def test_the_interpreter_of_this_test_is_as_importlib_says() -> None:
    import sysconfig

    site = Path(sysconfig.get_paths()["purelib"])
    truth = {one.metadata["Name"]: one.version for one in distributions(path=[str(site)])}
    assert versions(site, list(truth)) == truth
