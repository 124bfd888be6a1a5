//! Gaps and contradictions in the record.

use std::collections::{BTreeMap, BTreeSet};

use super::{Mutation, Record, read_text};

impl Record {
    /// Returns all problems of the record, a line for each.
    #[must_use]
    pub fn faults(&self) -> Vec<String> {
        let mut faults = self.misplaced.clone();
        let known: BTreeSet<&str> = self.requirements.iter().map(|r| r.id.as_str()).collect();
        if known.len() != self.requirements.len() {
            faults.push("an id occurs twice in requirements.toml".into());
        }
        self.faults_of_citations(&known, &mut faults);
        let excepted: Vec<&str> = self.exceptions.iter().flat_map(|e| ids(&e.ids)).collect();
        let mutated = self.mutations.iter().flat_map(|m| ids(&m.ids));
        let constructed = self.constructions.iter().flat_map(|c| ids(&c.ids));
        let uncited = self.uncited.iter().flat_map(|u| ids(&u.ids));
        let listed = excepted.iter().copied().chain(mutated).chain(constructed).chain(uncited);
        for id in listed {
            if !known.contains(id) {
                faults.push(format!("{id}: no such requirement"));
            }
        }
        let mut times = BTreeMap::new();
        for id in excepted {
            *times.entry(id).or_insert(0) += 1;
        }
        for r in &self.requirements {
            let id = r.id.as_str();
            match (self.tests_of(id), times.get(id)) {
                ([], None) => {
                    faults.push(format!("{id}: {} without a test or an exception", r.level));
                }
                ([], Some(1)) | ([_, ..], None) => {}
                ([], Some(_)) => faults.push(format!("{id}: excepted twice")),
                ([test, ..], Some(_)) => {
                    faults.push(format!("{id}: excepted, and cited by {}", test.test));
                }
            }
        }
        self.faults_of_implementation(&mut faults);
        self.faults_of_mutations(&mut faults);
        faults
    }

    /// Reports citations of unknown requirements.
    fn faults_of_citations(&self, known: &BTreeSet<&str>, faults: &mut Vec<String>) {
        let by_tests = self
            .citations
            .iter()
            .map(|(id, tests)| (id, tests.iter().map(|c| (&c.file, c.line)).collect::<Vec<_>>()));
        let by_lines = self
            .lines
            .iter()
            .map(|(id, lines)| (id, lines.iter().map(|l| (&l.file, l.line)).collect()));
        for (id, places) in by_tests.chain(by_lines).filter(|(id, _)| !known.contains(id.as_str()))
        {
            let at = |(file, line)| format!("{file}:{line}: {id} cited: no such requirement");
            faults.extend(places.into_iter().map(at));
        }
    }

    /// Reports tested MUST requirements unless exactly one of these holds: production code cites
    /// them, they are valid by construction, or they are listed as not cited yet.
    fn faults_of_implementation(&self, faults: &mut Vec<String>) {
        let times = |all: Vec<&str>| {
            let mut times = BTreeMap::new();
            all.into_iter().for_each(|id| *times.entry(id.to_owned()).or_insert(0) += 1);
            times
        };
        let constructed =
            times(self.constructions.iter().flat_map(|c| ids(&c.ids)).collect::<Vec<_>>());
        let uncited = times(self.uncited.iter().flat_map(|u| ids(&u.ids)).collect::<Vec<_>>());
        for r in &self.requirements {
            let id = r.id.as_str();
            let line = self.lines_of(id).first();
            let place = line.map(|l| format!("{}:{}", l.file, l.line)).unwrap_or_default();
            let constructed = constructed.get(id).copied().unwrap_or(0);
            let uncited = uncited.get(id).copied().unwrap_or(0);
            let is_listed = constructed + uncited > 0;
            if self.tests_of(id).is_empty() && line.is_some() {
                faults.push(format!("{id}: excepted, and implemented at {place}"));
            } else if !self.is_to_be_implemented(r) && is_listed {
                faults.push(format!("{id}: in implementation.toml, but not a tested MUST"));
            } else if line.is_some() && is_listed {
                faults.push(format!("{id}: in implementation.toml, and implemented at {place}"));
            } else if constructed + uncited > 1 {
                faults.push(format!("{id}: in implementation.toml twice"));
            } else if self.is_to_be_implemented(r) && line.is_none() && !is_listed {
                faults.push(format!("{id}: {} that no production code cites", r.level));
            }
        }
        for u in self.uncited.iter().filter(|u| !self.root.join(&u.folder).is_dir()) {
            faults.push(format!("{}: no such folder, in implementation.toml", u.folder));
        }
    }

