//! Leases: ownership of the bytes over time.

use rnic_abi::abi::queue::Cqe;

use super::*;

/// Returns the daemon's mapping of the newest region's shared buffer.
fn theirs(r: &Rig) -> std::sync::Arc<rnic_abi::shm::Mapping> {
    let device = r.daemon.device();
    let last = device.shared_buffers.keys().max_by_key(|id| id.0).unwrap();
    device.shared_buffers[last].clone()
}

fn polled(r: &Rig) -> Option<Completion> {
    let mut one = [Completion::default()];
    (r.cq.poll(&mut one).unwrap() == 1).then_some(one[0])
}

/// Completes the first receive of the queue.
fn receive(r: &Rig, status: CompletionStatus) {
    let mut device = r.daemon.device();
    let rq = device.qps.get_mut(&r.qp.id()).unwrap().rq.as_mut().unwrap();
    let entry = rq.take().unwrap().unwrap();
    let cqe = Cqe::new(r.qp.id().0, entry.wr_id, CompletionOpcode::Receive, status);
    device.complete(r.cq.id(), &Cqe { byte_len: 5, ..cqe });
}

#[test]
fn posted_lease_returns_when_polled() {
    let r = rig();
    let region = r.pd.reg_local(1).unwrap();
    assert_eq!(region.len(), 4096);
    let mut lease = region.lease(100..200).unwrap();
    lease.copy_from_slice(&[7; 100]);
    let posted = r.qp.post_recv_leased(77, lease).unwrap();
    let taken = Error::Leased { offset: 199, length: 1 }.to_string();
    assert_eq!(region.lease(199..200).unwrap_err().to_string(), taken);
    theirs(&r).write(100, b"hello").unwrap();
    let posted = posted.take().unwrap_err();
    receive(&r, CompletionStatus::Success);
    // The completion is written but not polled.
    let posted = posted.take().unwrap_err();
    assert!(!posted.is_lost());
    let completion = polled(&r).unwrap();
    assert_eq!((completion.wr_id, completion.byte_len), (77, 5));
    let lease = posted.take().unwrap();
    assert_eq!((&lease[..6], lease.offset(), lease.len()), (&b"hello\x07"[..], 100, 100));
    drop(lease);
    assert!(region.lease(..).is_ok());
}

#[test]
fn requests_name_the_lease_and_always_complete() {
    let r = rig();
    let region = r.pd.reg_local(8192).unwrap();
    let to = RemoteAddr { addr: 9, rkey: Stag(5) };
    let leases = || [0..1, 1..3, 4096..8192].map(|range| region.lease(range).unwrap());
    let [a, b, c] = leases();
    let posted = [
        r.qp.post_send_leased(a.send(1).solicited()).unwrap(),
        r.qp.post_send_leased(b.write(2, to).fence()).unwrap(),
        r.qp.post_send_leased(c.read(3, to)).unwrap(),
    ];
    let mut device = r.daemon.device();
    let mut numbers = Vec::new();
    for (n, offset, length) in [(1, 0, 1), (2, 1, 2), (3, 4096, 4096)] {
        let (entry, sges) = device.qps.get_mut(&r.qp.id()).unwrap().next_request();
        let [sge] = sges[..] else { panic!("{sges:?}") };
        assert_eq!((sge.addr, sge.length), (offset, length), "request {n}");
        let flags = entry.header.flags;
        assert_eq!(flags & 2, 2, "signaled");
        numbers.push(entry.header.wr_id);
    }
    // Each completion must return its own lease, in any order.
    for number in numbers.iter().rev() {
        let status = CompletionStatus::WrFlush;
        let cqe = Cqe::new(r.qp.id().0, *number, CompletionOpcode::Send, status);
        device.complete(r.cq.id(), &cqe);
    }
    drop(device);
    let mut all = [Completion::default(); 4];
    assert_eq!(r.cq.poll(&mut all).unwrap(), 3);
    assert_eq!(all.map(|c| c.wr_id)[..3], [3, 2, 1]);
    let lengths = posted.map(|p| p.take().unwrap().len());
    assert_eq!(lengths, [1, 2, 4096]);
    assert_eq!(leases().map(|l| l.len()), lengths);
}

#[test]
fn failed_post_returns_the_lease() {
    let r = rig();
    let region = r.pd.reg_local(4096).unwrap();
    let mut posted = Vec::new();
    for n in 0..4 {
        posted.push(r.qp.post_recv_leased(n, region.lease(n..n + 1).unwrap()).unwrap());
    }
    let mut lease = region.lease(10..20).unwrap();
    lease.fill(3);
    let refused = r.qp.post_recv_leased(4, lease).unwrap_err();
    assert!(matches!(refused.error, Error::QueueFull { depth: 4 }), "{refused:?}");
    assert_eq!(&refused.lease[..], [3; 10]);
    for n in 0..4 {
        posted.push(r.qp.post_send_leased(region.lease(30 + n..31 + n).unwrap().send(n)).unwrap());
    }
    let refused = r.qp.post_send_leased(refused.lease.send(9)).unwrap_err();
    assert!(matches!(refused.error, Error::QueueFull { depth: 4 }), "{refused:?}");
    assert_eq!(&refused.lease[..], [3; 10]);
    let other = rig();
    let refused = other.qp.post_recv_leased(1, refused.lease).unwrap_err();
    assert!(matches!(refused.error, Error::ForeignObject { .. }), "{refused:?}");
    drop(refused);
    assert!(region.lease(10..20).is_ok());
    for (range, is) in [(0..0, "outside"), (4096..4097, "outside"), (3..5, "already leased")] {
        let refused = region.lease(range).unwrap_err().to_string();
        assert!(refused.contains(is), "{refused}");
    }
}

