//! Citations in the sources: `//= MPA-7.1.2-4` above a test that verifies a requirement, or above
//! the line of production code that implements it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::{Unreadable, read_text};

/// Prefix of a citation. IDs follow, separated by commas.
const MARK: &str = "//=";

/// A test that cites a requirement.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Citation {
    /// Path from the root of the repository.
    pub file: String,
    /// Line of the test's name, from 1.
    pub line: usize,
    /// Name of the test.
    pub test: String,
}

/// A line of production code that cites a requirement because it implements it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Line {
    /// Path from the root of the repository.
    pub file: String,
    /// Line number, from 1.
    pub line: usize,
}

/// Results of a search of the sources.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub tests: BTreeMap<String, Vec<Citation>>,
    pub lines: BTreeMap<String, Vec<Line>>,
    pub misplaced: Vec<String>,
}

impl Found {
    /// Searches the source directories recursively. Code below `production` counts as production
    /// code unless it is compiled only for tests.
    pub fn search(
        &mut self,
        root: &Path,
        dirs: &[String],
        production: &[PathBuf],
    ) -> Result<(), Unreadable> {
        let mut sources = BTreeMap::new();
        for dir in dirs {
            read_sources(root, &root.join(dir), &mut sources)?;
        }
        let for_tests: BTreeSet<String> =
            sources.iter().flat_map(|(file, text)| test_modules(file, text)).collect();
        for (file, text) in &sources {
            let is_production = production.iter().any(|dir| Path::new(file).starts_with(dir))
                && !Path::new(file).ancestors().any(|a| {
                    let a = a.to_string_lossy();
                    for_tests.contains(a.strip_suffix(".rs").unwrap_or(&a))
                });
            self.take(file, text, is_production);
        }
        Ok(())
    }

    /// Collects the citations of a source file.
    fn take(&mut self, file: &str, text: &str, is_production: bool) {
        let mut pending = Pending::default();
        let mut module = TestModule::default();
        for (n, line) in text.lines().enumerate() {
            let n = n + 1;
            let in_tests = module.holds(line);
            let line = line.trim();
            if let Some(ids) = line.strip_prefix(MARK) {
                pending.cited.extend(ids.split(',').map(|id| (id.trim(), n)));
            } else if pending.cited.is_empty() || line.starts_with("//") {
                // No pending citation, or a comment between citation and code.
            } else if line.starts_with("#[") {
                pending.is_test |= line.starts_with("#[test]");
                pending.is_ignored |= line.starts_with("#[ignore");
            } else {
                let pending = std::mem::take(&mut pending);
                self.settle(file, pending, Some((n, line)), is_production && !in_tests);
            }
        }
        self.settle(file, pending, None, false);
    }

    /// Assigns pending citations to the code that follows them.
    fn settle(
        &mut self,
        file: &str,
        pending: Pending<'_>,
        next: Option<(usize, &str)>,
        is_production: bool,
    ) {
        let Some(&(_, first)) = pending.cited.first() else { return };
        let test =
            next.and_then(|(n, line)| Some((n, line.strip_prefix("fn ")?.split('(').next()?)));
        match (test, next) {
            (Some(_), _) if pending.is_ignored => {
                self.misplaced.push(format!("{file}:{first}: the citing test is not run"));
            }
            (Some((line, test)), _) if pending.is_test => {
                for (id, _) in pending.cited {
                    let citation = Citation { file: file.into(), line, test: test.into() };
                    self.tests.entry(id.into()).or_default().push(citation);
                }
            }
            (_, Some((line, code))) if is_production && is_code(code) => {
                for (id, _) in pending.cited {
                    self.lines.entry(id.into()).or_default().push(Line { file: file.into(), line });
                }
            }
            _ => {
                let ids: Vec<&str> = pending.cited.iter().map(|(id, _)| *id).collect();
                let what = if is_production { "code" } else { "test" };
                self.misplaced.push(format!(
                    "{file}:{first}: {} cited, but no {what} follows",
                    ids.join(", ")
                ));
            }
        }
    }
}

/// Citations waiting for the test or code below them.
#[derive(Default)]
struct Pending<'a> {
    cited: Vec<(&'a str, usize)>,
    is_test: bool,
    is_ignored: bool,
}

/// Returns true if a line contains code: it is neither empty nor only the end of a block.
fn is_code(line: &str) -> bool {
    line.chars().any(char::is_alphanumeric)
}

/// Tracks whether a line of a source is inside `#[cfg(test)] mod tests { ... }`.
#[derive(Default)]
struct TestModule {
    is_announced: bool,
    is_open: bool,
}

impl TestModule {
    /// Processes the next line. Returns true if it is inside such a module.
    fn holds(&mut self, line: &str) -> bool {
        if is_cfg_test(line) {
            self.is_announced = true;
        } else if !line.starts_with("#[") {
            self.is_open |= self.is_announced && line.starts_with("mod ") && line.ends_with('{');
            self.is_announced = false;
        }
        let was_open = self.is_open;
        self.is_open &= line != "}";
        was_open
    }
}

fn is_cfg_test(line: &str) -> bool {
    line.starts_with("#[cfg(test") || line.starts_with("#[cfg(all(test")
}

