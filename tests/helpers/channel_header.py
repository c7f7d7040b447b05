"""The numbers of kalos_channel.h, read from its text."""

import re

from kalos_ctx._kernel_source import kernel_dir


def constants():
    """Name to value of every plain constant."""
    text = (kernel_dir() / "kalos_channel.h").read_text()
    found = re.findall(r"^#define (KALOS_\w+) (0x[0-9a-f]+|\d+)u\b", text, re.MULTILINE)
    return {name: int(value, 0) for name, value in found}
