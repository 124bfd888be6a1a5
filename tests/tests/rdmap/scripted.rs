//! Scripted peers: opcodes by the table, Read Requests that fail, Terminates of every layout, and
//! the state after a connection has ended by one.

use std::io::{ErrorKind, Read};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use rnic_client::{
    Access, Completion, CompletionOpcode, CompletionStatus, Context, DisconnectReason, Mr, Qp,
    RemoteAddr, Scope, SendRequest, Stag, TerminateCode, TerminateOrigin,
};
use rnic_tests::target::{LEN, Target, UNTOUCHED};
use rnic_tests::wire::{self, Ending, fpdu, next_ulpdu, tagged, ulpdus, untagged};
use rnic_tests::{DEADLINE, Daemon, engine};

const SUITE: &str = include_str!("../../conformance/requirements.toml");

fn tcp_daemon(more: &str) -> Daemon {
    Daemon::start(&format!("{}{more}", engine(2, "tcp")))
}

/// Returns the ULPDUs of the daemon up to its FIN, which must be the end.
fn until_fin(peer: &mut TcpStream) -> Vec<Vec<u8>> {
    match wire::ending(peer) {
        Ending::Fin(bytes) => ulpdus(&bytes),
        other => panic!("{other:?}"),
    }
}

/// Expects a single Terminate before the FIN. Returns its RDMAP header.
fn terminated(peer: &mut TcpStream) -> Vec<u8> {
    let mut said = until_fin(peer);
    assert_eq!(said.len(), 1, "{said:02x?}");
    assert_eq!(said[0][..18], untagged(7, 2, 1, b""), "{said:02x?}");
    said.remove(0).split_off(18)
}

fn read_request(number: u32, from: u32, at: u64, size: u32) -> Vec<u8> {
    let mut header = 0xA1A2_A3A4_u32.to_be_bytes().to_vec();
    header.extend(0x10_u64.to_be_bytes());
    header.extend(size.to_be_bytes());
    header.extend(from.to_be_bytes());
    header.extend(at.to_be_bytes());
    untagged(1, 1, number, &header)
}

//= RDMAP-3.1-2
//= RDMAP-7.2-2
//= RDMAP-7.2-3
/// Against the daemon: RV 1 with every opcode, other versions where the opcode belongs.
#[test]
fn opcodes_are_accepted_only_where_allowed() {
    let suite: toml::Table = SUITE.parse().unwrap();
    let rows = suite["opcode"].as_array().unwrap();
    let belongs_by = |rfc: i64, opcode: u8, queue: Option<u32>| {
        rows.iter().any(|row| {
            row["rfc"].as_integer() == Some(rfc)
                && row["value"].as_integer() == Some(opcode.into())
                && row["tagged"].as_bool() == Some(queue.is_none())
                && row.get("queue").and_then(toml::Value::as_integer) == queue.map(i64::from)
        })
    };
    let belongs = |opcode, queue| belongs_by(5040, opcode, queue);
    let daemon = tcp_daemon("[limits.peer]\nstag_guesses_per_minute = 1000000\n");
    let target = Target::new(&daemon);
    let queues = [0, 1, 2, 3, 4, u32::MAX];
    let mut served = 0;
    for opcode in 0..16 {
        for queue in [None].into_iter().chain(queues.map(Some)) {
            for rv in [1, 0, 2, 3] {
                // Tests of the engine cover the opcodes of the extensions.
                if belongs_by(7306, opcode, queue) {
                    continue;
                }
                if rv == 1 || belongs(opcode, queue) {
                    served += usize::from(rv == 1 && belongs(opcode, queue));
                    let expected = match queue {
                        Some(4..) => Some([0x12, 1]),
                        _ if rv != 1 => Some([0x02, 5]),
                        _ if !belongs(opcode, queue) => Some([0x02, 6]),
                        _ => None,
                    };
                    try_message(&target, opcode, queue, rv, expected);
                }
            }
        }
    }
    assert_eq!(served, 8);
}

