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

#[test]
fn every_test_and_file_that_the_threat_model_names_exists() {
    let document = std::fs::read_to_string(root().join("docs/threat-model.md")).unwrap();
    let mut text = String::new();
    for package in ["rnic-core", "rnic-client", "rnicd", "tests"] {
        sources(&root().join(package), &mut text);
    }
    // Names of tests are the quoted words with many underscores.
    let named: Vec<&str> =
        document.split('`').skip(1).step_by(2).filter(|w| w.matches('_').count() >= 3).collect();
    assert!(named.len() > 40, "{named:?}");
    let missing: Vec<_> =
        named.iter().filter(|name| !text.contains(&format!("fn {name}("))).collect();
    assert!(missing.is_empty(), "no such tests: {missing:?}");
    let files = document.split('`').skip(1).step_by(2).filter(|w| w.ends_with(".rs"));
    for file in files {
        assert!(root().join(file).exists(), "no such file: {file}");
    }
}
