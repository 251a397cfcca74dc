"""Items out of a JSONL file: one object per line, with `prompt` and whatever the reward needs.

Owns: what such a file may hold. Imports envs/base. Invariant: every mistake is one TaskError that names file and line;
no line is skipped but a blank one.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from async_rl.envs.base import Item, Message, TaskError

ROLES = ("system", "user", "assistant", "tool")
MAX_LINE_BYTES = 4 << 20  # a lease carries the fields twice at most, in a control message of 16 MiB
INTEGERS = range(-(2**63), 2**64)  # what the wire carries as a number
GOLD, PASSED_AS = "answer", "target"


def load_items(path: str, key: str) -> Iterator[Item]:
    """The items of the file, line by line; raises TaskError at the first mistake. `key` is the config key that names the file.

    A line's field `answer`, the gold answer by custom, reaches the reward as `target`: its `answer` is the policy's.
    """
    found = False
    for where, line in _lines(path, key):
        found = True
        yield _item(_object(line, where), where)
    if not found:
        raise TaskError(f"{key} is {path}, which holds no line: write one JSON object with a `prompt` per line")


def _lines(path: str, key: str) -> Iterator[tuple[str, bytes]]:
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, 1):
                line = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip()
                if line:
                    yield f"{path}:{number}", line
    except OSError as e:
        raise TaskError(f"{key} is {path}, which cannot be read ({e.strerror}): give the path of a JSONL file") from None


def _object(line: bytes, where: str) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise TaskError(f"{where} has {len(line)} bytes, over the limit of {MAX_LINE_BYTES}: shorten it")
    try:
        value = json.loads(line.decode(), parse_constant=_refuse, parse_int=_integer, parse_float=_finite)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair passes json, and nothing after it
    except _Number as e:
        raise TaskError(f"{where} holds {e}: write it as text, or leave it out") from None
    except UnicodeError:
        raise TaskError(f"{where} is not valid UTF-8: save the file as UTF-8") from None
    except (ValueError, RecursionError) as e:
        raise TaskError(f"{where} is not JSON ({e}): write one JSON object per line") from None
    if not isinstance(value, dict):
        raise TaskError(f"{where} holds a JSON {type(value).__name__}: write one JSON object per line, with a `prompt`")
    return value


class _Number(Exception):
    """A number that JSON or the wire does not know."""


def _refuse(text: str) -> Any:
    raise _Number(f"the number {text}, which JSON does not know")


def _integer(text: str) -> int:
    if len(text) > 20 or int(text) not in INTEGERS:
        raise _Number(f"an integer of more than 64 bits ({text[:24]}...)")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    return value if abs(value) < float("inf") else _refuse(text)


def _item(shown: dict[str, Any], where: str) -> Item:
    fields = {name: value for name, value in shown.items() if name != "prompt"}
    if GOLD in fields:
        if PASSED_AS in fields:
            raise TaskError(
                f"{where} has both `{GOLD}` and `{PASSED_AS}`: the reward gets `{GOLD}` as `{PASSED_AS}`, so rename one"
            )
        fields[PASSED_AS] = fields.pop(GOLD)
    prompt = shown.get("prompt")
    if isinstance(prompt, list):
        messages = _messages(prompt, where)
        if "messages" in fields:
            raise TaskError(f"{where} has a field `messages`, the name under which the reward gets its prompt: rename it")
        return Item(shown, {**fields, "messages": list(messages)}, messages, where=where)
    if "prompt" in shown and not isinstance(prompt, str):
        kind = type(prompt).__name__
        raise TaskError(f"{where} has a `prompt` that is a {kind}: write a text or a list of chat messages")
    if isinstance(prompt, str) and not prompt.strip():
        raise TaskError(f"{where} has an empty `prompt`: fill it, or delete the line")
    return Item(shown, fields, where=where)


def _messages(prompt: list[Any], where: str) -> tuple[Message, ...]:
    for message in prompt:
        if not isinstance(message, dict) or message.keys() != {"role", "content"} or not isinstance(message["content"], str):
            raise TaskError(f'{where} has a message that is not {{"role": ..., "content": text}}: {_short(message)}')
        if message["role"] not in ROLES:
            raise TaskError(f"{where} has a message of the role {_short(message['role'])}: use one of {', '.join(ROLES)}")
    if not prompt or not prompt[-1]["content"].strip():
        raise TaskError(f"{where} has an empty `prompt`: its last message must say something")
    if prompt[-1]["role"] == "assistant":
        raise TaskError(f"{where} ends with a message of the assistant: the last one must be what the policy answers")
    return tuple(prompt)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
