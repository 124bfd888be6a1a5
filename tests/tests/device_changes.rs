//! Fault rules that change devices, as programs of the verbs API and tools see them.

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::path::{Path, PathBuf};
use std::time::Instant;

use rnic_tests::{DEADLINE, Daemon, PATHS, Process, in_path, on_path, ports, verbs};
use tempfile::TempDir;

struct Rig {
    daemon: Daemon,
    program: PathBuf,
    _scratch: TempDir,
}

impl Rig {
    /// Starts a daemon with these RoCE devices, and compiles a program. Returns `None` without a C
    /// compiler.
    fn start(path: &str, devices: &[&str], source: &str) -> Option<Rig> {
        // With the addresses of the host, IDs of rdma_cm may listen at all of them.
        let (gids, interface) = if source == SOURCE { (GIDS, "lo") } else { ("", "*") };
        let devices = devices.iter().map(|name| format!("{name} = \"{interface}\""));
        Rig::configured(path, gids, &devices.collect::<Vec<_>>().join(", "), source)
    }

    /// Like [`Rig::start`], with tables of the configuration and the devices as in `wired.devices`.
    fn configured(path: &str, tables: &str, devices: &str, source: &str) -> Option<Rig> {
        let scratch = tempfile::tempdir().unwrap();
        let program = verbs::program(source, scratch.path())?;
        // Its own port, since daemons of one host that share a port confirm each other's requests.
        let port = ports::unused_port();
        let wired = format!("{tables}[wired]\nport = {port}\ndevices = {{ {devices} }}\n");
        let daemon = Daemon::start(&format!("{}{wired}", on_path(path)));
        Some(Rig { daemon, program, _scratch: scratch })
    }

    /// Starts the program with rules for its own session.
    fn program(&self, rules: &str, steps: &[&str]) -> Process {
        let mut command = verbs::command(&self.program, &self.daemon);
        command.args(steps).env("RNIC_FAULTS", rules).env_remove("RNIC_DEVICES");
        Process::start(command)
    }

    fn add(&self, rule: &str) {
        let output = self.daemon.rnicctl(&["fault", "add", rule]);
        assert!(output.status.success(), "{rule}: {output:?}");
    }

    fn clear(&self) {
        self.daemon.control(&["fault", "clear"]);
    }

    /// Takes the port of `rail_b` down and up again, while the program runs the steps `event1 link
    /// link1 write wc write1 wc1 input event1`.
    fn lose_port_of_rail_b(&self, program: &mut Process) {
        self.add("do=port-down device=rail_b");
        program.ask("", "event 10 port 1");
        program.line_after("link 2 32 4");
        program.line_after("link 2 32 1");
        program.line_after("wc 0");
        program.line_after("wc 12");
        program.line_after("ready");
        self.clear();
        program.ask("", "event 9 port 1");
    }

    /// Returns the text of a device file.
    fn file(&self, path: &str) -> Option<String> {
        let tree = format!("{}.tree", self.daemon.socket().display());
        let text = std::fs::read_to_string(format!("{tree}/class/infiniband/{path}"));
        text.ok().map(|text| text.trim().to_owned())
    }

    /// Waits until a device file has this text. Files change within a second.
    fn await_file(&self, path: &str, text: &str) {
        let until = Instant::now() + DEADLINE;
        while self.file(path).as_deref() != Some(text) {
            assert!(Instant::now() < until, "{path}: {:?}", self.file(path));
            std::thread::yield_now();
        }
    }
}

/// Addresses for two GIDs, the same on every host.
const GIDS: &str = "[device]\naddresses = [\"127.0.0.1\", \"127.0.0.2\"]\n";

const SOURCE: &str = "tests/device_changes.c";

fn words(steps: &str) -> Vec<&str> {
    steps.split_whitespace().collect()
}

/// Runs the program with rules for its own session on both paths, and compares its output.
fn check(devices: &[&str], rules: &str, steps: &str, printed: &[&str]) {
    for path in PATHS {
        let Some(rig) = Rig::start(path, devices, SOURCE) else { return };
        assert_eq!(rig.program(rules, &words(steps)).succeed(), printed, "{rules} on path {path}");
        rig.daemon.is_empty();
    }
}

