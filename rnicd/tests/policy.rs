//! Tests of the administrator's limits and rules with a raw client of the control socket: each
//! refusal reports the key.

#![allow(clippy::unwrap_used, missing_docs)]

#[allow(dead_code)]
mod support;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rnic_abi::abi::control::*;
use rnic_abi::types::*;
use rnicd::exec::PrivateDaemon;
use rustix::net::RecvFlags;
use support::*;

/// Timeout for operations that are usually immediate.
const DEADLINE: Duration = Duration::from_secs(180);

/// Returns the daemon's answer to a Hello. A refused client gets no descriptors and is closed.
fn greeting(mut raw: Raw) -> Option<HelloStatus> {
    let (reply, descriptors) = raw.hello().unwrap();
    let status = HelloStatus::from_u32(reply.status);
    assert!(status == Some(HelloStatus::Ok) || descriptors.is_empty() && raw.receive().is_none());
    status
}

/// Creates objects of a kind until a refusal, and returns its text.
fn exhaust(raw: &mut Raw, kind: &str) -> String {
    let (pd, cq, buffer) = match kind {
        "mrs" => (raw.pd(), CqId(0), raw.shared_buffer(4096)),
        "srqs" | "windows" => (raw.pd(), CqId(0), SharedBufferId(0)),
        "qps" => (raw.pd(), raw.cq(1), SharedBufferId(0)),
        _ => (PdId(0), CqId(0), SharedBufferId(0)),
    };
    let new_cq = |entries| RequestBody::CreateCq { entries, channel: None, context: 0 };
    let address = ([127, 0, 0, 1], 0).into();
    for _ in 0..64 {
        let memfd = memfd(4096);
        let (body, with_memfd) = match kind {
            "pds" => (RequestBody::OpenPd { name: None }, false),
            "shared_buffers" | "shared_bytes" => {
                (RequestBody::AddSharedBuffer { length: 4096 }, true)
            }
            "mrs" => (reg_mr(pd, buffer, 4096), false),
            "channels" => (RequestBody::CreateChannel, false),
            "cqs" => (new_cq(1), false),
            "cq_entries_total" => (new_cq(4), false),
            "arena_bytes" => (new_cq(4096), false),
            "qps" => (RequestBody::CreateQp(qp_request(pd, cq)), false),
            "srqs" => {
                let request = SrqRequest { pd, depth: 1, max_sge: 1, limit: 0, context: 0 };
                (RequestBody::CreateSrq(request), false)
            }
            "windows" => (RequestBody::AllocWindow { pd, kind: WindowKind::Type1 }, false),
            _ => (RequestBody::Bind { address, context: 0, v6_only: false }, false),
        };
        use std::os::fd::AsFd;
        let descriptors = [memfd.as_fd()];
        match raw.call_with(body, if with_memfd { &descriptors } else { &[] }) {
            Ok(_) => {}
            Err(refusal) => return refusal.to_string(),
        }
    }
    panic!("{kind} is unlimited");
}

#[test]
fn each_limit_names_its_key() {
    let uid = uid();
    for (kind, value) in [
        ("pds", "2"),
        ("shared_buffers", "2"),
        ("shared_bytes", "\"8KiB\""),
        ("mrs", "2"),
        ("channels", "2"),
        ("cqs", "2"),
        ("cq_entries_total", "9"),
        ("arena_bytes", "\"1MiB\""),
        ("qps", "2"),
        ("listeners", "2"),
        ("srqs", "2"),
        ("windows", "2"),
    ] {
        for (configuration, key) in [
            (format!("[limits.session]\n{kind} = {value}\n"), format!("limits.session.{kind} = ")),
            (
                format!("[limits.user]\n{kind} = {value}\n"),
                format!("limits.user.{kind} (user {uid}) = "),
            ),
            (format!("[limits]\n{kind} = {value}\n"), format!("limits.{kind} = ")),
            (
                format!("[[user]]\nwho = {uid}\nsession = {{ {kind} = {value} }}\n"),
                format!("user.{uid}.session.{kind} = "),
            ),
            (
                format!("[[user]]\nwho = {uid}\nuser = {{ {kind} = {value} }}\n"),
                format!("user.{uid}.user.{kind} = "),
            ),
        ] {
            let daemon = one_worker(&configuration);
            let mut raw = Raw::open(&daemon.socket());
            let refusal = exhaust(&mut raw, kind);
            assert!(refusal.starts_with(&key), "{configuration}{refusal}");
            assert!(refusal.contains(" reached (asked for "), "{refusal}");
            // The session continues.
            assert!(raw.status().refusals >= 1);
        }
    }
}