/// Sends a message and checks for this error code, or for the effect of the message.
fn try_message(target: &Target, opcode: u8, queue: Option<u32>, rv: u8, refused: Option<[u8; 2]>) {
    let what = format!("opcode {opcode} queue {queue:?} RV {rv}");
    target.region.fill(0, LEN, UNTOUCHED).unwrap();
    let (mut peer, qp) = target.open();
    let stag = target.region.rkey().0;
    let at = target.region.iova();
    // With an outstanding Read, a Read Response is expected.
    let from = RemoteAddr { addr: 0, rkey: Stag(7) };
    qp.post_send(&[SendRequest::read(9, target.region.sge(64, 4), from).signaled()]).unwrap();
    assert_eq!(next_ulpdu(&mut peer)[1], 0x41, "{what}");
    let mut message = match (queue, opcode) {
        (None, 2) => tagged(opcode, stag, at + 64, b"oct!"),
        (None, _) => tagged(opcode, stag, at, b"oct!"),
        (Some(queue), 1) => untagged(1, queue, 1, &[0; 28]),
        (Some(queue), 7) => untagged(7, queue, 1, &[0x20, 2, 0, 0]),
        (Some(queue), _) => untagged(opcode, queue, 1, b"oct!"),
    };
    message[1] = rv << 6 | opcode;
    let header = if queue.is_none() { 14 } else { 18 };
    let enclosing = |code: [u8; 2]| {
        let length = (message.len() as u16).to_be_bytes();
        [&[code[0], code[1], 0xC0, 0][..], &length, &message[..header]].concat()
    };
    wire::send_bytes(&mut peer, &fpdu(&message));
    match (refused, opcode) {
        (Some(code), _) => {
            assert_eq!(terminated(&mut peer), enclosing(code), "{what}");
            assert!(target.is_untouched(), "{what}");
        }
        (None, 0) => {
            // A Send after the Write shows that it has been placed.
            wire::send_bytes(&mut peer, &fpdu(&untagged(3, 0, 1, b"")));
            assert_eq!(target.completion().wr_id, 1);
            assert_eq!(&target.memory()[..4], b"oct!");
        }
        (None, 1) => {
            let response = [&[0xC1, 0x42][..], &[0; 12]].concat();
            assert_eq!(next_ulpdu(&mut peer), response, "{what}");
        }
        (None, 2) => {
            let read = target.completion().ok().unwrap();
            assert_eq!((read.wr_id, read.byte_len), (9, 4));
            assert_eq!(&target.memory()[64..68], b"oct!");
        }
        (None, 3 | 5) => {
            let receive = target.completion().ok().unwrap();
            assert_eq!((receive.byte_len, receive.solicited), (4, opcode == 5), "{what}");
        }
        (None, 4 | 6) => {
            // No region has the STag 0.
            assert_eq!(
                target.completion().status,
                CompletionStatus::RemoteInvalidRequest,
                "{what}"
            );
            assert_eq!(terminated(&mut peer), enclosing([0x01, 9]), "{what}");
        }
        (None, 7) => assert_eq!(until_fin(&mut peer), Vec::<Vec<u8>>::new(), "{what}"),
        (None, other) => panic!("{other} is not of the base protocol"),
    }
    drop(peer);
    qp.wait_disconnected(Some(DEADLINE)).unwrap();
    drop(qp);
    target.drain();
}

/// Registers a region in a new domain.
fn region(context: &Context, access: Access) -> Mr {
    let buffer = context.create_shared_buffer(LEN as u64).unwrap();
    context.open_pd(None).unwrap().reg_mr(&buffer, .., access).unwrap()
}

