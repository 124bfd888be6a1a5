//! The status tree: a directory in which the daemon publishes its devices like sysfs.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rnic_client::{
    Access, CompletionOpcode, QpOptions, QpType, RecvRequest, SendRequest, Sending, Wiring,
};
use rnic_tests::client::{Client, READ_WRITE};
use rnic_tests::{DEADLINE, Daemon, Process, built, omit, ports};

/// Returns the default path of the tree.
fn tree_of(daemon: &Daemon) -> PathBuf {
    daemon.socket().with_file_name("rnicd.sock.tree")
}

fn counter(tree: &Path, name: &str) -> u64 {
    counter_of(tree, "rnicd0", name)
}

fn counter_of(tree: &Path, device: &str, name: &str) -> u64 {
    let path = tree.join("class/infiniband").join(device).join("ports/1").join(name);
    fs::read_to_string(&path).unwrap().trim_end().parse().unwrap()
}

/// Writes `len` bytes from one QP of a client to another.
fn write_bytes(daemon: &Daemon, len: u32) {
    let client = Client::new(daemon);
    let [a, _b] = client.pair();
    let source = client.region(len.into(), READ_WRITE);
    let target = client.region(len.into(), READ_WRITE);
    let sges = [source.sge(0, len)];
    a.post_send(&[SendRequest::write(1, &sges, target.remote().at(0)).signaled()]).unwrap();
    client.completes(1, CompletionOpcode::RdmaWrite);
}

fn wait_for(condition: &str, holds: impl Fn() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < DEADLINE, "{condition}");
        std::thread::yield_now();
    }
}

#[test]
fn counters_survive_their_qps() {
    let daemon = Daemon::start("");
    let tree = tree_of(&daemon);
    assert_eq!(counter(&tree, "counters/port_xmit_data"), 0);
    write_bytes(&daemon, 40_000);
    let data = || counter(&tree, "counters/port_xmit_data");
    wait_for("the counter shows 10000 times four bytes", || data() == 10_000);
    assert_eq!(counter(&tree, "counters/port_rcv_data"), 10_000);
    write_bytes(&daemon, 4);
    wait_for("the counter continues from its old value", || data() == 10_001);
    let at = fs::canonicalize(tree.join("class/infiniband/rnicd1/../..")).unwrap();
    assert_eq!(at, fs::canonicalize(&tree).unwrap().join("devices/rnicd/rnicd1"));
    assert_eq!(fs::read_to_string(at.join("numa_node")).unwrap(), "-1\n");
    daemon.stop();
    assert!(!tree.exists(), "the daemon removes its tree");
}

/// Sends a message of `len` bytes from an RC QP of this device to itself.
fn send_bytes(daemon: &Daemon, device: &str, len: u32) {
    let client = Client::new(daemon);
    let options = QpOptions { kind: QpType::Rc, device, ..client.options() };
    let qp = client.pd.create_qp(&options).unwrap();
    let gid = client.context.gids().unwrap()[0].gid;
    let wiring = Wiring {
        local: gid,
        remote: gid,
        remote_qp: qp.id(),
        rq_psn: 0,
        path_mtu: 1024,
        min_rnr_timer: 12,
        ird: 1,
        rights: Access::empty(),
    };
    qp.to_rtr(&wiring).unwrap();
    let sending = Sending { sq_psn: 0, timeout: 14, retry_count: 7, rnr_retry: 7, ord: 1 };
    qp.to_rts(&sending).unwrap();
    let mr = client.region(len.into(), READ_WRITE);
    qp.post_recv(&[RecvRequest::new(1, &[mr.sge(0, len)])]).unwrap();
    qp.post_send(&[SendRequest::send(2, &[mr.sge(0, len)]).signaled()]).unwrap();
    client.successes(2);
}

#[test]
fn each_device_has_its_own_counters() {
    let devices = "[wired]\ndevices = { first = \"*\", second = \"*\" }\n";
    let daemon = Daemon::start(&format!("{devices}port = {}\n", ports::unused_port()));
    let tree = tree_of(&daemon);
    let all = |name: &str| ["rnicd0", "first", "second"].map(|of| counter_of(&tree, of, name));
    let are = |sent: [u64; 3]| {
        wait_for(&format!("{sent:?}"), || all("counters/port_xmit_data") == sent);
        assert_eq!(all("counters/port_rcv_data"), sent);
    };
    write_bytes(&daemon, 40);
    send_bytes(&daemon, "second", 400);
    are([10, 0, 100]);
    // Without a device name, the first device with the GID counts.
    send_bytes(&daemon, "", 4000);
    are([10, 1000, 100]);
    // With the name of a missing device, none counts.
    send_bytes(&daemon, "absent", 4000);
    send_bytes(&daemon, "second", 4);
    are([10, 1000, 101]);
    // A removed and re-added device starts at 0, as in the kernel.
    for verb in ["remove", "add"] {
        let mut command = Command::new(built::program("rnicctl"));
        command.arg("--socket").arg(daemon.socket()).args(["device", verb, "second"]);
        assert!(command.status().unwrap().success());
    }
    send_bytes(&daemon, "second", 8);
    are([10, 1000, 2]);
}

