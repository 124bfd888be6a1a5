//! Tests of the control socket with a hostile client. A malformed request ends the session. Any
//! other invalid request is refused with an error that reports the reason. Other clients are not
//! affected.

#![allow(clippy::unwrap_used, missing_docs)]

#[allow(dead_code)]
mod support;

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

use rnic_abi::abi::control::*;
use rnic_abi::types::*;
use support::*;

/// Low limits.
const SMALL: &str = r#"
[engine]
workers = 2
[limits]
sessions = 64
cq_entries = 64
queue_depth = 32
sge = 4
inline = "64B"
ird = 4
ord = 4
backlog = 2
[limits.session]
pds = 2
shared_buffers = 2
shared_bytes = "64KiB"
mrs = 2
channels = 2
cqs = 2
srqs = 2
qps = 2
listeners = 2
"#;

/// Opens a session of another client that must not be affected.
fn bystander(socket: &std::path::Path) -> (Raw, PdId) {
    let mut raw = Raw::open(socket);
    let pd = raw.pd();
    (raw, pd)
}

/// The daemon may or may not read the Hello before it hangs up. The answer must arrive in both
/// cases.
#[test]
fn excess_silent_clients_are_refused() {
    let daemon = daemon(SMALL);
    let silent: Vec<Raw> = (0..64).map(|_| Raw::connect(&daemon.socket())).collect();
    for _ in 0..200 {
        let error = rnic_client::Context::open_at(daemon.socket()).err().unwrap();
        let rnic_client::Error::NotAdmitted { why, .. } = &error else { panic!("{error}") };
        assert_eq!(*why, rnic_client::AdmissionError::TooManyUnauthenticated);
        assert!(error.to_string().contains("too many unauthenticated connections from this user"));
    }
    // After one of them has sent its Hello, there is room again.
    let mut first = silent.into_iter().next().unwrap();
    assert_eq!(first.hello().unwrap().0.status, HelloStatus::Ok as u32);
    rnic_client::Context::open_at(daemon.socket()).unwrap();
}

#[test]
fn invalid_hello_ends_only_that_client() {
    let daemon = daemon(SMALL);
    let (mut other, pd) = bystander(&daemon.socket());
    let hello = Hello { min_version: 1, max_version: 1, features: 0 }.to_bytes();
    let long = [hello.as_slice(), &[0]].concat();
    for garbage in [b"x".as_slice(), &[0xFF; HELLO_LEN], &hello[..31], &long, &[7; 65536]] {
        let raw = Raw::connect(&daemon.socket());
        raw.send(garbage, &[]);
        assert!(raw.receive().is_none(), "{} bytes were answered", garbage.len());
    }
    assert_eq!(other.call(RequestBody::ClosePd { pd }), Ok(ReplyBody::Done));
    assert!(other.status().sessions_ended >= 5);
    daemon.stop().unwrap();
}

#[test]
fn version_mismatch_names_the_daemons_version() {
    let daemon = daemon(SMALL);
    for (min_version, max_version) in [(2, 9), (0, 0), (5, 1)] {
        let raw = Raw::connect(&daemon.socket());
        raw.send(&Hello { min_version, max_version, features: 0 }.to_bytes(), &[]);
        let (bytes, descriptors) = raw.receive().unwrap();
        let reply = HelloReply::from_bytes(&bytes).unwrap();
        assert_eq!((reply.status, reply.version), (HelloStatus::Version as u32, 1));
        assert!(descriptors.is_empty());
        assert!(raw.receive().is_none());
    }
}

#[test]
fn malformed_request_ends_the_session() {
    let daemon = daemon(SMALL);
    let (mut other, pd) = bystander(&daemon.socket());
    let whole = Request { id: 1, body: RequestBody::OpenPd { name: Some("x".repeat(40)) } };
    let whole = postcard::to_stdvec(&whole).unwrap();
    let trailing = [whole.as_slice(), &[0]].concat();
    let oversize = vec![0; MAX_MESSAGE + 1];
    let unknown = [1, 250];
    let mut cases: Vec<&[u8]> = vec![&trailing, &oversize, &unknown];
    cases.extend((1..whole.len()).map(|cut| &whole[..cut]));
    for bytes in cases {
        let mut raw = Raw::open(&daemon.socket());
        raw.send(bytes, &[]);
        let reply = raw.reply();
        assert!(
            matches!(&reply, Some(Reply { result: Err(Refusal::Malformed { .. }), .. })),
            "{bytes:?}: {reply:?}"
        );
        assert!(raw.receive().is_none());
    }
    assert_eq!(other.call(RequestBody::ClosePd { pd }), Ok(ReplyBody::Done));
}

