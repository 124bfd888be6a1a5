//! RFC 5040 section 8.1.2, RFC 5041 sections 8.3 and 8.3.2: decisions of the privileged resource
//! manager.

use std::os::fd::AsFd;

use rnic_abi::abi::control::{
    DisconnectMode, ListKind, MrRequest, MrSource, ObjectRef, Refusal, ReplyBody, RequestBody, Rows,
};
use rnic_abi::types::{ChannelId, ListenerId, PdId, RequestId, SharedBufferId};
use rnic_client::{
    Access, Completion, CompletionStatus, Event, QpOptions, RecvRequest, Scope, SendRequest,
    SrqOptions,
};
use rnic_tests::raw::{Raw, memfd, qp_request};
use rnic_tests::{DEADLINE, Daemon, PATHS, READ_WRITE, engine};

use crate::pair::*;

//= RDMAP-8.1.2-0
//= RDMAP-8.1.2-1
//= DDP-8.3-6
//= DDP-8.3.1-0
//= DDP-8.3.2-0
//= DDP-8.3.2-1
#[test]
fn rdmap_8_1_2_0_objects_of_others_are_refused() {
    let daemon = Daemon::start(&engine(2, "direct"));
    let pair = Pair::new(&daemon);
    let ends = pair.connected();
    let region = page(&pair.holder, READ_WRITE);
    let mut stranger = Raw::open(daemon.socket());
    let pd = stranger.pd();
    let cq = stranger.cq(16);
    let qp = ends.0.id();
    let source = |buffer| MrSource::Shared { buffer, offset: 0 };
    let register = |pd, buffer, scope| {
        RequestBody::RegMr(MrRequest {
            pd,
            source: source(buffer),
            length: 64,
            iova: 0,
            access: Access::LOCAL_WRITE,
            scope,
        })
    };
    let memory = memfd(4096);
    let own = stranger.shared_buffer_of(memory.as_fd(), 4096);
    let ird = None;
    let ord = None;
    // Every request that names an object, with objects of another session.
    let requests = [
        RequestBody::ClosePd { pd: pair.holder.pd.id() },
        RequestBody::RemoveSharedBuffer { buffer: SharedBufferId(own.0 - 1) },
        register(pair.holder.pd.id(), own, Scope::Pd),
        register(pd, own, Scope::Qp(qp)),
        register(pd, SharedBufferId(own.0 - 1), Scope::Pd),
        RequestBody::DeregMr { mr: region.id() },
        RequestBody::ReregMr {
            mr: region.id(),
            to: MrRequest {
                pd,
                source: source(own),
                length: 64,
                iova: 0,
                access: Access::LOCAL_WRITE,
                scope: Scope::Pd,
            },
        },
        RequestBody::DestroyChannel { channel: ChannelId(1) },
        RequestBody::CreateCq { entries: 1, channel: Some(ChannelId(1)), context: 0 },
        RequestBody::ResizeCq { cq: pair.holder.cq.id(), entries: 32 },
        RequestBody::DestroyCq { cq: pair.holder.cq.id() },
        RequestBody::CreateQp(qp_request(pair.holder.pd.id(), cq)),
        RequestBody::CreateQp(qp_request(pd, pair.holder.cq.id())),
        RequestBody::QpToError { qp },
        RequestBody::DestroyQp { qp },
        RequestBody::QueryQp { qp },
        RequestBody::Listen { listener: ListenerId(1), backlog: 1 },
        RequestBody::CloseListener { listener: ListenerId(1) },
        RequestBody::Accept { request: RequestId(1), qp, ird, ord, private_data: Vec::new() },
        RequestBody::Reject { request: RequestId(1), private_data: Vec::new() },
        RequestBody::Disconnect { qp, mode: DisconnectMode::Abort },
        RequestBody::SetContext { object: ObjectRef::Listener(ListenerId(1)), context: 1 },
        RequestBody::SetContext { object: ObjectRef::Qp(qp), context: 1 },
        RequestBody::SetContext { object: ObjectRef::Cq(pair.holder.cq.id()), context: 1 },
        RequestBody::Connect {
            qp,
            peer: ([127, 0, 0, 1], 9).into(),
            local: None,
            ird,
            ord,
            private_data: Vec::new(),
        },
    ];
    for request in requests {
        let named = format!("{request:?}");
        let answer = stranger.call(request);
        assert!(matches!(answer, Err(Refusal::NoSuchObject { .. })), "{named}: {answer:?}");
    }
    let outcome = pair.write(&ends, region.remote().at(0), 64);
    assert_eq!(outcome, Outcome::Done, "the requests changed the owner's objects");
}