#[test]
fn verbs_of_a_removed_device_fail() {
    let all = format!("verbs{}", " EIO".repeat(18));
    let steps = "write wc reg_mr event list verbs event post poll destroy";
    let printed = ["wc 0", "event 8", "devices", &all, "event EIO", "post EIO", "poll 0"];
    let printed = [&printed[..], &["destroy 0"]].concat();
    check(&["rail"], "do=device-removal verb=reg_mr nth=2", steps, &printed);
}

/// The first Write exhausts its retries or is flushed. The others have not begun and are flushed.
#[test]
fn requests_of_a_removed_device_are_flushed() {
    for path in PATHS {
        let Some(rig) = Rig::start(path, &["rail"], SOURCE) else { return };
        rig.add("name=quiet do=stop");
        let mut program = rig.program("", &words("write write input wc wc list"));
        program.line_after("ready");
        rig.add("name=gone do=device-removal");
        let first = program.ask("", "wc ");
        assert!(["5", "12"].contains(&first.as_str()), "{first}");
        assert_eq!(program.line_after("wc "), "5");
        program.line_after("devices");
        program.succeed();
    }
}

#[test]
fn a_removed_device_returns() {
    for path in PATHS {
        let Some(rig) = Rig::start(path, &["rail", "rail_b"], SOURCE) else { return };
        let before = "write wc input event list write1 wc1 input list post open write wc event";
        let mut program = rig.program("", &words(before));
        program.line_after("wc 0");
        program.line_after("ready");
        rig.add("do=device-removal device=rail");
        // The files are removed before the daemon replies to the command.
        assert_eq!(rig.file("rail/ports/1/state"), None);
        let devices = rig.daemon.rnicctl(&["device", "list"]).stdout;
        let devices = String::from_utf8_lossy(&devices).into_owned();
        assert!(devices.contains("rail_b") && !devices.contains("rail "), "{devices}");
        program.ask("", "event 8");
        program.line_after("devices rail_b");
        program.line_after("wc 0");
        program.line_after("ready");
        rig.clear();
        assert_eq!(rig.file("rail/ports/1/state").as_deref(), Some("4: ACTIVE"));
        program.ask("", "devices rail rail_b");
        program.line_after("post EIO");
        program.line_after("open rail");
        program.line_after("wc 0");
        // The new context gets its own events.
        rig.add("do=event event=port-active device=rail");
        program.line_after("event 9 port 1");
        program.succeed();
        rig.daemon.is_empty();
    }
}

#[test]
fn only_selected_programs_lose_a_device() {
    let Some(rig) = Rig::start("direct", &["rail", "rail_b"], SOURCE) else { return };
    let mut program = rig.program("", &words("input list write1 wc1"));
    program.line_after("ready");
    // Its context on the other device keeps the session, and therefore the rule.
    let mut other = rig.program("do=device-removal device=rail_b", &words("list input list"));
    assert_eq!(other.line_after("devices"), "rail");
    other.line_after("ready");
    assert!(rig.file("rail_b/ports/1/state").is_some());
    program.ask("", "devices rail rail_b");
    program.line_after("wc 0");
    program.succeed();
    assert_eq!(other.ask("", "devices"), "rail");
    other.succeed();
}

/// Two devices with the same GIDs, as rails of a program.
#[test]
fn one_rail_fails_and_the_other_continues() {
    for path in PATHS {
        let Some(rig) = Rig::start(path, &["rail", "rail_b"], SOURCE) else { return };
        let steps = "write wc write1 wc1 input event1 link link1 write wc write1 wc1 input \
                     event1 link1 input event1 write wc verbs1 destroy1 input list write wc";
        let mut program = rig.program("", &words(steps));
        program.line_after("wc 0");
        program.line_after("wc 0");
        program.line_after("ready");
        // The rule affects only the QPs that were created on this device.
        rig.lose_port_of_rail_b(&mut program);
        program.line_after("link 2 32 4");
        program.line_after("ready");
        rig.add("do=device-removal device=rail_b");
        program.ask("", "event 8");
        program.line_after("wc 0");
        program.line_after("verbs EIO EIO");
        program.line_after("destroy 0");
        program.line_after("ready");
        // A device can be added while the program runs.
        let added = rig.daemon.rnicctl(&["device", "add", "rail_c", "--netdev", "lo"]);
        assert!(added.status.success(), "{added:?}");
        program.ask("", "devices rail rail_c");
        program.line_after("wc 0");
        program.succeed();
        rig.daemon.is_empty();
    }
}