#[test]
fn unexpected_descriptors_end_the_session() {
    let daemon = daemon(SMALL);
    let (mut other, pd) = bystander(&daemon.socket());
    let memfd = memfd(4096);
    let mut raw = Raw::open(&daemon.socket());
    raw.ask(RequestBody::OpenPd { name: None }, &[memfd.as_fd()]);
    assert!(matches!(raw.reply(), Some(Reply { result: Err(Refusal::Malformed { .. }), .. })));
    assert!(raw.receive().is_none());

    let raw = Raw::connect(&daemon.socket());
    let hello = Hello { min_version: 1, max_version: 1, features: 0 }.to_bytes();
    raw.send(&hello, &[memfd.as_fd()]);
    assert!(raw.receive().is_none());
    assert_eq!(other.call(RequestBody::ClosePd { pd }), Ok(ReplyBody::Done));
}

#[test]
fn shared_buffer_without_one_memfd_is_malformed() {
    let daemon = daemon(SMALL);
    let (mut other, pd) = bystander(&daemon.socket());
    let (pipe, _end) = std::io::pipe().unwrap();
    let (socket, _peer) = UnixStream::pair().unwrap();
    let folder: OwnedFd = std::fs::File::open("/").unwrap().into();
    let device: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
    let memfd = memfd(4096);
    let wrong = [
        vec![],
        vec![pipe.as_fd()],
        vec![socket.as_fd()],
        vec![folder.as_fd()],
        vec![device.as_fd()],
        vec![memfd.as_fd(), memfd.as_fd()],
        vec![memfd.as_fd(), pipe.as_fd()],
        vec![memfd.as_fd(); 16],
    ];
    for descriptors in wrong {
        let mut raw = Raw::open(&daemon.socket());
        raw.ask(RequestBody::AddSharedBuffer { length: 4096 }, &descriptors);
        let reply = raw.reply();
        assert!(
            matches!(&reply, Some(Reply { result: Err(Refusal::Malformed { .. }), .. })),
            "{descriptors:?}: {reply:?}"
        );
        assert!(raw.receive().is_none());
    }
    assert_eq!(other.call(RequestBody::ClosePd { pd }), Ok(ReplyBody::Done));
    assert_eq!(other.status().shared_buffers, 0);
}

#[test]
fn wrong_memfd_size_is_refused_for_free() {
    let daemon = daemon(SMALL);
    let mut raw = Raw::open(&daemon.socket());
    let sparse = rustix::fs::memfd_create("sparse", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&sparse, 8192).unwrap();
    let honest = memfd(4096);
    for (memfd, length) in [(&sparse, 8192), (&honest, 8192), (&honest, 4095), (&honest, 0)] {
        let body = RequestBody::AddSharedBuffer { length };
        assert!(raw.call_with(body, &[memfd.as_fd()]).is_err(), "{length}");
    }
    let status = raw.status();
    assert_eq!((status.shared_buffers, status.shared_bytes), (0, 0));
    raw.shared_buffer(65536);
}