/// Repeats a request until it is refused. Returns the number of successes, and the refusal.
fn until_refused(raw: &mut Raw, body: impl Fn(u32) -> RequestBody) -> (u32, Refusal) {
    for n in 0..1000 {
        match raw.call(body(n)) {
            Ok(_) => {}
            Err(refusal) => return (n, refusal),
        }
    }
    panic!("never refused: {:?}", body(0));
}

fn refused_by(refusal: &Refusal, expected: &str) {
    match refusal {
        Refusal::Limit { key, .. } => assert_eq!(key, expected),
        other => panic!("{expected}: {other:?}"),
    }
}

//= RDMAP-8.1.2-2
//= DDP-8.3.2-2
#[test]
fn rdmap_8_1_2_2_scarce_resources_are_limited() {
    let config = "[limits.session]\npds = 3\nshared_buffers = 2\nshared_bytes = \"12KiB\"\nmrs = 4\n\
        channels = 2\ncqs = 3\nqps = 2\nlisteners = 2\n";
    let daemon = Daemon::start(config);
    let mut raw = Raw::open(daemon.socket());
    let pd = raw.pd();
    let cq = raw.cq(16);
    let memory = memfd(8192);
    let buffer = raw.shared_buffer_of(memory.as_fd(), 8192);
    let mut limited = |body: &dyn Fn(u32) -> RequestBody, granted: u32, key: &str| {
        let (n, refusal) = until_refused(&mut raw, body);
        refused_by(&refusal, &format!("limits.session.{key}"));
        assert_eq!(n, granted, "{key}");
    };
    limited(&|_| RequestBody::OpenPd { name: None }, 2, "pds");
    let register = |_| {
        RequestBody::RegMr(MrRequest {
            pd,
            source: MrSource::Shared { buffer, offset: 0 },
            length: 64,
            iova: 0,
            access: Access::LOCAL_WRITE,
            scope: Scope::Pd,
        })
    };
    limited(&register, 4, "mrs");
    limited(&|_| RequestBody::CreateChannel, 2, "channels");
    let cq_request = |_| RequestBody::CreateCq { entries: 16, channel: None, context: 0 };
    limited(&cq_request, 2, "cqs");
    limited(&|_| RequestBody::CreateQp(qp_request(pd, cq)), 2, "qps");
    let any_port =
        |_| RequestBody::Bind { address: ([127, 0, 0, 1], 0).into(), context: 0, v6_only: false };
    limited(&any_port, 2, "listeners");
    for (length, key) in [(8192, "shared_bytes"), (4096, ""), (4096, "shared_buffers")] {
        let memory = memfd(length);
        let body = RequestBody::AddSharedBuffer { length: length as u64 };
        match raw.call_with(body, &[memory.as_fd()]) {
            Ok(_) => assert_eq!(key, ""),
            Err(refusal) => refused_by(&refusal, &format!("limits.session.{key}")),
        }
    }
}

//= RDMAP-8.1.2-3
//= DDP-8.3.2-3
#[test]
fn rdmap_8_1_2_3_sessions_do_not_share_trust() {
    for path in PATHS {
        let daemon = Daemon::start(&engine(2, path));
        let pair = Pair::new(&daemon);
        let region = page(&pair.holder, READ_WRITE);
        // The same user and program, but the visitor may not use the holder's memory as its own ...
        let ends = pair.connected();
        let theft = [region.sge(0, 64)];
        pair.visitor.drain();
        ends.1.post_send(&[SendRequest::send(1, &theft)]).unwrap();
        assert_eq!(pair.visitor.completion().status, CompletionStatus::LocalProtection, "{path}");
        // ... nor over a loopback connection.
        let own = (pair.visitor.qp(), pair.visitor.qp());
        pair.visitor.join(&own.1, &own.0);
        pair.visitor.drain();
        let sink = page(&pair.visitor, Access::LOCAL_WRITE);
        let read = SendRequest::read(2, sink.sge(0, 64), region.remote().at(0));
        own.1.post_send(&[read]).unwrap();
        assert_eq!(pair.visitor.completion().status, CompletionStatus::RemoteAccess, "{path}");
        assert_eq!(terminated(&own.0), [0, 1, 3], "{path}");
        assert!(is_untouched(&sink), "{path}");
    }
}

