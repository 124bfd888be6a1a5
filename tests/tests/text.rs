//! How the text of the repository is written: lines that end at 100 columns, bytes that are called
//! bytes, and references to what is here.

use std::path::{Path, PathBuf};

/// Where lines end.
const WIDTH: usize = 100;

/// What the check is about.
const KINDS: [&str; 3] = ["rs", "md", "toml"];

/// Files whose lines are as long as they are: data, source text that has to be found again, bytes
/// in hexadecimal.
const AS_LONG_AS_THEY_ARE: [&str; 5] = [
    "tests/conformance/requirements.toml",
    "tests/conformance/noticed.toml",
    "tests/conformance/mutations.toml",
    "tests/conformance/promises",
    "rnic-core/src/abi/golden.rs",
];

/// Files that quote RFCs, which say octet.
const QUOTES: [&str; 2] =
    ["tests/conformance/requirements.toml", "rnic-core/src/engine/tests/messages.rs"];

/// Words of documents that were never here.
const ELSEWHERE: [&str; 4] = ["wire.md", "decisions.md", "decisions test", "rooms.md"];

#[test]
fn lines_end_at_100_columns() {
    let too_long = |file: &str, text: &str| {
        // Code is as rustfmt leaves it: of it, comments are looked at.
        let comment = match Path::new(file).extension().and_then(|e| e.to_str()) {
            Some("rs") => "//",
            Some("toml") => "#",
            _ => "",
        };
        let is_too_long = move |whole: &str| {
            let line = whole.trim_start();
            // Tables and links cannot be broken.
            let is_table = line.trim_start_matches(['/', '!', ' ']).starts_with('|');
            let stays = !line.starts_with(comment) || is_table || line.contains("://");
            !stays && whole.chars().count() > WIDTH
        };
        places(file, text, is_too_long)
    };
    none(too_long, &AS_LONG_AS_THEY_ARE);
}

#[test]
fn bytes_are_called_bytes() {
    let octets = |file: &str, text: &str| {
        // The standard library has `Ipv4Addr::octets`.
        places(file, text, |line| line.to_lowercase().replace(".octets()", "").contains("octet"))
    };
    none(octets, &QUOTES);
}

#[test]
fn nothing_refers_to_a_document_that_is_not_here() {
    let strangers = |file: &str, text: &str| {
        places(file, text, |line| {
            let lower = line.to_lowercase();
            ELSEWHERE.iter().any(|word| lower.contains(word))
                || has_number_after(line, "ecision D")
                || has_number_after(line, "ecision ")
                || has_number_after(line, "(M")
                || documents(line).any(|name| !exists(file, name))
        })
    };
    none(strangers, &[]);
}

#[test]
fn the_check_sees_what_it_is_for() {
    assert!(has_number_after("as decision D31 has it", "ecision D"));
    assert!(!has_number_after("a decision of (Mr) 3", "(M"));
    let line = "see [docs/abi.md](docs/abi.md), `unheard-of.md` and target/conformance.md.";
    let named: Vec<&str> = documents(line).collect();
    assert_eq!(named, ["docs/abi.md", "docs/abi.md", "unheard-of.md", "target/conformance.md"]);
    assert!(exists("rnicd/src/lib.rs", "docs/abi.md"));
    assert!(exists("docs/interop.md", "../CHANGELOG.md"));
    assert!(!exists("README.md", "unheard-of.md"));
    let found = places("a.rs", "one\ntwo\n", |line| line == "two");
    assert_eq!(found, ["a.rs:2: two"]);
}

/// Fails and names all places that `find` finds in the files that are neither excepted nor to be
/// looked through yet.
fn none(find: impl Fn(&str, &str) -> Vec<String>, excepted: &[&str]) {
    let is_in = |file: &str, all: &[&str]| all.iter().any(|name| Path::new(file).starts_with(name));
    let mut files = Vec::new();
    list(&root(), &mut files);
    assert!(files.len() > 100, "{files:?}");
    let mut found = Vec::new();
    for path in files {
        let file = path.strip_prefix(root()).expect("listed below it").to_string_lossy();
        // This file has to name what it looks for.
        let is_me = file == "tests/tests/text.rs";
        if !is_me && !is_in(&file, excepted) {
            found.extend(find(&file, &std::fs::read_to_string(&path).unwrap()));
        }
    }
    assert!(found.is_empty(), "{} places:\n{}", found.len(), found.join("\n"));
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").into()
}

/// All files of the kinds below a folder.
fn list(dir: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            if name != "target" && name != "corpus" && name != ".git" {
                list(&path, files);
            }
        } else if KINDS.iter().any(|kind| path.extension().is_some_and(|e| e == *kind)) {
            files.push(path);
        }
    }
}

/// The lines that something is true of, with their places.
fn places(file: &str, text: &str, is_found: impl Fn(&str) -> bool) -> Vec<String> {
    let found = text.lines().enumerate().filter(|(_, line)| is_found(line));
    found.map(|(n, line)| format!("{file}:{}: {}", n + 1, line.trim())).collect()
}

/// Whether a number follows a word.
fn has_number_after(line: &str, word: &str) -> bool {
    line.split(word).skip(1).any(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

/// The names of Markdown files in a line.
fn documents(line: &str) -> impl Iterator<Item = &str> {
    let is_part = |c: char| c.is_alphanumeric() || "-_./".contains(c);
    let words = line.split(move |c: char| !is_part(c));
    words.map(|word| word.trim_end_matches('.')).filter(|w| w.ends_with(".md") && w.len() > 3)
}

/// Whether a document that a file names is in the repository, or is made by a command in it.
fn exists(file: &str, name: &str) -> bool {
    let beside = Path::new(file).parent().unwrap_or(Path::new("")).join(name);
    name == "target/conformance.md"
        || [Path::new(name), &Path::new("docs").join(name), &beside]
            .iter()
            .any(|path| root().join(path).is_file())
}