#[test]
fn a_users_sessions_are_counted_together() {
    let daemon = one_worker("[limits.user]\nqps = 3\n");
    let mut a = Raw::open(&daemon.socket());
    let mut b = Raw::open(&daemon.socket());
    let pd = a.pd();
    let cq = a.cq(1);
    a.qp(pd, cq);
    a.qp(pd, cq);
    let refusal = exhaust(&mut b, "qps");
    assert!(refusal.ends_with("= 3 reached (asked for 1 more, 3 in use)"), "{refusal}");
    drop(a);
    // There is room again once the session is gone.
    let pd = b.pd();
    let cq = b.cq(1);
    until("a free QP", || b.call(RequestBody::CreateQp(qp_request(pd, cq))).is_ok());
}

#[test]
fn session_limits_have_their_status() {
    for (configuration, status) in [
        ("[limits.user]\nsessions = 2\n".to_owned(), HelloStatus::UserSessions),
        (
            format!("[[user]]\nwho = {}\nuser = {{ sessions = 2 }}\n", uid()),
            HelloStatus::UserSessions,
        ),
        ("[limits]\nsessions = 2\n".to_owned(), HelloStatus::SessionLimit),
    ] {
        let daemon = one_worker(&configuration);
        let socket = daemon.socket();
        let first = Raw::open(&socket);
        let _second = Raw::open(&socket);
        assert_eq!(greeting(Raw::connect(&socket)), Some(status), "{configuration}");
        drop(first);
        until("a free session", || greeting(Raw::connect(&socket)) == Some(HelloStatus::Ok));
    }
}

