//! RC and UC QPs, as seen by applications.

use std::time::{Duration, Instant};

use rnic_abi::abi::control::{QpChange, Refusal, ReplyBody, RequestBody};
use rnic_abi::types::QpId;
use rnic_client::{
    Access, Completion, CompletionOpcode, CompletionStatus, Event, Gid, Qp, QpState, QpType,
    RecvRequest, SendRequest, Sending, Wiring,
};
use rnic_tests::client::{Client, READ_WRITE};
use rnic_tests::raw::{Raw, qp_request};
use rnic_tests::{DEADLINE, Daemon, ports};
use rustix::process::Signal;

/// A client with an RC or UC QP.
struct End {
    client: Client,
    qp: Qp,
    gid: Gid,
}

impl End {
    fn new(daemon: &Daemon) -> Self {
        End::of(daemon, QpType::Rc)
    }

    fn of(daemon: &Daemon, kind: QpType) -> Self {
        let client = Client::new(daemon);
        let qp = client.qp_of(kind);
        let gid = client.context.gids().unwrap()[0].gid;
        End { client, qp, gid }
    }

    /// Moves the QP to RTR, with another end as its peer.
    fn to_rtr(&self, to: &End) {
        self.qp.to_rtr(&self.wiring(to)).unwrap();
    }

    fn wiring(&self, to: &End) -> Wiring {
        Wiring {
            local: self.gid,
            remote: to.gid,
            remote_qp: to.qp.id(),
            rq_psn: 7,
            path_mtu: 1024,
            min_rnr_timer: 12,
            ird: 4,
            rights: Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC,
        }
    }

    /// Takes the next completion, which must be successful and belong to this request.
    fn completes(&self, wr_id: u64, opcode: CompletionOpcode) -> Completion {
        let completion = self.client.completion();
        if completion.status != CompletionStatus::Success {
            let why = self.client.context.diagnosis(completion.diagnosis_id);
            panic!("{completion:?}: {why:?}");
        }
        assert_eq!((completion.wr_id, completion.opcode), (wr_id, opcode));
        completion
    }

    fn to_rts(&self) {
        self.qp.to_rts(&SENDING).unwrap();
    }

    /// Moves to RTS and posts a Send, which must fail. The diagnosis is one line with this text.
    fn fails_because(&self, sending: &Sending, says: &str) {
        self.qp.to_rts(sending).unwrap();
        self.qp.post_send(&[SendRequest::send_inline(1, b"")]).unwrap();
        let failed = self.client.completion();
        assert_eq!(failed.status, CompletionStatus::TransportRetryExceeded, "{says}");
        let why = self.client.context.diagnosis(failed.diagnosis_id).unwrap();
        assert!(why.text.contains(says) && !why.text.contains('\n'), "{says}: {}", why.text);
    }
}

/// Requests fail after half a minute without an acknowledgement, because TCP is slow on a busy
/// machine.
const SENDING: Sending = Sending { sq_psn: 7, timeout: 20, retry_count: 7, rnr_retry: 7, ord: 4 };

/// Requests fail after nine seconds, in which the daemon finds the reason even on a busy machine.
const QUICK: Sending = Sending { timeout: 18, ..SENDING };

fn daemon() -> Daemon {
    Daemon::start("[control]\nmode = \"0666\"\n")
}

/// Runs the test with a new pair on each path.
fn on_both_paths(test: impl Fn([End; 2])) {
    let one = daemon();
    test(connected([End::new(&one), End::new(&one)]));
    let [x, y] = two_daemons();
    test(connected([End::new(&x), End::new(&y)]));
}

/// Moves two QPs to RTS, as each other's peers.
fn connected([a, b]: [End; 2]) -> [End; 2] {
    a.to_rtr(&b);
    b.to_rtr(&a);
    a.to_rts();
    b.to_rts();
    [a, b]
}

#[test]
fn messages_of_every_kind_go_both_ways() {
    on_both_paths(every_kind);
}

fn every_kind([a, b]: [End; 2]) {
    for (from, to) in [(&a, &b), (&b, &a)] {
        let target = to.client.region(4096, READ_WRITE | Access::REMOTE_ATOMIC);
        let source = from.client.region(4096, READ_WRITE);
        source.write_at(0, b"by hand").unwrap();
        to.qp.post_recv(&[RecvRequest::new(1, &[target.sge(0, 64)])]).unwrap();
        from.qp.post_send(&[SendRequest::send(2, &[source.sge(0, 7)]).signaled()]).unwrap();
        from.completes(2, CompletionOpcode::Send);
        assert_eq!(to.completes(1, CompletionOpcode::Receive).byte_len, 7);
        let remote = target.remote();
        let sges = [source.sge(0, 7)];
        let write = SendRequest::write(3, &sges, remote.at(128)).signaled();
        from.qp.post_send(&[write]).unwrap();
        from.completes(3, CompletionOpcode::RdmaWrite);
        let read = SendRequest::read(4, source.sge(64, 7), remote.at(128)).signaled();
        from.qp.post_send(&[read]).unwrap();
        from.completes(4, CompletionOpcode::RdmaRead);
        let mut bytes = [0; 7];
        source.read_at(64, &mut bytes).unwrap();
        assert_eq!(&bytes, b"by hand");
        // With immediate data, or after a Write.
        to.qp
            .post_recv(&[RecvRequest::new(6, &[target.sge(0, 64)]), RecvRequest::new(7, &[])])
            .unwrap();
        let requests = [
            SendRequest::send_with_imm(8, &sges, *b"four").signaled(),
            SendRequest::write_with_imm(9, &sges, remote.at(0), *b"8 bytes.").signaled(),
        ];
        from.qp.post_send(&requests).unwrap();
        from.completes(8, CompletionOpcode::Send);
        from.completes(9, CompletionOpcode::RdmaWrite);
        let received = to.completes(6, CompletionOpcode::Receive);
        assert_eq!((received.immediate, received.byte_len), (Some(*b"four\0\0\0\0"), 7));
        let received = to.completes(7, CompletionOpcode::Receive);
        assert_eq!((received.immediate, received.byte_len), (Some(*b"8 bytes."), 7));
        let add = SendRequest::fetch_add(5, source.sge(256, 8), remote.at(256), 3).signaled();
        from.qp.post_send(&[add]).unwrap();
        from.completes(5, CompletionOpcode::FetchAdd);
    }
    assert_eq!(a.qp.query().unwrap().state, QpState::Rts);
}

