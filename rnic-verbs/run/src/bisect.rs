//! Finds the inversion of memory order that makes a program fail (`--order-bisect`).
//!
//! The program runs with a fault rule `do=order` that inverts a range of the messages of each QP,
//! and the range is halved until one message is left. The same inversions occur in each run, if
//! the program sends the same messages.

use std::io;
use std::ops::Range;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use rnic_client::{Context, Diagnosis, DiagnosisKind, Error, ListKind, Rows};

/// Environment variable with the fault rules of a program.
const RULES_VARIABLE: &str = "RNIC_FAULTS";

/// Fault rules with one of memory order, to which a range of messages can be added.
#[derive(Debug, PartialEq, Eq)]
pub struct Rules {
    order: String,
    others: Vec<String>,
}

/// Reason why there is no search.
#[derive(Debug, thiserror::Error)]
pub enum BisectError {
    /// The rules contain several rules of memory order.
    #[error("{RULES_VARIABLE} has several rules with do=order; --order-bisect needs one")]
    SeveralRules,
    /// The rule of memory order already has a range.
    #[error(
        "the rule with do=order in {RULES_VARIABLE} has inversions=, which --order-bisect sets"
    )]
    HasRange,
    /// The program could not be run.
    #[error("cannot run the program: {0}")]
    Run(#[from] io::Error),
}

/// Result of a search.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The program fails without any inversion.
    Unrelated,
    /// The program passes although all messages are inverted.
    Passes,
    /// The inversion of this message alone makes it fail.
    Message(u64),
    /// It fails if all these messages are inverted, but with neither half of them.
    Range(Range<u64>),
}

impl Rules {
    /// Splits the rules in the environment. If no rule is of memory order, adds [`DEFAULT_RULE`].
    pub fn from_environment() -> Result<Self, BisectError> {
        Rules::parse(&std::env::var(RULES_VARIABLE).unwrap_or_default())
    }

    fn parse(text: &str) -> Result<Self, BisectError> {
        let rules = text.split([';', '\n']).map(str::trim).filter(|rule| !rule.is_empty());
        let is_order = |rule: &&str| rule.split_whitespace().any(|word| word == "do=order");
        let (order, others): (Vec<_>, Vec<_>) = rules.partition(is_order);
        let order = match order[..] {
            [] => DEFAULT_RULE,
            [rule] => rule,
            _ => return Err(BisectError::SeveralRules),
        };
        if order.split_whitespace().any(|word| word.starts_with("inversions=")) {
            return Err(BisectError::HasRange);
        }
        Ok(Rules {
            order: order.to_owned(),
            others: others.into_iter().map(str::to_owned).collect(),
        })
    }

    /// Returns the rules with these messages inverted.
    fn with(&self, inverted: &Range<u64>) -> String {
        let order = (!inverted.is_empty())
            .then(|| format!("{} inversions={}..{}", self.order, inverted.start, inverted.end));
        let all: Vec<String> = self.others.iter().cloned().chain(order).collect();
        all.join("; ")
    }
}

/// Searches the first `messages` messages for the inversion that makes a program fail. `fails` runs
/// it with the inversion of a range, about log2(`messages`) times.
pub fn search<E>(
    messages: u64,
    mut fails: impl FnMut(&Range<u64>) -> Result<bool, E>,
) -> Result<Verdict, E> {
    if fails(&(0..0))? {
        return Ok(Verdict::Unrelated);
    }
    let mut failing = 0..messages;
    if !fails(&failing)? {
        return Ok(Verdict::Passes);
    }
    let mut range = failing.clone();
    while range.end - range.start > 1 {
        let middle = range.start + (range.end - range.start) / 2;
        let first = range.start..middle;
        if fails(&first)? {
            range = first;
            failing = range.clone();
        } else {
            range.start = middle;
        }
    }
    // If the last run passed, this message has not been inverted alone.
    let alone = failing == range || fails(&range)?;
    Ok(if alone { Verdict::Message(range.start) } else { Verdict::Range(failing) })
}

