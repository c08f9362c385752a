"""ledger: figures outlive the process, the first of a key counts, and nothing on disk is an error."""

from __future__ import annotations

import contextlib
import os
import resource
import stat
import tempfile
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fxremat.device import ledger
from fxremat.device.ledger import Ledger, positive

FACTS = {"kind": "test", "threads": 2}
USERS = (65533, 65534)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as two users")


def figures(book: Ledger) -> dict[str, object]:
    """The first figure of each key, whatever it is."""
    return {key: book.first(key, lambda figure: figure) for key in book}


@contextlib.contextmanager
def acting_as(user: int) -> Iterator[None]:
    """What is opened is opened by another user."""
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)


@contextlib.contextmanager
def disk_with_room_for(size_bytes: int) -> Iterator[None]:
    """No file grows beyond that: what is written comes to an end in the middle, and then fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can reach, which pytest's own they can't."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the facts, in a folder of its own."""
    monkeypatch.setenv("FXREMAT_CACHE_DIR", str(tmp_path / "deep" / "folder"))
    return ledger.open_ledger({**FACTS, "threads": 1}).path.parent / "test.jsonl"


def test_figures_are_read_by_the_next_process(path: Path) -> None:
    """With the name that the ledger was given."""
    first = Ledger(path, FACTS)
    first.add({"a": 1.5, "b": {"c": 2}})
    second = Ledger(path, FACTS)
    assert figures(second) == {"a": 1.5, "b": {"c": 2}}
    assert second.is_kept and second.name == first.name
    assert second.first("a", positive) == 1.5 and second.first("c", positive) is None


def test_the_first_figure_of_a_key_counts(path: Path) -> None:
    """Of two processes that measured the same, the second goes on with what the first found."""
    first, second = Ledger(path, FACTS), Ledger(path, FACTS)
    first.add({"a": 1, "b": 1})
    second.add({"a": 2, "c": 2})
    assert figures(second) == {"a": 1, "b": 1, "c": 2}
    assert figures(first) == {"a": 1, "b": 1}
    first.refresh()
    assert figures(first) == figures(Ledger(path, FACTS)) == {"a": 1, "b": 1, "c": 2}


@pytest.mark.parametrize(
    "useless", ['"fast"', "null", "true", "0", "-1", "NaN", "Infinity", "1e999", "1" + "0" * 400, "[1]", "{}"]
)
def test_a_figure_of_no_use_makes_room_for_the_next(path: Path, useless: str) -> None:
    """All processes go on with the first that is of use, also those that measured it at the same time."""
    Ledger(path, FACTS)
    with path.open("a") as file:
        file.write(f'["a", {useless}]\n')
    first, second = Ledger(path, FACTS), Ledger(path, FACTS)
    assert first.first("a", positive) is second.first("a", positive) is None
    first.add({"a": 1})
    second.add({"a": 2})
    assert [each.first("a", positive) for each in (first, second, Ledger(path, FACTS))] == [1.0, 1.0, 1.0]


def test_what_can_not_be_written_counts_for_the_process(path: Path) -> None:
    """Behind what was known by then, and before what others add; other processes have nothing of it."""
    first, second = Ledger(path, FACTS), Ledger(path, FACTS)
    first.add({"a": 1})
    with disk_with_room_for(path.stat().st_size + 5):
        first.add({"a": 2, "b": 2})
    second.add({"b": 3})
    first.refresh()
    assert figures(first) == {"a": 1, "b": 2} and not first.is_kept
    assert figures(Ledger(path, FACTS)) == {"a": 1, "b": 3}


def test_a_full_disk_is_no_error(path: Path) -> None:
    """The file does not come to be, and nothing is left of it."""
    with disk_with_room_for(10):
        book = Ledger(path, FACTS)
        book.add({"a": 1})
    assert figures(book) == {"a": 1} and not book.is_kept
    assert not path.exists() and list(path.parent.glob("*.new")) == []


def test_processes_that_begin_together_share_one_ledger(path: Path) -> None:
    """All have its name and its figures, and no line of one is broken by another's."""
    together = threading.Barrier(8)

    def process(number: int) -> Ledger:
        together.wait()
        book = Ledger(path, FACTS)
        book.add({f"{number}, {each}, {'x' * 200}": each for each in range(100)})
        return book

    with ThreadPoolExecutor(8) as pool:
        books = list(pool.map(process, range(8)))
    for book in books:
        book.refresh()
    assert len({book.name for book in books}) == 1
    assert all(len(figures(book)) == 800 for book in books)


