"""The systemd units are clean, stay hardened, and fit each other and the programs they start."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cachewarmd import options
from cachewarmd import program as cachewarmd_program
from engine.option_table import SERVE_OPTIONS
from tests.daemon import PATIENCE_S, environment

REPOSITORY = Path(__file__).resolve().parents[2]
SYSTEMD = REPOSITORY / "systemd"
UNITS = sorted(path for path in SYSTEMD.iterdir() if path.is_file())
SERVICES = [unit for unit in UNITS if unit.suffix == ".service"]
EXAMPLES = sorted((SYSTEMD / "examples").iterdir())
FDSTORE = SYSTEMD / "254" / "cachewarmd.service.d" / "fdstore.conf"
DAEMON, ENGINE = SYSTEMD / "cachewarmd.service", SYSTEMD / "cachewarm-engine.service"
DOMAIN = SYSTEMD / "cachewarmd@.service"  # a daemon for each trust domain
WORKERS = sorted(SYSTEMD.glob("cachewarm-worker-*@.service"))
# Of 10.0, in tenths; systemd calls up to 4.9 "OK".
MAX_EXPOSURE = 20

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="systemd-analyze is not installed (apt-get install systemd)",
)
each_service = pytest.mark.parametrize("unit", SERVICES, ids=lambda unit: str(unit.name))

Settings = dict[str, list[str]]


def settings(*files: Path) -> Settings:
    """All values of each key, in order; an empty one resets the list, as in systemd."""
    found: Settings = {}
    for file in files:
        for line in file.read_text().replace("\\\n", " ").splitlines():
            key, equals, value = line.partition("=")
            if not equals or line.startswith("#"):
                continue
            found[key] = [*found.get(key, []), value.strip()] if value else []
    return found


def environ_of(unit: Settings) -> dict[str, str]:
    """What Environment= sets."""
    return dict(
        part.split("=", 1) for line in unit.get("Environment", []) for part in shlex.split(line)
    )


def command_of(unit: Settings) -> list[str]:
    [command] = unit["ExecStart"]
    return shlex.split(command.replace("%i", "1"))


def service_name(unit: Path) -> str:
    """As systemctl starts it: an instance of a template."""
    return unit.name.replace("@.", "@1.")


# -- what systemd says --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root directory with this machine's own units, ours, and programs for them to start."""
    root = tmp_path_factory.mktemp("root")
    own = next(p for p in map(Path, ("/usr/lib/systemd", "/lib/systemd")) if p.is_dir())
    shutil.copytree(own / "system", root / "usr/lib/systemd/system", symlinks=True)
    (root / "etc/systemd/system").mkdir(parents=True)
    for unit in UNITS:
        shutil.copy(unit, root / "etc/systemd/system")
    for unit in SERVICES:
        program = root / command_of(settings(unit))[0].lstrip("/")
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    return root


@pytest.fixture
def root(bare_root: Path, tmp_path: Path) -> Path:
    """A copy of it, for changes."""
    return Path(shutil.copytree(bare_root, tmp_path / "root", symlinks=True))


def verify(root: Path) -> str:
    """What systemd-analyze complains about in our units; empty when it is content."""
    names = [service_name(unit) for unit in UNITS]
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=yes", f"--root={root}"]
    result = subprocess.run([*command, *names], capture_output=True, text=True, timeout=PATIENCE_S)
    assert bool(result.returncode) == bool(result.stderr), (result.returncode, result.stderr)
    return result.stderr


def destinations(drop_in: Path) -> list[str]:
    """Where its head says that it goes to."""
    return re.findall(
        r"^# (?:.*Goes to )?(/etc/systemd/system/\S+\.conf)", drop_in.read_text(), re.M
    )


def install(drop_in: Path, root: Path) -> None:
    assert destinations(drop_in), f"{drop_in.name} does not say where it goes"
    for path in destinations(drop_in):
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(drop_in, target)


@needs_systemd
def test_units_have_no_unknown_or_malformed_setting(bare_root: Path) -> None:
    """systemd-analyze verify finds nothing to say."""
    assert verify(bare_root) == ""


