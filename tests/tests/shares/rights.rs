//! Changes to an RC QP take effect before they are answered.

use std::time::Instant;

use rnic_client::{
    Access, Completion, CompletionStatus, Gid, Qp, QpOptions, QpState, QpType, SendRequest,
    Sending, Wiring,
};
use rnic_tests::traffic::Rng;
use rnic_tests::{Client, DEADLINE, Daemon, engine};

const SENDING: Sending = Sending { sq_psn: 7, timeout: 20, retry_count: 7, rnr_retry: 7, ord: 4 };

const ALL: Access = Access::REMOTE_WRITE.union(Access::REMOTE_READ).union(Access::REMOTE_ATOMIC);

/// Bytes per Write, which is copied in several steps.
const WRITE: u32 = 192 * 1024;

/// Number of outstanding Writes.
const WRITES: usize = 120;

fn wire(qp: &Qp, gid: Gid, peer: &Qp) {
    let wiring = Wiring {
        local: gid,
        remote: gid,
        remote_qp: peer.id(),
        rq_psn: 7,
        path_mtu: 1024,
        min_rnr_timer: 12,
        ird: 4,
        rights: ALL,
    };
    qp.to_rtr(&wiring).unwrap();
}

fn qp(client: &Client) -> Qp {
    let options = QpOptions { kind: QpType::Rc, sq_depth: 128, ..client.options() };
    client.pd.create_qp(&options).unwrap()
}

/// Ways in which the owner ends the peer's access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Taking {
    Rights,
    Error,
}

/// Keeps [`WRITES`] Writes outstanding until one fails, and then waits for the rest. Returns the
/// total.
fn write_until_one_fails(writer: &Client, qp: &Qp, write: SendRequest<'_>) -> usize {
    let mut some = [Completion::default(); 64];
    let mut outstanding = 0;
    let mut posted = 0;
    let mut failed = false;
    while outstanding > 0 || !failed {
        if !failed {
            qp.post_send(&[write; WRITES][outstanding..]).unwrap();
            posted += WRITES - outstanding;
            outstanding = WRITES;
        }
        let taken = writer.cq.wait(&mut some, Some(DEADLINE)).unwrap();
        assert_ne!(taken, 0, "{outstanding} of {posted} Writes have not completed");
        outstanding -= taken;
        failed |= some[..taken].iter().any(|c| c.status != CompletionStatus::Success);
    }
    posted
}

/// Revokes write access while a peer writes as fast as it can, and then reuses the memory.
fn no_byte_lands(workers: u32, loopback: &str, taking: Taking) {
    let config = format!(
        "{}[device]\naddresses = [\"127.0.77.1\"]\n\
         [limits.peer]\nstag_guesses_per_minute = 1000000\n",
        engine(workers, loopback)
    );
    let daemon = Daemon::start(&config);
    let owner = Client::new(&daemon);
    let writer = Client::new(&daemon);
    let gid = owner.context.gids().unwrap()[0].gid;
    let buffer = owner.context.create_shared_buffer(WRITE.into()).unwrap();
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let region = owner.pd.reg_mr(&buffer, .., access).unwrap();
    let source = writer.region(WRITE.into(), Access::empty());
    source.fill(0, WRITE as usize, 0x11).unwrap();
    let own = qp(&owner);
    let theirs = qp(&writer);
    let mut rng = Rng::new(workers.into());
    let mut found = vec![0; WRITE as usize];
    for round in 0..ROUNDS {
        region.fill(0, WRITE as usize, 0).unwrap();
        wire(&own, gid, &theirs);
        wire(&theirs, gid, &own);
        own.to_rts(&SENDING).unwrap();
        theirs.to_rts(&SENDING).unwrap();
        let sges = [source.sge(0, WRITE)];
        let write = SendRequest::write(round, &sges, region.remote().at(0)).signaled();
        std::thread::scope(|scope| {
            // The writer never pauses, so that access is always revoked during a Write.
            let writing = scope.spawn(|| write_until_one_fails(&writer, &theirs, write));
            // Waits until a Write has reached a random offset.
            let at = rng.below(u64::from(WRITE) / 8) * 8;
            let began = Instant::now();
            while region.load_u64(at).unwrap() == 0 {
                assert!(began.elapsed() < DEADLINE, "round {round}: nothing was written");
                std::hint::spin_loop();
            }
            match taking {
                Taking::Rights => own.set_rights(Access::REMOTE_READ).unwrap(),
                Taking::Error => {
                    own.to_error().unwrap();
                    assert_eq!(own.query().unwrap().state, QpState::Error);
                }
            }
            region.fill(0, WRITE as usize, 0x22).unwrap();
            if taking == Taking::Error {
                // Outstanding Writes wait for retries, which do not matter here.
                theirs.to_error().unwrap();
            }
            assert_ne!(writing.join().unwrap(), 0, "round {round}");
        });
        region.read_at(0, &mut found).unwrap();
        let late = found.iter().filter(|byte| **byte != 0x22).count();
        assert_eq!(late, 0, "round {round}: {late} bytes came after {taking:?} was answered");
        own.reset().unwrap();
        theirs.reset().unwrap();
    }
}

/// Number of revocations.
const ROUNDS: u64 = 60;

#[test]
fn no_write_lands_without_the_right_direct() {
    for workers in [1, 3] {
        no_byte_lands(workers, "direct", Taking::Rights);
    }
}

#[test]
fn no_write_lands_without_the_right_by_tcp() {
    for workers in [1, 3] {
        no_byte_lands(workers, "tcp", Taking::Rights);
    }
}

#[test]
fn no_write_lands_at_a_qp_in_error_direct() {
    for workers in [1, 3] {
        no_byte_lands(workers, "direct", Taking::Error);
    }
}

#[test]
fn no_write_lands_at_a_qp_in_error_by_tcp() {
    for workers in [1, 3] {
        no_byte_lands(workers, "tcp", Taking::Error);
    }
}
