//! Corners of the interface where two rules meet: addresses that mean more than themselves, limits
//! of zero, the largest of everything, and the order in which a client is told.

use std::net::SocketAddr;

use rnic_client::{
    AcceptOptions, Access, Completion, CompletionStatus, ConnectOptions, DisconnectReason, Error,
    Event, Listener, Qp, QpOptions, RecvRequest, RemoteAddr, SendRequest,
};
use rnic_tests::{Client, DEADLINE, Daemon, PATHS, binaries, engine};

fn join(
    listener: &Listener,
    to: SocketAddr,
    (active, options): (&Qp, &ConnectOptions),
    (passive, answer): (&Qp, &AcceptOptions),
) {
    active.start_connect(to, options).unwrap();
    let request = listener.accept_request(Some(DEADLINE)).unwrap();
    assert_eq!(request.private_data(), options.private_data);
    request.accept(passive, answer).unwrap();
}

#[test]
fn a_listener_on_any_address_is_found_under_each() {
    for path in PATHS {
        let daemon = Daemon::start(binaries!(), &engine(2, path));
        let (a, b) = (Client::new(&daemon), Client::new(&daemon));
        for (bound, asked) in [
            ("0.0.0.0:0", "127.0.0.1"),
            ("0.0.0.0:0", "127.0.0.9"),
            ("127.0.0.2:0", "127.0.0.2"),
            ("[::1]:0", "::1"),
            ("[::]:0", "::1"),
        ] {
            let listener = b.listen(bound);
            let to = SocketAddr::new(asked.parse().unwrap(), listener.local_addr().port());
            let (qp, other) = (a.qp(), b.qp());
            join(&listener, to, (&qp, &Default::default()), (&other, &Default::default()));
            let connected = qp.wait_connected(Some(DEADLINE)).unwrap();
            assert_eq!(connected.addresses.peer, to, "{path} {bound}");
            let rows = [qp.query().unwrap(), other.query().unwrap()];
            assert_eq!((&rows[0].path[..], &rows[1].path[..]), (path, path), "{bound} as {asked}");
            let [here, there] = rows.map(|row| row.addresses.unwrap());
            assert_eq!((here.local, here.peer), (there.peer, there.local), "{path} {bound}");
        }
        // An address that nobody listens on, though the port is right.
        let listener = b.listen("127.0.0.2:0");
        let to = SocketAddr::new([127, 0, 0, 3].into(), listener.local_addr().port());
        let e = a.qp().connect(to, &ConnectOptions::default()).unwrap_err();
        assert!(matches!(e, Error::Unreachable { .. }), "{path}: {e}");
    }
}

//= MPA-7.1.1-20
//= MPA-7.1.2-9a
#[test]
fn private_data_of_every_length_arrives_on_both_paths() {
    for path in PATHS {
        let daemon = Daemon::start(binaries!(), &engine(2, path));
        let (a, b) = (Client::new(&daemon), Client::new(&daemon));
        let listener = b.listener();
        for (len, revision) in [(0, 2), (1, 2), (508, 2), (509, 1), (512, 1)] {
            let private_data: Vec<u8> = (0..len).map(|n| n as u8 ^ 0x5A).collect();
            let options =
                ConnectOptions { private_data: private_data.clone(), ..Default::default() };
            let (qp, other) = (a.qp(), b.qp());
            qp.start_connect(listener.local_addr(), &options).unwrap();
            let request = listener.accept_request(Some(DEADLINE)).unwrap();
            assert_eq!((request.private_data(), request.revision()), (&private_data[..], revision));
            let answer = AcceptOptions { private_data: private_data.clone(), ..Default::default() };
            request.start_accept(&other, &answer).unwrap();
            let connected = qp.wait_connected(Some(DEADLINE)).unwrap();
            assert_eq!(connected.private_data, private_data, "{path} {len}");
            assert_eq!(connected.revision, revision, "{path} {len}");
            // What the initiator sends first shows that it is ready, also as revision 1.
            other.post_recv(&[RecvRequest::new(1, &[])]).unwrap();
            qp.post_send(&[SendRequest::send_inline(1, b"")]).unwrap();
            let accepted = other.wait_connected(Some(DEADLINE)).unwrap();
            assert_eq!(accepted.revision, revision, "{path} {len}");
            b.completions(1);
        }
        let options = ConnectOptions { private_data: vec![0; 513], ..Default::default() };
        let e = a.qp().connect(listener.local_addr(), &options).unwrap_err();
        assert!(matches!(e, Error::PrivateDataTooLong { given: 513, max: 512 }), "{e}");
    }
}

