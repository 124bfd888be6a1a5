//! Shared receive queues and messages that wait for a receive, with real processes: several QPs on
//! one queue, its events, and hostile clients.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rnic_abi::abi::control::{QueueLocation, ReplyBody, RequestBody, SrqRequest};
use rnic_abi::abi::queue::{QUEUE_HEADER_LEN, queue_header};
use rnic_abi::shm::Mapping;
use rnic_abi::types::{QpId, SrqId};
use rnic_client::{
    AcceptOptions, Access, Completion, CompletionStatus, DisconnectReason, Event, Qp, QpOptions,
    RecvRequest, RnrPolicy, SendRequest, Srq, SrqOptions,
};
use rnic_tests::raw::{Raw, qp_request};
use rnic_tests::{Client, DEADLINE, Daemon, PATHS, engine, join};

/// Runs the test on both paths, with one worker and with three.
fn each_daemon(test: impl Fn(&Daemon)) {
    for (path, workers) in PATHS.into_iter().flat_map(|path| [(path, 1), (path, 3)]) {
        let daemon = Daemon::start(&engine(workers, path));
        test(&daemon);
        daemon.is_empty();
    }
}

/// A client with a CQ for the completions of all its QPs.
fn client(daemon: &Daemon) -> Client {
    Client::new(daemon).with_cq(1024)
}

fn srq(client: &Client, depth: u32) -> Srq {
    client.pd.create_srq(&SrqOptions { depth, ..SrqOptions::default() }).unwrap()
}

/// Asserts that there is no event of a shared receive queue.
fn no_event_of_an_srq(client: &Client) {
    while let Some(event) = client.context.next_event(Some(Duration::ZERO)).unwrap() {
        let of_srq = matches!(
            event,
            Event::SrqLimit { .. } | Event::SrqError { .. } | Event::SrqUnfair { .. }
        );
        assert!(!of_srq, "{event:?}");
    }
}

/// Creates QPs of `host` on one shared receive queue, each connected to a QP of `guest`.
fn connected(
    guest: &Client,
    host: &Client,
    srq: &Srq,
    rnr_policy: RnrPolicy,
    count: usize,
) -> Vec<(Qp, Qp)> {
    let listener = host.listener();
    (0..count)
        .map(|_| {
            let sender = guest.qp();
            let options = QpOptions { srq: Some(srq), rnr_policy, ..host.options() };
            let receiver = host.pd.create_qp(&options).unwrap();
            join(&listener, &sender, &receiver);
            (sender, receiver)
        })
        .collect()
}

/// Returns receives of zero bytes.
fn empty(count: usize) -> Vec<RecvRequest<'static>> {
    vec![RecvRequest::new(7, &[]); count]
}

#[test]
fn one_queue_pair_of_two_consumes_all_eight() {
    each_daemon(|daemon| {
        let guest = client(daemon);
        let host = client(daemon);
        let srq = srq(&host, 8);
        let pairs = connected(&guest, &host, &srq, RnrPolicy::Terminate, 2);
        srq.post_recv(&empty(8)).unwrap();
        let eight: Vec<_> = (0..8).map(|n| SendRequest::send_inline(n, b"")).collect();
        pairs[0].0.post_send(&eight).unwrap();
        for completion in host.successes(8) {
            assert_eq!((completion.qp, completion.srq), (pairs[0].1.id(), Some(srq.id())));
        }
        let row = srq.query().unwrap();
        assert_eq!((row.posted, row.taken, row.qps, row.capacity), (0, 8, 2, 8));
        // No receive remains for the other QP: its connection ends, as without an SRQ.
        pairs[1].0.post_send(&[SendRequest::send_inline(9, b"")]).unwrap();
        let last = host.event(|e| matches!(e, Event::LastWqeReached { .. }));
        assert_eq!(last, Event::LastWqeReached { qp: pairs[1].1.id(), context: 0 });
        let end = pairs[1].1.wait_disconnected(Some(DEADLINE)).unwrap();
        assert!(
            matches!(&end, DisconnectReason::Terminate { code, .. }
            if (code.layer, code.etype, code.code) == (1, 2, 2)),
            "{end:?}"
        );
        assert_eq!(pairs[0].1.query().unwrap().srq, Some(srq.id()));
    });
}