/// Small programs and examples do this to avoid a second process.
#[test]
fn qp_may_be_its_own_peer() {
    for loopback in ["direct", "tcp"] {
        let daemon = Daemon::start(&rnic_tests::on_path(loopback));
        let end = End::new(&daemon);
        end.to_rtr(&end);
        end.to_rts();
        let memory = end.client.region(1 << 20, READ_WRITE | Access::REMOTE_ATOMIC);
        let bytes: Vec<u8> = (0..200_000).map(|n| (n % 251) as u8).collect();
        memory.write_at(0, &bytes).unwrap();
        let there = memory.remote().at(1 << 19);
        let len = 200_000;
        // A message longer than a segment, and another that waits for its receive.
        let all = [memory.sge(0, len)];
        let some = [memory.sge(0, 100)];
        let write = SendRequest::write(1, &all, there).signaled();
        let send = SendRequest::send_with_imm(2, &some, *b"four").signaled();
        let read = SendRequest::read(3, memory.sge(1 << 18, len), there).signaled();
        end.qp.post_send(&[write, send, read]).unwrap();
        end.completes(1, CompletionOpcode::RdmaWrite);
        end.qp.post_recv(&[RecvRequest::new(4, &[memory.sge(900_000, 200)])]).unwrap();
        let received = end.completes(4, CompletionOpcode::Receive);
        assert_eq!((received.immediate, received.byte_len), (Some(*b"four\0\0\0\0"), 100));
        end.completes(2, CompletionOpcode::Send);
        end.completes(3, CompletionOpcode::RdmaRead);
        for at in [1 << 19, 1 << 18] {
            let mut found = vec![0; bytes.len()];
            memory.read_at(at, &mut found).unwrap();
            assert!(found == bytes);
        }
        memory.store_u64(0, 40).unwrap();
        let at = memory.remote().at(0);
        let add = SendRequest::fetch_add(5, memory.sge(8, 8), at, 2).signaled();
        end.qp.post_send(&[add]).unwrap();
        end.completes(5, CompletionOpcode::FetchAdd);
        assert_eq!((memory.load_u64(0).unwrap(), memory.load_u64(8).unwrap()), (42, 40));
        // The invalid request has its own status, and all others are flushed.
        end.qp.post_recv(&[RecvRequest::new(6, &[])]).unwrap();
        let nowhere = SendRequest::write(7, &some, memory.remote().at(1 << 20));
        end.qp.post_send(&[nowhere, SendRequest::send_inline(8, b"x")]).unwrap();
        let wrong = end.client.completions(3);
        let found = wrong.iter().map(|c| (c.wr_id, c.status)).collect::<Vec<_>>();
        let flushed = CompletionStatus::WrFlush;
        let expected = [(7, CompletionStatus::RemoteAccess), (8, flushed), (6, flushed)];
        assert_eq!(found, expected);
        // Again, after a reset.
        end.qp.reset().unwrap();
        end.to_rtr(&end);
        end.qp.to_rts(&Sending { rnr_retry: 1, ..SENDING }).unwrap();
        end.qp.post_send(&[SendRequest::send_inline(9, b"y")]).unwrap();
        assert_eq!(end.client.completion().status, CompletionStatus::ReceiverNotReady);
        end.qp.destroy();
        drop((memory, end));
        daemon.is_empty();
    }
}

#[test]
fn unacknowledged_request_times_out() {
    let daemon = daemon();
    let [a, b] = [End::new(&daemon), End::new(&daemon)];
    a.to_rtr(&b);
    a.qp.to_rts(&QUICK).unwrap();
    a.qp.post_send(&[SendRequest::send_inline(1, b"x"), SendRequest::send_inline(2, b"y")])
        .unwrap();
    let failed = a.client.completions(2);
    assert_eq!(failed[0].status, CompletionStatus::TransportRetryExceeded);
    assert_eq!((failed[0].wr_id, failed[1].status), (1, CompletionStatus::WrFlush));
    let why = a.client.context.diagnosis(failed[0].diagnosis_id).unwrap();
    assert!(why.text.contains("is not in RTR yet"), "{why:?}");
    assert_eq!(a.qp.query().unwrap().state, QpState::Error);
    // Both start again.
    a.qp.reset().unwrap();
    a.to_rtr(&b);
    b.to_rtr(&a);
    b.qp.post_recv(&[RecvRequest::new(3, &[])]).unwrap();
    a.to_rts();
    a.qp.post_send(&[SendRequest::send_inline(4, b"").signaled()]).unwrap();
    a.completes(4, CompletionOpcode::Send);
    b.completes(3, CompletionOpcode::Receive);
    let event = b.client.context.next_event(Some(DEADLINE)).unwrap();
    assert!(matches!(event, Some(Event::CommunicationEstablished { .. })), "{event:?}");
}

