"""Hostile files made of valid ones: bytes changed anywhere, and parts changed with their seals mended."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import re
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tensorcap_formats.hdf5.flat_file import Note
from tests.hostile.fuzzing.json_texts import mutated_json

Draw = random.Random
Mutation = Callable[[Path, Draw], None]
_NUMBERS: Final = (
    0,
    1,
    2,
    7,
    0x7F,
    0x80,
    0xFF,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**63,
)
_NAMES: Final = ("..", "../outside", "/etc/hostname", "a\x1b[2J.npy", "\u202ename", "n" * 200)
_TOKEN: Final = re.compile(r"[-+\w.]+|\"[^\"\n]*\"")
_TOKENS: Final = (
    "true",
    "nan",
    "-inf",
    "1e999",
    "1" * 5000,
    '"\\u001b[2J"',
    '"\u202e"',
    '""',
    "[]",
    "{}",
    "[" * 3000 + "]" * 3000,
    "a" + ".a" * 3000,
    "1979-05-27",
    '"../../x"',
    "-1",
    "99999999999999999999",
)


def change_bytes(path: Path, draw: Draw) -> None:
    """Change, cut, repeat or remove bytes anywhere in a file, or in a file of a folder."""
    path = file_of(path, draw)
    path.write_bytes(mutated_bytes(path.read_bytes(), draw))


def mutated_bytes(data: bytes, draw: Draw) -> bytes:
    """Bytes with some of them changed, cut, repeated or removed."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        if not changed:
            break
        at, size = draw.randrange(len(changed)), draw.choice((1, 2, 4, 8, 32, 200))
        kind = draw.randrange(8)
        if kind <= 2:
            changed[at] = draw.choice((draw.randrange(256), changed[at] ^ 1 << draw.randrange(8), 0, 0xFF))
        elif kind == 3:
            width = draw.choice((1, 2, 4, 8))
            number = draw.choice(_NUMBERS) & (1 << 8 * width) - 1
            changed[at : at + width] = number.to_bytes(width, draw.choice(("little", "big")))
        elif kind == 4:
            del changed[at:]
        elif kind == 5:
            del changed[at : at + size]
        elif kind == 6:
            changed[at:at] = changed[at : at + size]
        else:
            changed[at:at] = draw.randbytes(size)
    return bytes(changed)


def file_of(path: Path, draw: Draw) -> Path:
    """The file itself, or one of those in a folder."""
    if path.is_file():
        return path
    return draw.choice(sorted(file for file in path.rglob("*") if file.is_file()))


def change_folder(path: Path, draw: Draw) -> None:
    """Put a link, a pipe, a device, a folder or nothing in the place of a file of a folder."""
    file = file_of(path, draw)
    kind = draw.randrange(8)
    if kind == 7:
        with_name(file, draw.choice(_NAMES[3:])).write_bytes(file.read_bytes())
        return
    file.unlink()
    if kind == 0:
        outside = os.path.abspath(path.parent.parent / "outside")
        file.symlink_to(draw.choice(("/etc/hostname", outside, "/dev/zero", file.name, ".")))
    elif kind == 1:
        os.mkfifo(file)
    elif kind == 2:
        file.mkdir()
    elif kind == 3:
        file.write_bytes(b"")
    elif kind == 4:
        file.symlink_to(draw.choice(sorted(file.parent.iterdir()) or [file]))
    elif kind == 5:
        file.write_bytes(b"\x00" * 100_000)


def with_name(file: Path, name: str) -> Path:
    """A file of another name beside it."""
    return file.with_name(name)


def change_json(path: Path, draw: Draw) -> None:
    """Change a value of a JSON file, or of one in a folder."""
    files = [path] if path.is_file() else sorted(path.rglob("*.json"))
    file = draw.choice(files)
    file.write_text(mutated_json(file.read_text(), draw), encoding="utf-8", errors="surrogatepass")


def change_names(path: Path, draw: Draw) -> None:
    """Change words of a list of names in a folder."""
    change_text(path / "tensor_names.txt", draw)


