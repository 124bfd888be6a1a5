//! Calls of `rnic-client` for libraries and administrators, which few programs use.

use std::os::fd::AsFd;

use rnic_client::{
    Access, Arm, CompletionChannel, CompletionOpcode, Context, DisconnectReason, Error, Features,
    QpOptions, QpType, RecvRequest, Scope, SendRequest, TerminateOrigin, WindowKind, Wiring,
};
use rnic_tests::client::READ_WRITE;
use rnic_tests::{Client, DEADLINE, Daemon};

fn daemon() -> Daemon {
    Daemon::start("")
}

#[test]
fn a_finished_posting_publishes_its_requests() {
    let daemon = daemon();
    let client = Client::new(&daemon);
    let [a, b] = client.pair();
    b.post_recv(&[RecvRequest::new(1, &[]), RecvRequest::new(2, &[])]).unwrap();
    let mut posting = a.posting().unwrap();
    for wr_id in [3, 4] {
        posting.push(&SendRequest::send_inline(wr_id, b"").signaled()).unwrap();
    }
    let too_long = vec![0; 1 << 20];
    let refused = posting.push(&SendRequest::send_inline(5, &too_long)).unwrap_err();
    assert!(matches!(refused, Error::InlineTooLong { .. }), "{refused}");
    posting.finish().unwrap();
    let mut done: Vec<u64> = client.successes(4).iter().map(|c| c.wr_id).collect();
    done.sort_unstable();
    assert_eq!(done, [1, 2, 3, 4]);
    // Dropping a posting finishes it, too.
    b.post_recv(&[RecvRequest::new(6, &[])]).unwrap();
    let mut posting = a.posting().unwrap();
    posting.push(&SendRequest::send_inline(7, b"")).unwrap();
    drop(posting);
    client.completes(6, CompletionOpcode::Receive);
}

#[test]
fn inline_requests_carry_immediates_and_stags() {
    let daemon = daemon();
    let client = Client::new(&daemon);
    let [a, b] = client.pair();
    // A peer can invalidate only regions of its own connection.
    let region = client.region_for(Scope::Qp(b.id()), 4096, READ_WRITE);
    b.post_recv(&[RecvRequest::new(1, &[]), RecvRequest::new(2, &[])]).unwrap();
    let to = region.remote().at(8);
    a.post_send(&[SendRequest::write_inline_with_imm(3, b"written", to, *b"8 bytes.")]).unwrap();
    let received = client.success();
    assert_eq!((received.wr_id, received.immediate), (1, Some(*b"8 bytes.")));
    let mut bytes = [0; 7];
    region.read_at(8, &mut bytes).unwrap();
    assert_eq!(&bytes, b"written");
    a.post_send(&[SendRequest::send_invalidate_inline(4, b"", region.rkey())]).unwrap();
    let received = client.success();
    assert_eq!((received.wr_id, received.invalidated), (2, Some(region.rkey())));
    // The invalidated STag accepts no more data.
    a.post_send(&[SendRequest::write_inline(5, b"late", to)]).unwrap();
    let end = b.wait_disconnected(Some(DEADLINE)).unwrap();
    assert!(matches!(end, DisconnectReason::Terminate { .. }), "{end:?}");
}

#[test]
fn a_program_posts_its_own_bind() {
    let daemon = daemon();
    let client = Client::new(&daemon);
    let [a, b] = client.pair();
    let region = client.region(4096, Access::LOCAL_WRITE | Access::MW_BIND);
    let window = client.pd.alloc_window(WindowKind::Type1).unwrap();
    let present = window.rkey();
    let next = rnic_client::Stag(present.0 ^ 1);
    let address = region.iova() + 16;
    let rights = Access::REMOTE_WRITE;
    let bind = SendRequest::bind_range(1, present, next, region.lkey(), address, 8, rights);
    b.post_send(&[bind.signaled()]).unwrap();
    client.completes(1, CompletionOpcode::BindMw);
    let to = rnic_client::RemoteAddr { rkey: next, addr: address };
    b.post_recv(&[RecvRequest::new(2, &[])]).unwrap();
    a.post_send(&[SendRequest::write_inline_with_imm(3, b"8 bytes.", to, [0; 8])]).unwrap();
    client.completes(2, CompletionOpcode::Receive);
    let mut bytes = [0; 8];
    region.read_at(16, &mut bytes).unwrap();
    assert_eq!(&bytes, b"8 bytes.");
}

