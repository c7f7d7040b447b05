"""Write chats of other frameworks by the frameworks themselves, for tests that have none of them.

`python tests/golden/make_imports.py` with langchain-community, langchain-redis, langgraph,
langgraph-checkpoint-sqlite, openai-agents and fakeredis[json] installed. `versions.json` says which
versions wrote what lies there.
"""

import json
import sqlite3
import sys
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers.framework_chats import (
    write_agent_session,
    write_checkpoints,
    write_redis_documents,
    write_redis_lists,
)

HERE = Path(__file__).resolve().parent / "imports"
WRITERS = (
    "openai-agents", "langgraph", "langgraph-checkpoint", "langgraph-checkpoint-sqlite",
    "langchain-core", "langchain-community", "langchain-redis", "redis",
)  # fmt: skip


def main() -> None:
    """Make every file anew."""
    HERE.mkdir(exist_ok=True)
    for name, write in (("agents", write_agent_session), ("langgraph", write_checkpoints)):
        path = HERE / f"{name}.sqlite"
        path.unlink(missing_ok=True)
        write(path)
        # Small pages, since a page is the least that a table takes.
        connection = sqlite3.connect(path, isolation_level=None)
        for line in ("journal_mode=DELETE", "page_size=512"):
            connection.execute(f"PRAGMA {line}")
        connection.execute("VACUUM")
        if name == "langgraph":
            connection.execute("PRAGMA journal_mode=WAL")  # as the library leaves it
        connection.close()
    (HERE / "redis.json").write_text(json.dumps(redis_values(), indent=1) + "\n")
    versions = {name: version(name) for name in WRITERS}
    (HERE / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


def redis_values() -> dict[str, dict[str, Any]]:
    """Return what the libraries store, by layout and key, in the order of a reader."""
    import redis
    from fakeredis import TcpFakeServer

    server = TcpFakeServer(("127.0.0.1", 0), server_type="redis")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"redis://127.0.0.1:{server.server_address[1]}/0"
    write_redis_lists(url)
    write_redis_documents(url)
    client = redis.Redis.from_url(url, protocol=2)
    lists = {
        key.decode(): [one.decode() for one in reversed(client.lrange(key, 0, -1))]
        for key in client.keys("message_store:*")
    }
    documents = {
        key.decode(): client.execute_command("JSON.GET", key, "$").decode()
        for key in sorted(client.keys("chat:*"))
    }
    server.shutdown()
    return {"lists": lists, "documents": documents}


if __name__ == "__main__":
    main()
