//! Several RoCE devices, the profile "rxe", and commands that add and remove devices, mostly in
//! network namespaces.

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::fs;
use std::process::{Command, Output};

use rnic_client::{Context, DeviceKind, Event, NO_GID};
use rnic_tests::apart::{Apart, Side};
use rnic_tests::{DEADLINE, Daemon, Process, built, installed, omit, ports, verbs};
use tempfile::TempDir;

/// Commands that give a new network namespace an interface beside `lo`.
const ETH: &str = "ip link add eth type veth peer name far && ip link set eth up && \
                   ip link set far up && ip addr add 10.78.0.1/24 dev eth";

/// Returns a command that runs a shell script with a private daemon in a new network namespace,
/// after `setup`. Returns `None` where namespaces are refused.
fn alone(dir: &TempDir, setup: &str, config: &str, script: &str) -> Option<Command> {
    let lo = format!("ip link set lo up && {setup} && ");
    let unshare = || {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--net", "sh", "-c"]);
        command
    };
    if !unshare().arg(format!("{lo} true")).output().is_ok_and(|o| o.status.success()) {
        omit("network namespaces are refused here");
        return None;
    }
    let file = dir.path().join("rnicd.toml");
    fs::write(&file, config).unwrap();
    let mut command = unshare();
    command.arg(format!("{lo} exec \"$@\"")).arg("sh").arg(built::program("rnicd"));
    command.args(["exec", "--log", "-", "--config"]).arg(&file).args(["--", "sh", "-ec", script]);
    command.env("LD_LIBRARY_PATH", built::libraries()).env("RNICCTL", built::program("rnicctl"));
    command.env_remove("RNIC_DEVICES");
    Some(command)
}

/// Defines a shell function that runs a program as server and as client until both succeed. The
/// client fails while the server does not listen yet.
const PAIR: &str = "pair() { to=$1; shift; timeout 120 \"$@\" >server 2>&1 & \
                    until timeout 120 \"$@\" $to >client 2>&1; do kill -0 $!; done; \
                    wait $! && tail -n 1 client; }; cd \"$(mktemp -d)\"\n";

#[test]
fn each_interface_has_a_device() {
    let dir = tempfile::tempdir().unwrap();
    let config =
        "[wired]\ndevices = { \"rxe_{n}\" = \"*\", \"{netdev}x\" = \"eth\", all = \"*\" }\n";
    let script = "cd \"$RNIC_SOCKET.tree/class/infiniband\"; for d in *; do \
                  echo $d $(cat $d/parent) $(ls $d/device/net) $(cat $d/ports/1/gids/*); done; \
                  cat */node_guid | sort -u | wc -l; $RNICCTL device list";
    let Some(command) = alone(&dir, ETH, config, script) else { return };
    let said = Process::start(command).succeed();
    let line = |text: &str| {
        let found = said.iter().filter(|line| line.starts_with(text)).count();
        assert_eq!(found, 1, "{text}: {said:#?}");
    };
    let eth = "0000:0000:0000:0000:0000:ffff:0a4e:0001";
    let lo = "0000:0000:0000:0000:0000:ffff:7f00:0001 0000:0000:0000:0000:0000:0000:0000:0001";
    line(&format!("all eth eth lo {eth} {lo}"));
    line(&format!("ethx eth eth {eth}"));
    line(&format!("rxe_0 eth eth {eth}"));
    line(&format!("rxe_1 lo lo {lo}"));
    // The GUIDs of four RoCE devices and of the iWARP device.
    line("5");
    line("rxe_1   RoCE");
}

