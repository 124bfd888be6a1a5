//! The library in tokio tasks: completions, connections and disconnects are awaited concurrently,
//! in one thread or several, alongside threads that block. Dropped futures lose nothing.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use rnic_client::{
    AcceptOptions, Access, Completion, CompletionOpcode, ConnectOptions, Context, Cq,
    DisconnectReason, Error, Event, Mr, Pd, Qp, QpOptions, RecvRequest, SendRequest,
};
use rnic_tests::{DEADLINE, Daemon, PATHS, engine, join};
use tokio::runtime::Builder;

/// Number of round trips of a pair.
const ROUNDS: u64 = 200;

/// Runs a future to completion in one thread. Panics at the deadline.
fn run<T>(future: impl Future<Output = T>) -> T {
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        tokio::time::timeout(DEADLINE, future).await.expect("completed before the deadline")
    })
}

/// One end of a connection, with a receive buffer.
struct End {
    qp: Qp,
    cq: Cq,
    inbox: Mr,
}

impl End {
    fn new(context: &Context, pd: &Pd, cq: Cq) -> End {
        let qp = pd.create_qp(&QpOptions::new(&cq)).unwrap();
        let buffer = context.create_shared_buffer(64).unwrap();
        let inbox = pd.reg_mr(&buffer, .., Access::LOCAL_WRITE).unwrap();
        qp.post_recv(&[RecvRequest::new(0, &[inbox.sge(0, 64)])]).unwrap();
        End { qp, cq, inbox }
    }

    fn send(&self, n: u64) {
        self.qp.post_send(&[SendRequest::send_inline(1, &n.to_le_bytes())]).unwrap();
    }

    /// Returns the number of the received message, and reposts its receive.
    fn take(&self, completion: Completion) -> u64 {
        assert_eq!(completion.ok().unwrap().opcode, CompletionOpcode::Receive);
        let mut bytes = [0; 8];
        self.inbox.read_at(0, &mut bytes).unwrap();
        self.qp.post_recv(&[RecvRequest::new(0, &[self.inbox.sge(0, 64)])]).unwrap();
        u64::from_le_bytes(bytes)
    }

    /// Returns the next message on a CQ that only this end uses.
    async fn next(&self) -> Result<u64, Error> {
        let all = self.cq.completions().await?;
        assert_eq!(all.len(), 1);
        Ok(self.take(all[0]))
    }

    async fn answer(self) -> Result<DisconnectReason, Error> {
        for n in 0..ROUNDS {
            assert_eq!(self.next().await?, n);
            self.send(n + 1);
        }
        self.qp.wait_disconnected_async().await
    }

    async fn ask(self) -> Result<DisconnectReason, Error> {
        for n in 0..ROUNDS {
            self.send(n);
            assert_eq!(self.next().await?, n + 1);
        }
        self.qp.disconnect()?;
        self.qp.wait_disconnected_async().await
    }
}

/// Opens `pairs` connections, with one task per end. All completions of a side use one channel.
async fn pairs(daemon: &Daemon, pairs: usize) {
    let sides = [(); 2].map(|()| {
        let context = Context::open_at(daemon.socket()).unwrap();
        let pd = context.open_pd(None).unwrap();
        let channel = context.create_completion_channel().unwrap();
        Arc::new((context, pd, channel))
    });
    let end = |side: &(Context, Pd, rnic_client::CompletionChannel)| {
        let cq = side.0.create_cq(16, Some(&side.2)).unwrap();
        End::new(&side.0, &side.1, cq)
    };
    let [server, client] = &sides;
    let listener = server.0.listen("127.0.0.1:0", 64).unwrap();
    let address = listener.local_addr();
    let visitors: Vec<_> = (0..pairs)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move {
                let end = end(&client);
                end.qp.connect_async(address, &ConnectOptions::default()).await?;
                end.ask().await
            })
        })
        .collect();
    let mut hosts = Vec::new();
    for _ in 0..pairs {
        let request = listener.accept_request_async().await.unwrap();
        let server = server.clone();
        hosts.push(tokio::spawn(async move {
            let end = end(&server);
            request.accept_async(&end.qp, &AcceptOptions::default()).await?;
            end.answer().await
        }));
    }
    for task in visitors.into_iter().chain(hosts) {
        assert_eq!(task.await.unwrap().unwrap(), DisconnectReason::Orderly);
    }
}