#[test]
fn each_limit_is_refused_by_its_name() {
    let daemon = daemon(SMALL);
    let mut raw = Raw::open(&daemon.socket());
    let pd = raw.pd();
    let key = |text: String, key: &str| assert!(text.starts_with(key), "{text}");
    let create_cq = |entries| RequestBody::CreateCq { entries, channel: None, context: 0 };
    key(raw.refused(create_cq(65)), "entries = 65 is above limits.cq_entries = 64");
    let cq = raw.cq(64);

    let with = |change: fn(&mut QpRequest)| {
        let mut request = qp_request(pd, cq);
        change(&mut request);
        RequestBody::CreateQp(request)
    };
    key(raw.refused(with(|r| r.sq_depth = 33)), "sq_depth = 33 is above limits.queue_depth = 32");
    key(raw.refused(with(|r| r.rq_depth = u32::MAX)), "rq_depth = 4294967295 is above");
    key(raw.refused(with(|r| r.max_send_sge = 5)), "max_send_sge = 5 is above limits.sge = 4");
    key(raw.refused(with(|r| r.max_recv_sge = 255)), "max_recv_sge = 255 is above limits.sge");
    key(raw.refused(with(|r| r.max_inline = 65)), "max_inline = 65 is above limits.inline = 64");
    key(raw.refused(with(|r| r.srq = Some(SrqId(1)))), "no SRQ 1 in this session");
    let hold = |r: &mut QpRequest| r.rnr_policy = RnrPolicy::Wait { timeout_ms: 3_600_001 };
    key(raw.refused(with(hold)), "rnr_policy.timeout_ms = 3600001 is above one hour = 3600000");
    let qp = raw.qp(pd, cq);

    let (listener, address) = raw.listener();
    let listen = RequestBody::Listen { listener, backlog: 3 };
    key(raw.refused(listen), "backlog = 3 is above limits.backlog = 2");
    let connect = |ird, ord, len| RequestBody::Connect {
        qp,
        peer: address,
        local: None,
        ird,
        ord,
        private_data: vec![0; len],
    };
    key(raw.refused(connect(Some(5), None, 0)), "ird = 5 is above limits.ird = 4");
    key(raw.refused(connect(None, Some(5), 0)), "ord = 5 is above limits.ord = 4");
    assert!(raw.call(connect(None, None, MAX_PRIVATE_DATA + 1)).is_err());
    assert!(raw.status().refusals >= 11);
}

#[test]
fn arena_memory_is_bounded_and_reused() {
    let daemon = daemon(
        "[limits]\ncq_entries = 16384\n[limits.session]\narena_bytes = \"1MiB\"\ncqs = 100\n",
    );
    let mut raw = Raw::open(&daemon.socket());
    let create = RequestBody::CreateCq { entries: 16384, channel: None, context: 0 };
    let refusal = raw.refused(create);
    assert!(refusal.starts_with("limits.session.arena_bytes = 1048576 reached"), "{refusal}");
    let before = raw.status().cqs;
    assert_eq!(before, 0);
    for _ in 0..100 {
        let cq = raw.cq(4096);
        assert_eq!(raw.call(RequestBody::DestroyCq { cq }), Ok(ReplyBody::Done));
    }
    assert!(raw.status().arena_bytes <= 1 << 20);
}

#[test]
fn objects_in_use_stay() {
    let daemon = daemon(SMALL);
    let mut raw = Raw::open(&daemon.socket());
    let pd = raw.pd();
    let channel = raw.channel();
    let body = RequestBody::CreateCq { entries: 4, channel: Some(channel), context: 0 };
    let Ok(ReplyBody::Cq { cq, .. }) = raw.call(body) else { panic!("no CQ") };
    let buffer = raw.shared_buffer(4096);
    let (mr, _) = raw.mr(pd, buffer, 4096);
    let qp = raw.qp(pd, cq);
    for body in [
        RequestBody::ClosePd { pd },
        RequestBody::RemoveSharedBuffer { buffer },
        RequestBody::DestroyCq { cq },
        RequestBody::DestroyChannel { channel },
    ] {
        let refusal = raw.call(body);
        assert!(matches!(refusal, Err(Refusal::InUse { .. })), "{refusal:?}");
    }
    for body in [
        RequestBody::DestroyQp { qp },
        RequestBody::DestroyCq { cq },
        RequestBody::DestroyChannel { channel },
        RequestBody::DeregMr { mr },
        RequestBody::RemoveSharedBuffer { buffer },
        RequestBody::ClosePd { pd },
    ] {
        assert_eq!(raw.call(body), Ok(ReplyBody::Done));
    }
    let s = raw.status();
    assert_eq!((s.pds, s.shared_buffers, s.shared_bytes, s.mrs, s.cqs, s.qps), (0, 0, 0, 0, 0, 0));
}