#[test]
fn id_prefers_the_device_of_the_interface() {
    let dir = tempfile::tempdir().unwrap();
    let Some(program) = verbs::program("tests/roce_cm_device.c", dir.path()) else { return };
    let config = "[wired]\ndevices = { all = \"*\", on_eth = \"eth\" }\n";
    let script = "$PROGRAM 10.78.0.1 10.79.0.1
                  export RNIC_DEVICES=on_eth; $PROGRAM 10.79.0.1";
    let setup = format!("{ETH} && ip addr add 10.79.0.1/24 dev far");
    let Some(mut command) = alone(&dir, &setup, config, script) else { return };
    command.env("PROGRAM", program);
    let said = Process::start(command).succeed();
    let enodev = format!("10.79.0.1: errno {}", rustix::io::Errno::NODEV.raw_os_error());
    let expected = ["10.78.0.1: on_eth", "10.79.0.1: all", &enodev];
    let lines: Vec<_> = said.iter().filter(|line| line.contains(".0.1: ")).collect();
    assert_eq!(lines, expected, "{said:#?}");
}

#[test]
fn device_of_a_new_interface_skips_taken_names() {
    let dir = tempfile::tempdir().unwrap();
    let config = "[wired]\ndevices = { \"rxe_{n}\" = \"*\" }\n";
    let script = "$RNICCTL device add rxe_2; ip addr add 10.79.0.1/24 dev far
                  timeout 120 sh -c 'until $RNICCTL device list | grep rxe_3; do :; done'
                  ls \"$RNIC_SOCKET.tree/views/rxe_3/class/infiniband\"";
    let Some(command) = alone(&dir, ETH, config, script) else { return };
    let said = Process::start(command).succeed();
    assert!(said.iter().any(|line| line == "rxe_3"), "{said:#?}");
}

#[test]
fn device_of_a_pattern_goes_with_its_interface() {
    let dir = tempfile::tempdir().unwrap();
    let config = "[wired]\ndevices = { \"rxe_{netdev}\" = \"*\", fixed = \"eth\" }\n";
    // More interfaces than there can be devices, but one at a time.
    let script = "for n in $(seq 17); do
                      ip link add v$n type veth peer name w$n; ip addr add 10.80.0.1/24 dev v$n
                      timeout 120 sh -c \"until $RNICCTL device list | grep -q rxe_v$n; do :; done\"
                      ip link del v$n
                      timeout 120 sh -c \"while $RNICCTL device list | grep -q rxe_v$n; do :; done\"
                  done
                  ip link del eth; $RNICCTL device list";
    let Some(command) = alone(&dir, ETH, config, script) else { return };
    let said = Process::start(command).succeed();
    assert!(said.iter().any(|line| line.starts_with("fixed ")), "{said:#?}");
}

