//! `rkv`: concurrent reads and writes, limits of keys and values, and failures.

use std::process::{Command, Stdio};

use rnic_client::{Access, ListKind, Listener, Mr, RemoteMr, Rows};
use rnic_tests::{DEADLINE, Daemon, PATHS, Process, built, on_path};

use super::talker::Talker;
use super::{RKV, end, fails, run, start};

/// A server driven by the test, with one slot for keys of 16 and values of 64 bytes. It uses the
/// layout that `rkv` documents and shares no code with it.
struct TornServer {
    talker: Talker,
    listener: Listener,
    slot: Mr,
}

/// Head 24, key 16, value 64, tail 8, rounded up to 64.
const SLOT: usize = 128;

impl TornServer {
    fn new(daemon: &Daemon) -> TornServer {
        let talker = Talker::new(daemon);
        let listener = talker.listen();
        let buffer = talker.context.create_shared_buffer(SLOT as u64).unwrap();
        let rights = Access::REMOTE_READ | Access::ZERO_BASED;
        let slot = talker.pd.reg_mr(&buffer, ..SLOT as u64, rights).unwrap();
        TornServer { talker, listener, slot }
    }

    fn address(&self) -> String {
        self.listener.local_addr().to_string()
    }

    fn holds(&self, bytes: &[u8; SLOT]) {
        self.slot.write_at(0, bytes).unwrap();
    }

    /// Accepts a client and sends it the description of the table.
    fn accept(&self) {
        let mut table = b"rkv\x01".to_vec();
        table.extend(1_u64.to_le_bytes());
        table.extend(1_u32.to_le_bytes());
        table.extend(16_u16.to_le_bytes());
        table.extend(64_u32.to_le_bytes());
        table.extend(self.slot.remote().to_bytes());
        self.talker.accept(&self.listener, &table);
    }

    /// Waits until the client has read `times` times.
    fn was_read(&self, times: u64) {
        let deadline = std::time::Instant::now() + DEADLINE;
        let mut answered = 0;
        while answered < times {
            let rows = self.talker.context.list(ListKind::Qps, 0).unwrap().rows;
            let Rows::Qps(rows) = rows else { panic!("{rows:?}") };
            let own = rows.iter().find(|row| row.qp == self.talker.qp.id()).unwrap();
            answered = own.counters.reads_answered;
            assert!(std::time::Instant::now() < deadline, "{answered} of {times} reads");
        }
    }
}

/// Returns a slot as `rkv` documents it, with an entry of this version.
fn slot(version: u64, key: &[u8], value: &[u8]) -> [u8; SLOT] {
    let mut bytes = [0; SLOT];
    bytes[..8].copy_from_slice(&version.to_le_bytes());
    bytes[8..10].copy_from_slice(&(key.len() as u16).to_le_bytes());
    bytes[12..16].copy_from_slice(&(value.len() as u32).to_le_bytes());
    bytes[24..24 + key.len()].copy_from_slice(key);
    bytes[24 + key.len()..][..value.len()].copy_from_slice(value);
    let sum = crc32c::crc32c(&[&bytes[..16], key, value].concat());
    bytes[16..20].copy_from_slice(&sum.to_le_bytes());
    bytes[SLOT - 8..].copy_from_slice(&version.to_le_bytes());
    bytes
}

/// Returns slots that mix an old and a new entry, or that are being written.
fn torn() -> Vec<(&'static str, [u8; SLOT])> {
    let old = slot(4, b"key", b"old value");
    let new = slot(6, b"key", b"new value");
    let mut odd = new;
    odd[..8].copy_from_slice(&5_u64.to_le_bytes());
    let mut front = old;
    front[..32].copy_from_slice(&new[..32]);
    let mut back = new;
    back[..32].copy_from_slice(&old[..32]);
    // Both versions are new, but the bytes between them are old.
    let mut middle = new;
    middle[24..64].copy_from_slice(&old[24..64]);
    let mut first = [0; SLOT];
    first[24..].copy_from_slice(&slot(2, b"key", b"first value")[24..]);
    vec![("odd", odd), ("front", front), ("back", back), ("middle", middle), ("first", first)]
}

#[test]
fn torn_slots_are_read_again() {
    let daemon = Daemon::start("");
    for (name, mixture) in torn() {
        let server = TornServer::new(&daemon);
        server.holds(&mixture);
        let client = start(&daemon, RKV, &["get", "key", "--server", &server.address()]);
        server.accept();
        // The client keeps reading. Its result shows how it treats the mixtures.
        server.was_read(20);
        server.holds(&slot(8, b"key", b"whole value"));
        let (code, said) = end(client);
        assert_eq!((code, said.as_str()), (Some(0), "whole value"), "{name}");
    }
}

#[test]
fn slot_that_stays_torn_is_an_error() {
    let daemon = Daemon::start("");
    for (name, mixture) in torn() {
        let server = TornServer::new(&daemon);
        server.holds(&mixture);
        let client = start(&daemon, RKV, &["get", "key", "--server", &server.address()]);
        server.accept();
        let (code, said) = end(client);
        assert_eq!(code, Some(1), "{name}: {said}");
        assert!(said.contains("slot 0 was torn in "), "{name}: {said}");
    }
}

