//! Leased slices of registered memory in safe code, over both paths: a posted lease is returned
//! with the peer's data, and only the program's own requests can access it.

use rnic_client::{Access, CompletionStatus, Context, Lease, ListKind, Posted, Rows};
use rnic_tests::{Client, DEADLINE, Daemon, End, PATHS, engine};

/// Waits for the completion of a posted lease. Returns the lease.
fn reclaim(end: &End, posted: Posted) -> Lease {
    let completion = end.completion();
    assert_eq!(completion.wr_id, posted.wr_id());
    completion.ok().unwrap();
    posted.take().unwrap()
}

/// Connects two ends in one session.
fn pair(context: &Context) -> [End; 2] {
    End::joined([(); 2].map(|()| Client::of(context)))
}

#[test]
fn slices_are_leased_and_returned_by_every_op() {
    for path in PATHS {
        let daemon = Daemon::start(&engine(2, path));
        let context = Context::open_at(daemon.socket()).unwrap();
        let [a, b] = pair(&context);
        let of_a = a.pd.reg_local(1 << 20).unwrap();
        let of_b = b.pd.reg_local(1 << 20).unwrap();
        for round in 0..100_u8 {
            let posted = b.qp.post_recv_leased(1, of_b.lease(500..100_500).unwrap()).unwrap();
            let mut out = of_a.lease(..100_000).unwrap();
            out.fill(round);
            let sent = a.qp.post_send_leased(out.send(2)).unwrap();
            assert!(reclaim(&b, posted).iter().all(|byte| *byte == round), "{path} {round}");
            drop(reclaim(&a, sent));
        }
        // One-sided, to and from a region of the other end.
        let buffer = context.create_shared_buffer(1 << 20).unwrap();
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let target = b.pd.reg_mr(&buffer, .., access).unwrap();
        let mut out = of_a.lease(..1000).unwrap();
        out.copy_from_slice(&[9; 1000]);
        let mut out =
            reclaim(&a, a.qp.post_send_leased(out.write(3, target.remote().at(77))).unwrap());
        out.fill(0);
        let read = out.read(4, target.remote().at(77));
        assert_eq!(&reclaim(&a, a.qp.post_send_leased(read).unwrap())[..], [9; 1000], "{path}");
    }
}

#[test]
fn peers_cannot_access_leased_memory() {
    let daemon = Daemon::start("[engine]\nworkers = 2\n");
    let context = Context::open_at(daemon.socket()).unwrap();
    let [a, b] = pair(&context);
    let region = b.pd.reg_local(4096).unwrap();
    let Rows::Mrs(rows) = context.list(ListKind::Mrs, 0).unwrap().rows else {
        panic!("no regions")
    };
    let row = rows.iter().find(|row| row.mr == region.id()).unwrap();
    assert_eq!((row.access, row.length), (Access::LOCAL_WRITE, 4096));
    let waiting = b.qp.post_recv_leased(1, region.lease(2000..3000).unwrap()).unwrap();
    a.qp.abort().unwrap();
    b.qp.wait_disconnected(Some(DEADLINE)).unwrap();
    // The receive is flushed, and the program owns its memory again.
    assert_eq!(b.completion().status, CompletionStatus::WrFlush);
    assert_eq!(waiting.take().unwrap().len(), 1000);
}
