//! Hello, requests and replies, the end of the daemon, and fork.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use rnic_abi::abi::ABI_VERSION;
use rnic_abi::abi::control::{Event, HelloStatus, MrRequest, MrSource, RequestBody};
use rnic_abi::shm::Mapping;
use rnic_abi::shm::owner::Owner;

use super::{PATIENCE, rig};
use crate::cq::EMPTY_POLLS_PER_CHECK;
use crate::fake::{Answer, FakeDaemon};
use crate::*;

fn limit() -> Refusal {
    Refusal::Limit { key: "limits.mrs".into(), limit: 64, used: 64, wanted: 1 }
}

#[test]
fn abi_mismatch_names_both_versions() {
    let daemon = FakeDaemon::with_hello_reply(HelloStatus::Version, 9);
    let error = Context::open_with(daemon.options()).err().unwrap();
    assert!(matches!(
        error,
        Error::NotAdmitted { why: AdmissionError::Version { daemon: 9, ours: ABI_VERSION }, .. }
    ));
    assert!(error.to_string().contains("it uses ABI version 9"));
}

#[test]
fn welcome_with_other_version_is_refused() {
    let daemon = FakeDaemon::with_hello_reply(HelloStatus::Ok, ABI_VERSION + 1);
    let error = Context::open_with(daemon.options()).err().unwrap();
    assert!(matches!(error, Error::NotAdmitted { why: AdmissionError::Version { .. }, .. }));
}

#[test]
fn admission_reason_is_reported() {
    for (status, end) in [
        (HelloStatus::SessionLimit, "its limit on sessions (limits.sessions) is reached"),
        (
            HelloStatus::UserSessions,
            "its limit on sessions of this user (limits.user.sessions) is reached",
        ),
        (
            HelloStatus::Draining,
            "it is draining: it accepts no new sessions until `rnicctl drain off`",
        ),
        (
            HelloStatus::TooManyUnauthenticated,
            "too many unauthenticated connections from this user; try again",
        ),
    ] {
        let daemon = FakeDaemon::with_hello_reply(status, ABI_VERSION);
        let error = Context::open_with(daemon.options()).err().unwrap();
        assert_eq!(error.fault(), Fault::Refusal);
        assert!(error.to_string().ends_with(end), "{error}");
    }
}

#[test]
fn error_lists_all_tried_sockets() {
    let error = Context::open_at("/nonexistent/rnicd.sock").err().unwrap();
    assert_eq!(error.fault(), Fault::Daemon);
    assert!(error.to_string().starts_with("no RNIC daemon: /nonexistent/rnicd.sock: "), "{error}");
}

/// A daemon may be running, so do not advise starting one.
#[test]
fn denied_access_advises_no_new_daemon() {
    let tried = |kinds: &[io::ErrorKind]| {
        let tried = kinds.iter().map(|kind| ("/run/s".into(), (*kind).into())).collect();
        Error::NoDaemon { tried }.to_string()
    };
    let denied = tried(&[io::ErrorKind::NotFound, io::ErrorKind::PermissionDenied]);
    assert!(denied.starts_with("no access to the RNIC daemon: /run/s: permission"), "{denied}");
    assert!(!denied.contains("rnicd run"), "{denied}");
    assert!(tried(&[io::ErrorKind::NotFound]).contains("rnicd run"));
}

#[test]
fn refusal_names_the_limit() {
    let r = rig();
    let buffer = r.context.create_shared_buffer(1).unwrap();
    r.daemon.answer_next(Answer::Refuse(limit()));
    let error = r.pd.reg_mr(&buffer, .., Access::LOCAL_WRITE).err().unwrap();
    assert_eq!(error.to_string(), "refused: limits.mrs = 64 reached (asked for 1 more, 64 in use)");
    assert!(r.pd.reg_mr(&buffer, .., Access::LOCAL_WRITE).is_ok());
}

