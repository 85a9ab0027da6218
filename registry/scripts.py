"""The Lua scripts: each is one mutation or one consistent read, and atomic.

They are sent as text, not by hash: they are short, and a restarted server forgets hashes.
"""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent / "lua"

ADD_VERSION = (_FOLDER / "add_version.lua").read_text()
DELETE_ADAPTER = (_FOLDER / "delete_adapter.lua").read_text()
RESTORE = (_FOLDER / "restore.lua").read_text()
STATE = (_FOLDER / "state.lua").read_text()