@needs_systemd
@pytest.mark.parametrize("fault", ["RestartFoo=1", "CPUWeight=much", "ExecStart=/opt/not/there"])
def test_a_fault_in_a_unit_would_be_seen(root: Path, fault: str) -> None:
    """The check above can fail: an unknown key, a bad value, a program that is not there."""
    unit = root / "etc/systemd/system" / ENGINE.name
    unit.write_text(unit.read_text().replace("Type=notify\n", f"Type=notify\n{fault}\n"))
    assert ENGINE.name in verify(root)


@needs_systemd
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: str(example.name))
def test_examples_are_valid_where_they_say_they_go(root: Path, example: Path) -> None:
    """Each drop-in, at every place its head names."""
    install(example, root)
    assert verify(root) == ""


@needs_systemd
def test_settings_of_newer_systemd_are_kept_apart(root: Path) -> None:
    """Valid from 254 on; an older one finds fault with them, so they are no part of the units."""
    text = subprocess.run(["systemd-analyze", "--version"], capture_output=True, text=True).stdout
    version = int(re.findall(r"systemd (\d+)", text)[0])
    install(FDSTORE, root)
    complaint = verify(root)
    if version >= 254:
        assert complaint == ""
    else:
        assert "Unknown key 'FileDescriptorStorePreserve'" in complaint