#[test]
fn interfaces_with_unusable_names_have_no_device() {
    let dir = tempfile::tempdir().unwrap();
    let config = "[wired]\ndevices = { \"rxe_{netdev}\" = \"*\" }\n";
    let setup = "ip link add a+b type veth peer name far && ip addr add 10.78.0.1/24 dev a+b";
    let Some(mut command) = alone(&dir, setup, config, "$RNICCTL device list") else { return };
    let Output { status, stdout, stderr } = command.output().unwrap();
    let [said, log] = [stdout, stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(status.success() && said.contains("rxe_lo"), "{said}{log}");
    assert!(log.contains("device \"rxe_a+b\": the name must be 1 to 63 letters"), "{log}");
}

#[test]
fn devices_exchange_data_within_a_daemon() {
    if !installed("ibv_rc_pingpong", "ibverbs-utils") || !installed("ib_write_bw", "perftest") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = "[wired]\ndevices = { \"rxe_{n}\" = \"*\", all = \"*\" }\n";
    let script = format!(
        "{PAIR}pair 10.78.0.1 ibv_rc_pingpong -d rxe_0 -g 0 -n 50
         pair 127.0.0.1 ibv_ud_pingpong -d rxe_1 -g 0 -n 50 -s 1024
         pair 127.0.0.1 ibv_uc_pingpong -d all -g 1 -n 50
         timeout 120 ibv_rc_pingpong -d all -g 0 -n 50 >server & \
         until ibv_rc_pingpong -d rxe_0 -g 0 -n 50 127.0.0.1 >client 2>&1; do kill -0 $!; done; \
         wait $!
         pair 127.0.0.1 ib_write_bw -F -d rxe_0 -n 100
         echo finished"
    );
    let Some(command) = alone(&dir, ETH, config, &script) else { return };
    let said = Process::start(command).succeed();
    assert_eq!(said.iter().filter(|line| line.contains("50 iters")).count(), 3, "{said:#?}");
    assert!(said.iter().any(|line| line == "finished"), "{said:#?}");
}

#[test]
fn devices_of_addresses_serve_programs() {
    if !installed("ibv_rc_pingpong", "ibverbs-utils") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let Some(program) = verbs::program("tests/roce_cm_device.c", dir.path()) else { return };
    let config = "[wired]\ndevices = { all = \"*\", rail0 = \"127.0.0.1\", \
                  rail1 = [\"127.0.0.2\", \"fd00::1\"] }\n";
    let script = format!(
        "{PAIR}ibv_devinfo -v -d rail1
         pair 127.0.0.1 ibv_rc_pingpong -d rail0 -g 0 -n 50
         pair 127.0.0.1 ibv_uc_pingpong -d rail1 -g 1 -n 50
         pair 127.0.0.1 ibv_ud_pingpong -d rail1 -g 0 -n 50 -s 1024
         timeout 120 ibv_rc_pingpong -d rail1 -g 0 -n 50 >server & \
         until ibv_rc_pingpong -d rail0 -g 0 -n 50 127.0.0.1 >client 2>&1; do kill -0 $!; done; \
         wait $!
         $PROGRAM 127.0.0.1 127.0.0.2
         $RNICCTL device add rail2 --address 127.0.0.4 --address ::1
         pair 127.0.0.1 ibv_rc_pingpong -d rail2 -g 1 -n 50
         $PROGRAM 127.0.0.4
         ! $RNICCTL device add rail3 --address 127.0.0.2 2>&1"
    );
    let Some(mut command) = alone(&dir, "ip addr add fd00::1 dev lo", config, &script) else {
        return;
    };
    command.env("PROGRAM", program);
    let said = Process::start(command).succeed();
    assert_eq!(said.iter().filter(|line| line.contains("50 iters")).count(), 4, "{said:#?}");
    let gids: Vec<_> = said.iter().filter_map(|line| line.split("GID[").nth(1)).collect();
    assert!(gids.len() == 2, "{said:#?}");
    assert!(gids[0].contains("::ffff:127.0.0.2") && gids[1].contains("fd00::1"), "{gids:?}");
    let taken = "device rail3: rail1 has the address 127.0.0.2";
    assert!(said.iter().any(|line| line.contains(taken)), "{said:#?}");
    for line in ["127.0.0.1: rail0", "127.0.0.2: rail1", "127.0.0.4: rail2"] {
        assert!(said.iter().any(|found| found == line), "{line}: {said:#?}");
    }
}

#[test]
fn unusable_devices_are_refused_at_start() {
    let said = |devices: &str| {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("rnicd.toml");
        fs::write(&file, format!("[wired]\ndevices = {devices}\n")).unwrap();
        let mut command = Command::new(built::program("rnicd"));
        command.arg("run").arg("--config").arg(&file).arg("--socket").arg(dir.path().join("s"));
        let output = command.output().unwrap();
        assert!(!output.status.success(), "{devices}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let unknown = said("{ a = \"nosuch0\" }");
    let text =
        "wired.devices: device a: there is no network interface \"nosuch0\"; interfaces with";
    assert!(unknown.contains(text), "{unknown}");
    let elsewhere = said("{ a = \"::1\", b = [\"127.0.0.2\", \"192.0.2.9\"] }");
    let text = "wired.devices: device b: 192.0.2.9 is no address of this host";
    assert!(elsewhere.contains(text), "{elsewhere}");
    let shared = said("{ a = \"127.0.0.2\", b = [\"::1\", \"127.0.0.2\"] }");
    assert!(shared.contains("wired.devices = "), "{shared}");
    assert!(shared.contains("a and b have the address 127.0.0.2"), "{shared}");
    let twice = said("{ x_lo = \"*\", \"x_{netdev}\" = \"lo\" }");
    assert!(twice.contains("wired.devices: there is already a device x_lo"), "{twice}");
}

#[test]
fn administrators_add_and_remove_devices() {
    let port = ports::unused_port();
    let config = format!("[wired]\nport = {port}\ndevices = {{ first = \"lo\" }}\n");
    let mut daemon = Daemon::start(&config);
    let socket = daemon.socket().to_owned();
    let ctl = |words: &[&str]| {
        let mut command = Command::new(built::program("rnicctl"));
        command.args(words).env("RNIC_SOCKET", &socket);
        let output = command.output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8_lossy(&text).into_owned())
    };
    let scratch = tempfile::tempdir().unwrap();
    let program = verbs::program("tests/roce_devices.c", scratch.path());
    let mut program = program.map(|program| {
        let mut command = verbs::command(&program, &daemon);
        command.env_remove("RNIC_DEVICES");
        Process::start(command)
    });
    let mut lists = |names: &str| {
        if let Some(program) = &mut program {
            assert_eq!(program.ask("list", "devices:").trim(), names);
        }
    };
    lists("first");
    let context = Context::open_at(daemon.socket()).unwrap();
    assert_eq!(ctl(&["device", "add", "rxe_lo", "--netdev", "lo"]), (true, String::new()));
    assert_eq!(ctl(&["device", "add", "rxe9"]), (true, String::new()));
    let event = context.next_event(Some(DEADLINE)).unwrap();
    assert!(matches!(event, Some(Event::DevicesChanged)), "{event:?}");
    let devices = context.device().unwrap().devices;
    let names: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
    assert_eq!(names, ["first", "rxe_lo", "rxe9", "rnicd0"]);
    assert_eq!((&*devices[1].interface, devices[2].kind), ("lo", DeviceKind::Roce));
    assert!(devices[1].gids.iter().all(|index| *index != NO_GID) && !devices[1].gids.is_empty());
    lists("first rxe_lo rxe9");
    let tree = daemon.dir().join("rnicd.sock.tree/class");
    assert_eq!(fs::read_to_string(tree.join("infiniband/rxe_lo/parent")).unwrap(), "lo\n");
    assert_eq!(fs::read_to_string(tree.join("infiniband_verbs/uverbs3/ibdev")).unwrap(), "rxe9\n");

    for (words, why) in [
        (&["device", "add", "rxe9"][..], "there is already a device rxe9"),
        (&["device", "add", "rnicd0"], "there is already a device rnicd0"),
        (&["device", "add", "a/b"], "name: must be 1 to 63 letters"),
        (&["device", "add", "x", "--netdev", "nosuch0"], "no network interface \"nosuch0\""),
        (&["device", "add", "x", "--netdev", "../x"], "interface: is not the name of an interface"),
        (&["device", "add", "x", "--address", "192.0.2.9"], "192.0.2.9 is no address of this host"),
        (&["device", "add", "x", "--address", "fe80::1"], "interface: does not identify a host"),
        (&["device", "add", "x", "--address", "lo"], "invalid value 'lo' for '--address <IP>'"),
        (&["device", "add", "x", "--address", "::1", "--netdev", "lo"], "cannot be used with"),
        (&["device", "remove", "nosuch"], "there is no such RoCE device"),
        (&["device", "remove", "rnicd0"], "the iWARP device cannot be removed"),
    ] {
        let (succeeded, text) = ctl(words);
        assert!(!succeeded && text.contains(why), "{words:?}: {text}");
    }
    let addresses: Vec<String> = (0..64).map(|n| format!("--address=127.1.0.{n}")).collect();
    let words = ["device", "add", "x"].into_iter().chain(addresses.iter().map(String::as_str));
    let (succeeded, text) = ctl(&words.collect::<Vec<_>>());
    assert!(!succeeded && text.contains("64 entries of the daemon's GID table"), "{text}");
    for n in 3..16 {
        assert!(ctl(&["device", "add", &format!("more{n}")]).0, "{n}");
    }
    let (succeeded, text) = ctl(&["device", "add", "x"]);
    assert!(!succeeded && text.contains("there are already 16 RoCE devices"), "{text}");
    for n in 3..16 {
        assert!(ctl(&["device", "remove", &format!("more{n}")]).0, "{n}");
    }

    // The program still has the first device open.
    assert_eq!(ctl(&["device", "remove", "first"]), (true, String::new()));
    lists("rxe_lo rxe9");
    assert!(!tree.join("infiniband/first").exists());
    assert!(!daemon.dir().join("rnicd.sock.tree/devices/rnicd/first").exists());
    // A reload keeps the devices.
    daemon.signal(rustix::process::Signal::HUP);
    daemon.line_after("configuration reloaded");
    lists("rxe_lo rxe9");
    if let Some(mut program) = program {
        program.release();
        assert_eq!(program.succeed().last().map(String::as_str), Some("done"));
    }
    drop(context);
    daemon.is_empty();
}

#[test]
fn only_administrators_change_devices() {
    if !rustix::process::geteuid().is_root() {
        return omit("another user requires root");
    }
    let daemon = Daemon::start("[control]\nmode = \"0666\"\n");
    let ctl = built::program("rnicctl");
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(daemon.dir(), fs::Permissions::from_mode(0o755)).unwrap();
    let copy = daemon.dir().join("rnicctl");
    rnic_tests::copy_files(ctl, &copy);
    for words in [["device", "add", "x"], ["device", "remove", "rnicd1"]] {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&copy).args(words);
        command.env("RNIC_SOCKET", daemon.socket());
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && text.contains("control.admins"), "{text}");
    }
}

