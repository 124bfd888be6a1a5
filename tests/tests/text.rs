//! Text of the repository: lines end at 100 columns, bytes are not called octets, every named
//! document exists, and phrases that make comments hard to read are rare.

use std::path::{Path, PathBuf};

/// Maximum width of a line.
const WIDTH: usize = 100;

/// Extensions of the checked files.
const KINDS: [&str; 3] = ["rs", "md", "toml"];

/// Files with long lines: data, source text that must be found verbatim, and hexadecimal bytes.
const LONG_LINES: [&str; 4] = [
    "tests/conformance/requirements.toml",
    "tests/conformance/mutations.toml",
    "tests/conformance/promises",
    "rnic-abi/src/abi/golden.rs",
];

/// Files that quote RFCs, which use "octet".
const QUOTES: [&str; 2] =
    ["tests/conformance/requirements.toml", "rnic-core/src/engine/tests/messages.rs"];

/// Parts of the repository in which [`PHRASES`] are counted separately.
const PARTS: [&[&str]; 11] = [
    &["rnic-abi"],
    &["rnic-core"],
    &["rnicd"],
    &["rnic-client"],
    &["rnic-verbs"],
    &["rnic-tools", "bench"],
    &["tests"],
    &["fuzz"],
    &["deploy"],
    &["config"],
    &["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs"],
];

/// Phrases, and how often they may occur in 1,000 lines of comments or of a document. A comment
/// names its subject: the worker, the segment, the caller.
const PHRASES: [(&[&str], usize); 9] = [
    (&["what"], 10),
    (&["say", "says", "said"], 5),
    (&["who", "whoever", "whom", "whomever"], 2),
    (&["nobody", "somebody", "anybody", "everybody", "someone", "anyone", "no one"], 1),
    (&["one that", "ones that", "those that", "those who", "the one"], 3),
    (&["is told", "are told", "was told", "were told", "be told", "been told"], 1),
    (&["he", "his", "him", "himself"], 0),
    (&["wired by hand"], 0),
    (&["in words"], 0),
];

/// Camel-case names allowed in prose: products, terms of RFC 7306, and a memory order.
const CAMEL_CASE: [&str; 8] = [
    "InfiniBand",
    "GitHub",
    "GitLab",
    "AddressSanitizer",
    "ThreadSanitizer",
    "CmpSwap",
    "FetchAdd",
    "SeqCst",
];

#[test]
fn phrases_keep_within_their_budgets() {
    let mut files = Vec::new();
    list(&root(), &mut files);
    let mut over = Vec::new();
    for part in PARTS {
        let mut lines = Vec::new();
        for path in &files {
            let file = path.strip_prefix(root()).expect("path is below the root");
            if part.iter().any(|folder| file.starts_with(folder)) && !is_phrase_list(file) {
                let text = std::fs::read_to_string(path).unwrap();
                lines.extend(prose(file, &text).map(|line| unquoted(line).to_lowercase()));
            }
        }
        for (phrases, budget) in PHRASES {
            let has = |line: &&String| phrases.iter().any(|phrase| has_phrase(line, phrase));
            let found: Vec<&String> = lines.iter().filter(has).collect();
            if found.len() * 1000 > budget * lines.len() {
                over.push(format!("{part:?}, {phrases:?}, {} lines: {found:#?}", lines.len()));
            }
        }
    }
    assert!(over.is_empty(), "{}", over.join("\n"));
}

#[test]
fn identifiers_in_comments_have_backticks() {
    let bare = |file: &str, text: &str| {
        let is_rust = file.ends_with(".rs");
        let lines = prose(Path::new(file), text).filter(|_| is_rust);
        let bare = lines.filter(|line| words(&unquoted(line)).any(is_bare_identifier));
        bare.map(|line| format!("{file}: {line}")).collect()
    };
    none(bare, &[]);
}

