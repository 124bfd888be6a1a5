//! `target/conformance.md`: every requirement with its tests and its code, and every fault.

use std::collections::BTreeSet;
use std::fmt::{self, Write};

use super::summary::{counts, lower, reasons};
use super::{LAYERS, Line, Record, Requirement};

const HEAD: &str = "\
# Conformance, in full

Written by `cargo run -p rnic-tests --bin conformance` from the sources and from
`tests/conformance`. At most three tests and three lines are listed per requirement.
";

/// Returns the report as Markdown.
#[must_use]
pub fn report(record: &Record) -> String {
    let mut out = HEAD.to_owned();
    let written = counts(record, &mut out)
        .and_then(|()| citing_tests(record, &mut out))
        .and_then(|()| manual_faults(record, &mut out))
        .and_then(|()| requirements(record, &mut out))
        .and_then(|()| reasons(record, &mut out));
    debug_assert!(written.is_ok(), "writing to a String cannot fail");
    out
}

fn citing_tests(record: &Record, out: &mut String) -> fmt::Result {
    let tests: BTreeSet<_> = record.citations.values().flatten().collect();
    let lines: BTreeSet<_> = record.lines.values().flatten().collect();
    writeln!(
        out,
        "\n{} tests and {} lines of production code cite requirements.",
        tests.len(),
        lines.len()
    )
}

fn manual_faults(record: &Record, out: &mut String) -> fmt::Result {
    let broken: BTreeSet<&str> =
        record.mutations.iter().flat_map(|m| &m.ids).map(String::as_str).collect();
    let absolute = |r: &&Requirement| r.level.is_absolute() && broken.contains(r.id.as_str());
    writeln!(out, "\n## Tests that can fail\n")?;
    writeln!(
        out,
        "Manual faults (`cargo run -p rnic-tests --bin mutate`), each detected by tests. \
         Those of the last runs here are listed:\n{} faults, which break {} requirements of the levels MUST and MUST NOT.\n",
        record.mutations.len(),
        record.requirements.iter().filter(absolute).count(),
    )?;
    writeln!(out, "| breaks | fault | detected by |")?;
    writeln!(out, "| --- | --- | --- |")?;
    for m in &record.mutations {
        let by = match record.notice_of(m) {
            None => "not run here".into(),
            Some(n) if n.by.iter().any(|by| by.contains(' ')) => n.by.join(", "),
            Some(n) => quoted(n.by.iter().map(|test| last(test)).take(3)),
        };
        let from = inline(&m.from);
        let to = inline(&m.to);
        let broken = m.broken();
        writeln!(out, "| {broken} | `{}`: {from} becomes {to} | {by} |", m.file)?;
    }
    if record.scores.is_empty() {
        return Ok(());
    }
    writeln!(out, "\n### Modules mutated as a whole\n")?;
    writeln!(
        out,
        "By `cargo-mutants`, with the unit tests of the package (`.cargo/mutants.toml`). Modules \
         that are not listed have not been mutated as a whole.\n"
    )?;
    writeln!(out, "| module | mutants tested | detected | survived |")?;
    writeln!(out, "| --- | ---: | ---: | ---: |")?;
    for s in &record.scores {
        let survived = s.tested - s.noticed.min(s.tested);
        writeln!(out, "| `{}` | {} | {} | {survived} |", s.module, s.tested, s.noticed)?;
    }
    writeln!(out, "\nSurvivors and reasons:\n")?;
    for survivor in record.scores.iter().flat_map(|s| &s.survivors) {
        writeln!(out, "- {} ({}): {}.", survivor.mutants.join("; "), survivor.count, survivor.why)?;
    }
    Ok(())
}

fn requirements(record: &Record, out: &mut String) -> fmt::Result {
    for (rfc, layer) in LAYERS {
        writeln!(out, "\n## {layer} (RFC {rfc})")?;
        let mut section = "";
        for r in record.requirements.iter().filter(|r| r.rfc == rfc) {
            if r.section != section {
                section = &r.section;
                writeln!(out, "\n### {section}\n")?;
            }
            write!(out, "- **{}** {} ({}): {}", r.id, r.level, r.role, r.text)?;
            match (record.tests_of(&r.id), record.exception_of(&r.id)) {
                ([], None) => writeln!(out, " *Neither tested nor excepted.*")?,
                ([], Some(e)) => writeln!(out, " *Excepted: {}.*", lower(e.kind.heading()))?,
                (tests, _) => {
                    let names = quoted(tests.iter().map(|t| t.test.as_str()).take(3));
                    writeln!(out, "\n  Code: {}.\n  Tests: {names}.", code(record, r))?;
                }
            }
        }
    }
    Ok(())
}

/// Returns the places that implement a requirement.
fn code(record: &Record, r: &Requirement) -> String {
    match record.lines_of(&r.id) {
        [] if record.construction_of(&r.id).is_some() => "*by construction*".into(),
        [] => "*not cited*".into(),
        lines => {
            let place = |l: &Line| format!("`{}:{}`", l.file, l.line);
            lines.iter().take(3).map(place).collect::<Vec<_>>().join(", ")
        }
    }
}

fn quoted<'a>(names: impl Iterator<Item = &'a str>) -> String {
    names.map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

/// Returns the name of a test without its modules.
fn last(test: &str) -> &str {
    test.rsplit("::").next().unwrap_or(test)
}

/// Formats code for a table cell.
fn inline(code: &str) -> String {
    let line = code.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|");
    if line.is_empty() { "nothing".into() } else { format!("`{line}`") }
}