#[test]
fn rxe_serves_a_host_with_loopback_only() {
    if !installed("ibv_rc_pingpong", "ibverbs-utils") || !installed("ib_write_bw", "perftest") {
        return;
    }
    for loopback in ["direct", "tcp"] {
        let dir = tempfile::tempdir().unwrap();
        let config = format!(
            "[engine]\nloopback = \"{loopback}\"\n[wired]\nprofile = \"rxe\"\n\
             devices = {{ \"rxe_{{n}}\" = \"*\", rxe0 = \"*\" }}\n"
        );
        let script = format!(
            "{PAIR}ibv_devinfo -v -d rxe0
             for gid in 0 1; do
                 pair 127.0.0.1 ibv_rc_pingpong -d rxe0 -g $gid -n 50
                 pair 127.0.0.1 ibv_uc_pingpong -d rxe_0 -g $gid -n 50
                 pair 127.0.0.1 ibv_ud_pingpong -d rxe_0 -g $gid -n 50 -s 1024
             done
             pair 127.0.0.1 ib_write_bw -F -d rxe_0 -n 100
             pair 127.0.0.1 ib_send_lat -F -c UD -d rxe_0 -n 100"
        );
        let Some(command) = alone(&dir, "true", &config, &script) else { return };
        let said = Process::start(command).succeed();
        assert_eq!(said.iter().filter(|line| line.contains("50 iters")).count(), 6, "{said:#?}");
        for shown in [
            "GID[ 0]: fe80::200:ff:fe00:0, RoCE v2",
            "GID[ 1]: ::ffff:127.0.0.1, RoCE v2",
            "vendor_id: 0xffffff",
            "max_cqe: 32767",
            "max_qp_rd_atom: 128",
            "max_ah: 32767",
            "max_pkeys: 1",
            "local_ca_ack_delay: 15",
        ] {
            let words = |line: &String| line.split_whitespace().collect::<Vec<_>>().join(" ");
            let found = said.iter().any(|line| words(line).contains(shown));
            assert!(found, "{shown}: {said:#?}");
        }
    }
}

