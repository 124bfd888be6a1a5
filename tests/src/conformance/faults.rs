//! What is missing or contradicts itself.

use std::collections::{BTreeMap, BTreeSet};

use super::{Mutation, Record, read_text};

impl Record {
    /// Everything that is wrong with the record, a line each; empty if nothing is.
    #[must_use]
    pub fn faults(&self) -> Vec<String> {
        let mut faults = self.misplaced.clone();
        let known: BTreeSet<&str> = self.requirements.iter().map(|r| r.id.as_str()).collect();
        if known.len() != self.requirements.len() {
            faults.push("an id stands twice in requirements.toml".into());
        }
        let cited = self.citations.keys().map(String::as_str);
        let excepted: Vec<&str> = self.exceptions.iter().flat_map(|e| ids(&e.ids)).collect();
        let mutated = self.mutations.iter().flat_map(|m| ids(&m.ids));
        for id in cited.chain(excepted.iter().copied()).chain(mutated) {
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
        self.faults_of_mutations(&mut faults);
        faults
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
                faults.push(format!("{what} is to break {id}, which no test cites"));
            }
            if m.ids.is_empty() == m.breaks.is_none() {
                faults.push(format!("{what} names either requirements or the promise it breaks"));
            }
            if self.notice_of(m).is_none() {
                faults.push(format!("{what}: not noticed yet; see `--bin mutate`"));
            }
        }
        for (n, m) in self.mutations.iter().enumerate() {
            let is_same = |other: &Mutation| {
                (&m.file, &m.from, &m.to) == (&other.file, &other.from, &other.to)
            };
            if self.mutations[..n].iter().any(is_same) {
                faults.push(format!("{}: `{}` stands twice", m.file, one_line(&m.to)));
            }
        }
        for n in &self.noticed {
            if !self.mutations.iter().any(|m| n.is_of(m)) {
                faults
                    .push(format!("{}: `{}` was noticed and is no fault any more", n.file, n.from));
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