def change_text(path: Path, draw: Draw) -> None:
    """Change words of a text, such as TOML."""
    text = path.read_text()
    for _ in range(draw.choice((1, 1, 2, 3))):
        tokens = list(_TOKEN.finditer(text))
        if not tokens:
            break
        token = draw.choice(tokens)
        kind = draw.randrange(4)
        new = draw.choice(_TOKENS) if kind < 2 else draw.choice(tokens)[0] if kind == 2 else ""
        text = text[: token.start()] + new + text[token.end() :]
    path.write_text(text, encoding="utf-8")


def change_zip_member(path: Path, draw: Draw) -> None:
    """Change a member of a zip file, or its name, and write the zip file anew with right checksums."""
    with zipfile.ZipFile(path) as file:
        members = [(info, file.read(info)) for info in file.infolist()]
    chosen = draw.randrange(len(members))
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        for number, (info, data) in enumerate(members):
            name, method = info.filename, info.compress_type
            if number == chosen:
                kind = draw.randrange(6)
                if kind == 0:
                    name = draw.choice((*_NAMES, members[0][0].filename, f"{name}\x00.npy"))
                elif kind == 1:
                    method = zipfile.ZIP_DEFLATED
                elif kind == 2 and data[:6] == b"\x93NUMPY":
                    data = _changed_npy(data, draw)
                elif kind == 3 and name.endswith(".pkl"):
                    data = _changed_pickle(data, draw)
                elif name.endswith(".json"):
                    data = mutated_json(data.decode(), draw).encode("utf-8", "surrogatepass")
                else:
                    data = mutated_bytes(data, draw)
            file.writestr(zipfile.ZipInfo(name), data, method)
    path.write_bytes(content.getvalue())


def change_npy(path: Path, draw: Draw) -> None:
    """Change the header of a .npy file, or of one in a folder; its length is right."""
    files = [path] if path.is_file() else sorted(path.rglob("*.npy"))
    file = draw.choice(files)
    file.write_bytes(_changed_npy(file.read_bytes(), draw))


def _changed_npy(data: bytes, draw: Draw) -> bytes:
    wide = data[6] > 1
    start = 12 if wide else 10
    size = int.from_bytes(data[8:start], "little")
    header = data[start : start + size].decode("latin-1")
    tokens = list(re.finditer(r"\d+|'[^']*'|True|False|[(){}]", header))
    token = draw.choice(tokens)
    new = draw.choice(
        (
            "9" * 5000,
            "-1",
            "2**63",
            "1e9",
            "'O'",
            "'|V8'",
            "'<f4'",
            "'<U1000000000'",
            "(" * 500,
            ")",
            "",
            "None",
        )
    )
    header = header[: token.start()] + new + header[token.end() :]
    encoded = header.encode("latin-1")
    return (
        data[:8]
        + len(encoded).to_bytes(4 if wide else 2, "little", signed=False)
        + encoded
        + data[start + size :]
    )


def _changed_pickle(data: bytes, draw: Draw) -> bytes:
    """Change the stream of a pickle by opcodes that grow or that nothing awaits."""
    at = draw.randrange(2, len(data))
    new = draw.choice(
        (
            b"(" * 5000,
            b"]" * 5000,
            b"2" * 3000,
            b"\x8a\xff" + b"\x7f" * 255,
            b"cos\nsystem\n",
            b"X\xff\xff\xff\x7f",
            b"B\xff\xff\xff\x7f",
            b"\x8b\xff\xff\xff\x7f",
            b"R",
            b"b",
            b"Q",
            b"0",
            b"}" + b"2a" * 40,
            b"I" + b"9" * 5000 + b"\n",
            b"F1e999\n",
            b"Vx\\ud800\n",
        )
    )
    return data[:at] + new + data[at + draw.choice((0, 1, 2)) :]