/// Rails with addresses of their own on a host that needs no interface but `lo`.
#[test]
fn rails_of_addresses_fail_alone() {
    for path in PATHS {
        let devices = "rail = \"127.0.0.1\", rail_b = [\"127.0.0.3\", \"127.0.0.2\"]";
        let Some(rig) = Rig::configured(path, "", devices, SOURCE) else { return };
        let gid = |last: u8| format!("0000:0000:0000:0000:0000:ffff:7f00:{last:04x}");
        assert_eq!(rig.file("rail/ports/1/gids/0"), Some(gid(1)));
        assert_eq!(rig.file("rail_b/ports/1/gids/0"), Some(gid(3)));
        assert_eq!(rig.file("rail_b/ports/1/gids/1"), Some(gid(2)));
        assert_eq!(rig.file("rail_b/parent").as_deref(), Some("lo"));
        let list = rig.daemon.json(&["device", "list"]);
        let shown = |n: usize| {
            let gids = list[n]["gids"].as_array().unwrap();
            (list[n]["interface"].as_str().unwrap(), gids.len())
        };
        assert_eq!([shown(0), shown(1)], [("lo", 1), ("lo", 2)], "{list}");
        let steps = "gid1 cross input event1 link link1 write wc write1 wc1 input event1 cross";
        let mut program = rig.program("", &words(steps));
        program.line_after("gid 0 set 0 set 2");
        program.line_after("cross 0");
        program.line_after("ready");
        rig.lose_port_of_rail_b(&mut program);
        program.line_after("cross 0");
        program.succeed();
        rig.daemon.is_empty();
    }
}

#[test]
fn a_gid_vanishes_with_its_qps() {
    let steps = "gid write wc reg_mr event gid rtr write wc state";
    let printed = |gid: &'static str, rest: &[&'static str]| {
        [&["gid 0 set 0 set 2", "wc 0", "event 18 port 1", gid], rest].concat()
    };
    let lost = ["rtr EINVAL", "wc 12", "state 6 3"];
    check(
        &["rail"],
        "do=gid-change index=0 verb=reg_mr nth=2",
        steps,
        &printed("gid ENODATA zero 0 set 1", &lost),
    );
    check(
        &["rail"],
        "do=gid-change verb=reg_mr nth=2",
        steps,
        &printed("gid ENODATA zero ENODATA zero 0", &lost),
    );
    // The QPs use another GID.
    check(
        &["rail"],
        "do=gid-change index=1 verb=reg_mr nth=2",
        steps,
        &printed("gid 0 set ENODATA zero 1", &["rtr 0", "wc 0", "state 3 3"]),
    );
}

#[test]
fn a_gid_returns_with_its_event() {
    for path in PATHS {
        let Some(rig) = Rig::start(path, &["rail", "rail_b"], SOURCE) else { return };
        let steps = "write wc input event gid gid1 write1 wc1 input event gid rtr";
        let mut program = rig.program("", &words(steps));
        program.line_after("wc 0");
        program.line_after("ready");
        let gid = "0000:0000:0000:0000:0000:ffff:7f00:0001";
        assert_eq!(rig.file("rail/ports/1/gids/0").as_deref(), Some(gid));
        rig.add("do=gid-change index=0 device=rail");
        program.ask("", "event 18 port 1");
        program.line_after("gid ENODATA zero 0 set 1");
        program.line_after("gid 0 set 0 set 2");
        // The other device has the GID as well.
        program.line_after("wc 0");
        program.line_after("ready");
        rig.await_file("rail/ports/1/gids/0", "0000:0000:0000:0000:0000:0000:0000:0000");
        assert_eq!(rig.file("rail_b/ports/1/gids/0").as_deref(), Some(gid));
        rig.clear();
        program.ask("", "event 18 port 1");
        program.line_after("gid 0 set 0 set 2");
        program.line_after("rtr 0");
        program.succeed();
        rig.await_file("rail/ports/1/gids/0", gid);
    }
}

