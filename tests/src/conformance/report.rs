//! `docs/conformance.md`.

use std::collections::BTreeSet;
use std::fmt::{self, Write};

use super::{Kind, Level, Record, Requirement};

const LAYERS: [(u16, &str); 3] = [(5044, "MPA"), (5041, "DDP"), (5040, "RDMAP")];

const HEAD: &str = "\
# Conformance

Written by `cargo run -p rnic-tests --bin conformance` from the sources and from `tests/conformance`; do not edit.
`--check` says whether it is up to date and complete; the tests do the same.

Each requirement of RFC 5044 (MPA), RFC 5041 (DDP) and RFC 5040 (RDMAP), in our own words, is either cited by tests
that would fail if it were broken (a line `//= ID` above the test), or excepted with a reason. Of a requirement that
more than three tests cite, three are named.
";

/// The report as Markdown.
#[must_use]
pub fn render(record: &Record) -> String {
    let mut out = HEAD.to_owned();
    let written = counts(record, &mut out)
        .and_then(|()| faults_put_in(record, &mut out))
        .and_then(|()| requirements(record, &mut out))
        .and_then(|()| exceptions(record, &mut out));
    debug_assert!(written.is_ok(), "a String takes everything");
    out
}

fn counts(record: &Record, out: &mut String) -> fmt::Result {
    writeln!(out, "\n## Counts\n")?;
    writeln!(out, "| RFC | level | requirements | with tests | excepted | neither |")?;
    writeln!(out, "| --- | --- | ---: | ---: | ---: | ---: |")?;
    let mut row = |name: &str, level: &str, these: &dyn Fn(&Requirement) -> bool| {
        let all: Vec<_> = record.requirements.iter().filter(|r| these(r)).collect();
        let tested = all.iter().filter(|r| !record.tests_of(&r.id).is_empty()).count();
        let excepted = all.iter().filter(|r| record.exception_of(&r.id).is_some()).count();
        let neither = all.len() - tested - excepted;
        writeln!(out, "| {name} | {level} | {} | {tested} | {excepted} | {neither} |", all.len())
    };
    for (rfc, layer) in LAYERS {
        for level in Level::ALL {
            let name = format!("{rfc} {layer}");
            row(&name, &level.to_string(), &|r| r.rfc == rfc && r.level == level)?;
        }
    }
    row("all", "MUST, MUST NOT", &|r| r.level.is_absolute())?;
    row("all", "all", &|_| true)?;
    let cited: BTreeSet<_> = record.citations.values().flatten().collect();
    writeln!(out, "\n{} tests cite.", cited.len())
}

fn faults_put_in(record: &Record, out: &mut String) -> fmt::Result {
    let broken: BTreeSet<&str> =
        record.mutations.iter().flat_map(|m| &m.ids).map(String::as_str).collect();
    let absolute = |r: &&Requirement| r.level.is_absolute() && broken.contains(r.id.as_str());
    writeln!(out, "\n## Tests that can fail\n")?;
    writeln!(
        out,
        "Faults put into the code by hand (`cargo run -p rnic-tests --bin mutate`), each of them \
         noticed by the tests named:\n{} faults, which break {} requirements of the levels MUST and \
         MUST NOT.\n",
        record.mutations.len(),
        record.requirements.iter().filter(absolute).count(),
    )?;
    writeln!(out, "| what it breaks | fault | noticed by |")?;
    writeln!(out, "| --- | --- | --- |")?;
    for m in &record.mutations {
        let by = match record.notice_of(m) {
            None => "nothing yet".into(),
            Some(n) if n.by.iter().any(|by| by.contains(' ')) => n.by.join(", "),
            Some(n) => quoted(n.by.iter().map(|test| last(test)).take(3)),
        };
        let (from, to) = (inline(&m.from), inline(&m.to));
        let broken = m.broken();
        writeln!(out, "| {broken} | `{}`: {from} becomes {to} | {by} |", m.file)?;
    }
    if record.scores.is_empty() {
        return Ok(());
    }
    writeln!(out, "\n### Modules mutated as a whole\n")?;
    writeln!(
        out,
        "By `cargo-mutants`, with the unit tests of the package (`.cargo/mutants.toml`). What is not listed has not been mutated as a whole.\n"
    )?;
    writeln!(out, "| module | mutants tested | noticed | survived |")?;
    writeln!(out, "| --- | ---: | ---: | ---: |")?;
    for s in &record.scores {
        let survived = s.tested - s.noticed.min(s.tested);
        writeln!(out, "| `{}` | {} | {} | {survived} |", s.module, s.tested, s.noticed)?;
    }
    writeln!(out, "\nWhat survived, and why:\n")?;
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
                    writeln!(out, "\n  {}", quoted(tests.iter().map(|t| t.test.as_str()).take(3)))?;
                }
            }
        }
    }
    Ok(())
}

fn exceptions(record: &Record, out: &mut String) -> fmt::Result {
    writeln!(out, "\n## Exceptions")?;
    for kind in Kind::ALL {
        let these: Vec<_> = record.exceptions.iter().filter(|e| e.kind == kind).collect();
        if these.is_empty() {
            continue;
        }
        writeln!(out, "\n### {}\n", kind.heading())?;
        for e in these {
            let reason = e.reason.split_whitespace().collect::<Vec<_>>().join(" ");
            writeln!(out, "- {}: {reason}", e.ids.join(", "))?;
        }
    }
    Ok(())
}

fn quoted<'a>(names: impl Iterator<Item = &'a str>) -> String {
    names.map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

/// A test without the modules it is in.
fn last(test: &str) -> &str {
    test.rsplit("::").next().unwrap_or(test)
}

/// Code in a cell of a table.
fn inline(code: &str) -> String {
    let line = code.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|");
    if line.is_empty() { "nothing".into() } else { format!("`{line}`") }
}

fn lower(heading: &str) -> String {
    let mut letters = heading.chars();
    letters.next().map_or_else(String::new, |first| first.to_lowercase().chain(letters).collect())
}
