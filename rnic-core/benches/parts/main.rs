//! What the parts take by themselves: codec, deframer, queues, STags, and a pair of engines.
//!
//! ```text
//! cargo bench                             # times, by criterion
//! cargo bench -- engine                   # of those whose name has this in it
//! cargo bench -- --test                   # each once, to see that it works
//! cargo bench -- --instructions engine    # instructions, by callgrind
//! ```
//!
//! No sockets, no threads, no daemon. Every run asserts that what it is about has happened: bytes
//! are where they belong, completions are there and successful. So a bench of something broken
//! fails. Times and instructions are of the same runs.

mod codec;
mod deframer;
mod engine;
mod instructions;
mod pair;
mod queues;
mod stags;

use std::process::ExitCode;
use std::time::Duration;

use criterion::{Criterion, Throughput};

/// What is measured, again and again. It panics if what it does does not come about.
type Run = Box<dyn FnMut()>;

/// One thing that is measured.
struct Subject {
    /// The part it is about, and what is done.
    name: (&'static str, String),
    /// What one run moves.
    amount: Throughput,
    /// FPDUs, entries, look-ups or messages in one run.
    operations: u64,
    /// Makes all that a run needs.
    prepare: Box<dyn Fn() -> Run>,
}

impl Subject {
    /// Of runs that handle so many of something.
    fn counted(
        part: &'static str,
        what: impl Into<String>,
        operations: u64,
        prepare: impl Fn() -> Run + 'static,
    ) -> Self {
        let amount = Throughput::Elements(operations);
        Subject { name: (part, what.into()), amount, operations, prepare: Box::new(prepare) }
    }

    /// Of runs that are about so many bytes of payload.
    fn moving(self, bytes: usize) -> Self {
        Subject { amount: Throughput::Bytes(bytes as u64), ..self }
    }

    fn full_name(&self) -> String {
        format!("{}/{}", self.name.0, self.name.1)
    }
}

fn subjects() -> Vec<Subject> {
    let parts = [
        codec::subjects(),
        deframer::subjects(),
        queues::subjects(),
        stags::subjects(),
        engine::subjects(),
    ];
    parts.into_iter().flatten().collect()
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let has = |option: &str| arguments.iter().any(|argument| argument == option);
    let name = arguments.iter().find(|argument| !argument.starts_with('-'));
    if has(instructions::OPTION) {
        let is_chosen = |s: &Subject| name.is_none_or(|part| s.full_name().contains(part.as_str()));
        let chosen: Vec<Subject> = subjects().into_iter().filter(is_chosen).collect();
        return instructions::report(&chosen);
    }
    if has(instructions::INSIDE) {
        let is_meant = |s: &&Subject| name.is_some_and(|name| s.full_name() == *name);
        if let Some(subject) = subjects().iter().find(is_meant) {
            instructions::run(subject);
        }
        return ExitCode::SUCCESS;
    }
    let mut criterion = Criterion::default()
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .sample_size(50)
        .configure_from_args();
    for subject in subjects() {
        let mut group = criterion.benchmark_group(subject.name.0);
        group.throughput(subject.amount.clone());
        // Made when the filter has let it through, and once.
        let mut run = None;
        group.bench_function(&subject.name.1, |bencher| {
            bencher.iter(run.get_or_insert_with(|| (subject.prepare)()));
        });
        group.finish();
    }
    criterion.final_summary();
    ExitCode::SUCCESS
}

/// Bytes of which no two neighbours are the same.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i as u32).wrapping_mul(2_654_435_761).to_be_bytes()[1]).collect()
}
