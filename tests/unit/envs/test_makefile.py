"""The Makefile passes what the user typed, and nothing the user did not type."""

from __future__ import annotations

import os
import shlex
import subprocess

import pytest

from envs.home import REPOSITORY

VARIABLES = {
    "MODEL",
    "PROMPTS",
    "CASE",
    "DEVICE",
    "DTYPE",
    "TP",
    "DP",
    "EP",
    "MIN_TP",
    "LAYOUTS",
    "MAX_NEW",
    "OUT",
    "LADDER",
    "ARGS",
    "MAKEFLAGS",
    "MFLAGS",
}


def _make(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return subprocess.run(
        ["make", "-n", "--no-print-directory", *arguments],
        cwd=REPOSITORY,
        env={**clean, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


def _run_arguments(*arguments: str, **env: str) -> list[str]:
    """What ``align`` would get, as the shell splits it."""
    done = _make("align", *arguments, **env)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    return words[words.index("run") + 1 :]


def test_nothing_given_nothing_passed() -> None:
    assert _run_arguments() == []


@pytest.mark.parametrize(
    "value",
    [
        "qwen3",
        "a b",
        "it's",
        'say "hi"',
        "$HOME/x",
        "`id`",
        "a;b&c|d",
        "back\\slash",
        "a,b",
        "(x)",
        "-x",
        "ü*?",
    ],
)
def test_value_arrives_as_typed(value: str) -> None:
    assert _run_arguments(f"MODEL={value}") == [f"--model={value}"]
    assert _run_arguments(MODEL=value) == [f"--model={value}"]


def test_every_variable_has_its_option() -> None:
    given = {
        "MODEL": "m",
        "PROMPTS": "p.jsonl",
        "CASE": "c.json",
        "DEVICE": "simnpu",
        "DTYPE": "float16",
        "TP": "2",
        "DP": "1",
        "EP": "1",
        "MIN_TP": "1",
        "LAYOUTS": "tp1, tp2",
        "MAX_NEW": "8",
        "OUT": "o",
    }
    passed = _run_arguments(*(f"{name}={value}" for name, value in given.items()))
    names = {name: name.lower() for name in given} | {"MAX_NEW": "max-new-tokens", "MIN_TP": "min-tp"}
    assert sorted(passed) == sorted(f"--{names[name]}={value}" for name, value in given.items())


def test_empty_counts_on_the_command_line_alone() -> None:
    assert _run_arguments("MODEL=") == ["--model="]
    assert _run_arguments(MODEL="") == []


@pytest.mark.parametrize("value", ["", "0", "no", "off", "1", "yes"])
def test_the_ladder_is_on_or_off(value: str) -> None:
    expected = {"": [], "1": ["--ladder"], "yes": ["--ladder"]}.get(value, ["--no-ladder"])
    assert _run_arguments(f"LADDER={value}") == expected
    assert _run_arguments(LADDER=value) == expected


def test_isolate_takes_the_same_variables_and_needs_no_ladder() -> None:
    done = _make("isolate", "MODEL=m", "TP=2", "MIN_TP=1", "LADDER=1", "ARGS=--quiet")
    words = shlex.split(done.stdout)
    assert words[words.index("isolate") + 1 :] == ["--model=m", "--tp=2", "--min-tp=1", "--quiet"]


def test_args_are_appended_as_they_are() -> None:
    assert _run_arguments("MODEL=m", "ARGS=--debug --x 'a b'") == ["--model=m", "--debug", "--x", "a b"]


def test_line_break_is_refused() -> None:
    done = _make("align", "MODEL=a\nb")
    assert done.returncode == 2
    assert "a value contains a line break" in done.stderr


@pytest.mark.parametrize(
    ("device", "built"), [("", "all"), ("simnpu", "all"), ("ascend", "driver"), ("nope", "driver")]
)
def test_engines_are_built_for_the_simulated_device_alone(device: str, built: str) -> None:
    words = shlex.split(
        _make("align", *([f"DEVICE={device}"] if device else [])).stdout.replace("$(", " ").replace(")", " ")
    )
    assert f"envs.bootstrap {built} --print-python" in " ".join(words)


def test_absent_python_says_how_to_name_one() -> None:
    done = _make("path", "PYTHON=/no/such/python")
    assert done.returncode == 2
    assert "there is no /no/such/python: install Python 3.11 or name one" in done.stderr


def test_help_is_the_default_and_explains_the_exit_code() -> None:
    done = subprocess.run(["make", "-s"], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "make align MODEL=qwen3" in done.stdout
    assert "make turns every answer but 0 into 2" in done.stdout


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("MODLE=qwen3", "did you mean MODEL?"),
        ("model=qwen3", "did you mean MODEL?"),
        ("max_new=3", "did you mean MAX_NEW?"),
        ("DTYP=fp16", "did you mean DTYPE?"),
        ("XYZ=1", "There are MODEL PROMPTS"),
    ],
)
def test_a_misspelt_variable_is_refused(variable: str, hint: str) -> None:
    done = _make("align", variable, "TP=2")
    name = variable.partition("=")[0]
    assert (done.returncode, done.stdout) == (2, "")
    assert f"there is no variable {name}" in done.stderr
    assert hint in done.stderr
    assert f"{name}=value make" in done.stderr


def test_variables_that_exist_are_not_refused() -> None:
    help_ = subprocess.run(["make", "-s", "help"], cwd=REPOSITORY, capture_output=True, text=True, timeout=60).stdout
    for name in ("MODEL", "TP", "ARGS", "PYTHON", "ALIGN_HOME", "LMDEPLOY_PYTHON", "VLLM_PYTHON"):
        assert name in help_
        assert _make("align", f"{name}=x").returncode == (2 if name == "PYTHON" else 0)
    assert _make("align", "PIP_INDEX_URL=x").returncode == 0
    assert _make("align", MODLE="in the environment nobody can tell").returncode == 0