/// Checksummed messages of several senders into one pool of buffers, reposted after completion.
#[test]
fn messages_of_many_arrive_whole_in_one_pool() {
    const MESSAGES: u64 = 400;
    const SENDERS: usize = 5;
    const LEN: u64 = 6000;
    each_daemon(|daemon| {
        let guest = client(daemon);
        let host = client(daemon);
        let srq = srq(&host, 16);
        let hold = RnrPolicy::Wait { timeout_ms: 60_000 };
        let pairs = connected(&guest, &host, &srq, hold, SENDERS);
        let buffer = host.context.create_shared_buffer(16 * LEN).unwrap();
        let pool = host.pd.reg_mr(&buffer, .., Access::LOCAL_WRITE).unwrap();
        let buffers: Vec<_> = (0..16).map(|n| [pool.sge(n * LEN, LEN as u32)]).collect();
        let buffer = guest.context.create_shared_buffer(SENDERS as u64 * LEN).unwrap();
        let source = guest.pd.reg_mr(&buffer, .., Access::empty()).unwrap();
        let pattern = |sender: usize| vec![0x11 * (sender as u8 + 1); LEN as usize];
        for sender in 0..SENDERS {
            source.write_at(sender as u64 * LEN, &pattern(sender)).unwrap();
        }
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let elements: Vec<_> =
                    (0..SENDERS as u64).map(|n| [source.sge(n * LEN, LEN as u32)]).collect();
                let mut done = 0;
                for n in 0..MESSAGES {
                    for ((sender, _), element) in pairs.iter().zip(&elements) {
                        sender.post_send(&[SendRequest::send(n, element).signaled()]).unwrap();
                    }
                    if n % 32 == 31 {
                        guest.successes((n as usize + 1) * SENDERS - done);
                        done = (n as usize + 1) * SENDERS;
                    }
                }
                guest.successes(MESSAGES as usize * SENDERS - done);
            });
            // The receives are posted late: by now all messages wait.
            for (n, buffer) in buffers.iter().enumerate() {
                srq.post_recv(&[RecvRequest::new(n as u64, buffer)]).unwrap();
            }
            let mut counts = [0; SENDERS];
            while counts.iter().sum::<u64>() < MESSAGES * SENDERS as u64 {
                for completion in host.successes(1) {
                    let sender = pairs.iter().position(|(_, qp)| qp.id() == completion.qp).unwrap();
                    let at = completion.wr_id as usize;
                    let mut bytes = vec![0; completion.byte_len as usize];
                    pool.read_at(at as u64 * LEN, &mut bytes).unwrap();
                    assert!(bytes == pattern(sender), "message {} of {sender}", counts[sender]);
                    counts[sender] += 1;
                    srq.post_recv(&[RecvRequest::new(at as u64, &buffers[at])]).unwrap();
                }
            }
            assert_eq!(counts, [MESSAGES; SENDERS]);
        });
        assert_eq!(srq.query().unwrap().waiting, 0);
    });
}

#[test]
fn srq_limit_event_is_one_shot() {
    each_daemon(|daemon| {
        let guest = client(daemon);
        let host = client(daemon);
        let options = SrqOptions { depth: 8, limit: 3, context: 77, ..SrqOptions::default() };
        let srq = host.pd.create_srq(&options).unwrap();
        let pairs = connected(&guest, &host, &srq, RnrPolicy::Terminate, 2);
        let limit = || host.event(|e| matches!(e, Event::SrqLimit { .. }));
        srq.post_recv(&empty(4)).unwrap();
        let send = |n: usize| {
            pairs[n].0.post_send(&[SendRequest::send_inline(1, b"")]).unwrap();
            host.successes(1);
        };
        send(0);
        assert_eq!(srq.query().unwrap().limit, 3);
        send(1);
        assert_eq!(limit(), Event::SrqLimit { srq: srq.id(), context: 77 });
        assert_eq!(srq.query().unwrap().limit, 0);
        send(0);
        srq.set_context(78).unwrap();
        // Fewer receives than the limit are posted: the event occurs at once.
        srq.arm_limit(5).unwrap();
        assert_eq!(limit(), Event::SrqLimit { srq: srq.id(), context: 78 });
        srq.post_recv(&empty(5)).unwrap();
        srq.arm_limit(6).unwrap();
        srq.arm_limit(0).unwrap();
        send(1);
        no_event_of_an_srq(&host);
    });
}

