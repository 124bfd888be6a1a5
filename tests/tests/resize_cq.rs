//! CQs that are resized while their QPs are active: no completion is lost or duplicated, sleeping
//! waiters wake up, and limits hold before and after.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rnic_abi::abi::control::{QueueLocation, Refusal, ReplyBody, RequestBody};
use rnic_abi::abi::queue::{QueueShape, queue_header};
use rnic_abi::types::CqId;
use rnic_client::{
    Arm, Completion, CompletionOpcode, Context, Cq, CqOptions, CqRow, Error, ListKind, Listener,
    Pd, Qp, QpOptions, RecvRequest, Rows, SendRequest,
};
use rnic_tests::raw::Raw;
use rnic_tests::{DEADLINE, Daemon, PATHS, engine, join};

/// Number of QP pairs with traffic.
const PAIRS: usize = 4;
/// Outstanding requests and receives per QP.
const DEPTH: u64 = 16;
/// Sends per pair and round.
const ROUND: u64 = DEPTH / 2;

/// A session with QPs connected to each other. The test creates all of its CQs, because it counts
/// them.
struct Couples {
    context: Context,
    pd: Pd,
    listener: Listener,
}

impl Couples {
    fn new(daemon: &Daemon) -> Self {
        let context = Context::open_at(daemon.socket()).unwrap();
        let pd = context.open_pd(None).unwrap();
        let listener = context.listen("127.0.0.1:0", 8).unwrap();
        Couples { context, pd, listener }
    }

    /// Connects two QPs: the first sends, the second receives.
    fn pair(&self, send_cq: &Cq, recv_cq: &Cq) -> (Qp, Qp) {
        let depth = DEPTH as u32;
        let options = QpOptions {
            recv_cq,
            sq_depth: depth,
            rq_depth: depth,
            signal_all: true,
            ..QpOptions::new(send_cq)
        };
        let sender = self.pd.create_qp(&options).unwrap();
        let receiver = self.pd.create_qp(&options).unwrap();
        join(&self.listener, &sender, &receiver);
        (sender, receiver)
    }

    /// Returns the daemon's row for a CQ.
    fn row(&self, cq: &Cq) -> CqRow {
        let Rows::Cqs(rows) = self.context.list(ListKind::Cqs, 0).unwrap().rows else { panic!() };
        rows.into_iter().find(|row| row.cq == cq.id()).unwrap()
    }

    /// Waits until a CQ has `unread` unread completions.
    fn fills(&self, cq: &Cq, unread: u32) {
        let deadline = Instant::now() + DEADLINE;
        while self.row(cq).unread != unread {
            assert!(Instant::now() < deadline, "{:?}", self.row(cq));
            thread::yield_now();
        }
    }

    /// Returns the number of CQ entries that count against this session's limit.
    fn entries_in_use(&self) -> u64 {
        let mut from = 0;
        let key = "limits.session.cq_entries_total";
        loop {
            let page = self.context.list(ListKind::Limits, from).unwrap();
            let Rows::Limits(rows) = page.rows else { panic!() };
            if let Some(row) = rows.iter().find(|row| row.key == key) {
                return row.used;
            }
            from = page.next.unwrap_or_else(|| panic!("no {key}"));
        }
    }
}

fn send(qp: &Qp, from: u64, to: u64) {
    let requests: Vec<_> = (from..to).map(|n| SendRequest::send_inline(n, b"")).collect();
    qp.post_send(&requests).unwrap();
}

fn receive(qp: &Qp, from: u64, to: u64) {
    let requests: Vec<_> = (from..to).map(|n| RecvRequest::new(n, &[])).collect();
    qp.post_recv(&requests).unwrap();
}

fn refusal(result: Result<(), Error>) -> String {
    match result {
        Err(Error::Refused { refusal, .. }) => refusal.to_string(),
        other => panic!("{other:?}"),
    }
}