/// Starts two daemons that connect over TCP.
fn two_daemons() -> [Daemon; 2] {
    let port = ports::unused_port();
    ["127.0.51.1", "127.0.51.2"].map(|address| {
        let config = format!("[device]\naddresses = [\"{address}\"]\n[wired]\nport = {port}\n");
        Daemon::start(&config)
    })
}

impl End {
    fn state(&self) -> QpState {
        self.qp.query().unwrap().state
    }

    /// Returns the next completions as request IDs and statuses.
    fn outcomes(&self, count: usize) -> Vec<(u64, CompletionStatus)> {
        let all = self.client.completions(count);
        all.into_iter().map(|c| (c.wr_id, c.status)).collect()
    }
}

#[test]
fn requests_before_a_failed_one_are_done() {
    use CompletionStatus::{
        LocalLength, LocalProtection, RemoteAccess, RemoteInvalidRequest, RemoteOperation, Success,
        WrFlush,
    };
    // A Write without access, after a valid one.
    on_both_paths(|[a, b]| {
        let target = b.client.region(4096, READ_WRITE);
        let source = a.client.region(4096, READ_WRITE);
        let read_only = b.client.region(4096, Access::LOCAL_WRITE | Access::REMOTE_READ);
        let sges = [source.sge(0, 64)];
        let requests = [
            SendRequest::write(1, &sges, target.remote().at(0)).signaled(),
            SendRequest::write(2, &sges, read_only.remote().at(0)).signaled(),
            SendRequest::write(3, &sges, target.remote().at(0)).signaled(),
        ];
        a.qp.post_send(&requests).unwrap();
        assert_eq!(a.outcomes(3), [(1, Success), (2, RemoteAccess), (3, WrFlush)]);
        assert_eq!((a.state(), b.state()), (QpState::Error, QpState::Error));
    });
    // A Read without access.
    on_both_paths(|[a, b]| {
        let target = b.client.region(4096, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
        let sink = a.client.region(4096, READ_WRITE);
        let read = SendRequest::read(1, sink.sge(0, 8), target.remote().at(0)).signaled();
        a.qp.post_send(&[read]).unwrap();
        assert_eq!(a.outcomes(1), [(1, RemoteAccess)]);
        assert_eq!((a.state(), b.state()), (QpState::Error, QpState::Error));
    });
    // A Send that is longer than its receive, after one that fits.
    on_both_paths(|[a, b]| {
        let target = b.client.region(4096, READ_WRITE);
        let source = a.client.region(4096, READ_WRITE);
        let room = [target.sge(0, 16)];
        b.qp.post_recv(&[RecvRequest::new(1, &room), RecvRequest::new(2, &room)]).unwrap();
        let fits = [source.sge(0, 16)];
        let does_not = [source.sge(0, 17)];
        let requests =
            [SendRequest::send(3, &fits).signaled(), SendRequest::send(4, &does_not).signaled()];
        a.qp.post_send(&requests).unwrap();
        assert_eq!(a.outcomes(2), [(3, Success), (4, RemoteInvalidRequest)]);
        assert_eq!(b.outcomes(2), [(1, Success), (2, LocalLength)]);
        assert_eq!((a.state(), b.state()), (QpState::Error, QpState::Error));
    });
    // A receive into memory that is not registered.
    on_both_paths(|[a, b]| {
        let target = b.client.region(64, READ_WRITE);
        let mut gone = target.sge(0, 64);
        gone.lkey ^= 0x100;
        b.qp.post_recv(&[RecvRequest::new(1, &[gone])]).unwrap();
        a.qp.post_send(&[SendRequest::send_inline(2, b"x").signaled()]).unwrap();
        assert_eq!(a.outcomes(1), [(2, RemoteOperation)]);
        assert_eq!(b.outcomes(1), [(1, LocalProtection)]);
        assert_eq!((a.state(), b.state()), (QpState::Error, QpState::Error));
    });
    // A local SGE that is not registered: the peer is unaffected.
    on_both_paths(|[a, b]| {
        let source = a.client.region(64, READ_WRITE);
        let mut gone = source.sge(0, 64);
        gone.lkey ^= 0x100;
        b.qp.post_recv(&[RecvRequest::new(1, &[])]).unwrap();
        a.qp.post_send(&[SendRequest::send(2, &[gone]).signaled()]).unwrap();
        assert_eq!(a.outcomes(1), [(2, LocalProtection)]);
        assert_eq!((a.state(), b.state()), (QpState::Error, QpState::Rts));
    });
}

#[test]
fn rnr_retries_follow_the_attributes() {
    let few = Sending { rnr_retry: 2, ..SENDING };
    on_both_paths(|[a, b]| {
        a.qp.to_rts(&few).unwrap();
        a.qp.post_send(&[SendRequest::send_inline(1, b""), SendRequest::send_inline(2, b"")])
            .unwrap();
        let failed = [(1, CompletionStatus::ReceiverNotReady), (2, CompletionStatus::WrFlush)];
        assert_eq!(a.outcomes(2), failed);
        assert_eq!((a.state(), b.state()), (QpState::Error, QpState::Rts));
    });
    // Waits forever for a receive.
    on_both_paths(|[a, b]| {
        a.qp.post_send(&[SendRequest::send_inline(1, b"").signaled()]).unwrap();
        assert!(a.client.cq.wait(&mut [Completion::default()], Some(A_WHILE)).unwrap() == 0);
        b.qp.post_recv(&[RecvRequest::new(2, &[])]).unwrap();
        a.completes(1, CompletionOpcode::Send);
        b.completes(2, CompletionOpcode::Receive);
    });
}

#[test]
fn send_notices_a_destroyed_peer() {
    on_both_paths(|[a, b]| {
        b.qp.reset().unwrap();
        assert_eq!((a.state(), b.state()), (QpState::Rts, QpState::Idle));
        a.qp.to_rts(&QUICK).unwrap();
        a.qp.post_send(&[SendRequest::send_inline(1, b"")]).unwrap();
        assert_eq!(a.outcomes(1), [(1, CompletionStatus::TransportRetryExceeded)]);
        assert_eq!(a.state(), QpState::Error);
        // Both start again.
        a.qp.reset().unwrap();
        let [a, b] = connected([a, b]);
        b.qp.post_recv(&[RecvRequest::new(2, &[])]).unwrap();
        a.qp.post_send(&[SendRequest::send_inline(3, b"").signaled()]).unwrap();
        a.completes(3, CompletionOpcode::Send);
        b.completes(2, CompletionOpcode::Receive);
    });
}

#[test]
fn one_end_may_reset_while_the_other_waits() {
    on_both_paths(|[a, b]| {
        for round in 0..3 {
            b.qp.reset().unwrap();
            // Messages that the other end sends before it notices the reset are lost.
            let began = Instant::now();
            while a.qp.query().unwrap().path != "none" {
                assert!(began.elapsed() < DEADLINE, "the stream does not end");
            }
            b.to_rtr(&a);
            b.qp.post_recv(&[RecvRequest::new(1, &[])]).unwrap();
            a.qp.post_send(&[SendRequest::send_inline(2, b"").signaled()]).unwrap();
            assert_eq!(a.outcomes(1), [(2, CompletionStatus::Success)], "round {round}");
            b.completes(1, CompletionOpcode::Receive);
        }
    });
}

/// Requests outstanding when the peer was reset are lost, without an error at the peer. The peer
/// waits until the other end is reset as well.
#[test]
fn reset_peer_loses_outstanding_requests() {
    on_both_paths(|[a, b]| {
        a.qp.post_send(&[SendRequest::send_inline(1, b"").signaled()]).unwrap();
        assert_eq!(a.client.cq.wait(&mut [Completion::default()], Some(A_WHILE)).unwrap(), 0);
        b.qp.reset().unwrap();
        b.to_rtr(&a);
        let failed = a.client.completion();
        let expected = (1, CompletionStatus::TransportRetryExceeded);
        assert_eq!((failed.wr_id, failed.status), expected);
        let why = a.client.context.diagnosis(failed.diagnosis_id).unwrap();
        assert!(why.text.contains("has restarted"), "{}", why.text);
        assert_eq!((a.state(), b.state()), (QpState::Error, QpState::Rtr));
        a.qp.reset().unwrap();
        a.to_rtr(&b);
        a.to_rts();
        b.to_rts();
        b.qp.post_recv(&[RecvRequest::new(2, &[])]).unwrap();
        a.qp.post_send(&[SendRequest::send_inline(3, b"").signaled()]).unwrap();
        a.completes(3, CompletionOpcode::Send);
        b.completes(2, CompletionOpcode::Receive);
    });
}

/// Time in which an unexpected completion would arrive.
const A_WHILE: Duration = Duration::from_millis(300);

/// Mismatched attributes: the error of each end, and the diagnosis of a failed Send.
#[test]
fn mismatched_peers_get_a_one_line_reason() {
    let one = daemon();
    let far = two_daemons();
    let wrong = |[a, b]: [End; 2], spoil: fn(&mut Wiring), sending: Sending, says: &'static str| {
        let mut wiring = a.wiring(&b);
        spoil(&mut wiring);
        a.qp.to_rtr(&wiring).unwrap();
        b.to_rtr(&a);
        b.to_rts();
        a.fails_because(&sending, says);
        assert_eq!(b.state(), QpState::Rts);
    };
    let other_psn = Sending { sq_psn: 8, ..QUICK };
    // All at once, because each case takes the full timeout.
    std::thread::scope(|scope| {
        for ends in [[&one, &one], [&far[0], &far[1]]] {
            let wrong = &wrong;
            let case = |spoil: fn(&mut Wiring), sending, says| {
                let ends = ends.map(End::new);
                scope.spawn(move || wrong(ends, spoil, sending, says));
            };
            case(|w| w.remote_qp.0 += 1000, QUICK, "there is no ");
            case(|_| (), other_psn, "this side starts with 8 (sq_psn)");
            case(|w| w.rq_psn = 9, QUICK, "this side expects 9 (rq_psn)");
            case(|w| w.path_mtu = 2048, QUICK, "path MTU");
        }
    });
}

