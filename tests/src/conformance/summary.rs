//! `docs/conformance.md`: counts and reasons, independent of line numbers.

use std::fmt::{self, Write};

use super::{Kind, LAYERS, Level, Record, Requirement};

const HEAD: &str = "\
# Conformance

Each requirement of RFC 5044 (MPA), RFC 5041 (DDP), RFC 5040 (RDMAP) and RFC 7306 (its extensions:
atomic operations and Immediate Data), paraphrased, is either cited by tests that would fail if it
were broken, or excepted with a reason. Each tested MUST and MUST NOT is also cited by the
production code that implements it, or holds by construction, with a reason. A citation is a line
`//= ID` above the test or the code.

    cargo run -p rnic-tests --bin conformance

writes this page, and the full report to `target/conformance.md`: the text of every requirement with
its tests and its code, and the manual faults with the tests that detected them. With `--check` it
fails if this page is out of date or something is missing. The tests do the same check.
";

/// Maximum width of a line of prose.
const WIDTH: usize = 100;

/// Returns the summary as Markdown.
#[must_use]
pub fn summary(record: &Record) -> String {
    let mut out = HEAD.to_owned();
    let written = counts(record, &mut out).and_then(|()| reasons(record, &mut out));
    debug_assert!(written.is_ok(), "writing to a String cannot fail");
    out
}

/// Writes how many requirements are tested, excepted or neither.
pub(super) fn counts(record: &Record, out: &mut String) -> fmt::Result {
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
    implementation(record, out)
}

/// Writes how many tested absolute requirements production code implements.
fn implementation(record: &Record, out: &mut String) -> fmt::Result {
    writeln!(out, "\nIn production code:\n")?;
    writeln!(out, "| RFC | MUST, MUST NOT with tests | cited | by construction | not cited yet |")?;
    writeln!(out, "| --- | ---: | ---: | ---: | ---: |")?;
    for (rfc, layer) in LAYERS {
        let mut all: Vec<_> = record.requirements.iter().filter(|r| r.rfc == rfc).collect();
        all.retain(|r| record.is_to_be_implemented(r));
        let cited = all.iter().filter(|r| !record.lines_of(&r.id).is_empty()).count();
        let built = all.iter().filter(|r| record.construction_of(&r.id).is_some()).count();
        let not_yet = all.len() - cited - built;
        writeln!(out, "| {rfc} {layer} | {} | {cited} | {built} | {not_yet} |", all.len())?;
    }
    for u in record.uncited.iter().filter(|u| !u.ids.is_empty()) {
        let n = u.ids.len();
        writeln!(out, "\n`{}` does not yet cite {n} requirements.", u.folder)?;
    }
    Ok(())
}

/// Writes the reasons why requirements have no test, or no line of production code.
pub(super) fn reasons(record: &Record, out: &mut String) -> fmt::Result {
    writeln!(out, "\n## Exceptions")?;
    for kind in Kind::ALL {
        let these: Vec<_> = record.exceptions.iter().filter(|e| e.kind == kind).collect();
        if these.is_empty() {
            continue;
        }
        writeln!(out, "\n### {}\n", kind.heading())?;
        for e in these {
            item(out, &format!("{}: {}", e.ids.join(", "), e.reason))?;
        }
    }
    writeln!(out, "\n## By construction\n")?;
    for c in &record.constructions {
        item(out, &format!("{}: {}", c.ids.join(", "), c.reason))?;
    }
    Ok(())
}

/// Writes a list item, wrapped.
fn item(out: &mut String, text: &str) -> fmt::Result {
    let mut line = String::from("-");
    for word in text.split_whitespace() {
        if line.chars().count() + 1 + word.chars().count() > WIDTH {
            writeln!(out, "{line}")?;
            line = " ".into();
        }
        line.push(' ');
        line.push_str(word);
    }
    writeln!(out, "{line}")
}

pub(super) fn lower(heading: &str) -> String {
    let mut letters = heading.chars();
    letters.next().map_or_else(String::new, |first| first.to_lowercase().chain(letters).collect())
}

#[cfg(test)]
mod tests {
    #[test]
    fn an_item_is_wrapped_with_its_lines_indented() {
        let mut out = String::new();
        super::item(&mut out, &"word ".repeat(30)).unwrap();
        let lines: Vec<&str> = out.lines().collect();
        assert!(lines.iter().all(|l| l.len() <= super::WIDTH), "{lines:?}");
        assert!(lines[0].starts_with("- word") && lines[1].starts_with("  word"), "{lines:?}");
        assert_eq!(out.matches("word").count(), 30);
    }
}