#[test]
fn link_local_gids_reach_other_hosts() {
    if !installed("ibv_rc_pingpong", "ibverbs-utils") {
        return;
    }
    let Some(apart) = Apart::available() else { return };
    let config = "[wired]\nprofile = \"rxe\"\n";
    let daemons = [Side::A, Side::B].map(|side| apart.daemon(side, config));
    let command = |side: Side, words: &str| {
        let mut command = apart.on(side);
        command.args(["timeout", "120"]).args(words.split(' '));
        command.env("LD_LIBRARY_PATH", built::libraries()).env_remove("RNIC_DEVICES");
        command.env("RNIC_SOCKET", daemons[side as usize].socket()).env("RNIC_LOG", "debug");
        command
    };
    for words in ["ibv_rc_pingpong", "ibv_uc_pingpong", "ibv_ud_pingpong -s 1024"] {
        for gid in 0..2 {
            let words = format!("{words} -d rxe0 -g {gid} -n 50");
            let server = Process::start(command(Side::B, &words));
            // The client fails while the server does not listen yet.
            let client = loop {
                let output = command(Side::A, &format!("{words} {}", Side::B.ip())).output();
                let output = output.unwrap();
                if output.status.success() {
                    break String::from_utf8_lossy(&output.stdout).into_owned();
                }
                let text = String::from_utf8_lossy(&output.stderr).into_owned();
                assert!(text.contains("Couldn't connect"), "{words}: {text}");
            };
            let address = if gid == 0 { Side::B.link_local() } else { Side::B.ip() };
            assert!(client.contains(address) && client.contains("50 iters"), "{client}");
            server.succeed();
        }
    }
}