/// Returns the number of voluntary context switches of all threads of the daemon.
fn sleeps(daemon: &Daemon) -> u64 {
    let tasks = fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap().flatten();
    let of = |status: String| {
        let line = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches"))?;
        line.split_whitespace().last()?.parse::<u64>().ok()
    };
    tasks.filter_map(|task| of(fs::read_to_string(task.path().join("status")).ok()?)).sum()
}

/// The daemon does not wake for unchanged counters, but publishes every change.
#[test]
fn idle_daemon_with_queue_pairs_stays_asleep() {
    let daemon = Daemon::start("");
    let tree = tree_of(&daemon);
    let client = Client::new(&daemon);
    let [a, _b] = client.pair();
    let source = client.region(400, READ_WRITE);
    let target = client.region(400, READ_WRITE);
    for round in 1..=2 {
        let sges = [source.sge(0, 400)];
        a.post_send(&[SendRequest::write(round, &sges, target.remote().at(0)).signaled()]).unwrap();
        client.completes(round, CompletionOpcode::RdmaWrite);
        wait_for("the counter follows", || {
            counter(&tree, "counters/port_xmit_data") == 100 * round
        });
        wait_for("no change for longer than the interval between two writes of the tree", || {
            let before = sleeps(&daemon);
            let began = Instant::now();
            while began.elapsed() < Duration::from_millis(1500) {
                std::thread::park_timeout(Duration::from_millis(100));
            }
            sleeps(&daemon) == before
        });
    }
}

#[test]
fn leftovers_of_a_killed_daemon_are_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let tree = dir.path().join("sys");
    let config = format!("[device]\ntree = {:?}\n", tree.to_str().unwrap());
    let first = Daemon::start(&config);
    write_bytes(&first, 400);
    wait_for("the counter rises", || counter(&tree, "counters/port_xmit_data") == 100);
    first.kill();
    assert!(tree.exists());
    let second = Daemon::start(&config);
    assert_eq!(counter(&tree, "counters/port_xmit_data"), 0);
    // Another daemon cannot use the path while the second daemon runs.
    assert!(refusal(&config).contains("belongs to a running daemon"));
    second.stop();
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn unusable_tree_path_names_its_key() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("kept"), "kept").unwrap();
    let of = |path: &str| format!("[device]\ntree = {path:?}\n");
    let refused = refusal(&of(dir.path().to_str().unwrap()));
    assert!(
        refused.contains("device.tree") && refused.contains("is not a tree of rnicd"),
        "{refused}"
    );
    assert_eq!(fs::read_to_string(dir.path().join("kept")).unwrap(), "kept");
    let refused = refusal(&of("/no/such/folder"));
    assert!(refused.contains("device.tree: cannot create /no/such/folder"), "{refused}");
    assert!(refusal(&of("here")).contains("must be an absolute path, or \"off\""));
    assert!(refusal(&of(&format!("/{}", "x".repeat(200)))).contains("too long"));
    // With "off" the daemon starts without a tree.
    let daemon = Daemon::start(&of("off"));
    assert!(!tree_of(&daemon).exists());
    daemon.stop();
}

/// Returns the error of a daemon that does not start.
fn refusal(config: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("rnicd.toml");
    fs::write(&file, config).unwrap();
    let mut command = Command::new(built::program("rnicd"));
    command.arg("run").arg("--config").arg(&file).arg("--socket").arg(dir.path().join("s"));
    let output = command.output().unwrap();
    assert!(!output.status.success());
    assert!(!dir.path().join("s").exists());
    String::from_utf8(output.stderr).unwrap()
}

/// The exporter normally reads the kernel's files in sysfs. It was not changed for this daemon.
#[test]
fn unmodified_node_exporter_reads_the_tree() {
    const EXPORTER: &str = "prometheus-node-exporter";
    if Command::new(EXPORTER).arg("--version").output().is_err() {
        return omit("node_exporter is not installed (Debian package prometheus-node-exporter)");
    }
    let daemon = Daemon::start("");
    let tree = tree_of(&daemon);
    write_bytes(&daemon, 1 << 20);
    wait_for("the counter rises", || counter(&tree, "counters/port_xmit_data") == 1 << 18);
    let address = SocketAddr::from(([127, 0, 0, 1], ports::unused_port()));
    let mut command = Command::new(EXPORTER);
    command
        .args(["--collector.disable-defaults", "--collector.infiniband"])
        .arg(format!("--path.sysfs={}", tree.display()))
        .arg(format!("--web.listen-address={address}"));
    let exporter = Process::start(command);
    let began = Instant::now();
    let mut stream = loop {
        match TcpStream::connect(address) {
            Ok(stream) => break stream,
            Err(error) => assert!(began.elapsed() < DEADLINE, "{error}"),
        }
    };
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).unwrap();
    drop(exporter);
    let of = |name: &str, device: &str, value: &str| {
        format!("node_infiniband_{name}{{device=\"{device}\",port=\"1\"}} {value}\n")
    };
    for line in [
        of("port_data_transmitted_bytes_total", "rnicd0", "1.048576e+06"),
        of("port_data_received_bytes_total", "rnicd0", "1.048576e+06"),
        of("port_data_transmitted_bytes_total", "rnicd1", "0"),
        of("state_id", "rnicd1", "4"),
        of("physical_state_id", "rnicd0", "5"),
        "node_scrape_collector_success{collector=\"infiniband\"} 1\n".to_owned(),
    ] {
        assert!(page.contains(&line), "no {line} in\n{page}");
    }
}
