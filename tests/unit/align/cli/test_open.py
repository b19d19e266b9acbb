"""``align open`` as a process: what it prints, whom it answers, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from align.cli.leave import text_of
from envs.home import REPOSITORY
from tests.unit.align.result import made

Align = Callable[..., Any]


@contextmanager
def opened(run: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address."""
    command = [sys.executable, "-P", "-m", "align", "open", str(run), "--no-browser", *options]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as found:
        try:
            assert found.stdout is not None
            yield found, found.stdout.readline().removeprefix("open: ").strip()
        finally:
            found.kill()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = made.Run(tmp_path / "run", monkeypatch, made.wrong_up).go()
    (found.directory / "result.json").write_text(text_of(found.result()), encoding="utf-8")
    return found.directory


def test_it_serves_until_ctrl_c(run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with opened(run, "--lang", "zh") as (process, url):
        assert url.startswith("http://127.0.0.1:")
        page = urllib.request.urlopen(url, timeout=20).read().decode()
        assert 'lang="zh-CN"' in page and "connect-src &#39;self&#39;" in page
        told = urllib.request.urlopen(f"{url}values?name=layers.1.mlp.up", timeout=20).read().decode()
        assert '"difference"' in told
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(url.rsplit("/", 2)[0] + "/", timeout=20)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert (process.returncode, err) == (0, "")
        assert out.endswith("closed\n")
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before, "it only reads"


def test_what_cannot_be_opened_is_said(align: Align, run: Path, tmp_path: Path) -> None:
    for arguments, words in (
        ([str(tmp_path)], "result.json does not exist"),
        ([str(run), "--port", "70000"], "--port 70000 is no port"),
        ([str(run), "--lang", "fr"], "--lang fr is not known"),
    ):
        code, _, err = align("open", *arguments, "--no-browser")
        assert code == 2 and words in err and "next: " in err
    with opened(run) as (_, url):
        taken = url.split(":")[2].split("/")[0]
        code, _, err = align("open", str(run), "--no-browser", "--port", taken)
        assert code == 2 and f"127.0.0.1:{taken} cannot be used" in err
