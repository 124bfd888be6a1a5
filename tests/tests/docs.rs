//! What the documents claim about the tests.

use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// All Rust sources of the packages.
fn sources(dir: &Path, text: &mut String) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            sources(&path, text);
        } else if name.ends_with(".rs") {
            text.push_str(&std::fs::read_to_string(&path).unwrap());
        }
    }
}

/// Checks that every test and file that a document names exists, and that it names this many tests.
fn named_things_exist(document: &str, at_least: usize) {
    let document = std::fs::read_to_string(root().join(document)).unwrap();
    let mut text = String::new();
    for package in ["rnic-core", "rnic-client", "rnic-tools", "rnicd", "tests"] {
        sources(&root().join(package), &mut text);
    }
    // Names of tests are the quoted words with many underscores.
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
fn every_test_and_file_that_the_threat_model_names_exists() {
    named_things_exist("docs/threat-model.md", 41);
}

#[test]
fn every_test_and_file_that_the_interop_page_names_exists() {
    named_things_exist("docs/interop.md", 12);
}
