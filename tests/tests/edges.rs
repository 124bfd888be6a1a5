//! Corner cases of the interface where two rules meet: wildcard and mapped addresses, limits of
//! zero, maximum sizes, and the order of events and completions.

use std::net::SocketAddr;

use rnic_client::{
    AcceptOptions, Access, BindOptions, Completion, CompletionStatus, ConnectOptions, Context,
    DisconnectReason, Error, Event, ListKind, Listener, Qp, QpOptions, RecvRequest, RemoteAddr,
    RnrPolicy, Rows, SendRequest,
};
use rnic_tests::{Client, DEADLINE, Daemon, PATHS, engine};

fn join(
    listener: &Listener,
    to: SocketAddr,
    active: &Qp,
    options: &ConnectOptions,
    passive: &Qp,
    answer: &AcceptOptions,
) {
    active.start_connect(to, options).unwrap();
    let request = listener.accept_request(Some(DEADLINE)).unwrap();
    assert_eq!(request.private_data(), options.private_data);
    request.accept(passive, answer).unwrap();
}

#[test]
fn listener_is_reachable_at_each_bound_address() {
    for path in PATHS {
        let daemon = Daemon::start(&engine(2, path));
        let a = Client::new(&daemon);
        let b = Client::new(&daemon);
        for (bound, asked) in [
            ("0.0.0.0:0", "127.0.0.1"),
            ("0.0.0.0:0", "127.0.0.9"),
            ("127.0.0.2:0", "127.0.0.2"),
            ("[::1]:0", "::1"),
            ("[::]:0", "::1"),
        ] {
            let listener = b.listen(bound);
            let to = SocketAddr::new(asked.parse().unwrap(), listener.local_addr().port());
            let qp = a.qp();
            let other = b.qp();
            join(&listener, to, &qp, &Default::default(), &other, &Default::default());
            let connected = qp.wait_connected(Some(DEADLINE)).unwrap();
            assert_eq!(connected.addresses.peer, to, "{path} {bound}");
            let rows = [qp.query().unwrap(), other.query().unwrap()];
            assert_eq!((&rows[0].path[..], &rows[1].path[..]), (path, path), "{bound} as {asked}");
            let [here, there] = rows.map(|row| row.addresses.unwrap());
            assert_eq!((here.local, here.peer), (there.peer, there.local), "{path} {bound}");
        }
        // The port is right, but no listener has this address.
        let listener = b.listen("127.0.0.2:0");
        let to = SocketAddr::new([127, 0, 0, 3].into(), listener.local_addr().port());
        let e = a.qp().connect(to, &ConnectOptions::default()).unwrap_err();
        assert!(matches!(e, Error::Unreachable { .. }), "{path}: {e}");
    }
}

/// Programs with `RDMA_OPTION_ID_AFONLY` have one listener per address family.
#[test]
fn v6only_wildcard_shares_a_port_with_ipv4() {
    for path in PATHS {
        let daemon = Daemon::start(&engine(2, path));
        let a = Client::new(&daemon);
        let b = Client::new(&daemon);
        let only = |v6_only| BindOptions { v6_only };
        // The port that the kernel chooses for IPv6 may be in use by an IPv4 connection.
        let (of_6, port) = (0..100)
            .find_map(|_| {
                let of_6 = b.context.bind_with("[::]:0", only(true)).unwrap();
                let port = of_6.local_addr().port();
                std::net::TcpListener::bind(("0.0.0.0", port)).ok().map(|_| (of_6, port))
            })
            .expect("a port that is free for IPv4");
        of_6.listen(4).unwrap();
        let of_4 = SocketAddr::new([0, 0, 0, 0].into(), port);
        let of_all = SocketAddr::new([0u16; 8].into(), port);
        // Without an IPv4 listener, IPv4 is refused.
        let to = |ip: &str| SocketAddr::new(ip.parse().unwrap(), port);
        let e = a.qp().connect(to("127.0.0.1"), &ConnectOptions::default()).unwrap_err();
        assert!(matches!(e, Error::Unreachable { .. }), "{path}: {e}");
        let of_4 = b.context.bind_with(of_4, only(true)).unwrap();
        of_4.listen(4).unwrap();
        for (listener, asked) in [(&of_6, "::1"), (&of_4, "127.0.0.1")] {
            let qp = a.qp();
            let other = b.qp();
            join(listener, to(asked), &qp, &Default::default(), &other, &Default::default());
        }
        // A dual-stack listener conflicts with one of either family.
        for other in [of_6, of_4] {
            assert!(b.context.bind(of_all).is_err(), "{path}");
            drop(other);
        }
        let of_all = b.context.bind(of_all).unwrap();
        of_all.listen(4).unwrap();
        assert!(b.context.bind_with(to("0.0.0.0"), only(true)).is_err(), "{path}");
        let qp = a.qp();
        let other = b.qp();
        join(&of_all, to("127.0.0.1"), &qp, &Default::default(), &other, &Default::default());
    }
}