def test_the_first_of_two_that_make_the_file_makes_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one takes over its name, whoever looked first."""
    link, made = os.link, []

    def late_link(source: str, target: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        made.append(Ledger(path, FACTS))
        link(source, target)

    monkeypatch.setattr(os, "link", late_link)
    assert Ledger(path, FACTS).name == made[0].name
    assert [each.name for each in path.parent.iterdir() if each.suffix == ".new"] == []


def test_a_folder_without_links_does_as_well(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is moved into place then."""

    def no_link(source: str, target: Path) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", no_link)
    first = Ledger(path, FACTS)
    assert first.is_kept and Ledger(path, FACTS).name == first.name


@pytest.mark.parametrize(
    ("folder_mode", "mode"),
    [(0o700, 0o600), (0o755, 0o644), (0o2775, 0o664), (0o1777, 0o666), (0o300, 0o600)],
)
def test_a_new_file_has_the_bits_of_its_folder(path: Path, folder_mode: int, mode: int) -> None:
    """Whoever may write to the folder may add figures; who made the file may in any case."""
    path.parent.chmod(folder_mode)
    try:
        Ledger(path, FACTS)
        assert stat.S_IMODE(path.stat().st_mode) == mode
    finally:
        path.parent.chmod(0o700)


@needs_root
def test_a_new_file_has_the_group_of_its_folder(path: Path) -> None:
    """For its bits are meant for that one."""
    os.chown(path.parent, -1, USERS[0])
    Ledger(path, FACTS)
    assert path.stat().st_gid == USERS[0]


@needs_root
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_users_of_a_folder_share_its_ledger(open_folder: Path, mode: int) -> None:
    """Each reads what the other measured and adds to it."""
    open_folder.chmod(mode)
    names = set()
    for turn in range(4):
        with acting_as(USERS[turn % 2]):
            book = Ledger(open_folder / "test.jsonl", FACTS)
            book.add({str(turn): turn})
        names.add(book.name)
        assert book.is_kept and len(figures(book)) == turn + 1
    assert len(names) == 1


@needs_root
@pytest.mark.parametrize("text", ["", '["of a user"]\n'])
def test_a_file_of_another_user_stays(open_folder: Path, text: str) -> None:
    """It may not be read, so nobody knows what is lost with it."""
    open_folder.chmod(0o777)
    path = open_folder / "test.jsonl"
    path.write_text(text)
    path.chmod(0o600)
    with acting_as(USERS[0]):
        book = Ledger(path, FACTS)
        book.add({"a": 1})
    assert figures(book) == {"a": 1} and not book.is_kept
    assert path.read_text() == text and list(open_folder.iterdir()) == [path]


@needs_root
def test_a_ledger_that_may_only_be_read_is_read(open_folder: Path) -> None:
    """What the process adds lasts as long as it does."""
    open_folder.chmod(0o755)
    path = open_folder / "test.jsonl"
    Ledger(path, FACTS).add({"a": 1})
    with acting_as(USERS[0]):
        book = Ledger(path, FACTS)
        assert book.is_kept
        book.add({"b": 2})
    assert figures(book) == {"a": 1, "b": 2} and not book.is_kept
    assert figures(Ledger(path, FACTS)) == {"a": 1}