#[test]
fn many_pairs_of_tasks_share_one_thread() {
    for path in PATHS {
        let daemon = Daemon::start(&engine(2, path));
        run(pairs(&daemon, 16));
    }
}

#[test]
fn many_pairs_of_tasks_run_on_several_threads() {
    let daemon = Daemon::start(&engine(2, "direct"));
    let runtime = Builder::new_multi_thread().worker_threads(4).enable_all().build().unwrap();
    runtime.block_on(async {
        tokio::time::timeout(DEADLINE, pairs(&daemon, 16))
            .await
            .expect("completed before the deadline");
    });
}

fn connected(context: &Context) -> (End, End) {
    let pd = context.open_pd(None).unwrap();
    let listener = context.listen("127.0.0.1:0", 1).unwrap();
    let [a, b] = [(); 2].map(|()| End::new(context, &pd, context.create_cq(16, None).unwrap()));
    join(&listener, &a.qp, &b.qp);
    (a, b)
}

#[test]
fn cancelled_wait_loses_no_completion() {
    let daemon = Daemon::start(&engine(2, "direct"));
    let context = Context::open_at(daemon.socket()).unwrap();
    let (a, b) = connected(&context);
    run(async {
        for n in 0..300 {
            // The futures are dropped before, during and after the arrival of the completion.
            let timeout = Duration::from_micros(n % 100);
            let cancelled = tokio::time::timeout(timeout, b.cq.completions()).await;
            a.send(n);
            match cancelled {
                Ok(all) => panic!("{all:?} before anything was sent"),
                Err(_) => {
                    let first = tokio::time::timeout(timeout, b.next()).await;
                    let received = match first {
                        Ok(received) => received,
                        Err(_) => b.next().await,
                    };
                    assert_eq!(received.unwrap(), n);
                }
            }
        }
    });
}

#[test]
fn tasks_and_threads_share_one_cq() {
    let daemon = Daemon::start(&engine(2, "direct"));
    let context = Context::open_at(daemon.socket()).unwrap();
    let (a, b) = connected(&context);
    let b = Arc::new(b);
    // One receive at a time, so that only one message is outstanding.
    let by_threads: Vec<_> = (0..2)
        .map(|_| {
            let b = b.clone();
            std::thread::spawn(move || {
                let mut taken = Vec::new();
                loop {
                    let mut one = [Completion::default()];
                    assert_eq!(b.cq.wait(&mut one, Some(DEADLINE)).unwrap(), 1);
                    let n = b.take(one[0]);
                    b.send(n);
                    if n >= ROUNDS {
                        return taken;
                    }
                    taken.push(n);
                }
            })
        })
        .collect();
    let taken = run(async {
        let by_tasks: Vec<_> = (0..2)
            .map(|_| {
                let b = b.clone();
                tokio::spawn(async move {
                    let mut taken = Vec::new();
                    loop {
                        let n = b.next().await.unwrap();
                        b.send(n);
                        if n >= ROUNDS {
                            return taken;
                        }
                        taken.push(n);
                    }
                })
            })
            .collect();
        // Two tasks and two threads: one more message ends each of them.
        for n in 0..ROUNDS + 4 {
            a.send(n);
            assert_eq!(a.next().await.unwrap(), n);
        }
        let mut taken = Vec::new();
        for task in by_tasks {
            taken.extend(task.await.unwrap());
        }
        taken
    });
    let by_threads = by_threads.into_iter().flat_map(|thread| thread.join().unwrap());
    let mut all: Vec<u64> = by_threads.chain(taken).collect();
    all.sort_unstable();
    assert_eq!(all, (0..ROUNDS).collect::<Vec<_>>());
}