#[test]
fn lines_end_at_100_columns() {
    let too_long = |file: &str, text: &str| {
        // rustfmt wraps code, so only the comments in code are checked.
        let comment = match Path::new(file).extension().and_then(|e| e.to_str()) {
            Some("rs") => "//",
            Some("toml") => "#",
            _ => "",
        };
        let is_too_long = move |whole: &str| {
            let line = whole.trim_start();
            // Tables and links cannot be wrapped.
            let is_table = line.trim_start_matches(['/', '!', ' ']).starts_with('|');
            let stays = !line.starts_with(comment) || is_table || line.contains("://");
            !stays && whole.chars().count() > WIDTH
        };
        places(file, text, is_too_long)
    };
    none(too_long, &LONG_LINES);
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
fn every_named_document_exists() {
    let missing = |file: &str, text: &str| {
        places(file, text, |line| documents(line).any(|name| !exists(file, name)))
    };
    none(missing, &[]);
}

#[test]
fn text_check_finds_violations() {
    let line = "see [docs/abi.md](docs/abi.md), `unheard-of.md` and target/conformance.md.";
    let named: Vec<&str> = documents(line).collect();
    assert_eq!(named, ["docs/abi.md", "docs/abi.md", "unheard-of.md", "target/conformance.md"]);
    assert!(exists("rnicd/src/lib.rs", "docs/abi.md"));
    assert!(exists("docs/interop.md", "../CHANGELOG.md"));
    assert!(!exists("README.md", "unheard-of.md"));
    let found = places("a.rs", "one\ntwo\n", |line| line == "two");
    assert_eq!(found, ["a.rs:2: two"]);
    assert!(has_phrase("the one that waits", "one that"));
    assert!(!has_phrase("somewhat", "what"));
    let source =
        "let a = 1; // code\n/// A `Pair` of\n/// ```\n/// AnExample\n/// ```\n//= DDP-1\n";
    assert_eq!(prose(Path::new("a.rs"), source).collect::<Vec<_>>(), ["A `Pair` of"]);
    let page = "Text\n    code\n```\nmore\n```\n| what | who |\n| --- | --- |\n";
    assert_eq!(prose(Path::new("a.md"), page).collect::<Vec<_>>(), ["Text", "| what | who |"]);
    assert!(words(&unquoted("an AnExample")).any(is_bare_identifier));
    assert!(!words(&unquoted("an `AnExample` of RoCE and InfiniBand")).any(is_bare_identifier));
}

/// Panics with all places that `find` returns, except in the `excepted` files and folders.
fn none(find: impl Fn(&str, &str) -> Vec<String>, excepted: &[&str]) {
    let is_in = |file: &str, all: &[&str]| all.iter().any(|name| Path::new(file).starts_with(name));
    let mut files = Vec::new();
    list(&root(), &mut files);
    assert!(files.len() > 100, "{files:?}");
    let mut found = Vec::new();
    for path in files {
        let file = path.strip_prefix(root()).expect("path is below the root").to_string_lossy();
        // This file contains the phrases that it searches for.
        let is_this_file = file == "tests/tests/text.rs";
        if !is_this_file && !is_in(&file, excepted) {
            found.extend(find(&file, &std::fs::read_to_string(&path).unwrap()));
        }
    }
    assert!(found.is_empty(), "{} places:\n{}", found.len(), found.join("\n"));
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").into()
}

/// Lists all files of the checked kinds below a folder.
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

/// Returns the lines that match, with their places.
fn places(file: &str, text: &str, is_found: impl Fn(&str) -> bool) -> Vec<String> {
    let found = text.lines().enumerate().filter(|(_, line)| is_found(line));
    found.map(|(n, line)| format!("{file}:{}: {}", n + 1, line.trim())).collect()
}

/// Returns the names of Markdown files in a line.
fn documents(line: &str) -> impl Iterator<Item = &str> {
    let is_part = |c: char| c.is_alphanumeric() || "-_./".contains(c);
    let words = line.split(move |c: char| !is_part(c));
    words.map(|word| word.trim_end_matches('.')).filter(|w| w.ends_with(".md") && w.len() > 3)
}

/// Returns true if a document that a file names is in the repository, or is generated in `target`.
fn exists(file: &str, name: &str) -> bool {
    let beside = Path::new(file).parent().unwrap_or(Path::new("")).join(name);
    name == "target/conformance.md"
        || [Path::new(name), &Path::new("docs").join(name), &beside]
            .iter()
            .any(|path| root().join(path).is_file())
}

/// Returns true for a file that lists the phrases or paraphrases RFCs.
fn is_phrase_list(file: &Path) -> bool {
    let lists = ["tests/tests/text.rs", "CONTRIBUTING.md", "tests/conformance/requirements.toml"];
    lists.iter().any(|list| file == Path::new(list))
}

/// Returns the lines of prose in a file, without comment marks and code: comments on separate
/// lines, or the text of a document.
fn prose<'a>(file: &Path, text: &'a str) -> impl Iterator<Item = &'a str> {
    let mark = match file.extension().and_then(|e| e.to_str()) {
        Some("rs") => "//",
        Some("toml") => "#",
        _ => "",
    };
    let mut in_code = false;
    text.lines().filter_map(move |line| {
        let is_code = mark.is_empty() && line.starts_with("    ");
        let line = line.trim_start().strip_prefix(mark)?;
        let line = if mark == "//" { line.trim_start_matches(['/', '!']) } else { line };
        let indent = line.len() - line.trim_start().len();
        let line = line.trim();
        if line.starts_with("```") {
            in_code = !in_code;
            return None;
        }
        let is_citation = mark == "//" && line.starts_with('=');
        // A configuration key whose default is "not set".
        let is_key = mark == "#" && line.starts_with(':');
        let is_diagram = mark == "//" && indent > 3;
        let is_rule = line.starts_with("| ---");
        let is_prose = !(in_code || is_code || is_citation || is_key || is_diagram || is_rule);
        (is_prose && !line.is_empty()).then_some(line)
    })
}

/// Returns true if a phrase occurs in a line and is not part of longer words.
fn has_phrase(line: &str, phrase: &str) -> bool {
    line.match_indices(phrase).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + phrase.len()..].chars().next();
        let is_part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
        !is_part(before) && !is_part(after)
    })
}

/// Returns a line without its text in backticks and the targets of its links.
fn unquoted(line: &str) -> String {
    let text: String = line.split('`').step_by(2).collect::<Vec<_>>().join(" ");
    let (text, _) = text.split_once("]: ").unwrap_or((&text, ""));
    let mut parts = text.split("](");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |all, part| all + part.split_once(')').map_or("", |(_, rest)| rest))
}

fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty())
}

/// Returns true for a word like `SendRequest`: two or more parts that each start with a capital and
/// continue with lower-case letters.
fn is_bare_identifier(word: &str) -> bool {
    let mut parts = 0;
    let mut last = ' ';
    for c in word.chars() {
        if c.is_lowercase() && last.is_uppercase() {
            parts += 1;
        } else if !c.is_lowercase() && !(c.is_uppercase() && (last.is_lowercase() || last == ' ')) {
            return false;
        }
        last = c;
    }
    parts > 1 && !CAMEL_CASE.contains(&word)
}