@needs_systemd
@each_service
def test_units_are_hardened(unit: Path) -> None:
    """The exposure level stays low."""
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager"]
    command += [f"--threshold={MAX_EXPOSURE}", str(unit)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert "exposure level" in result.stdout, result.stderr
    assert result.returncode == 0, result.stdout


# -- how they fit each other --------------------------------------------------------------------


def test_g12_every_runtime_directory_has_one_owner_and_outlives_it() -> None:
    """A service that stops must not take the sockets of others with it."""
    owners: dict[str, str] = {}
    for unit in SERVICES:
        found = settings(unit)
        for folder in " ".join(found.get("RuntimeDirectory", [])).split():
            assert folder not in owners, f"{folder}: {owners.get(folder)} and {unit.name}"
            owners[folder] = unit.name
            assert found.get("RuntimeDirectoryPreserve") == ["yes"], unit.name
    assert owners == {
        "cachewarm": DAEMON.name,
        "cachewarm-engine": ENGINE.name,
        "cachewarmd-%i": DOMAIN.name,
    }


def test_g12_no_sharer_hides_what_it_shares() -> None:
    """A private /tmp holds no path that others must see, and nobody takes away others' IPC."""
    users = [settings(unit)["User"] for unit in SERVICES]
    for unit in SERVICES:
        found = settings(unit)
        assert "PrivateIPC" not in found
        if found.get("PrivateTmp") == ["yes"]:
            text = " ".join([*command_of(found), *environ_of(found).values()])
            assert "/tmp" not in text, unit.name
            # Without it the default for sockets would be below /tmp.
            assert unit in (*WORKERS, DAEMON, DOMAIN) or "XDG_RUNTIME_DIR" in environ_of(found)
        if users.count(found["User"]) > 1:
            assert "RemoveIPC" not in found, unit.name


def test_services_write_only_below_directories_of_their_own() -> None:
    """Under ProtectSystem=strict all else is read-only: sockets and locks lie in these."""
    for unit in (DAEMON, DOMAIN, ENGINE):
        found = settings(
            unit, *([SYSTEMD / "examples/cachewarm-engine-roles.conf"] * (unit == ENGINE))
        )
        assert found["ProtectSystem"] == ["strict"]
        own = [f"/run/{name}" for name in found["RuntimeDirectory"]]
        own += found.get("ReadWritePaths", [])
        environ = environ_of(found)
        made = [environ.get("XDG_RUNTIME_DIR"), environ.get("CACHEWARM_ENGINE_WORKER_SOCKET")]
        if unit != ENGINE:
            made = [command_of(found)[command_of(found).index("--socket") + 1]]
            own = [path.replace("%i", "1") for path in own]
        for path in made:
            assert path is not None
            assert any(Path(path).is_relative_to(folder) for folder in own), (unit.name, path)


def test_daemon_and_engines_are_different_users_that_meet_in_a_group() -> None:
    """Only so can an engine not reopen the daemon's memory for writing, and yet connect."""
    daemon, engine = settings(DAEMON), settings(ENGINE)
    control = settings(SYSTEMD / "cachewarmd.socket")
    assert daemon["User"] != engine["User"]
    assert daemon["Group"] == engine["Group"] == control["SocketGroup"]
    assert control["SocketUser"] == daemon["User"]
    assert control["SocketMode"] == ["0660"]
    # In a user namespace the peers' ids would all be nobody's.
    assert "PrivateUsers" not in daemon
    for worker in map(settings, WORKERS):
        assert (worker["User"], worker["Group"]) == (engine["User"], engine["Group"])
    sysusers = (SYSTEMD / "sysusers.d" / "cachewarm.conf").read_text()
    declared = re.findall(r"^u (\S+)", sysusers, re.M)
    assert sorted(declared) == sorted(daemon["User"] + engine["User"])


def test_socket_unit_and_daemon_mean_the_same_socket() -> None:
    """Path and descriptor name: else the daemon would bind a socket of its own."""
    control, command = settings(SYSTEMD / "cachewarmd.socket"), command_of(settings(DAEMON))
    assert control["ListenStream"] == [command[command.index("--socket") + 1]]
    assert control["FileDescriptorName"] == [cachewarmd_program._SOCKET_FD_NAME]
    for unit in (ENGINE, *WORKERS):
        environ = environ_of(settings(unit))
        assert environ["CACHEWARM_ENGINE_CACHEWARMD"] == control["ListenStream"][0]


@pytest.mark.parametrize("kind", ["service", "socket"])
def test_a_trust_domains_daemon_is_the_daemon_under_other_names(kind: str) -> None:
    """As hardened and as limited; but its users, its socket and its settings are its own."""
    daemon = settings(SYSTEMD / f"cachewarmd.{kind}")
    domain = settings(SYSTEMD / f"cachewarmd@.{kind}")
    assert domain.keys() == daemon.keys()
    differs = {key for key in daemon if domain[key] != daemon[key]}
    names = {
        "service": {"Requires", "After", "EnvironmentFile", "ExecStart", "User", "Group"}
        | {"StateDirectory"},
        "socket": {"ListenStream", "SocketUser", "SocketGroup"},
    }[kind]
    assert differs - {"Description", "RuntimeDirectory", "Also"} == names
    assert all("%i" in text for key in differs for text in domain[key])


def test_a_trust_domains_socket_and_daemon_mean_the_same() -> None:
    """Path, user and group."""
    domain, control = settings(DOMAIN), settings(SYSTEMD / "cachewarmd@.socket")
    command = domain["ExecStart"][0].split()
    assert control["ListenStream"] == [command[command.index("--socket") + 1]]
    assert (control["SocketUser"], control["SocketGroup"]) == (domain["User"], domain["Group"])


def test_nobody_waits_for_who_waits_for_him() -> None:
    """The engine is started when workers have come: none of them may be ordered after it."""
    for unit in WORKERS:
        found = settings(unit)
        ordered = " ".join(found.get("After", []) + found.get("Requires", [])).split()
        assert ENGINE.name not in ordered


@each_service
def test_memory_is_limited_for_all_together(unit: Path) -> None:
    """On the slice: a limit on the daemon would not bind its pool after a restart."""
    found, group = settings(unit), settings(SYSTEMD / "cachewarm.slice")
    assert found["Slice"] == ["cachewarm.slice"]
    assert not [
        key for key in found if key.startswith("Memory") and key != "MemoryDenyWriteExecute"
    ]
    assert {"MemoryMax", "MemoryHigh", "MemoryMin"} <= set(group)
    assert group["MemorySwapMax"] == ["0"]


@each_service
def test_prompts_reach_no_core_file_and_settings_may_be_absent(unit: Path) -> None:
    """LimitCORE=0; every EnvironmentFile= is optional."""
    found = settings(unit)
    assert found["LimitCORE"] == ["0"]
    assert found["EnvironmentFile"]
    assert all(name.startswith("-/etc/cachewarm/") for name in found["EnvironmentFile"])


def test_notifying_services_are_watched() -> None:
    """READY=1 from the main process only, and a watchdog."""
    notifying = [unit for unit in SERVICES if settings(unit)["Type"] == ["notify"]]
    assert notifying == [ENGINE, DAEMON, DOMAIN]
    for found in map(settings, notifying):
        assert found["NotifyAccess"] == ["main"]
        assert options.seconds(found["WatchdogSec"][0]) >= 10


def test_stop_leaves_streams_the_time_they_are_promised() -> None:
    """Workers get no SIGTERM of their own, and SIGKILL comes after the drain time."""
    found = settings(ENGINE)
    [drain] = [option.default for option in SERVE_OPTIONS if option.name == "drain-timeout"]
    assert found["KillMode"] == ["mixed"]
    assert options.seconds(found["TimeoutStopSec"][0]) > drain


# -- the programs they start --------------------------------------------------------------------


def run(module: str, arguments: list[str], environ: dict[str, str]) -> tuple[int, str]:
    """Exit status and output of one of our programs, given a unit's arguments and environment."""
    code = f"import sys; from {module}.__main__ import main; sys.exit(main())"
    result = subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments],
        env={**environment(), **environ},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    return result.returncode, result.stdout + result.stderr