/// Returns the paths, without `.rs`, of the modules that a source declares for tests only and that
/// are in separate files.
fn test_modules(file: &str, text: &str) -> Vec<String> {
    let path = Path::new(file);
    let is_root = ["lib.rs", "main.rs", "mod.rs"].iter().any(|name| path.ends_with(name));
    let dir = if is_root { path.parent().unwrap_or(path).into() } else { path.with_extension("") };
    let mut modules = Vec::new();
    let mut is_announced = false;
    for line in text.lines() {
        if is_cfg_test(line) {
            is_announced = true;
        } else if !line.starts_with("#[") {
            let words: Vec<&str> = line.split_whitespace().collect();
            if let [.., "mod", name] = words[..]
                && is_announced
                && let Some(name) = name.strip_suffix(';')
            {
                modules.push(dir.join(name).to_string_lossy().into_owned());
            }
            is_announced = false;
        }
    }
    modules
}

/// Reads all sources of a directory recursively, keyed by their paths from the root of the
/// repository.
fn read_sources(
    root: &Path,
    dir: &Path,
    sources: &mut BTreeMap<String, String>,
) -> Result<(), Unreadable> {
    let unreadable = |e: std::io::Error| Unreadable { file: dir.into(), why: e.to_string() };
    for entry in std::fs::read_dir(dir).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        if path.is_dir() {
            read_sources(root, &path, sources)?;
        } else if path.extension().is_some_and(|e| e == "rs") {
            let name = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
            sources.insert(name, read_text(&path)?);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{Found, test_modules};

    fn found(text: &str) -> Found {
        let mut found = Found::default();
        found.take("a.rs", text, true);
        found
    }

    #[test]
    fn a_citation_belongs_to_the_test_below_it() {
        let text = ["//= A-1", "//= A-2", "/// Why.", "#[test]", "fn one() {}", "    //= A-2, A-3"];
        let text = format!("{}\n    #[test]\n    fn two(\n", text.join("\n"));
        let found = found(&text);
        let tests = |id: &str| -> Vec<_> {
            found.tests[id].iter().map(|c| (c.file.as_str(), c.line, c.test.as_str())).collect()
        };
        assert_eq!(tests("A-1"), [("a.rs", 5, "one")]);
        assert_eq!(tests("A-2"), [("a.rs", 5, "one"), ("a.rs", 8, "two")]);
        assert_eq!(tests("A-3"), [("a.rs", 8, "two")]);
        assert!(found.lines.is_empty(), "{:?}", found.lines);
        assert!(found.misplaced.is_empty(), "{:?}", found.misplaced);
    }

    #[test]
    fn citation_belongs_to_the_code_below() {
        let text = ["/// Doc.", "//= A-1", "#[must_use]", "pub fn one() {", "    //= A-2, A-3"];
        let text = format!("{}\n    // Why.\n    two();\n}}\n", text.join("\n"));
        let found = found(&text);
        let lines = |id: &str| -> Vec<_> {
            found.lines[id].iter().map(|l| (l.file.as_str(), l.line)).collect()
        };
        assert_eq!(lines("A-1"), [("a.rs", 4)]);
        assert_eq!(lines("A-2"), [("a.rs", 7)]);
        assert_eq!(lines("A-3"), [("a.rs", 7)]);
        assert!(found.tests.is_empty(), "{:?}", found.tests);
        assert!(found.misplaced.is_empty(), "{:?}", found.misplaced);
    }

    #[test]
    fn citations_outside_code_and_tests_are_reported() {
        let in_tests = "#[cfg(test)]\nmod tests {\n    //= A-1\n    fn helper() {}\n}\n";
        for (text, why) in [
            (in_tests, "a.rs:3: A-1 cited, but no test follows"),
            ("//= A-1\n\nfn far() {}\n", "a.rs:1: A-1 cited, but no code follows"),
            ("fn f() {\n    //= A-1\n}\n", "a.rs:2: A-1 cited, but no code follows"),
            ("fn f() {}\n//= A-1, A-2\n", "a.rs:2: A-1, A-2 cited, but"),
            ("//= A-1\n#[test]\n#[ignore = \"slow\"]\nfn one() {}\n", "a.rs:1: the citing test"),
        ] {
            let found = found(text);
            assert!(found.tests.is_empty() && found.lines.is_empty(), "{found:?}");
            assert_eq!(found.misplaced.len(), 1, "{:?}", found.misplaced);
            assert!(found.misplaced[0].starts_with(why), "{:?}", found.misplaced);
        }
    }

    #[test]
    fn code_after_tests_is_production_code() {
        let text = "#[cfg(test)]\nmod tests {\n}\n\n//= A-1\nfn last() {}\n";
        assert_eq!(found(text).lines["A-1"][0].line, 6);
    }

    #[test]
    fn modules_for_tests_only_are_no_production_code() {
        let text = "#[cfg(test)]\nmod one;\nmod two;\n#[cfg(all(test, not(loom)))]\n\
                    #[path = \"x\"]\npub(crate) mod three;\n#[cfg(test)]\nmod four {\n";
        assert_eq!(test_modules("a/mod.rs", text), ["a/one", "a/three"]);
        assert_eq!(test_modules("a/b.rs", text), ["a/b/one", "a/b/three"]);
    }
}