def change_safetensors(path: Path, draw: Draw) -> None:
    """Change the header of a .safetensors file; lengths and the seal of an archive are right."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].decode()
    if '"tensorcap"' in header and draw.random() < 0.7:
        parts = json.loads(header)
        metadata = parts["__metadata__"]
        metadata["index"], metadata["run"] = _resealed(metadata["index"], metadata["run"], draw)
        header = json.dumps(parts)
    else:
        header = mutated_json(header, draw)
    encoded = header.encode("utf-8", "surrogatepass")
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data[8 + size :])


def change_flat_file(path: Path, draw: Draw) -> None:
    """Change the index or the run of an archive in HDF5; its seal and its guard are right."""
    data = path.read_bytes()
    note = Note.unpack(data)
    assert note is not None
    index = data[note.index_at : note.index_at + note.index_size].decode()
    run = data[note.run_at : note.run_at + note.run_size].decode()
    table = data[note.offsets_at : note.offsets_at + 8 * note.offsets_count]
    if draw.random() < 0.3:
        offsets = list(struct.unpack(f"<{note.offsets_count}Q", table))
        offsets[draw.randrange(len(offsets))] = draw.choice(_NUMBERS)
        table = struct.pack(f"<{len(offsets)}Q", *offsets)
    else:
        index, run = _resealed(index, run, draw)
    parts = [part.encode("utf-8", "surrogatepass") for part in (index, run)]
    tail = b"".join((*parts, table))
    places = [note.tail_at, note.tail_at + len(parts[0]), note.tail_at + len(parts[0]) + len(parts[1])]
    forged = Note(
        note.tail_at + len(tail),
        note.tail_at,
        places[0],
        len(parts[0]),
        places[1],
        len(parts[1]),
        places[2],
        len(table) // 8,
    ).guarded([tail])
    packed = forged.pack()
    path.write_bytes(data[:96] + packed + data[96 + len(packed) : note.tail_at] + tail)


def change_zarr_index(path: Path, draw: Draw) -> None:
    """Change the index or the run of an archive in zarr; its seal is right."""
    chunks = {name: path / name / "c/0" for name in ("index", "run")}
    if not all(chunk.is_file() for chunk in chunks.values()):
        change_json(path, draw)
        return
    texts = _resealed(chunks["index"].read_text(), chunks["run"].read_text(), draw)
    for (name, chunk), text in zip(chunks.items(), texts, strict=True):
        data = text.encode("utf-8", "surrogatepass")
        chunk.write_bytes(data)
        metadata = json.loads((path / name / "zarr.json").read_text())
        metadata["shape"] = [len(data)]
        metadata["chunk_grid"]["configuration"]["chunk_shape"] = [len(data)]
        (path / name / "zarr.json").write_text(json.dumps(metadata))


def _resealed(index: str, run: str, draw: Draw) -> tuple[str, str]:
    """Index and run with one of them changed, and the seal that then is right (ARC-36)."""
    body, _, _ = index.rpartition(',"seal":')
    if draw.random() < 0.4:
        run = mutated_json(run, draw)
    else:
        body = mutated_json(f"{body}}}", draw)[:-1]
    seal = hashlib.blake2b((body + run).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return f'{body},"seal":"{seal}"}}', run


def change_journal(path: Path, draw: Draw) -> None:
    """Change a line of the journal beside an unfinished archive; its checksum is right."""
    journal = path.with_name(path.name + ".journal")
    lines = journal.read_bytes().splitlines()
    chosen = draw.randrange(len(lines))
    body = lines[chosen].rpartition(b"\t")[0].decode()
    data = mutated_json(body, draw).encode("utf-8", "surrogatepass")
    lines[chosen] = b"%s\t%08x" % (data, zlib.crc32(data))
    journal.write_bytes(b"\n".join(lines) + b"\n")


def change_journal_bytes(path: Path, draw: Draw) -> None:
    """Change bytes of the journal or of the unfinished file."""
    change_bytes(path.with_name(path.name + draw.choice((".journal", ".partial"))), draw)


def change_zarr_2(path: Path, draw: Draw) -> None:
    """Change a value of a metadata file of zarr 2."""
    file = draw.choice(sorted(file for file in path.rglob(".z*") if file.is_file()))
    file.write_text(mutated_json(file.read_text(), draw), encoding="utf-8", errors="surrogatepass")