#[test]
fn requests_sent_at_once_are_answered_in_order() {
    let daemon = daemon(SMALL);
    let mut raw = Raw::open(&daemon.socket());
    let pd = raw.pd();
    let buffer = raw.shared_buffer(4096);
    let mut ids = Vec::new();
    for _ in 0..200 {
        ids.push(raw.ask(reg_mr(pd, buffer, 4096), &[]));
        ids.push(raw.ask(RequestBody::QueryDevice, &[]));
        let reply = raw.reply().unwrap();
        let Ok(ReplyBody::Mr { mr, .. }) = reply.result else { panic!("{reply:?}") };
        assert_eq!(reply.id, ids.remove(0));
        ids.push(raw.ask(RequestBody::DeregMr { mr }, &[]));
        for id in ids.drain(..) {
            assert_eq!(raw.reply().map(|r| r.id), Some(id));
        }
    }
}

/// The answers exceed the socket's buffer. While an answer waits for room, no further request is
/// read. Answers follow once the client reads.
#[test]
fn answers_wait_for_a_client_that_does_not_read() {
    let daemon = daemon("");
    let mut raw = Raw::open(&daemon.socket());
    let pd = raw.pd();
    let cq = raw.cq(1);
    for _ in 0..PAGE_ROWS {
        raw.qp(pd, cq);
    }
    let list = RequestBody::List { what: ListKind::Qps, from: 0 };
    // The kernel accounts 768 bytes for a request and over 1,024 for an answer of this length.
    assert!(postcard::to_stdvec(&raw.call(list.clone())).unwrap().len() > 700);
    let room = rustix::net::sockopt::socket_send_buffer_size(&raw.socket).unwrap();
    let ids: Vec<u32> = (0..room / 1024).map(|_| raw.ask(list.clone(), &[])).collect();
    // The control thread serves clients in turns.
    let mut bystander = Raw::open(&daemon.socket());
    for _ in &ids {
        bystander.status();
    }
    for id in ids {
        let reply = raw.reply().unwrap();
        assert_eq!(reply.id, id);
        assert!(matches!(reply.result, Ok(ReplyBody::Rows { .. })));
    }
    bystander.status();
}

#[test]
fn session_ends_with_the_connecting_process() {
    let daemon = daemon(SMALL);
    let mut watcher = Raw::open(&daemon.socket());
    // The session belongs to the process that connected, so that process must end. The test runs
    // this test binary again for it.
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "leave_the_socket_to_a_child", "--nocapture"])
        .env("RNICD_TEST_LEAVE", daemon.socket())
        .status()
        .unwrap();
    assert!(status.success());
    until("the end of the session", || watcher.status().sessions == 1);
}

/// Helper process of the test above.
#[test]
#[expect(clippy::zombie_processes, reason = "the child must outlive this process")]
fn leave_the_socket_to_a_child() {
    let Some(socket) = std::env::var_os("RNICD_TEST_LEAVE") else { return };
    let raw = Raw::open(&std::path::PathBuf::from(socket));
    // The child reads the socket until the daemon closes it.
    let stdin = raw.socket.as_fd().try_clone_to_owned().unwrap();
    let out = Stdio::null();
    let err = Stdio::null();
    Command::new("cat").stdin(stdin).stdout(out).stderr(err).spawn().unwrap();
}

#[test]
fn ended_session_releases_its_objects() {
    let daemon = daemon(SMALL);
    let mut watcher = Raw::open(&daemon.socket());
    let before = watcher.status();
    for _ in 0..20 {
        let mut raw = Raw::open(&daemon.socket());
        let pd = raw.pd();
        let cq = raw.cq(64);
        let buffer = raw.shared_buffer(65536);
        raw.mr(pd, buffer, 65536);
        raw.qp(pd, cq);
        let mut request = qp_request(pd, cq);
        request.srq = Some(srq(&mut raw, pd));
        request.rnr_policy = RnrPolicy::Wait { timeout_ms: 0 };
        assert!(raw.call(RequestBody::CreateQp(request)).is_ok());
        let (listener, _) = raw.listener();
        assert_eq!(raw.call(RequestBody::Listen { listener, backlog: 1 }), Ok(ReplyBody::Done));
        assert_eq!((watcher.status().srqs, watcher.status().qps), (1, 2));
        drop(raw);
        until("the end of its objects", || {
            let now = watcher.status();
            let StatusInfo { uptime_s, refusals, .. } = now;
            now == StatusInfo { uptime_s, refusals, ..before.clone() }
        });
    }
}