#[test]
fn daemon_death_mid_request_ends_session() {
    let r = rig();
    r.daemon.answer_next(Answer::HangUp);
    assert!(matches!(r.context.status(), Err(Error::DaemonGone)));
    assert!(matches!(r.context.status(), Err(Error::DaemonGone)));
    let error = r.qp.post_send(&[SendRequest::send_inline(1, b"x")]).unwrap_err();
    assert!(matches!(error, PostError { posted: 0, source: Error::DaemonGone }));
    let polled = r.cq.poll(&mut [Completion::default()]);
    assert!(matches!(polled, Err(Error::DaemonGone)));
    assert!(matches!(r.context.next_event(None), Err(Error::DaemonGone)));
}

#[test]
fn polling_detects_daemon_gone() {
    let r = rig();
    r.daemon.hang_up();
    let mut completions = [Completion::default(); 4];
    // Counted, not timed: on a busy machine a yield between two polls can take 20 ms.
    let error = (0..EMPTY_POLLS_PER_CHECK).find_map(|_| r.cq.poll(&mut completions).err());
    assert!(matches!(error, Some(Error::DaemonGone)), "{error:?}");
}

#[test]
fn missing_reply_ends_session() {
    let daemon = FakeDaemon::start();
    let reply_timeout = Duration::from_millis(50);
    let context = Context::open_with(OpenOptions { reply_timeout, ..daemon.options() }).unwrap();
    daemon.answer_next(Answer::Silence);
    assert!(matches!(context.status(), Err(Error::TimedOut { .. })));
    assert!(matches!(context.status(), Err(Error::DaemonGone)));
}

#[test]
fn invalid_replies_are_protocol_errors() {
    for answer in [Answer::Bytes(vec![0xFF; 40]), Answer::WrongId] {
        let daemon = FakeDaemon::start();
        let context = daemon.open();
        daemon.answer_next(answer);
        let error = context.status().err().unwrap();
        assert!(matches!(error, Error::Protocol(_)), "{error}");
        assert!(matches!(context.status(), Err(Error::DaemonGone)));
    }
}

#[test]
fn reply_of_wrong_type_is_protocol_error() {
    let daemon = FakeDaemon::start();
    let context = daemon.open();
    // The fake replies `Done` to unknown requests.
    assert!(matches!(context.status(), Err(Error::Protocol(_))));
    assert!(context.open_pd(None).is_ok());
}

#[test]
fn forked_child_is_refused() {
    let daemon = FakeDaemon::start();
    let parent = std::process::id() + 1;
    let context = Context::open_as(daemon.options(), Owner::by_id(parent)).unwrap();
    let error = context.open_pd(None).err().unwrap();
    assert!(matches!(error, Error::AfterFork { owner } if owner == parent));
    assert!(matches!(context.create_shared_buffer(1).err(), Some(Error::AfterFork { .. })));
    let timeout = Some(Duration::ZERO);
    assert!(matches!(context.next_event(timeout), Err(Error::AfterFork { .. })));
    assert!(daemon.device().requests.is_empty());
}

#[test]
fn descriptors_are_closed_on_exec() {
    let r = rig();
    let channel = r.context.create_completion_channel().unwrap();
    for fd in [r.context.as_fd(), channel.as_fd()] {
        let flags = rustix::io::fcntl_getfd(fd).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    }
}

#[test]
fn shared_buffer_is_shared_whole_pages() {
    let r = rig();
    let buffer = r.context.create_shared_buffer(5000).unwrap();
    assert_eq!(buffer.len(), 8192);
    let region = r.pd.reg_mr(&buffer, 4096..4196, Access::LOCAL_WRITE).unwrap();
    region.write_at(98, b"ab").unwrap();
    let theirs = r.daemon.device().shared_buffers[&buffer.id()].clone();
    let mut bytes = [0; 2];
    theirs.read(4096 + 98, &mut bytes).unwrap();
    assert_eq!(&bytes, b"ab");
    theirs.write(4096, &7u64.to_ne_bytes()).unwrap();
    assert_eq!(region.load_u64(0).unwrap(), 7);
    assert_eq!(region.fetch_add_u64(0, 3).unwrap(), 7);
    region.store_u64(8, 5).unwrap();
    region.fill(16, 1, 9).unwrap();
    let mut bytes = [0; 17];
    region.read_at(0, &mut bytes).unwrap();
    assert_eq!((bytes[0], bytes[8], bytes[16]), (10, 5, 9));
}

