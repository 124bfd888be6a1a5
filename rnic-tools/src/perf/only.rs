//! Parts that are measured by themselves (`--only`).

use super::error::PerfError;

/// Which parts are wanted, and those that were passed over.
pub struct Only<'a> {
    text: &'a str,
    passed_over: Vec<String>,
    any: bool,
}

impl<'a> Only<'a> {
    /// Parts that have this in their title.
    pub fn new(text: &'a str) -> Self {
        Only { text, passed_over: Vec::new(), any: false }
    }

    /// Whether this one is wanted.
    pub fn takes(&mut self, title: &str) -> bool {
        let wanted = title.contains(self.text);
        self.any |= wanted;
        if !wanted && !self.passed_over.iter().any(|other| other == title) {
            self.passed_over.push(title.to_owned());
        }
        wanted
    }

    /// That there was one that was.
    pub fn check(self) -> Result<(), PerfError> {
        if self.any {
            return Ok(());
        }
        let titles = self.passed_over.join("\n");
        Err(PerfError::Arguments(format!("--only {:?} is in none of:\n{titles}", self.text)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_nowhere_is_refused_with_what_there_is() {
        let mut only = Only::new("tcp");
        assert!(!only.takes("qps, direct") && only.takes("qps, tcp"));
        assert!(only.check().is_ok());
        let mut only = Only::new("udp");
        assert!(!only.takes("qps, direct") && !only.takes("qps, tcp"));
        let error = only.check().unwrap_err().to_string();
        assert!(error.contains("--only \"udp\" is in none of:\nqps, direct\nqps, tcp"), "{error}");
    }
}