/// Runs a program until its failing inversion is found, and prints each run and the result.
pub fn run(
    messages: u64,
    command: &mut Command,
    print: impl Fn(&str),
) -> Result<Verdict, BisectError> {
    let rules = Rules::from_environment()?;
    let mut limit = None;
    let mut runs = 0;
    let mut seen = 0;
    let verdict = search(messages, |inverted| {
        runs += 1;
        seen = newest();
        let began = Instant::now();
        let mut child = command.env(RULES_VARIABLE, rules.with(inverted)).spawn()?;
        let outcome = wait(&mut child, limit)?;
        // The first run has no inversions. Its duration determines the time limit of the others.
        limit.get_or_insert(began.elapsed() * SLOWDOWN + PATIENCE);
        let Range { start, end } = inverted;
        print(&format!("run {runs}: messages {start}..{end} inverted: {outcome}"));
        Ok::<_, BisectError>(outcome != Outcome::Passed)
    })?;
    print(&match &verdict {
        Verdict::Unrelated => "the program fails without any inversion".to_owned(),
        Verdict::Passes => {
            format!("the program passes with the first {messages} messages of each QP inverted")
        }
        Verdict::Message(message) => {
            format!("the program fails if message {message} of a QP is inverted")
        }
        Verdict::Range(Range { start, end }) => format!(
            "the program fails if messages {start}..{end} are inverted, but with neither half"
        ),
    });
    if matches!(verdict, Verdict::Message(_)) {
        match injected_since(seen) {
            Ok(records) => {
                for record in records {
                    print(&record.text);
                }
            }
            Err(error) => print(&format!("cannot read the diagnoses: {error}")),
        }
    }
    Ok(verdict)
}

/// Result of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Passed,
    Failed(Option<i32>),
    /// It took too long and was killed.
    Hung,
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Outcome::Passed => f.write_str("passed"),
            Outcome::Failed(Some(code)) => write!(f, "failed (exit status {code})"),
            Outcome::Failed(None) => f.write_str("failed (killed by a signal)"),
            Outcome::Hung => f.write_str("failed (did not end)"),
        }
    }
}

/// Waits for a program, and kills it after the time limit.
fn wait(child: &mut Child, limit: Option<Duration>) -> io::Result<Outcome> {
    let began = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            let passed = status.success();
            return Ok(if passed { Outcome::Passed } else { Outcome::Failed(status.code()) });
        }
        if limit.is_some_and(|limit| began.elapsed() > limit) {
            child.kill()?;
            child.wait()?;
            return Ok(Outcome::Hung);
        }
        std::thread::sleep(PAUSE);
    }
}

/// Returns the number of the newest diagnosis, or 0.
fn newest() -> u64 {
    let records = injected_since(0).unwrap_or_default();
    records.iter().map(|record| record.id).max().unwrap_or(0)
}

/// Returns injected faults after diagnosis `seen`, newest first, of one page.
fn injected_since(seen: u64) -> Result<Vec<Diagnosis>, Error> {
    let page = Context::open()?.list(ListKind::Diagnoses, 0)?;
    let Rows::Diagnoses(mut rows) = page.rows else { return Ok(Vec::new()) };
    rows.retain(|record| record.id > seen && matches!(record.what, DiagnosisKind::Injected));
    Ok(rows)
}

/// The rule that permits the most inversions.
const DEFAULT_RULE: &str = "do=order order=worst model=iwarp";
/// Factor by which inversions may slow down a program.
const SLOWDOWN: u32 = 10;
/// Constant part of the time limit of a run.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(5);

#[cfg(test)]
mod tests {
    use super::*;

    /// Searches with a program that fails if all these messages are inverted. Returns the verdict
    /// and the number of runs.
    fn of(messages: u64, needed: &[u64]) -> (Verdict, u32) {
        let mut runs = 0;
        let verdict = search(messages, |inverted| {
            runs += 1;
            Ok::<_, ()>(needed.iter().all(|message| inverted.contains(message)))
        });
        (verdict.unwrap(), runs)
    }

    #[test]
    fn one_message_is_found_in_few_runs() {
        for messages in [1, 2, 3, 7, 64, 1000] {
            for wanted in 0..messages {
                let (verdict, runs) = of(messages, &[wanted]);
                assert_eq!(verdict, Verdict::Message(wanted), "of {messages}");
                assert!(runs <= 4 + messages.ilog2(), "{runs} runs for {messages}");
            }
        }
    }

    #[test]
    fn other_failures_are_distinguished() {
        assert_eq!(of(8, &[]).0, Verdict::Unrelated);
        assert_eq!(of(8, &[8]).0, Verdict::Passes);
        assert_eq!(of(8, &[1, 3]).0, Verdict::Range(0..4));
    }

    #[test]
    fn a_range_is_added_to_the_order_rule() {
        let rules = Rules::parse("do=stop opcode=send nth=3; do=order model=rc hold=1ms").unwrap();
        assert_eq!(rules.with(&(0..0)), "do=stop opcode=send nth=3");
        let inverted = "do=stop opcode=send nth=3; do=order model=rc hold=1ms inversions=4..8";
        assert_eq!(rules.with(&(4..8)), inverted);
        let default = Rules::parse(" ").unwrap();
        assert_eq!(default.with(&(0..1)), format!("{DEFAULT_RULE} inversions=0..1"));
        let several = Rules::parse("do=order; do=order model=rc");
        assert!(matches!(several, Err(BisectError::SeveralRules)));
        let ranged = Rules::parse("do=order inversions=1..2");
        assert!(matches!(ranged, Err(BisectError::HasRange)));
    }
}
