"""Measuring a server: the whole run in a process, and what each kind of failure does to it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.bench_serving import main
from tests.api.server import Running, serving

ROOT = Path(__file__).resolve().parents[2]
FEW = ["--rounds", "1", "--requests", "4", "--clients", "2", "--prompt", "8", "--output", "4:6"]


@pytest.fixture(scope="module")
def server(scripted: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(scripted, tmp_path_factory.mktemp("data")) as running:
        yield running


def other(server: Running, *flags: str) -> list[str]:
    """Flags that measure `server`, few requests at a time."""
    return ["--url", f"http://{server.host}:{server.port}", "--base-model", "tiny", *FEW, *flags]


def start(temp: Path, *flags: str) -> subprocess.Popen[str]:
    temp.mkdir()
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "scripts.bench_serving", *flags],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temp)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def small(base: Path) -> list[str]:
    budgets = ["--kv-memory", "4MiB", "--host-adapter-memory", "4MiB"]
    return ["--model", str(base), *FEW, "--", *budgets]


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """What is said about flags that cannot be used."""
    with pytest.raises(SystemExit) as exit:
        main([*flags])
    assert exit.value.code == 2
    return capsys.readouterr().err


def test_a_server_of_its_own_is_measured_and_leaves_nothing(tmp_path: Path, scripted: Path) -> None:
    report = tmp_path / "report.json"
    flags = ["--workloads", "base,identical,distinct:2", "--json", str(report), *small(scripted)]
    process = start(tmp_path / "temp", *flags)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert re.search(r"base .*\n.*identical .*\n.*distinct:2", out)
    rows = {row["workload"]: row for row in json.loads(report.read_text())["rows"]}
    assert rows["base"]["ratio"] == 1
    assert rows["base"]["adapters_per_step"] == 0
    assert rows["identical"]["adapters_per_step"] == 1
    assert 1 < rows["distinct:2"]["adapters_per_step"] <= 2
    for row in rows.values():
        assert row["failures"] == 0
        assert 0 < row["output_rate"] < row["total_rate"]
        assert 0 < row["ttft_p50"] <= row["ttft_p95"]
        assert 0 < row["gap_p50"] <= row["gap_p95"] <= row["gap_p99"]
        assert row["step_seconds"] > 0
    assert list((tmp_path / "temp").iterdir()) == []


def test_a_signal_ends_its_server_too(tmp_path: Path, scripted: Path) -> None:
    process = start(tmp_path / "temp", "--workloads", "base", *small(scripted))
    deadline = time.monotonic() + 60
    while not (servers := children(process.pid)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert not any(Path(f"/proc/{pid}").exists() for pid in servers)
    assert list((tmp_path / "temp").iterdir()) == []


def test_a_server_that_cannot_start_is_reported_with_its_words(
    tmp_path: Path, scripted: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", str(scripted), "--workloads", "base", "--", "--kv-memory", "9PiB"]) == 1
    assert "9PiB" in capfd.readouterr().err


def test_another_server_is_measured(server: Running, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert main(other(server, "--workloads", "base", "--rounds", "2", "--json", str(report))) == 0
    found = json.loads(report.read_text())
    (row,) = found["rows"]
    assert len(row["runs"]) == 2
    assert row["requests"] == 4
    assert row["adapters_per_step"] == 0
    assert found["failures"] == {}


def test_arrivals_at_a_rate_are_measured(server: Running, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    flags = ["--workloads", "base", "--rate", "20", "--json", str(report)]
    assert main(other(server, *flags)) == 0
    (row,) = json.loads(report.read_text())["rows"]
    assert row["failures"] == 0
    assert row["ttft_p50"] > 0


def test_failed_requests_are_counted_shown_and_make_the_run_fail(
    server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    flags = ["--workloads", "base", "--prompt", "600", "--json", str(report)]
    assert main(other(server, *flags)) == 1
    assert "failed (1×): base: FailedRequest: HTTP 400: prompt:" in flat(capsys.readouterr().out)
    found = json.loads(report.read_text())
    assert found["rows"][0]["failures"] == 4
    assert found["rows"][0]["output_rate"] == 0
    assert sum(found["failures"].values()) == 4


def test_adapters_that_the_server_lacks_are_found_before_the_measurement(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--workloads", "base,distinct:3", "--adapters", "absent-{}"]
    assert main(other(server, *flags)) == 1
    said = flat(capsys.readouterr().err)
    assert "3 of 4 first requests failed: FailedRequest: HTTP 404" in said
    assert "absent-" in said


def test_a_server_that_is_not_there_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--url", "http://127.0.0.1:9", "--base-model", "tiny", "--workloads", "base", *FEW]
    assert main(flags) == 1
    assert "1 of 1 first requests failed: ConnectError" in flat(capsys.readouterr().err)


def test_a_slow_request_is_a_failed_one(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--workloads", "base", "--requests", "1", "--output", "400", "--timeout", "0.3"]
    assert main(other(server, *flags)) == 1
    assert "not done within 0.3 seconds" in flat(capsys.readouterr().out)


def test_the_time_limit_ends_the_measurement_and_says_so(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    flags = ["--workloads", "base", "--requests", "9999", "--time-limit", "0.5"]
    assert main(other(server, *flags)) == 1
    assert time.monotonic() - began < 30
    assert "The time limit ended the run of base; there are 0 whole rounds" in flat(
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--workloads", "base,distinct"], "distinct:8"),
        (["--workloads", "zipf:0"], "zipf:0"),
        (["--workloads", "random:3"], "random:3"),
        (["--workloads", "base,base"], "comes twice"),
        (["--prompt", "9:3"], "9:3"),
        (["--clients", "0"], "0 is not between 1 and 100000"),
        (["--rate", "nan"], "nan"),
        (["--url", "http://localhost:1"], "--base-model"),
        (["--url", "http://localhost:1", "--model", "folder"], "model: not taken with --url"),
        (["--adapters", "r16-{}"], "adapters: only taken with --url"),
        (
            ["--url", "http://localhost:1", "--base-model", "b", "--adapters", "one"],
            "names 1 adapters, the workloads need 64",
        ),
        (
            ["--url", "http://localhost:1", "--base-model", "b", "--adapters", "{name}"],
            "'{name}' is no pattern",
        ),
    ],
)
def test_options_that_cannot_be_used_are_named(
    capsys: pytest.CaptureFixture[str], flags: list[str], named: str
) -> None:
    assert named in flat(refusal(capsys, *flags))


def flat(text: str) -> str:
    """`text` in one line, however it was wrapped."""
    return " ".join(text.split())


def children(pid: int) -> list[int]:
    """The processes that `pid` has started and not outlived."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]