#[test]
fn access_outside_region_is_refused() {
    let r = rig();
    let buffer = r.context.create_shared_buffer(4096).unwrap();
    let region = r.pd.reg_mr(&buffer, 4..100, Access::LOCAL_WRITE).unwrap();
    let mut byte = [0];
    assert!(region.read_at(95, &mut byte).is_ok());
    for offset in [96, 4095, u64::MAX] {
        let error = region.read_at(offset, &mut byte).unwrap_err();
        assert!(matches!(error, Error::OutOfRange { size: 96, .. }), "{error}");
        assert!(region.write_at(offset, &byte).is_err());
        assert!(region.fill(offset, 1, 0).is_err());
        assert!(region.load_u64(offset).is_err());
    }
    assert!(matches!(region.load_u64(0), Err(Error::Misaligned { offset: 4 })));
    assert!(region.load_u64(4).is_ok());
    assert!(matches!(
        r.pd.reg_mr(&buffer, 0..4097, Access::LOCAL_WRITE).err(),
        Some(Error::OutOfRange { offset: 0, length: 4097, size: 4096 })
    ));
}

#[test]
fn regions_use_the_requested_iova() {
    let r = rig();
    let buffer = r.context.create_shared_buffer(4096).unwrap();
    let rights = Access::LOCAL_WRITE | Access::REMOTE_READ;
    let plain = r.pd.reg_mr(&buffer, 64.., rights).unwrap();
    let zero = r.pd.reg_mr(&buffer, 64.., rights | Access::ZERO_BASED).unwrap();
    let options = MrOptions { iova: Some(1 << 40), scope: Scope::Qp(r.qp.id()), access: rights };
    let chosen = r.pd.reg_mr_with(&buffer, 64.., &options).unwrap();
    assert_eq!(plain.iova(), buffer.inner.mapping.address() + 64);
    assert_eq!((zero.iova(), chosen.iova(), plain.len()), (0, 1 << 40, 4032));
    assert_eq!(chosen.sge(8, 16), Sge { addr: (1 << 40) + 8, length: 16, lkey: chosen.lkey().0 });
    assert_eq!(chosen.remote().at(8), RemoteAddr { addr: (1 << 40) + 8, rkey: chosen.rkey() });
    let device = r.daemon.device();
    let last = device.requests.last().unwrap();
    let RequestBody::RegMr(MrRequest {
        source, length: 4032, iova: 0x100_0000_0000, scope, ..
    }) = last
    else {
        panic!("{last:?}");
    };
    assert_eq!(*source, MrSource::Shared { buffer: buffer.id(), offset: 64 });
    assert_eq!(*scope, Scope::Qp(r.qp.id()));
    drop(device);
}

#[test]
fn shared_buffer_checks_limit_before_allocating() {
    let r = rig();
    let limit = Refusal::Limit { key: "k".into(), limit: 1, used: 0, wanted: 4096 };
    r.daemon.device().requests.clear();
    r.daemon.answer_next(Answer::Refuse(limit.clone()));
    let refused = r.context.create_shared_buffer(1).unwrap_err();
    assert_eq!(refused.refusal(), Some(&limit));
    let asked = [RequestBody::ReserveSharedBuffer { length: 4096 }];
    assert_eq!(r.daemon.device().requests, asked, "no memory was allocated");

    // More than any machine has: nothing is allocated, and the reservation is removed.
    r.daemon.device().requests.clear();
    let refused = r.context.create_shared_buffer(1 << 60).unwrap_err();
    let Error::NotEnoughMemory { wanted: 0x1000_0000_0000_0000, .. } = refused else {
        panic!("{refused:?}");
    };
    let requests = r.daemon.device().requests.clone();
    let [RequestBody::ReserveSharedBuffer { .. }, RequestBody::RemoveSharedBuffer { .. }] =
        requests[..]
    else {
        panic!("{requests:?}");
    };
}

