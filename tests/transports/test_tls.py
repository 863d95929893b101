"""Who is let in with which certificate, and what both sides hear; that links work is in `test_conformance`."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from monarch.errors import AuthenticationError, MonarchError, NotViable
from monarch.transports import certificates, registry, tls
from monarch.transports.base import Link, Listener
from monarch.transports.certificates import Certificates
from monarch.transports.nng import Pair
from monarch.transports.url import parse
from monarch.wake import Wake
from tests.certificates import Authority
from tests.transports.drive import SECRET, connected, exchange, plain, wait_until
from tests.until import until

ANYWHERE = "tls+tcp://127.0.0.1:0"
TLS = registry.get("tls+tcp")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def good(authority: Authority) -> Certificates:
    return authority.sign("good")


@pytest.fixture(scope="module")
def expired(authority: Authority) -> Certificates:
    return authority.sign("expired", days=-1)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Certificates:
    """Signed by somebody else, and trusting who signed the good ones."""
    other = Authority(tmp_path_factory.mktemp("other")).sign("foreign")
    return Certificates(other.certificate, other.key, str(authority.certificate))


@pytest.fixture(autouse=True)
def no_files() -> Iterator[None]:
    yield
    certificates.use(Certificates())


def refusal(listener: Listener, dial: Callable[[str], object]) -> BaseException:
    """What a dialer hears who gets no link."""
    errors: list[BaseException] = []
    links: list[Link] = []
    ended, over = socket.socketpair()

    def run() -> None:
        try:
            dial(listener.url)
        except BaseException as error:
            errors.append(error)
        over.close()

    thread = threading.Thread(target=run)
    with ended:
        thread.start()
        wait_until(lambda: links.extend(listener.accept_nowait()) or errors, listener, ended)
        thread.join(10)
        links += listener.accept_nowait()
    listener.close()
    assert links == []
    return errors[0]


def dial(url: str) -> Link:
    return TLS.dial(url, SECRET, 10)


def between(theirs: Certificates, ours: Certificates, monkeypatch: pytest.MonkeyPatch) -> BaseException:
    """As `refusal`, of a dialer with the certificate `ours` at a listener with `theirs`."""
    monkeypatch.setattr(tls, "_context", lambda *, accepts: tls._made(theirs if accepts else ours, accepts, ()))
    certificates.use(ours)
    return refusal(TLS.listen(ANYWHERE, SECRET), dial)


def test_a_certificate_of_another_authority_is_refused_on_both_sides(good, foreign, caplog, monkeypatch):
    error = between(good, foreign, monkeypatch)
    assert type(error) is AuthenticationError
    assert "the other side does not accept our certificate: its authority has not signed it" in str(error)
    assert "the other side's certificate is not accepted here: unable to get local issuer certificate" in caplog.text


def test_a_listener_with_a_certificate_of_another_authority_is_refused(good, foreign, caplog, monkeypatch):
    error = between(foreign, good, monkeypatch)
    assert type(error) is AuthenticationError and "unable to get local issuer certificate" in str(error)
    assert "does not accept our certificate: its authority has not signed it" in caplog.text


def test_an_expired_certificate_is_refused_on_both_sides(good, expired, caplog, monkeypatch):
    error = between(good, expired, monkeypatch)
    assert type(error) is AuthenticationError
    assert "does not accept our certificate: it has expired" in str(error)
    assert "not accepted here: certificate has expired" in caplog.text
    error = between(expired, good, monkeypatch)
    assert type(error) is AuthenticationError and "certificate has expired" in str(error)


def handshake_of(files: Certificates, url: str) -> ssl.SSLSocket:
    """A connection of a dialer whose end of the handshake is through."""
    address = parse(url)
    return tls._made(files, False, ()).wrap_socket(socket.create_connection((address.host, address.port), 10))


class Heard(Exception):
    pass


def test_the_refusal_of_a_certificate_is_not_overtaken_by_the_end_of_the_connection(good, expired):
    """What one says and then closes, with something unread, is followed by a reset, over which it may be lost."""
    certificates.use(good)

    def listen_below_tls(url: str) -> None:
        said = b""
        with handshake_of(expired, url) as sock:
            while data := socket.socket.recv(sock, 1 << 16):
                said += data
        raise Heard(said)

    error = refusal(TLS.listen(ANYWHERE, SECRET), listen_below_tls)
    assert isinstance(error, Heard) and error.args != (b"",)


def test_a_refusal_is_heard_by_one_who_sends_only_when_the_connection_has_been_reset(good, expired):
    context = tls._made(good, True, ())
    with socket.create_server(("127.0.0.1", 0)) as server:

        def refuse() -> None:
            conn, _ = server.accept()
            arriving, leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
            end = context.wrap_bio(arriving, leaving, server_side=True)
            refused = False
            while not refused:
                try:
                    end.do_handshake()
                except ssl.SSLWantReadError:
                    pass
                except ssl.SSLCertVerificationError:
                    refused = True
                conn.sendall(leaving.read())
                if not refused:
                    arriving.write(conn.recv(1 << 16))
            conn.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its end is a reset
            conn.close()

        refusing = threading.Thread(target=refuse)
        refusing.start()
        sock = handshake_of(expired, f"tls+tcp://127.0.0.1:{server.getsockname()[1]}")
        refusing.join(10)
        with sock, pytest.raises(ssl.SSLError) as caught:
            sock.sendall(b"greeting")
    assert "does not accept our certificate: it has expired" in tls._in_words(caught.value)


def test_one_who_speaks_no_tls_is_turned_away(good, caplog):
    certificates.use(good)
    plain_dial = registry.get("tcp").dial
    error = refusal(TLS.listen(ANYWHERE, SECRET), lambda url: plain_dial(url.removeprefix("tls+"), SECRET, 10))
    assert isinstance(error, MonarchError)
    assert "the other side does not speak TLS" in caplog.text


def test_dialing_one_who_speaks_no_tls_says_so(good):
    certificates.use(good)
    listener = registry.get("tcp").listen("tcp://127.0.0.1:0", SECRET)
    assert "the other side does not speak TLS" in str(refusal(listener, lambda url: dial(f"tls+{url}")))


@pytest.mark.parametrize(
    ("lacking", "setting"),
    [("certificate", "hyperactor_tls_cert"), ("key", "hyperactor_tls_key"), ("authority", "hyperactor_tls_ca")],
)
def test_without_files_there_is_no_tls_and_the_reason_says_which_and_what_names_them(good, lacking, setting):
    files = {"certificate": good.certificate, "key": good.key, "authority": good.authority, lacking: ""}
    certificates.use(Certificates(**files))
    assert f"set {setting.upper()} in the environment, or configure({setting}=...)" in TLS.viability().reason
    with pytest.raises(NotViable, match=f"no file is named for its {lacking}"):
        TLS.listen(ANYWHERE, SECRET)
    with pytest.raises(NotViable, match=f"no file is named for its {lacking}"):
        TLS.dial("tls+tcp://127.0.0.1:1", SECRET, 1)


def test_files_that_are_not_there_or_are_none_are_named(good, tmp_path: Path):
    certificates.use(Certificates(good.certificate, str(tmp_path / "none"), good.authority))
    with pytest.raises(NotViable, match=r"none \(hyperactor_tls_key\): No such file"):
        TLS.listen(ANYWHERE, SECRET)
    (tmp_path / "empty").write_text("")
    certificates.use(Certificates(str(tmp_path / "empty"), good.key, good.authority))
    with pytest.raises(
        NotViable, match=r"empty.*is no certificate with its key.*hyperactor_tls_cert and hyperactor_tls_k"
    ):
        TLS.listen(ANYWHERE, SECRET)
    certificates.use(Certificates(good.certificate, good.key, str(tmp_path / "empty")))
    with pytest.raises(NotViable, match=r"empty is no certificate of an authority.*hyperactor_tls_ca"):
        TLS.listen(ANYWHERE, SECRET)


def test_files_that_are_written_anew_count_for_the_next_link(authority, expired, tmp_path: Path):
    """Links that are up go on."""
    fresh = authority.sign("fresh")
    files = Certificates(str(tmp_path / "certificate"), str(tmp_path / "key"), str(authority.certificate))

    def install(which: Certificates) -> None:
        Path(files.key).write_bytes(Path(which.key).read_bytes())
        Path(files.certificate).write_bytes(Path(which.certificate).read_bytes())

    install(fresh)
    certificates.use(files)
    with connected(TLS) as (left, right):
        install(expired)
        assert plain(exchange(left, right, [[b"x", bytes(1 << 20)]])) == [[b"x", bytes(1 << 20)]]
        assert "expired" in str(refusal(TLS.listen(ANYWHERE, SECRET), dial))


def test_the_port_of_a_pair_is_closed_to_everybody_once_it_is_up(good, monkeypatch):
    doors = []
    behind_a_door = Pair.behind_a_door

    def remembered(host: str):
        pair, door = behind_a_door(host)
        doors.append(door)
        return pair, door

    monkeypatch.setattr(Pair, "behind_a_door", remembered)
    certificates.use(good)
    with connected(TLS) as (left, right):
        with pytest.raises(OSError), socket.create_connection(("127.0.0.1", doors[0].port), 0.2):
            pass
        assert plain(exchange(left, right, [[b"x"]])) == [[b"x"]]


def test_nothing_of_a_message_is_seen_on_the_wire(good):
    """A relay that looks at all that passes over the first connection; what nng sends has its own key."""
    certificates.use(good)
    listener = TLS.listen(ANYWHERE, SECRET)
    target = parse(listener.url)
    seen = bytearray()

    with socket.create_server(("127.0.0.1", 0)) as server:

        def copy(source: socket.socket, sink: socket.socket) -> None:
            try:
                while data := source.recv(1 << 16):
                    seen.extend(data)
                    sink.sendall(data)
                sink.shutdown(socket.SHUT_WR)
            except OSError:
                pass

        def relay() -> None:
            inner, _ = server.accept()
            outer = socket.create_connection((target.host, target.port))
            threads = [threading.Thread(target=copy, args=ends) for ends in ((inner, outer), (outer, inner))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
            inner.close()
            outer.close()

        relaying = threading.Thread(target=relay)
        relaying.start()
        made: list[object] = []
        url = f"tls+tcp://127.0.0.1:{server.getsockname()[1]}"
        dialing = threading.Thread(target=lambda: made.append(TLS.dial(url, SECRET, 10)))
        dialing.start()
        accepted: list[object] = []
        wait_until(lambda: accepted.extend(listener.accept_nowait()) or accepted, listener)
        dialing.join(10)
        secret_text = b"nobody else may read this " * 10_000
        assert plain(exchange(made[0], accepted[0], [[b"head", secret_text]])) == [[b"head", secret_text]]
        made[0].abort()
        accepted[0].abort()
        relaying.join(20)
    listener.close()
    assert len(seen) > len(secret_text) and b"nobody else" not in seen and b"MONARCH" not in seen


def test_nng_closes_a_pair_only_when_its_connection_has_ended(good):
    closed: list[bool] = []

    def watch(pair: Pair) -> Pair:
        close = pair._socket.close
        pair._socket.close = lambda: (closed.append(pair.is_gone), close())
        return pair

    certificates.use(good)
    with connected(TLS) as (left, right):
        pairs = [watch(left._pair), watch(right._pair)]
    for pair in pairs:
        pair.wait_closed()
    assert closed == [True, True]


def test_an_end_of_the_second_connection_is_told_when_it_comes_after_that_of_the_first():
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours = server.accept()[0]
    pair = Pair.__new__(Pair)
    pair._connection, pair.wake = ours, Wake()
    pair.is_gone = pair._is_ending = pair._closed = False
    pair.check_end()
    assert not pair.is_gone
    theirs.close()
    until(lambda: pair.is_gone)
    ours.close()
    pair.wake.close()