#[test]
fn without_outbound_reads_a_read_fails_and_does_not_wait_for_ever() {
    for path in PATHS {
        let daemon = Daemon::start(binaries!(), &engine(2, path));
        let (a, b) = (Client::new(&daemon), Client::new(&daemon));
        let listener = b.listener();
        let (qp, other) = (a.qp(), b.qp());
        let none = AcceptOptions { ird: Some(0), ord: Some(0), ..Default::default() };
        let options = ConnectOptions { ird: Some(0), ord: Some(0), ..Default::default() };
        join(&listener, listener.local_addr(), (&qp, &options), (&other, &none));
        let connected = qp.wait_connected(Some(DEADLINE)).unwrap();
        assert_eq!((connected.ird, connected.ord), (0, 0), "{path}");
        let buffer = a.context.create_shared_buffer(4096).unwrap();
        let sink = a.pd.reg_mr(&buffer, .., Access::LOCAL_WRITE).unwrap();
        let from = RemoteAddr { addr: 0, rkey: sink.rkey() };
        qp.post_send(&[SendRequest::read(5, sink.sge(0, 8), from).signaled()]).unwrap();
        let completion = a.completions(1)[0];
        assert_ne!(completion.status, CompletionStatus::Success, "{path}");
        assert_ne!(completion.status, CompletionStatus::WrFlush, "{path}");
    }
}

#[test]
fn the_largest_of_everything_is_granted_and_works() {
    let daemon = Daemon::start(binaries!(), &engine(2, "direct"));
    let (a, b) = (Client::new(&daemon), Client::new(&daemon));
    let device = a.context.device().unwrap();
    let cq = a.context.create_cq(device.max_cq_entries, None).unwrap();
    let options = QpOptions {
        sq_depth: device.max_wr_depth,
        rq_depth: device.max_wr_depth,
        max_send_sge: device.max_sge,
        max_recv_sge: device.max_sge,
        max_inline: device.max_inline,
        ..QpOptions::new(&cq)
    };
    let qp = a.pd.create_qp(&options).unwrap();
    let listener = b.listener();
    let other_cq = b.context.create_cq(device.max_cq_entries, None).unwrap();
    let options = QpOptions { send_cq: &other_cq, recv_cq: &other_cq, ..options };
    let other = b.pd.create_qp(&options).unwrap();
    let depth = device.max_wr_depth as usize;
    let buffer = b.context.create_shared_buffer(65536).unwrap();
    let sink = b.pd.reg_mr(&buffer, .., Access::LOCAL_WRITE).unwrap();
    let sges: Vec<_> = (0..u64::from(device.max_sge)).map(|n| sink.sge(n * 64, 64)).collect();
    other.post_recv(&vec![RecvRequest::new(7, &sges); depth]).unwrap();
    let full = other.post_recv(&[RecvRequest::new(8, &sges)]).unwrap_err();
    assert!(matches!(full.source, Error::QueueFull { .. }));
    join(
        &listener,
        listener.local_addr(),
        (&qp, &Default::default()),
        (&other, &Default::default()),
    );
    let bytes = vec![0x77; device.max_inline as usize];
    qp.post_send(&vec![SendRequest::send_inline(1, &bytes).signaled(); depth]).unwrap();
    let mut received = 0;
    while received < depth {
        let mut some = [Completion::default(); 256];
        let n = other_cq.wait(&mut some, Some(DEADLINE)).unwrap();
        assert_ne!(n, 0, "{received} of {depth}");
        assert!(some[..n].iter().all(|c| c.byte_len == u32::from(device.max_inline)));
        received += n;
    }
}

