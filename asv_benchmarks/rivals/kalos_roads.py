"""Kalos in process and through its sidecar, and the same windows through gRPC."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np

import kalos_ctx
from kalos_ctx import demo_data
from rivals.chats import BUDGET
from rivals.measure import figures, here, no_lap, spell
from rivals.road import MissingRival, Road, installed

SLIDING = kalos_ctx.Policy(stable_prefix=False)
STABLE = kalos_ctx.Policy()


class Child:
    """A process that prints `ready` once it serves."""

    def __init__(self, what, store, socket):
        self.process = subprocess.Popen(
            [sys.executable, here("rivals", "serving.py"), what, store, socket],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        if self.process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"{what} did not start")

    def close(self):
        self.process.terminate()
        self.process.wait()
        self.process.stdout.close()


class KalosStore:
    """A store that all of Kalos's roads read, and that the sidecar then owns."""

    def __init__(self, folder):
        self.folder, self.path = folder, os.path.join(folder, "store.kalos")
        self.writer = kalos_ctx.SessionStore.open(self.path, tokenizer=demo_data.tokenizer_dir())

    def fill(self, chat, text_turns=1000):
        """Store a chat: its newest `text_turns` as text, what is older as the same IDs."""
        rows = [
            {"role": message["role"], "content": message["content"]}
            if i >= chat.turns - text_turns
            else {"role": message["role"], "token_ids": ids, "framed": True}
            for i, (message, ids) in enumerate(chat)
        ]
        for at in range(0, len(rows), 1000):
            self.writer.extend(chat.name, rows[at : at + 1000])


class KalosRoad(Road):
    """Kalos; `way` has the calls of an assembler."""

    group = "kalos"

    def __init__(self, name, policy=SLIDING):
        self.name, self.policy, self.way = name, policy, None

    def window(self, session, lap=no_lap):
        window = self.way.assemble(session, max_tokens=BUDGET, policy=self.policy)
        ids = window.token_ids
        window.release()
        return ids

    def answer(self, session):
        with self.way.assemble(session, max_tokens=BUDGET, policy=self.policy) as window:
            return np.array(window.token_ids)

    def stages(self, session, seconds):
        rows = {}

        def one():
            with self.way.assemble(session, max_tokens=BUDGET, policy=self.policy) as window:
                for stage, spent in window.report.timings.items():
                    rows.setdefault(stage, []).append(spent * 1e3)

        spell(one, seconds, 3)
        return {stage: figures(row) for stage, row in rows.items() if stage != "total"}

    def close(self):
        self.way.close()


class GrpcRoad(Road):
    """The same assembler behind grpcio on a Unix socket, the window as bytes."""

    name, group = "Kalos behind grpcio", "kalos"
    note = "the sidecar's rival: the same assembler, asked through gRPC"

    def __init__(self, store, folder):
        try:
            import grpc
        except ImportError as error:
            raise MissingRival("grpcio") from error
        path = os.path.join(folder, "grpc.sock")
        self.child = Child("grpc", store, path)
        self.channel = grpc.insecure_channel(f"unix:{path}")
        self.call = self.channel.unary_unary("/windows/Get")

    def window(self, session, lap=no_lap):
        raw = self.call(session.encode(), timeout=60)
        lap("ask")
        ids = np.frombuffer(raw, np.int32)
        lap("array")
        return ids

    def close(self):
        self.channel.close()
        self.child.close()


class KalosRoads:
    """Kalos's roads: filled through one writer, then read in four ways, and through gRPC."""

    def __init__(self, folder):
        self.folder, self.store = folder, KalosStore(folder)
        self.fill = self.store.fill
        self.children, self.reader = [], None

    def ready(self):
        """Close the writer, start what serves, and return the roads."""
        self.store.writer.close()
        socket = os.path.join(self.folder, "kalos.sock")
        self.reader = kalos_ctx.SessionStore.open(
            self.store.path, "r", tokenizer=demo_data.tokenizer_dir()
        )
        roads = installed(lambda: GrpcRoad(self.store.path, self.folder))
        self.children.append(Child("sidecar", self.store.path, socket))
        for mode in ("served", "direct"):
            road = KalosRoad(f"Kalos, sidecar, {mode}")
            road.way = kalos_ctx.connect(socket, mode=mode, device="cpu", timeout=60)
            roads.append(road)
        for name, policy in (("Kalos, in process", SLIDING), ("Kalos, stable prefix", STABLE)):
            road = KalosRoad(name, policy)
            road.way = kalos_ctx.ContextAssembler(self.reader, device="cpu", timeout=60)
            roads.append(road)
        roads[-1].note = "the default policy, whose window is shorter, since its start rarely moves"
        return roads

    def close(self):
        for child in self.children:
            child.close()
        self.store.writer.close()
        if self.reader is not None:
            self.reader.close()
