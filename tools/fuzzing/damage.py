"""Damage to files: to any bytes, YAML, JSON or safetensors, and to directory entries.

Functions take Hypothesis' `draw` and return a short description; functions that damage contents also return the new
bytes.
"""

import hashlib
import json
import os
import shutil
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

from fuzzing.values import file_names, json_values, pick, position, shown, yaml_values
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn


def damage_bytes(draw: DrawFn, data: bytes) -> tuple[str, bytes]:
    """Damage the bytes of a file of any kind."""
    place = position(draw, len(data))
    before, after = data[:place], data[place:]
    more = draw(st.sampled_from((b"\xff", b"\xed\xa0\x80", b'"\\ud800"', b"\0")) | st.binary(min_size=1, max_size=16))
    flipped = bytes([after[0] ^ 1 << draw(st.integers(0, 7))]) + after[1:] if after else b""
    kinds = {
        f"bit flipped at {place}": before + flipped,
        f"cut at {place}": before,
        f"bytes dropped at {place}": before + after[pick(draw, (1, 16, 1_000)) :],
        f"{more!r} at {place}": before + more + after,
        "byte order mark": b"\xef\xbb\xbf" + data,
        "UTF-16": data.decode(errors="replace").encode("utf-16"),
        "emptied": b"",
        "noise alone": draw(st.binary(min_size=100, max_size=500)),
    }
    return pick(draw, list(kinds.items()))


def damage_yaml(draw: DrawFn, text: str) -> tuple[str, bytes]:
    """Damage a YAML document, usually one of its lines."""
    lines, value = text.split("\n"), draw(yaml_values)
    row = position(draw, len(lines))
    line = lines[row]
    key = line.partition(":")[0]
    column, char = position(draw, len(line) + 1), pick(draw, "\0\x07\x1b\x85\u2028\u202e\ufeff\ud800{}[]&*!|>%@`\"'#,?")
    kinds = {
        f"given {shown(value)}": f"{key}: {value}",
        "twice": f"{line}\n{line}",
        "dropped": "",
        "indented": " " * pick(draw, (1, 3, 40)) + line,
        "with a tab": "\t" + line.lstrip(),
        "in a second document": f"---\n{line}",
        f"with {char!a}": line[:column] + char + line[column:],
    }
    what = pick(draw, [*kinds, next(iter(kinds)), "bytes", "whole"])
    if what == "bytes":
        return damage_bytes(draw, text.encode())
    lines = [value] if what == "whole" else [*lines[:row], kinds[what], *lines[row + 1 :]]
    return f"line {row} {what}", "\n".join(lines).encode("utf-8", "surrogatepass")


def damage_json(draw: DrawFn, text: str) -> tuple[str, bytes]:
    """Damage JSON or JSON lines: bytes, a line, or (usually) one value of one record."""
    kind, value = pick(draw, ("bytes", "whole", "line", "value", "value", "value", "value")), draw(json_values)
    if kind == "bytes":
        return damage_bytes(draw, text.encode())
    if kind == "whole":
        return f"becomes {shown(value)}", value.encode()
    lines = text.splitlines() if kind == "line" or parsed(text) is None else [text]
    row = position(draw, len(lines))
    record = parsed(lines[row]) if kind == "value" else None
    if isinstance(record, dict | list) and record:
        what, lines[row] = edit_record(draw, record, value)
    else:
        what, lines[row] = f"becomes {shown(value)}", value
    return f"line {row} {what}", "\n".join([*lines, ""]).encode()


def parsed(text: str) -> Any:
    """Parse JSON; None if the text is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def edit_record(draw: DrawFn, record: Any, value: str) -> tuple[str, str]:
    """Set a key of nested data to the JSON `value`, or drop or rename it. Returns the change, and the record's JSON."""
    path: list[str] = []
    here = record
    while True:
        keys = list(here) if isinstance(here, dict) else list(range(len(here)))
        key = keys[position(draw, len(keys))]
        path.append(str(key))
        if not isinstance(here[key], dict | list) or not here[key] or draw(st.integers(0, 4)) == 0:
            break
        here = here[key]
    how = pick(draw, ("given", "given", "given", "dropped", "renamed"))
    if how == "dropped":
        del here[key]
    elif how == "renamed" and isinstance(here, dict):
        here[draw(st.text(max_size=8) | file_names)] = here.pop(key)
    else:
        how = f"= {shown(value)}"
        here[key] = "@0@"
    return f"{shown('.'.join(path))} {how}", json.dumps(record).replace('"@0@"', value)


def damage_safetensors(draw: DrawFn, raw: bytes) -> tuple[str, bytes]:
    """Damage a safetensors file, or make its header wrong.

    Format: eight bytes of header length, little-endian; a JSON header name -> {dtype, shape, data_offsets}; the data.
    """
    (length,) = struct.unpack_from("<Q", raw)
    kind = pick(draw, ("bytes", "length", "header", "header"))
    if kind == "bytes":
        return damage_bytes(draw, raw)
    if kind == "length":
        claimed = pick(draw, (0, 1, length - 1, length + 1, 10**8, 2**40, 2**63, 2**64 - 1))
        return f"header length {claimed}", struct.pack("<Q", claimed) + raw[8:]
    what, header = damage_json(draw, raw[8 : 8 + length].decode())
    return f"header {what}", struct.pack("<Q", len(header)) + header + raw[8 + length :]


def damage_file(draw: DrawFn, path: Path) -> str:
    """Damage a file according to its suffix: YAML, JSON, safetensors or bytes."""
    raw = path.read_bytes()
    if path.suffix == ".yaml":
        what, data = damage_yaml(draw, raw.decode(errors="replace"))
    elif path.suffix in (".json", ".jsonl"):
        what, data = damage_json(draw, raw.decode(errors="replace"))
    else:
        what, data = (damage_safetensors if path.suffix == ".safetensors" else damage_bytes)(draw, raw)
    path.write_bytes(data)
    return f"{path.name} {what}"


def damage_entry(draw: DrawFn, path: Path) -> str:
    """Replace a file or directory by something else with the same name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    kinds = {
        "removed": lambda: None,
        "a folder": path.mkdir,
        "a dangling link": lambda: path.symlink_to("nowhere/at/all"),
        "a link to itself": lambda: path.symlink_to(path.name),
        "a FIFO": lambda: os.mkfifo(path),
        "a zero device": lambda: path.symlink_to("/dev/zero"),
        "empty": path.touch,
    }
    kind = pick(draw, list(kinds))
    kinds[kind]()
    return f"{path.name} becomes {kind}"


def seal(checkpoint: Path, files: bool = True) -> None:
    """Update the digests in a checkpoint's manifest. An invalid manifest stays as it is.

    files: Update the digests of the files too, not only the manifest's own.
    """
    path = checkpoint / "manifest.json"
    manifest = parsed(path.read_text(errors="replace")) if path.is_file() else None
    if not isinstance(manifest, dict):
        return
    entries = manifest.get("files") if files else None
    for name, entry in entries.items() if isinstance(entries, dict) else ():
        with suppress(OSError):  # a name that no file can have
            if isinstance(entry, dict) and (checkpoint / name).is_file():
                raw = (checkpoint / name).read_bytes()
                entry |= {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    manifest.pop("sha256", None)
    manifest["sha256"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(manifest, indent=1))