/// Programs that listen on a TCP port and on the RDMA port with the same number.
#[test]
fn rdma_port_may_map_to_another_tcp_port() {
    let held = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let rdma = held.local_addr().unwrap();
    // The kernel has just chosen and freed this port, so it does not assign it again soon.
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let map = format!("[ports]\nmap = {{ {} = {} }}\n", rdma.port(), tcp.port());
    for path in PATHS {
        let daemon = Daemon::start(&(engine(2, path) + &map));
        let a = Client::new(&daemon);
        let b = Client::new(&daemon);
        let listener = b.context.listen(rdma, 4).unwrap();
        assert_eq!(listener.local_addr(), rdma, "{path}");
        let Rows::Listeners(rows) = b.context.list(ListKind::Listeners, 0).unwrap().rows else {
            panic!("no listeners");
        };
        assert_eq!(rows[0].address, rdma, "{path}");
        let taken = b.context.bind(rdma).unwrap_err().to_string();
        assert!(taken.contains(&format!("a listener on {rdma}")), "{path}: {taken}");
        let qp = a.qp();
        qp.start_connect(rdma, &ConnectOptions::default()).unwrap();
        let request = listener.accept_request(Some(DEADLINE)).unwrap();
        assert_eq!(request.addresses().local, rdma, "{path}");
        let other = b.qp();
        let passive = request.accept(&other, &AcceptOptions::default()).unwrap();
        let active = qp.wait_connected(Some(DEADLINE)).unwrap();
        assert_eq!((active.addresses.peer, passive.addresses.local), (rdma, rdma), "{path}");
        for (row, end) in [(qp.query().unwrap(), "peer"), (other.query().unwrap(), "local")] {
            let addresses = row.addresses.unwrap();
            let shown = if end == "peer" { addresses.peer } else { addresses.local };
            assert_eq!(shown, rdma, "{path} {end}");
        }
        // Peers connect to the mapped TCP port.
        std::net::TcpStream::connect(tcp).unwrap();
    }
}

#[test]
fn a_taken_tcp_port_is_refused_with_the_key() {
    let held = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = held.local_addr().unwrap();
    let daemon = Daemon::start("");
    let client = Client::new(&daemon);
    let refused = client.context.bind(address).unwrap_err();
    let record = client.context.diagnosis(refused.diagnosis_id().unwrap()).unwrap();
    for text in [refused.to_string(), record.text] {
        let (_, line) = text.split_once('`').unwrap_or_else(|| panic!("{text}"));
        let (line, _) = line.split_once('`').unwrap_or_else(|| panic!("{text}"));
        assert!(line.starts_with(&format!("ports.map = {{ {} = ", address.port())), "{text}");
        assert!(text.contains("[ports] map"), "{text}");
        // The suggested line is valid configuration.
        drop(Daemon::start(line));
    }
}

/// A program without posted receives is notified that its peer has disconnected, and still receives
/// the messages sent earlier.
#[test]
fn disconnect_after_waiting_messages_is_reported() {
    let daemon = Daemon::start(&engine(2, "tcp"));
    let a = Client::new(&daemon);
    let b = Client::new(&daemon);
    let patient = RnrPolicy::Wait { timeout_ms: 30_000 };
    let qp = a.qp();
    let other = b.pd.create_qp(&QpOptions { rnr_policy: patient, ..b.options() });
    let other = other.unwrap();
    let listener = b.listener();
    let none = Default::default();
    join(&listener, listener.local_addr(), &qp, &none, &other, &Default::default());
    qp.wait_connected(Some(DEADLINE)).unwrap();
    let requests = [1, 2].map(|id| SendRequest::send_inline(id, b"").signaled());
    qp.post_send(&requests).unwrap();
    a.successes(2);
    qp.disconnect_within(DEADLINE).unwrap();
    b.event(|event| matches!(event, Event::PeerClosing { qp, .. } if *qp == other.id()));
    for id in [3, 4] {
        other.post_recv(&[RecvRequest::new(id, &[])]).unwrap();
    }
    assert_eq!(b.successes(2).iter().map(|c| c.wr_id).collect::<Vec<_>>(), [3, 4]);
    assert_eq!(other.wait_disconnected(Some(DEADLINE)).unwrap(), DisconnectReason::Orderly);
}

/// Servers that create a listener for each connection, and servers that restart.
#[test]
fn port_can_be_reused_with_open_connections() {
    for path in PATHS {
        let daemon = Daemon::start(&engine(2, path));
        let a = Client::new(&daemon);
        let b = Client::new(&daemon);
        let first = b.listener();
        let address = first.local_addr();
        let qp = a.qp();
        let other = b.qp();
        join(&first, address, &qp, &Default::default(), &other, &Default::default());
        qp.wait_connected(Some(DEADLINE)).unwrap();
        // The connection outlives its listener.
        drop(first);
        let again = b.context.listen(address, 4).unwrap();
        let second = a.qp();
        let its_peer = b.qp();
        join(&again, address, &second, &Default::default(), &its_peer, &Default::default());
        for (sender, receiver) in [(&qp, &other), (&second, &its_peer)] {
            receiver.post_recv(&[RecvRequest::new(7, &[])]).unwrap();
            sender.post_send(&[SendRequest::send_inline(1, &[]).signaled()]).unwrap();
            let [sent, received] = [&a, &b].map(|client| client.completions(1)[0]);
            assert!(sent.ok().is_ok() && received.ok().is_ok(), "{path}");
        }
        // The listener's end closes first, so its port is in TIME_WAIT.
        drop(again);
        for (end, of) in [(&other, &qp), (&its_peer, &second)] {
            end.disconnect().unwrap();
            of.wait_disconnected(Some(DEADLINE)).unwrap();
        }
        drop(b.context.listen(address, 4).unwrap());
    }
}

