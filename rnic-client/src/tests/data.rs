//! Posting and polling through real rings, and the resulting doorbells.

use rnic_abi::abi::control::RequestBody;
use rnic_abi::abi::queue::{Cqe, SendFlags, SendOpcode};

use super::{Rig, rig};
use crate::*;

const FAR: RemoteAddr = RemoteAddr { addr: 0x1000, rkey: Stag(0x77) };

/// Binds the QP to worker 1, which polls or sleeps.
fn bind(r: &Rig, sleeps: bool) {
    let mut device = r.daemon.device();
    device.qps[&r.qp.id()].sq.queue().set_worker(1);
    assert!(device.rung(1).is_empty());
    if sleeps {
        assert!(device.scanners[1].prepare_sleep());
    }
}

fn sge(n: u64) -> Sge {
    Sge { addr: n, length: 10, lkey: 3 }
}

#[test]
fn all_requests_arrive_intact() {
    let r = rig();
    let pair = [sge(1), sge(2)];
    r.qp.post_send(&[
        SendRequest::send(1, &pair).signaled().solicited(),
        SendRequest::write_inline(2, b"0123456789", FAR),
        SendRequest::read(3, sge(9), FAR).fence(),
        SendRequest::send_invalidate(4, &[], Stag(0x55)),
    ])
    .unwrap();
    let mut device = r.daemon.device();
    let qp = device.qps.get_mut(&r.qp.id()).unwrap();
    let (send, sges) = qp.next_request();
    assert_eq!((send.header.opcode, send.header.wr_id), (SendOpcode::Send as u8, 1));
    assert_eq!(send.header.flags, (SendFlags::SIGNALED | SendFlags::SOLICITED).bits());
    assert_eq!(sges.as_slice(), pair);
    let (write, _) = qp.next_request();
    assert_eq!((write.header.opcode, write.header.inline_len), (SendOpcode::Write as u8, 10));
    assert_eq!((write.header.remote_addr, write.header.rkey), (FAR.addr, FAR.rkey.0));
    let (read, sges) = qp.next_request();
    assert_eq!((read.header.opcode, read.header.flags), (4, SendFlags::FENCE.bits()));
    assert_eq!(sges.as_slice(), [sge(9)]);
    let (invalidate, _) = qp.next_request();
    assert_eq!((invalidate.header.opcode, invalidate.header.inv_rkey), (9, 0x55));
    assert_eq!(invalidate.header.num_sge, 0);
    let mut bytes = [0; 10];
    qp.sq.mapping().read(write.inline_at, &mut bytes).unwrap();
    assert_eq!(&bytes, b"0123456789");
    qp.sq.retire(4);
    drop(device);
    r.qp.post_send(&[
        SendRequest::write(5, &pair, FAR),
        SendRequest::read_invalidate(6, sge(9), FAR),
        SendRequest::local_invalidate(7, Stag(0x66)),
    ])
    .unwrap();
    let mut device = r.daemon.device();
    let qp = device.qps.get_mut(&r.qp.id()).unwrap();
    let mut next = || qp.next_request().0.header;
    assert_eq!(next().opcode, SendOpcode::Write as u8);
    let read = next();
    assert_eq!((read.opcode, read.inv_rkey), (SendOpcode::ReadInvalidate as u8, sge(9).lkey));
    let local = next();
    assert_eq!((local.opcode, local.inv_rkey), (SendOpcode::LocalInvalidate as u8, 0x66));
    drop(device);
}

#[test]
fn receives_arrive_intact() {
    let r = rig();
    let pair = [sge(1), sge(2)];
    r.qp.post_recv(&[RecvRequest::new(1, &pair), RecvRequest::new(2, &[])]).unwrap();
    let mut device = r.daemon.device();
    let rq = device.qps.get_mut(&r.qp.id()).unwrap().rq.as_mut().unwrap();
    let first = rq.take().unwrap().unwrap();
    assert_eq!((first.wr_id, first.sges.as_slice()), (1, &pair[..]));
    let second = rq.take().unwrap().unwrap();
    assert_eq!((second.wr_id, second.sges.as_slice().len()), (2, 0));
    drop(device);
}