/// ESTABLISHED comes before the first completion can be seen, flushed requests before the end.
#[test]
fn a_client_is_told_in_the_promised_order() {
    for path in PATHS {
        let daemon = Daemon::start(binaries!(), &engine(2, path));
        let (a, b) = (Client::new(&daemon), Client::new(&daemon));
        let listener = b.listener();
        for _ in 0..50 {
            let (qp, other) = (a.qp(), b.qp());
            other.post_recv(&[RecvRequest::new(1, &[]); 8]).unwrap();
            // Posted before connecting: sent at once when the connection stands.
            qp.post_send(&[SendRequest::send_inline(2, b"").signaled()]).unwrap();
            qp.start_connect(listener.local_addr(), &ConnectOptions::default()).unwrap();
            let request = listener.accept_request(Some(DEADLINE)).unwrap();
            request.start_accept(&other, &AcceptOptions::default()).unwrap();
            for (side, id) in [(&a, qp.id()), (&b, other.id())] {
                side.completions(1);
                // No waiting: it must have been there before.
                let event = side.context.next_event(Some(std::time::Duration::ZERO)).unwrap();
                match event {
                    Some(Event::Established { qp, .. }) => assert_eq!(qp, id, "{path}"),
                    other => panic!("{path}: a completion before {other:?}"),
                }
            }
            qp.abort().unwrap();
            loop {
                match b.context.next_event(Some(DEADLINE)).unwrap() {
                    Some(Event::Disconnected { reason, .. }) => {
                        assert_ne!(reason, DisconnectReason::Orderly);
                        break;
                    }
                    Some(_) => {}
                    None => panic!("{path}: no end"),
                }
            }
            let mut some = [Completion::default(); 16];
            let n = b.cq.poll(&mut some).unwrap();
            let flushed = some[..n].iter().filter(|c| c.status == CompletionStatus::WrFlush);
            assert_eq!((n, flushed.count()), (7, 7), "{path}");
            while a.context.next_event(Some(std::time::Duration::ZERO)).unwrap().is_some() {}
        }
    }
}

/// Deregistering what a request of one's own still reads from fails that request alone among what
/// is told to the owner, and the peer never sees bytes from anywhere else.
#[test]
fn local_memory_may_be_taken_away_under_a_request() {
    for path in PATHS {
        let daemon = Daemon::start(binaries!(), &engine(2, path));
        let (a, b) = (Client::new(&daemon), Client::new(&daemon));
        let listener = b.listener();
        let len = 1 << 20;
        let buffer = b.context.create_shared_buffer(len).unwrap();
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let target = b.pd.reg_mr(&buffer, .., access).unwrap();
        for round in 0..30 {
            target.fill(0, len as usize, 0).unwrap();
            let (qp, other) = (a.qp(), b.qp());
            join(
                &listener,
                listener.local_addr(),
                (&qp, &Default::default()),
                (&other, &Default::default()),
            );
            qp.wait_connected(Some(DEADLINE)).unwrap();
            let buffer = a.context.create_shared_buffer(len).unwrap();
            let source = a.pd.reg_mr(&buffer, .., Access::LOCAL_WRITE).unwrap();
            source.fill(0, len as usize, 0x33).unwrap();
            let sges = [source.sge(0, len as u32)];
            let write = SendRequest::write(1, &sges, target.remote().at(0)).signaled();
            qp.post_send(&[write; 16]).unwrap();
            source.deregister().unwrap();
            drop(buffer);
            let completions = a.completions(16);
            let failed = completions.iter().find(|c| c.status != CompletionStatus::Success);
            if let Some(first) = failed {
                assert_eq!(first.status, CompletionStatus::LocalProtection, "{path} {round}");
                qp.wait_disconnected(Some(DEADLINE)).unwrap();
            }
            let mut found = vec![0; len as usize];
            target.read_at(0, &mut found).unwrap();
            assert!(found.iter().all(|byte| [0, 0x33].contains(byte)), "{path} {round}");
        }
    }
}
