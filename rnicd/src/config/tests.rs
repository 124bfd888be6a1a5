//! Tests of the file format from an administrator's view.

use std::path::Path;

use super::kind::Unit;
use super::*;

fn refused(text: &str) -> String {
    match Config::parse(Path::new("test.toml"), text) {
        Ok(config) => panic!("accepted {text:?} as {config:?}"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn annotated_file_has_exactly_the_defaults() {
    let parsed = Config::parse(Path::new("config/rnicd.toml"), ANNOTATED_DEFAULT);
    assert_eq!(parsed.map_err(|e| e.to_string()), Ok(Config::default()));
}

#[test]
fn the_annotated_file_shows_every_key() {
    // With the examples of keys that are not set by default.
    let lines = ANNOTATED_DEFAULT.lines();
    let lines: Vec<&str> = lines.map(|line| line.strip_prefix("#: ").unwrap_or(line)).collect();
    let mut shown = Vec::new();
    let mut section = "";
    for line in lines.iter().filter(|line| !line.starts_with('#')) {
        if let Some(name) = line.strip_prefix('[') {
            section = name.trim_end_matches(']');
        } else if let Some((key, _)) = line.split_once(" = ").filter(|_| !section.starts_with('['))
        {
            shown.push(format!("{section}.{key}"));
        }
    }
    let mut declared: Vec<String> =
        Config::default().rows().into_iter().map(|row| row.key).collect();
    shown.sort();
    declared.sort();
    assert_eq!(shown, declared);

    let config = Config::parse(Path::new("all"), &(lines.join("\n") + "\n"));
    let config = config.unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(warnings(&config), Vec::<String>::new());
    let rights: Vec<_> = config.users[0].rights().into_iter().map(|(right, ..)| right).collect();
    assert!(rights.iter().all(Option::is_some), "{rights:?}");
    let NamedPd { name: _, who: _, max_sessions, mrs, qps } = &config.pds[0];
    assert!([max_sessions, mrs, qps].iter().all(|limit| limit.is_some()), "{:?}", config.pds);
    assert!(!(config.groups.is_empty() || config.listen.is_empty() || config.connect.is_empty()));
}

#[test]
fn an_unknown_key_is_named_with_its_line() {
    let e = refused("[device]\nname = \"a\"\n\n[limits]\nqp = 5\n");
    assert!(e.starts_with("test.toml:5:1: limits.qp = 5: unknown field"), "{e}");
    let e = refused("[[users]]\nwho = \"alice\"\n");
    assert!(e.starts_with("test.toml:1:3: unknown field `users`"), "{e}");
    let e = refused("[[user]]\nwho = \"alice\"\nsession = { qp = 4 }\n");
    assert!(e.starts_with("test.toml:3:13: user.session = { qp = 4 }: unknown field `qp`"), "{e}");
}

#[test]
fn a_bad_unit_is_named_with_its_line() {
    let e = refused("[limits]\nshared_bytes = \"64MB\"\n");
    assert!(e.starts_with("test.toml:2:16: limits.shared_bytes = \"64MB\": "), "{e}");
    assert!(e.contains("MiB"), "{e}");
    let e = refused("[limits]\n\nshared_bytes = 64\n");
    assert!(e.starts_with("test.toml:3:16: limits.shared_bytes = 64: "), "{e}");
    let e = refused("[mpa]\nstartup_deadline = \"5\"\n");
    assert!(e.starts_with("test.toml:2:20: mpa.startup_deadline = \"5\": "), "{e}");
}

#[test]
fn values_out_of_range_are_named_with_the_range() {
    let e = refused("[limits]\nsge = 17\n");
    assert_eq!(e, "test.toml:2:7: limits.sge = 17: must be from 1 to 16");
    let e = refused("[mpa]\nrevision = 0 # old\n");
    assert_eq!(e, "test.toml:2:12: mpa.revision = 0: must be from 1 to 2");
    let e = refused("[engine]\nworkers = 65\n");
    assert!(e.starts_with("test.toml:2:11: engine.workers = 65: must be \"auto\""), "{e}");
    let e = refused("[device]\nvendor_id = 0x1000000\n");
    assert!(e.ends_with("device.vendor_id = 0x1000000: must be from 0 to 16777215"), "{e}");
    let e = refused("[device]\nguid = \"02:00:5e:00:00:00:00:00\"\n");
    assert!(e.starts_with("test.toml:2:8: device.guid = \"02:"), "{e}");
    assert!(e.ends_with("has a half that is zero"), "{e}");
    let e = refused("[limits]\nqps = -1\n");
    assert!(e.starts_with("test.toml:2:7: limits.qps = -1: "), "{e}");
    let e = refused("[engine]\nyield_for = \"2s\"\n");
    assert_eq!(e, "test.toml:2:13: engine.yield_for = \"2s\": must be from 0us to 1s");
}

#[test]
fn session_queues_must_fit_the_doorbell_page() {
    let e = refused("[limits.session]\nqps = 31680\ncqs = 1\n");
    assert!(e.starts_with("test.toml:2:7: limits.session.qps = 31680: "), "{e}");
    assert!(e.contains("31680"), "{e}");
}

#[test]
fn half_of_all_stags_stay_unused() {
    let within = Config::parse(Path::new("t"), "[limits]\nmrs = 8388607\nwindows = 1\n");
    assert!(within.is_ok());
    let e = refused("[limits]\nmrs = 8388607\nwindows = 2\n");
    assert!(e.starts_with("test.toml:3:11: limits.windows = 2: limits.mrs + windows = "), "{e}");
    assert!(e.contains("8388609 is above 8388608"), "{e}");
}

#[test]
fn wrong_words_and_paths_are_refused() {
    for (text, start) in [
        ("[engine]\nloopback = \"udp\"\n", "test.toml:2:12: engine.loopback = \"udp\": "),
        ("[engine]\nworkers = \"many\"\n", "test.toml:2:11: engine.workers = \"many\": "),
        ("[control]\nsocket = \"x.sock\"\n", "test.toml:2:10: control.socket = \"x.sock\": must"),
        ("[control]\nmode = \"066\"\n", "test.toml:2:8: control.mode = \"066\": must be octal"),
        ("[control]\nmode = \"4660\"\n", "test.toml:2:8: control.mode = \"4660\": must be octal"),
        ("[control]\ngroup = \"\"\n", "test.toml:2:9: control.group = \"\": must not be empty"),
        ("[control]\nuser = \"\"\n", "test.toml:2:8: control.user = \"\": must not be empty"),
        ("[metrics]\ninterval = \"0s\"\n", "test.toml:2:12: metrics.interval = \"0s\": must be"),
        ("[metrics]\ninterval = \"25h\"\n", "test.toml:2:12: metrics.interval = \"25h\": must be"),
        ("[device]\nname = \"a b\"\n", "test.toml:2:8: device.name = \"a b\": must be 1 to 63"),
        ("[device]\nname = \"\"\n", "test.toml:2:8: device.name = \"\": must be 1 to 63"),
        ("[device]\naddresses = [\"x\"]\n", "test.toml:2:14: device.addresses = [\"x\"]: "),
        ("[log]\nlevel = \"a=b=c\"\n", "test.toml:2:9: log.level = \"a=b=c\": is not a log filter"),
        ("[device\n", "test.toml:1:8: "),
        ("[mpa]\ncrc = 1\n", "test.toml:2:7: mpa.crc = 1: "),
    ] {
        let e = refused(text);
        assert!(e.starts_with(start), "{e}");
    }
}

#[test]
fn long_values_are_refused() {
    let x = |n| "x".repeat(n);
    for (key, longest, why) in [
        (
            "control.socket",
            format!("/{}", x(102)),
            "is too long for a Unix socket (at most 103 bytes)",
        ),
        ("device.tree", format!("/{}", x(159)), "is too long for programs to read"),
        ("device.name", x(63), "must be 1 to 63 letters"),
        ("log.level", format!("{}=info", x(1019)), "must have at most 1024 bytes"),
    ] {
        let (section, name) = key.split_once('.').unwrap_or_else(|| panic!("{key}"));
        let file = |value: &str| format!("[{section}]\n{name} = {value:?}\n");
        assert!(Config::parse(Path::new("t"), &file(&longest)).is_ok(), "{key}");
        let e = refused(&file(&longest.replacen('x', "xx", 1)));
        assert!(e.starts_with("test.toml:2:") && e.contains(why), "{e}");
    }
}

#[test]
fn tcp_times_have_units_and_bounds() {
    let text = "[tcp]\nkeepalive = \"off\"\nkeepalive_interval = \"3s\"\nuser_timeout = \"2min\"\n";
    let config = Config::parse(Path::new("t"), text).unwrap_or_else(|e| panic!("{e}"));
    let minutes = |n: u64| Some(std::time::Duration::from_secs(60 * n));
    assert_eq!((config.tcp.keepalive, config.tcp.user_timeout), (None, minutes(2)));
    assert_eq!(config.tcp.keepalive_interval.as_secs(), 3);
    // On by default.
    assert!(Tcp::default().keepalive.is_some() && Tcp::default().user_timeout == minutes(1));
    let e = refused("[tcp]\nkeepalive = \"0s\"\n");
    assert_eq!(e, "test.toml:2:13: tcp.keepalive = \"0s\": must be from 1s to 1h, or \"off\"");
    let e = refused("[tcp]\nuser_timeout = \"no\"\n");
    assert!(
        e.starts_with("test.toml:2:16: tcp.user_timeout = \"no\": ") && e.contains("\"off\""),
        "{e}"
    );
    let held = Config::parse(Path::new("t"), "[mpa]\nrnr_timeout = \"60s\"\n");
    let said = warnings(&held.unwrap_or_else(|e| panic!("{e}")));
    assert!(said.len() == 1 && said[0].contains("tcp.user_timeout = 1min"), "{said:?}");
}

#[test]
fn daemon_times_out_before_the_library() {
    let mpa = Mpa::default();
    let patience = rnic_client::ConnectOptions::default().timeout;
    assert!(patience.is_some_and(|most| most > mpa.connect_deadline + mpa.reply_deadline));
    // A wrong port fails within seconds, not minutes.
    assert!(mpa.connect_deadline + mpa.reply_deadline <= std::time::Duration::from_secs(30));
}

/// Each key that is not a limit or a rule, with a value that is not its default: as written, and as
/// shown.
pub(crate) const OTHER_VALUES: &[(&str, &str, &str)] = &[
    ("device.name", "\"other0\"", "other0"),
    ("device.addresses", "[\"127.0.0.9\"]", "127.0.0.9"),
    ("device.vendor_id", "17", "0x11"),
    ("device.vendor_part_id", "18", "18"),
    ("device.hw_ver", "19", "19"),
    ("device.guid", "\"02:00:5e:00:53:01:00:01\"", "02:00:5e:00:53:01:00:01"),
    ("device.tree", "\"/nowhere/tree\"", "/nowhere/tree"),
    ("wired.profile", "\"rxe\"", "rxe"),
    ("wired.devices", "{ rxe_n = \"eth0\" }", "rxe_n = eth0"),
    ("wired.vendor_id", "20", "0x14"),
    ("wired.vendor_part_id", "21", "21"),
    ("wired.port", "4792", "4792"),
    ("wired.compare", "false", "false"),
    ("control.socket", "\"/nowhere/s\"", "/nowhere/s"),
    ("control.mode", "\"0601\"", "0601"),
    ("control.group", "\"some\"", "some"),
    ("control.admins", "[1234]", "1234"),
    ("control.user", "\"somebody\"", "somebody"),
    ("control.seccomp", "\"log\"", "log"),
    ("engine.workers", "3", "3"),
    ("engine.loopback", "\"tcp\"", "tcp"),
    ("engine.spins", "101", "101"),
    ("engine.yield_for", "\"51us\"", "51us"),
    ("engine.terminate_deadline", "\"1001ms\"", "1001ms"),
    ("engine.close_deadline", "\"1002ms\"", "1002ms"),
    ("engine.error_deadline", "\"501ms\"", "501ms"),
    ("engine.copy_deadline", "\"1003ms\"", "1003ms"),
    ("mpa.crc", "false", "false"),
    ("mpa.markers", "true", "true"),
    ("mpa.revision", "1", "1"),
    ("mpa.peer_to_peer", "false", "false"),
    ("mpa.rdmac", "true", "true"),
    ("mpa.mulpdu", "\"max\"", "max"),
    ("mpa.connect_deadline", "\"1004ms\"", "1004ms"),
    ("mpa.startup_deadline", "\"1005ms\"", "1005ms"),
    ("mpa.reply_deadline", "\"1006ms\"", "1006ms"),
    ("mpa.decision_deadline", "\"1007ms\"", "1007ms"),
    ("mpa.first_fpdu_deadline", "\"1008ms\"", "1008ms"),
    ("mpa.rnr_timeout", "\"1009ms\"", "1009ms"),
    ("mpa.stall_deadline", "\"1010ms\"", "1010ms"),
    ("tcp.keepalive", "\"11s\"", "11s"),
    ("tcp.keepalive_interval", "\"12s\"", "12s"),
    ("tcp.user_timeout", "\"13s\"", "13s"),
    ("ports.map", "{ 3260 = 13260 }", "3260 -> 13260"),
    ("metrics.file", "\"/nowhere/metrics\"", "/nowhere/metrics"),
    ("metrics.interval", "\"14s\"", "14s"),
    ("log.level", "\"debug\"", "debug"),
];

/// Keys of [`OTHER_VALUES`] that a reload does not change.
pub(crate) const AT_START: &[&str] = &[
    "device.name",
    "device.vendor_id",
    "device.vendor_part_id",
    "device.hw_ver",
    "device.guid",
    "device.tree",
    "wired.profile",
    "wired.devices",
    "wired.vendor_id",
    "wired.vendor_part_id",
    "wired.port",
    "wired.compare",
    "control.socket",
    "control.mode",
    "control.group",
    "control.user",
    "control.seccomp",
    "engine.workers",
    "engine.loopback",
    "engine.spins",
    "engine.yield_for",
    "ports.map",
];

/// Returns a file that sets all of [`OTHER_VALUES`].
pub(crate) fn other_values() -> String {
    let mut text = String::new();
    let mut section = "";
    for (key, written, _) in OTHER_VALUES {
        let (of, key) = key.split_once('.').unwrap_or_default();
        if of != section {
            text.push_str(&format!("[{of}]\n"));
            section = of;
        }
        text.push_str(&format!("{key} = {written}\n"));
    }
    text
}

/// Returns a configuration that sets one key.
fn with(key: &str, written: &str) -> Config {
    let (section, key) = key.rsplit_once('.').unwrap_or_else(|| panic!("{key}"));
    let text = format!("[{section}]\n{key} = {written}\n");
    Config::parse(Path::new("t"), &text).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn each_key_changes_its_own_value() {
    let default = Config::default();
    for (key, written, shown) in OTHER_VALUES {
        let found = changes(&default, &with(key, written));
        assert_eq!(found.len(), 1, "{key}: {found:?}");
        assert_eq!((found[0].key.as_str(), found[0].now.as_str()), (*key, *shown));
    }
    let all = default.rows();
    let keys = all.iter().map(|row| row.key.as_str()).filter(|key| !key.starts_with("limits."));
    let tried = OTHER_VALUES.iter().map(|row| row.0);
    assert!(keys.eq(tried), "the table has each key, in the order of the file");
}

#[test]
fn each_limit_changes_its_own_value() {
    let default = Config::default();
    for scope in Scope::ALL {
        for kind in Kind::of_scope(scope) {
            let key = format!("{}.{}", scope.section(), kind.key());
            let value = kind.default(scope).unwrap_or_default() - 1;
            let written = match kind.row().unit {
                Unit::Bytes => format!("\"{value}B\""),
                Unit::Count => value.to_string(),
            };
            let config = with(&key, &written);
            assert_eq!(config.limits.of(scope).of(kind), value, "{key}");
            let found = changes(&default, &config);
            assert_eq!(found.len(), 1, "{key}: {found:?}");
            assert_eq!(found[0].key, key);
        }
    }
}

#[test]
fn a_missing_file_is_named() {
    let e = Config::load(Path::new("/nonexistent/rnicd.toml"));
    assert!(e.is_err_and(|e| e.to_string().contains("/nonexistent/rnicd.toml")));
}

#[test]
fn rules_are_read_in_the_order_of_the_file() {
    let text = "[control]\nadmins = [\"alice\", \"@ops\", 1000]\n\
        [[user]]\nwho = \"alice\"\ntrusted = true\nsockets = true\nhost_loopback = false\nsession = { qps = 4, diagnoses = 9 }\n\
        user = { shared_bytes = \"1GiB\", sessions = 2 }\n\
        [[user]]\nwho = 1001\n[[group]]\nwho = \"rdma\"\n[[group]]\nwho = \"7\"\n\
        [[pd]]\nname = \"shared\"\nusers = [\"alice\", 5]\ngroups = [\"rdma\"]\nmrs = 4\n\
        [[listen]]\nwho = \"*\"\naddress = \"127.0.0.1\"\n\
        [[connect]]\nwho = [1, \"@x\"]\nnetwork = \"10.0.0.0/8\"\nports = \"1-2\"\n\
        [limits.peer]\nconnections_per_second = 5\n[metrics]\nfile = \"/m\"\n";
    let config = Config::parse(Path::new("t"), text).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(config.control.admins.to_string(), "alice, 1000, @ops");
    let alice = &config.users[0];
    assert_eq!((alice.trusted, alice.session.set(Kind::Qps)), (Some(true), Some(4)));
    assert_eq!((alice.sockets, alice.host_loopback), (Some(true), Some(false)));
    assert_eq!((alice.session.of(Kind::Diagnoses), alice.user.of(Kind::Sessions)), (9, 2));
    assert_eq!(alice.user.set(Kind::SharedBytes), Some(1 << 30));
    assert_eq!(*config.users[1].who(), Id::Number(1001));
    assert_eq!(*config.groups[1].who(), Id::Number(7));
    let pd = &config.pds[0];
    assert_eq!((pd.who.to_string(), pd.mrs), ("alice, 5, @rdma".to_owned(), Some(4)));
    assert_eq!(config.listen[0].to_string(), "127.0.0.1, any port");
    assert_eq!(config.connect[0].to_string(), "10.0.0.0/8, ports 1 to 2");
    assert_eq!(config.connect[0].who.to_string(), "1, @x");
    assert_eq!(config.limits.peer.of(Kind::ConnectionsPerSecond), 5);
}

#[test]
fn invalid_rules_are_refused_with_position() {
    for (text, start) in [
        ("[[user]]\ntrusted = true\n", "test.toml:1:1: missing field `who`"),
        ("[[user]]\nwho = 1\n[[user]]\nwho = \"1\"\n", "test.toml:4:7: user.who = \"1\": there"),
        ("[[user]]\nwho = \"a b\"\n", "test.toml:2:7: user.who = \"a b\": "),
        ("[[group]]\nwho = 1\nuser = { qps = -1 }\n", "test.toml:3:16: group.user = { qps"),
        ("[[group]]\nwho = 1\nuser = { pds = 0 }\n", "test.toml:3:16: group.user = { pds"),
        ("[[pd]]\nname = \"a\"\n", "test.toml:2:8: pd.name = \"a\": no user may open it"),
        ("[[pd]]\nname = \"é\"\nusers = [1]\n", "test.toml:2:8: pd.name = \"é\": must"),
        ("[[listen]]\nwho = 1\naddress = \"x\"\n", "test.toml:3:11: listen.address = \"x\": "),
        ("[[connect]]\nwho = 1\nnetwork = \"*\"\nports = \"9-1\"\n", "test.toml:4:9: connect"),
        ("[control]\nadmins = \"*\"\n", "test.toml:2:10: control.admins = \"*\": not everybody"),
        ("[metrics]\nfile = \"m\"\n", "test.toml:2:8: metrics.file = \"m\": must be an absolute"),
    ] {
        let e = refused(text);
        assert!(e.starts_with(start), "{e}");
    }
}

#[test]
fn only_written_contradictions_cause_warnings() {
    let config = |text: &str| Config::parse(Path::new("t"), text).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(warnings(&Config::default()), Vec::<String>::new());
    // The defaults of a user are above this, but the administrator did not write them.
    assert_eq!(warnings(&config("[limits]\nqps = 5\n")), Vec::<String>::new());
    let said = warnings(&config("[mpa]\ncrc = false\n"));
    assert!(said.len() == 1 && said[0].contains("IPsec"), "{said:?}");
    let said = warnings(&config(
        "[limits.user]\nmrs = 9\nsessions = 500\n[[user]]\nwho = \"a\"\nsession = { mrs = 10 }\n\
         [[pd]]\nname = \"p\"\nusers = [1]\nqps = 40000\n",
    ));
    let all = [
        "limits.user.sessions = 500 is above limits.sessions = 256, which is reached first",
        "user.a.session.mrs = 10 is above user.a.user.mrs = 9, which is reached first",
        "pd.p.qps = 40000 is above limits.qps = 32768, which is reached first",
    ];
    assert_eq!(said, all);
}

#[test]
fn device_limit_is_the_lower_of_both() {
    let text = "[wired]\nprofile = \"irdma\"\n[limits]\nqueue_depth = 9000\nsge = 4\n";
    let config = Config::parse(Path::new("t"), text).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(config.device_limit(Kind::QueueDepth), 8127);
    assert_eq!((config.device_limit(Kind::Sges), config.device_limit(Kind::Backlog)), (4, 1024));
    assert_eq!(config.reads_of_qp(), (8, 8));
}

#[test]
fn profile_identifies_the_devices_it_describes() {
    let of = |text: &str| {
        let config = Config::parse(Path::new("t"), text).unwrap_or_else(|e| panic!("{e}"));
        [DeviceKind::Roce, DeviceKind::Iwarp].map(|kind| config.vendor_id(kind))
    };
    assert_eq!(of("[wired]\nprofile = \"mlx5\"\n"), [0x2c9, 0x02_524e]);
    assert_eq!(of("[wired]\nprofile = \"siw\"\n"), [0x02_524e, 0x62_6d74]);
    assert_eq!(of("[wired]\nprofile = \"mlx5\"\nvendor_id = 7\n"), [7, 0x02_524e]);
}

#[test]
fn wrong_profiles_name_both_files() {
    let e = refused("[wired]\nprofile = \"mlx9\"\n");
    assert!(e.starts_with("test.toml:2:11: wired.profile = \"mlx9\": no profile \"mlx9\""), "{e}");
    let dir = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
    let file = dir.path().join("p.toml");
    std::fs::write(&file, "\nmax_qps = 1\n").unwrap_or_else(|e| panic!("{e}"));
    let e = refused(&format!("[wired]\nprofile = {file:?}\n"));
    assert!(e.contains("p.toml:2:1: max_qps = 1: unknown field `max_qps`"), "{e}");
}
