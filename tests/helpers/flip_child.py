"""Flip bits of a store's files, one at a time, and say what is read then (`test_fault_12`).

Arguments: a folder to work in, a file with the flips (JSON: [file, offset, bit] each), the mode.
One line of JSON a flip goes to standard output: what was wrong, nothing in most cases.
"""

import json
import logging
import sys
from contextlib import suppress
from pathlib import Path

from helpers.store_images import answers, make_small, patch, read_image, write_image, wrong_answers

from kalos_ctx.errors import KalosError
from kalos_ctx.store import SessionStore


def recalled(store):
    """Hits of one recall, or the error."""
    from kalos_ctx.assembler import ContextAssembler

    try:
        with ContextAssembler(store, device="cpu") as assembler:
            hits = assembler.recall([1.0, 2.0, 3.0, 4.5], top_k=5, collections=["docs"])
            return [hits.ids.tolist(), hits.scores.tolist()]
    except KalosError as error:
        return error


def look(path, mode, right, hits):
    """Open the damaged store; the names of the answers that were wrong."""
    try:
        store = SessionStore.open(path, mode)
    except KalosError:
        return []
    try:
        wrong = wrong_answers(answers(store), right)
        found = recalled(store)
        if found != hits and not isinstance(found, KalosError):
            wrong.append("recall")
        return wrong
    finally:
        with suppress(KalosError):
            store.close()


def main() -> None:
    """Make the store, then flip and look."""
    folder, flips, mode = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), sys.argv[3]
    logging.disable()
    path = folder / "store"
    if not path.exists():
        make_small(path)
    image = read_image(path)
    with SessionStore.open(path, "r") as store:
        right, hits = answers(store), recalled(store)
    assert wrong_answers(right, right) == []
    assert not isinstance(hits, KalosError), hits
    for name, offset, bit in flips:
        byte = image[name][offset] ^ 1 << bit
        patch(path / name, offset, bytes([byte]))
        wrong = look(path, mode, right, hits)
        if mode == "a":
            write_image(path, image)
        else:
            patch(path / name, offset, bytes([image[name][offset]]))
        print(json.dumps([name, offset, bit, wrong]), flush=True)


if __name__ == "__main__":
    main()
