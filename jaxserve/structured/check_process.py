"""Compiles grammars of strangers on trial: `python -m jaxserve.structured.check_process`. No jax.

The compiler recurses over what it reads, so a grammar can be made that overruns its stack and takes the process with
it. A front end therefore has each one compiled here first; the process may die, be killed when it takes too long, or
run out of its memory, and nobody else notices. What passes needs less stack here than the engine's compiler has.

stdin: for each grammar its length (4 bytes, little endian) and its text in UTF-8. stdout: READY once, then the same
with an error message, empty if there is none.
"""

from __future__ import annotations

import resource
import struct
import sys
import threading

import llguidance

from jaxserve.structured.compiler import LIMITS, first_line

MEMORY_BYTES = 2 << 30
STACK_BYTES = 16 << 20
HEADER = struct.Struct("<I")
READY = b"ready\n"


def check(text: str) -> str:
    """What is wrong with a grammar; "" if nothing is."""
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(text, None, limits=LIMITS)
    for message in messages:
        if is_error or "nimplemented" in message:
            return first_line(message) or "it does not compile"
    return ""


def serve() -> None:
    """Answer until stdin is closed."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    target.write(READY)
    target.flush()
    while len(header := source.read(HEADER.size)) == HEADER.size:
        answer = check(source.read(HEADER.unpack(header)[0]).decode("utf-8", "replace")).encode()
        target.write(HEADER.pack(len(answer)) + answer)
        target.flush()


def main() -> None:
    limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    bytes_ = MEMORY_BYTES if limit == resource.RLIM_INFINITY else min(limit, MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (bytes_, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
