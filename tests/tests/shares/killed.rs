//! To the survivor, a peer that is killed under traffic is a peer that stops answering: requests
//! fail with "retries exceeded" and never with an error of the peer's program.

use rnic_client::{Completion, CompletionStatus, QpOptions, QpType, SendRequest};
use rnic_tests::client::READ_WRITE;
use rnic_tests::mortal::{HASTY, LENT, RECEIVE, offered, wire};
use rnic_tests::traffic::Rng;
use rnic_tests::{Client, DEADLINE, Daemon, engine};

/// Number of outstanding requests.
const UNDER_WAY: usize = 24;

fn only_retries_are_exceeded(loopback: &str) {
    let config = format!(
        "{}[control]\nmode = \"0666\"\n[device]\naddresses = [\"127.0.77.2\"]\n",
        engine(2, loopback)
    );
    let daemon = Daemon::start(&config);
    let survivor = Client::new(&daemon);
    let gid = survivor.context.gids().unwrap()[0].gid;
    let own = survivor.region(LENT as u64, READ_WRITE);
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        rnic_tests::omit("not root: all clients run as the daemon's user, so no library copies");
    }
    let mut rng = Rng::new(5);
    for round in 0..KILLS {
        let options = QpOptions { kind: QpType::Rc, sq_depth: 64, ..survivor.options() };
        let qp = survivor.pd.create_qp(&options).unwrap();
        let peer = qp.id().to_string();
        // A worker copies for the daemon's own user, the library for other users.
        let mut mortal = if round % 2 == 1 && is_root {
            daemon.actor_as(61_006, &["answer", &peer])
        } else {
            daemon.actor(&["answer", &peer])
        };
        let (number, lent) = offered(&mortal.line_after("answers as "));
        wire(&qp, gid, number).unwrap();
        // The stream is established: from now on only the kill ends it.
        let eight = [own.sge(0, 8)];
        qp.post_send(&[SendRequest::write(0, &eight, lent.at(0)).signaled()]).unwrap();
        let completed = survivor.cq.wait(&mut [Completion::default()], Some(DEADLINE)).unwrap();
        assert_eq!(completed, 1, "{loopback}, round {round}");
        qp.to_rts(&HASTY).unwrap();
        let lens = [8, 4000, 100_000];
        let mut posted = 0;
        let mut done = 0;
        // The time of the kill is random, counted in completions.
        let mut until_killed = Some((rng.below(400), mortal));
        let mut failed: Option<Completion> = None;
        while failed.is_none() || done < posted {
            while failed.is_none() && posted - done < UNDER_WAY {
                let len = lens[rng.below(3) as usize];
                let sge = own.sge(0, len);
                let at = lent.at(0);
                let part = [sge];
                let small = [own.sge(0, len.min(RECEIVE))];
                let request = match rng.below(3) {
                    0 => SendRequest::write(1, &part, at),
                    1 => SendRequest::read(1, sge, at),
                    _ => SendRequest::send(1, &small),
                };
                qp.post_send(&[request.signaled()]).unwrap();
                posted += 1;
            }
            let mut some = [Completion::default(); 16];
            let taken = survivor.cq.wait(&mut some, Some(DEADLINE)).unwrap();
            assert_ne!(taken, 0, "{loopback}, round {round}: {done} of {posted} completions");
            for completion in &some[..taken] {
                use CompletionStatus::{Success, TransportRetryExceeded, WrFlush};
                let status = completion.status;
                let why = completion.diagnosis_id;
                let expected = match failed {
                    None => [Success, TransportRetryExceeded],
                    Some(_) => [WrFlush, WrFlush],
                };
                assert!(
                    expected.contains(&status),
                    "{loopback}, round {round}: {status:?}: {:?}",
                    survivor.context.diagnosis(why)
                );
                if status == TransportRetryExceeded {
                    failed = Some(*completion);
                }
            }
            done += taken;
            if until_killed.as_ref().is_some_and(|(after, _)| done as u64 > *after)
                && let Some((_, mortal)) = until_killed.take()
            {
                mortal.kill();
            }
        }
        assert!(until_killed.is_none(), "{loopback}, round {round}: failure before the kill");
    }
}

/// Number of killed processes per path.
const KILLS: u64 = 100;

#[test]
fn survivors_see_retries_exceeded_direct() {
    only_retries_are_exceeded("direct");
}

#[test]
fn survivors_see_retries_exceeded_by_tcp() {
    only_retries_are_exceeded("tcp");
}