#[test]
fn packets_of_another_partition_are_dropped() {
    for (rule, pkey, status) in [
        // Both ends have the new key.
        ("do=pkey-change verb=reg_mr nth=2", "pkey 0x8001", "wc 0"),
        // Limited members do not communicate with each other.
        ("do=pkey-change pkey=0x7fff verb=reg_mr nth=2", "pkey 0x7fff", "wc 12"),
        ("do=pkey-change pkey=0x0001 verb=reg_mr nth=2", "pkey 0x0001", "wc 12"),
    ] {
        let steps = "pkey write wc reg_mr event pkey write wc";
        let printed = ["pkey 0xffff", "wc 0", "event 12 port 1", pkey, status];
        check(&["rail"], rule, steps, &printed);
    }
}

#[test]
fn datagrams_of_a_changed_port_are_lost() {
    for path in PATHS {
        let Some(rig) = Rig::start(path, &["rail"], SOURCE) else { return };
        for (rule, event, ah) in [
            ("do=gid-change index=0", "event 18 port 1", "ah EINVAL"),
            ("do=pkey-change pkey=0x7fff", "event 12 port 1", "ah 0"),
        ] {
            let steps = "datagram received input event datagram ah input event datagram received";
            let mut program = rig.program("", &words(steps));
            program.line_after("wc 0");
            program.line_after("received 1");
            program.line_after("ready");
            rig.add(rule);
            program.ask("", event);
            program.line_after("wc 0");
            program.line_after(ah);
            program.line_after("ready");
            rig.clear();
            program.ask("", event);
            program.line_after("wc 0");
            program.line_after("received 3");
            program.succeed();
        }
    }
}

#[test]
fn the_link_speed_changes() {
    check(
        &["rail"],
        "do=speed-change speed=qdr width=1x verb=reg_mr nth=2",
        "link reg_mr event link write wc",
        &["link 2 32 4", "event 9 port 1", "link 1 4 4", "wc 0"],
    );
    let Some(rig) = Rig::start("direct", &["rail"], SOURCE) else { return };
    rig.add("do=speed-change speed=64");
    rig.await_file("rail/ports/1/rate", "200 Gb/sec (4X HDR)");
    rig.add("do=pkey-change pkey=0x8002");
    rig.await_file("rail/ports/1/pkeys/0", "0x8002");
    rig.clear();
    rig.await_file("rail/ports/1/rate", "100 Gb/sec (4X EDR)");
    rig.await_file("rail/ports/1/pkeys/0", "0xffff");
}

/// On a RoCE device and on the iWARP device.
#[test]
fn ids_of_a_removed_device_get_its_event() {
    for path in PATHS {
        for device in ["rail", "rnicd0"] {
            let Some(rig) = Rig::start(path, &["rail"], "tests/device_ids.c") else { return };
            let mut command = verbs::command(&rig.program, &rig.daemon);
            command.env("RNIC_DEVICES", device);
            let mut program = Process::start(command);
            program.line_after("ready");
            // The rule removes both devices: otherwise new IDs would use the other device, even if
            // RNIC_DEVICES does not contain it.
            rig.add("do=device-removal");
            program.ask("", "ready");
            rig.clear();
            program.ask("", "done");
            program.succeed();
            rig.daemon.is_empty();
        }
    }
}

#[test]
fn requests_to_a_lost_gid_are_rejected() {
    let Some(rig) = Rig::start("direct", &["rail"], "tests/device_ids.c") else { return };
    let mut server = rig.program("do=gid-change", &["listen"]);
    let port = server.line_after("port ");
    let client = rig.program("", &[&port]);
    assert_eq!(client.succeed(), ["RDMA_CM_EVENT_REJECTED"]);
    server.ask("", "done");
    server.succeed();
}