//= RDMAP-8.1.2-4
//= DDP-8.3-4
//= DDP-8.3.2-4
#[test]
fn rdmap_8_1_2_4_registration_needs_access() {
    let daemon = Daemon::start(&engine(2, "direct"));
    // A read-only descriptor does not prove the right to write.
    let mut raw = Raw::open(daemon.socket());
    let memory = memfd(4096);
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&memory));
    let reader = std::fs::File::open(path).unwrap();
    let body = RequestBody::AddSharedBuffer { length: 4096 };
    let answer = raw.try_call(body.clone(), &[reader.as_fd()]);
    assert!(!matches!(answer, Some(Ok(_))), "{answer:?}");
    // A shared buffer or region that is larger than the memory is refused.
    let mut raw = Raw::open(daemon.socket());
    let longer = RequestBody::AddSharedBuffer { length: 8192 };
    let answer = raw.try_call(longer, &[memory.as_fd()]);
    assert!(!matches!(answer, Some(Ok(_))), "{answer:?}");
    let mut raw = Raw::open(daemon.socket());
    let pd = raw.pd();
    let buffer = raw.shared_buffer_of(memfd(4096).as_fd(), 4096);
    for (offset, length) in [(0, 4097), (4096, 1), (1, 4096), (u64::MAX, 2), (2, u64::MAX)] {
        let body = RequestBody::RegMr(MrRequest {
            pd,
            source: MrSource::Shared { buffer, offset },
            length,
            iova: 0,
            access: Access::LOCAL_WRITE,
            scope: Scope::Pd,
        });
        let answer = raw.call(body);
        assert!(matches!(answer, Err(Refusal::Invalid { .. })), "{offset} {length}: {answer:?}");
    }
}

//= RDMAP-8.1.2-5
//= RDMAP-8.1-0
#[test]
fn rdmap_8_1_2_5_cq_entries_are_limited() {
    let config = "[limits]\ncq_entries = 64\n[limits.session]\narena_bytes = \"1MiB\"\n";
    let daemon = Daemon::start(config);
    let mut raw = Raw::open(daemon.socket());
    let cq = |entries| RequestBody::CreateCq { entries, channel: None, context: 0 };
    let answer = raw.call(cq(65));
    let Err(Refusal::AboveMaximum { key, limit: 64, value: 65, .. }) = &answer else {
        panic!("{answer:?}")
    };
    assert_eq!(key, "limits.cq_entries");
    let (granted, refusal) = until_refused(&mut raw, |_| cq(64));
    refused_by(&refusal, "limits.session.arena_bytes");
    assert!((100..256).contains(&granted), "{granted} queues of 4 KiB in 1 MiB");
    // Each request reserves its entry before a worker takes it. If the queue is too small for all
    // of them, requests wait and none is lost.
    let other = Daemon::start(&engine(2, "direct"));
    let pair = Pair::new(&other);
    let small = pair.visitor.context.create_cq(4, None).unwrap();
    let sender = pair.visitor.pd.create_qp(&QpOptions::new(&small)).unwrap();
    let holder = pair.holder.qp();
    pair.holder.join(&sender, &holder);
    let region = page(&pair.holder, READ_WRITE);
    let write = SendRequest::write_inline(1, b"bytes", region.remote().at(0)).signaled();
    sender.post_send(&[write; 16]).unwrap();
    for n in 0..16 {
        let mut one = [Completion::default()];
        assert_eq!(small.wait(&mut one, Some(DEADLINE)).unwrap(), 1, "{n} of 16");
        one[0].ok().unwrap();
    }
}