#[test]
fn lists_come_in_pages() {
    let daemon = daemon("");
    let mut raw = Raw::open(&daemon.socket());
    let cq = raw.cq(1);
    let pd = raw.pd();
    let mut qps: Vec<QpId> = (0..PAGE_ROWS + 5).map(|_| raw.qp(pd, cq)).collect();
    qps.sort_unstable();
    let mut seen = Vec::new();
    let mut from = 0;
    loop {
        let body = RequestBody::List { what: ListKind::Qps, from };
        let Ok(ReplyBody::Rows { rows: Rows::Qps(rows), total, next }) = raw.call(body) else {
            panic!("no rows")
        };
        assert_eq!(total as usize, qps.len());
        assert!(rows.len() <= PAGE_ROWS);
        seen.extend(rows.into_iter().map(|r| r.qp));
        if next == 0 {
            break;
        }
        from = next;
    }
    assert_eq!(seen, qps);
    for what in [ListKind::Clients, ListKind::Cqs, ListKind::Mrs, ListKind::Listeners] {
        assert!(matches!(
            raw.call(RequestBody::List { what, from: 0 }),
            Ok(ReplyBody::Rows { .. })
        ));
    }
}

#[test]
fn invalid_region_names_the_field() {
    let daemon = daemon(SMALL);
    let mut raw = Raw::open(&daemon.socket());
    let pd = raw.pd();
    let other = raw.pd();
    let cq = raw.cq(1);
    let buffer = raw.shared_buffer(8192);
    let qp = raw.qp(other, cq);
    let reg = |offset, length, iova, access, scope| {
        RequestBody::RegMr(MrRequest {
            pd,
            source: MrSource::Shared { buffer, offset },
            length,
            iova,
            access,
            scope,
        })
    };
    let all = Access::LOCAL_WRITE;
    for (body, start) in [
        (reg(8193, 0, 0, all, Scope::Pd), "length: "),
        (reg(0, 8193, 0, all, Scope::Pd), "length: "),
        (reg(8192, 1, 0, all, Scope::Pd), "length: "),
        (reg(u64::MAX, 2, 0, all, Scope::Pd), "length: "),
        (reg(0, 2, u64::MAX - 1, all, Scope::Pd), "iova: "),
        (reg(0, 1, 0, Access::from_bits_retain(1 << 20), Scope::Pd), "access: "),
        (reg(0, 1, 0, Access::REMOTE_WRITE, Scope::Pd), "access: "),
        (reg(0, 1, 0, Access::REMOTE_ATOMIC, Scope::Pd), "access: REMOTE_ATOMIC needs LOCAL_WRITE"),
        (reg(0, 1, 8, Access::ZERO_BASED, Scope::Pd), "iova: "),
        (reg(0, 1, 0, all, Scope::Qp(qp)), "scope: "),
        (reg(0, 1, 0, all, Scope::Qp(QpId(4711))), "no QP 4711"),
    ] {
        let refusal = raw.refused(body.clone());
        assert!(refusal.starts_with(start), "{body:?}: {refusal}");
    }
    assert_eq!(raw.status().mrs, 0);
}

fn srq_request(pd: PdId) -> SrqRequest {
    SrqRequest { pd, depth: 8, max_sge: 2, limit: 0, context: 5 }
}

fn srq(raw: &mut Raw, pd: PdId) -> SrqId {
    match raw.call(RequestBody::CreateSrq(srq_request(pd))) {
        Ok(ReplyBody::Srq { srq, .. }) => srq,
        other => panic!("{other:?}"),
    }
}

fn srq_row(raw: &mut Raw, srq: SrqId) -> SrqRow {
    match raw.call(RequestBody::QuerySrq { srq }) {
        Ok(ReplyBody::SrqInfo(row)) => row,
        other => panic!("{other:?}"),
    }
}