#[test]
fn tools_show_changed_devices() {
    let Some(rig) = Rig::start("direct", &["rail", "rail_b"], SOURCE) else { return };
    let run = |tool: &[&str]| {
        let mut command = verbs::command(Path::new(tool[0]), &rig.daemon);
        let output = command.args(&tool[1..]).env_remove("RNIC_DEVICES").output();
        output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let Ok(before) = run(&["ibv_devices"]) else {
        return rnic_tests::omit("no ibv_devices here: Debian package ibverbs-utils");
    };
    assert!(before.contains("rail ") && before.contains("rail_b"), "{before}");
    rig.add("name=gone do=device-removal device=rail_b");
    let after = run(&["ibv_devices"]).unwrap();
    assert!(after.contains("rail ") && !after.contains("rail_b"), "{after}");
    rig.clear();
    rig.add("do=speed-change speed=hdr width=2x");
    rig.add("do=gid-change index=0");
    let info = run(&["ibv_devinfo", "-v", "-d", "rail"]).unwrap();
    for line in ["2X (16)", "50.0 Gbps (64)", "GID[  1]:\t\t::ffff:127.0.0.2"] {
        assert!(info.contains(line), "{line}: {info}");
    }
    assert!(!info.contains("GID[  0]"), "{info}");
}

#[test]
fn ibv_asyncwatch_prints_the_events() {
    if !in_path("ibv_asyncwatch") {
        return rnic_tests::omit("no ibv_asyncwatch here: Debian package ibverbs-utils");
    }
    for path in PATHS {
        let Some(rig) = Rig::start(path, &["rail"], SOURCE) else { return };
        for (device, changes) in [("rail", true), ("rnicd0", false)] {
            let mut command = verbs::command(Path::new("stdbuf"), &rig.daemon);
            command.args(["-oL", "ibv_asyncwatch", "-d", device]).env("RNIC_DEVICES", device);
            let mut watch = Process::start(command);
            watch.line_after(&format!("{device}: async event FD "));
            let mut prints = |event: &str| {
                watch.line_after(&format!("  event_type IBV_EVENT_{event}, port 1"));
            };
            rig.add(&format!("do=event event=client-reregister device={device}"));
            prints("CLIENT_REREGISTER (17)");
            rig.add(&format!("do=port-down device={device}"));
            prints("PORT_ERR (10)");
            rig.clear();
            prints("PORT_ACTIVE (9)");
            if changes {
                for (action, event) in [("gid", "GID_CHANGE (18)"), ("pkey", "PKEY_CHANGE (12)")] {
                    rig.add(&format!("do={action}-change device={device}"));
                    prints(event);
                    rig.clear();
                    prints(event);
                }
            }
            rig.add(&format!("do=device-removal device={device}"));
            prints("DEVICE_FATAL (8)");
            rig.clear();
        }
    }
}

#[test]
fn rules_without_effect_are_refused() {
    let Some(rig) = Rig::start("direct", &["rail"], SOURCE) else { return };
    for (rule, text) in [
        ("do=gid-change device=rnicd0", "rnicd0 is the iWARP device"),
        ("do=pkey-change device=rnicd0", "rnicd0 is the iWARP device"),
        ("do=gid-change index=2", "2: no GID with this index on rail"),
        ("do=device-removal qp=3", "qp has no effect with do=device-removal, because it concerns"),
        ("do=pkey-change pkey=0x8000", "needs a P_Key, as in 0x8001"),
        ("do=speed-change", "do=speed-change needs speed or width"),
        ("do=speed-change speed=3", "needs one of sdr, ddr"),
    ] {
        let failed = rig.daemon.rnicctl(&["fault", "add", rule]);
        let said = String::from_utf8_lossy(&failed.stderr).into_owned();
        assert!(failed.status.code() == Some(1) && said.contains(text), "{rule}: {said}");
    }
}