#[test]
fn uc_drops_refused_messages() {
    let one = daemon();
    let far = two_daemons();
    for ends in [[&one, &one], [&far[0], &far[1]]] {
        let [a, b] = connected(ends.map(|daemon| End::of(daemon, QpType::Uc)));
        let source = a.client.region(64, READ_WRITE);
        let target = b.client.region(64, READ_WRITE);
        source.write_at(0, &[5; 64]).unwrap();
        let sges = [source.sge(0, 64)];
        let mut astray = target.remote().at(0);
        astray.rkey.0 ^= 0x1200;
        a.qp.post_send(&[
            SendRequest::send_inline(1, b"").signaled(),
            SendRequest::write(2, &sges, astray).signaled(),
        ])
        .unwrap();
        let done = [(1, CompletionStatus::Success), (2, CompletionStatus::Success)];
        assert_eq!(a.outcomes(2), done);
        // The Send completes at the sender. The receiver drops the message when it processes it.
        let there = || b.qp.query().unwrap().counters.segments_received;
        let began = Instant::now();
        while there() < 2 {
            assert!(began.elapsed() < DEADLINE, "{} segments have arrived", there());
        }
        b.qp.post_recv(&[RecvRequest::new(3, &[])]).unwrap();
        let at = target.remote().at(0);
        let last = SendRequest::write_with_imm(4, &sges, at, *b"last\0\0\0\0").signaled();
        a.qp.post_send(&[last]).unwrap();
        a.completes(4, CompletionOpcode::RdmaWrite);
        let received = b.completes(3, CompletionOpcode::Receive);
        assert_eq!((received.immediate, received.byte_len), (Some(*b"last\0\0\0\0"), 64));
        let mut found = [0; 64];
        target.read_at(0, &mut found).unwrap();
        assert_eq!((found, a.state(), b.state()), ([5; 64], QpState::Rts, QpState::Rts));
        // RC and UC QPs do not connect: the RC QP would wait for an acknowledgement forever.
        let [a, b] = [End::new(ends[0]), End::of(ends[1], QpType::Uc)];
        a.to_rtr(&b);
        b.to_rtr(&a);
        b.to_rts();
        a.qp.to_rts(&QUICK).unwrap();
        a.qp.post_send(&[SendRequest::send_inline(1, b"")]).unwrap();
        let failed = a.client.completion();
        assert_eq!(failed.status, CompletionStatus::TransportRetryExceeded);
        let why = a.client.context.diagnosis(failed.diagnosis_id).unwrap().text;
        assert!(why.contains("one end is RC, the other UC"), "{why}");
    }
}