/// Returns the rows on all pages of a list, and their total number according to the daemon.
fn list<R>(raw: &mut Raw, what: ListKind, of: fn(Rows) -> Option<Vec<R>>) -> (Vec<R>, u32) {
    let mut all = Vec::new();
    let mut from = 0;
    loop {
        match raw.call(RequestBody::List { what, from }) {
            Ok(ReplyBody::Rows { rows, total, next }) => {
                all.extend(of(rows).unwrap());
                if next == 0 {
                    return (all, total);
                }
                from = next;
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Returns all diagnoses that the session may read.
fn diagnoses(raw: &mut Raw) -> Vec<Diagnosis> {
    let of = |rows| if let Rows::Diagnoses(rows) = rows { Some(rows) } else { None };
    list(raw, ListKind::Diagnoses, of).0
}

#[test]
fn rings_of_records_have_their_length() {
    let limits = "[limits]\ndiagnoses = 3\nevent_records = 16\n[limits.session]\ndiagnoses = 2\n";
    let daemon = one_worker(limits);
    let mut watcher = Raw::open(&daemon.socket());
    for _ in 0..10 {
        let mut raw = Raw::open(&daemon.socket());
        for _ in 0..5 {
            raw.refused(RequestBody::ClosePd { pd: PdId(7) });
        }
        let rows = diagnoses(&mut watcher);
        let newest = rows.iter().max_by_key(|row| row.id).unwrap().session;
        assert_eq!(rows.iter().filter(|row| row.session == newest).count(), 2);
        drop(raw);
    }
    // Records move to the ring of ended sessions once the workers have released the session.
    until("3 diagnoses", || diagnoses(&mut watcher).len() == 3);
    match watcher.call(RequestBody::List { what: ListKind::Events, from: 0 }) {
        Ok(ReplyBody::Rows { total, .. }) => assert_eq!(total, 16),
        other => panic!("{other:?}"),
    }
}

fn connect(qp: QpId, peer: SocketAddr, ird: Option<u16>) -> RequestBody {
    RequestBody::Connect { qp, peer, local: None, ird, ord: Some(0), private_data: Vec::new() }
}

#[test]
fn unread_events_beyond_the_limit_are_dropped() {
    // More than a socket takes, and fewer than the default limit.
    const ATTEMPTS: u64 = 900;
    let daemon = one_worker("[limits]\nevents = 16\n");
    let mut raw = Raw::open(&daemon.socket());
    let pd = raw.pd();
    let cq = raw.cq(1);
    let qp = raw.qp(pd, cq);
    // Bound but not listening, so each attempt to connect ends with an event.
    let (_, address) = raw.listener();
    for _ in 0..ATTEMPTS {
        until("the end of the previous attempt", || raw.call(connect(qp, address, None)).is_ok());
    }
    let socket = &raw.descriptors[1];
    let mut delivered = 0;
    let lost = loop {
        assert!(delivered < ATTEMPTS, "all events were kept");
        let mut bytes = vec![0; MAX_MESSAGE];
        let (_, n) = rustix::net::recv(socket, &mut bytes[..], RecvFlags::empty()).unwrap();
        match postcard::from_bytes(&bytes[..n]).unwrap() {
            Event::Unreachable { .. } => delivered += 1,
            Event::EventsLost { count } => break count,
            other => panic!("{other:?}"),
        }
    };
    assert!((1..=ATTEMPTS - delivered).contains(&lost), "{lost} lost, {delivered} delivered");
}

#[test]
fn listeners_bind_only_addresses_of_the_device() {
    let daemon = one_worker("[device]\naddresses = [\"127.0.0.9\"]\n");
    let mut raw = Raw::open(&daemon.socket());
    let bind = |ip: &str| RequestBody::Bind {
        address: SocketAddr::new(ip.parse().unwrap(), 0),
        context: 0,
        v6_only: false,
    };
    for other in ["127.0.0.1", "0.0.0.0", "::"] {
        let refusal = raw.refused(bind(other));
        assert!(refusal.starts_with("not allowed by device.addresses: serve "), "{refusal}");
    }
    assert!(raw.call(bind("127.0.0.9")).is_ok());
}

/// Opens a session with a listening address.
fn host(daemon: &PrivateDaemon) -> (Raw, SocketAddr) {
    let mut raw = Raw::open(&daemon.socket());
    let (listener, address) = raw.listener();
    assert_eq!(raw.call(RequestBody::Listen { listener, backlog: 16 }), Ok(ReplyBody::Done));
    (raw, address)
}

#[test]
fn user_connect_rate_is_limited() {
    let daemon = one_worker("[limits.user]\nconnections_per_second = 2\n");
    let (mut raw, address) = host(&daemon);
    let pd = raw.pd();
    let cq = raw.cq(1);
    let qps: Vec<QpId> = (0..100).map(|_| raw.qp(pd, cq)).collect();
    let started = Instant::now();
    let mut connected = 0;
    // A slow machine grants more, but not a hundred within 50 s.
    let refused = qps.iter().find_map(|qp| {
        let refused = raw.call(connect(*qp, address, None)).err();
        connected += u64::from(refused.is_none());
        refused
    });
    let key = format!("limits.user.connections_per_second (user {}) = 2 reached", uid());
    assert!(refused.is_some_and(|e| e.to_string().starts_with(&key)));
    let granted = 2 + 2 * (started.elapsed().as_secs() + 1);
    assert!((2..=granted).contains(&connected), "{connected} of {granted}");
}

//= RDMAP-8.1.2-7
#[test]
fn user_read_limit_spans_connections() {
    let daemon = one_worker("[limits]\nird = 4\n[limits.user]\nird_total = 5\n");
    let (mut raw, address) = host(&daemon);
    let pd = raw.pd();
    let cq = raw.cq(1);
    let qps: Vec<QpId> = (0..3).map(|_| raw.qp(pd, cq)).collect();
    let above = raw.refused(connect(qps[0], address, Some(5)));
    assert_eq!(above, "ird = 5 is above limits.ird = 4");
    assert_eq!(raw.call(connect(qps[0], address, Some(4))), Ok(ReplyBody::Done));
    let key = format!("limits.user.ird_total (user {}) = 5 reached", uid());
    let refusal = raw.refused(connect(qps[1], address, Some(4)));
    assert!(refusal.starts_with(&key), "{refusal}");
    // Without an explicit depth a connection gets the rest, or a refusal if nothing is left.
    assert_eq!(raw.call(connect(qps[1], address, None)), Ok(ReplyBody::Done));
    let refusal = raw.refused(connect(qps[2], address, None));
    assert!(refusal.starts_with(&key), "{refusal}");
    assert_eq!(raw.call(RequestBody::DestroyQp { qp: qps[0] }), Ok(ReplyBody::Done));
    assert_eq!(raw.call(connect(qps[2], address, Some(4))), Ok(ReplyBody::Done));
    let used =
        limits(&mut raw).into_iter().find(|row| row.key.starts_with("limits.user.ird_total"));
    assert_eq!(used.map(|row| (row.limit, row.used)), Some((5, 5)));
}

#[test]
fn outbound_reads_of_a_user_are_limited() {
    let daemon = one_worker("[limits]\nord = 4\n[limits.user]\nord_total = 5\n");
    let (mut raw, peer) = host(&daemon);
    let pd = raw.pd();
    let cq = raw.cq(1);
    let first = raw.qp(pd, cq);
    let second = raw.qp(pd, cq);
    let connect = |qp| RequestBody::Connect {
        qp,
        peer,
        local: None,
        ird: Some(0),
        ord: Some(4),
        private_data: Vec::new(),
    };
    assert_eq!(raw.call(connect(first)), Ok(ReplyBody::Done));
    let refusal = raw.refused(connect(second));
    let key = format!("limits.user.ord_total (user {}) = 5 reached", uid());
    assert!(refusal.starts_with(&key), "{refusal}");
}

fn limits(raw: &mut Raw) -> Vec<LimitRow> {
    let of = |rows| if let Rows::Limits(rows) = rows { Some(rows) } else { None };
    let (all, total) = list(raw, ListKind::Limits, of);
    assert_eq!(all.len(), total as usize);
    all
}

fn pds(raw: &mut Raw) -> Vec<PdRow> {
    let of = |rows| if let Rows::Pds(rows) = rows { Some(rows) } else { None };
    list(raw, ListKind::Pds, of).0
}

/// Waits for the end of a connection. Returns true if the daemon has ended it.
fn is_over(mut stream: &TcpStream) -> bool {
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    match stream.read(&mut [0]) {
        Ok(0) => true,
        Ok(_) => false,
        Err(e) => e.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

#[test]
fn oldest_silent_connection_is_evicted() {
    let config = "[mpa]\nstartup_deadline = \"1h\"\n[limits.user]\nstartups = 2\n";
    let daemon = one_worker(config);
    let (mut raw, address) = host(&daemon);
    let silent: Vec<TcpStream> = (0..5).map(|_| TcpStream::connect(address).unwrap()).collect();
    for stream in &silent[..3] {
        assert!(is_over(stream));
    }
    assert_eq!(raw.status().startups, 2);
    let key = format!("limits.user.startups (user {})", uid());
    let row = limits(&mut raw).into_iter().find(|row| row.key == key).unwrap();
    assert_eq!((row.limit, row.used), (2, 2));
}

#[test]
fn a_host_that_connects_too_often_is_reset() {
    let daemon = one_worker("[limits.peer]\nconnections_per_second = 1\n");
    let (mut raw, address) = host(&daemon);
    // A machine that needs seconds for this grants a few more. A refused connection may end before
    // `connect` returns.
    let streams: Vec<_> = (0..20).map(|_| TcpStream::connect(address)).collect();
    let is_reset = |stream: &std::io::Result<TcpStream>| match stream {
        Ok(stream) => is_over(stream),
        Err(e) => e.kind() == std::io::ErrorKind::ConnectionReset,
    };
    assert!(is_reset(&streams[19]) || is_reset(&streams[18]));
    assert!(raw.status().startups < 20);
}

#[test]
fn listen_and_connect_need_a_matching_rule() {
    let uid = uid();
    let daemon = one_worker(&format!(
        "[[listen]]\nwho = {uid}\naddress = \"127.0.0.1\"\nports = \"1024-65535\"\n\
         [[connect]]\nwho = {uid}\nnetwork = \"127.0.0.0/8\"\nports = \"1024-65535\"\n"
    ));
    let (mut raw, address) = host(&daemon);
    for other in ["127.0.0.1:80", "127.0.0.2:0", "0.0.0.0:0", "[::]:0"] {
        let address: SocketAddr = other.parse().unwrap();
        let refusal = raw.refused(RequestBody::Bind { address, context: 0, v6_only: false });
        assert_eq!(refusal, format!("not allowed by listen: bind {other} as user {uid}"));
    }
    let pd = raw.pd();
    let cq = raw.cq(1);
    let qp = raw.qp(pd, cq);
    let refusal = raw.refused(connect(qp, ([10, 0, 0, 1], 5000).into(), None));
    assert_eq!(refusal, format!("not allowed by connect: connect to 10.0.0.1:5000 as user {uid}"));
    assert_eq!(raw.call(connect(qp, address, None)), Ok(ReplyBody::Done));
    // A port chosen by the kernel must not bypass the rule.
    let daemon =
        one_worker(&format!("[[listen]]\nwho = {uid}\naddress = \"127.0.0.1\"\nports = 1\n"));
    let mut raw = Raw::open(&daemon.socket());
    let address = ([127, 0, 0, 1], 0).into();
    let refusal = raw.refused(RequestBody::Bind { address, context: 0, v6_only: false });
    assert!(refusal.starts_with("not allowed by listen: bind 127.0.0.1:"), "{refusal}");
    assert_eq!(raw.status().listeners, 0);
}

fn open_pd(raw: &mut Raw, name: &str) -> Result<PdId, String> {
    match raw.call(RequestBody::OpenPd { name: Some(name.to_owned()) }) {
        Ok(ReplyBody::Pd { pd }) => Ok(pd),
        Ok(other) => panic!("{other:?}"),
        Err(refusal) => Err(refusal.to_string()),
    }
}

#[test]
fn named_domain_is_shared_and_limited() {
    let daemon = one_worker(&format!(
        "[[pd]]\nname = \"shared\"\nusers = [{}]\nmax_sessions = 2\nmrs = 2\nqps = 1\n\
         [[pd]]\nname = \"closed\"\nusers = [4711]\n",
        uid()
    ));
    let socket = daemon.socket();
    let mut a = Raw::open(&socket);
    let mut b = Raw::open(&socket);
    let mut c = Raw::open(&socket);
    let pd = open_pd(&mut a, "shared").unwrap();
    assert_eq!(open_pd(&mut b, "shared"), Ok(pd));
    let key = "pd.shared.max_sessions = 2 reached (asked for 1 more, 2 in use)";
    assert_eq!(open_pd(&mut c, "shared"), Err(key.to_owned()));
    let e = open_pd(&mut c, "closed").unwrap_err();
    assert!(e.starts_with("not allowed by pd.closed: open protection domain"), "{e}");
    let e = open_pd(&mut c, "none").unwrap_err();
    assert_eq!(e, "not allowed by pd: there is no [[pd]] named \"none\"");
    // A session cannot use a named domain that it has not opened.
    let buffer = c.shared_buffer(4096);
    assert_eq!(c.refused(reg_mr(pd, buffer, 4096)), format!("no PD {pd} in this session"));

    let of_a = a.shared_buffer(4096);
    let of_b = b.shared_buffer(4096);
    a.mr(pd, of_a, 4096);
    let (mr, _) = b.mr(pd, of_b, 4096);
    let key = "pd.shared.mrs = 2 reached (asked for 1 more, 2 in use)";
    assert_eq!(a.refused(reg_mr(pd, of_a, 4096)), key);
    let cq = a.cq(1);
    a.qp(pd, cq);
    let cq = b.cq(1);
    let refusal = b.refused(RequestBody::CreateQp(qp_request(pd, cq)));
    assert!(refusal.starts_with("pd.shared.qps = 1 reached"), "{refusal}");
    let rows = pds(&mut c);
    let shared = rows.iter().find(|row| row.pd == pd).unwrap();
    assert_eq!((shared.name.as_deref(), shared.session), (Some("shared"), None));
    assert_eq!((shared.sessions, shared.mrs, shared.qps), (2, 2, 1));

    // Objects of the other session do not exist here.
    assert_eq!(a.refused(RequestBody::DeregMr { mr }), format!("no MR {mr} in this session"));
    let refusal = b.refused(RequestBody::ClosePd { pd });
    assert_eq!(refusal, format!("PD {pd} is in use by 1 MRs"));
    // Opened twice, a domain must be closed twice.
    assert_eq!(open_pd(&mut b, "shared"), Ok(pd));
    assert_eq!(b.call(RequestBody::ClosePd { pd }), Ok(ReplyBody::Done));
    assert_eq!(b.call(RequestBody::DeregMr { mr }), Ok(ReplyBody::Done));
    assert_eq!(b.call(RequestBody::ClosePd { pd }), Ok(ReplyBody::Done));
    assert_eq!(b.refused(RequestBody::ClosePd { pd }), format!("no PD {pd} in this session"));
    // The end of a session releases its objects in the domain, and the domain stays.
    assert_eq!(open_pd(&mut c, "shared"), Ok(pd));
    drop(a);
    until("the end of its objects", || {
        let row = pds(&mut c).into_iter().find(|row| row.pd == pd).unwrap();
        (row.sessions, row.mrs, row.qps) == (1, 0, 0)
    });
    c.mr(pd, buffer, 4096);
    assert_eq!(open_pd(&mut b, "shared"), Ok(pd));
}

#[test]
fn draining_refuses_only_new_objects() {
    let daemon = one_worker("");
    let (mut raw, address) = host(&daemon);
    let pd = raw.pd();
    let cq = raw.cq(1);
    let qp = raw.qp(pd, cq);
    let buffer = raw.shared_buffer(4096);
    let (mr, _) = raw.mr(pd, buffer, 4096);
    let channel = raw.channel();
    assert!(!raw.status().draining);
    assert_eq!(raw.call(RequestBody::Drain { on: true }), Ok(ReplyBody::Done));
    assert!(raw.status().draining);
    for body in [
        RequestBody::OpenPd { name: None },
        reg_mr(pd, buffer, 4096),
        RequestBody::CreateChannel,
        RequestBody::CreateCq { entries: 1, channel: None, context: 0 },
        RequestBody::CreateQp(qp_request(pd, cq)),
        RequestBody::Bind { address: ([127, 0, 0, 1], 0).into(), context: 0, v6_only: false },
        connect(qp, address, None),
    ] {
        assert_eq!(raw.call(body.clone()), Err(Refusal::Draining), "{body:?}");
    }
    assert_eq!(raw.call(RequestBody::DeregMr { mr }), Ok(ReplyBody::Done));
    assert_eq!(raw.call(RequestBody::DestroyChannel { channel }), Ok(ReplyBody::Done));
    // Administrators can still connect, because one of them must end the draining.
    let mut admin = Raw::open(&daemon.socket());
    assert_eq!(admin.call(RequestBody::Drain { on: false }), Ok(ReplyBody::Done));
    assert_eq!(raw.call(connect(qp, address, None)), Ok(ReplyBody::Done));
}

#[test]
fn draining_daemon_sends_mpa_reject() {
    let daemon = one_worker("");
    let (mut raw, address) = host(&daemon);
    assert_eq!(raw.call(RequestBody::Drain { on: true }), Ok(ReplyBody::Done));
    let mut peer = TcpStream::connect(address).unwrap();
    peer.set_read_timeout(Some(DEADLINE)).unwrap();
    // RFC 5044 section 7.1.1: key, flags with C, revision 1, no private data.
    peer.write_all(b"MPA ID Req Frame\x40\x01\0\0").unwrap();
    let mut reply = [0; 20];
    peer.read_exact(&mut reply).unwrap();
    assert_eq!(&reply[..16], b"MPA ID Rep Frame");
    assert_eq!(reply[16] & 0x20, 0x20, "the reject flag");
    drop(peer);
    assert_eq!(raw.call(RequestBody::Drain { on: false }), Ok(ReplyBody::Done));
}

#[test]
fn devices_are_added_and_removed() {
    let daemon = one_worker("");
    let mut raw = Raw::open(&daemon.socket());
    let name = || "added".to_owned();
    let interface = String::new();
    assert_eq!(raw.call(RequestBody::AddDevice { name: name(), interface }), Ok(ReplyBody::Done));
    let interface = "x".repeat(16);
    assert!(raw.call(RequestBody::AddDevice { name: name() + "2", interface }).is_err());
    assert!(raw.call(RequestBody::AddDevice { name: name(), interface: String::new() }).is_err());
    assert_eq!(raw.call(RequestBody::RemoveDevice { name: name() }), Ok(ReplyBody::Done));
    assert!(raw.call(RequestBody::RemoveDevice { name: name() }).is_err());
}

#[test]
fn administrator_disconnects_a_qp() {
    let daemon = one_worker("");
    let (mut raw, address) = host(&daemon);
    let pd = raw.pd();
    let cq = raw.cq(1);
    let qp = raw.qp(pd, cq);
    let mut admin = Raw::open(&daemon.socket());
    let refusal = admin.refused(RequestBody::AdminDisconnect { qp });
    assert!(refusal.starts_with(&format!("QP {qp} is Idle, needs ")), "{refusal}");
    let refusal = admin.refused(RequestBody::AdminDisconnect { qp: QpId(4711) });
    assert_eq!(refusal, "no QP 4711 in this session");
    assert_eq!(raw.call(connect(qp, address, None)), Ok(ReplyBody::Done));
    assert_eq!(admin.call(RequestBody::AdminDisconnect { qp }), Ok(ReplyBody::Done));
    // The QP is Idle again, as after any failed attempt.
    assert_eq!(raw.call(connect(qp, address, None)), Ok(ReplyBody::Done));
}

#[test]
fn limits_are_listed_with_what_is_used_of_them() {
    let daemon = one_worker("[limits.session]\nqps = 7\n");
    let mut raw = Raw::open(&daemon.socket());
    let pd = raw.pd();
    let cq = raw.cq(3);
    raw.qp(pd, cq);
    let rows = limits(&mut raw);
    let row = |key: &str| {
        let row = rows.iter().find(|row| row.key == key);
        row.map(|row| (row.scope.clone(), row.limit, row.used)).unwrap()
    };
    let session = rows.iter().find(|row| row.scope.starts_with("session ")).unwrap().scope.clone();
    assert_eq!(row("limits.session.qps"), (session.clone(), 7, 1));
    assert_eq!(row("limits.session.cq_entries_total"), (session, 1 << 22, 4));
    let user = uid();
    assert_eq!(row(&format!("limits.user.qps (user {user})")), (format!("user {user}"), 16_384, 1));
    assert_eq!(row("limits.sessions"), ("device".to_owned(), 256, 1));
    assert_eq!(row("limits.pds"), ("device".to_owned(), 16_384, 1));
}

#[test]
fn users_and_groups_have_rules_of_their_own() {
    let rules = "[[user]]\nwho = 4711\nsession = { pds = 1 }\n\
                 [[group]]\nwho = 5000\nsession = { pds = 2, qps = 1 }\nuser = { sessions = 1 }\n\
                 [[pd]]\nname = \"shared\"\nusers = [4711]\ngroups = [6000]\n";
    let Some(daemon) = for_others(rules) else { return };
    let socket = daemon.socket();
    let mut alice = open_as(&socket, 4711, &[5000]);
    assert!(exhaust(&mut alice, "pds").starts_with("user.4711.session.pds = 1 reached"));
    // The group's limit on sessions applies to each member separately.
    assert_eq!(greeting(connect_as(&socket, 4711, &[5000])), Some(HelloStatus::UserSessions));
    let mut bob = open_as(&socket, 4712, &[1, 5000]);
    assert!(exhaust(&mut bob, "pds").starts_with("group.5000.session.pds = 2 reached"));
    let mut carol = open_as(&socket, 4713, &[6000]);
    // The second user may not open the domain of the others.
    let e = open_pd(&mut bob, "shared").unwrap_err();
    assert_eq!(e, "not allowed by pd.shared: open protection domain \"shared\" as user 4712");
    assert!(open_pd(&mut carol, "shared").is_ok());
    // Only its own limits.
    assert!(limits(&mut carol).iter().all(|row| !row.scope.starts_with("device")));
    assert!(limits(&mut carol).iter().all(|row| row.scope != "user 4711"));
    let rows = pds(&mut carol);
    assert_eq!((rows.len(), rows[0].name.as_deref()), (1, Some("shared")));
    assert_eq!(pds(&mut bob).len(), 2);
}

#[test]
fn only_administrators_drain_and_disconnect() {
    let Some(daemon) = for_others("[[listen]]\nwho = \"*\"\naddress = \"*\"\n") else { return };
    let socket = daemon.socket();
    let mut alice = open_as(&socket, 4711, &[]);
    for (body, verb) in [
        (RequestBody::Drain { on: true }, "drain"),
        (RequestBody::AdminDisconnect { qp: QpId(1) }, "disconnect a queue pair"),
    ] {
        let refusal = alice.refused(body);
        assert_eq!(refusal, format!("not allowed by control.admins: {verb} as user 4711"));
    }
    let mut root = Raw::open(&socket);
    assert_eq!(root.call(RequestBody::Drain { on: true }), Ok(ReplyBody::Done));
    assert_eq!(greeting(connect_as(&socket, 4711, &[])), Some(HelloStatus::Draining));
    assert!(alice.status().draining);
    assert_eq!(root.call(RequestBody::Drain { on: false }), Ok(ReplyBody::Done));
    // No rule matches the overflow user, not even a rule for everyone.
    let overflow = std::fs::read_to_string("/proc/sys/kernel/overflowuid").unwrap();
    let mut nobody = open_as(&socket, overflow.trim().parse().unwrap(), &[]);
    let bind =
        RequestBody::Bind { address: ([127, 0, 0, 1], 0).into(), context: 0, v6_only: false };
    assert!(nobody.refused(bind.clone()).starts_with("not allowed by listen: bind 127.0.0.1:0"));
    assert!(alice.call(bind).is_ok());
}