//= RDMAP-8.1.2-7
#[test]
fn rdmap_8_1_2_7_read_queues_are_per_stream() {
    for path in PATHS {
        let config = format!("[engine]\nworkers = 1\nloopback = \"{path}\"\n[limits]\nird = 2\n");
        let daemon = Daemon::start(&config);
        let pair = Pair::new(&daemon);
        let greedy = pair.connected();
        let modest = pair.connected();
        let buffer = pair.holder.context.create_shared_buffer(8 << 20).unwrap();
        let big = pair.holder.pd.reg_mr(&buffer, .., READ_WRITE).unwrap();
        let sink = pair.visitor.context.create_shared_buffer(8 << 20).unwrap();
        let sink = pair.visitor.pd.reg_mr(&sink, .., Access::LOCAL_WRITE).unwrap();
        // Large Reads keep the queue of one stream full during the whole test.
        let large = SendRequest::read(7, sink.sge(0, 8 << 20), big.remote().at(0)).signaled();
        greedy.1.post_send(&[large; 32]).unwrap();
        let small = page(&pair.visitor, Access::LOCAL_WRITE);
        let other = page(&pair.holder, READ_WRITE);
        let read = SendRequest::read(8, small.sge(0, 8), other.remote().at(0)).signaled();
        // Large Reads may complete before this thread has posted the small one, so the best of
        // several tries measures the queue.
        let mut passed = [0; 8];
        for large_done in &mut passed {
            modest.1.post_send(&[read]).unwrap();
            while pair.visitor.completion().ok().unwrap().wr_id == 7 {
                *large_done += 1;
                greedy.1.post_send(&[large]).unwrap();
            }
        }
        let best = passed.iter().min().unwrap();
        assert!(*best < 16, "{path}: small reads waited for {passed:?} of 32 large ones");
        let row = greedy.0.query().unwrap();
        assert!(row.ird <= 2, "{path}: {row:?}");
    }
}

//= DDP-8.2-3
#[test]
fn ddp_8_2_3_stags_are_created_in_a_domain() {
    let daemon = Daemon::start(&engine(2, "direct"));
    let mut raw = Raw::open(daemon.socket());
    let memory = memfd(4096);
    let buffer = raw.shared_buffer_of(memory.as_fd(), 4096);
    let body = |pd| {
        RequestBody::RegMr(MrRequest {
            pd,
            source: MrSource::Shared { buffer, offset: 0 },
            length: 64,
            iova: 0,
            access: Access::LOCAL_WRITE,
            scope: Scope::Pd,
        })
    };
    let answer = raw.try_call(body(PdId(u32::MAX)), &[]);
    assert!(matches!(answer, Some(Err(Refusal::NoSuchObject { .. }))), "{answer:?}");
    let pd = raw.pd();
    let answer = raw.try_call(body(pd), &[]);
    let Some(Ok(ReplyBody::Mr { mr, .. })) = answer else { panic!("{answer:?}") };
    // A domain with objects cannot be closed.
    let answer = raw.try_call(RequestBody::ClosePd { pd }, &[]);
    assert!(matches!(answer, Some(Err(Refusal::InUse { .. }))), "{answer:?}");
    assert!(matches!(raw.call(RequestBody::DeregMr { mr }), Ok(ReplyBody::Done)));
    assert!(matches!(raw.call(RequestBody::ClosePd { pd }), Ok(ReplyBody::Done)));
}

#[test]
fn reregistration_keeps_the_stag_or_the_region() {
    let me = rustix::process::getuid().as_raw();
    let named = format!("[[pd]]\nname = \"one\"\nusers = [{me}]\nmrs = 1\n");
    let daemon = Daemon::start(&format!("{}{named}", engine(2, "direct")));
    let mut raw = Raw::open(daemon.socket());
    let memory = memfd(4096);
    let buffer = raw.shared_buffer_of(memory.as_fd(), 4096);
    let source = |offset| MrSource::Shared { buffer, offset };
    let access = Access::LOCAL_WRITE;
    let scope = Scope::Pd;
    let pd = raw.pd();
    let register =
        RequestBody::RegMr(MrRequest { pd, source: source(0), length: 64, iova: 0, access, scope });
    let answer = raw.call(register);
    let Ok(ReplyBody::Mr { mr, stag }) = answer else { panic!("{answer:?}") };
    let other = raw.pd();
    let again = |pd, offset, access| RequestBody::ReregMr {
        mr,
        to: MrRequest { pd, source: source(offset), length: 128, iova: 4096, access, scope },
    };
    let valid = again(other, 512, access | Access::REMOTE_READ);
    assert_eq!(raw.call(valid), Ok(ReplyBody::Mr { mr, stag }));
    // Outside the buffer, a right that requires another one, and a missing domain.
    for wrong in [
        again(pd, 4000, access),
        again(pd, 0, Access::REMOTE_WRITE),
        again(PdId(u32::MAX), 0, access),
    ] {
        let named = format!("{wrong:?}");
        assert!(raw.call(wrong).is_err(), "{named}");
        let answer = raw.call(RequestBody::List { what: ListKind::Mrs, from: 0 });
        let Ok(ReplyBody::Rows { rows: Rows::Mrs(rows), .. }) = answer else {
            panic!("{answer:?}")
        };
        let [row] = &rows[..] else { panic!("{rows:?}") };
        assert_eq!((row.mr, row.pd, row.iova, row.length), (mr, other, 4096, 128), "{named}");
        assert_eq!(row.access, access | Access::REMOTE_READ, "{named}");
    }
    // The region now belongs to the other domain only.
    assert_eq!(raw.call(RequestBody::ClosePd { pd }), Ok(ReplyBody::Done));
    assert!(raw.call(RequestBody::ClosePd { pd: other }).is_err());
    // Reregistration in a domain with a limit of one region counts the region once, and
    // reregistration in another domain releases it.
    let answer = raw.call(RequestBody::OpenPd { name: Some("one".to_owned()) });
    let Ok(ReplyBody::Pd { pd: small }) = answer else { panic!("{answer:?}") };
    for pd in [small, small, other, small] {
        assert_eq!(raw.call(again(pd, 0, access)), Ok(ReplyBody::Mr { mr, stag }));
    }
    assert_eq!(raw.call(RequestBody::DeregMr { mr }), Ok(ReplyBody::Done));
    assert!(matches!(raw.call(again(other, 0, access)), Err(Refusal::NoSuchObject { .. })));
}

