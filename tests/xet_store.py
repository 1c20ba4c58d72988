"""The content store that the real Xet client writes to a folder, read by the test Hub.

With `local://FOLDER` as the address of its storage, `hf_xet` splits files into chunks, skips those that exist and writes the
others, with an index of shards, to that folder. The Hub only has to find a file by its SHA-256. The scheme is not
documented: `available` returns whether the installed wheel supports it.
"""

import contextlib
import hashlib
import struct
import time
import warnings
from pathlib import Path

RECORD = 48  # bytes of every record of a shard
END = b"\xff" * 32
VERIFIED, WITH_SHA256 = 1 << 31, 1 << 30


class XetStore:
    """A store in a folder."""

    token = "xet-loopback"

    def __init__(self, folder: Path):
        self.folder = folder
        self.url = f"local://{folder}"

    @property
    def expiry(self) -> int:
        return int(time.time()) + 3600

    def files(self) -> dict[str, tuple[str, int]]:
        """Return the Xet hash and size of every stored file by its SHA-256, read from the shards."""
        found = {}
        for shard in self.folder.rglob("*.mdb"):
            data, at = shard.read_bytes(), RECORD
            while at + RECORD <= len(data) and data[at : at + 32] != END:
                xet_hash = data[at : at + 32]
                flags, segments = struct.unpack_from("<II", data, at + 32)
                at += RECORD
                size = sum(struct.unpack_from("<I", data, at + RECORD * i + 36)[0] for i in range(segments))
                at += RECORD * segments * (2 if flags & VERIFIED else 1)
                if flags & WITH_SHA256:
                    found[_hexadecimal(data[at : at + 32])] = _hexadecimal(xet_hash), size
                    at += RECORD
        return found

    def read(self, sha256: str) -> bytes:
        """Return the content of a file, assembled by the client."""
        import hf_xet

        place = self.folder / f"{sha256}.whole"
        wanted = hf_xet.PyXetDownloadInfo(str(place), *self.files()[sha256])
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            hf_xet.download_files([wanted], self.url, (self.token, self.expiry), None, None)
        data = place.read_bytes()
        assert hashlib.sha256(data).hexdigest() == sha256
        return data


def available(folder: Path) -> bool:
    """Return whether the installed `hf_xet` supports a store in a folder."""
    try:
        import hf_xet
    except ImportError:
        return False
    store = XetStore(folder)
    with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        hf_xet.upload_bytes([b"probe" * 100], store.url, (store.token, store.expiry), None, None, None)
    return bool(store.files())


def _hexadecimal(value: bytes) -> str:
    """Hashes are written as four little-endian words."""
    return "".join(value[at : at + 8][::-1].hex() for at in range(0, 32, 8))