#[test]
fn a_queue_in_a_new_arena_is_found() {
    let r = rig();
    r.daemon.device().next_in_new_arena = true;
    let qp = r.pd.create_qp(&QpOptions::new(&r.cq)).unwrap();
    qp.post_send(&[SendRequest::send_inline(5, b"hello")]).unwrap();
    let mut device = r.daemon.device();
    let fake = device.qps.get_mut(&qp.id()).unwrap();
    assert_eq!(fake.next_request().0.header.wr_id, 5);
    drop(device);
}

#[test]
fn objects_are_destroyed_in_valid_order() {
    let mut r = rig();
    let buffer = r.context.create_shared_buffer(1).unwrap();
    let region = r.pd.reg_mr(&buffer, .., Access::LOCAL_WRITE).unwrap();
    let listener = r.context.bind("127.0.0.1:0").unwrap();
    assert_eq!(listener.local_addr().port(), 7471);
    r.daemon.device().requests.clear();
    // Parents first: their users keep them alive.
    drop((r.context, r.pd, r.cq, buffer));
    assert!(r.daemon.device().requests.is_empty());
    drop((r.qp, region, listener));
    r.daemon.join();
    use RequestBody::*;
    let place =
        |is: &dyn Fn(&RequestBody) -> bool| r.daemon.device().requests.iter().position(is).unwrap();
    let qp = place(&|r| matches!(r, DestroyQp { .. }));
    let cq = place(&|r| matches!(r, DestroyCq { .. }));
    let channel = place(&|r| matches!(r, DestroyChannel { .. }));
    let mr = place(&|r| matches!(r, DeregMr { .. }));
    let buffer = place(&|r| matches!(r, RemoveSharedBuffer { .. }));
    let pd = place(&|r| matches!(r, ClosePd { .. }));
    place(&|r| matches!(r, CloseListener { .. }));
    assert!(qp < cq && cq < channel && mr < buffer && qp < pd && mr < pd);
    assert_eq!(r.daemon.device().requests.len(), 7);
}

#[test]
fn memory_attaches_once_when_accepted() {
    let r = rig();
    let memory: &Mapping = Box::leak(Box::new(Mapping::from_vec(vec![0; 9]).unwrap()));
    let range = ProgramRange::of(memory);
    let register = || r.pd.reg_program_memory(&range, &MrOptions::default());
    r.daemon.answer_next(Answer::Refuse(limit()));
    assert!(register().is_err());
    for _ in 0..3 {
        let region = register().unwrap();
        assert_eq!((region.iova(), region.len()), (memory.address(), 9));
    }
    let device = r.daemon.device();
    let asked = device.requests.iter().filter(|b| matches!(b, RequestBody::AttachMemory)).count();
    assert_eq!(asked, 2);
    drop(device);
}

#[test]
fn deregistration_is_sent_once() {
    let r = rig();
    let buffer = r.context.create_shared_buffer(1).unwrap();
    let region = r.pd.reg_mr(&buffer, .., Access::LOCAL_WRITE).unwrap();
    region.deregister().unwrap();
    let device = r.daemon.device();
    let times = device.requests.iter().filter(|r| matches!(r, RequestBody::DeregMr { .. }));
    assert_eq!(times.count(), 1);
    drop(device);
}

#[test]
fn objects_of_two_contexts_do_not_mix() {
    let a = rig();
    let b = rig();
    let buffer = b.context.create_shared_buffer(1).unwrap();
    let channel = b.context.create_completion_channel().unwrap();
    let foreign = |e: Option<Error>| assert!(matches!(e, Some(Error::ForeignObject { .. })));
    foreign(a.pd.reg_mr(&buffer, .., Access::LOCAL_WRITE).err());
    foreign(a.context.create_cq(1, Some(&channel)).err());
    foreign(a.pd.create_qp(&QpOptions::new(&b.cq)).err());
}

#[test]
fn unclaimed_events_reach_next_event() {
    let r = rig();
    let error = Event::CqError { cq: r.cq.id(), context: 3 };
    r.daemon.event(&error);
    assert_eq!(r.context.next_event(Some(PATIENCE)).unwrap(), Some(error));
    assert_eq!(r.context.next_event(Some(Duration::ZERO)).unwrap(), None);
}