//= RDMAP-7.1-4
//= RDMAP-7.2-7
//= RDMAP-7.2-8
//= RDMAP-7.2-9
//= RDMAP-7.2-10
//= RDMAP-7.2-11
/// M, D and R, length 46, and both headers as sent.
#[test]
fn failed_read_request_returns_both_headers() {
    let daemon = tcp_daemon("[limits.peer]\nstag_guesses_per_minute = 1000000\n");
    let target = Target::new(&daemon);
    let context = Context::open_at(daemon.socket()).unwrap();
    let stranger = region(&context, Access::REMOTE_READ);
    let buffer = target.context.create_shared_buffer(4096).unwrap();
    let readable = target.pd.reg_mr(&buffer, 100..200, Access::REMOTE_READ).unwrap();
    let stag = readable.rkey().0;
    let base = readable.iova();
    let cases = [
        (0, read_request(1, stag ^ 0x5555_5500, base, 1)),
        (1, read_request(1, stag, base.wrapping_sub(1), 2)),
        (1, read_request(1, stag, base + 99, 2)),
        (2, read_request(1, target.region.rkey().0, target.region.iova(), 1)),
        (3, read_request(1, stranger.rkey().0, stranger.iova(), 1)),
        (4, read_request(1, stag, u64::MAX, 1)),
    ];
    for (code, request) in cases {
        let (mut peer, qp) = target.open();
        wire::send_bytes(&mut peer, &fpdu(&request));
        let expected = [&[0x01, code, 0xE0, 0, 0, 46][..], &request].concat();
        assert_eq!(terminated(&mut peer), expected, "0/1/{code:02}");
        drop(peer);
        match qp.wait_disconnected(Some(DEADLINE)).unwrap() {
            DisconnectReason::Terminate { origin: TerminateOrigin::Local, headers, .. } => {
                assert_eq!(headers, expected[4..]);
            }
            other => panic!("{other:?}"),
        }
        target.flushed(2);
    }
    // A Read of zero bytes accesses no memory, and the stream continues.
    let (mut peer, qp) = target.open();
    let requests = [read_request(1, 0xFFFF_FFFF, u64::MAX, 0), read_request(2, stag, base, 100)];
    wire::send_bytes(&mut peer, &requests.iter().flat_map(|r| fpdu(r)).collect::<Vec<u8>>());
    assert_eq!(next_ulpdu(&mut peer), tagged(2, 0xA1A2_A3A4, 0x10, b""));
    assert_eq!(next_ulpdu(&mut peer), tagged(2, 0xA1A2_A3A4, 0x10, &[0; 100]));
    drop((peer, qp));
}

//= RDMAP-3.2-9
//= RDMAP-5.4-6
/// Every combination of flags, complete and truncated, and siw's layout: reported and not answered.
#[test]
fn every_terminate_layout_is_reported() {
    let daemon = tcp_daemon("");
    let target = Target::new(&daemon);
    let told = |payload: &[u8]| {
        let (mut peer, qp) = target.open();
        wire::send_bytes(&mut peer, &fpdu(&untagged(7, 2, 1, payload)));
        let ending = wire::ending(&mut peer);
        assert!(matches!(&ending, Ending::Fin(said) | Ending::Reset(said) if said.is_empty()));
        drop(peer);
        let reason = qp.wait_disconnected(Some(DEADLINE)).unwrap();
        target.flushed(2);
        reason
    };
    let by_peer = |layer, etype, code, headers: &[u8]| DisconnectReason::Terminate {
        origin: TerminateOrigin::Peer,
        code: TerminateCode { layer, etype, code },
        headers: headers.to_vec(),
    };
    for flags in (0..8).map(|n: u8| n << 5) {
        let mut headers = Vec::new();
        if flags & 0xC0 != 0 {
            headers.extend([0, 46]);
        }
        if flags & 0x40 != 0 {
            headers.extend(untagged(1, 1, 1, b""));
        }
        if flags & 0x20 != 0 {
            headers.extend([7; 28]);
        }
        let payload = [&[0x12, 5, flags, 0][..], &headers].concat();
        assert_eq!(told(&payload), by_peer(1, 2, 5, &headers), "{flags:#x}");
        let cut = told(&payload[..payload.len() - 1]);
        assert!(matches!(cut, DisconnectReason::Lost { .. }), "{flags:#x}: {cut:?}");
    }
    let siw = [&[0x21, 2, 3, 0, 0, 0][..], &untagged(3, 0, 1, b"")].concat();
    assert_eq!(told(&siw), by_peer(1, 2, 2, &siw[4..]));
}