#[test]
fn each_srq_limit_names_its_key() {
    let daemon = daemon(&SMALL.replace("[limits.session]", "srqs = 3\n[limits.session]"));
    let mut raw = Raw::open(&daemon.socket());
    let pd = raw.pd();
    let key = |text: String, wanted: &str| assert!(text.contains(wanted), "{text}");
    let with = |change: fn(&mut SrqRequest)| {
        let mut request = srq_request(pd);
        change(&mut request);
        RequestBody::CreateSrq(request)
    };
    key(raw.refused(with(|r| r.depth = 0)), "depth: an SRQ has at least one entry");
    key(raw.refused(with(|r| r.depth = 33)), "depth = 33 is above limits.queue_depth = 32");
    key(raw.refused(with(|r| r.max_sge = 5)), "max_sge = 5 is above limits.sge = 4");
    key(raw.refused(with(|r| r.limit = 9)), "limit = 9 is above the capacity of the SRQ = 8");
    key(raw.refused(with(|r| r.pd = PdId(77))), "no PD 77 in this session");
    let first = srq(&mut raw, pd);
    srq(&mut raw, pd);
    key(raw.refused(with(|_| ())), "limits.session.srqs = 2 reached");
    let mut other = Raw::open(&daemon.socket());
    let other_pd = other.pd();
    srq(&mut other, other_pd);
    let request = RequestBody::CreateSrq(srq_request(other_pd));
    key(other.refused(request), "limits.srqs = 3 reached");

    // Objects of other sessions do not exist here.
    let foreign = format!("no SRQ {first} in this session");
    for body in [
        RequestBody::QuerySrq { srq: first },
        RequestBody::ArmSrq { srq: first, limit: 1 },
        RequestBody::DestroySrq { srq: first },
        RequestBody::SetContext { object: ObjectRef::Srq(first), context: 1 },
    ] {
        key(other.refused(body), &foreign);
    }
    let cq = other.cq(4);
    let mut request = qp_request(other_pd, cq);
    request.srq = Some(first);
    key(other.refused(RequestBody::CreateQp(request)), &foreign);

    // Refused requests and closed sessions leave no charge.
    assert_eq!((raw.status().srqs, other.status().srqs), (3, 3));
    drop(other);
    let arm = |limit| RequestBody::ArmSrq { srq: first, limit };
    key(raw.refused(arm(9)), "limit = 9 is above the capacity of the SRQ = 8");
    assert_eq!(raw.call(arm(0)), Ok(ReplyBody::Done));
}

#[test]
fn srq_is_in_use_while_a_qp_exists() {
    let daemon = daemon(SMALL);
    let mut raw = Raw::open(&daemon.socket());
    let pd = raw.pd();
    let other_pd = raw.pd();
    let cq = raw.cq(8);
    let srq = srq(&mut raw, pd);
    let row = |qps| SrqRow {
        srq,
        session: SessionId(0),
        pd,
        capacity: 8,
        posted: 0,
        taken: 0,
        limit: 0,
        qps,
        waiting: 0,
        unfair: 0,
    };
    let with = |pd| {
        // Receive queue parameters are ignored with an SRQ.
        QpRequest { srq: Some(srq), rq_depth: u32::MAX, max_recv_sge: 255, ..qp_request(pd, cq) }
    };
    let wrong = raw.refused(RequestBody::CreateQp(with(other_pd)));
    assert_eq!(wrong, format!("srq: SRQ {srq} belongs to PD {pd}, the QP to PD {other_pd}"));
    let qp = match raw.call(RequestBody::CreateQp(with(pd))) {
        Ok(ReplyBody::Qp { qp, rq: None, .. }) => qp,
        other => panic!("{other:?}"),
    };
    let found = srq_row(&mut raw, srq);
    assert_eq!(SrqRow { session: SessionId(0), ..found }, row(1));
    match raw.call(RequestBody::List { what: ListKind::Srqs, from: 0 }) {
        Ok(ReplyBody::Rows { rows: Rows::Srqs(rows), total: 1, next: 0 }) => {
            assert_eq!(rows[0].qps, 1)
        }
        other => panic!("{other:?}"),
    }
    match raw.call(RequestBody::QueryQp { qp }) {
        Ok(ReplyBody::QpInfo(row)) => assert_eq!(row.srq, Some(srq)),
        other => panic!("{other:?}"),
    }
    let destroy = RequestBody::DestroySrq { srq };
    assert_eq!(raw.refused(destroy.clone()), format!("SRQ {srq} is in use by 1 QPs"));
    let closing = raw.refused(RequestBody::ClosePd { pd });
    assert_eq!(closing, format!("PD {pd} is in use by 1 QPs, 1 SRQs"));
    // A QP in Error still uses the SRQ. A QP at a worker releases it when the worker is done.
    assert_eq!(raw.call(RequestBody::QpToError { qp }), Ok(ReplyBody::Done));
    assert_eq!(raw.refused(destroy.clone()), format!("SRQ {srq} is in use by 1 QPs"));
    assert_eq!(raw.call(RequestBody::DestroyQp { qp }), Ok(ReplyBody::Done));
    assert_eq!(srq_row(&mut raw, srq).qps, 0);
    assert_eq!(raw.call(destroy.clone()), Ok(ReplyBody::Done));
    assert_eq!(raw.refused(destroy), format!("no SRQ {srq} in this session"));
    assert_eq!(raw.call(RequestBody::ClosePd { pd }), Ok(ReplyBody::Done));
    let status = raw.status();
    assert_eq!((status.srqs, status.qps, status.cqs), (0, 0, 1));
}