#[test]
fn peer_destroyed_before_rtr_is_reported() {
    let one = daemon();
    let far = two_daemons();
    for [here, there] in [[&one, &one], [&far[0], &far[1]]] {
        // Destroyed alone, or with its session.
        for all in [false, true] {
            let [a, b] = [End::new(here), End::new(there)];
            a.to_rtr(&b);
            a.qp.to_rts(&QUICK).unwrap();
            a.qp.post_send(&[SendRequest::send_inline(1, b"")]).unwrap();
            if all {
                drop(b);
            } else {
                b.qp.destroy();
            }
            let failed = a.client.completion();
            assert_eq!(failed.status, CompletionStatus::TransportRetryExceeded);
            let why = a.client.context.diagnosis(failed.diagnosis_id).unwrap();
            assert!(why.text.contains("there is no "), "{}", why.text);
        }
    }
}

#[test]
fn peer_with_another_peer_is_reported() {
    let daemon = daemon();
    let [a, b, c] = [End::new(&daemon), End::new(&daemon), End::new(&daemon)];
    a.to_rtr(&b);
    a.qp.to_rts(&QUICK).unwrap();
    a.qp.post_send(&[SendRequest::send_inline(1, b"")]).unwrap();
    b.to_rtr(&c);
    let failed = a.client.completion();
    let why = a.client.context.diagnosis(failed.diagnosis_id).unwrap();
    assert!(why.text.contains("has another peer"), "{}", why.text);
}

/// The first message raises IBV_EVENT_COMM_EST, but messages between the daemons do not.
#[test]
fn qp_in_rts_gets_no_comm_est() {
    on_both_paths(|[a, b]| {
        for (from, to) in [(&a, &b), (&b, &a)] {
            to.qp.post_recv(&[RecvRequest::new(1, &[])]).unwrap();
            from.qp.post_send(&[SendRequest::send_inline(2, b"").signaled()]).unwrap();
            from.completes(2, CompletionOpcode::Send);
            to.completes(1, CompletionOpcode::Receive);
        }
        for end in [&a, &b] {
            let event = end.client.context.next_event(Some(Duration::ZERO)).unwrap();
            assert!(event.is_none(), "{event:?}");
        }
    });
}

/// A QP with another peer rejects the connection and is not disturbed.
#[test]
fn peers_must_name_each_other() {
    let one = daemon();
    let far = two_daemons();
    for [here, there] in [[&one, &one], [&far[0], &far[1]]] {
        let [a, b, c] = [End::new(here), End::new(there), End::new(here)];
        let [b, c] = connected([b, c]);
        a.to_rtr(&b);
        a.qp.to_rts(&QUICK).unwrap();
        a.qp.post_send(&[SendRequest::send_inline(1, b"")]).unwrap();
        let failed = a.client.completion();
        assert_eq!(failed.status, CompletionStatus::TransportRetryExceeded);
        let why = a.client.context.diagnosis(failed.diagnosis_id).unwrap();
        assert!(why.text.contains("has another peer"), "{}", why.text);
        c.qp.post_recv(&[RecvRequest::new(2, &[])]).unwrap();
        b.qp.post_send(&[SendRequest::send_inline(3, b"").signaled()]).unwrap();
        b.completes(3, CompletionOpcode::Send);
        c.completes(2, CompletionOpcode::Receive);
    }
}

#[test]
fn drained_send_queue_starts_only_in_rts() {
    on_both_paths(|[a, b]| {
        b.qp.post_recv(&[RecvRequest::new(1, &[]), RecvRequest::new(2, &[])]).unwrap();
        a.qp.post_send(&[SendRequest::send_inline(3, b"").signaled()]).unwrap();
        a.completes(3, CompletionOpcode::Send);
        a.qp.drain_send_queue().unwrap();
        let drained = a.client.context.next_event(Some(DEADLINE)).unwrap();
        assert!(matches!(drained, Some(Event::SendQueueDrained { .. })), "{drained:?}");
        assert_eq!(a.state(), QpState::Sqd);
        a.qp.post_send(&[SendRequest::send_inline(4, b"").signaled()]).unwrap();
        assert_eq!(a.client.cq.wait(&mut [Completion::default()], Some(A_WHILE)).unwrap(), 0);
        // The event occurs only once.
        let more = a.client.context.next_event(Some(Duration::ZERO)).unwrap();
        assert!(more.is_none(), "{more:?}");
        a.to_rts();
        a.completes(4, CompletionOpcode::Send);
        b.completes(1, CompletionOpcode::Receive);
        b.completes(2, CompletionOpcode::Receive);
    });
}

