#!/usr/bin/env python3
"""Searches the sources for the messages that docs/errors.md quotes, and lists those that are not there.

A quoted message is a code span with a space in the page's section "Messages", without its part on libtorch's own
messages. … stands for a value. Each text between values has to be part of a string literal in lib/ or apps/, where
adjacent literals are joined and {…} is a value.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/errors.md"
COMMANDS = ("ssh HOST", "ulimit ")  # advice, not a message
TOKEN = re.compile(
    r"""//[^\n]* | /\*.*?\*/                                    # comments
      | R"(?P<delimiter>[^(\s]*)\((?P<raw>.*?)\)(?P=delimiter)"
      | "(?P<text>(?:\\.|[^"\\\n])*)"
      | \d[\w.']* | \w+ | '(?:\\.|[^'\\\n])+' | \S""",           # numbers (1'000), words, characters, the rest
    re.DOTALL | re.VERBOSE,
)


def literals(source):
    """The string literals of a C++ source. Adjacent ones are joined."""
    joined = None
    for token in TOKEN.finditer(source):
        text = token["raw"] if token["raw"] is not None else token["text"]
        if text is not None:
            if token["text"] is not None:
                text = text.replace(r"\"", '"').replace(r"\n", "\n").replace("\\\\", "\\")
            joined = (joined or "") + text
        elif not token[0].startswith(("//", "/*")) and joined is not None:
            yield joined
            joined = None
    if joined is not None:
        yield joined


def values_as_dots(literal):
    return re.sub(r"\{\{|\}\}|\{[^{}]*\}", lambda found: {"{{": "{", "}}": "}"}.get(found[0], "…"), literal)


def quoted_messages(page):
    """The line number and text of each message."""
    begin = page.index("## Messages")
    for span in re.compile("`([^`]+)`").finditer(page, begin, page.index("### libtorch")):
        message = " ".join(span[1].split())
        if " " in message and not message.startswith(COMMANDS):
            yield page.count("\n", 0, span.start()) + 1, message


def main():
    said = set()
    for folder in ("lib", "apps"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".cpp", ".h", ".inc"):
                said.update(values_as_dots(text) for text in literals(path.read_text(encoding="utf-8")))
    corpus = "\0".join(said)
    count = drifted = 0
    for line, message in quoted_messages(PAGE.read_text(encoding="utf-8")):
        count += 1
        missing = [part for part in re.split(r"\W*…\W*", message) if part not in corpus]
        drifted += bool(missing)
        for part in missing:
            print(f"docs/errors.md:{line}: `{message}`: no message in lib/ or apps/ has '{part}'")
    if count < 100:
        print(f"docs/errors.md: found {count} messages, expected 100 or more; has the page's form changed?")
    return 1 if drifted or count < 100 else 0


if __name__ == "__main__":
    sys.exit(main())
