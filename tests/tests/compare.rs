//! `wired.compare`, which enables the comparison of the PSNs and path MTUs of both ends.

use std::net::IpAddr;

use rnic_client::{
    Access, Completion, CompletionStatus, Gid, Qp, QpType, RecvRequest, SendRequest, Sending,
    Wiring,
};
use rnic_tests::client::Client;
use rnic_tests::{Daemon, ports};

const HOSTS: [[u8; 4]; 2] = [[127, 0, 62, 1], [127, 0, 62, 2]];

/// A timeout long enough for a connection on a busy machine.
const SENDING: Sending = Sending { sq_psn: 7, timeout: 20, retry_count: 7, rnr_retry: 7, ord: 0 };

/// A timeout after which requests fail in nine seconds. Even on a busy machine the daemon finds the
/// reason earlier.
const QUICK: Sending = Sending { timeout: 18, ..SENDING };

struct End {
    client: Client,
    qp: Qp,
    gid: Gid,
}

impl End {
    fn new(daemon: &Daemon) -> Self {
        let client = Client::new(daemon);
        let qp = client.qp_of(QpType::Rc);
        let gid = client.context.gids().unwrap()[0].gid;
        End { client, qp, gid }
    }

    fn to_rtr(&self, to: &End, path_mtu: u16, rq_psn: u32) {
        let wiring = Wiring {
            local: self.gid,
            remote: to.gid,
            remote_qp: to.qp.id(),
            rq_psn,
            path_mtu,
            min_rnr_timer: 12,
            ird: 0,
            rights: Access::empty(),
        };
        self.qp.to_rtr(&wiring).unwrap();
    }

    fn sends(&self) -> Completion {
        self.qp.post_send(&[SendRequest::send_inline(1, b"").signaled()]).unwrap();
        self.client.completion()
    }
}

/// Starts two daemons, each with its own address.
fn daemons(compare: [bool; 2]) -> [Daemon; 2] {
    let port = ports::unused_port();
    [0, 1].map(|n| {
        let address = IpAddr::from(HOSTS[n]);
        let compare = compare[n];
        let config = format!(
            "[device]\naddresses = [\"{address}\"]\n[wired]\nport = {port}\ncompare = {compare}\n"
        );
        Daemon::start(&config)
    })
}

/// Runs `test` with two ends at one daemon, and with two ends at different daemons. The runs are
/// parallel, because some wait for a request to fail.
fn on_both_paths(compare: bool, test: impl Fn([End; 2]) + Sync) {
    let [x, y] = &daemons([compare; 2]);
    let test = &test;
    std::thread::scope(|scope| {
        for [a, b] in [[x, x], [x, y], [y, x]] {
            let ends = [End::new(a), End::new(b)];
            scope.spawn(move || test(ends));
        }
    });
}

#[test]
fn different_path_mtus_are_refused_in_one_line() {
    on_both_paths(true, refused);
}

fn refused([a, b]: [End; 2]) {
    a.to_rtr(&b, 1024, 7);
    b.to_rtr(&a, 2048, 7);
    a.qp.to_rts(&QUICK).unwrap();
    let failed = a.sends();
    assert_eq!(failed.status, CompletionStatus::TransportRetryExceeded);
    let text = a.client.context.diagnosis(failed.diagnosis_id).unwrap().text;
    assert!(text.contains("path MTU") && text.contains("wired.compare"), "{text}");
    assert!(!text.contains('\n'), "{text}");
}

/// The end with the lower address connects. In one setting it compares, in the other its peer does.
#[test]
fn one_daemon_that_compares_is_enough() {
    for compare in [[true, false], [false, true]] {
        let [x, y] = daemons(compare);
        refused([End::new(&x), End::new(&y)]);
    }
}

#[test]
fn different_numbers_work_without_comparison() {
    on_both_paths(false, |[a, b]| {
        a.to_rtr(&b, 1024, 8);
        b.to_rtr(&a, 4096, 9);
        b.qp.post_recv(&[RecvRequest::new(2, &[])]).unwrap();
        b.qp.to_rts(&SENDING).unwrap();
        a.qp.to_rts(&SENDING).unwrap();
        assert_eq!(a.sends().status, CompletionStatus::Success);
        assert_eq!(b.client.completion().status, CompletionStatus::Success);
    });
}

#[test]
fn equal_path_mtus_are_accepted() {
    on_both_paths(true, |[a, b]| {
        for path_mtu in [256, 512, 1024, 2048, 4096] {
            for (end, to) in [(&a, &b), (&b, &a)] {
                end.to_rtr(to, path_mtu, 7);
            }
            b.qp.post_recv(&[RecvRequest::new(2, &[])]).unwrap();
            b.qp.to_rts(&SENDING).unwrap();
            a.qp.to_rts(&SENDING).unwrap();
            assert_eq!(a.sends().status, CompletionStatus::Success);
            assert_eq!(b.client.completion().status, CompletionStatus::Success);
            a.qp.reset().unwrap();
            b.qp.reset().unwrap();
        }
    });
}