#[test]
fn qp_access_flags_limit_the_peer() {
    on_both_paths(|[a, b]| {
        b.qp.set_rights(Access::REMOTE_READ).unwrap();
        let all = READ_WRITE | Access::REMOTE_ATOMIC;
        let target = b.client.region(64, all);
        let source = a.client.region(64, READ_WRITE);
        let remote = target.remote().at(0);
        a.qp.post_send(&[SendRequest::read(1, source.sge(0, 8), remote).signaled()]).unwrap();
        a.completes(1, CompletionOpcode::RdmaRead);
        let sges = [source.sge(0, 8)];
        a.qp.post_send(&[SendRequest::write(2, &sges, remote).signaled()]).unwrap();
        assert_eq!(a.outcomes(1), [(2, CompletionStatus::RemoteInvalidRequest)]);
    });
}

#[test]
fn reads_wait_for_the_peers_ird() {
    on_both_paths(|[a, b]| {
        let target = b.client.region(4096, READ_WRITE);
        let sink = a.client.region(4096, READ_WRITE);
        for round in 0..20 {
            let requests: Vec<_> = (0..30)
                .map(|n| SendRequest::read(n, sink.sge(8 * n, 8), target.remote().at(8 * n)))
                .map(SendRequest::signaled)
                .collect();
            a.qp.post_send(&requests).unwrap();
            let expected: Vec<_> = (0..30).map(|n| (n, CompletionStatus::Success)).collect();
            assert_eq!(a.outcomes(30), expected, "round {round}");
        }
    });
}

#[test]
fn a_read_may_fill_several_elements() {
    on_both_paths(|[a, b]| {
        let target = b.client.region(4096, READ_WRITE);
        let sink = a.client.region(4096, READ_WRITE);
        target.write_at(0, &[7; 300]).unwrap();
        let elements = [sink.sge(1000, 100), sink.sge(0, 1), sink.sge(10, 199)];
        let read = SendRequest::read_scattered(1, &elements, target.remote().at(0)).signaled();
        a.qp.post_send(&[read]).unwrap();
        let done = a.completes(1, CompletionOpcode::RdmaRead);
        assert_eq!(done.byte_len, 300);
        let mut expected = [0; 4096];
        expected[1000..1100].fill(7);
        expected[0] = 7;
        expected[10..209].fill(7);
        let mut found = [0; 4096];
        sink.read_at(0, &mut found).unwrap();
        assert_eq!(found, expected);
    });
}

/// Neither end posts its second receive before its own Send is done.
#[test]
fn receives_posted_after_sends_do_not_deadlock() {
    on_both_paths(|[a, b]| {
        b.qp.post_recv(&[RecvRequest::new(1, &[])]).unwrap();
        b.qp.post_send(&[SendRequest::send_inline(2, b"").signaled()]).unwrap();
        a.qp.post_send(&[SendRequest::send_inline(3, b"").signaled()]).unwrap();
        a.completes(3, CompletionOpcode::Send);
        a.qp.post_recv(&[RecvRequest::new(4, &[])]).unwrap();
        a.completes(4, CompletionOpcode::Receive);
        let mut done: Vec<_> = b.outcomes(2);
        done.sort_by_key(|(wr_id, _)| *wr_id);
        assert_eq!(done, [(1, CompletionStatus::Success), (2, CompletionStatus::Success)]);
    });
}

#[test]
fn a_peer_whose_program_is_killed_is_gone() {
    let daemon = daemon();
    let a = End::new(&daemon);
    {
        let b = End::new(&daemon);
        a.to_rtr(&b);
        b.to_rtr(&a);
        a.to_rts();
        b.qp.post_recv(&[RecvRequest::new(1, &[])]).unwrap();
        a.qp.post_send(&[SendRequest::send_inline(2, b"").signaled()]).unwrap();
        a.completes(2, CompletionOpcode::Send);
    }
    a.qp.to_rts(&QUICK).unwrap();
    a.qp.post_send(&[SendRequest::send_inline(3, b"")]).unwrap();
    let failed = a.client.completion();
    assert_eq!(failed.status, CompletionStatus::TransportRetryExceeded);
    let why = a.client.context.diagnosis(failed.diagnosis_id).unwrap();
    assert!(why.text.contains("there is no queue pair"), "{}", why.text);
}

#[test]
fn write_past_the_region_fails_at_any_length() {
    on_both_paths(|[a, b]| {
        const LEN: u32 = 4096 * 100;
        let target = b.client.region(LEN.into(), READ_WRITE);
        let source = a.client.region(2 * u64::from(LEN), READ_WRITE);
        let part = [source.sge(0, 8)];
        let whole = [source.sge(0, LEN + 1)];
        let requests = [
            SendRequest::write(1, &part, target.remote().at(0)).signaled(),
            SendRequest::write(2, &whole, target.remote().at(0)).signaled(),
        ];
        a.qp.post_send(&requests).unwrap();
        let expected = [(1, CompletionStatus::Success), (2, CompletionStatus::RemoteAccess)];
        assert_eq!(a.outcomes(2), expected);
        assert_eq!((a.state(), b.state()), (QpState::Error, QpState::Error));
    });
}

