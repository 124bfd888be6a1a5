//! Queue pairs that are wired by hand, as applications see them.

use std::net::TcpListener;

use rnic_client::{
    Access, Completion, CompletionOpcode, CompletionStatus, Event, Gid, Qp, QpOptions, QpState,
    QpType, RecvRequest, SendRequest, Sending, Wiring,
};
use rnic_tests::client::{Client, READ_WRITE};
use rnic_tests::{DEADLINE, Daemon, binaries};

/// A client and a QP of its own to be wired.
struct End {
    client: Client,
    qp: Qp,
    gid: Gid,
}

impl End {
    fn new(daemon: &Daemon) -> Self {
        let client = Client::new(daemon);
        let options = QpOptions { kind: QpType::Wired, ..client.options() };
        let qp = client.pd.create_qp(&options).unwrap();
        let gid = client.context.gids().unwrap()[0].gid;
        End { client, qp, gid }
    }

    /// To Rtr, wired to another end.
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

    /// The next completion is the success of this request.
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
}

const SENDING: Sending = Sending { sq_psn: 7, timeout: 14, retry_count: 7, rnr_retry: 7, ord: 4 };

fn daemon() -> Daemon {
    Daemon::start(binaries!(), "[control]\nmode = \"0666\"\n")
}

fn pair(daemon: &Daemon) -> [End; 2] {
    let [a, b] = [End::new(daemon), End::new(daemon)];
    a.to_rtr(&b);
    b.to_rtr(&a);
    a.to_rts();
    b.to_rts();
    [a, b]
}

#[test]
fn messages_of_every_kind_go_both_ways() {
    let daemon = daemon();
    let [a, b] = pair(&daemon);
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
        let add = SendRequest::fetch_add(5, source.sge(256, 8), remote.at(256), 3).signaled();
        from.qp.post_send(&[add]).unwrap();
        from.completes(5, CompletionOpcode::FetchAdd);
    }
    assert_eq!(a.qp.query().unwrap().state, QpState::Rts);
}

#[test]
fn a_request_that_nobody_acknowledges_fails_in_time_and_says_why() {
    let daemon = daemon();
    let [a, b] = [End::new(&daemon), End::new(&daemon)];
    a.to_rtr(&b);
    a.to_rts();
    a.qp.post_send(&[SendRequest::send_inline(1, b"x"), SendRequest::send_inline(2, b"y")])
        .unwrap();
    let failed = a.client.completions(2);
    assert_eq!(failed[0].status, CompletionStatus::TransportRetryExceeded);
    assert_eq!((failed[0].wr_id, failed[1].status), (1, CompletionStatus::WrFlush));
    let why = a.client.context.diagnosis(failed[0].diagnosis_id).unwrap();
    assert!(why.text.contains("has not been wired"), "{why:?}");
    assert_eq!(a.qp.query().unwrap().state, QpState::Error);
    // From the beginning.
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

/// Two daemons that find each other by TCP.
fn two_daemons() -> [Daemon; 2] {
    // One that the kernel gives to nobody else for a while.
    let port = TcpListener::bind("127.0.51.1:0").unwrap().local_addr().unwrap().port();
    ["127.0.51.1", "127.0.51.2"].map(|address| {
        let config = format!("[device]\naddresses = [\"{address}\"]\n[wired]\nport = {port}\n");
        Daemon::start(binaries!(), &config)
    })
}

#[test]
fn queue_pairs_of_two_daemons_find_each_other() {
    let daemons = two_daemons();
    let [a, b] = [End::new(&daemons[0]), End::new(&daemons[1])];
    a.to_rtr(&b);
    b.to_rtr(&a);
    a.to_rts();
    b.to_rts();
    for (from, to) in [(&a, &b), (&b, &a)] {
        to.qp.post_recv(&[RecvRequest::new(1, &[])]).unwrap();
        from.qp.post_send(&[SendRequest::send_inline(2, b"").signaled()]).unwrap();
        from.completes(2, CompletionOpcode::Send);
        to.completes(1, CompletionOpcode::Receive);
    }
    assert_eq!(a.qp.query().unwrap().path, "tcp");
}
