"""Rows 53-74 of the table of faults: what a client does to shared memory and requests."""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import struct
import threading

import numpy as np
import pytest
from helpers.raw_client import RawClient
from helpers.sidecars import (
    SERVED,
    assert_served,
    counts,
    eventually,
    num_fds,
)

import kalos_ctx
from kalos_ctx.sidecar import endpoint, protocol

FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2


libc = ctypes.CDLL(None, use_errno=True)


def fallocate(fd, mode, offset, length):
    code = libc.fallocate(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(length))
    return 0 if code == 0 else ctypes.get_errno()


def test_53_a_client_cannot_change_the_size_of_shared_memory(served):
    _, path = served
    with RawClient(path) as raw:
        for fd in (raw.requests_fd, raw.responses_fd, raw.status_fd):
            size = os.fstat(fd).st_size
            for wrong in (0, size // 2, size + 4096):
                with pytest.raises(PermissionError):
                    os.ftruncate(fd, wrong)
            assert fallocate(fd, 0, size, 4096) == errno.EPERM
            with pytest.raises(PermissionError):
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert_served(path)


def test_53_a_client_cannot_write_what_the_sidecar_answers_in(served):
    _, path = served
    with RawClient(path) as raw:
        for fd in (raw.responses_fd, raw.status_fd):
            with pytest.raises(PermissionError):
                os.pwrite(fd, b"x", 0)
            with pytest.raises(PermissionError):
                mmap.mmap(fd, os.fstat(fd).st_size)
            again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
            with pytest.raises(PermissionError):
                os.pwrite(again, b"x", 0)
            os.close(again)
            mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
            assert fallocate(fd, mode, 0, 1024) == errno.EPERM


def test_54_a_hole_in_the_requests_is_that_clients_own_affair(served):
    sidecar, path = served
    with RawClient(path) as raw:
        data = raw.request(protocol.OP_COUNT, protocol.call_body(b"s", b""))
        raw.put(0, data, id=1)
        assert eventually(lambda: raw.answer_word(0) == (1, 2))
        mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
        assert fallocate(raw.requests_fd, mode, 0, 4096 + raw.hello.request_nbytes) == 0
        raw.put(0, b"", id=2)  # a ready request whose bytes are all zero
        assert eventually(lambda: raw.answer_word(0) == (2, 3))
        raw.put(1, raw.request(protocol.OP_PING), id=raw.next_id - 1)
        assert eventually(lambda: raw.answer_word(1)[1] == 2)
        assert_served(path)
    assert counts(sidecar)["bad_requests"] == 1


@pytest.mark.parametrize("when", ["with hello", "later"])
def test_56_descriptors_that_a_client_sends_are_closed_and_it_is_dropped(served, when):
    _, path = served
    with RawClient(path, say_hello=when == "later") as raw:
        before = num_fds()
        hello = protocol.message(protocol.OP_HELLO, protocol.Hello(modes=2, transports=1).body())
        with open(os.devnull) as file:
            endpoint.send_all(raw.sock, hello, [file.fileno(), raw.sock.fileno()], 5)
            assert eventually(raw.is_closed)
        assert num_fds() <= before
        assert_served(path)


def ask_of(raw, i, opcode, body=b"", **fields):
    """Put a request and wait for its answer: (state, body)."""
    data = raw.request(opcode, body, **fields)
    number = struct.unpack_from("<Q", data, 8)[0]
    raw.put(i, data, id=number)
    assert eventually(lambda: raw.answer_word(i)[0] == number)
    return raw.answer_word(i)[1], raw.answer(i)[1]


CALL = protocol.call_body(b"s", b"")


def edited(body, field, value):
    """A call's body with one field of its head replaced."""
    names = ["max_tokens", "reserve", "as_of", "top_k", "query_dims", "options_nbytes",
             "session_nbytes", "tenant_nbytes"]  # fmt: skip
    values = list(protocol.CALL.unpack(body[:64]))
    values[names.index(field)] = value
    return protocol.CALL.pack(*values) + body[64:]


LENGTHS = [
    edited(CALL, field, value)
    for field, values in {
        "session_nbytes": (0, 5, 1024, 1025, 65535),
        "tenant_nbytes": (4, 1024, 1025, 65535),
        "options_nbytes": (1, 4096, 2**31, 2**32 - 1),
        "query_dims": (1, 2**30, 2**32 - 1),
        "top_k": (1, 2**32 - 1),
        "max_tokens": (-2, -(2**63), 2**53 + 1, 2**63 - 1),
        "reserve": (-1, 2**53 + 1, 2**63 - 1),
        "as_of": (-2, 2**63 - 1),
    }.items()
    for value in values
]


def test_67_a_length_or_number_out_of_range_is_refused(served):
    sidecar, path = served
    with RawClient(path) as raw:
        bodies = [*LENGTHS, CALL[:63], CALL[:64], CALL + b"\0", b"", b"\0" * 64]
        for body in bodies:
            state, answer = ask_of(raw, 0, protocol.OP_COUNT, body)
            assert state == 3, body
            assert isinstance(protocol.unpack_error(answer), kalos_ctx.KalosError)
        head = bytearray(raw.request(protocol.OP_COUNT, CALL))
        for nbytes in (2**32 - 1, raw.hello.request_nbytes, raw.hello.request_nbytes - 63):
            head[32 - 8 : 32 - 4] = struct.pack("<I", nbytes)
            number, raw.next_id = raw.next_id, raw.next_id + 1
            struct.pack_into("<Q", head, 8, number)
            raw.put(0, bytes(head))
            assert eventually(lambda n=number: raw.answer_word(0) == (n, 3))
        assert_served(path)
    assert counts(sidecar)["bad_requests"] >= len(LENGTHS)


def test_68_an_unknown_opcode_or_reserved_bits_are_refused_and_counted(served):
    sidecar, path = served
    with RawClient(path) as raw:
        for opcode in (0, 1, 2, 15, 20, 65535):
            assert ask_of(raw, 1, opcode, CALL)[0] == 3
        assert ask_of(raw, 1, protocol.OP_PING, status=1)[0] == 3
        for off in (28, 40, 56, 63):
            data = bytearray(raw.request(protocol.OP_PING))
            data[off] = 1
            number = raw.next_id - 1
            raw.put(1, bytes(data), id=number)
            assert eventually(lambda n=number: raw.answer_word(1) == (n, 3))
        for state in (2, 3, 4, 255):
            number, raw.next_id = raw.next_id, raw.next_id + 1
            raw.put(2, raw.request(protocol.OP_PING, id=number), word=number << 8 | state)
            assert eventually(lambda n=number: raw.answer_word(2) == (n, 3))
        assert ask_of(raw, 3, protocol.OP_PING)[0] == 2
    assert counts(sidecar)["bad_requests"] == 6 + 1 + 4 + 4


def test_70_random_bytes_in_the_whole_region_harm_nobody(served):
    _, path = served
    rng = np.random.default_rng(7)
    with RawClient(path) as raw:
        for _ in range(60):
            noise = rng.integers(0, 256, len(raw.requests), dtype=np.uint8)
            raw.requests[:] = noise.tobytes()
            assert_served(path)


def test_71_a_request_that_is_replayed_is_not_done_again(served, tmp_path):
    _, path = served
    with RawClient(path) as raw:
        options = protocol.pack(["append", {"role": "user", "token_ids": [9], "framed": True}])
        body = protocol.call_body(b"replayed", b"", options)
        assert ask_of(raw, 0, protocol.OP_CALL, body, id=50)[0] == 2
        with kalos_ctx.connect(path, **SERVED) as client:
            for number, word in ((50, 50 << 8), (50, 50 << 8 | 1), (49, None), (1, None)):
                data = raw.request(protocol.OP_CALL, body, id=number)
                raw.put(0, data, word=word, id=number)
                client.ping()
                client.ping()
            assert eventually(lambda: raw.answer_word(0) == (1, 3))
            assert client.count("replayed") == 1


def test_74_a_client_that_takes_no_answers_holds_up_only_itself(served):
    _, path = served
    with RawClient(path, transports=2) as raw:
        body = protocol.call_body(b"s", b"", max_tokens=10)
        request = protocol.message(protocol.OP_ASSEMBLE, body, id=1, generation=raw.generation)
        raw.sock.setblocking(False)
        sent = 0
        with contextlib.suppress(BlockingIOError):
            while sent < 200_000:  # more than any buffer takes while answers are not read
                raw.sock.send(request)
                sent += 1
        assert sent < 200_000
        assert_served(path)


def test_a_client_with_all_its_requests_under_way_is_left_alone_until_one_is_answered(served):
    sidecar, path = served
    release = threading.Event()
    calls = sidecar._calls._calls
    real = calls["sessions"]
    calls["sessions"] = (lambda **options: release.wait(60) and real[0](**options), real[1])
    body = protocol.call_body(b"", b"", protocol.pack(["sessions", {}]))
    with RawClient(path, transports=2) as raw:
        (peer,) = sidecar._peers
        for _ in range(12):  # more than may be under way at a time
            raw.sock.sendall(raw.request(protocol.OP_CALL, body))
        # Not looked at meanwhile: a socket that can always be written would keep the loop awake.
        assert eventually(lambda: peer.is_full and peer.sock not in sidecar._selector.get_map())
        assert_served(path)
        release.set()
        assert sorted(raw.read_message()[0].id for _ in range(12)) == list(range(1, 13))
        assert eventually(lambda: peer.open_requests == 0)
        assert peer.sock in sidecar._selector.get_map()
