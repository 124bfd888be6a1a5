//! Inserts the faults of `tests/conformance/mutations.toml` and `tests/conformance/promises/` into
//! a copy of the tree, and checks that the named tests detect each of them.
//!
//! Faults inside functions are compiled into one build, and an environment variable selects a fault
//! for each run of the tests ([`weave`]). Other faults are built one by one. So are faults that no
//! test detected, because a test may have started a program without that variable.

mod copy;
mod weave;

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};

use clap::Parser;
use rnic_tests::conformance::{self, Mutation, NOTICED, Notice, Record};
use serde::Serialize;

use copy::{Copy, Outcome, Programs};
use weave::{Numbered, Woven};

#[derive(Parser)]
struct Args {
    /// Only faults with this text in their file, source, requirements or promise.
    only: Option<String>,
    /// Only faults that have not been detected here yet.
    #[arg(long)]
    new: bool,
    /// Faults tested at a time. Default: four for each CPU.
    #[arg(long)]
    jobs: Option<usize>,
    /// Top of the repository.
    #[arg(long, default_value_os_t = conformance::root())]
    root: PathBuf,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(unnoticed) => {
            eprintln!("mutate: {unnoticed} faults were not noticed");
            ExitCode::FAILURE
        }
        Err(e) => {
            eprintln!("mutate: {e}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the number of undetected faults.
fn run(args: &Args) -> Result<usize, Box<dyn Error>> {
    let record = Record::read(&args.root)?;
    // Numbered from 1, because 0 stands for no fault.
    let all: Vec<Numbered> = record
        .mutations
        .iter()
        .filter(|m| args.only.as_ref().is_none_or(|part| concerns(m, part)))
        .enumerate()
        .map(|(n, m)| (n + 1, m))
        .collect();
    // A run with `--new` builds the same as the run that it continues.
    let is_chosen = |m: &Mutation| !(args.new && record.notice_of(m).is_some());
    let chosen: Vec<_> = all.iter().copied().filter(|(_, m)| is_chosen(m)).collect();
    let jobs = match args.jobs {
        Some(jobs) => jobs.max(1),
        None => JOBS_PER_CPU * std::thread::available_parallelism()?.get(),
    };
    let copy = Copy::of(&args.root)?;
    let progress = Mutex::new(Progress::new(args, &record, &chosen));
    let mut left = weave_all(&copy, &all)?;
    let together: Vec<_> = chosen.iter().copied().filter(|(n, _)| !left.contains(n)).collect();
    if !together.is_empty() {
        let programs = copy.build(&targets(&all))?;
        pass_without_faults(&copy, &programs, &together)?;
        left.extend(test_together(&copy, &programs, &together, jobs, &progress)?);
    }
    for (_, m) in &all {
        copy.restore(&m.file)?;
    }
    let mut progress = progress.into_inner().unwrap_or_else(PoisonError::into_inner);
    for (_, m) in chosen.iter().filter(|(number, _)| left.contains(number)) {
        let right = copy.original(&m.file)?;
        copy.write(&m.file, &right.replace(&m.from, &m.to))?;
        let by = match copy.build_for(m) {
            Ok(programs) => detected_by(copy.test(&programs, m, &m.tests, 0)?),
            Err(error) => {
                println!("{} {}: {error}", m.broken(), m.file);
                None
            }
        };
        copy.restore(&m.file)?;
        progress.note(m, by)?;
    }
    Ok(progress.unnoticed)
}

/// Tests the faults that are built together. Returns the numbers of undetected faults.
fn test_together(
    copy: &Copy,
    programs: &Programs,
    together: &[Numbered],
    jobs: usize,
    progress: &Mutex<Progress<'_>>,
) -> Result<Vec<usize>, String> {
    let queue = Mutex::new(together.iter());
    in_parallel(jobs, || {
        let mut unnoticed = Vec::new();
        loop {
            let next = queue.lock().map_err(|e| e.to_string())?.next().copied();
            let Some((number, m)) = next else { return Ok(unnoticed) };
            let outcome = copy.test(programs, m, &m.tests, number).map_err(|e| e.to_string())?;
            match detected_by(outcome) {
                None => unnoticed.push(number),
                by => {
                    let mut progress = progress.lock().map_err(|e| e.to_string())?;
                    progress.note(m, by).map_err(|e| e.to_string())?;
                }
            }
        }
    })
}

fn concerns(m: &Mutation, part: &str) -> bool {
    m.file.contains(part) || m.from.contains(part) || m.broken().contains(part)
}

fn targets<'a>(faults: &[Numbered<'a>]) -> BTreeSet<&'a str> {
    faults.iter().map(|(_, m)| m.target.as_str()).collect()
}

