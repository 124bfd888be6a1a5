//! Atomic operations of many connections, of several workers, of both paths and of the program
//! itself on the same words: each is carried out once, and nothing comes in between.

use std::sync::Barrier;
use std::time::Instant;

use rnic_client::{
    Access, AttachedBuffer, Completion, Context, Mr, MrOptions, Qp, QpOptions, RemoteMr,
    SendRequest,
};
use rnic_tests::{Client, DEADLINE, Daemon, READ_WRITE, binaries, engine};

/// Words that all of them change.
const WORDS: usize = 4;
/// Connections that do, each with a session and a thread of its own.
const CONNECTIONS: usize = 8;
/// Operations of a batch, each with a sink of its own.
const BATCH: usize = 32;

const ATOMIC: Access = READ_WRITE.union(Access::REMOTE_ATOMIC);

/// A number for each operation: which word, and how it is changed.
fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// What came of a batch: each word with what it was before it was counted up.
type Counted = Vec<(usize, u64)>;

/// Counts words up, by FetchAdd or by CmpSwap with what was seen last, and says what they were.
fn count(client: &Client, qp: &Qp, words: RemoteMr, batches: usize, seed: u64) -> Counted {
    let sinks = client.region(8 * BATCH as u64, Access::LOCAL_WRITE);
    let (mut state, mut last) = (seed, [0; WORDS]);
    let mut counted = Counted::new();
    for _ in 0..batches {
        let plan: Vec<(usize, Option<u64>)> = (0..BATCH)
            .map(|_| {
                let choice = next(&mut state);
                let word = (choice >> 32) as usize % WORDS;
                // Most guesses are wrong, and have to change nothing.
                (word, choice.is_multiple_of(4).then_some(last[word]))
            })
            .collect();
        let requests: Vec<SendRequest<'_>> = (0..BATCH)
            .map(|n| {
                let (word, guess) = plan[n];
                let (sink, at) = (sinks.sge(8 * n as u64, 8), words.at(8 * word as u64));
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

/// That each word was counted from 0 to what it is, each number once.
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

/// Connects clients to one that has the words, and lets all count at once; `own` counts as well.
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

/// Counts as the program that has the words does, by the processor's own instructions.
fn count_up(words: &Mr, times: usize) -> Counted {
    let mut state = 77;
    let add = |_| {
        let word = (next(&mut state) >> 32) as usize % WORDS;
        (word, words.fetch_add_u64(8 * word as u64, 1).unwrap())
    };
    (0..times).map(add).collect()
}

fn in_shared_memory(path: &str, batches: usize) -> usize {
    let daemon = Daemon::start(binaries!(), &engine(3, path));
    let server = Client::new(&daemon);
    let words = server.region(8 * WORDS as u64, ATOMIC);
    // So many that they last about as long as the connections take.
    let own = || count_up(&words, CONNECTIONS * batches * BATCH / 8);
    let all = all_count(&daemon, &server, words.remote(), batches, own);
    let found = std::array::from_fn(|word| words.load_u64(8 * word as u64).unwrap());
    nothing_is_lost(all, found)
}

/// A million operations in all, and those that found another word than they guessed.
#[test]
fn a_million_operations_lose_nothing() {
    let started = Instant::now();
    let direct = in_shared_memory("direct", 2400);
    let tcp = in_shared_memory("tcp", 2400);
    assert!(direct + tcp >= 1_000_000, "{direct} + {tcp}");
    eprintln!("{direct} directly, {tcp} over TCP, in {:?}", started.elapsed());
}

/// In memory that is not shared the program's own instructions are another matter.
#[test]
fn operations_on_attached_memory_lose_nothing_among_each_other() {
    for path in ["direct", "tcp"] {
        let daemon = Daemon::start(binaries!(), &engine(3, path));
        let context = Context::open_at(daemon.socket()).unwrap();
        context.attach_memory().unwrap();
        let server = Client::of(&context);
        let options = MrOptions { access: ATOMIC, ..MrOptions::default() };
        let buffer = AttachedBuffer::new(8 * WORDS).unwrap();
        let words = server.pd.reg_mr_attached(&buffer, .., &options).unwrap();
        let all = all_count(&daemon, &server, words.remote(), 200, Vec::new);
        let found = std::array::from_fn(|word| words.load_u64(8 * word as u64).unwrap());
        assert!(nothing_is_lost(all, found) > 0, "{path}");
    }
}