/// Progress of the traffic.
#[derive(Default)]
struct Progress {
    /// Messages received, by pair.
    received: Mutex<[u64; PAIRS]>,
    more: Condvar,
    resized: AtomicBool,
    /// Total number of messages, once known.
    total: AtomicU64,
}

impl Progress {
    /// Waits until `wanted` returns true for the received messages.
    fn until(&self, wanted: impl Fn(&[u64; PAIRS]) -> bool) {
        let received = self.received.lock().unwrap();
        let waited = self.more.wait_timeout_while(received, DEADLINE, |r| !wanted(r)).unwrap();
        assert!(!waited.1.timed_out(), "{:?}", waited.0);
    }

    fn sum(&self) -> u64 {
        self.received.lock().unwrap().iter().sum()
    }
}

/// Waits for completions, which must be successful and have this opcode.
fn expect(cq: &Cq, some: &mut [Completion], opcode: CompletionOpcode) -> usize {
    let n = cq.wait(some, Some(DEADLINE)).unwrap();
    assert!(n > 0, "a completion or its event is lost: {cq:?}");
    for completion in &some[..n] {
        assert_eq!(completion.ok().unwrap().opcode, opcode);
    }
    n
}

#[test]
fn resize_under_traffic_loses_no_completion() {
    for path in PATHS {
        let daemon = Daemon::start(&engine(2, path));
        let couples = Couples::new(&daemon);
        let send_cq = couples.context.create_cq(16, None).unwrap();
        let recv_cq = couples.context.create_cq(64, None).unwrap();
        let pairs: Vec<_> = (0..PAIRS).map(|_| couples.pair(&send_cq, &recv_cq)).collect();
        let mut workers: Vec<_> =
            pairs.iter().flat_map(|(a, b)| [a, b]).map(|qp| qp.query().unwrap().worker).collect();
        workers.sort();
        workers.dedup();
        assert_eq!(workers, [Some(0), Some(1)]);
        // Receives are posted before the first message, which would otherwise end its connection.
        pairs.iter().for_each(|(_, receiver)| receive(receiver, 0, DEPTH));
        let progress = Progress::default();
        thread::scope(|scope| {
            scope.spawn(|| receive_all(&pairs, &recv_cq, &progress));
            scope.spawn(|| resize_repeatedly(&send_cq, &recv_cq, &progress));
            send_all(&pairs, &send_cq, &progress);
        });
        let total = progress.total.load(Ordering::Relaxed);
        assert_eq!(progress.sum(), total);
        // No completion remains or was duplicated, and no entry is still reserved.
        for cq in [&send_cq, &recv_cq] {
            assert_eq!(cq.poll(&mut [Completion::default(); 4]).unwrap(), 0);
            let row = couples.row(cq);
            assert_eq!((row.capacity, row.completions), (cq.capacity(), total));
            assert_eq!((row.unread, row.reserved, row.in_error), (0, 0, false));
        }
        drop((pairs, send_cq, recv_cq, couples));
        daemon.is_empty();
    }
}

fn send_all(pairs: &[(Qp, Qp)], cq: &Cq, progress: &Progress) {
    let ids: Vec<_> = pairs.iter().map(|(sender, _)| sender.id()).collect();
    let mut sent = 0;
    let mut done = [0; PAIRS];
    let mut last = false;
    while !last {
        last = progress.resized.load(Ordering::Relaxed);
        // Half of the receives may not be posted again yet.
        progress.until(|received| received.iter().all(|r| sent - r <= DEPTH - ROUND));
        let next = sent + ROUND;
        if last {
            progress.total.store(next * PAIRS as u64, Ordering::Relaxed);
        }
        for (sender, _) in pairs {
            send(sender, sent, next);
        }
        sent = next;
        while done != [sent; PAIRS] {
            let mut some = [Completion::default(); 5];
            let n = expect(cq, &mut some, CompletionOpcode::Send);
            for completion in &some[..n] {
                let pair = ids.iter().position(|qp| *qp == completion.qp).unwrap();
                assert_eq!(completion.wr_id, done[pair]);
                done[pair] += 1;
            }
        }
    }
}

