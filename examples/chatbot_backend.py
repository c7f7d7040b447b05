"""A chatbot's backend: many users, one store, a window for each reply.

Run it without arguments: it replays real chats that come with Kalos, several users at once, and the
reply of the second speaker stands for the model's.
"""

import tempfile
from pathlib import Path

import kalos_ctx as kalos
from kalos_ctx import demo_data

MAX_TOKENS, RESERVE = 1024, 256
NUM_USERS, NUM_ROUNDS = 5, 20
POLICY = kalos.Policy(generation_prompt=True)


class ChatBackend:
    """What a web framework's handler would call."""

    def __init__(self, path, model):
        self.store = kalos.SessionStore.open(path, tokenizer=str(demo_data.tokenizer_dir()))
        self.assembler = kalos.ContextAssembler(self.store)
        self.model = model
        self.prompt_tokens = self.reused_tokens = 0

    def start(self, user):
        self.store.set_segment(user, "persona", "You are a friendly student. Keep it short.")

    def reply(self, user, message_id, text):
        """Store the message, ask the model, store and return its reply."""
        # A client that sends a message twice, since it saw no answer, adds one turn.
        self.store.append(user, "user", text, key=message_id)
        with self.assembler.assemble(
            user, max_tokens=MAX_TOKENS, reserve=RESERVE, policy=POLICY
        ) as window:
            self.prompt_tokens += len(window)
            self.reused_tokens += window.report.reused_tokens
            answer = self.model(user, window.token_ids)
        self.store.append(user, "assistant", answer, key=f"{message_id}/reply")
        return answer

    def close(self):
        self.assembler.close()
        self.store.close()


def main():
    chats = [c for c in demo_data.conversations() if len(c["messages"]) >= 2 * NUM_ROUNDS]
    chats = {chat["id"]: chat["messages"] for chat in chats[:NUM_USERS]}
    replies = {user: iter(messages[1::2]) for user, messages in chats.items()}

    def model(user, token_ids):
        return next(replies[user])["content"]

    with tempfile.TemporaryDirectory() as folder:
        backend = ChatBackend(Path(folder) / "chats.kalos", model)
        for user in chats:
            backend.start(user)
        for i in range(NUM_ROUNDS):
            for user, messages in chats.items():
                backend.reply(user, f"message-{i}", messages[2 * i]["content"])
        for user in chats:
            print(f"{user}: {backend.store.count(user)} turns")
        share = backend.reused_tokens / backend.prompt_tokens
        print(f"{backend.prompt_tokens} prompt tokens, {share:.0%} as in the window before")
        backend.close()


if __name__ == "__main__":
    main()
