//! The page `rnicd.toml(5)`, from the default configuration, whose comments describe each key.

use rnicd::config::ANNOTATED_DEFAULT;
use roff::{Roff, bold, roman};

use crate::manual::heading;

/// Returns the page.
pub(crate) fn page() -> String {
    let mut roff = Roff::new();
    let version = format!("rnicd {}", env!("CARGO_PKG_VERSION"));
    roff.control("TH", ["rnicd.toml", "5", "", version.as_str(), "rnicd"]);
    roff.control("SH", ["NAME"]);
    roff.text([roman("rnicd.toml - configuration of rnicd")]);
    roff.control("SH", ["DESCRIPTION"]);
    let (start, rest) = ANNOTATED_DEFAULT.split_once("\n\n").unwrap_or_default();
    roff.text([roman(sentences(start.lines()))]);
    let mut page = roff.render();
    for block in rest.split("\n\n") {
        page += &of_block(block).to_roff();
    }
    let mut also = heading("SEE ALSO");
    also.text([roman("rnicd(8), rnicctl(8)")]);
    page + &also.to_roff()
}

/// Returns the entries of a block of lines without an empty one between them.
fn of_block(block: &str) -> Roff {
    let mut roff = Roff::new();
    let mut comment = Vec::new();
    let mut keys = Vec::new();
    for line in block.lines() {
        let (set, by_default) = match line.strip_prefix("#: ") {
            Some(set) => (set, false),
            None => (line, true),
        };
        if set.starts_with("# ") {
            entry(&mut roff, &mut keys, &mut comment);
            comment.push(set);
        } else if set.starts_with('[') {
            roff.control("SH", [set]);
            paragraph(&mut roff, &mut comment);
        } else {
            keys.push((set, by_default));
        }
    }
    entry(&mut roff, &mut keys, &mut comment);
    roff
}

/// Adds the keys that share a comment, with their defaults.
fn entry(roff: &mut Roff, keys: &mut Vec<(&str, bool)>, comment: &mut Vec<&str>) {
    if keys.is_empty() {
        return;
    }
    for (nth, (key, by_default)) in keys.drain(..).enumerate() {
        roff.control(if nth == 0 { "TP" } else { "TQ" }, []);
        roff.text([bold(key), roman(if by_default { "" } else { "  (not set by default)" })]);
    }
    paragraph(roff, comment);
}

fn paragraph(roff: &mut Roff, comment: &mut Vec<&str>) {
    if !comment.is_empty() {
        roff.text([roman(sentences(comment.drain(..)))]);
    }
}

/// Joins the lines of a comment.
fn sentences<'a>(lines: impl Iterator<Item = &'a str>) -> String {
    let words: Vec<&str> = lines.map(|line| line.trim_start_matches('#').trim()).collect();
    words.join(" ")
}