#[test]
fn rnr_wait_is_the_same_for_long_messages() {
    let none = Sending { rnr_retry: 1, ..SENDING };
    on_both_paths(|[a, b]| {
        const LEN: u32 = 32 << 20;
        a.qp.to_rts(&none).unwrap();
        let source = a.client.region(LEN.into(), READ_WRITE);
        let sges = [source.sge(0, LEN)];
        a.qp.post_send(&[SendRequest::send(1, &sges).signaled()]).unwrap();
        assert_eq!(a.outcomes(1), [(1, CompletionStatus::ReceiverNotReady)]);
        assert_eq!((a.state(), b.state()), (QpState::Error, QpState::Rts));
    });
}

#[test]
fn link_waits_for_the_peers_reset() {
    let daemon = daemon();
    let [a, b] = [End::new(&daemon), End::new(&daemon)];
    for round in 0..30 {
        b.to_rtr(&a);
        // Its worker may apply this only after the other end has moved to RTR.
        b.qp.to_error().unwrap();
        a.to_rtr(&b);
        b.qp.reset().unwrap();
        b.to_rtr(&a);
        let began = Instant::now();
        while b.qp.query().unwrap().path == "none" {
            assert!(began.elapsed() < DEADLINE, "no stream in round {round}");
        }
        a.qp.reset().unwrap();
        b.qp.reset().unwrap();
    }
}

#[test]
fn refused_change_keeps_the_charge() {
    let limits = "[limits.user]\nird_total = 10\nord_total = 10\n";
    let daemon = Daemon::start(limits);
    let [a, b] = [End::new(&daemon), End::new(&daemon)];
    let wiring = Wiring { ird: 6, ..a.wiring(&b) };
    a.qp.to_rtr(&wiring).unwrap();
    a.qp.to_rts(&Sending { ord: 100, ..SENDING }).unwrap_err();
    // Both QPs belong to one user.
    b.qp.to_rtr(&Wiring { ird: 6, ..b.wiring(&a) }).unwrap_err();
    b.qp.to_rtr(&Wiring { ird: 0, ..b.wiring(&a) }).unwrap();
    // Two entries in each direction are reserved for acknowledgements.
    a.qp.to_rts(&Sending { ord: 6, ..SENDING }).unwrap();
    a.qp.to_rts(&Sending { ord: 2, ..SENDING }).unwrap();
    b.qp.to_rts(&Sending { ord: 4, ..SENDING }).unwrap();
}

/// Returns all kinds of changes, with values that are valid for a pair of this daemon.
fn changes(wiring: Wiring) -> [QpChange; 6] {
    [
        QpChange::ReadyToReceive(wiring),
        QpChange::ReadyToSend(SENDING),
        QpChange::DrainSendQueue,
        QpChange::Rights(Access::empty()),
        QpChange::MinRnrTimer(1),
        QpChange::Reset,
    ]
}

#[test]
fn changes_need_an_rc_qp_of_the_session() {
    let daemon = daemon();
    let [a, b] = connected([End::new(&daemon), End::new(&daemon)]);
    b.qp.post_recv(&[RecvRequest::new(1, &[])]).unwrap();
    a.qp.post_send(&[SendRequest::send_inline(2, b"").signaled()]).unwrap();
    a.completes(2, CompletionOpcode::Send);
    let before = [&a, &b].map(|end| end.qp.query().unwrap());
    let mut other = Raw::open(daemon.socket());
    // QPs of another session.
    for change in changes(a.wiring(&b)) {
        for qp in [a.qp.id(), b.qp.id()] {
            let answer = other.call(RequestBody::ModifyQp { qp, change });
            let expected = Refusal::NoSuchObject { kind: "QP".to_owned(), handle: qp.0 };
            assert_eq!(answer, Err(expected), "{change:?}");
        }
    }
    assert_eq!([&a, &b].map(|end| end.qp.query().unwrap()), before);
    // A destroyed QP.
    let gone = other.rc_qp();
    assert_eq!(other.call(RequestBody::DestroyQp { qp: gone }), Ok(ReplyBody::Done));
    for change in changes(a.wiring(&b)) {
        let answer = other.call(RequestBody::ModifyQp { qp: gone, change });
        let expected = Refusal::NoSuchObject { kind: "QP".to_owned(), handle: gone.0 };
        assert_eq!(answer, Err(expected), "{change:?}");
    }
    // An iWARP QP.
    let pd = other.pd();
    let cq = other.cq(16);
    let made = other.call(RequestBody::CreateQp(qp_request(pd, cq)));
    let Ok(ReplyBody::Qp { qp: plain, .. }) = made else { panic!("{made:?}") };
    let row = other.call(RequestBody::QueryQp { qp: plain });
    for change in changes(a.wiring(&b)) {
        let answer = other.call(RequestBody::ModifyQp { qp: plain, change });
        let Err(Refusal::WrongState { handle, needs, .. }) = answer else { panic!("{answer:?}") };
        assert_eq!((handle, needs.as_str()), (plain.0, "an RC, UC or UD QP"), "{change:?}");
    }
    assert_eq!(other.call(RequestBody::QueryQp { qp: plain }), row);
    // The pair still works, with unchanged access rights.
    let target = b.client.region(64, READ_WRITE);
    let source = a.client.region(64, READ_WRITE);
    let sges = [source.sge(0, 8)];
    a.qp.post_send(&[SendRequest::write(3, &sges, target.remote().at(0)).signaled()]).unwrap();
    a.completes(3, CompletionOpcode::RdmaWrite);
}

/// Returns the field of the request that is refused.
fn refused_field(answer: &Result<ReplyBody, Refusal>) -> &str {
    match answer {
        Err(Refusal::AboveMaximum { field, .. } | Refusal::Invalid { field, .. }) => field,
        Err(Refusal::WrongState { needs, .. }) => needs,
        other => panic!("{other:?}"),
    }
}

