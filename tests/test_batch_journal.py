"""The journal, its lock, and the file systems that they lie on."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdsage.batch.journal import DONE, FOLDER, NAME, Journal, Row, file_system, is_shared, read
from sdsage.batch.lock import Busy, Lock, live
from sdsage.errors import OutputError, SdsageError

MOUNTS = r"""22 1 0:21 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:30 / /mnt/nas rw - nfs4 server:/a rw
31 30 0:31 / /mnt/nas/fast rw - xfs /dev/sdb1 rw
32 22 0:32 / /mnt/with\040space rw master:1 - fuse.sshfs host:/ rw
33 22 0:33 / /mnt/twice rw - ext4 /dev/sdc1 rw
34 22 0:34 / /mnt/twice rw - cifs //server/b rw
a line of another kind
"""


def row(key: str = "k", **more: object) -> Row:
    return Row(key, 1, "img-gen", "tiny", "a.png", 7, {"steps": "1"}, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/x", "ext4"),
        ("/mnt/nas", "nfs4"),
        ("/mnt/nasty", "ext4"),
        ("/mnt/nas/a/b", "nfs4"),
        ("/mnt/nas/fast/a", "xfs"),
        ("/mnt/with space/a", "fuse.sshfs"),
        ("/mnt/twice", "cifs"),
    ],
)
def test_file_systems(path: str, kind: str) -> None:
    assert file_system(Path(path), MOUNTS) == kind


def test_this_machine_is_told_by_its_own_table() -> None:
    assert file_system(Path("/proc")) == "proc"
    assert not is_shared(Path("/proc"))


@given(
    st.builds(
        row,
        st.text(max_size=5),
        message=st.text(max_size=20),
        crashes=st.integers(0, 5),
        memory=st.dictionaries(st.text(max_size=3), st.booleans(), max_size=2),
        before=st.none() | st.lists(st.integers(0, 2**62), min_size=3, max_size=3),
        files=st.just([["a.png", 3, "ff"]]),
        seconds=st.floats(0, 1e6),
    )
)
@pytest.mark.parametrize("shared", [False, True])
def test_rows_come_back(shared: bool, tmp_path_factory: pytest.TempPathFactory, found: Row) -> None:
    folder = tmp_path_factory.mktemp("journal")
    (folder / FOLDER).mkdir()
    journal = Journal(folder, shared=shared)
    journal.put([found])
    assert read(folder) == [found]  # while it is open
    journal.ended(found, b"jpeg")
    assert (journal.poster(found.key), journal.poster("none")) == (b"jpeg", None)
    journal.begin([row("another")])
    journal.close()
    assert {r.key: r.number for r in read(folder)} == {found.key: None, "another": 1}


@pytest.mark.parametrize(("shared", "mode"), [(False, "wal"), (True, "delete")])
def test_a_shared_file_system_has_no_shared_memory(shared: bool, mode: str, tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    Journal(tmp_path, shared=not shared).close()
    Journal(tmp_path, shared=shared).close()  # also where it was the other before
    with sqlite3.connect(tmp_path / FOLDER / NAME) as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == (mode,)


WRITER = """
import sys
from pathlib import Path
from sdsage.batch.journal import Journal, Row
journal = Journal(Path(sys.argv[1]), shared=sys.argv[2] == "True")
for i in range(10**9):
    row = Row(f"k{i}", i, "img-gen", "m", "a" * 3000, 1, {})
    journal.put([row])
    row.state = "done"
    journal.ended(row)
    print(i, flush=True)
"""


@pytest.mark.parametrize("shared", [False, True])
def test_a_kill_loses_nothing_that_was_written(shared: bool, tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    written = -1
    for _ in range(3):
        command = [sys.executable, "-P", "-c", WRITER, str(tmp_path), str(shared)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                written = int(line)
                if written >= 20:
                    break
            process.kill()
            rest = process.stdout.read().splitlines()
        written = int(rest[-1]) if rest else written
        done = {r.number for r in read(tmp_path) if r.state == DONE}
        assert done >= set(range(written + 1))
        with sqlite3.connect(tmp_path / FOLDER / NAME) as db:
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            keys = [key for (key,) in db.execute("SELECT key FROM attempts")]
        assert len(keys) >= len(done)


def test_a_damaged_journal_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / NAME).write_bytes(b"no database" * 100)
    with pytest.raises(SdsageError, match=r"move .* away to begin anew"):
        Journal(tmp_path)
    with pytest.raises(SdsageError, match=r"move .* away to begin anew"):
        read(tmp_path)


def test_a_journal_of_another_version(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    Journal(tmp_path).close()
    with sqlite3.connect(tmp_path / FOLDER / NAME) as db:
        db.execute("PRAGMA user_version=99")
    for act in (Journal, read):
        with pytest.raises(SdsageError, match="has format 99"):
            act(tmp_path)


# ---- the lock

HOLDER = """
import sys, time
from pathlib import Path
from sdsage.batch.lock import Lock
lock = Lock(Path(sys.argv[1]))
lock.live(lambda: {"done": 3})
print("held", flush=True)
time.sleep(1000)
"""


def test_a_held_lock_says_by_whom_and_a_dead_one_is_taken(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-P", "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(Busy, match=rf"process {process.pid} on {os.uname().nodename}, since \d{{4}}-") as error:
            Lock(tmp_path)
        assert error.value.exit_code == 2
        found = live(tmp_path)
        assert found is not None
        assert (found["pid"], found["done"]) == (process.pid, 3)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert live(tmp_path) is None
        lock = Lock(tmp_path)
        assert lock.left_behind["pid"] == process.pid
        lock.release()
    Lock(tmp_path).release()
    assert (tmp_path / FOLDER / "lock").read_bytes() == b""


def test_on_a_shared_file_system_another_machine_counts_while_it_lives(tmp_path: Path) -> None:
    """Its flock may not reach us: what it wrote, and when, does."""
    lock = tmp_path / FOLDER / "lock"
    lock.parent.mkdir()
    lock.write_text(json.dumps({"pid": 5, "host": "elsewhere", "since": 1.0}))
    with pytest.raises(Busy, match="process 5 on elsewhere"):
        Lock(tmp_path, shared=True)
    os.utime(lock, (1, 1))
    found = Lock(tmp_path, shared=True)
    assert found.left_behind["host"] == "elsewhere"
    found.release()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="can't be used"):
        Lock(tmp_path / "file")
