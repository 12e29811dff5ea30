"""The embedded store of a sweep: one SQLite file, one row per scenario, written in transactions.

`scenarios` has a row per computed scenario under its key (`identity`). `members` says which scenarios a sweep consists
of and in which order, so that rows of another sweep or another version of zsim in the same file never mix in. `claims`
has what processes are computing right now: whoever inserts the key first computes it. A claim whose process is gone is
void, so kill -9 loses what was in flight and nothing else.
"""

from __future__ import annotations

import os
import socket
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from zsim.errors import InputError
from zsim.sweep.evaluate import COLUMNS, Outcome

SILENT_S = 60.0  # an owner on another machine that has not been heard of for so long is gone
OPENINGS = 200  # times that a new store is tried, 10 ms apart
SCHEMA_VERSION = 2
_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS scenarios (
  key BLOB PRIMARY KEY, inputs TEXT NOT NULL, sources TEXT NOT NULL, zsim TEXT NOT NULL, engine TEXT NOT NULL,
  {", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())}, wall_s REAL, finished_at REAL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS statuses ON scenarios (key, status);
CREATE TABLE IF NOT EXISTS members (
  sweep BLOB NOT NULL, position INTEGER NOT NULL, key BLOB NOT NULL, PRIMARY KEY (sweep, position)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS claims (key BLOB PRIMARY KEY, owner TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS owners (owner TEXT PRIMARY KEY, host TEXT, pid INTEGER, born TEXT, beat REAL) WITHOUT ROWID;
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""
_ROW = ("key", "inputs", "sources", "zsim", "engine", *COLUMNS, "wall_s", "finished_at")


@dataclass(frozen=True, slots=True)
class Entry:
    """A scenario to be stored: its key, its place in the sweep, and what makes the key."""

    key: bytes
    position: int
    inputs: str
    sources: str


class Store:
    """One process's view of the file. Raises InputError where the file is no store of this kind."""

    def __init__(self, path: Path, sweep: bytes = b"") -> None:
        self.path, self.sweep = path, sweep
        self.owner = uuid4().hex
        try:
            self.db = sqlite3.connect(path, timeout=60.0, isolation_level=None)
            self.db.execute("BEGIN")  # another process may be making the store
            version = self.db.execute("PRAGMA user_version").fetchone()[0]
            foreign = version == 0 and self.db.execute("SELECT 1 FROM sqlite_master").fetchone()
            self.db.execute("COMMIT")
            if version not in (0, SCHEMA_VERSION):
                raise InputError(f"is a store of version {version}, not {SCHEMA_VERSION}", path)
            if foreign:
                raise InputError("is a database of something else", path)
            self._write_ahead()
            self.db.execute("PRAGMA synchronous = NORMAL")
            if version == 0:
                self.db.executescript(_SCHEMA)
        except sqlite3.OperationalError as error:
            raise InputError(f"cannot be opened as a store: {error}", path) from None
        except sqlite3.DatabaseError as error:
            raise InputError(f"is no store of a sweep: {error}", path) from None

    def _write_ahead(self) -> None:
        """WAL mode. SQLite does not wait for others that are just opening the file, whatever its timeout."""
        for left in reversed(range(OPENINGS)):
            try:
                self.db.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError:
                if not left:
                    raise
                time.sleep(0.01)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with self.transaction():
            self.db.execute("DELETE FROM claims WHERE owner = ?", (self.owner,))
            self.db.execute("DELETE FROM owners WHERE owner = ?", (self.owner,))
        self.db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self.db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self.db.execute("ROLLBACK")
            raise
        self.db.execute("COMMIT")

    # Computing.

    def known(self, entries: Sequence[Entry]) -> set[bytes]:
        """Of a few hundred entries, those whose outcome is there; all become members of the sweep."""
        with self.transaction():
            rows = [(self.sweep, entry.position, entry.key) for entry in entries]
            self.db.executemany(_MEMBER, rows)
        marks = ",".join("?" * len(entries))
        # The index alone: rows are a hundred times as long as their keys.
        query = f"SELECT key FROM scenarios INDEXED BY statuses WHERE key IN ({marks}) AND status != 'failed'"
        return {key for (key,) in self.db.execute(query, [entry.key for entry in entries])}

    def claim(self, key: bytes) -> str:
        """ "mine": this process is to compute it; "others": another process does; "done": its outcome is there."""
        with self.transaction():
            self._beat()
            done = "SELECT 1 FROM scenarios WHERE key = ? AND status != 'failed'"
            if self.db.execute(done, (key,)).fetchone():
                return "done"
            added = self.db.execute("INSERT OR IGNORE INTO claims VALUES (?, ?)", (key, self.owner))
            return "mine" if added.rowcount else "others"

    def write(self, finished: Iterable[tuple[Entry, Outcome]]) -> None:
        """Outcomes in one transaction; their claims end."""
        from zsim import __version__
        from zsim.sweep.identity import engine_digest

        now = time.time()
        with self.transaction():
            self._beat()
            for entry, outcome in finished:
                values = [outcome[name] for name in COLUMNS]
                row = (entry.key, entry.inputs, entry.sources, __version__, engine_digest(), *values)
                marks = ",".join("?" * len(_ROW))
                self.db.execute(f"INSERT OR REPLACE INTO scenarios VALUES ({marks})", (*row, outcome["wall_s"], now))
                self.db.execute("DELETE FROM claims WHERE key = ?", (entry.key,))

    def beat(self) -> None:
        """Tell other processes that this one is alive."""
        with self.transaction():
            self._beat()

    def _beat(self) -> None:
        row = (self.owner, socket.gethostname(), os.getpid(), _born(os.getpid()), time.time())
        self.db.execute("INSERT OR REPLACE INTO owners VALUES (?, ?, ?, ?, ?)", row)

    def release_dead(self) -> None:
        """Void the claims of processes that are gone."""
        with self.transaction():
            for owner, host, pid, born, beat in self.db.execute("SELECT * FROM owners").fetchall():
                gone = _born(pid) != born if host == socket.gethostname() else time.time() - beat > SILENT_S
                if gone:
                    self.db.execute("DELETE FROM claims WHERE owner = ?", (owner,))
                    self.db.execute("DELETE FROM owners WHERE owner = ?", (owner,))

    # Reading.

    def count(self) -> dict[str, int]:
        """How many of the sweep's scenarios there are by status, of those that do not fit, and decided by memory."""
        query = f"""SELECT count(*), sum(status = 'ok'), sum(status = 'refused'), sum(status = 'failed'),
                    sum(fits = 1), sum(fits = 0), sum(decided_by = 'memory') {_JOIN}"""
        names = ("rows", "ok", "refused", "failed", "fit", "do_not_fit", "decided_by_memory")
        found = self.db.execute(query, (self.sweep,)).fetchone()
        return {name: value or 0 for name, value in zip(names, found, strict=True)}

    def errors(self) -> Iterator[tuple[str, str, int]]:
        """Status, error and count of the scenarios that have no outcome, the most frequent first."""
        query = f"SELECT status, error, count(*) {_JOIN} AND status != 'ok' GROUP BY status, error ORDER BY 3 DESC"
        yield from self.db.execute(query, (self.sweep,))

    def rows(self, columns: Sequence[str] = _ROW[1:], order: str = "position") -> Iterator[tuple[Any, ...]]:
        """The sweep's rows in the order of its grid, one at a time."""
        yield from self.db.execute(f"SELECT {', '.join(columns)} {_JOIN} ORDER BY {order}", (self.sweep,))

    def best(self, columns: Sequence[str], number: int) -> Iterator[tuple[Any, ...]]:
        """Of the scenarios that fit, the ones with most tokens/s."""
        query = f"SELECT {', '.join(columns)} {_JOIN} AND fits AND tokens_per_s IS NOT NULL"
        yield from self.db.execute(f"{query} ORDER BY tokens_per_s DESC, position LIMIT {number}", (self.sweep,))

    def merge(self, other: Path) -> int:
        """Add the rows of another store; returns how many were new. Equal keys mean equal outcomes."""
        Store(other).close()  # checks what it is
        before = self.db.execute("SELECT count(*) FROM scenarios").fetchone()[0]
        self.db.execute("ATTACH ? AS other", (str(other),))
        try:
            with self.transaction():
                self.db.execute(
                    "DELETE FROM scenarios WHERE status = 'failed' AND key IN (SELECT key FROM other.scenarios)"
                )
                self.db.execute("INSERT OR IGNORE INTO scenarios SELECT * FROM other.scenarios")
                self.db.execute("INSERT OR IGNORE INTO members SELECT * FROM other.members")
        finally:
            self.db.execute("DETACH other")
        return self.db.execute("SELECT count(*) FROM scenarios").fetchone()[0] - before

    def sweeps(self) -> list[tuple[bytes, int]]:
        """The sweeps in the file and how many scenarios each has."""
        return self.db.execute("SELECT sweep, count(*) FROM members GROUP BY sweep").fetchall()


# A file that scenarios name may have changed, and their keys with it; what is there already is not written again.
_MEMBER = """INSERT INTO members VALUES (?, ?, ?)
             ON CONFLICT DO UPDATE SET key = excluded.key WHERE key != excluded.key"""
_JOIN = "FROM members JOIN scenarios USING (key) WHERE sweep = ?"


def _born(pid: int) -> str | None:
    """When a process of this machine was started, in the kernel's ticks, so that a reused pid is another one."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        pass
    if Path("/proc/self/stat").exists():
        return None
    try:
        os.kill(pid, 0)
    except PermissionError:
        return "alive"
    except OSError:
        return None
    return "alive"
