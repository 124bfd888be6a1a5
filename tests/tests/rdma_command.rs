//! `rdma` and `modprobe` of rnicd, which jobs call instead of those of iproute2 and kmod.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::{Command, Output};

use rnic_client::QpType;
use rnic_tests::client::{Client, READ_WRITE};
use rnic_tests::{Daemon, built, omit};
use serde_json::Value;
use tempfile::TempDir;

/// A folder with links to `rnicctl`, as created by `rnicctl system install`.
struct Commands {
    folder: TempDir,
    /// `RNIC_DEVICES` of the commands.
    devices: &'static str,
}

impl Commands {
    fn new() -> Self {
        Self::with_devices("")
    }

    fn with_devices(devices: &'static str) -> Self {
        let folder = TempDir::with_prefix("rnic-commands-").unwrap();
        for name in ["modprobe", "rmmod", "rdma"] {
            symlink(built::program("rnicctl"), folder.path().join(name)).unwrap();
        }
        Commands { folder, devices }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn rdma(&self, daemon: &Daemon, line: &str) -> Output {
        let mut command = Command::new(self.at("rdma"));
        command.args(line.split_whitespace()).env("RNIC_SOCKET", daemon.socket());
        command.env("RNIC_DEVICES", self.devices).output().unwrap()
    }

    /// Returns the output of a command that succeeds.
    fn text(&self, daemon: &Daemon, line: &str) -> String {
        let output = self.rdma(daemon, line);
        assert!(output.status.success(), "{line}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn json(&self, daemon: &Daemon, line: &str) -> Value {
        serde_json::from_str(&self.text(daemon, line)).unwrap()
    }

    /// Returns the error of a command that fails.
    fn error(&self, daemon: &Daemon, line: &str) -> String {
        let output = self.rdma(daemon, line);
        assert_eq!(output.status.code(), Some(1), "{line}: {output:?}");
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.starts_with("rdma: ") && text.lines().count() == 1, "{line}: {text}");
        text
    }
}

#[test]
fn rdma_shows_devices_as_iproute2_does() {
    let commands = Commands::new();
    let daemon = Daemon::start("");
    let text = |line: &str| commands.text(&daemon, line);
    let link = text("link show rnicd1/1");
    let start = "link rnicd1/1 state ACTIVE physical_state LINK_UP netdev ";
    assert!(link.starts_with(start) && link.lines().count() == 1, "{link}");
    let json = commands.json(&daemon, "-j link show rnicd1");
    let netdev = json[0]["netdev"].as_str().unwrap();
    assert_eq!(link, format!("{start}{netdev} \n"));
    assert_eq!(json[0]["ifname"], "rnicd1");
    assert_eq!(json[0]["port"], 1);
    assert!(json[0]["netdev_index"].as_u64().is_some_and(|index| index > 0), "{json}");
    assert_eq!(commands.json(&daemon, "-p -j link").as_array().unwrap().len(), 1);
    let dev = text("dev show rnicd1");
    assert!(dev.starts_with("0: rnicd1: node_type ca protocol roce fw "), "{dev}");
    assert!(dev.contains(" node_guid "), "{dev}");
    let statistic = text("statistic show link rnicd1/1");
    assert!(statistic.starts_with("link rnicd1/1 rx_read_requests 0 "), "{statistic}");
    let json = commands.json(&daemon, "-j statistic");
    assert_eq!(json[0]["iwInRdmaReads"], 0, "{json}");
    for (line, words) in [
        ("link show rxe7", "there is no device \"rxe7\""),
        ("link show rnicd1/2", "there is no device"),
        ("lnk", "unknown word \"lnk\""),
        ("link show rnicd0", "RNIC_DEVICES=rnicd0 shows it"),
        ("link show rnicd1 rnicd0", "unknown parameter \"rnicd0\""),
        ("-x link", "unknown option"),
        ("link add rxe0 type rxe", "`netdev` is missing"),
        ("link add rxe0 type siw netdev lo", "iWARP device always exists"),
        ("dev set rnicd1 name rxe0", "there is no device \"set\""),
    ] {
        assert!(commands.error(&daemon, line).contains(words), "{line}");
    }
    assert!(text("help").starts_with("Usage: rdma ") && text("-V").starts_with("rdma utility, "));
}

/// Jobs take the first name of this list.
#[test]
fn rdma_shows_the_devices_of_programs() {
    let daemon = Daemon::start("");
    for (devices, shown) in
        [("", "rnicd1"), ("rnicd0", "rnicd0"), ("rnicd1,rnicd0", "rnicd0 rnicd1")]
    {
        let commands = Commands::with_devices(devices);
        for line in ["-j link", "-j dev", "-j resource", "-j statistic"] {
            let json = commands.json(&daemon, line);
            let rows = json.as_array().unwrap().iter();
            let mut names: Vec<_> = rows.map(|row| row["ifname"].as_str().unwrap()).collect();
            names.sort_unstable();
            assert_eq!(names.join(" "), shown, "{devices}: {line}");
        }
    }
    let iwarp = Commands::with_devices("rnicd0").text(&daemon, "dev");
    assert!(iwarp.contains(" rnicd0: node_type rnic protocol iw "), "{iwarp}");
}

#[test]
fn rdma_shows_objects_with_their_processes() {
    let commands = Commands::with_devices("rnicd1,rnicd0");
    let daemon = Daemon::start("");
    let empty = commands.text(&daemon, "resource show rnicd1");
    assert_eq!(empty, "0: rnicd1: pd 0 cq 0 qp 0 cm_id 0 mr 0 ctx 0 srq 0 \n");
    let client = Client::new(&daemon);
    let iwarp = client.qp();
    let datagrams = client.qp_of(QpType::Ud);
    let _reliable = client.qp_of(QpType::Rc);
    let _region = client.region(8192, READ_WRITE);
    let _listener = client.listener();
    let text = |line: &str| commands.text(&daemon, line);
    let json = commands.json(&daemon, "-j resource");
    let counts = |device: &str| {
        let row = json.as_array().unwrap().iter().find(|row| row["ifname"] == device).unwrap();
        ["qp", "mr", "ctx", "cm_id"].map(|kind| row[kind].as_u64().unwrap())
    };
    assert_eq!(counts("rnicd0"), [1, 0, 0, 0], "{json}");
    assert_eq!(counts("rnicd1"), [2, 1, 1, 1], "{json}");
    let qps = text("resource show qp");
    let number = iwarp.id().0;
    assert!(qps.starts_with(&format!("link rnicd0/1 lqpn {number} type RC state ")), "{qps}");
    let pid = std::process::id();
    assert!(qps.lines().all(|line| line.contains(&format!(" pid {pid} comm "))), "{qps}");
    let found = commands.json(&daemon, "-j res show qp link rnicd1/1 type ud");
    assert_eq!(found.as_array().unwrap().len(), 1, "{found}");
    assert_eq!((&found[0]["lqpn"], &found[0]["pid"]), (&datagrams.id().0.into(), &pid.into()));
    assert_eq!(text("resource show qp link rnicd1/1 pid 1"), "");
    assert!(text("resource show mr").contains(" mrlen 8192 pdn "));
    assert!(text("resource show cm_id").contains(" state LISTEN ps TCP pid "));
    for kind in ["pd", "cq", "ctx"] {
        let text = text(&format!("resource show {kind} dev rnicd1"));
        assert!(text.starts_with("dev rnicd1 ") && text.contains(" ctxn "), "{kind}: {text}");
    }
    assert_eq!(text("resource show srq"), "");
}

#[test]
fn rdma_without_daemon_or_files_fails_clearly() {
    let commands = Commands::new();
    let daemon = Daemon::start("[device]\ntree = \"off\"\n");
    assert!(commands.error(&daemon, "link").contains("device.tree is \"off\""));
    let mut command = Command::new(commands.at("rdma"));
    let socket = commands.at("no-socket");
    let output = command.arg("link").env("RNIC_SOCKET", &socket).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text.starts_with("rdma: no RNIC daemon: "), "{text}");
}

