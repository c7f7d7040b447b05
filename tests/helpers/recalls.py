"""Recalls as tests ask for them, and what of them can be compared."""

import os

from helpers import plain_recall

from kalos_ctx.backends.cpu import CpuBackend
from kalos_ctx.store import SessionStore


def make_backend(store):
    """Return the store's backend on the device under test, as `--device` said."""
    if os.environ.get("KALOS_DEVICE") != "cuda":
        return CpuBackend(store)
    from kalos_ctx.backends.cuda import CudaBackend, shared_device

    return CudaBackend(store, shared_device(0)[0])


def recall(store, query, top_k, *collections, **options):
    """Recall once, over a backend of its own."""
    names = tuple(name.encode() for name in collections)
    return make_backend(store).recall(query, top_k=top_k, collections=names, **options)


def ids_of(recalled):
    return recalled.hits.ids.tolist()


def bits(recalled):
    """Return everything in the hits that must not change, scores by their bits."""
    hits = recalled.hits
    return (
        hits.ids.tolist(),
        plain_recall.bits(hits.scores),
        hits.counts.tolist(),
        hits.sources,
        hits.reason,
    )


def serve_recalls(path, pipe):
    """In another process: answer each query with IDs, over one backend that stays warm."""
    with SessionStore.open(path, "r") as store:
        backend = make_backend(store)
        while (query := pipe.recv()) is not None:
            pipe.send(ids_of(backend.recall(query, top_k=3, collections=(b"c",))))