#[test]
fn dropped_connect_is_aborted() {
    let daemon = Daemon::start(&engine(2, "direct"));
    let context = Context::open_at(daemon.socket()).unwrap();
    let pd = context.open_pd(None).unwrap();
    let end = End::new(&context, &pd, context.create_cq(16, None).unwrap());
    // No accept call follows.
    let listener = context.listen("127.0.0.1:0", 4).unwrap();
    let options = ConnectOptions::default();
    run(async {
        let attempt = end.qp.connect_async(listener.local_addr(), &options);
        let request = listener.accept_request_async();
        let request = tokio::select! {
            done = attempt => panic!("{done:?}"),
            request = request => request.unwrap(),
        };
        // The future was dropped, so its connection request cannot be accepted any more.
        let other = End::new(&context, &pd, context.create_cq(16, None).unwrap());
        let accepted = request.accept_async(&other.qp, &AcceptOptions::default()).await;
        assert!(accepted.is_err(), "{accepted:?}");
        let unserved = "127.0.0.1:1";
        let refused = other.qp.connect_async(unserved, &options).await;
        assert!(refused.is_err(), "{refused:?}");
        // If no call waits for an attempt, an event reports its outcome.
        let qp = pd.create_qp(&QpOptions::new(&end.cq)).unwrap();
        qp.start_connect(([127, 0, 0, 1], 1).into(), &options).unwrap();
        loop {
            match context.next_event_async().await.unwrap() {
                Event::Unreachable { qp: of, .. } if of == qp.id() => break,
                _ => {}
            }
        }
    });
    drop(listener);
    let waits = async {
        tokio::join!(end.cq.completions(), context.next_event_async(), async {
            daemon.kill();
        })
    };
    let (completions, event, ()) = run(waits);
    assert!(matches!(event, Err(Error::DaemonGone)), "{event:?}");
    // The abort may have flushed the posted receive.
    match completions {
        Err(Error::DaemonGone) => {}
        Ok(flushed) => assert!(flushed.iter().all(|c| c.ok().is_err()), "{flushed:?}"),
        Err(e) => panic!("{e}"),
    }
}

/// Connects two QPs of one session, without receives.
fn bare_pair(context: &Context, pd: &Pd, cqs: [&Cq; 2]) -> [Qp; 2] {
    let listener = context.listen("localhost:0", 1).unwrap();
    let qps = cqs.map(|cq| pd.create_qp(&QpOptions::new(cq)).unwrap());
    join(&listener, &qps[0], &qps[1]);
    qps
}

#[test]
fn sends_and_receives_are_awaited_with_leases() {
    for path in PATHS {
        let daemon = Daemon::start(&engine(2, path));
        let context = Context::open_at(daemon.socket()).unwrap();
        let pd = context.open_pd(None).unwrap();
        let cqs = [(); 2].map(|()| context.create_cq(16, None).unwrap());
        let [a, b] = bare_pair(&context, &pd, [&cqs[0], &cqs[1]]);
        let region = pd.reg_local(4096).unwrap();
        run(async {
            for n in 0..ROUNDS {
                let receive = b.recv(region.lease(0..64).unwrap());
                let mut message = region.lease(64..72).unwrap();
                message.copy_from_slice(&n.to_le_bytes());
                let (received, sent) = tokio::join!(receive, a.send(message));
                let (lease, length) = received.unwrap();
                assert_eq!((&lease[..length], sent.unwrap().len()), (&n.to_le_bytes()[..], 8));
            }
            let receive = b.recv(region.lease(0..64).unwrap());
            let end = async {
                a.disconnect().unwrap();
                b.wait_disconnected_async().await.unwrap()
            };
            let (flushed, reason) = tokio::join!(receive, end);
            assert!(matches!(flushed, Err(Error::Failed { .. })), "{path}: {flushed:?}");
            assert_eq!(reason, DisconnectReason::Orderly, "{path}");
        });
        // The lease of the flushed receive has been returned.
        assert!(region.lease(..).is_ok(), "{path}");
    }
}

#[test]
fn awaited_completions_are_not_polled() {
    let daemon = Daemon::start(&engine(2, "direct"));
    let context = Context::open_at(daemon.socket()).unwrap();
    let pd = context.open_pd(None).unwrap();
    let cq = context.create_cq(16, None).unwrap();
    let [a, b] = bare_pair(&context, &pd, [&cq, &cq]);
    let region = pd.reg_local(4096).unwrap();
    run(async {
        for n in 0..ROUNDS {
            let polled = b.post_recv_leased(n, region.lease(0..64).unwrap()).unwrap();
            let message = region.lease(64..128).unwrap();
            // Either future may poll both completions from the CQ.
            let (sent, completions) = tokio::join!(a.send(message), cq.completions());
            assert_eq!(sent.unwrap().len(), 64);
            let completions = completions.unwrap();
            assert_eq!((completions.len(), completions[0].wr_id), (1, n));
            assert!(polled.take().is_ok());
        }
        let none = cq.poll(&mut [Completion::default()]).unwrap();
        assert_eq!(none, 0);
    });
}