fn receive_all(pairs: &[(Qp, Qp)], cq: &Cq, progress: &Progress) {
    let ids: Vec<_> = pairs.iter().map(|(_, receiver)| receiver.id()).collect();
    loop {
        // A few at a time, so that some are unread when the queue is resized.
        let mut some = [Completion::default(); 3];
        let n = expect(cq, &mut some, CompletionOpcode::Receive);
        for completion in &some[..n] {
            let pair = ids.iter().position(|qp| *qp == completion.qp).unwrap();
            let nth = completion.wr_id;
            receive(&pairs[pair].1, nth + DEPTH, nth + DEPTH + 1);
            let mut received = progress.received.lock().unwrap();
            assert_eq!(nth, received[pair]);
            received[pair] += 1;
        }
        progress.more.notify_all();
        if progress.sum() == progress.total.load(Ordering::Relaxed) {
            return;
        }
    }
}

fn resize_repeatedly(send_cq: &Cq, recv_cq: &Cq, progress: &Progress) {
    // Requests reserve entries. With few entries workers wait, and continue when there are more.
    // Receives reserve none, so the CQ needs at least as many entries as there are receives.
    let of_sends = [1, 32, 4, 256, 2, 16];
    let of_receives = [256, 64, 1024, 128];
    let mut accepted = 0;
    let mut refused = 0;
    for n in 0..240 {
        let entries = of_sends[n % of_sends.len()];
        match send_cq.resize(entries) {
            Ok(()) => {
                assert_eq!(send_cq.capacity(), entries);
                accepted += 1;
            }
            other => {
                let text = refusal(other);
                assert!(text.starts_with("entries: ") && text.contains(" unread"), "{text}");
                refused += 1;
            }
        }
        let entries = of_receives[n % of_receives.len()];
        recv_cq.resize(entries).unwrap();
        assert_eq!(recv_cq.capacity(), entries);
        let before = progress.sum();
        progress.until(|received| received.iter().sum::<u64>() > before);
    }
    // At least the changes to a larger size succeed.
    assert!(accepted >= 240 / 6, "{accepted} accepted, {refused} refused");
    progress.resized.store(true, Ordering::Relaxed);
}

#[test]
fn resize_keeps_unread_completions_in_order() {
    let daemon = Daemon::start(&engine(2, "tcp"));
    let couples = Couples::new(&daemon);
    let send_cq = couples.context.create_cq(64, None).unwrap();
    let recv_cq = couples.context.create_cq(16, None).unwrap();
    let (sender, receiver) = couples.pair(&send_cq, &recv_cq);
    receive(&receiver, 0, 10);
    send(&sender, 0, 10);
    for cq in [&send_cq, &recv_cq] {
        couples.fills(cq, 10);
    }
    let mut two = [Completion::default(); 2];
    assert_eq!(send_cq.poll(&mut two).unwrap(), 2);
    let text = refusal(send_cq.resize(4));
    let start = "entries: 8 completions of CQ ";
    let end = "which is more than 4";
    assert!(text.starts_with(start) && text.contains(" 0 entries are reserved"), "{text}");
    assert!(text.ends_with(end), "{text}");
    assert_eq!((send_cq.capacity(), couples.row(&send_cq).capacity), (64, 64));
    for (cq, entries, from) in [(&send_cq, 8, 2), (&recv_cq, 1000, 0), (&recv_cq, 16, 0)] {
        cq.resize(entries).unwrap();
        assert_eq!(cq.capacity(), entries.next_power_of_two());
        assert_eq!(couples.row(cq).unread, 10 - from);
    }
    for (cq, from) in [(&send_cq, 2), (&recv_cq, 0)] {
        let mut all = [Completion::default(); 16];
        let n = cq.poll(&mut all).unwrap();
        let ids: Vec<_> = all[..n].iter().map(|c| c.ok().unwrap().wr_id).collect();
        assert_eq!(ids, (from..10).collect::<Vec<_>>());
    }
}