#[test]
fn unbound_qp_rings_no_doorbell() {
    let r = rig();
    for worker in 0..crate::fake::WORKERS {
        assert!(r.daemon.device().scanners[worker as usize].prepare_sleep());
    }
    r.qp.post_send(&[SendRequest::send_inline(1, b"x")]).unwrap();
    r.qp.post_recv(&[RecvRequest::new(1, &[])]).unwrap();
    let mut device = r.daemon.device();
    for worker in 0..crate::fake::WORKERS {
        assert_eq!((device.rung(worker), device.wakes(worker)), (vec![], 0));
    }
    drop(device);
}

#[test]
fn polling_worker_is_rung_without_syscall() {
    let r = rig();
    bind(&r, false);
    r.qp.post_send(&[SendRequest::send_inline(1, b"x")]).unwrap();
    let mut device = r.daemon.device();
    let doorbell = device.qps[&r.qp.id()].sq.queue().doorbell();
    assert_eq!(device.rung(1), [doorbell]);
    assert_eq!((device.wakes(1), device.wakes(0), device.rung(0)), (0, 0, vec![]));
    drop(device);
}

#[test]
fn sleeping_worker_is_woken_once() {
    let r = rig();
    bind(&r, true);
    let batch = [SendRequest::send_inline(1, b"x"), SendRequest::send_inline(2, b"y")];
    r.qp.post_send(&batch).unwrap();
    r.qp.post_send(&batch).unwrap();
    let mut device = r.daemon.device();
    assert_eq!(device.wakes(1), 1);
    assert_eq!(device.rung(1).len(), 1);
    drop(device);
}

#[test]
fn empty_batch_rings_no_doorbell() {
    let r = rig();
    bind(&r, true);
    r.qp.post_send(&[]).unwrap();
    r.qp.post_recv(&[]).unwrap();
    let mut device = r.daemon.device();
    assert_eq!((device.wakes(1), device.rung(1)), (0, vec![]));
    drop(device);
}

#[test]
fn receives_ring_only_waiting_workers() {
    let r = rig();
    bind(&r, true);
    r.qp.post_recv(&[RecvRequest::new(1, &[])]).unwrap();
    assert_eq!(r.daemon.device().wakes(1), 0);
    let id = r.qp.id();
    r.daemon.device().qps.get_mut(&id).unwrap().rq.as_mut().unwrap().set_waits(1);
    r.qp.post_recv(&[RecvRequest::new(2, &[])]).unwrap();
    let mut device = r.daemon.device();
    assert_eq!((device.wakes(1), device.rung(1).len()), (1, 1));
    drop(device);
}

#[test]
fn srq_receives_ring_all_waiting_workers() {
    let r = rig();
    let srq =
        r.pd.create_srq(&SrqOptions { depth: 4, max_sge: 1, ..SrqOptions::default() }).unwrap();
    let qp = r.pd.create_qp(&QpOptions { srq: Some(&srq), ..QpOptions::new(&r.cq) }).unwrap();
    let refused = qp.post_recv(&[RecvRequest::new(1, &[])]).unwrap_err();
    assert!(matches!(refused.source, Error::SharedReceives));
    let two = [sge(1), sge(2)];
    let error = srq.post_recv(&[RecvRequest::new(1, &two[..1]), RecvRequest::new(2, &two)]);
    assert!(matches!(error.unwrap_err(), PostError { posted: 1, .. }));
    for worker in 0..2 {
        r.daemon.device().srqs.get_mut(&srq.id()).unwrap().set_waits(worker);
        // No worker waited for the first receive.
        assert!(r.daemon.device().rung(worker).is_empty());
    }
    srq.post_recv(&[RecvRequest::new(3, &[]), RecvRequest::new(4, &[])]).unwrap();
    let mut device = r.daemon.device();
    assert_eq!([device.rung(0).len(), device.rung(1).len()], [1, 1]);
    let ring = device.srqs.get_mut(&srq.id()).unwrap();
    let taken = std::iter::from_fn(|| ring.take().unwrap()).map(|e| e.wr_id);
    assert_eq!(taken.collect::<Vec<_>>(), [1, 3, 4]);
    drop(device);
    let error = srq.post_recv(&[RecvRequest::new(0, &[]); 5]).unwrap_err();
    assert!(matches!(error, PostError { posted: 4, source: Error::QueueFull { depth: 4 } }));
    // The QP keeps the SRQ alive.
    drop(srq);
    drop(qp);
    let device = r.daemon.device();
    let gone = device.requests.iter().rev().take(2).collect::<Vec<_>>();
    assert!(matches!(gone[..], [RequestBody::DestroySrq { .. }, RequestBody::DestroyQp { .. }]));
    drop(device);
}