#[test]
fn invalid_values_are_refused_by_name() {
    let daemon = daemon();
    let a = End::new(&daemon);
    let mut raw = Raw::open(daemon.socket());
    let qp = raw.rc_qp();
    let good = Wiring { remote_qp: a.qp.id(), ..a.wiring(&a) };
    let mut refused = |change: QpChange, field: &str, state: QpState| {
        let answer = raw.call(RequestBody::ModifyQp { qp, change });
        assert_eq!(refused_field(&answer), field, "{change:?}");
        let row = raw.call(RequestBody::QueryQp { qp });
        let Ok(ReplyBody::QpInfo(row)) = row else { panic!("{row:?}") };
        assert_eq!(row.state, state, "{change:?}");
    };
    let idle = QpState::Idle;
    // Changes that are invalid before RTR.
    refused(QpChange::ReadyToSend(SENDING), "Rtr, Rts, Sqd or Sqe", idle);
    refused(QpChange::DrainSendQueue, "Rts", idle);
    refused(QpChange::Rights(Access::empty()), "Rtr, Rts, Sqd or Sqe", idle);
    refused(QpChange::MinRnrTimer(1), "Rtr, Rts, Sqd or Sqe", idle);
    for (wiring, field) in [
        (Wiring { local: Gid([9; 16]), ..good }, "local"),
        (Wiring { local: Gid::default(), ..good }, "local"),
        (Wiring { remote_qp: QpId(1 << 24), ..good }, "remote_qp"),
        (Wiring { rq_psn: 1 << 24, ..good }, "rq_psn"),
        (Wiring { path_mtu: 1000, ..good }, "path_mtu"),
        (Wiring { min_rnr_timer: 32, ..good }, "min_rnr_timer"),
        (Wiring { ird: 129, ..good }, "ird"),
        (Wiring { ird: u16::MAX, ..good }, "ird"),
        (Wiring { rights: Access::LOCAL_WRITE, ..good }, "rights"),
        (Wiring { rights: good.rights | Access::MW_BIND, ..good }, "rights"),
    ] {
        refused(QpChange::ReadyToReceive(wiring), field, idle);
    }
    assert_eq!(
        raw.call(RequestBody::ModifyQp { qp, change: QpChange::ReadyToReceive(good) }),
        Ok(ReplyBody::Done)
    );
    let mut refused = |change: QpChange, field: &str, state: QpState| {
        let answer = raw.call(RequestBody::ModifyQp { qp, change });
        assert_eq!(refused_field(&answer), field, "{change:?}");
        let row = raw.call(RequestBody::QueryQp { qp });
        let Ok(ReplyBody::QpInfo(row)) = row else { panic!("{row:?}") };
        assert_eq!((row.state, row.ird), (state, 0), "{change:?}");
    };
    let rtr = QpState::Rtr;
    refused(QpChange::ReadyToReceive(good), "Idle", rtr);
    refused(QpChange::DrainSendQueue, "Rts", rtr);
    refused(QpChange::MinRnrTimer(32), "min_rnr_timer", rtr);
    refused(QpChange::Rights(Access::ZERO_BASED), "rights", rtr);
    for (sending, field) in [
        (Sending { sq_psn: 1 << 24, ..SENDING }, "sq_psn"),
        (Sending { timeout: 32, ..SENDING }, "timeout"),
        (Sending { retry_count: 8, ..SENDING }, "retry_count"),
        (Sending { rnr_retry: 8, ..SENDING }, "rnr_retry"),
        (Sending { ord: 129, ..SENDING }, "ord"),
        (Sending { ord: u16::MAX, ..SENDING }, "ord"),
    ] {
        refused(QpChange::ReadyToSend(sending), field, rtr);
    }
}

/// A reload forbids the peer's address while a QP in RTR waits for its connection.
#[test]
fn a_reload_forbids_streams_of_earlier_wiring() {
    let uid = rustix::process::geteuid().as_raw();
    let port = ports::unused_port();
    let [low, high] = ["127.0.51.3", "127.0.51.4"];
    let config = |addresses: &[&str]| {
        format!("[device]\naddresses = {addresses:?}\n[wired]\nport = {port}\n")
    };
    let forbid = |daemon: &mut Daemon, config: String, allowed| {
        let rule = format!("[[listen]]\nwho = {uid}\naddress = \"{allowed}\"\n");
        std::fs::write(daemon.dir().join("rnicd.toml"), config + &rule).unwrap();
        daemon.signal(Signal::HUP);
        daemon.line_after("configuration reloaded");
    };
    let both = |a: End, b: End| {
        b.to_rtr(&a);
        std::thread::scope(|scope| {
            let refused = format!("not allowed by listen: bind {}:", a.gid.address());
            scope.spawn(move || a.fails_because(&QUICK, &refused));
            b.fails_because(&QUICK, "the rules of the daemon there do not allow the connection");
        });
    };

    let mut one = Daemon::start(&config(&[low, high]));
    let [a, b] = [0, 1].map(|index| {
        let mut end = End::new(&one);
        end.gid = end.client.context.gids().unwrap()[index].gid;
        end
    });
    a.to_rtr(&b);
    forbid(&mut one, config(&[low, high]), high);
    both(a, b);
    one.stop();

    let [mut x, y] = [low, high].map(|address| Daemon::start(&config(&[address])));
    let [a, b] = [End::new(&x), End::new(&y)];
    a.to_rtr(&b);
    forbid(&mut x, config(&[low]), "10.9.8.7");
    both(a, b);
}