/// Inserts all faults that compile together into the copy. Returns the numbers of the other faults.
fn weave_all(copy: &Copy, chosen: &[Numbered]) -> Result<BTreeSet<usize>, Box<dyn Error>> {
    let mut by_file: BTreeMap<&str, Vec<Numbered>> = BTreeMap::new();
    for (number, m) in chosen {
        by_file.entry(&m.file).or_default().push((*number, m));
    }
    let mut left = BTreeSet::new();
    loop {
        let mut woven = BTreeMap::new();
        for (file, faults) in &by_file {
            let right = copy.original(file)?;
            if let Some((_, m)) = faults.iter().find(|(_, m)| right.matches(&m.from).count() != 1) {
                return Err(format!("{file}: `{}` does not occur exactly once", m.from).into());
            }
            let faults: Vec<_> =
                faults.iter().copied().filter(|(number, _)| !left.contains(number)).collect();
            let file_woven = Woven::new(&right, &faults);
            copy.write(file, &file_woven.text)?;
            left.extend(file_woven.left_out.iter().copied());
            woven.insert(*file, file_woven);
        }
        let errors = copy.check(&targets(chosen))?;
        let Some(first) = errors.first() else { return Ok(left) };
        let before = left.len();
        for error in &errors {
            let file = woven.get(error.file.as_str());
            left.extend(file.map(|file| file.suspects(error.line)).unwrap_or_default());
        }
        if left.len() == before {
            return Err(first.text.clone().into());
        }
        println!("{} of {} faults are built one by one", left.len(), chosen.len());
    }
}

/// Checks that the tests pass while no fault is active.
fn pass_without_faults(
    copy: &Copy,
    programs: &Programs,
    chosen: &[Numbered],
) -> Result<(), Box<dyn Error>> {
    let mut all: BTreeMap<(&str, &str), (&Mutation, BTreeSet<String>)> = BTreeMap::new();
    for (_, m) in chosen {
        let key = (m.package.as_str(), m.target.as_str());
        let (_, tests) = all.entry(key).or_insert_with(|| (m, BTreeSet::new()));
        tests.extend(m.tests.iter().cloned());
    }
    for (m, tests) in all.into_values() {
        let tests: Vec<_> = tests.into_iter().collect();
        match copy.test(programs, m, &tests, 0)? {
            Outcome::Passed => {}
            Outcome::Failed(by) => {
                let Mutation { package, target, .. } = m;
                return Err(format!("{package} {target} fails without a fault: {by:?}").into());
            }
            Outcome::Endless => {
                return Err(format!("tests hang without any fault: {tests:?}").into());
            }
        }
    }
    Ok(())
}

/// Calls `act` in several threads. Returns all their results, or the first error.
fn in_parallel<T: Send, E: Send>(
    threads: usize,
    act: impl Fn() -> Result<Vec<T>, E> + Sync,
) -> Result<Vec<T>, E> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(&act)).collect();
        let mut all = Vec::new();
        for thread in threads {
            all.extend(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
        }
        Ok(all)
    })
}

/// Returns the tests that detected the fault, or a description of another outcome. None if no test
/// detected it.
fn detected_by(outcome: Outcome) -> Option<Vec<String>> {
    match outcome {
        Outcome::Passed => None,
        Outcome::Endless => Some(vec!["the deadline".into()]),
        // A fault may also end the whole process.
        Outcome::Failed(by) if by.is_empty() => Some(vec!["the end of the process".into()]),
        Outcome::Failed(by) => Some(by),
    }
}

/// Default number of concurrent test runs per CPU. Most tests that a fault breaks only wait until
/// their deadline.
const JOBS_PER_CPU: usize = 4;

#[derive(Serialize)]
struct Notices<'a> {
    notice: &'a [Notice],
}

/// The results so far, which are also written to [`NOTICED`].
struct Progress<'a> {
    mutations: &'a [Mutation],
    noticed: Vec<Notice>,
    file: PathBuf,
    done: usize,
    all: usize,
    unnoticed: usize,
}

impl<'a> Progress<'a> {
    fn new(args: &Args, record: &'a Record, chosen: &[Numbered]) -> Progress<'a> {
        let mut noticed = record.noticed.clone();
        noticed.retain(|n| record.mutations.iter().any(|m| n.is_of(m)));
        noticed.retain(|n| !chosen.iter().any(|(_, m)| n.is_of(m)));
        Progress {
            mutations: &record.mutations,
            noticed,
            file: args.root.join(NOTICED),
            done: 0,
            all: chosen.len(),
            unnoticed: 0,
        }
    }

    /// Prints and records the result of a fault.
    fn note(&mut self, m: &Mutation, by: Option<Vec<String>>) -> Result<(), Box<dyn Error>> {
        self.done += 1;
        let result = by.as_ref().map_or("NOT NOTICED".into(), |by| by.join(", "));
        println!("{}/{} {} {}: {result}", self.done, self.all, m.broken(), m.file);
        match by {
            None => self.unnoticed += 1,
            Some(by) => {
                let file = m.file.clone();
                let from = m.from.clone();
                let to = m.to.clone();
                self.noticed.push(Notice { file, from, to, by });
                self.noticed.sort_by_key(|n| self.mutations.iter().position(|m| n.is_of(m)));
                let text = toml::to_string(&Notices { notice: &self.noticed })?;
                std::fs::write(&self.file, text)?;
            }
        }
        Ok(())
    }
}