//= RDMAP-5.4-9
//= RDMAP-6.2.1-1
//= RDMAP-6.2.1-4
/// The socket is full of the application's data, and the peer keeps sending, with a Terminate of
/// its own at the end. The peer still receives exactly one Terminate, followed by a FIN, and each
/// request of the application completes once.
#[test]
fn terminate_is_last_through_a_full_socket() {
    let daemon = tcp_daemon("");
    let target = Target::new(&daemon);
    let big = target.context.create_shared_buffer(1 << 20).unwrap();
    let big = target.pd.reg_mr(&big, .., Access::LOCAL_WRITE).unwrap();
    let (mut peer, qp) = target.open();
    let sges = [big.sge(0, 1 << 20)];
    let to = RemoteAddr { addr: 0, rkey: Stag(7) };
    let writes: Vec<SendRequest<'_>> =
        (100..164).map(|n| SendRequest::write(n, &sges, to).signaled()).collect();
    qp.post_send(&writes).unwrap();
    // The first bytes have arrived, so the socket is filling.
    let first = next_ulpdu(&mut peer);
    let mut sender = peer.try_clone().unwrap();
    let fault = fpdu(&tagged(0, 1, 0, b"x"));
    let good = fpdu(&target.write(0, &[1; 1000]));
    let ours = fpdu(&untagged(7, 2, 1, &[0x12, 5, 0, 0]));
    let (sent, mut said) = std::thread::scope(|scope| {
        // Far more than socket buffers hold, so the daemon has to read and discard it.
        let sending = scope.spawn(move || {
            wire::send_bytes(&mut sender, &fault);
            for _ in 0..20_000 {
                wire::send_bytes(&mut sender, &good);
            }
            wire::send_bytes(&mut sender, &ours);
            sender.shutdown(Shutdown::Write).is_ok()
        });
        let said = until_fin(&mut peer);
        (sending.join().unwrap(), said)
    });
    assert!(sent, "the connection was not reset");
    said.insert(0, first);
    let terminates = said.iter().filter(|ulpdu| ulpdu[1] & 0x0F == 7).count();
    assert_eq!((terminates, said.last().unwrap()[1]), (1, 0x47));
    assert_eq!(said.last().unwrap()[18..20], [0x11, 0x00]);
    assert!(target.is_untouched(), "data after the fault was placed");
    match qp.wait_disconnected(Some(DEADLINE)).unwrap() {
        DisconnectReason::Terminate { origin: TerminateOrigin::Local, code, .. } => {
            assert_eq!(code, TerminateCode { layer: 1, etype: 1, code: 0 });
        }
        other => panic!("{other:?}"),
    }
    let seen: Vec<Completion> = (0..66).map(|_| target.completion()).collect();
    // Each queue completes in its own order. Their flushes may interleave.
    let (sends, receives): (Vec<Completion>, Vec<Completion>) =
        seen.into_iter().partition(|c| c.opcode != CompletionOpcode::Receive);
    let names = |of: &[Completion]| of.iter().map(|c| c.wr_id).collect::<Vec<u64>>();
    assert_eq!(names(&sends), (100..164).collect::<Vec<u64>>());
    assert_eq!(names(&receives), [1, 2]);
    let taken = sends.iter().take_while(|c| c.status == CompletionStatus::Success).count();
    assert!(taken < 64, "the socket had no room for all");
    let flushed = |c: &Completion| c.status == CompletionStatus::WrFlush;
    assert!(sends[taken..].iter().chain(&receives).all(flushed));
    assert_eq!(target.cq.poll(&mut [Completion::default()]).unwrap(), 0);
}

