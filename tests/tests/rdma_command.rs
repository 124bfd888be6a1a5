//! `rdma` and `modprobe` of rnicd, which jobs call instead of those of iproute2 and kmod.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use rnic_client::{Access, Qp, QpOptions, QpType, Sending, SrqOptions, Wiring};
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
    let line = format!("link rnicd0/1 lqpn {number} rqpn 0 type RC state INIT ");
    assert!(qps.lines().any(|found| found.starts_with(&line)), "{qps}");
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

/// `rdma` of iproute2, which asks the kernel by netlink, with the preloaded libraries.
struct Iproute2<'a> {
    daemon: &'a Daemon,
    /// `RNIC_DEVICES` of the commands.
    devices: &'static str,
}

impl<'a> Iproute2<'a> {
    /// Returns `None` if the program is not installed.
    fn new(daemon: &'a Daemon, devices: &'static str) -> Option<Self> {
        let version = Command::new("rdma").arg("-V").output();
        if version.is_ok_and(|output| output.status.success()) {
            return Some(Iproute2 { daemon, devices });
        }
        omit("no rdma here: Debian package iproute2");
        None
    }

    fn run(&self, line: &str) -> Output {
        let rnic_run = Command::new(built::program("rnic-run"));
        self.run_by(rnic_run, &built::libraries(), &format!("rdma {line}"))
    }

    /// Runs a program by this `rnic-run`.
    fn run_by(&self, mut rnic_run: Command, libraries: &Path, line: &str) -> Output {
        rnic_run.args(["--no-start", "--lib-dir"]).arg(libraries);
        if !self.devices.is_empty() {
            rnic_run.args(["--devices", self.devices]);
        }
        rnic_run.args(line.split_whitespace());
        rnic_run.env("RNIC_SOCKET", self.daemon.socket()).env("RNIC_LOG", "debug");
        rnic_run.env_remove("LD_PRELOAD").output().unwrap()
    }