/// A real server with writers that tear values under readers: every value is correct, and some
/// Reads had to be repeated.
#[test]
fn torn_reads_under_writers_are_repeated() {
    for path in PATHS {
        let daemon = Daemon::start(&on_path(path));
        let serve =
            ["server", "127.0.0.1:0", "--slots", "4", "--probes", "4", "--max-value", "1MiB"];
        let mut server = start(&daemon, RKV, &serve);
        let address = server.line_after(" in all, at ");
        // A single run may have no torn Read, but ten runs must have at least one.
        let mut torn = 0;
        for _ in 0..10 {
            let load = ["bench", "--server", &address, "--connections", "3", "--keys", "1"];
            let more = ["--value", "1MiB", "--gets", "50", "--seconds", "2", "--timeout", "60"];
            let (code, said) = run(&daemon, RKV, &[&load[..], &more[..]].concat());
            assert_eq!(code, Some(0), "{said}");
            assert!(said.contains("all verified"), "{said}");
            let count = said.lines().find_map(|l| l.split_once("repeated: ")).unwrap().1;
            torn += count.trim().parse::<u64>().unwrap();
            if torn > 0 {
                break;
            }
        }
        assert!(torn > 0, "no Read was ever torn");
        server.kill();
    }
}

#[test]
fn values_are_stored_found_replaced_and_deleted() {
    let daemon = Daemon::start("");
    let mut server = start(&daemon, RKV, &["server", "127.0.0.1:0"]);
    let address = server.line_after(" in all, at ");
    let rkv =
        |arguments: &[&str]| run(&daemon, RKV, &[arguments, &["--server", &address]].concat());
    fails(rkv(&["get", "k"]), &format!("there is no \"k\" at {address}"));
    assert_eq!(rkv(&["put", "k", "one"]), (Some(0), "stored 3 bytes, version 2".to_owned()));
    assert_eq!(rkv(&["put", "k", "two"]), (Some(0), "stored 3 bytes, version 4".to_owned()));
    assert_eq!(rkv(&["get", "k"]), (Some(0), "two".to_owned()));
    assert_eq!(rkv(&["del", "k"]), (Some(0), String::new()));
    fails(rkv(&["get", "k"]), "there is no \"k\"");
    fails(rkv(&["del", "k"]), "there is no \"k\"");
    fails(
        rkv(&["put", "k", &"v".repeat(1025)]),
        "the value has 1025 bytes; this table allows at most 1024",
    );
    fails(rkv(&["get", &"k".repeat(65)]), "the key has 65 bytes; this table allows 1 to 64");
    // A value from a pipe.
    let mut put = Command::new(built::program(RKV));
    put.args(["put", "k", "-", "--server", &address]).env("RNIC_SOCKET", daemon.socket());
    let mut put = put.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    std::io::Write::write_all(&mut put.stdin.take().unwrap(), b"piped").unwrap();
    assert!(put.wait().unwrap().success());
    assert_eq!(rkv(&["get", "k"]), (Some(0), "piped".to_owned()));
    server.kill();
}

/// Clients driven by the test send oversized requests, and write to read-only memory.
#[test]
fn clients_cannot_write_outside_their_slots() {
    let daemon = Daemon::start("");
    let serve = ["server", "127.0.0.1:0", "--slots", "4", "--probes", "2"];
    let serve = [&serve[..], &["--max-key", "8", "--max-value", "16"]].concat();
    let mut server = start(&daemon, RKV, &serve);
    let address = server.line_after(" in all, at ");
    let client = Talker::new(&daemon);
    let table = client.connect(address.parse().unwrap(), b"rkv\x01").unwrap();
    let request = |operation: u8, key: &[u8], value: &[u8]| {
        [&[operation][..], &(key.len() as u16).to_le_bytes(), key, value].concat()
    };
    let ask = |request: &[u8]| {
        client.send_message(request);
        client.next_message().expect("an answer")
    };
    let put = 1;
    let delete = 2;
    // None is longer than the longest valid request.
    for (operation, key, value) in [
        (put, &b"ninebytes"[..], &b""[..]),
        (put, b"", b"value"),
        (put, b"key", b"seventeen bytes !"),
        (delete, b"ninebytes", b""),
        (delete, b"", b""),
    ] {
        let answer = ask(&request(operation, key, value));
        assert_eq!(answer, [3, 0, 0, 0, 0, 0, 0, 0, 0], "{operation} {key:?} {value:?}");
    }
    assert_eq!(ask(&request(put, b"key", b"value")), [0, 2, 0, 0, 0, 0, 0, 0, 0]);

    let region = RemoteMr::from_bytes(table[22..].try_into().unwrap()).unwrap();
    assert_eq!(region.len, 4 * 64);
    client.write(region.at(0), &[7; 4 * 64]);
    assert_eq!(client.next_message(), None, "a client's Write was accepted");
    let found = run(&daemon, RKV, &["get", "key", "--server", &address]);
    assert_eq!(found, (Some(0), "value".to_owned()));
    server.kill();
}

#[test]
fn lost_server_or_daemon_is_reported_in_rkv() {
    let daemon = Daemon::start("");
    let serving = || -> (Process, String) {
        let mut server = start(&daemon, RKV, &["server", "127.0.0.1:0"]);
        let address = server.line_after(" in all, at ");
        (server, address)
    };
    let bench = |address: &str| {
        start(&daemon, RKV, &["bench", "--server", address, "--seconds", "1000", "--timeout", "30"])
    };
    let (server, address) = serving();
    let load = bench(&address);
    daemon.wait_status("under way", |s| s.qps == 4);
    server.kill();
    fails(end(load), &address);
    fails(
        run(&daemon, RKV, &["get", "k", "--server", &address]),
        &format!("cannot connect to {address}"),
    );
    let (server, address) = serving();
    let load = bench(&address);
    daemon.wait_status("under way", |s| s.qps == 4);
    daemon.kill();
    for process in [load, server] {
        fails(end(process), "the RNIC daemon is gone or has ended this session");
    }
}