//= RDMAP-8.1.2-6
//= DDP-8.3.2-5
#[test]
fn rdmap_8_1_2_6_users_and_sessions_have_quotas() {
    let config = "[control]\nmode = \"0666\"\n[limits]\nqps = 12\n[limits.user]\nqps = 8\n\
        [limits.session]\nqps = 6\n";
    let daemon = Daemon::start(config);
    // One session, and then all sessions of one user, reach a limit below the device's.
    let mut sessions = [(); 2].map(|()| Raw::open(daemon.socket()));
    let [first, second] = sessions.each_mut().map(|raw| {
        let pd = raw.pd();
        let cq = raw.cq(16);
        until_refused(raw, |_| RequestBody::CreateQp(qp_request(pd, cq)))
    });
    assert_eq!((first.0, second.0), (6, 2));
    refused_by(&first.1, "limits.session.qps");
    let uid = rustix::process::getuid().as_raw();
    refused_by(&second.1, &format!("limits.user.qps (user {uid})"));
    // Another user is unaffected.
    if uid != 0 {
        rnic_tests::omit("not root: no other user is tried");
        return;
    }
    let mut server = daemon.actor_as(61_002, &["serve"]);
    let address = server.line_after("listening on ");
    daemon.actor_as(61_003, &["traffic", &address, "1", "5"]).succeed();
    server.release();
    server.succeed();
}

//= RDMAP-8.1.2-8
//= DDP-8.3.2-5a
#[test]
fn rdmap_8_1_2_8_unfair_srq_use_is_detected() {
    for path in PATHS {
        let daemon = Daemon::start(&engine(2, path));
        let pair = Pair::new(&daemon);
        let options = SrqOptions { depth: 64, ..SrqOptions::default() };
        let srq = pair.holder.pd.create_srq(&options).unwrap();
        let qp = || {
            let options = QpOptions { srq: Some(&srq), ..QpOptions::new(&pair.holder.cq) };
            let ends = (pair.holder.pd.create_qp(&options).unwrap(), pair.visitor.qp());
            pair.holder.join(&ends.1, &ends.0);
            ends
        };
        let modest = qp();
        let greedy = qp();
        let send = |from: &rnic_client::Qp| {
            srq.post_recv(&[RecvRequest::new(1, &[])]).unwrap();
            from.post_send(&[SendRequest::send_inline(2, b"")]).unwrap();
            pair.holder.completion().ok().unwrap();
        };
        // Both QPs take turns, so neither is reported.
        for _ in 0..64 {
            send(&modest.1);
            send(&greedy.1);
        }
        assert_eq!(srq.query().unwrap().unfair, 0, "{path}");
        for _ in 0..64 {
            send(&greedy.1);
        }
        let named = loop {
            match pair.holder.context.next_event(Some(DEADLINE)).unwrap() {
                Some(Event::SrqUnfair { srq: of, qp, taken, of_last, .. }) if of == srq.id() => {
                    assert!(taken * 2 > of_last, "{taken} of {of_last}");
                    break qp;
                }
                Some(_) => {}
                None => panic!("{path}: no unfair QP was reported"),
            }
        };
        assert_eq!(named, greedy.0.id(), "{path}");
        // The QP is reported but not limited: limiting it is up to the application.
        send(&modest.1);
        send(&greedy.1);
    }
}