    /// Returns the output of a command that succeeds.
    fn text(&self, line: &str) -> String {
        let output = self.run(line);
        assert!(output.status.success() && output.stderr.is_empty(), "{line}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Returns the error of a command that fails.
    fn error(&self, line: &str) -> String {
        let output = self.run(line);
        assert!(!output.status.success() && output.stdout.is_empty(), "{line}: {output:?}");
        String::from_utf8(output.stderr).unwrap()
    }

    /// Compares an output with that of rnicd's `rdma`.
    fn is_as_own(&self, line: &str) {
        let own = Commands::with_devices(self.devices).text(self.daemon, line);
        // Versions before 6.8 do not show the protocol.
        let without = |text: &str| text.replace("protocol roce ", "").replace("protocol iw ", "");
        let lines = |text: &str| without(text).trim_end().to_owned();
        assert_eq!(lines(&self.text(line)), lines(&own), "{line}");
    }
}

#[test]
fn iproute2_shows_the_devices_by_netlink() {
    let daemon = Daemon::start("");
    let Some(iproute2) = Iproute2::new(&daemon, "rnicd1,rnicd0") else { return };
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
        iproute2.is_as_own(line);
    }
    let mode = iproute2.text("statistic qp mode link rnicd1/1");
    assert_eq!(mode.trim_end(), "link rnicd1/1 mode qp auto off");
    assert_eq!(iproute2.text("statistic qp show"), "");
    assert_eq!(Iproute2 { devices: "rnicd1", ..iproute2 }.text("link").lines().count(), 1);
    for (line, error) in [
        ("dev show absent", "Wrong device name"),
        ("dev set rnicd1 name other", "Operation not supported"),
        ("system set netns exclusive", "Operation not supported"),
        ("statistic mr", "Operation not supported"),
    ] {
        assert!(iproute2.error(line).contains(error), "{line}");
    }
}

/// Connects two new RC QPs of a client.
fn rc_pair(client: &Client) -> [Qp; 2] {
    let gid = client.context.gids().unwrap()[0].gid;
    let qps = [(); 2].map(|()| client.qp_of(QpType::Rc));
    for (n, qp) in qps.iter().enumerate() {
        let wiring = Wiring {
            local: gid,
            remote: gid,
            remote_qp: qps[1 - n].id(),
            rq_psn: 700,
            path_mtu: 1024,
            min_rnr_timer: 12,
            ird: 1,
            rights: Access::empty(),
        };
        qp.to_rtr(&wiring).unwrap();
    }
    let sending = Sending { sq_psn: 700, timeout: 14, retry_count: 7, rnr_retry: 7, ord: 1 };
    qps[0].to_rts(&sending).unwrap();
    qps
}

#[test]
fn iproute2_shows_objects_by_netlink() {
    let daemon = Daemon::start("[wired]\ndevices = { rnicd1 = \"*\", second = \"*\" }\n");
    let Some(iproute2) = Iproute2::new(&daemon, "rnicd1,rnicd0,second") else { return };
    iproute2.is_as_own("resource");
    assert_eq!(iproute2.text("resource show qp"), "");
    let client = Client::new(&daemon);
    let [active, passive] = rc_pair(&client);
    let datagrams = client.qp_of(QpType::Ud);
    let iwarp = client.qp();
    let srq = client.pd.create_srq(&SrqOptions::default()).unwrap();
    let options = QpOptions { kind: QpType::Rc, srq: Some(&srq), ..client.options() };
    let of_srq = [(); 2].map(|()| client.pd.create_qp(&options).unwrap());
    let empty_srq = client.pd.create_srq(&SrqOptions::default()).unwrap();
    let region = client.region(8192, READ_WRITE);
    let _listener = client.listener();
    let _bound = client.context.bind("[::1]:0").unwrap();

    let pid = std::process::id();
    let comm = std::fs::read_to_string("/proc/self/comm").unwrap();
    let owner = format!("pid {pid} comm {}", comm.trim_end());
    let qps = iproute2.text("resource show qp");
    for line in [
        format!(
            "link rnicd1/1 lqpn {} rqpn {} type RC state RTS rq-psn 700 sq-psn 700 \
             path-mig-state MIGRATED pdn ",
            active.id(),
            passive.id()
        ),
        format!(
            "link rnicd1/1 lqpn {} rqpn {} type RC state RTR rq-psn 700 sq-psn 0 ",
            passive.id(),
            active.id()
        ),
        format!("link rnicd1/1 lqpn {} type UD state INIT sq-psn 0 pdn ", datagrams.id()),
        format!("link rnicd0/1 lqpn {} rqpn 0 type RC state INIT ", iwarp.id()),
    ] {
        let found: Vec<&str> = qps.lines().filter(|found| found.starts_with(&line)).collect();
        assert!(found.len() == 1 && found[0].contains(&owner), "{line:?}: {qps}");
    }
    assert_eq!(qps.lines().count(), 6, "{qps}");
    let [first, last] = of_srq.each_ref().map(|qp| qp.id().0);
    let range =
        if last == first + 1 { format!("{first}-{last}") } else { format!("{first},{last}") };
    let line = format!("dev rnicd1 srqn {} type BASIC lqpn {range} pdn ", srq.id());
    // iproute2 6.1 shows the command of an SRQ with QPs wrongly.
    let own = Commands::with_devices(iproute2.devices).text(&daemon, "resource show srq");
    for srqs in [iproute2.text("resource show srq"), own] {
        assert!(srqs.starts_with(&line) && srqs.contains(&format!(" pid {pid} ")), "{srqs}");
    }
    let mrs = iproute2.text("resource show mr");
    assert!(mrs.contains(&format!(" mrn {} mrlen 8192 pdn ", region.id())), "{mrs}");
    let number = active.id();
    for line in [
        "resource",
        "resource show rnicd1",
        "resource show second",
        "-j resource",
        "resource show qp",
        "-d resource show qp",
        "-j resource show qp",
        "resource show qp link rnicd1/1",
        "resource show qp link second/1",
        "resource show qp link rnicd1/1 type UD",
        &format!("-j resource show qp link rnicd1/1 lqpn {number}"),
        &format!("resource show qp link rnicd1/1 lqpn {number}"),
        &format!("resource show qp link rnicd1/1 pid {pid} state RTS"),
        "resource show qp link rnicd1/1 pid 1",
        "resource show qp link rnicd1/1 lqpn 77777",
        "resource show cm_id",
        "-j resource show cm_id",
        "resource show cm_id link rnicd1/1 state LISTEN",
        "resource show cq",
        "-j resource show cq",
        "resource show mr",
        "-j resource show mr",
        &format!("resource show mr dev rnicd1 mrn {}", region.id()),
        "resource show pd",
        "-j resource show pd",
        "resource show ctx",
        "resource show ctx dev rnicd0",
        "-j resource show ctx",
        &format!("resource show srq dev rnicd1 srqn {}", empty_srq.id()),
        &format!("-j resource show srq dev rnicd1 srqn {}", empty_srq.id()),
    ] {
        iproute2.is_as_own(line);
    }
    assert!(iproute2.error("resource show qp link rnicd1/2").contains("Wrong device name"));
}

/// The daemon and a program in another PID namespace know different process IDs of the program.
#[test]
fn rdma_in_another_pid_namespace_omits_its_own_session() {
    let commands = Commands::new();
    let daemon = Daemon::start("");
    let unshare = || {
        let mut unshare = Command::new("unshare");
        unshare.args(["--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]);
        unshare
    };
    if !unshare().arg("true").output().unwrap().status.success() {
        return omit("no PID namespaces here");
    }
    let mut rdma = unshare();
    rdma.arg(commands.at("rdma")).args(["resource", "show", "ctx"]);
    let output = rdma.env("RNIC_SOCKET", daemon.socket()).output().unwrap();
    assert!(output.status.success() && output.stdout.is_empty(), "{output:?}");
}

/// A list may be longer than a message.
#[test]
fn iproute2_shows_long_lists() {
    let daemon = Daemon::start("");
    let Some(iproute2) = Iproute2::new(&daemon, "rnicd1") else { return };
    let client = Client::new(&daemon);
    let qps: Vec<_> = (0..300).map(|_| client.qp_of(QpType::Rc)).collect();
    iproute2.is_as_own("resource show qp");
    assert_eq!(iproute2.text("resource show qp").lines().count(), qps.len());
}

#[test]
fn iproute2_adds_and_deletes_links() {
    let daemon = Daemon::start("");
    let Some(iproute2) = Iproute2::new(&daemon, "") else { return };
    assert_eq!(iproute2.text("link add rxe0 type rxe netdev lo"), "");
    assert!(iproute2.text("link").contains("link rxe0/1 state ACTIVE "));
    iproute2.is_as_own("link");
    // A device of all interfaces becomes a device of the interface.
    assert_eq!(iproute2.text("link add rnicd1 type rxe netdev lo"), "");
    let devices = daemon.json(&["device", "list"]);
    let interface = |name: &str| {
        let row = devices.as_array().unwrap().iter().find(|row| row["name"] == name);
        row.unwrap()["interface"].as_str().unwrap().to_owned()
    };
    assert_eq!([interface("rxe0"), interface("rnicd1")], ["lo", "lo"]);
    for (line, error, reason) in [
        ("add rxe0 type rxe netdev lo", "File exists", "there is already a device rxe0"),
        ("add rnicd0 type rxe netdev lo", "Too many open files", "already a device rnicd0"),
        ("add rxe1 type siw netdev lo", "Invalid argument", "rnicd adds devices of type rxe"),
        ("add rxe1 type rxe netdev nosuch0", "No such device", "no network interface"),
        ("add x/y type rxe netdev lo", "Invalid argument", "name"),
        ("delete rxe7", "Wrong device name", ""),
    ] {
        let text = iproute2.error(&format!("link {line}"));
        assert!(text.contains(error) && text.contains(reason), "{line}: {text}");
    }
    let refused = daemon.json(&["why"]).to_string();
    assert!(refused.contains("there is already a device rxe0"), "{refused}");
    let all = Iproute2 { devices: "rxe0,rnicd0", ..iproute2 };
    let text = all.error("link delete rnicd0");
    assert!(text.contains("Invalid argument") && text.contains("cannot be removed"), "{text}");
    let iproute2 = Iproute2 { devices: "", ..all };
    if Command::new("ibv_devices").output().is_ok() {
        let rnic_run = Command::new(built::program("rnic-run"));
        let listed = iproute2.run_by(rnic_run, &built::libraries(), "ibv_devices");
        assert!(String::from_utf8_lossy(&listed.stdout).contains("rxe0"), "{listed:?}");
    } else {
        omit("no ibv_devices here: Debian package ibverbs-utils");
    }
    assert_eq!(iproute2.text("link delete rxe0"), "");
    assert!(!iproute2.text("link").contains("rxe0"));
}

#[test]
fn iproute2_of_another_user_has_its_rights() {
    if !rustix::process::geteuid().is_root() {
        return omit("another user requires root");
    }
    let daemon = Daemon::start("[control]\nmode = \"0666\"\n");
    let Some(iproute2) = Iproute2::new(&daemon, "") else { return };
    let client = Client::new(&daemon);
    let _qp = client.qp_of(QpType::Rc);
    std::fs::set_permissions(daemon.dir(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let folder = daemon.dir().join("lib");
    std::fs::create_dir(&folder).unwrap();
    for library in ["libibverbs.so.1", "librdmacm.so.1", "librnic_preload.so"] {
        std::fs::copy(built::libraries().join(library), folder.join(library)).unwrap();
    }
    let program = folder.join("rnic-run");
    rnic_tests::copy_files(built::program("rnic-run"), &program);
    let run = |line: &str| {
        let mut rnic_run = Command::new("setpriv");
        rnic_run.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&program);
        iproute2.run_by(rnic_run, &folder, line)
    };
    assert_eq!(iproute2.text("resource show qp").lines().count(), 1);
    let output = run("rdma resource show qp");
    assert!(output.status.success() && output.stdout.is_empty(), "{output:?}");
    for line in ["add rxe0 type rxe netdev lo", "delete rnicd1"] {
        let output = run(&format!("rdma link {line}"));
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(text.contains("Operation not permitted"), "{line}: {text}");
        assert!(text.contains("control.admins"), "{line}: {text}");
    }
}

/// Without rnicd's libibverbs.so.1, the preloaded library answers from the device files alone.
#[test]
fn iproute2_without_libibverbs_shows_devices() {
    let daemon = Daemon::start("");
    let Some(_) = Iproute2::new(&daemon, "") else { return };
    let run = |line: &str| {
        let mut rdma = Command::new("rdma");
        rdma.args(line.split_whitespace()).env("LD_LIBRARY_PATH", "/nonexistent");
        rdma.env("LD_PRELOAD", built::libraries().join("librnic_preload.so"));
        rdma.env("RNIC_TREE", daemon.dir().join("rnicd.sock.tree")).output().unwrap()
    };
    assert!(String::from_utf8(run("link").stdout).unwrap().contains("link rnicd1/1 "));
    for line in ["resource", "link add a type rxe netdev lo", "link delete rnicd1"] {
        let text = String::from_utf8(run(line).stderr).unwrap();
        assert!(text.contains("Operation not supported"), "{line}: {text}");
    }
}