#[test]
fn reserved_shared_buffer_is_charged() {
    let daemon = daemon(SMALL);
    let mut raw = Raw::open(&daemon.socket());
    let pd = raw.pd();
    let starts = |text: String, start: &str| assert!(text.starts_with(start), "{text}");
    let reserve = |length| RequestBody::ReserveSharedBuffer { length };
    // No machine has a buffer of this size.
    starts(raw.refused(reserve(1 << 40)), "limits.session.shared_bytes = 65536 reached");
    starts(raw.refused(reserve(0)), "length");
    starts(raw.refused(reserve(4097)), "length");

    let reserved = |raw: &mut Raw, length| match raw.call(reserve(length)) {
        Ok(ReplyBody::SharedBuffer { buffer }) => buffer,
        other => panic!("{other:?}"),
    };
    let buffer = reserved(&mut raw, 32768);
    let status = raw.status();
    assert_eq!((status.shared_buffers, status.shared_bytes), (1, 32768));
    starts(raw.refused(reserve(36864)), "limits.session.shared_bytes = 65536 reached");
    starts(raw.refused(reg_mr(pd, buffer, 1)), "shared buffer: is reserved");

    // After a refusal the buffer is still reserved.
    let fill = |buffer| RequestBody::FillSharedBuffer { buffer };
    let refusal = raw.call_with(fill(buffer), &[memfd(4096).as_fd()]).unwrap_err().to_string();
    starts(refusal, "shared buffer: the memfd has 4096");
    assert_eq!(raw.call_with(fill(buffer), &[memfd(32768).as_fd()]), Ok(ReplyBody::Done));
    raw.mr(pd, buffer, 32768);
    let refusal = raw.call_with(fill(buffer), &[memfd(32768).as_fd()]).unwrap_err().to_string();
    starts(refusal, "shared buffer: already has memory");
    let stranger = SharedBufferId(buffer.0 + 1000);
    let refusal = raw.call_with(fill(stranger), &[memfd(4096).as_fd()]).unwrap_err().to_string();
    assert!(refusal.contains("shared buffer"), "{refusal}");

    // The reservation is released by `RemoveSharedBuffer` or with the session.
    let other = reserved(&mut raw, 32768);
    assert_eq!(raw.call(RequestBody::RemoveSharedBuffer { buffer: other }), Ok(ReplyBody::Done));
    reserved(&mut raw, 32768);
    drop(raw);
    let mut raw = Raw::open(&daemon.socket());
    until("the end of the reservation", || {
        let status = raw.status();
        (status.sessions, status.shared_buffers, status.shared_bytes) == (1, 0, 0)
    });
    daemon.stop().unwrap();
}