    fn faults_of_mutations(&self, faults: &mut Vec<String>) {
        for m in &self.mutations {
            let what = format!("{}: `{}`", m.file, one_line(&m.from));
            match read_text(&self.root.join(&m.file)).map(|t| t.matches(&m.from).count()) {
                Ok(1) => {}
                Ok(n) => faults.push(format!("{what} occurs {n} times, not once")),
                Err(e) => faults.push(format!("{what}: {e}")),
            }
            for id in m.ids.iter().filter(|id| self.tests_of(id).is_empty()) {
                faults.push(format!("{what} breaks {id}, which no test cites"));
            }
            if m.ids.is_empty() == m.breaks.is_none() {
                faults
                    .push(format!("{what} must name either requirements or the promise it breaks"));
            }
        }
        for (n, m) in self.mutations.iter().enumerate() {
            let is_same = |other: &Mutation| {
                (&m.file, &m.from, &m.to) == (&other.file, &other.from, &other.to)
            };
            if self.mutations[..n].iter().any(is_same) {
                faults.push(format!("{}: `{}` occurs twice", m.file, one_line(&m.to)));
            }
        }
        for s in &self.scores {
            let survivors: u32 = s.survivors.iter().map(|s| s.count).sum();
            if s.tested != s.noticed + survivors {
                faults.push(format!("{}: {survivors} survivors do not add up", s.module));
            }
        }
    }
}

fn one_line(code: &str) -> String {
    code.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn ids(ids: &[String]) -> impl Iterator<Item = &str> {
    ids.iter().map(String::as_str)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::super::{Citation, Construction, Level, Line, Record, Requirement};

    /// Returns a record of requirements, all cited by one test, with the lines that implement them.
    fn record(levels: &[Level], lines: &[(&str, usize)]) -> Record {
        let requirement = |(n, level): (usize, &Level)| Requirement {
            id: format!("A-{n}"),
            rfc: 5044,
            section: "1".into(),
            level: *level,
            role: "both".into(),
            text: String::new(),
        };
        let requirements: Vec<_> = levels.iter().enumerate().map(requirement).collect();
        let test = Citation { file: "t.rs".into(), line: 1, test: "t".into() };
        let line =
            |&(id, line): &(&str, usize)| (id.to_owned(), vec![Line { file: "a.rs".into(), line }]);
        Record {
            citations: requirements.iter().map(|r| (r.id.clone(), vec![test.clone()])).collect(),
            requirements,
            exceptions: Vec::new(),
            constructions: Vec::new(),
            uncited: Vec::new(),
            mutations: Vec::new(),
            noticed: Vec::new(),
            scores: Vec::new(),
            lines: lines.iter().map(line).collect(),
            misplaced: Vec::new(),
            root: PathBuf::new(),
        }
    }

    #[test]
    fn must_is_cited_or_by_construction_not_both() {
        let mut record = record(&[Level::Must, Level::MustNot, Level::May], &[("A-0", 7)]);
        assert_eq!(record.faults(), ["A-1: MUST NOT that no production code cites"]);
        let built = |id: &str| Construction { ids: vec![id.into()], reason: String::new() };
        record.constructions.push(built("A-1"));
        assert!(record.faults().is_empty(), "{:?}", record.faults());
        record.constructions.extend([built("A-0"), built("A-1"), built("A-2")]);
        assert_eq!(
            record.faults(),
            [
                "A-0: in implementation.toml, and implemented at a.rs:7",
                "A-1: in implementation.toml twice",
                "A-2: in implementation.toml, but not a tested MUST",
            ]
        );
    }

    #[test]
    fn unknown_requirement_is_reported() {
        let record = record(&[Level::May], &[("A-7", 3)]);
        assert_eq!(record.faults(), ["a.rs:3: A-7 cited: no such requirement"]);
    }
}