#[test]
fn rdma_link_add_creates_a_device() {
    let commands = Commands::new();
    let daemon = Daemon::start("");
    commands.text(&daemon, "link add rxe0 type rxe netdev lo");
    assert!(commands.text(&daemon, "link").contains("link rxe0/1 state ACTIVE "));
    for (line, words) in [
        ("link add rxe0 type rxe netdev lo", "there is already a device rxe0"),
        ("link add -x type rxe netdev nosuch0", "no network interface \"nosuch0\""),
        ("link delete rnicd0", "the iWARP device cannot be removed"),
        ("link delete rxe7", "there is no such RoCE device"),
    ] {
        assert!(commands.error(&daemon, line).contains(words), "{line}");
    }
    let views = daemon.dir().join("rnicd.sock.tree/views");
    assert!(views.join("rxe0/class/infiniband/rxe0/node_guid").is_file());
    commands.text(&daemon, "link delete rxe0/1");
    assert!(!commands.text(&daemon, "link").contains("rxe0"));
    assert!(!views.join("rxe0").exists() && views.join("rnicd1").exists());
}

#[test]
fn other_modules_are_left_to_the_system() {
    let commands = Commands::new();
    let other = commands.at("other");
    std::fs::create_dir(&other).unwrap();
    let script = "#!/bin/sh\necho \"real $0: $*\"\nexit 3\n";
    for name in ["modprobe", "rmmod"] {
        std::fs::write(other.join(name), script).unwrap();
        let all = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(other.join(name), all).unwrap();
    }
    let path = |folders: &[PathBuf]| std::env::join_paths(folders).unwrap();
    // The folder is listed twice, as with two installations.
    let folders = [commands.folder.path().to_owned(), commands.folder.path().to_owned(), other];
    let run = |line: &str| {
        let mut words = line.split_whitespace();
        let mut command = Command::new(commands.at(words.next().unwrap()));
        let output = command.args(words).env("PATH", path(&folders)).output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    for line in ["modprobe rdma_rxe", "modprobe -a ib_core ib_umad", "rmmod siw"] {
        assert_eq!(run(line), (Some(0), String::new()), "{line}");
    }
    for (line, shown) in [
        ("modprobe -n rdma-rxe", ""),
        ("modprobe --show-depends rdma-rxe", "builtin rdma_rxe\n"),
        ("modprobe -aD siw rdma_cm", "builtin siw\nbuiltin rdma_cm\n"),
    ] {
        assert_eq!(run(line), (Some(0), shown.to_owned()), "{line}");
    }
    for (line, rest) in [
        ("modprobe --show-depends nvme_rdma", "--show-depends nvme_rdma"),
        ("modprobe nvme_rdma x=1", "nvme_rdma x=1"),
        ("modprobe -a rdma_rxe nvme_rdma", "-a nvme_rdma"),
        ("rmmod -f nvme_rdma", "-f nvme_rdma"),
        ("modprobe --version", "--version"),
    ] {
        let (code, text) = run(line);
        assert_eq!(code, Some(3), "{line}: {text}");
        assert!(text.starts_with("real ") && text.ends_with(&format!(": {rest}\n")), "{text}");
    }
}

/// `rdma` of iproute2 asks the kernel by netlink, and the preloaded library answers.
#[test]
fn iproute2_shows_the_devices_by_netlink() {
    let daemon = Daemon::start("");
    let own = Commands::with_devices("rnicd1,rnicd0");
    let iproute2 = |devices: &str, line: &str| {
        let mut command = Command::new(built::program("rnic-run"));
        command.args(["--no-start", "--lib-dir"]).arg(built::libraries());
        command.args(["--devices", devices, "rdma"]).args(line.split_whitespace());
        command.env("RNIC_SOCKET", daemon.socket()).env_remove("LD_PRELOAD");
        command.output().unwrap()
    };
    if !Command::new("rdma").arg("-V").output().is_ok_and(|output| output.status.success()) {
        return omit("no rdma here: Debian package iproute2");
    }
    let text = |devices: &str, line: &str| {
        let output = iproute2(devices, line);
        assert!(output.status.success(), "{line}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    for line in [
        "dev",
        "dev show rnicd1",
        "link",
        "link show rnicd0/1",
        "-d link",
        "-j link",
        "statistic",
        "statistic show link rnicd1/1",
        "-j statistic",
        "system",
    ] {
        // Versions before 6.8 do not show the protocol.
        let without = |text: &str| text.replace("protocol roce ", "").replace("protocol iw ", "");
        let found = text("rnicd1,rnicd0", line);
        let wanted = own.text(&daemon, line);
        assert_eq!(without(&found).trim_end(), without(&wanted).trim_end(), "{line}");
    }
    assert_eq!(text("rnicd1", "link").lines().count(), 1);
    for line in
        ["dev show absent", "resource", "statistic qp show", "link add a type rxe netdev lo"]
    {
        let output = iproute2("rnicd1,rnicd0", line);
        assert!(!output.status.success() && output.stdout.is_empty(), "{line}: {output:?}");
    }
}
