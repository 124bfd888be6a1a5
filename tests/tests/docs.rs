//! Checks claims of the documents about tests and code.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Returns the Rust sources of a package.
fn paths(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            found.extend(paths(&path));
        } else if name.ends_with(".rs") {
            found.push(path);
        }
    }
    found
}

/// Checks that the tests and files named in a document exist, and that it names enough tests.
fn named_things_exist(document: &str, at_least: usize) {
    let document = std::fs::read_to_string(root().join(document)).unwrap();
    let mut text = String::new();
    for package in ["rnic-abi", "rnic-core", "rnic-client", "rnic-tools", "bench", "rnicd", "tests"]
    {
        for path in paths(&root().join(package)) {
            text.push_str(&std::fs::read_to_string(path).unwrap());
        }
    }
    // Quoted words with at least three underscores are names of tests.
    let quoted = || document.split('`').skip(1).step_by(2);
    let named: Vec<&str> = quoted().filter(|w| w.matches('_').count() >= 3).collect();
    assert!(named.len() >= at_least, "{named:?}");
    let missing: Vec<_> =
        named.iter().filter(|name| !text.contains(&format!("fn {name}("))).collect();
    assert!(missing.is_empty(), "no such tests: {missing:?}");
    for file in quoted().filter(|w| w.ends_with(".rs")) {
        assert!(root().join(file).exists(), "no such file: {file}");
    }
}

#[test]
fn threat_model_references_exist() {
    named_things_exist("docs/threat-model.md", 41);
    named_things_exist("docs/threat-model-peers.md", 41);
}

#[test]
fn interop_page_references_exist() {
    named_things_exist("docs/interop.md", 12);
}

/// Directories that may contain `unsafe`.
const UNSAFE: [&str; 3] = ["rnic-abi/src/shm", "rnicd/src/privilege", "rnic-verbs"];

#[test]
fn both_pages_name_the_places_of_unsafe() {
    for page in ["CONTRIBUTING.md", "docs/extending.md"] {
        let text = std::fs::read_to_string(root().join(page)).unwrap();
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let (_, sentence) = text.split_once("`unsafe` is denied everywhere but in ").unwrap();
        let (sentence, _) = sentence.split_once(". ").unwrap();
        let named: Vec<_> = sentence.split('`').skip(1).step_by(2).collect();
        assert_eq!(named, UNSAFE, "{page}");
    }
}

#[test]
fn unsafe_is_only_where_documented() {
    // Assembled from parts, so that this file does not match.
    let word = ["un", "safe"].concat();
    let uses = [format!("{word} {{"), format!("{word} fn"), format!("{word} impl")];
    for package in [
        "rnic-abi",
        "rnic-core",
        "rnic-client",
        "rnic-tools",
        "bench",
        "rnicd",
        "tests",
        "fuzz",
        "deploy",
    ] {
        for path in paths(&root().join(package)) {
            let text = std::fs::read_to_string(&path).unwrap();
            let may = UNSAFE.iter().any(|place| path.starts_with(root().join(place)));
            assert!(may || !uses.iter().any(|used| text.contains(used)), "{}", path.display());
        }
    }
}

#[test]
fn pages_name_the_minimum_rust_of_the_manifest() {
    let manifest = std::fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let (_, rest) = manifest.split_once("rust-version = \"").unwrap();
    let (version, _) = rest.split_once('"').unwrap();
    let mut named = 0;
    for page in ["README.md", "docs/ci.md", "docs/ci-jobs.md"] {
        let text = std::fs::read_to_string(root().join(page)).unwrap();
        for start in ["Rust 1.", "rust:1."] {
            for (at, _) in text.match_indices(start) {
                let found: String = text[at + "Rust ".len()..]
                    .chars()
                    .take_while(|c| c.is_ascii_digit() || *c == '.')
                    .collect();
                assert_eq!(found, version, "{page}");
                named += 1;
            }
        }
    }
    assert!(named >= 4, "{named}");
}

/// Returns the documentation of each control request, by name.
fn requests() -> BTreeMap<String, String> {
    let text = std::fs::read_to_string(root().join("rnic-abi/src/abi/control/request.rs")).unwrap();
    let (_, text) = text.split_once("pub enum RequestBody {").unwrap();
    let (text, _) = text.split_once("\n}").unwrap();
    let mut found = BTreeMap::new();
    let mut documentation = String::new();
    for line in text.lines().filter_map(|line| line.strip_prefix("    ")) {
        if let Some(text) = line.strip_prefix("/// ") {
            documentation += text;
        } else if line.starts_with(|c: char| c.is_ascii_uppercase()) {
            let name = line.split(|c: char| !c.is_ascii_alphanumeric()).next().unwrap();
            found.insert(name.to_owned(), std::mem::take(&mut documentation));
        }
    }
    found
}

/// Returns the names of the requests that files in these folders mention.
fn mentioned(folders: &[&str]) -> BTreeSet<String> {
    let files = folders.iter().flat_map(|folder| paths(&root().join(folder)));
    let tests = ["rnic-client/src/fake.rs", "rnic-client/src/tests"].map(|path| root().join(path));
    let files = files.filter(|path| !tests.iter().any(|tests| path.starts_with(tests)));
    let text: String = files.map(|path| std::fs::read_to_string(path).unwrap()).collect();
    let name = |text: &str| text.chars().take_while(char::is_ascii_alphanumeric).collect();
    text.split("RequestBody::").skip(1).map(name).collect()
}

#[test]
fn each_request_has_a_method_and_a_test() {
    let requests = requests();
    assert!(requests.len() >= 45, "{requests:?}");
    let mut library = mentioned(&["rnic-client/src"]);
    // The library reserves the memory that it shares.
    library.insert("AddSharedBuffer".to_owned());
    let raw = mentioned(&["tests", "rnicd/tests"]);
    let page = std::fs::read_to_string(root().join("docs/abi.md")).unwrap();
    for (name, documentation) in requests {
        assert!(library.contains(&name), "no method of rnic-client sends {name}");
        assert!(raw.contains(&name), "no test with a raw client sends {name}");
        let carries = documentation.contains("Descriptor:");
        assert!(!carries || page.contains(&format!("`{name}`")), "docs/abi.md: {name}");
    }
}