#[test]
fn polling_rings_the_workers_that_wait_for_room() {
    let r = rig();
    let mut device = r.daemon.device();
    let id = r.cq.id();
    let entry = Cqe::new(r.qp.id().0, 1, CompletionOpcode::Send, CompletionStatus::Success);
    for _ in 0..16 {
        device.complete(id, &entry);
    }
    let producer = &mut device.cqs.get_mut(&id).unwrap().producer;
    assert!(!producer.reserve().unwrap());
    producer.set_waits(1);
    let doorbell = producer.queue().doorbell();
    assert!(device.scanners[1].prepare_sleep());
    drop(device);
    let mut completions = [Completion::default(); 4];
    assert_eq!(r.cq.poll(&mut completions).unwrap(), 4);
    let mut device = r.daemon.device();
    assert_eq!((device.rung(1), device.wakes(1), device.rung(0)), (vec![doorbell], 1, vec![]));
    assert!(device.cqs.get_mut(&id).unwrap().producer.reserve().unwrap());
    drop(device);
}

#[test]
fn full_queue_reports_posted_count() {
    let r = rig();
    bind(&r, true);
    let batch: Vec<_> = (0..6).map(|n| SendRequest::send_inline(n, b"x")).collect();
    let error = r.qp.post_send(&batch).unwrap_err();
    assert_eq!(error.posted, 4);
    assert!(matches!(error.source, Error::QueueFull { depth: 4 }));
    assert_eq!(Error::from(error).fault(), Fault::Application);
    // The posted requests are in the queue, and the doorbell was rung.
    let mut device = r.daemon.device();
    assert_eq!(device.wakes(1), 1);
    let qp = device.qps.get_mut(&r.qp.id()).unwrap();
    assert_eq!(qp.sq.pending().unwrap(), 4);
    assert_eq!(qp.next_request().0.header.wr_id, 0);
    qp.sq.retire(1);
    drop(device);
    r.qp.post_send(&batch[4..5]).unwrap();
    let error = r.qp.post_recv(&[RecvRequest::new(1, &[]); 5]).unwrap_err();
    assert_eq!(error.posted, 4);
}

#[test]
fn oversized_request_stops_batch() {
    let r = rig();
    let long = [0; 65];
    let many = [sge(0); 3];
    let good = SendRequest::send_inline(1, &long[..64]);
    let error = r.qp.post_send(&[good, SendRequest::send_inline(2, &long), good]).unwrap_err();
    assert_eq!(error.posted, 1);
    assert!(matches!(error.source, Error::InlineTooLong { given: 65, max: 64 }));
    let error = r.qp.post_send(&[SendRequest::write(2, &many, FAR)]).unwrap_err();
    assert_eq!(error.posted, 0);
    assert!(matches!(error.source, Error::TooManySges { given: 3, max: 2 }));
    let error = r.qp.post_recv(&[RecvRequest::new(1, &many)]).unwrap_err();
    assert!(matches!(error.source, Error::TooManySges { given: 3, max: 2 }));
    let mut device = r.daemon.device();
    assert_eq!(device.qps.get_mut(&r.qp.id()).unwrap().sq.pending().unwrap(), 1);
    drop(device);
}

#[test]
fn completions_come_in_order_and_once() {
    let r = rig();
    let mut completions = [Completion::default(); 3];
    assert_eq!(r.cq.poll(&mut completions).unwrap(), 0);
    // Goes around the ring three times.
    let mut next = 0;
    for round in 0..12u64 {
        for n in 0..4 {
            let opcode = CompletionOpcode::Receive;
            let wr_id = round * 4 + n;
            let entry = Cqe::new(r.qp.id().0, wr_id, opcode, CompletionStatus::Success);
            r.daemon.device().complete(r.cq.id(), &entry);
        }
        for expected in [3, 1, 0] {
            let n = r.cq.poll(&mut completions).unwrap();
            assert_eq!(n, expected);
            for c in &completions[..n] {
                assert_eq!((c.wr_id, c.qp), (next, r.qp.id()));
                next += 1;
            }
        }
    }
}