#[test]
fn growing_a_cq_wakes_waiting_workers() {
    for path in PATHS {
        let daemon = Daemon::start(&engine(2, path));
        let couples = Couples::new(&daemon);
        let send_cq = couples.context.create_cq(2, None).unwrap();
        let recv_cq = couples.context.create_cq(16, None).unwrap();
        let (sender, receiver) = couples.pair(&send_cq, &recv_cq);
        receive(&receiver, 0, 8);
        send(&sender, 0, 8);
        couples.fills(&send_cq, 2);
        // The client neither polls nor rings, so the daemon must wake its workers.
        send_cq.resize(4).unwrap();
        couples.fills(&send_cq, 4);
        send_cq.resize(16).unwrap();
        couples.fills(&send_cq, 8);
        let mut all = [Completion::default(); 16];
        assert_eq!(send_cq.poll(&mut all).unwrap(), 8);
        assert!(all[..8].iter().map(|c| c.ok().unwrap().wr_id).eq(0..8));
    }
}

#[test]
fn an_armed_queue_stays_armed_for_one_event() {
    let daemon = Daemon::start(&engine(2, "tcp"));
    let couples = Couples::new(&daemon);
    let channel = couples.context.create_completion_channel().unwrap();
    let options = CqOptions { entries: 16, channel: Some(&channel), context: 0 };
    let recv_cq = couples.context.create_cq_with(&options).unwrap();
    let send_cq = couples.context.create_cq(16, None).unwrap();
    let (sender, receiver) = couples.pair(&send_cq, &recv_cq);
    for round in 0..20 {
        receive(&receiver, round, round + 1);
        recv_cq.arm(Arm::Next).unwrap();
        for entries in [64, 8, 1024, 16] {
            recv_cq.resize(entries).unwrap();
        }
        assert_eq!(channel.recv(Some(Duration::ZERO)).unwrap(), None);
        send(&sender, round, round + 1);
        assert_eq!(channel.recv(Some(DEADLINE)).unwrap(), Some(recv_cq.id()));
        // The CQ is no longer armed, even after another resize.
        recv_cq.resize(32).unwrap();
        let mut two = [Completion::default(); 2];
        assert_eq!(recv_cq.poll(&mut two).unwrap(), 1);
        assert_eq!(two[0].wr_id, round);
        assert!(send_cq.wait(&mut two, Some(DEADLINE)).unwrap() == 1);
    }
    receive(&receiver, 20, 21);
    send(&sender, 20, 21);
    couples.fills(&recv_cq, 1);
    assert_eq!(channel.recv(Some(Duration::ZERO)).unwrap(), None);
}

#[test]
fn resize_reports_limits_and_frees_old_entries() {
    let limits = "[limits]\ncq_entries = 131072\n\
                  [limits.session]\ncq_entries_total = 100000\narena_bytes = \"1MiB\"\n";
    let daemon = Daemon::start(limits);
    let couples = Couples::new(&daemon);
    let cq = couples.context.create_cq(16, None).unwrap();
    let starts = |entries, start: &str| {
        let text = refusal(cq.resize(entries));
        assert!(text.starts_with(start), "{text}");
        assert_eq!((cq.capacity(), couples.entries_in_use()), (16, 16));
    };
    starts(0, "entries: a CQ has at least one entry");
    starts(131_073, "entries = 131073 is above limits.cq_entries = 131072");
    let start =
        "limits.session.cq_entries_total = 100000 reached (asked for 131056 more, 16 in use";
    starts(131_072, start);
    starts(65_536, "limits.session.arena_bytes = 1048576 reached");
    let arena_bytes = |cycles| {
        for _ in 0..cycles {
            for entries in [1024, 16, 4096, 64, 2048, 16] {
                cq.resize(entries).unwrap();
                assert_eq!(couples.entries_in_use(), u64::from(entries));
            }
        }
        couples.context.status().unwrap().arena_bytes
    };
    assert_eq!(arena_bytes(2), arena_bytes(50), "old locations are reused");
    // The same size keeps the same memory.
    cq.resize(9).unwrap();
    assert_eq!((cq.capacity(), couples.entries_in_use()), (16, 16));
    drop(cq);
    assert_eq!(couples.entries_in_use(), 0);
    drop(couples);
    daemon.is_empty();
}

