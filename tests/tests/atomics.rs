//! Atomic operations on the same words by many connections, with several workers, over both paths,
//! and by the program itself. Each is executed exactly once and indivisibly.

use std::sync::Barrier;
use std::time::Instant;

use rnic_client::{Access, Completion, Context, Mr, Qp, QpOptions, RemoteMr, SendRequest};
use rnic_tests::attached::Region;
use rnic_tests::{Client, DEADLINE, Daemon, READ_WRITE, engine};

/// Number of words that all connections change.
const WORDS: usize = 4;
/// Number of connections, each with its own session and thread.
const CONNECTIONS: usize = 8;
/// Operations per batch, each with its own sink.
const BATCH: usize = 32;

const ATOMIC: Access = READ_WRITE.union(Access::REMOTE_ATOMIC);

/// Returns a pseudorandom number that selects the word and the operation.
fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// The successful operations of a batch: each word with its value before the increment.
type Counted = Vec<(usize, u64)>;

/// Increments words, by FetchAdd or by CmpSwap with the last known value. Returns the old values.
fn count(client: &Client, qp: &Qp, words: RemoteMr, batches: usize, seed: u64) -> Counted {
    let sinks = client.region(8 * BATCH as u64, Access::LOCAL_WRITE);
    let mut state = seed;
    let mut last = [0; WORDS];
    let mut counted = Counted::new();
    for _ in 0..batches {
        let plan: Vec<(usize, Option<u64>)> = (0..BATCH)
            .map(|_| {
                let choice = next(&mut state);
                let word = (choice >> 32) as usize % WORDS;
                // Most guesses are wrong and must change nothing.
                (word, choice.is_multiple_of(4).then_some(last[word]))
            })
            .collect();
        let requests: Vec<SendRequest<'_>> = (0..BATCH)
            .map(|n| {
                let (word, guess) = plan[n];
                let sink = sinks.sge(8 * n as u64, 8);
                let at = words.at(8 * word as u64);
                let request = match guess {
                    None => SendRequest::fetch_add(n as u64, sink, at, 1),
                    Some(guess) => SendRequest::compare_swap(n as u64, sink, at, guess, guess + 1),
                };
                if n + 1 == BATCH { request.signaled() } else { request }
            })
            .collect();
        qp.post_send(&requests).unwrap();
        let mut done = [Completion::default()];
        assert_eq!(client.cq.wait(&mut done, Some(DEADLINE)).unwrap(), 1);
        done[0].ok().unwrap();
        for (n, (word, guess)) in plan.into_iter().enumerate() {
            let was = sinks.load_u64(8 * n as u64).unwrap();
            if guess.is_none_or(|guess| guess == was) {
                counted.push((word, was));
                last[word] = was + 1;
            } else {
                last[word] = was;
            }
        }
    }
    counted
}

/// Checks that each word was incremented from 0 to its present value, each increment exactly once.
fn nothing_is_lost(all: Vec<Counted>, found: [u64; WORDS]) -> usize {
    let all = all.concat();
    for (word, found) in found.into_iter().enumerate() {
        let mut were: Vec<u64> =
            all.iter().filter(|(of, _)| *of == word).map(|(_, was)| *was).collect();
        were.sort_unstable();
        assert!(were.iter().copied().eq(0..found), "word {word}: {} of {found}", were.len());
    }
    all.len()
}

/// Connects clients to the owner of the words and lets all increment them at once. If `own` is set,
/// the owner does so, too.
fn all_count(
    daemon: &Daemon,
    server: &Client,
    words: RemoteMr,
    batches: usize,
    own: impl Fn() -> Counted + Sync,
) -> Vec<Counted> {
    let clients: Vec<(Client, Qp, Qp)> = (0..CONNECTIONS)
        .map(|_| {
            let client = Client::new(daemon);
            let options = QpOptions { sq_depth: BATCH as u32, ..client.options() };
            let qp = client.pd.create_qp(&options).unwrap();
            let served = server.qp();
            server.join(&qp, &served);
            (client, qp, served)
        })
        .collect();
    let start = Barrier::new(CONNECTIONS + 1);
    std::thread::scope(|scope| {
        let counting: Vec<_> = (1u64..)
            .zip(&clients)
            .map(|(seed, (client, qp, _))| {
                let start = &start;
                scope.spawn(move || {
                    start.wait();
                    count(client, qp, words, batches, seed << 32)
                })
            })
            .collect();
        start.wait();
        let mine = own();
        let theirs = counting.into_iter().map(|thread| thread.join().unwrap());
        theirs.chain([mine]).collect()
    })
}

/// Increments the words as their owner, with atomic instructions of the processor.
fn count_up(words: &Mr, times: usize) -> Counted {
    let mut state = 77;
    let add = |_| {
        let word = (next(&mut state) >> 32) as usize % WORDS;
        (word, words.fetch_add_u64(8 * word as u64, 1).unwrap())
    };
    (0..times).map(add).collect()
}

fn in_shared_memory(path: &str, batches: usize) -> usize {
    let daemon = Daemon::start(&engine(3, path));
    let server = Client::new(&daemon);
    let words = server.region(8 * WORDS as u64, ATOMIC);
    // Enough to last about as long as the connections take.
    let own = || count_up(&words, CONNECTIONS * batches * BATCH / 8);
    let all = all_count(&daemon, &server, words.remote(), batches, own);
    let found = std::array::from_fn(|word| words.load_u64(8 * word as u64).unwrap());
    nothing_is_lost(all, found)
}

/// A million operations in total, including failed compares.
#[test]
fn a_million_operations_lose_nothing() {
    let started = Instant::now();
    let direct = in_shared_memory("direct", 2400);
    let tcp = in_shared_memory("tcp", 2400);
    assert!(direct + tcp >= 1_000_000, "{direct} + {tcp}");
    eprintln!("{direct} directly, {tcp} over TCP, in {:?}", started.elapsed());
}

/// Remote operations only. In memory that is not shared, they are not atomic with the program's own
/// instructions.
#[test]
fn concurrent_atomics_on_attached_memory() {
    for path in ["direct", "tcp"] {
        let daemon = Daemon::start(&engine(3, path));
        let context = Context::open_at(daemon.socket()).unwrap();
        let server = Client::of(&context);
        let words = Region::new(&server.pd, vec![0; 8 * WORDS], ATOMIC).unwrap();
        let all = all_count(&daemon, &server, words.remote(), 200, Vec::new);
        let found = std::array::from_fn(|word| words.memory.load_u64(8 * word).unwrap());
        assert!(nothing_is_lost(all, found) > 0, "{path}");
    }
}