def test_a_file_that_may_not_be_read_stays(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the folder may be written to."""
    first = Ledger(path, FACTS)
    opened = os.open

    def denied(name: object, *given: int, **options: object) -> int:
        if name == path:
            raise PermissionError("not yours")
        return opened(name, *given, **options)

    monkeypatch.setattr(os, "open", denied)
    second = Ledger(path, FACTS)
    second.add({"a": 1})
    assert figures(second) == {"a": 1} and not second.is_kept
    monkeypatch.undo()
    assert Ledger(path, FACTS).name == first.name


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        os.mkdir,
        lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to(path),
        lambda path: path.symlink_to(path.parent / "nowhere"),
    ],
    ids=["pipe", "folder", "socket", "device", "loop", "nowhere"],
)
def test_what_is_no_file_stays(path: Path, make: Callable[[Path], None]) -> None:
    """It is not opened either: a pipe would wait for its other end."""
    make(path)
    before = path.lstat()
    book = Ledger(path, FACTS)
    book.add({"a": 1})
    book.refresh()
    assert figures(book) == {"a": 1} and not book.is_kept
    assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)


def test_a_large_file_without_a_header_is_not_read_to_its_end(path: Path) -> None:
    """It is made anew after a look at its start."""
    with path.open("wb") as file:
        file.truncate(1 << 26)
    tracemalloc.start()
    try:
        assert Ledger(path, FACTS).is_kept
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_lines_that_cannot_be_read_are_none(path: Path) -> None:
    """Whatever a crash or a full disk left behind; what is appended after it counts."""
    first = Ledger(path, FACTS)
    first.add({"a": 1})
    with path.open("ab") as file:
        file.write(b'\n["b"]\n{"c": 1}\n[2, 3]\n\xff\xfe\n["\xff", 1]\n\0\0\0\0\n')
        file.write(b'["c", ' + b"[" * 100_000 + b'\n["c", ' + b"1" * 5000 + b']\n["d", 4')
    second = Ledger(path, FACTS)
    assert [key for key in second if second.first(key, positive)] == ["a"]
    second.add({"e": 5})
    assert Ledger(path, FACTS).first("e", positive) == 5


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"{", b"\xff\xfe", b"1" * 5000, b"[" * 100_000, b'{"facts": {}, "name": 1}'],
    ids=lambda text: repr(text[:4]),
)
def test_a_file_without_a_header_is_made_anew(path: Path, text: bytes) -> None:
    """Nothing can be lost with it that could have been read."""
    path.write_bytes(text)
    Ledger(path, FACTS).add({"a": 1})
    assert figures(Ledger(path, FACTS)) == {"a": 1}


def test_a_ledger_of_other_facts_stays(path: Path) -> None:
    """Its figures do not hold here."""
    path.write_text('{"facts": {}, "name": "x"}\n')
    book = Ledger(path, FACTS)
    book.add({"a": 1})
    assert figures(book) == {"a": 1} and not book.is_kept
    assert path.read_text() == '{"facts": {}, "name": "x"}\n'


def test_without_a_folder_figures_last_as_long_as_the_process(tmp_path: Path) -> None:
    """A ledger that can't be kept is as good as any until then, and its name is its own."""
    (tmp_path / "file").write_text("not a folder")
    first, second = (Ledger(tmp_path / "file" / "test.jsonl", FACTS) for _ in range(2))
    first.add({"a": 1})
    assert figures(first) == {"a": 1} and not first.is_kept and first.name != second.name
    first.refresh()
    assert list(first) == ["a"] and list(second) == []


def test_what_is_forgotten_is_made_anew() -> None:
    """Under another name; who still holds the old one adds nothing to the new."""
    old = ledger.open_ledger(FACTS)
    old.add({"a": 1})
    assert ledger.open_ledger(FACTS) is old
    ledger.forget(FACTS)
    new = ledger.open_ledger(FACTS)
    old.add({"b": 2})
    new.refresh()
    old.refresh()
    assert new.name != old.name and list(new) == [] and list(old) == ["a", "b"]
    ledger.forget({"kind": "never seen"})


def test_facts_have_files_of_their_own() -> None:
    """So a figure is never read where it does not hold."""
    books = [ledger.open_ledger({**FACTS, "threads": threads}) for threads in (1, 2)]
    books[0].add({"a": 1})
    assert books[0].path != books[1].path and list(books[1]) == []


@pytest.mark.parametrize(
    ("own", "xdg", "expected"),
    [
        ("here", "there", "here"),
        ("~/here", "there", "home/here"),
        ("", "there", "there/fxremat"),
        ("", "~/there", "home/there/fxremat"),
        ("", "", "home/.cache/fxremat"),
    ],
)
def test_the_folder(monkeypatch: pytest.MonkeyPatch, own: str, xdg: str, expected: str) -> None:
    """The package's own variable, that of the desktop, or the home; a tilde is the home."""
    for name, value in (("FXREMAT_CACHE_DIR", own), ("XDG_CACHE_HOME", xdg), ("HOME", "home")):
        monkeypatch.setenv(name, value)
    assert ledger.folder() == Path(expected)
