//! Citations in the sources: `//= MPA-7.1.2-4` above a test.

use std::collections::BTreeMap;
use std::path::Path;

use super::{Unreadable, read_text};

/// A test that cites a requirement.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Citation {
    /// From the top of the repository.
    pub file: String,
    /// Name of the test.
    pub test: String,
}

/// What was found in sources.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub citations: BTreeMap<String, Vec<Citation>>,
    pub misplaced: Vec<String>,
}

impl Found {
    /// Searches a directory of sources, and those below it.
    pub fn search(&mut self, root: &Path, dir: &Path) -> Result<(), Unreadable> {
        let unreadable = |e: std::io::Error| Unreadable { file: dir.into(), why: e.to_string() };
        let entries: Result<Vec<_>, _> = std::fs::read_dir(dir).map_err(unreadable)?.collect();
        let mut paths: Vec<_> = entries.map_err(unreadable)?.iter().map(|e| e.path()).collect();
        // The report must not depend on how a directory is listed.
        paths.sort();
        for path in paths {
            if path.is_dir() {
                self.search(root, &path)?;
            } else if path.extension().is_some_and(|e| e == "rs") {
                let name = path.strip_prefix(root).unwrap_or(&path).to_string_lossy();
                self.take(&name, &read_text(&path)?);
            }
        }
        Ok(())
    }

    /// Searches one source.
    fn take(&mut self, file: &str, text: &str) {
        let mut cited: Vec<&str> = Vec::new();
        let (mut is_test, mut is_ignored) = (false, false);
        for (n, line) in text.lines().enumerate() {
            let line = line.trim_start();
            let place = format!("{file}:{}", n + 1);
            if let Some(id) = line.strip_prefix("//= ") {
                cited.push(id.trim());
            } else if cited.is_empty() || line.starts_with("//") || line.is_empty() {
                // Nothing is cited, or a comment in between.
            } else if line.starts_with("#[") {
                is_test |= line.starts_with("#[test]");
                is_ignored |= line.starts_with("#[ignore");
            } else {
                let name = line.strip_prefix("fn ").and_then(|rest| rest.split('(').next());
                match name {
                    Some(_) if is_ignored => {
                        self.misplaced.push(format!("{place}: the test that cites is not run"));
                    }
                    Some(test) if is_test => {
                        for id in cited.drain(..) {
                            let citation = Citation { file: file.into(), test: test.into() };
                            self.citations.entry(id.into()).or_default().push(citation);
                        }
                    }
                    _ => self.misplaced.push(format!(
                        "{place}: {} cited, but what follows is no test",
                        cited.join(", ")
                    )),
                }
                cited.clear();
                (is_test, is_ignored) = (false, false);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Found;

    fn found(text: &str) -> Found {
        let mut found = Found::default();
        found.take("a.rs", text);
        found
    }

    #[test]
    fn a_citation_belongs_to_the_test_below_it() {
        let text = "//= A-1\n//= A-2\n/// Why.\n#[test]\nfn one() {}\n    //= A-2\n    #[test]\n    fn two(\n";
        let found = found(text);
        let tests = |id: &str| -> Vec<_> {
            found.citations[id].iter().map(|c| (c.file.as_str(), c.test.as_str())).collect()
        };
        assert_eq!(tests("A-1"), [("a.rs", "one")]);
        assert_eq!(tests("A-2"), [("a.rs", "one"), ("a.rs", "two")]);
        assert!(found.misplaced.is_empty(), "{:?}", found.misplaced);
    }

    #[test]
    fn what_cites_and_is_no_test_that_runs_is_named() {
        for (text, why) in [
            ("//= A-1\nfn helper() {}\n#[test]\nfn one() {}\n", "a.rs:2: A-1 cited, but"),
            ("//= A-1\n#[derive(Debug)]\nstruct S;\n", "a.rs:3: A-1 cited, but"),
            ("//= A-1\n#[test]\n#[ignore = \"slow\"]\nfn one() {}\n", "a.rs:4: the test that"),
        ] {
            let found = found(text);
            assert!(found.citations.is_empty(), "{:?}", found.citations);
            assert_eq!(found.misplaced.len(), 1, "{:?}", found.misplaced);
            assert!(found.misplaced[0].starts_with(why), "{:?}", found.misplaced);
        }
    }
}