//= MPA-7.1.1-20
//= MPA-7.1.2-9a
#[test]
fn every_private_data_length_arrives() {
    for path in PATHS {
        let daemon = Daemon::start(&engine(2, path));
        let a = Client::new(&daemon);
        let b = Client::new(&daemon);
        let listener = b.listener();
        for (len, revision) in [(0, 2), (1, 2), (508, 2), (509, 1), (512, 1)] {
            let private_data: Vec<u8> = (0..len).map(|n| n as u8 ^ 0x5A).collect();
            let options =
                ConnectOptions { private_data: private_data.clone(), ..Default::default() };
            let qp = a.qp();
            let other = b.qp();
            qp.start_connect(listener.local_addr(), &options).unwrap();
            let request = listener.accept_request(Some(DEADLINE)).unwrap();
            assert_eq!((request.private_data(), request.revision()), (&private_data[..], revision));
            let answer = AcceptOptions { private_data: private_data.clone(), ..Default::default() };
            request.start_accept(&other, &answer).unwrap();
            let connected = qp.wait_connected(Some(DEADLINE)).unwrap();
            assert_eq!(connected.private_data, private_data, "{path} {len}");
            assert_eq!(connected.revision, revision, "{path} {len}");
            // The initiator's first message shows that it is ready, even in revision 1.
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
fn read_with_ord_0_fails_at_once() {
    for path in PATHS {
        let daemon = Daemon::start(&engine(2, path));
        let a = Client::new(&daemon);
        let b = Client::new(&daemon);
        let listener = b.listener();
        let qp = a.qp();
        let other = b.qp();
        let none = AcceptOptions { ird: Some(0), ord: Some(0), ..Default::default() };
        let options = ConnectOptions { ird: Some(0), ord: Some(0), ..Default::default() };
        join(&listener, listener.local_addr(), &qp, &options, &other, &none);
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

/// Programs that create every queue with the maximum length.
#[test]
fn session_may_have_several_maximal_queues() {
    let daemon = Daemon::start("");
    let context = Context::open_at(daemon.socket()).unwrap();
    let most = context.device().unwrap().max_cq_entries;
    assert!(most >= 262_144, "libfabric would not use this device");
    let cqs: Vec<_> = (0..8).map(|_| context.create_cq(most, None).unwrap()).collect();
    assert!(cqs.iter().all(|cq| cq.capacity() >= most));
}

#[test]
fn maximal_sizes_are_granted_and_work() {
    let daemon = Daemon::start(&engine(2, "direct"));
    let a = Client::new(&daemon);
    let b = Client::new(&daemon);
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
    join(&listener, listener.local_addr(), &qp, &Default::default(), &other, &Default::default());
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

/// ESTABLISHED precedes the first completion, and flushed requests precede DISCONNECTED.
#[test]
fn client_sees_events_in_order() {
    for path in PATHS {
        let daemon = Daemon::start(&engine(2, path));
        let a = Client::new(&daemon);
        let b = Client::new(&daemon);
        let listener = b.listener();
        for _ in 0..50 {
            let qp = a.qp();
            let other = b.qp();
            other.post_recv(&[RecvRequest::new(1, &[]); 8]).unwrap();
            // Posted before the connection exists, and sent as soon as it does.
            qp.post_send(&[SendRequest::send_inline(2, b"").signaled()]).unwrap();
            qp.start_connect(listener.local_addr(), &ConnectOptions::default()).unwrap();
            let request = listener.accept_request(Some(DEADLINE)).unwrap();
            request.start_accept(&other, &AcceptOptions::default()).unwrap();
            for (side, id) in [(&a, qp.id()), (&b, other.id())] {
                side.completions(1);
                // No wait: the event must precede the completion.
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
                    None => panic!("{path}: no disconnect event"),
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

/// Deregistering the source of an outstanding request fails only that request with a protection
/// error, and the peer never receives bytes from elsewhere.
#[test]
fn local_memory_may_be_revoked_during_a_request() {
    for path in PATHS {
        let daemon = Daemon::start(&engine(2, path));
        let a = Client::new(&daemon);
        let b = Client::new(&daemon);
        let listener = b.listener();
        let len = 1 << 20;
        let buffer = b.context.create_shared_buffer(len).unwrap();
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let target = b.pd.reg_mr(&buffer, .., access).unwrap();
        for round in 0..30 {
            target.fill(0, len as usize, 0).unwrap();
            let qp = a.qp();
            let other = b.qp();
            join(
                &listener,
                listener.local_addr(),
                &qp,
                &Default::default(),
                &other,
                &Default::default(),
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