#[test]
fn every_maximum_can_be_reached() {
    let scratch = tempfile::tempdir().unwrap();
    let Some(program) = verbs::program("tests/roce_limits.c", scratch.path()) else { return };
    let none = &[][..];
    for (profile, inline, cqes, errnos) in [
        ("rnicd", "1024", 262_144, none),
        ("rxe", "512", 32_767, &[("AHs", 22)]),
        ("mlx5", "1024", 262_144, none),
        // No windows. The profile describes an iWARP device, and limits the RoCE device, too.
        ("siw", "80", 262_144, &[("MWs", 95)]),
        // No windows and no SRQs.
        ("irdma", "101", 262_144, &[("SRQs", 95)]),
    ] {
        let wired = format!("[wired]\nprofile = \"{profile}\"\nport = {}\n", ports::unused_port());
        let few = "[limits.session]\npds = 50\nmrs = 60\nwindows = 70\nsrqs = 20\nqps = 80\n\
                   cqs = 90\n";
        let daemon = Daemon::start(&format!("{wired}{few}"));
        let mut command = verbs::command(&program, &daemon);
        command.env("INLINE", inline).env_remove("RNIC_DEVICES");
        command.envs(errnos.iter().map(|(name, errno)| (name, errno.to_string())));
        let said = Process::start(command).succeed();
        assert_eq!(said.last().map(String::as_str), Some("done"), "{said:#?}");
        assert!(said[0].starts_with(&format!("{cqes} CQEs")), "{said:#?}");
        daemon.is_empty();
    }
}

#[test]
fn each_cq_can_have_a_channel() {
    rnic_tests::process::raise_descriptor_limit();
    let scratch = tempfile::tempdir().unwrap();
    let Some(program) = verbs::program("tests/roce_limits.c", scratch.path()) else { return };
    // More channels than the default limit on descriptors of a process.
    let daemon = Daemon::start("[limits.session]\ncqs = 1500\n");
    let context = Context::open_at(daemon.socket()).unwrap();
    let device = context.device().unwrap();
    assert_eq!((device.max_cqs, &*device.profile.name), (1500, "rnicd"));
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    // The daemon uses a quarter of its descriptors for channels.
    if limit.is_some_and(|limit| limit < 10_000) {
        return omit("1500 channels require RLIMIT_NOFILE = 10000");
    }
    drop(context);
    let mut command = verbs::command(&program, &daemon);
    command.arg("channels").env_remove("RNIC_DEVICES");
    let said = Process::start(command).succeed();
    assert_eq!(said.last().map(String::as_str), Some("done"), "{said:#?}");
    daemon.is_empty();
}
