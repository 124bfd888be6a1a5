//! The shipped units under a real systemd, which runs as process 1 in namespaces of this test, with
//! only these units and empty targets.

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::path::Path;
use std::process::{Command, Stdio};

use rnic_tests::{Process, built, copy_files, omit};
use tempfile::TempDir;

const SYSTEMD: &str = "/lib/systemd/systemd";

/// Enters the test's own control group `$1`, then runs the remaining arguments.
const ENTER: &str = r#"
set -e
mount -t cgroup2 none /sys/fs/cgroup
mkdir /sys/fs/cgroup/"$1"
echo 0 > /sys/fs/cgroup/"$1"/cgroup.procs
shift
exec "$@"
"#;

/// Removes the control group, which is empty by then.
const LEAVE: &str = r#"
mount -t cgroup2 none /sys/fs/cgroup
find /sys/fs/cgroup/"$1" -depth -type d -exec rmdir {} +
"#;

/// Prepares the namespaces and executes systemd. `$1` is the folder of the test. The user, the
/// program and the missing configuration that the units expect are mounted over the machine's.
const BOOT: &str = r#"
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mkdir /run/stage
cp -r "$1"/. /run/stage
# Mounted again, so that the root is the control group of this namespace.
umount /sys/fs/cgroup
mount -t cgroup2 none /sys/fs/cgroup
for file in passwd group; do mount --bind /run/stage/$file /etc/$file; done
if test -e /etc/rnicd; then mount -t tmpfs tmpfs /etc/rnicd; fi
ip link set lo up
ip link add eth type veth peer name far
ip link set eth up
ip link set far up
ip addr add 10.80.0.1/24 dev eth
export container=other SYSTEMD_UNIT_PATH=/run/stage/units
exec "$2" --system --unit=test.target --show-status=0
"#;

/// Checks from a client: the daemon's status, then a benchmark on each device. Ends with `done`.
const PROBE: &str = r#"
cd /run/stage
exec > "$1" 2>&1
set -e
./rnicctl --socket /run/rnicd/rnicd.sock status
run() { ./rnic-run --lib-dir /run/stage/lib --no-start --devices rnicd1,rnicd0 "$@"; }
bench() {
    run ib_write_bw "$@" -n 100 &
    tries=0
    until run ib_write_bw "$@" -n 100 10.80.0.1; do
        tries=$((tries + 1))
        test $tries -lt 1000
    done
    wait
}
bench -d rnicd0 -R -F -p 18515
bench -d rnicd1 -x 0 -F -p 18516
echo done
"#;

/// Returns true if namespaces and a control group can be created and all programs are installed.
fn is_possible() -> bool {
    if !Path::new(SYSTEMD).exists() {
        omit("systemd is not installed (Debian package systemd)");
        return false;
    }
    if !Command::new("ib_write_bw").arg("--help").output().is_ok_and(|o| !o.stdout.is_empty()) {
        omit("ib_write_bw is not installed (Debian package perftest)");
        return false;
    }
    let mut probe = Command::new("unshare");
    probe.args(["--mount", "--pid", "--fork", "--mount-proc", "--net", "--cgroup"]);
    let probe = probe.args(["mount", "-t", "cgroup2", "none", "/sys/fs/cgroup"]).output();
    if !probe.as_ref().is_ok_and(|output| output.status.success()) {
        omit(&format!("systemd requires namespaces and cgroup v2: {probe:?}"));
        return false;
    }
    true
}

/// Builds a shell command in its own mount namespace, with the name of a control group.
fn with_group(script: &str, group: &str) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script, "sh", group]).stdin(Stdio::null());
    command
}

#[test]
fn shipped_units_serve_both_devices() {
    if !is_possible() {
        return;
    }
    let dir = TempDir::with_prefix("rnic-systemd-").unwrap();
    let at = |name: &str| dir.path().join(name);
    copy_files(built::program("rnicd"), &at("rnicd"));
    copy_files(built::program("rnicctl"), &at("rnicctl"));
    copy_files(built::program("rnic-run"), &at("rnic-run"));
    std::fs::create_dir(at("lib")).unwrap();
    for name in ["libibverbs.so.1", "librdmacm.so.1", "librnic_preload.so"] {
        std::fs::copy(built::libraries().join(name), at("lib").join(name)).unwrap();
    }
    for (file, entry) in
        [("passwd", "rnicd:x:64991:64991::/:/usr/sbin/nologin\n"), ("group", "rnicd:x:64991:\n")]
    {
        let text = std::fs::read_to_string(Path::new("/etc").join(file)).unwrap();
        std::fs::write(at(file), text + entry).unwrap();
    }
    std::fs::create_dir(at("units")).unwrap();
    let unit = |name: &str, text: &str| std::fs::write(at("units").join(name), text).unwrap();
    // The shipped units, except for the path of the program.
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("../config");
    for name in ["rnicd.service", "rnicd.socket", "rnicd-port.socket"] {
        let text = std::fs::read_to_string(config.join(name)).unwrap();
        unit(name, &text.replace("/usr/bin/rnicd", "/run/stage/rnicd"));
    }
    for name in ["sysinit", "basic", "sockets", "shutdown", "network-online", "multi-user"] {
        unit(&format!("{name}.target"), "[Unit]\nDefaultDependencies=no\n");
    }
    std::fs::write(at("probe"), PROBE).unwrap();
    let result = at("result");
    // SIGRTMIN+13 makes process 1 of a container exit at once.
    unit(
        "probe.service",
        &format!(
            "[Unit]\nDefaultDependencies=no\nRequires=rnicd.service\nAfter=rnicd.service\n\
             [Service]\nType=oneshot\nExecStart=/bin/sh /run/stage/probe {}\n\
             ExecStopPost=/bin/kill -s RTMIN+13 1\n",
            result.display()
        ),
    );
    unit(
        "test.target",
        "[Unit]\nDefaultDependencies=no\nWants=probe.service\nAfter=probe.service\n",
    );
    let group = dir.path().file_name().unwrap().to_str().unwrap();
    let mut command = with_group(ENTER, group);
    command.args(["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    command.args(["--net", "--ipc", "--uts", "--cgroup", "sh", "-c", BOOT, "sh"]);
    command.arg(dir.path()).arg(SYSTEMD);
    let (_, lines) = Process::start(command).finish();
    // Files left behind are harmless.
    let _ = with_group(LEAVE, group).status();
    let said = std::fs::read_to_string(&result).unwrap_or_default();
    let log = lines.join("\n");
    assert!(said.ends_with("done\n"), "{said}\n{log}");
    let value = |row: &str| {
        let line = said.lines().find_map(|line| line.trim().strip_prefix(row));
        line.map(|value| value.trim().to_owned())
    };
    assert_eq!(value("wired port").as_deref(), Some("4791"), "{said}");
    assert!(value("GIDs").is_some_and(|gids| gids != "0"), "{said}");
    // One row of results for server and client of each device.
    let rows = said.lines().filter(|line| line.trim_start().starts_with("65536"));
    assert_eq!(rows.count(), 4, "{said}");
}
