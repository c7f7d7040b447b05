"""A process that serves windows: `serving.py sidecar|grpc STORE SOCKET`. Prints `ready`."""

import sys
from concurrent.futures import ThreadPoolExecutor

import kalos_ctx
from kalos_ctx import demo_data

BUDGET = 8192  # as in chats.py, which would load what a server does not need


def grpc_windows(store, socket):
    """Answer a session's name with the token IDs of its window, as bytes, through grpcio."""
    import grpc

    reader = kalos_ctx.SessionStore.open(store, "r", tokenizer=demo_data.tokenizer_dir())
    assembler = kalos_ctx.ContextAssembler(reader, device="cpu", timeout=60)
    policy = kalos_ctx.Policy(stable_prefix=False)

    def get(session, _context):
        with assembler.assemble(session, max_tokens=BUDGET, policy=policy) as window:
            return window.token_ids.tobytes()

    handler = grpc.unary_unary_rpc_method_handler(get)
    server = grpc.server(ThreadPoolExecutor(8))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("windows", {"Get": handler}),)
    )
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    print("ready", flush=True)
    server.wait_for_termination()


def sidecar(store, socket):
    """Run Kalos's own."""
    kalos_ctx.serve(
        store,
        socket,
        device="cpu",
        tokenizer=str(demo_data.tokenizer_dir()),
        on_ready=lambda _: print("ready", flush=True),
    )


if __name__ == "__main__":
    {"grpc": grpc_windows, "sidecar": sidecar}[sys.argv[1]](*sys.argv[2:])
