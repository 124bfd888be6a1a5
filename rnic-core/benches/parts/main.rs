//! Benchmarks of the crate's parts: codec, deframer, queues, STags, and a pair of engines.
//!
//! ```text
//! cargo bench                             # times, by criterion
//! cargo bench -- engine                   # subjects whose name contains "engine"
//! cargo bench -- --test                   # each once, to check that it works
//! cargo bench -- --instructions engine    # instruction counts, by callgrind
//! ```
//!
//! There are no sockets, no threads and no daemon. Every run asserts its result (bytes at the right
//! addresses, successful completions), so a broken part fails its benchmark. Times and instruction
//! counts are of the same runs.

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

/// A measured operation, called repeatedly. Panics if its result is wrong.
type Run = Box<dyn FnMut()>;

/// A benchmark.
struct Subject {
    /// Part of the crate, and operation.
    name: (&'static str, String),
    /// Amount processed by one run.
    amount: Throughput,
    /// Number of FPDUs, entries, lookups or messages in one run.
    operations: u64,
    /// Prepares everything that a run needs.
    prepare: Box<dyn Fn() -> Run>,
}

impl Subject {
    /// Creates a subject each of whose runs handles this number of operations.
    fn counted(
        part: &'static str,
        what: impl Into<String>,
        operations: u64,
        prepare: impl Fn() -> Run + 'static,
    ) -> Self {
        let amount = Throughput::Elements(operations);
        Subject { name: (part, what.into()), amount, operations, prepare: Box::new(prepare) }
    }

    /// Reports throughput in bytes of payload instead of operations.
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
        // Prepared once, and only if the filter selects the subject.
        let mut run = None;
        group.bench_function(&subject.name.1, |bencher| {
            bencher.iter(run.get_or_insert_with(|| (subject.prepare)()));
        });
        group.finish();
    }
    criterion.final_summary();
    ExitCode::SUCCESS
}

/// Returns bytes in which no two neighbours are equal.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i as u32).wrapping_mul(2_654_435_761).to_be_bytes()[1]).collect()
}
