//! Selection of parts by title (`--only`).

use rnic_tools::perf::PerfError;

/// The selection, and the titles that it skipped.
pub struct TitleFilter<'a> {
    text: &'a str,
    skipped: Vec<String>,
    any: bool,
}

impl<'a> TitleFilter<'a> {
    /// Selects the parts whose title contains `text`.
    pub fn new(text: &'a str) -> Self {
        TitleFilter { text, skipped: Vec::new(), any: false }
    }

    /// Returns true if the part with this title is selected.
    pub fn selects(&mut self, title: &str) -> bool {
        let wanted = title.contains(self.text);
        self.any |= wanted;
        if !wanted && !self.skipped.iter().any(|other| other == title) {
            self.skipped.push(title.to_owned());
        }
        wanted
    }

    /// Checks that at least one part was selected.
    pub fn check(self) -> Result<(), PerfError> {
        if self.any {
            return Ok(());
        }
        let titles = self.skipped.join("\n");
        Err(PerfError::Arguments(format!("no title contains --only {:?}:\n{titles}", self.text)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_title_is_refused() {
        let mut only = TitleFilter::new("tcp");
        assert!(!only.selects("qps, direct") && only.selects("qps, tcp"));
        assert!(only.check().is_ok());
        let mut only = TitleFilter::new("udp");
        assert!(!only.selects("qps, direct") && !only.selects("qps, tcp"));
        let error = only.check().unwrap_err().to_string();
        let expected = "no title contains --only \"udp\":\nqps, direct\nqps, tcp";
        assert!(error.contains(expected), "{error}");
    }
}
