"""Kalos: a chat session's ID in, the model's next input out."""

from kalos_ctx.errors import KalosError

__all__ = ["KalosError"]
