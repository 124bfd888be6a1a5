//! Resizing a CQ: unread completions, the arm, and waiting threads.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use rnic_abi::abi::control::{NewArena, QueueLocation, Reply, ReplyBody};
use rnic_abi::abi::queue::QueueShape;

use super::{PATIENCE, Rig, entry, rig, until};
use crate::fake::Answer;
use crate::*;

#[test]
fn unread_entries_and_arm_survive_new_arena() {
    let r = rig();
    for wr_id in 0..3 {
        r.daemon.device().complete(r.cq.id(), &entry(wr_id));
    }
    let mut some = [Completion::default(); 4];
    assert_eq!(r.cq.poll(&mut some[..1]).unwrap(), 1);
    r.cq.arm(Arm::Next).unwrap();
    r.daemon.device().next_in_new_arena = true;
    r.cq.resize(100).unwrap();
    assert_eq!(r.cq.capacity(), 128);
    assert_eq!(r.daemon.device().cqs[&r.cq.id()].producer.unread(), 2);
    assert_eq!(r.cq.poll(&mut some).unwrap(), 2);
    assert_eq!([some[0].wr_id, some[1].wr_id], [1, 2]);
    assert_eq!(r.cq.channel().recv(Some(std::time::Duration::ZERO)).unwrap(), None);
    r.daemon.device().complete(r.cq.id(), &entry(3));
    assert_eq!(r.cq.channel().recv(Some(PATIENCE)).unwrap(), Some(r.cq.id()));
    assert_eq!(r.cq.poll(&mut some).unwrap(), 1);
    assert_eq!(some[0].wr_id, 3);
}

#[test]
fn sleeper_wakes_after_cq_move() {
    let r = rig();
    for wr_id in 0..20 {
        let cq = r.cq.clone();
        let sleeper = thread::spawn(move || {
            let mut some = [Completion::default(); 4];
            let n = cq.wait(&mut some, Some(PATIENCE)).unwrap();
            some[..n].iter().map(|c| c.wr_id).collect::<Vec<_>>()
        });
        until("arm", || r.daemon.device().armed(r.cq.id()).then_some(()));
        r.cq.resize(if wr_id % 2 == 0 { 8 } else { 64 }).unwrap();
        r.daemon.device().complete(r.cq.id(), &entry(wr_id));
        assert_eq!(sleeper.join().unwrap(), [wr_id]);
    }
}

/// Each written completion adds one permit to poll. A thread with a permit must find a completion,
/// wherever the queue is.
#[test]
fn completions_are_found_while_cq_moves() {
    for _ in 0..40 {
        poll_by_permits(&rig());
    }
}

fn poll_by_permits(r: &Rig) {
    const POLLERS: u64 = 3;
    const EACH: u64 = 200;
    let permits = AtomicUsize::new(0);
    let take_permit = || {
        let one_less = |permits: usize| permits.checked_sub(1);
        permits.fetch_update(Ordering::Acquire, Ordering::Relaxed, one_less).ok()
    };
    let poll_one = || {
        until("completion", take_permit);
        let mut one = [Completion::default()];
        assert_eq!(r.cq.poll(&mut one).unwrap(), 1);
        one[0].wr_id
    };
    let mut polled = thread::scope(|scope| {
        let poller = || (0..EACH).map(|_| poll_one()).collect::<Vec<_>>();
        let pollers: Vec<_> = (0..POLLERS).map(|_| scope.spawn(poller)).collect();
        for wr_id in 0..POLLERS * EACH {
            // Pollers without a permit may still be in `poll`.
            until("room", || (permits.load(Ordering::Relaxed) < 8).then_some(()));
            r.daemon.device().complete(r.cq.id(), &entry(wr_id));
            permits.fetch_add(1, Ordering::Release);
            if wr_id % 250 == 100 {
                r.cq.resize(32).unwrap();
            }
        }
        pollers.into_iter().flat_map(|poller| poller.join().unwrap()).collect::<Vec<_>>()
    });
    polled.sort_unstable();
    assert!(polled.into_iter().eq(0..POLLERS * EACH), "each completion comes once");
    assert_eq!(r.cq.poll(&mut [Completion::default()]).unwrap(), 0);
}

#[test]
fn a_refused_resize_changes_nothing() {
    let r = rig();
    let why = "3 completions are unread".to_owned();
    r.daemon.answer_next(Answer::Refuse(Refusal::Invalid { field: "entries".into(), why }));
    assert!(matches!(r.cq.resize(1), Err(Error::Refused { .. })));
    assert_eq!(r.cq.capacity(), 16);
    r.daemon.device().complete(r.cq.id(), &entry(5));
    let mut some = [Completion::default(); 4];
    assert_eq!(r.cq.wait(&mut some, Some(PATIENCE)).unwrap(), 1);
    r.cq.resize(32).unwrap();
    assert_eq!(r.cq.capacity(), 32);
}

#[test]
fn failed_cq_move_ends_session() {
    for arena in [None, Some(NewArena { arena: 7, length: 4096 })] {
        let r = rig();
        let id = r.daemon.device().requests.len() as u32 + 1;
        let shape = QueueShape::completion(64);
        let queue = QueueLocation { arena: 7, offset: 0, shape };
        let body = ReplyBody::Cq { cq: r.cq.id(), queue, new_arena: arena };
        let reply = Reply { id, result: Ok(body), diagnosis_id: 0 };
        r.daemon.answer_next(Answer::Bytes(postcard::to_stdvec(&reply).unwrap()));
        let error = r.cq.resize(64).unwrap_err();
        assert!(matches!(error, Error::Protocol { .. }), "{error}");
        // The session must end, because waiting threads would never see the completions.
        assert!(matches!(r.cq.arm(Arm::Next), Err(Error::DaemonGone)));
        assert!(matches!(r.cq.resize(64), Err(Error::DaemonGone)));
        assert!(matches!(r.context.status(), Err(Error::DaemonGone)));
    }
}
