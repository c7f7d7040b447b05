"""`kalos serve`, `kalos ping`, `kalos top`, and the metrics."""

import json
import os
import signal
import subprocess
import sys
import urllib.request

import pytest
from helpers.sidecars import SidecarProcess, eventually, threaded

import kalos_ctx
from kalos_ctx.metrics import MetricsServer, histogram, quantile

KALOS = (sys.executable, "-m", "kalos_ctx.cli")


def kalos(*words, **options):
    return subprocess.run([*KALOS, *words], capture_output=True, text=True, check=False, **options)


def start(*words):
    return subprocess.Popen(
        [*KALOS, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ends(process, number=signal.SIGTERM):
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_answers_until_a_signal_and_leaves_nothing(tmp_path, folder, number):
    process = start(
        "serve", str(tmp_path / "s"), "--socket", f"{folder}/s", "--device", "cpu",
        "--log-format", "json", "--metrics-port", "0",
    )  # fmt: skip
    assert eventually(lambda: kalos("ping", "--socket", f"{folder}/s").returncode == 0, 30)
    with kalos_ctx.connect(f"{folder}/s", mode="served") as client:
        client.append("s", "user", token_ids=[1, 2], framed=True)
    done = kalos("ping", "--socket", f"{folder}/s", "--json")
    assert json.loads(done.stdout)["state"] == "ready"
    code, _, err = ends(process, number)
    assert code == 0
    lines = [json.loads(line) for line in err.splitlines()]
    assert any(line["message"].startswith("ready") for line in lines)
    assert not os.path.exists(f"{folder}/s")


def test_ping_without_a_sidecar_ends_with_one_line(folder):
    done = kalos("ping", "--socket", f"{folder}/s", "--timeout", "0.2")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "kalos serve" in done.stderr


def test_serve_says_what_is_wrong(tmp_path, folder):
    done = kalos("serve", str(tmp_path / "s"), "--socket", f"{folder}/{'x' * 200}")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    (tmp_path / "rules").write_text("[[allow")
    done = kalos(
        "serve", str(tmp_path / "s"), "--socket", f"{folder}/s", "--access", str(tmp_path / "rules")
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    (tmp_path / "file").write_text("x")
    done = kalos("serve", str(tmp_path / "file"), "--socket", f"{folder}/s", "--device", "cpu")
    assert done.returncode == 1
    assert not os.path.exists(f"{folder}/s")


def test_top_shows_counts_and_times_once_and_as_json(tmp_path, folder):
    with SidecarProcess(tmp_path / "s", f"{folder}/s"):
        with kalos_ctx.connect(f"{folder}/s", mode="served") as client:
            client.append("s", "user", token_ids=[1, 2], framed=True)
            client.assemble("s", max_tokens=9)
        done = kalos("top", "--socket", f"{folder}/s", "--once")
        assert done.returncode == 0
        assert "windows" in done.stdout
        assert "queue" in done.stdout
        done = kalos("top", "--socket", f"{folder}/s", "--once", "--json")
        assert json.loads(done.stdout)["counts"]["windows"] == 1


def test_metrics_are_what_the_status_page_counts(tmp_path, folder):
    with threaded(tmp_path / "s", f"{folder}/s", metrics_port=0) as sidecar:
        with kalos_ctx.connect(f"{folder}/s", mode="served") as client:
            client.append("s", "user", token_ids=[1, 2], framed=True)
            for _ in range(5):
                client.assemble("s", max_tokens=9)
        url = f"http://127.0.0.1:{sidecar._metrics.port}/metrics"
        with urllib.request.urlopen(url) as answer:
            text = answer.read().decode()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines["kalos_windows_total"]) == 5
    assert float(lines["kalos_ready"]) == 1
    assert float(lines['kalos_stage_seconds_count{stage="plan"}']) == 5
    assert float(lines['kalos_stage_seconds_bucket{le="+Inf",stage="plan"}']) == 5
    assert float(lines['kalos_stage_seconds_sum{stage="total"}']) > 0


def test_a_metrics_port_that_is_taken_is_named(tmp_path, folder):
    side = threaded(tmp_path / "s", f"{folder}/s", metrics_port=0)
    with side as sidecar, pytest.raises(kalos_ctx.InvalidArgument, match="port"):
        MetricsServer(sidecar.status, sidecar._metrics.port)


def test_a_histogram_is_cumulative_and_its_quantiles_lie_in_their_buckets():
    buckets = [0] * 40
    buckets[10], buckets[11], buckets[39] = 90, 9, 1
    rows = histogram(buckets)
    assert rows[-1] == ("+Inf", 100)
    assert [count for _, count in rows] == sorted(count for _, count in rows)
    assert dict(rows)[repr(2.0**10 / 1e9)] == 90
    assert 512e-9 <= quantile(buckets, 0.5) < 1024e-9
    assert 1024e-9 <= quantile(buckets, 0.99) < 2048e-9
    assert quantile([0] * 40, 0.5) is None


@pytest.mark.parametrize(
    "options",
    [{"workers": 0}, {"max_clients": 0}, {"request_nbytes": 100}, {"response_nbytes": 0},
     {"nothing": 1}],
)  # fmt: skip
def test_serve_refuses_options_that_it_cannot_take(tmp_path, folder, options):
    with pytest.raises(kalos_ctx.InvalidArgument):
        kalos_ctx.serve(tmp_path / "s", f"{folder}/s", **options)
    assert not os.path.exists(f"{folder}/s")
