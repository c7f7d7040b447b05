"""What a sidecar costs, beside other ways from process to process, in one run.

    python asv_benchmarks/sidecar_rivals.py [trip window reclaim flood]

`trip`: round trips of a small request (grpcio and pyzmq where they are installed). `window`: an
8K window, in process, direct and served. `reclaim`: how soon deaths are noticed. `flood`: quiet
clients beside one that asks without pause. Prints p50 and p99 in microseconds, and ratios.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

import kalos_ctx

SERVE = (
    "import sys, kalos_ctx\n"
    "kalos_ctx.serve(sys.argv[1], sys.argv[2], device='cpu',\n"
    "                on_ready=lambda sidecar: print('ready', flush=True))\n"
)
ECHO = (
    "import socket, sys\n"
    "listener = socket.socket(socket.AF_UNIX)\n"
    "listener.bind(sys.argv[1]); listener.listen(); print('ready', flush=True)\n"
    "sock, _ = listener.accept()\n"
    "while data := sock.recv(64): sock.sendall(data)\n"
)
ZMQ = (
    "import sys, zmq\n"
    "sock = zmq.Context().socket(zmq.REP)\n"
    "sock.bind('ipc://' + sys.argv[1]); print('ready', flush=True)\n"
    "while True: sock.send(sock.recv())\n"
)
GRPC = (
    "import sys, grpc\n"
    "from concurrent.futures import ThreadPoolExecutor\n"
    "same = lambda data: data\n"
    "handler = grpc.unary_unary_rpc_method_handler(\n"
    "    lambda data, context: data, request_deserializer=same, response_serializer=same)\n"
    "server = grpc.server(ThreadPoolExecutor(2))\n"
    "server.add_generic_rpc_handlers(\n"
    "    (grpc.method_handlers_generic_handler('echo', {'Echo': handler}),))\n"
    "server.add_insecure_port('unix:' + sys.argv[1]); server.start()\n"
    "print('ready', flush=True); server.wait_for_termination()\n"
)


@contextlib.contextmanager
def running(code, *words):
    """A process that says when it is ready."""
    process = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def timed(call, repeats=20000, warm=2000):
    """Microseconds of each call, sorted."""
    for _ in range(warm):
        call()
    clock, took = time.perf_counter_ns, []
    for _ in range(repeats):
        begin = clock()
        call()
        took.append(clock() - begin)
    return np.sort(np.array(took) / 1e3)


def show(name, took, floor=None):
    """Print one row."""
    p50, p99 = np.percentile(took, [50, 99])
    ratio = "" if floor is None else f"  {p50 / np.median(floor):8.1f} x"
    print(f"{name:46} p50 {p50:9.2f}  p99 {p99:9.2f}{ratio}", flush=True)
    return took


def fill(path, rows=0):
    """A session of 400 turns of 150 tokens."""
    rng = np.random.default_rng(1)
    with kalos_ctx.SessionStore.open(path) as store:
        for n in range(400):
            ids = rng.integers(0, 150_000, 150, dtype=np.int32)
            store.append("s", ("user", "assistant")[n % 2], token_ids=ids, framed=True)
        if rows:
            store.add_passages("c", rng.standard_normal((rows, 128)).astype(np.float32))


def trip(folder):
    """Round trips of a small request."""
    print("# round trip of a small request, from Python, one caller")
    fill(f"{folder}/trip.kalos")
    with running(SERVE, f"{folder}/trip.kalos", f"{folder}/k"):
        client = kalos_ctx.connect(f"{folder}/k", mode="served", timeout=10)
        floor = show("kalos, shared memory: Client.ping()", timed(client.ping))
        show("kalos, shared memory: Client.count()", timed(lambda: client.count("s")), floor)
        client.close()
        client = kalos_ctx.connect(f"{folder}/k", mode="served", transport="socket", timeout=10)
        show("kalos, its socket transport: Client.ping()", timed(client.ping, 4000, 400), floor)
        client.close()
    with running(ECHO, f"{folder}/e"):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(f"{folder}/e")
        data = b"x" * 64

        def echo():
            sock.sendall(data)
            sock.recv(64)

        show("Unix socket, 64 bytes there and back", timed(echo), floor)
        sock.close()
    with contextlib.suppress(ImportError):
        import zmq

        with running(ZMQ, f"{folder}/z"):
            asker = zmq.Context.instance().socket(zmq.REQ)
            asker.connect(f"ipc://{folder}/z")

            def ask():
                asker.send(data)
                asker.recv()

            show("pyzmq, ipc", timed(ask, 10000, 1000), floor)
            asker.close(0)
    with contextlib.suppress(ImportError):
        import grpc

        with running(GRPC, f"{folder}/g"), grpc.insecure_channel(f"unix:{folder}/g") as channel:
            call = channel.unary_unary("/echo/Echo")
            show("grpcio, Unix socket", timed(lambda: call(data), 4000, 400), floor)


def window(folder):
    """An 8K window by every way."""
    print("# 8,192 tokens of a session of 60,000, one caller")
    path = f"{folder}/window.kalos"
    fill(path)
    with running(SERVE, path, f"{folder}/k"):
        store = kalos_ctx.SessionStore.open(path, "r")
        assembler = kalos_ctx.ContextAssembler(store, device="cpu")
        ways = {"in process": assembler}
        for mode in ("direct", "served"):
            ways[mode] = kalos_ctx.connect(f"{folder}/k", mode=mode, device="cpu", timeout=10)
        ways["served, socket"] = kalos_ctx.connect(
            f"{folder}/k", mode="served", transport="socket", timeout=10
        )
        took = {name: [] for name in ways}
        for _ in range(5):  # in turns, so that a slow moment meets all of them
            for name, way in ways.items():
                call = lambda way=way: way.assemble("s", max_tokens=8192).release()  # noqa: E731
                took[name].append(timed(call, 3000 if "socket" not in name else 500, 300))
        floor = np.concatenate(took["in process"])
        for name, parts in took.items():
            show(name, np.concatenate(parts), floor)
        more = np.median(np.concatenate(took["served"])) - np.median(floor)
        print(f"served over in process: {more:+.2f} us at p50")
        for way in ways.values():
            way.close()
        store.close()


def reclaim(folder):
    """How soon deaths are noticed, in milliseconds."""
    print("# deaths and returns, 20 of each; milliseconds")
    path, sock = f"{folder}/reclaim.kalos", f"{folder}/k"
    fill(path)
    child = "import sys, time, kalos_ctx\nc = kalos_ctx.connect(sys.argv[1], mode='served')\n" \
            "c.ping(); print('ready', flush=True); time.sleep(99)\n"  # fmt: skip
    gone, told, back = [], [], []
    with running(SERVE, path, sock):
        watcher = kalos_ctx.connect(sock, mode="served")
        for _ in range(20):
            with running(child, sock) as process:
                before = watcher.status()["counts"]["disconnects"]
                begin = time.perf_counter()
                process.kill()
                while watcher.status()["counts"]["disconnects"] == before:
                    pass
                gone.append(time.perf_counter() - begin)
        watcher.close()
    for _ in range(20):
        with running(SERVE, path, sock) as process:
            client = kalos_ctx.connect(sock, mode="served", timeout=20)
            client.ping()
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(0.01)
            heard = {}

            def wait(client=client, heard=heard):
                try:
                    client.append("x", "user", token_ids=[1], framed=True)
                except kalos_ctx.SidecarUnavailable:
                    heard["at"] = time.perf_counter()

            thread = threading.Thread(target=wait)
            thread.start()
            time.sleep(0.05)
            begin = time.perf_counter()
            process.kill()
            thread.join()
            told.append(heard["at"] - begin)
        with running(SERVE, path, sock):
            begin = time.perf_counter()
            client.ping()
            back.append(time.perf_counter() - begin)
            client.close()
    for name, took in (
        ("a dead client is forgotten", gone),
        ("a dead sidecar is told to who waits", told),
        ("connected again once it is back", back),
    ):
        took = np.sort(np.array(took) * 1e3)
        print(f"{name:46} p50 {np.median(took):9.2f}  most {took[-1]:9.2f} ms", flush=True)


FLOOD = (
    "import sys, threading, kalos_ctx\n"
    "c = kalos_ctx.connect(sys.argv[1], mode='served', timeout=30)\n"
    "def rage():\n"
    "    while True: c.assemble('s', max_tokens=8192).release()\n"
    "for _ in range(8): threading.Thread(target=rage, daemon=True).start()\n"
    "print('ready', flush=True); threading.Event().wait()\n"
)


def flood(folder):
    """63 quiet clients, alone and beside one with eight threads that ask without pause."""
    print("# 63 quiet clients in turn, one window of 1,024 tokens each")
    path, sock = f"{folder}/flood.kalos", f"{folder}/k"
    fill(path)
    with running(SERVE, path, sock):
        clients = [kalos_ctx.connect(sock, mode="served", timeout=30) for _ in range(63)]

        def ask():
            took = []
            for _ in range(40):
                for client in clients:
                    begin = time.perf_counter_ns()
                    client.assemble("s", max_tokens=1024).release()
                    took.append((time.perf_counter_ns() - begin) / 1e3)
            return np.array(took)

        ask()
        alone = show("alone", ask())
        with running(FLOOD, sock):
            show("beside one that floods", ask(), alone)
            print("(the flood takes part of the two CPUs from client and sidecar alike)")
        for client in clients:
            client.close()


def main():
    chosen = sys.argv[1:] or ["trip", "window", "reclaim", "flood"]
    print(
        f"# {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.2f}, Python {sys.version.split()[0]}"
    )
    for name in chosen:
        with tempfile.TemporaryDirectory(prefix="ksb-") as folder:
            {"trip": trip, "window": window, "reclaim": reclaim, "flood": flood}[name](folder)


if __name__ == "__main__":
    main()