#[test]
fn forged_elements_do_not_reach_leased_memory() {
    let r = rig();
    let region = r.pd.reg_local(4096).unwrap();
    let stag = region.lease(..1).unwrap().element().lkey;
    let forged = [Sge { addr: 0, length: 1, lkey: stag }];
    let says = |e: PostError| match e.source {
        Error::LeasedMemory { lkey } => lkey == stag,
        _ => false,
    };
    assert!(r.qp.post_recv(&[RecvRequest::new(1, &forged)]).is_err_and(says));
    assert!(r.qp.post_send(&[SendRequest::send(1, &forged)]).is_err_and(says));
    let from = RemoteAddr { addr: 0, rkey: Stag(1) };
    assert!(r.qp.post_send(&[SendRequest::read(1, forged[0], from)]).is_err_and(says));
    let srq = r.pd.create_srq(&SrqOptions::default()).unwrap();
    assert!(srq.post_recv(&[RecvRequest::new(1, &forged)]).is_err_and(says));
    // Numbers that are reserved for loans.
    let reserved = |e: PostError| matches!(e.source, Error::ReservedWrId { .. });
    for wr_id in [0x1EA0_0000_0000_0000, 0x1EAF_FFFF_FFFF_FFFF] {
        assert!(r.qp.post_recv(&[RecvRequest::new(wr_id, &[])]).is_err_and(reserved));
        assert!(r.qp.post_send(&[SendRequest::send(wr_id, &[])]).is_err_and(reserved));
    }
    for wr_id in [0x1E9F_FFFF_FFFF_FFFF, 0x1EB0_0000_0000_0000, u64::MAX] {
        r.qp.post_recv(&[RecvRequest::new(wr_id, &[])]).unwrap();
    }
    // Dropping the region releases its key for others.
    drop(region);
    r.qp.post_send(&[SendRequest::send(1, &forged)]).unwrap();
}

#[test]
fn dropped_lease_returns_with_its_completion() {
    let r = rig();
    let region = r.pd.reg_local(4096).unwrap();
    drop(r.qp.post_recv_leased(1, region.lease(0..10).unwrap()).unwrap());
    assert!(region.lease(0..10).is_err(), "the daemon may still write");
    receive(&r, CompletionStatus::WrFlush);
    assert!(region.lease(0..10).is_err(), "its completion has not been polled");
    assert_eq!(polled(&r).unwrap().wr_id, 1);
    assert!(region.lease(0..10).is_ok());
    std::mem::forget(region.lease(20..30).unwrap());
    assert!(region.lease(20..30).is_err());
    std::mem::forget(r.qp.post_recv_leased(2, region.lease(40..50).unwrap()).unwrap());
    receive(&r, CompletionStatus::Success);
    assert!(polled(&r).is_some());
    assert!(region.lease(40..50).is_err(), "the `Posted` is forgotten");
}

#[test]
fn destroyed_qp_loses_uncompleted_leases() {
    let mut r = rig();
    let region = r.pd.reg_local(4096).unwrap();
    let early = r.qp.post_recv_leased(1, region.lease(0..10).unwrap()).unwrap();
    let late = r.qp.post_recv_leased(2, region.lease(10..20).unwrap()).unwrap();
    receive(&r, CompletionStatus::Success);
    let options = QpOptions { sq_depth: 4, rq_depth: 4, ..QpOptions::new(&r.cq) };
    let other = r.pd.create_qp(&options).unwrap();
    let elsewhere = other.post_recv_leased(3, region.lease(20..30).unwrap()).unwrap();
    drop(std::mem::replace(&mut r.qp, other));
    assert!(!late.is_lost(), "its completion may be in the CQ");
    assert_eq!(polled(&r).unwrap().wr_id, 1);
    assert_eq!(early.take().unwrap().offset(), 0);
    assert!(!late.is_lost());
    assert_eq!(polled(&r), None);
    assert!(late.is_lost() && late.take().is_err());
    assert!(region.lease(10..20).is_err(), "the daemon may have written there");
    let elsewhere = elsewhere.take().unwrap_err();
    receive(&r, CompletionStatus::Success);
    assert_eq!(polled(&r).unwrap().wr_id, 3);
    assert!(elsewhere.take().is_ok());
}

#[test]
fn completion_during_take_is_found() {
    let r = rig();
    let region = r.pd.reg_local(4096).unwrap();
    let (send, given) = std::sync::mpsc::channel::<Posted>();
    let (back, leases) = std::sync::mpsc::channel();
    let looker = std::thread::spawn(move || {
        for posted in given {
            let mut posted = Some(posted);
            let lease = until("lease", || match posted.take()?.take() {
                Ok(lease) => Some(lease),
                Err(not_yet) => {
                    posted = Some(not_yet);
                    None
                }
            });
            back.send(lease.len()).unwrap();
        }
    });
    for round in 0..5000 {
        send.send(r.qp.post_recv_leased(round, region.lease(..).unwrap()).unwrap()).unwrap();
        receive(&r, CompletionStatus::Success);
        assert_eq!(polled(&r).unwrap().wr_id, round);
        assert_eq!(leases.recv_timeout(PATIENCE), Ok(4096), "round {round}");
        // The looker drops the lease after it has sent the length.
        until("region to be free", || region.lease(..).ok());
    }
    drop(send);
    looker.join().unwrap();
}