//= RDMAP-5.2.1-7
//= RDMAP-5.5-15
//= RDMAP-6.1-6
/// ORD 2, ten Reads and a Send. The third request follows the first response, the Send follows the
/// tenth request, and all complete in order.
#[test]
fn no_more_reads_are_out_than_the_ord() {
    let daemon = tcp_daemon("[limits]\nord = 2\n");
    let target = Target::new(&daemon);
    let (mut peer, qp) = target.open();
    let stag = target.region.lkey().0;
    let mut batch: Vec<SendRequest<'_>> = (0..10)
        .map(|n| {
            let from = RemoteAddr { addr: 1000 + n, rkey: Stag(7) };
            SendRequest::read(100 + n, target.region.sge(n, 1), from).signaled()
        })
        .collect();
    batch.push(SendRequest::send_inline(110, b"").signaled());
    qp.post_send(&batch).unwrap();
    let request = |peer: &mut TcpStream, n: u8| {
        let ulpdu = next_ulpdu(peer);
        assert_eq!((ulpdu[1], ulpdu[13]), (0x41, n + 1), "request {n}");
        assert_eq!(ulpdu[18 + 20..], (1000 + u64::from(n)).to_be_bytes());
    };
    request(&mut peer, 0);
    request(&mut peer, 1);
    for n in 0..10 {
        // No request may precede the next response. An early one would have arrived by now.
        peer.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let early = peer.read(&mut [0]);
        let nothing =
            |e: &std::io::Error| matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
        assert!(early.as_ref().is_err_and(nothing), "{early:?} before response {n}");
        peer.set_read_timeout(Some(DEADLINE)).unwrap();
        let at = target.region.iova() + u64::from(n);
        wire::send_bytes(&mut peer, &fpdu(&tagged(2, stag, at, &[n])));
        if n < 8 {
            request(&mut peer, n + 2);
        }
        if n == 7 {
            assert_eq!(next_ulpdu(&mut peer), untagged(3, 0, 1, b""), "the Send, with the last");
        }
        assert_eq!(target.completion().ok().unwrap().wr_id, 100 + u64::from(n));
    }
    assert_eq!(target.completion().ok().unwrap().wr_id, 110);
    assert_eq!(target.memory()[..10], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
    drop((peer, qp));
}

//= RDMAP-5.2.2-4
//= RDMAP-5.2.2-7
/// A Read Response that does not match the request ends the stream and the Read, and changes
/// nothing outside the sink.
#[test]
fn mismatched_read_response_is_an_error() {
    let daemon = tcp_daemon("[limits.peer]\nstag_guesses_per_minute = 1000000\n");
    let target = Target::new(&daemon);
    let stag = target.region.lkey().0;
    let base = target.region.iova() + 100;
    let other = target.inbox.lkey().0;
    let alone = |response: Vec<u8>| vec![response];
    let cases = [
        ("another STag", alone(tagged(2, other, base, &[1; 10])), [0x11, 0]),
        ("before the sink", alone(tagged(2, stag, base - 1, &[1; 10])), [0x11, 1]),
        ("behind it", alone(tagged(2, stag, base + 1, &[1; 10])), [0x11, 1]),
        ("too long", alone(tagged(2, stag, base, &[1; 11])), [0x11, 1]),
        ("too short", alone(tagged(2, stag, base, &[1; 9])), [0x11, 1]),
        ("twice", vec![tagged(2, stag, base, &[1; 10]); 2], [0x02, 6]),
    ];
    for (what, responses, code) in cases {
        target.region.fill(0, LEN, UNTOUCHED).unwrap();
        let (mut peer, qp) = target.open();
        let from = RemoteAddr { addr: 0, rkey: Stag(7) };
        qp.post_send(&[SendRequest::read(9, target.region.sge(100, 10), from).signaled()]).unwrap();
        next_ulpdu(&mut peer);
        wire::send_bytes(&mut peer, &responses.iter().flat_map(|r| fpdu(r)).collect::<Vec<u8>>());
        assert_eq!(terminated(&mut peer)[..2], code, "{what}");
        let read = target.completion();
        assert_eq!((read.wr_id, read.status == CompletionStatus::Success), (9, what == "twice"));
        let memory = target.memory();
        let outside = memory[..100].iter().chain(&memory[110..]);
        assert!(outside.copied().all(|byte| byte == UNTOUCHED), "{what}");
        drop(peer);
        qp.wait_disconnected(Some(DEADLINE)).unwrap();
        target.flushed(2);
    }
}

//= RDMAP-5.3-13
//= RDMAP-5.3-14
//= RDMAP-7.2-4
//= RDMAP-7.2-5
/// The receive names the STag, and a Write directly after it must fail. STags that do not belong to
/// the stream alone remain valid.
#[test]
fn send_inv_revokes_before_completion() {
    let daemon = tcp_daemon("[limits.peer]\nstag_guesses_per_minute = 1000000\n");
    let target = Target::new(&daemon);
    let buffer = target.context.create_shared_buffer(64).unwrap();
    let own = |qp: &Qp| {
        let options = rnic_client::MrOptions {
            access: Access::LOCAL_WRITE | Access::REMOTE_WRITE,
            scope: Scope::Qp(qp.id()),
            ..Default::default()
        };
        target.pd.reg_mr_with(&buffer, .., &options).unwrap()
    };
    let invalidate = |opcode, stag: Stag| {
        let mut ulpdu = untagged(opcode, 0, 1, b"");
        ulpdu[2..6].copy_from_slice(&stag.0.to_be_bytes());
        fpdu(&ulpdu)
    };
    for opcode in [4, 6] {
        let (mut peer, qp) = target.open();
        let mr = own(&qp);
        let write = fpdu(&tagged(0, mr.rkey().0, mr.iova(), b"x"));
        wire::send_bytes(
            &mut peer,
            &[write.clone(), invalidate(opcode, mr.rkey()), write].concat(),
        );
        assert_eq!(terminated(&mut peer)[..2], [0x11, 0]);
        let receive = target.completion().ok().unwrap();
        assert_eq!((receive.invalidated, receive.solicited), (Some(mr.rkey()), opcode == 6));
        drop(peer);
        qp.wait_disconnected(Some(DEADLINE)).unwrap();
        target.flushed(1);
    }
    let (other_peer, other) = target.open();
    let foreign = own(&other);
    for (stag, code) in [(foreign.rkey(), [0x01, 9]), (target.region.rkey(), [0x02, 9])] {
        let (mut peer, qp) = target.open();
        wire::send_bytes(&mut peer, &invalidate(4, stag));
        assert_eq!(terminated(&mut peer)[..2], code);
        assert_eq!(target.completion().status, CompletionStatus::RemoteInvalidRequest);
        drop(peer);
        qp.wait_disconnected(Some(DEADLINE)).unwrap();
        target.flushed(1);
    }
    let mut peer = other_peer;
    let qp = other;
    let writes = [
        fpdu(&tagged(0, foreign.rkey().0, foreign.iova(), b"still")),
        fpdu(&target.write(0, b"there")),
        fpdu(&untagged(3, 0, 1, b"")),
    ];
    wire::send_bytes(&mut peer, &writes.concat());
    target.completion().ok().unwrap();
    let mut bytes = [0; 5];
    foreign.read_at(0, &mut bytes).unwrap();
    assert_eq!((&bytes, &target.memory()[..5]), (b"still", &b"there"[..]));
    drop((peer, qp));
}
