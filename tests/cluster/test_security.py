"""Clusters that ClusterEnv starts speak TLS, and only with those who hold their certificates."""

from __future__ import annotations

import re
import socket
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import dask
import gymnasium as gym
import psutil
import pytest
import torch
from distributed import Client
from distributed.security import Security
from gymnasium.vector import AutoresetMode

import clusterenv
from clusterenv.cluster.security import choose_security, in_files
from clusterenv.data.pickling import dumps
from clusterenv.errors import ConfigError
from clusterenv.head.fleet.launch import make_recipe
from clusterenv.policies import Policy
from clusterenv.transport.connection import BlockingConnection
from clusterenv.transport.endpoint import connect
from clusterenv.transport.messages import MessageKind, ResetRequest
from clusterenv.worker.actor import Shard
from clusterenv.worker.specs import ShardSpec
from pipelines.experiment.run_directory import RunDirectory, arguments
from pipelines.ppo import PPO
from pipelines.tools.saved_policies import collecting_policy, load_run


def certificate_of(security: Security) -> ssl.SSLContext:
    context: ssl.SSLContext = security.get_connection_args("client")["ssl_context"]
    return context


def no_certificate() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def answers(host: str, port: int, context: ssl.SSLContext | None, first: bytes = b"") -> bool:
    """Whether a listener says anything to whoever comes with these certificates."""
    raw = socket.create_connection((host, port), 10)
    try:
        with raw if context is None else context.wrap_socket(raw) as peer:
            peer.sendall(first)
            heard = peer.recv(1)
    except (ssl.SSLError, ConnectionError):
        return False
    # Who speaks no TLS may be told so, in a TLS record that is an alert.
    return heard not in (b"", b"\x15")


def listening() -> set[tuple[str, int]]:
    """Return where this process and those that it started listen."""
    mine = psutil.Process()
    return {
        (connection.laddr.ip, connection.laddr.port)
        for process in (mine, *mine.children(recursive=True))
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }


def http_status(host: str, port: int, path: str) -> int:
    with socket.create_connection((host, port), 10) as peer:
        peer.sendall(f"GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
        return int(peer.recv(100).split()[1])


def reachable_host() -> str:
    """Return an address of this machine beyond 127.0.0.1."""
    addresses = [each for of in psutil.net_if_addrs().values() for each in of]
    found = [each.address for each in addresses if each.family == socket.AF_INET]
    return next((each for each in found if not each.startswith("127.")), "127.0.0.2")


def test_every_port_is_http_on_loopback_without_pages_or_refuses_strangers() -> None:
    before = listening()
    with clusterenv.connect(
        "local", n_workers=2, host=reachable_host(), set_as_default=False
    ) as client:
        ports = listening() - before
        http = {(ip, port) for ip, port in ports if ip == "127.0.0.1"}
        assert len(http) == 3  # of the scheduler and the two workers
        for ip, port in http:
            for page in ("/metrics", "/health", "/info/main/workers.html", "/status"):
                assert http_status(ip, port, page) == 404
        tls = ports - http
        assert len(tls) == 5  # the scheduler, the workers and their nannies
        for ip, port in tls:
            assert answers(ip, port, certificate_of(client.security))
            assert not answers(ip, port, certificate_of(Security.temporary()))
            assert not answers(ip, port, no_certificate())
            assert not answers(ip, port, None, b"\0" * 64)


@pytest.fixture
def shard(client: Client, leaves_nothing: None) -> Iterator[Shard]:
    """A shard that waits for its head."""
    spec = ShardSpec(index=0, first=0, count=1, ports=None, accept_timeout=30)
    future = client.submit(Shard, spec, actor=True, pure=False)
    actor = future.result()
    yield actor
    actor.close(10).result()
    client.cancel([future], force=True)


def test_a_shard_listens_to_nobody_without_the_clusters_certificate(
    client: Client, shard: Shard
) -> None:
    """Not even to one who knows the token."""
    recipe = make_recipe("CartPole-v1", 1, "auto", AutoresetMode.NEXT_STEP, (), {})
    at = shard.open(cloudpickle.dumps(recipe), None).result().endpoint
    for context in (certificate_of(Security.temporary()), no_certificate(), None):
        assert not answers(at.host, at.port, context, at.token)
    sock = connect(at._replace(local=None), certificate_of(client.security), 10)
    connection = BlockingConnection(sock)
    connection.send(MessageKind.RESET, dumps(tuple(ResetRequest([1], None, None))))
    assert connection.recv_header().kind == MessageKind.RESULT
    connection.close()


@pytest.mark.parametrize("way", ["argument", "setting"])
def test_tls_can_be_turned_off(way: str) -> None:
    options = {"security": False} if way == "argument" else {}
    with (
        dask.config.set({"clusterenv.security": way == "argument"}),
        clusterenv.connect("local", n_workers=1, set_as_default=False, **options) as client,
    ):
        addresses = [client.scheduler.address, *client.nthreads()]
        assert {address.split("://")[0] for address in addresses} == {"tcp"}


def test_certificates_of_the_user_are_used() -> None:
    theirs = Security.temporary()
    with clusterenv.connect("local", n_workers=1, security=theirs, set_as_default=False) as client:
        again = clusterenv.connect(client.scheduler.address, security=theirs, set_as_default=False)
        assert again.submit(lambda: 5).result() == 5
        again.close()


def test_certificates_of_dasks_configuration_come_first(tmp_path: Path) -> None:
    files = in_files(Security.temporary(), tmp_path)
    roles = {
        f"distributed.comm.tls.{role}.{part}": getattr(files, f"tls_{role}_{part}")
        for role in ("client", "scheduler", "worker")
        for part in ("cert", "key")
    }
    with dask.config.set({"distributed.comm.tls.ca-file": files.tls_ca_file, **roles}):
        chosen = choose_security(True)
    assert chosen is not None
    assert chosen.require_encryption
    assert chosen.tls_scheduler_key == files.tls_scheduler_key


def test_a_tls_address_without_certificates_says_which_to_pass(client: Client) -> None:
    address = client.scheduler.address
    with (
        dask.config.set({"distributed.comm.tls.client.cert": None}),
        pytest.raises(ConfigError, match=r"has no certificate .* security=Security\(tls_ca_file"),
    ):
        clusterenv.connect(address)


def test_only_what_is_started_can_be_told_to_use_tls() -> None:
    with pytest.raises(ConfigError, match="security=True is for clusters that are started"):
        clusterenv.connect("tcp://127.0.0.1:1", security=True)
    with pytest.raises(ConfigError, match="security='on' is a str; pass True"):
        clusterenv.connect("local", security="on")  # type: ignore[arg-type]


def test_files_of_certificates_are_for_their_owner_alone(tmp_path: Path) -> None:
    security = Security.temporary()
    files = in_files(security, tmp_path)
    assert Path(files.tls_worker_key).read_text() == security.tls_worker_key
    written = list(tmp_path.iterdir())
    assert len(written) == 7  # the authority's certificate, a pair for each of three roles
    assert {stat.S_IMODE(file.stat().st_mode) for file in written} == {0o600}
    assert in_files(files, tmp_path).tls_worker_key == files.tls_worker_key


def test_jobs_get_certificates_in_a_private_directory_that_goes_with_the_cluster(
    tmp_path: Path,
) -> None:
    pytest.importorskip("dask_jobqueue")
    before = listening()
    client = clusterenv.connect(
        "slurm",
        cores=2,
        memory="1GB",
        interface="lo",
        shared_temp_directory=str(tmp_path),
        set_as_default=False,
    )
    try:
        script = client.cluster.job_script()
        (directory,) = tmp_path.iterdir()
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert f"--tls-key {directory}/worker_key.pem" in script
        assert " tls://127.0.0.1:" in script
        assert "--dashboard-address 127.0.0.1:0" in script
        http = ("127.0.0.1", client.cluster.scheduler.http_server.port)
        assert http_status(*http, "/status") == http_status(*http, "/info/main/logs.html") == 404
        (tls,) = listening() - before - {http}
        assert answers(*tls, certificate_of(client.security))
        assert not answers(*tls, no_certificate())
    finally:
        client.close()
    assert list(tmp_path.iterdir()) == []


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    went_off = tmp_path / "went-off"
    run = RunDirectory(PPO.preset("CartPole-v1", out=tmp_path), "ppo", ())
    run.begin({"learner": "ppo", "options": {}})
    run.commit({}, None)
    assert run.checkpoint is not None
    torch.save({"agent": Bomb(went_off)}, run.checkpoint)
    with pytest.raises(ConfigError, match=r"cannot be read: [Ww]eights"):
        run.load()
    box, two = gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(2)
    with pytest.raises(ConfigError, match=r"is no checkpoint of a learner: [Ww]eights"):
        collecting_policy(str(tmp_path), box, two, 0.0)
    run.close()
    assert not went_off.exists()
    torch.load(run.checkpoint, weights_only=False)
    assert went_off.exists()  # the bomb is one


class Explosive(Policy):
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.bomb = Bomb(path)


def test_a_saved_policy_runs_code_only_by_load_policy(tmp_path: Path) -> None:
    went_off, run = tmp_path / "went-off", tmp_path / "run"
    env = gym.make("CartPole-v1")
    args = PPO.preset("CartPole-v1", out=run)
    learner = PPO(args, env.observation_space, env.action_space)
    notes = {"kind": "ppo", "args": arguments(args), "steps": 7}
    run.mkdir()
    for name in ("policy.pt", "best.pt"):
        weights = learner.policy.state_dict()
        clusterenv.save_policy(Explosive(went_off), run / name, weights=weights, notes=notes)
    saved = load_run(run)
    assert saved.path == run / "best.pt"
    torch.load(run / "policy.pt", weights_only=True)
    assert not went_off.exists()
    clusterenv.load_policy(run)
    assert went_off.exists()


READERS = r"pickle\.loads?\(|Unpickler\(|np\.load\(|^\s*(import|from) (marshal|shelve)\b"


def test_pickles_are_read_from_connections_only() -> None:
    root = Path(clusterenv.__file__).parents[1]
    for folder in ("clusterenv", "pipelines"):
        for path in (root / folder).rglob("*.py"):
            text = path.read_text()
            if path.name not in ("pickling.py", "saved.py"):  # saved.py is load_policy
                assert not re.search(READERS, text, re.MULTILINE), path
            assert "clusterenv.load_policy(" not in re.sub(r"\"\"\".*?\"\"\"", "", text, flags=re.S)
            for call in re.findall(r"torch\.load\(.*", text):
                assert "weights_only=True" in call, path