#[test]
fn a_program_reads_the_records_of_its_channel() {
    let daemon = daemon();
    let client = Client::new(&daemon);
    let channel = client.context.create_completion_channel().unwrap();
    let cq = client.context.create_cq(4, Some(&channel)).unwrap();
    let active = client.pd.create_qp(&QpOptions::new(&cq)).unwrap();
    let passive = client.qp();
    client.join(&active, &passive);
    cq.arm(Arm::Next).unwrap();
    passive.post_recv(&[RecvRequest::new(1, &[])]).unwrap();
    active.post_send(&[SendRequest::send_inline(2, b"").signaled()]).unwrap();
    rustix::event::poll(
        &mut [rustix::event::PollFd::new(&channel, rustix::event::PollFlags::IN)],
        Some(&rustix::event::Timespec { tv_sec: DEADLINE.as_secs() as i64, tv_nsec: 0 }),
    )
    .unwrap();
    let mut record = [0; CompletionChannel::RECORD_LEN];
    let n = rustix::io::read(channel.as_fd(), &mut record).unwrap();
    assert_eq!(CompletionChannel::parse_record(&record[..n]), Some(cq.id()));
    assert_eq!(CompletionChannel::parse_record(&record[..n - 1]), None);
}

#[test]
fn a_context_detects_the_end_of_its_session() {
    let daemon = daemon();
    let context = Context::open_at(daemon.socket()).unwrap();
    assert!(context.is_alive());
    assert_eq!(context.features(), Features::DIRECT_PATH);
    let over_tcp = Daemon::start("[engine]\nloopback = \"tcp\"\n");
    let other = Context::open_at(over_tcp.socket()).unwrap();
    assert_eq!(other.features(), Features::empty());
    daemon.kill();
    assert!(!context.is_alive());
}

#[test]
fn end_events_wakes_a_waiting_thread() {
    let daemon = daemon();
    let context = Context::open_at(daemon.socket()).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| context.next_event(Some(DEADLINE)));
        context.end_events();
        assert!(matches!(waiter.join().unwrap(), Err(Error::DaemonGone)));
    });
}

#[test]
fn an_administrator_disconnects_by_number() {
    let daemon = daemon();
    let client = Client::new(&daemon);
    let [a, b] = client.pair();
    b.post_recv(&[RecvRequest::new(1, &[])]).unwrap();
    a.post_send(&[SendRequest::send_inline(2, b"")]).unwrap();
    client.completes(1, CompletionOpcode::Receive);
    let admin = Context::open_at(daemon.socket()).unwrap();
    admin.admin_disconnect(a.id()).unwrap();
    let end = a.wait_disconnected(Some(DEADLINE)).unwrap();
    let is_local =
        matches!(end, DisconnectReason::Terminate { origin: TerminateOrigin::Local, .. });
    assert!(is_local, "{end:?}");
    let unknown = admin.admin_disconnect(rnic_client::QpId(0xFF_FFFF)).unwrap_err();
    assert!(matches!(unknown, Error::Refused { .. }), "{unknown}");
}

#[test]
fn the_rnr_timer_of_an_rc_qp_changes() {
    let daemon = daemon();
    let client = Client::new(&daemon);
    let qp = client.qp_of(QpType::Rc);
    assert!(matches!(qp.set_min_rnr_timer(1), Err(Error::Refused { .. })), "it is Idle");
    let gids = client.context.gids().unwrap();
    let gid = gids.first().expect("a GID").gid;
    let wiring = Wiring {
        local: gid,
        remote: gid,
        remote_qp: qp.id(),
        rq_psn: 7,
        path_mtu: 1024,
        min_rnr_timer: 12,
        ird: 0,
        rights: Access::empty(),
    };
    qp.to_rtr(&wiring).unwrap();
    qp.set_min_rnr_timer(31).unwrap();
    let refused = qp.set_min_rnr_timer(32).unwrap_err();
    assert!(refused.to_string().contains("min_rnr_timer"), "{refused}");
}