@each_service
def test_units_start_the_commands_that_are_installed(unit: Path) -> None:
    """Each ExecStart names one of our console scripts, below the place the unit expects."""
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    program = Path(command_of(settings(unit))[0])
    assert program.parent == Path("/opt/cachewarm/bin")
    assert program.name in scripts


def test_daemon_accepts_its_units_command_line(tmp_path: Path) -> None:
    """Every flag and variable is known and allowed."""
    found = settings(DAEMON)
    (tmp_path / "empty.toml").touch(0o600)
    flags = ["--config", str(tmp_path / "empty.toml"), "--print-config"]
    status, told = run("cachewarmd", [*command_of(found)[1:], *flags], environ_of(found))
    assert status == 0, told
    assert "/run/cachewarm/control.sock" in told


def test_engine_accepts_its_units_command_line_with_and_without_roles(tmp_path: Path) -> None:
    """And then it listens where the worker units dial."""
    (tmp_path / "empty.toml").touch(0o600)
    flags = ["--model", "/model", "--config", str(tmp_path / "empty.toml"), "--print-config"]
    found = settings(ENGINE)
    status, told = run("engine", [*command_of(found)[1:], *flags], environ_of(found))
    assert status == 0, told
    found = settings(ENGINE, SYSTEMD / "examples" / "cachewarm-engine-roles.conf")
    status, told = run("engine", [*command_of(found)[1:], *flags], environ_of(found))
    assert status == 0, told
    config = tomllib.loads(told)
    assert config["external-workers"] is True
    for worker in WORKERS:
        command = command_of(settings(worker))
        assert command[command.index("--front") + 1] == f"unix:{config['worker-socket']}"


@pytest.mark.parametrize("unit", WORKERS, ids=lambda unit: str(unit.name))
def test_worker_accepts_its_units_command_line(tmp_path: Path, unit: Path) -> None:
    """All is well up to the model, which is not there; the role is the unit's."""
    found = settings(unit)
    (tmp_path / "empty.toml").touch(0o600)
    flags = ["--config", str(tmp_path / "empty.toml"), "--model", str(tmp_path / "model")]
    command = command_of(found)[1:]
    status, told = run("engine", [*command, *flags], environ_of(found))
    assert (status, str(tmp_path / "model") in told) == (1, True), told
    assert f"worker-{command[command.index('--role') + 1]}@" in unit.name