#[test]
fn unfair_srq_consumer_is_reported() {
    each_daemon(|daemon| {
        let guest = client(daemon);
        let host = client(daemon);
        let srq = srq(&host, 8);
        let pairs = connected(&guest, &host, &srq, RnrPolicy::Terminate, 2);
        for _ in 0..9 {
            srq.post_recv(&empty(8)).unwrap();
            pairs[1].0.post_send(&[SendRequest::send_inline(1, b""); 8]).unwrap();
            host.successes(8);
        }
        match host.event(|e| matches!(e, Event::SrqUnfair { .. })) {
            Event::SrqUnfair { srq: found, qp, taken: 64, of_last: 64, .. } => {
                assert_eq!((found, qp), (srq.id(), pairs[1].1.id()));
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(srq.query().unwrap().unfair, 1);
        // Both QPs continue.
        srq.post_recv(&empty(1)).unwrap();
        pairs[0].0.post_send(&[SendRequest::send_inline(1, b"")]).unwrap();
        host.successes(1);
    });
}

fn pair(guest: &Client, host: &Client, rnr_policy: RnrPolicy) -> (Qp, Qp) {
    let sender = guest.qp();
    let receiver = host.pd.create_qp(&QpOptions { rnr_policy, ..host.options() }).unwrap();
    host.join(&sender, &receiver);
    (sender, receiver)
}

#[test]
fn message_waits_for_a_receive() {
    each_daemon(|daemon| {
        let guest = client(daemon);
        let host = client(daemon);
        let (sender, receiver) = pair(&guest, &host, RnrPolicy::Wait { timeout_ms: 60_000 });
        let buffer = host.context.create_shared_buffer(4096).unwrap();
        let buffer = host.pd.reg_mr(&buffer, .., Access::LOCAL_WRITE).unwrap();
        let element = [buffer.sge(0, 64)];
        for n in 0..200u64 {
            let text = format!("message {n}");
            sender.post_send(&[SendRequest::send_inline(n, text.as_bytes())]).unwrap();
            if n % 3 == 0 {
                // Long enough for the worker to fall asleep.
                std::thread::sleep(Duration::from_millis(1));
            }
            receiver.post_recv(&[RecvRequest::new(n, &element)]).unwrap();
            let found = host.successes(1);
            assert_eq!((found[0].wr_id, found[0].byte_len as usize), (n, text.len()));
            let mut bytes = vec![0; text.len()];
            buffer.read_at(0, &mut bytes).unwrap();
            assert_eq!(bytes, text.as_bytes());
        }
    });
}

#[test]
fn held_message_times_out() {
    each_daemon(|daemon| {
        let guest = client(daemon);
        let host = client(daemon);
        let held = Duration::from_millis(300);
        let timeout_ms = held.as_millis() as u32;
        let (sender, receiver) = pair(&guest, &host, RnrPolicy::Wait { timeout_ms });
        let began = Instant::now();
        sender.post_send(&[SendRequest::send_inline(1, b"nobody")]).unwrap();
        for qp in [&sender, &receiver] {
            let end = qp.wait_disconnected(Some(DEADLINE)).unwrap();
            assert!(
                matches!(&end, DisconnectReason::Terminate { code, .. }
                if (code.layer, code.etype, code.code) == (1, 2, 2)),
                "{end:?}"
            );
        }
        assert!(began.elapsed() >= held);
    });
}

#[test]
fn peer_end_is_noticed_during_a_held_message() {
    each_daemon(|daemon| {
        let guest = client(daemon);
        let host = client(daemon);
        let (sender, receiver) = pair(&guest, &host, RnrPolicy::Wait { timeout_ms: 3_600_000 });
        // More than all buffers between the two hold.
        let buffer = guest.context.create_shared_buffer(16 << 20).unwrap();
        let source = guest.pd.reg_mr(&buffer, .., Access::empty()).unwrap();
        let all = [source.sge(0, 16 << 20)];
        sender.post_send(&[SendRequest::send(1, &all), SendRequest::send(2, &all)]).unwrap();
        // Let some of it arrive: the daemon must notice the reset after unread bytes, regardless of
        // their number.
        std::thread::sleep(Duration::from_millis(50));
        sender.to_error().unwrap();
        let end = receiver.wait_disconnected(Some(DEADLINE)).unwrap();
        assert!(matches!(end, DisconnectReason::Lost { .. }), "{end:?}");
    });
}

/// A shared receive queue with QPs of a hostile client.
struct Vandal {
    raw: Raw,
    srq: QueueLocation,
    id: SrqId,
    qps: Vec<QpId>,
}

impl Vandal {
    fn open(socket: &Path, peers: SocketAddr, hold: bool, count: usize) -> Vandal {
        let mut raw = Raw::open(socket);
        let pd = raw.pd();
        let cq = raw.cq(256);
        let request = SrqRequest { pd, depth: 64, max_sge: 1, limit: 0, context: 0 };
        let (id, srq) = match raw.try_call(RequestBody::CreateSrq(request), &[]) {
            Some(Ok(ReplyBody::Srq { srq, queue, .. })) => (srq, queue),
            other => panic!("{other:?}"),
        };
        let mut qps = Vec::new();
        for _ in 0..count {
            let mut request = qp_request(pd, cq);
            request.srq = Some(id);
            if hold {
                request.rnr_policy = RnrPolicy::Wait { timeout_ms: 60_000 };
            }
            let qp = match raw.try_call(RequestBody::CreateQp(request), &[]) {
                Some(Ok(ReplyBody::Qp { qp, rq: None, .. })) => qp,
                other => panic!("{other:?}"),
            };
            let body = RequestBody::Connect {
                qp,
                peer: peers,
                local: None,
                ird: None,
                ord: None,
                private_data: Vec::new(),
            };
            assert!(matches!(raw.call(body), Ok(ReplyBody::Done)));
            qps.push(qp);
        }
        Vandal { raw, srq, id, qps }
    }

    fn arena(&self) -> &Arc<Mapping> {
        &self.raw.arenas[self.srq.arena as usize]
    }

    fn scribble(&self, offset: usize, word: u64) {
        self.arena().store_u64(self.srq.offset as usize + offset, word).unwrap();
    }
}

#[test]
fn corrupted_srq_ring_harms_only_its_client() {
    each_daemon(|daemon| {
        let mut server = daemon.actor(&["serve"]);
        let address = server.line_after("listening on ");
        let mut visitor = daemon.actor(&["traffic", &address, "5"]);
        visitor.line_after("under way");
        let side = client(daemon);
        let ended = daemon.status().sessions_ended;
        let mut expected = ended;
        for round in 0..12u64 {
            let listener = side.listener();
            let hold = round % 2 == 1;
            let mut vandal = Vandal::open(daemon.socket(), listener.local_addr(), hold, 3);
            let guests: Vec<Qp> = (0..3)
                .map(|_| {
                    let qp = side.pd.create_qp(&side.options()).unwrap();
                    let request = listener.accept_request(Some(DEADLINE)).unwrap();
                    request.accept(&qp, &AcceptOptions::default()).unwrap();
                    qp
                })
                .collect();
            // Invalid receives, an index out of range, and both.
            let malformed = round % 3 == 0;
            if malformed {
                for slot in 0..64 {
                    let at = QUEUE_HEADER_LEN + slot * vandal.srq.shape.stride as usize;
                    vandal.scribble(at, u64::MAX);
                }
                vandal.scribble(queue_header::PRODUCER, 64);
            } else {
                vandal.scribble(queue_header::PRODUCER, 0xDEAD_BEEF ^ round);
            }
            vandal.scribble(queue_header::CONSUMER, u64::MAX);
            vandal.scribble(queue_header::ENGINE_WAITS, u64::MAX);
            for guest in &guests {
                guest.post_send(&[SendRequest::send_inline(1, b"x"); 4]).unwrap();
            }
            for guest in &guests {
                let end = guest.wait_disconnected(Some(DEADLINE)).unwrap();
                assert!(!matches!(end, DisconnectReason::Orderly), "{end:?}");
            }
            let arm = RequestBody::ArmSrq { srq: vandal.id, limit: 5 };
            if malformed {
                // Only the requests fail.
                assert!(matches!(vandal.raw.call(arm), Ok(ReplyBody::Done)));
                assert_eq!(vandal.qps.len(), 3);
            } else {
                expected += 1;
                daemon.wait_status("ended", |s| s.sessions_ended == expected);
            }
        }
        assert!(!visitor.has_ended());
        visitor.release();
        visitor.succeed();
        server.release();
        server.succeed();
        assert!(expected > ended);
    });
}

#[test]
fn arming_detects_a_corrupted_srq_ring() {
    let daemon = Daemon::start(&engine(3, "direct"));
    let mut vandal = Vandal::open(daemon.socket(), "127.0.0.1:9".parse().unwrap(), false, 1);
    vandal.scribble(queue_header::PRODUCER, 65);
    let arm = RequestBody::ArmSrq { srq: vandal.id, limit: 5 };
    let answer = vandal.raw.call(arm);
    assert!(answer.is_err_and(|e| e.to_string().contains("is dead")));
    daemon.wait_status("ended", |s| s.sessions_ended == 1);
    drop(vandal);
    daemon.is_empty();
}

#[test]
fn unused_srq_receives_stay_available() {
    each_daemon(|daemon| {
        let guest = client(daemon);
        let host = client(daemon);
        let srq = srq(&host, 8);
        let pairs = connected(&guest, &host, &srq, RnrPolicy::Terminate, 2);
        srq.post_recv(&empty(8)).unwrap();
        pairs[0].1.to_error().unwrap();
        let last = host.event(|e| matches!(e, Event::LastWqeReached { .. }));
        assert_eq!(last, Event::LastWqeReached { qp: pairs[0].1.id(), context: 0 });
        let mut some = [Completion::default(); 8];
        assert_eq!(host.cq.poll(&mut some).unwrap(), 0, "nothing is flushed");
        pairs[1].0.post_send(&[SendRequest::send_inline(1, b""); 8]).unwrap();
        assert!(host.successes(8).iter().all(|c| c.status == CompletionStatus::Success));
        no_event_of_an_srq(&host);
    });
}

#[test]
fn waiting_messages_cost_no_cpu() {
    each_daemon(|daemon| {
        let guest = client(daemon);
        let host = client(daemon);
        let srq = srq(&host, 8);
        let hold = RnrPolicy::Wait { timeout_ms: 3_600_000 };
        let pairs = connected(&guest, &host, &srq, hold, 4);
        let buffer = guest.context.create_shared_buffer(1 << 20).unwrap();
        let source = guest.pd.reg_mr(&buffer, .., Access::empty()).unwrap();
        let much = [source.sge(0, 1 << 20)];
        for (sender, _) in &pairs {
            sender.post_send(&[SendRequest::send(1, &much); 8]).unwrap();
        }
        let deadline = Instant::now() + DEADLINE;
        while srq.query().unwrap().waiting < 4 {
            assert!(Instant::now() < deadline, "{:?}", srq.query());
            std::thread::yield_now();
        }
        // A worker that spins uses nearly all of the time, even on a busy machine.
        let window = Duration::from_millis(300);
        let used = (0..4).map(|_| {
            let before = daemon.cpu_time();
            std::thread::sleep(window);
            daemon.cpu_time().saturating_sub(before)
        });
        assert!(used.min().unwrap() <= window / 10);
    });
}