/// A hostile client.
struct Vandal {
    raw: Raw,
    cq: CqId,
    place: QueueLocation,
}

impl Vandal {
    fn open(daemon: &Daemon) -> Self {
        let mut raw = Raw::open(daemon.socket());
        let body = RequestBody::CreateCq { entries: 16, channel: None, context: 0 };
        match raw.try_call(body, &[]) {
            Some(Ok(ReplyBody::Cq { cq, queue, .. })) => Vandal { raw, cq, place: queue },
            other => panic!("{other:?}"),
        }
    }

    fn resize(&mut self, cq: CqId, entries: u32) -> Result<QueueLocation, Refusal> {
        match self.raw.try_call(RequestBody::ResizeCq { cq, entries }, &[]) {
            Some(Ok(ReplyBody::Cq { cq: same, queue, .. })) if same == cq => Ok(queue),
            Some(Err(refusal)) => Err(refusal),
            other => panic!("{other:?}"),
        }
    }

    fn scribble(&self, place: &QueueLocation, offset: usize, word: u64) {
        let arena = &self.raw.arenas[place.arena as usize];
        arena.store_u64(place.offset as usize + offset, word).unwrap();
    }
}

#[test]
fn corrupted_cq_harms_only_its_client() {
    let daemon = Daemon::start(&engine(2, "tcp"));
    let couples = Couples::new(&daemon);
    let theirs = couples.context.create_cq(16, None).unwrap();
    let mut vandal = Vandal::open(&daemon);
    let refused = vandal.resize(theirs.id(), 64).unwrap_err().to_string();
    assert!(refused.contains("CQ") && theirs.capacity() == 16, "{refused}");
    // Overwrites all of its former queue, and the new one except for the consumer index.
    let cq = vandal.cq;
    let mut place = vandal.place;
    for entries in [64, 16, 1024, 32] {
        let new = vandal.resize(cq, entries).unwrap();
        assert_eq!(new.shape, QueueShape::completion(entries));
        for offset in (0..place.shape.bytes()).step_by(8) {
            vandal.scribble(&place, offset, u64::MAX);
        }
        let words = (0..new.shape.bytes()).step_by(8);
        for offset in words.filter(|offset| *offset != queue_header::CONSUMER) {
            vandal.scribble(&new, offset, u64::MAX);
        }
        place = new;
    }
    // The daemon checks the consumer index.
    vandal.scribble(&place, queue_header::CONSUMER, 1);
    let refused = vandal.resize(cq, 64).unwrap_err().to_string();
    assert!(refused.contains("is dead"), "{refused}");
    daemon.wait_status("ended", |s| s.sessions_ended == 1);
    drop(vandal);
    let (sender, receiver) = couples.pair(&theirs, &theirs);
    receive(&receiver, 0, 1);
    send(&sender, 0, 1);
    theirs.resize(64).unwrap();
    let mut found = 0;
    while found < 2 {
        let n = theirs.wait(&mut [Completion::default(); 2], Some(DEADLINE)).unwrap();
        assert!(n > 0);
        found += n;
    }
    drop((sender, receiver, theirs, couples));
    daemon.is_empty();
}
