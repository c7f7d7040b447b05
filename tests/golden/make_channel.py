"""Write the handshake's golden bytes: `python tests/golden/make_channel.py`, once a version.

The bytes of a released version are never written anew: they are what its clients and sidecars say.
Before the release of a version its folder may be removed and made again.
"""

from pathlib import Path

from kalos_ctx.sidecar import protocol

FOLDER = Path(__file__).parent / "channel"


def messages():
    """Name and bytes of each message of a handshake."""
    hello = protocol.Hello(modes=3, transports=3)
    granted = protocol.Hello(modes=2, transports=1, request_nbytes=65536, response_nbytes=278528)
    extras = protocol.pack({"pid": 7, "mode_why": "", "transport_why": ""})
    return {
        "hello.bin": protocol.message(protocol.OP_HELLO, hello.body()),
        "welcome.bin": protocol.message(
            protocol.OP_WELCOME, granted.body() + extras, generation=0x0102030405060708
        ),
        "count.bin": protocol.message(
            protocol.OP_COUNT,
            protocol.call_body("sés".encode(), b"tenant"),
            id=9,
            generation=0x0102030405060708,
            timeout_ns=10**9,
        ),
    }


if __name__ == "__main__":
    folder = FOLDER / f"v{protocol.MAJOR}.{protocol.MINOR}"
    if folder.exists():
        raise SystemExit(f"{folder} is there already; a released version is never written anew")
    folder.mkdir(parents=True)
    for name, data in messages().items():
        (folder / name).write_bytes(data)
