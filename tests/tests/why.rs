//! Every class of error, provoked by real processes and explained by `rnicctl why --json`, looked
//! up by the number in the completion or refusal.

use std::net::{Shutdown, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Instant;

use rnic_abi::abi::control::Reply;
use rnic_client::{
    AcceptOptions, Access, Completion, CompletionStatus, ConnectOptions, Context, Error, Mr,
    QpOptions, RecvRequest, Refusal, Scope, SendRequest, Sge, Stag,
};
use rnic_tests::raw::Raw;
use rnic_tests::wire::{self, CRC, fpdu, tagged};
use rnic_tests::{
    Client, DEADLINE, Daemon, End, PATHS, Process, READ_WRITE, built, copy_files, on_path,
};
use serde_json::Value;

const RNICCTL: &str = "rnicctl";

fn rnicctl(socket: &Path, args: &[&str]) -> Output {
    Command::new(built::program(RNICCTL))
        .args(args)
        .arg("--socket")
        .arg(socket)
        .output()
        .expect("rnicctl")
}

fn json(socket: &Path, args: &[&str]) -> Value {
    let output = rnicctl(socket, &[args, &["--json"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Returns the record with this number from `rnicctl`.
fn explained(daemon: &Daemon, id: u64) -> Value {
    assert_ne!(id, 0, "there is a record");
    let record = json(daemon.socket(), &["why", &id.to_string()]);
    assert_eq!(record["id"], id);
    let age = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let age = age.as_millis() as i128 - i128::from(record["time_ms"].as_u64().unwrap());
    assert!((-1000..600_000).contains(&age), "made {age} ms ago");
    record
}

fn has(record: &Value, field: &str, words: &str) {
    let text = record[field].as_str().unwrap_or_default();
    assert!(text.contains(words), "no {words:?} in the {field} of {record:#}");
}

/// Connects two sessions of one daemon. The CQ of the second one has `cq_entries` entries.
fn pair(daemon: &Daemon, cq_entries: u32) -> (End, End) {
    let a = end(daemon, 64);
    let b = end(daemon, cq_entries);
    a.connect(&b);
    (a, b)
}

fn end(daemon: &Daemon, cq_entries: u32) -> End {
    End::new(Client::new(daemon).with_cq(cq_entries))
}

fn receive(end: &End, wr_id: u64, sge: Sge) {
    end.qp.post_recv(&[RecvRequest::new(wr_id, &[sge])]).unwrap();
}

/// Returns the next completion with an error.
fn failure(end: &End) -> Completion {
    loop {
        let completion = end.completion();
        if completion.status != CompletionStatus::Success {
            return completion;
        }
        assert_eq!(completion.diagnosis_id, 0);
    }
}

/// Returns the newest record about an end's QP, for an error that no completion reports.
fn newest(end: &End, daemon: &Daemon) -> Value {
    let deadline = Instant::now() + DEADLINE;
    loop {
        let all = json(daemon.socket(), &["why"]);
        let own = all.as_array().unwrap().iter().find(|r| r["qp"] == end.qp.id().0);
        if let Some(record) = own {
            return record.clone();
        }
        assert!(Instant::now() < deadline, "no record of QP {}", end.qp.id());
    }
}

#[test]
fn wrong_lkey_and_its_flushes_are_explained() {
    for path in PATHS {
        let daemon = Daemon::start(&on_path(path));
        let (a, b) = pair(&daemon, 64);
        receive(&a, 9, a.region.sge(0, 64));
        let bad = Sge { lkey: a.region.lkey().0 ^ 0x0F0F_0000, ..a.region.sge(8, 16) };
        let to = b.region.remote().at(0);
        a.qp.post_send(&[SendRequest::write(7, &[bad], to).signaled()]).unwrap();
        let failed = failure(&a);
        assert_eq!((failed.wr_id, failed.status), (7, CompletionStatus::LocalProtection));
        let record = explained(&daemon, failed.diagnosis_id);
        has(&record, "rule", "local contract: a local key");
        has(&record, "text", "has no such region");
        assert_eq!(record["what"]["Completion"]["wr_id"], 7);
        assert_eq!(record["what"]["Completion"]["status"], "LocalProtection");
        assert_eq!(record["stag"], bad.lkey);
        assert_eq!(record["offset"], bad.addr);
        assert_eq!(record["length"], 16);
        assert_eq!(record["qp"], a.qp.id().0);
        assert_eq!(record["pd"], a.pd.id().0);
        assert!(record["addresses"]["local"].is_string());
        let flushed = failure(&a);
        assert_eq!((flushed.wr_id, flushed.status), (9, CompletionStatus::WrFlush));
        assert_eq!(flushed.diagnosis_id, failed.diagnosis_id, "the flush names its cause");
        let text = rnicctl(daemon.socket(), &["why", &failed.diagnosis_id.to_string()]);
        let text = String::from_utf8(text.stdout).unwrap();
        let what =
            "what      LocalProtection of 7 (a local key does not cover the range or lacks\n";
        assert!(text.contains(what), "{text}");
        assert!(text.lines().all(|line| line.len() < 80), "{text}");
        let error = failed.ok().unwrap_err();
        assert_eq!(error.diagnosis_id(), Some(failed.diagnosis_id));
        assert!(
            error.to_string().ends_with(&format!("`rnicctl why {}`)", failed.diagnosis_id)),
            "{error}"
        );
    }
}

#[test]
fn remote_access_errors_are_explained_at_both_ends() {
    for path in PATHS {
        for (what, write, read, words) in [
            ("unknown", "1/1/00", "0/1/00", "no region has STag"),
            ("bounds", "1/1/01", "0/1/01", "covers 4096 bytes from"),
            ("rights", "1/1/00", "0/1/02", "grants local-write only"),
            ("stream", "1/1/02", "0/1/03", "is not associated with this stream"),
            ("scope", "1/1/02", "0/1/03", "is limited to QP"),
            ("wrap", "1/1/03", "0/1/04", "reach 2^64"),
            ("deregistered", "1/1/00", "0/1/00", "deregistered or invalidated"),
        ] {
            for reads in [false, true] {
                let daemon = Daemon::start(&on_path(path));
                let (a, b) = pair(&daemon, 64);
                let other = b.pd.create_qp(&QpOptions::new(&b.cq)).unwrap();
                let open = b.region(4096, READ_WRITE);
                let plain = b.region(4096, Access::LOCAL_WRITE);
                let scoped = b.region_for(Scope::Qp(other.id()), 4096, READ_WRITE);
                let mut to = match what {
                    "rights" => plain.remote(),
                    "scope" => scoped.remote(),
                    "stream" => a.region.remote(),
                    _ => open.remote(),
                }
                .at(0);
                match what {
                    "unknown" => to.rkey.0 ^= 0x0F0F_0000,
                    "bounds" => to.addr += 4090,
                    "wrap" => to.addr = u64::MAX - 9,
                    _ => {}
                }
                let _open = match what {
                    "deregistered" => open.deregister().map(|()| None).unwrap(),
                    _ => Some(open),
                };
                b.qp.post_recv(&[RecvRequest::new(5, &[])]).unwrap();
                a.qp.post_recv(&[RecvRequest::new(6, &[])]).unwrap();
                let sge = a.region.sge(0, 16);
                let request = if reads {
                    SendRequest::read(7, sge, to)
                } else {
                    SendRequest::write(7, std::slice::from_ref(&sge), to)
                };
                a.qp.post_send(&[request]).unwrap();
                let code = if reads { read } else { write };
                let target = explained(&daemon, b.completion().diagnosis_id);
                has(&target, "text", words);
                has(&target, "rule", code);
                assert_eq!(target["what"]["Terminate"]["origin"], "Local");
                let failed = failure(&a);
                let requester = explained(&daemon, failed.diagnosis_id);
                has(
                    &requester,
                    "text",
                    &format!("the peer ended the stream with Terminate {code}"),
                );
                assert_eq!(requester["what"]["Terminate"]["origin"], "Peer");
                if reads {
                    assert_eq!(failed.wr_id, 7);
                    has(&requester, "text", "for this side's request 7");
                }
                for record in [&target, &requester] {
                    assert_eq!(record["stag"], to.rkey.0, "{what}: {record:#}");
                    assert_eq!(record["offset"], to.addr);
                    assert_eq!(record["length"], 16);
                }
                assert_eq!(target["session"], b.context.session().0);
                assert_eq!(requester["session"], a.context.session().0);
            }
        }
    }
}

#[test]
fn sends_without_a_suitable_receive_are_explained() {
    for path in PATHS {
        let daemon = Daemon::start(&on_path(path));
        let (a, b) = pair(&daemon, 64);
        a.qp.post_send(&[SendRequest::send_inline(1, b"x")]).unwrap();
        let record = newest(&b, &daemon);
        has(&record, "rule", "1/2/02");
        has(&record, "text", "no receive was posted");

        let (a, b) = pair(&daemon, 64);
        receive(&b, 5, b.region.sge(0, 4));
        a.qp.post_send(&[SendRequest::send_inline(1, b"12345")]).unwrap();
        let failed = failure(&b);
        assert_eq!((failed.wr_id, failed.status), (5, CompletionStatus::LocalLength));
        let record = explained(&daemon, failed.diagnosis_id);
        has(&record, "rule", "1/2/05");
        has(&record, "text", "5 bytes long, but its receive has 4");

        let (a, b) = pair(&daemon, 64);
        receive(&b, 5, b.region(4096, Access::REMOTE_READ).sge(0, 4));
        a.qp.post_send(&[SendRequest::send_inline(1, b"1234")]).unwrap();
        let failed = failure(&b);
        assert_eq!(failed.status, CompletionStatus::LocalProtection);
        has(&explained(&daemon, failed.diagnosis_id), "text", "local key");

        let (a, b) = pair(&daemon, 64);
        receive(&b, 5, b.region.sge(0, 4));
        let shared = b.region.rkey();
        a.qp.post_send(&[SendRequest::send_invalidate(1, &[], shared)]).unwrap();
        let record = explained(&daemon, failure(&b).diagnosis_id);
        has(&record, "rule", "0/2/09");
        has(&record, "text", "shared by all queue pairs of the domain");
        assert_eq!(record["stag"], shared.0);
    }
}

#[test]
fn access_to_an_invalidated_stag_is_explained() {
    let daemon = Daemon::start("");
    let (a, b) = pair(&daemon, 64);
    let own = b.region_for(Scope::Qp(b.qp.id()), 4096, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
    receive(&b, 1, b.region.sge(0, 4));
    receive(&b, 2, b.region.sge(0, 4));
    a.qp.post_send(&[SendRequest::send_invalidate(1, &[], own.rkey())]).unwrap();
    let mut one = [Completion::default()];
    assert_eq!(b.cq.wait(&mut one, Some(DEADLINE)).unwrap(), 1);
    assert_eq!(one[0].invalidated, Some(own.rkey()));
    let to = own.remote().at(0);
    a.qp.post_send(&[SendRequest::write_inline(2, b"x", to)]).unwrap();
    let record = explained(&daemon, failure(&b).diagnosis_id);
    has(&record, "text", "has been deregistered or invalidated");
    assert_eq!(record["stag"], own.rkey().0);
}

#[test]
fn completion_queue_overflow_is_explained() {
    let daemon = Daemon::start("");
    let (a, b) = pair(&daemon, 2);
    for n in 0..4 {
        receive(&b, n, b.region.sge(0, 4));
    }
    for n in 0..3 {
        a.qp.post_send(&[SendRequest::send_inline(n, b"x").signaled()]).unwrap();
    }
    let record = newest(&b, &daemon);
    has(&record, "rule", "RFC 5042 section 6.4.3.2");
    has(&record, "text", &format!("completion queue {} had no free entry", b.cq.id()));
    let deadline = Instant::now() + DEADLINE;
    loop {
        let events = json(daemon.socket(), &["events"]);
        let kinds: Vec<&str> =
            events.as_array().unwrap().iter().filter_map(|e| e["kind"].as_str()).collect();
        if ["session_opened", "listening", "cq_failed", "qp_terminated"]
            .iter()
            .all(|kind| kinds.contains(kind))
        {
            break;
        }
        assert!(Instant::now() < deadline, "{kinds:?}");
    }
}

/// Sessions begin and end while `rnicctl events` runs.
#[test]
fn followed_events_include_session_ends() {
    let daemon = Daemon::start("");
    let mut command = Command::new(built::program(RNICCTL));
    command.args(["events", "--follow", "--json", "--socket"]).arg(daemon.socket());
    let mut follower = Process::start(command);
    for _ in 0..2 {
        let end = end(&daemon, 8);
        let session = end.context.session().0;
        let begun = format!("\"session\":{session},\"kind\":\"session_opened\",\"text\":\"");
        let client = follower.line_after(&begun);
        drop(end);
        let ended = format!("\"session\":{session},\"kind\":\"session_ended\",\"text\":\"");
        let text = follower.line_after(&ended);
        let client = client.split('"').next().unwrap();
        assert_eq!(text, format!("{client}: closed by the client\"}}"));
    }
    follower.kill();
}

#[test]
fn refusals_and_failed_connects_are_explained() {
    let daemon = Daemon::start("[limits.session]\npds = 1\n");
    let end = end(&daemon, 8);
    let refused = end.context.open_pd(None).map(drop).unwrap_err();
    assert!(matches!(refused.refusal(), Some(Refusal::Limit { limit: 1, .. })), "{refused:?}");
    let id = refused.diagnosis_id().expect("a record");
    assert!(refused.to_string().ends_with(&format!("`rnicctl why {id}`)")), "{refused}");
    let record = explained(&daemon, id);
    assert_eq!(record["what"], "Refused");
    assert_eq!(record["rule"], "limits.session.pds");
    has(&record, "text", "OpenPd: limits.session.pds = 1 reached (asked for 1 more, 1 in use)");
    assert_eq!(record["session"], end.context.session().0);
    let own = end.context.diagnosis(id).unwrap();
    assert_eq!(own.id, id);
    let events = json(daemon.socket(), &["events"]);
    assert!(events.as_array().unwrap().iter().any(|e| e["kind"] == "limit_reached"), "{events:#}");

    // A port without a listener.
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = end.qp.connect(closed, &ConnectOptions::default()).unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error}");
    let record = newest(&end, &daemon);
    assert_eq!(record["what"], "Lost");
    has(&record, "rule", "RFC 5044");

    // Numbers that no record has.
    for id in [0, u64::MAX] {
        let error = end.context.diagnosis(id).unwrap_err();
        assert!(matches!(error.refusal(), Some(Refusal::NoSuchObject { .. })), "{error}");
        assert_eq!(rnicctl(daemon.socket(), &["why", &id.to_string()]).status.code(), Some(1));
    }
}

#[test]
fn death_of_the_peer_is_explained() {
    for path in PATHS {
        let daemon = Daemon::start(&on_path(path));
        let end = end(&daemon, 8);
        receive(&end, 3, end.region.sge(0, 64));
        let listener = end.context.listen("127.0.0.1:0", 4).unwrap();
        let peer = daemon.actor(&["visit", &listener.local_addr().to_string()]);
        let request = listener.accept_request(Some(DEADLINE)).unwrap();
        request.start_accept(&end.qp, &AcceptOptions::default()).unwrap();
        end.qp.wait_connected(Some(DEADLINE)).unwrap();
        peer.kill();
        let record = explained(&daemon, failure(&end).diagnosis_id);
        let what = &record["what"];
        assert!(what == "Lost" || what["Terminate"]["origin"] == "Peer", "{record:#}");
    }
}

#[test]
fn invalid_segments_are_explained() {
    let daemon = Daemon::start("");
    type Play = fn(&mut TcpStream, &Mr);
    let crc: Play = |peer, mr| {
        let mut bad = fpdu(&tagged(0, mr.rkey().0, mr.iova(), b"x"));
        bad[8] ^= 1;
        wire::send_bytes(peer, &bad);
    };
    let guess: Play = |peer, mr| {
        wire::send_bytes(peer, &fpdu(&tagged(0, mr.rkey().0 ^ 0x0F0F_0000, 0x1234, b"evil")));
    };
    let cut: Play = |peer, _| {
        wire::send_bytes(peer, &[0, 100, 1]);
        peer.shutdown(Shutdown::Write).unwrap();
    };
    let opcode: Play = |peer, _| wire::send_bytes(peer, &fpdu(&tagged(15, 1, 0, b"x")));
    for (play, rule, words) in [
        (crc, "RFC 5044 section 8, 2/0/02: CRC mismatch", "segment is invalid"),
        (guess, "RFC 5041 section 7.1, 1/1/00", "no region has STag"),
        (cut, "2/0/01", "inside an FPDU"),
        (opcode, "RFC 5040 section 7.2, 0/2/06", "tagged segment of 1 bytes"),
    ] {
        let end = end(&daemon, 8);
        receive(&end, 3, end.region.sge(0, 64));
        let listener = end.context.listen("127.0.0.1:0", 4).unwrap();
        let mut peer = wire::dial(listener.local_addr());
        wire::send_bytes(&mut peer, &wire::request(CRC, 1, b""));
        let request = listener.accept_request(Some(DEADLINE)).unwrap();
        request.start_accept(&end.qp, &AcceptOptions::default()).unwrap();
        wire::reply(&mut peer);
        wire::send_bytes(&mut peer, &fpdu(&tagged(0, 0, 0, b"")));
        end.qp.wait_connected(Some(DEADLINE)).unwrap();
        play(&mut peer, &end.region);
        let record = explained(&daemon, failure(&end).diagnosis_id);
        has(&record, "rule", rule);
        has(&record, "text", words);
        assert!(record["addresses"]["peer"].is_string());
    }
}

#[test]
fn records_of_other_users_are_hidden() {
    // Only root can act as other users.
    if !rustix::process::geteuid().is_root() {
        rnic_tests::omit("only root can act as other users");
        return;
    }
    let daemon = Daemon::start("[control]\nmode = \"0666\"\n");
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(daemon.dir(), open).unwrap();
    let copy = daemon.dir().join("rnicctl");
    copy_files(built::program(RNICCTL), &copy);
    let as_user = |uid: u32, args: &[&str]| {
        let mut command = Command::new(&copy);
        let command = command.args(args).arg("--json").arg("--socket").arg(daemon.socket());
        command.uid(uid).gid(uid).current_dir("/").output().unwrap()
    };
    // Each user has one request refused. The records outlive their sessions.
    let mut ids = Vec::new();
    for uid in [4001, 4002] {
        let output = as_user(uid, &["why", "999999"]);
        let said = String::from_utf8(output.stderr).unwrap();
        let id =
            said.trim().rsplit("rnicctl why ").next().unwrap().trim_end_matches("`)").to_owned();
        assert!(id.parse::<u64>().is_ok(), "{said}");
        ids.push(id);
    }
    let own = as_user(4001, &["why", &ids[0]]);
    assert!(own.status.success(), "{}", String::from_utf8_lossy(&own.stderr));
    let foreign = as_user(4001, &["why", &ids[1]]);
    assert_eq!(foreign.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&foreign.stderr).contains("no diagnosis"));
    let listed: Value = serde_json::from_slice(&as_user(4001, &["why"]).stdout).unwrap();
    let listed: Vec<String> =
        listed.as_array().unwrap().iter().map(|record| record["id"].to_string()).collect();
    assert!(listed.contains(&ids[0]) && !listed.contains(&ids[1]), "{listed:?}");
    let events: Value = serde_json::from_slice(&as_user(4001, &["events"]).stdout).unwrap();
    assert_eq!(events, Value::Array(Vec::new()), "the user's requests cause no events");
    // An administrator sees both.
    for id in &ids {
        assert!(rnicctl(daemon.socket(), &["why", id]).status.success());
    }
}

#[test]
fn end_for_a_malformed_request_is_explained() {
    let daemon = Daemon::start("");
    let raw = Raw::open(daemon.socket());
    raw.send(&[0xFF; 40], &[]);
    let (bytes, _) = raw.receive().expect("a refusal");
    let reply: Reply = postcard::from_bytes(&bytes).unwrap();
    assert!(matches!(reply.result, Err(Refusal::Malformed { .. })), "{reply:?}");
    assert!(raw.receive().is_none(), "the session has not ended");
    let record = explained(&daemon, reply.diagnosis_id);
    assert_eq!(record["what"], "Ended");
    has(&record, "rule", "or the session ends");
    has(&record, "text", "malformed message: invalid request");
    let events = json(daemon.socket(), &["events"]);
    assert!(events.as_array().unwrap().iter().any(|e| e["kind"] == "session_ended"), "{events:#}");
}

#[test]
fn flood_of_failures_evicts_only_its_own_records() {
    let daemon = Daemon::start("[limits.session]\ndiagnoses = 64\n");
    let quiet = end(&daemon, 8);
    let kept = quiet.context.diagnosis(0).unwrap_err().diagnosis_id().unwrap();
    let noisy = Context::open_at(daemon.socket()).unwrap();
    let mut first = None;
    let mut after_warm_up = 0;
    for n in 0..10_000u64 {
        let id = noisy.diagnosis(0).unwrap_err().diagnosis_id().unwrap();
        first.get_or_insert(id);
        if n == 1000 {
            after_warm_up = daemon.footprint().resident;
        }
    }
    let grown = daemon.footprint().resident.saturating_sub(after_warm_up);
    assert!(grown < 2048, "grew by {grown} KiB");
    let all = json(daemon.socket(), &["why"]);
    let all = all.as_array().unwrap();
    let noise = all.iter().filter(|r| r["session"] == noisy.session().0).count();
    assert_eq!(noise, 64, "records of the noisy session");
    assert!(all.iter().any(|r| r["id"] == kept), "the quiet session's record was evicted");
    assert!(noisy.diagnosis(first.unwrap()).is_err(), "the oldest record was not evicted");
}

#[test]
fn metrics_are_written_for_a_collector() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("rnicd.prom");
    let config = format!("[metrics]\nfile = {:?}\ninterval = \"1s\"\n", file.display().to_string());
    let daemon = Daemon::start(&config);
    let (a, b) = pair(&daemon, 64);
    receive(&b, 1, b.region.sge(0, 4));
    a.qp.post_send(&[SendRequest::send_inline(1, b"1234").signaled()]).unwrap();
    let mut one = [Completion::default()];
    assert_eq!(a.cq.wait(&mut one, Some(DEADLINE)).unwrap(), 1);
    assert_eq!(b.cq.wait(&mut one, Some(DEADLINE)).unwrap(), 1);
    a.context.diagnosis(0).unwrap_err();
    a.qp.post_send(&[SendRequest::write_inline(
        2,
        b"x",
        rnic_client::RemoteAddr { addr: 0, rkey: Stag(1) },
    )])
    .unwrap();
    newest(&b, &daemon);
    // The rule outlives its session.
    daemon.control(&["fault", "add", "do=lose-event", "after=1h"]);
    let uid = rustix::process::geteuid().as_raw();
    let wanted = [
        "rnicd_sessions 2".to_owned(),
        "rnicd_objects{kind=\"qps\"} 2".to_owned(),
        "rnicd_sent_bytes_total 5".to_owned(),
        format!("rnicd_user_objects{{uid=\"{uid}\",kind=\"qps\"}} 2"),
        format!("rnicd_user_objects{{uid=\"{uid}\",kind=\"faults\"}} 1"),
        format!("rnicd_user_refusals_total{{uid=\"{uid}\"}} 1"),
        format!("rnicd_user_terminates_sent_total{{uid=\"{uid}\"}} 1"),
        "rnicd_terminates_received_total 1".to_owned(),
        "# TYPE rnicd_refusals_total counter".to_owned(),
    ];
    let until = |wanted: &[String]| {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let text = std::fs::read_to_string(&file).unwrap_or_default();
            let missing: Vec<_> =
                wanted.iter().filter(|line| !text.lines().any(|l| l == *line)).collect();
            if missing.is_empty() {
                break;
            }
            assert!(Instant::now() < deadline, "{missing:?} not in\n{text}");
            std::thread::yield_now();
        }
    };
    until(&wanted);
    // Destroyed objects still count.
    drop((a, b));
    daemon.is_empty();
    until(&[
        "rnicd_sessions 0".to_owned(),
        "rnicd_objects{kind=\"qps\"} 0".to_owned(),
        "rnicd_sent_bytes_total 5".to_owned(),
        "rnicd_terminates_received_total 1".to_owned(),
    ]);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file remains");
}
