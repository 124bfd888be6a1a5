//! Inserts all faults of a file at once. An environment variable selects the active fault.
//!
//! The body of each function with faults becomes a `match` on the number in [`FAULT`]: an arm for
//! each fault, and an arm with the original body. So all faults share a build. The code must be
//! formatted by rustfmt, which puts the closing brace of a function into the column of its first
//! line.

use std::ops::Range;

use rnic_tests::conformance::Mutation;

/// Environment variable with the number of the active fault. 0, the default, is none.
pub const FAULT: &str = "RNIC_FAULT";

/// A fault with its number.
pub type Numbered<'a> = (usize, &'a Mutation);

/// A file with all its faults.
pub struct Woven {
    /// The new text of the file.
    pub text: String,
    /// Numbers of the omitted faults, which are not inside a single function.
    pub left_out: Vec<usize>,
    /// Line ranges with their faults: first the ranges of arms, then the ranges of functions.
    places: Vec<(Range<usize>, Vec<usize>)>,
}

impl Woven {
    /// Inserts numbered faults into `text`.
    pub fn new(text: &str, faults: &[Numbered]) -> Woven {
        let mut functions: Vec<(Range<usize>, Vec<Numbered>)> = Vec::new();
        let mut left_out = Vec::new();
        for &(number, fault) in faults {
            let body = place_of(text, fault).and_then(|place| body_around(text, &place));
            match body {
                None => left_out.push(number),
                Some(body) => match functions.iter_mut().find(|(known, _)| known == &body) {
                    Some((_, faults)) => faults.push((number, fault)),
                    None => functions.push((body, vec![(number, fault)])),
                },
            }
        }
        functions.sort_by_key(|(body, _)| body.start);
        let mut woven = Woven { text: String::new(), left_out, places: Vec::new() };
        let mut whole = Vec::new();
        let mut done = 0;
        for (body, faults) in functions {
            let numbers: Vec<usize> = faults.iter().map(|(number, _)| *number).collect();
            // This function is inside a function that has faults too.
            if body.start < done {
                woven.left_out.extend(numbers);
                continue;
            }
            woven.text.push_str(&text[done..body.start]);
            let first = woven.line();
            woven.push_selection(&text[body.clone()], &faults);
            whole.push((first..woven.line() + 1, numbers));
            done = body.end;
        }
        woven.text.push_str(&text[done..]);
        woven.places.append(&mut whole);
        woven
    }

    /// Returns the faults that can cause a compiler error in this line: those of the arm, of the
    /// function, or else of the whole file.
    pub fn suspects(&self, line: usize) -> Vec<usize> {
        let place = self.places.iter().find(|(lines, _)| lines.contains(&line));
        let all = || self.places.iter().flat_map(|(_, faults)| faults.clone()).collect();
        place.map_or_else(all, |(_, faults)| faults.clone())
    }

    /// Adds a `match` with the original body and one arm for each fault.
    fn push_selection(&mut self, body: &str, faults: &[Numbered]) {
        self.text.push_str(&format!(
            "match {{ static F: ::std::sync::LazyLock<usize> = ::std::sync::LazyLock::new(|| \
             ::std::env::var(\"{FAULT}\").map_or(0, |n| n.parse().unwrap_or(0))); *F }} {{"
        ));
        for (number, fault) in faults {
            self.text.push_str(&format!("\n{number} => {{\n"));
            let first = self.line();
            self.text.push_str(&body.replace(&fault.from, &fault.to));
            self.places.push((first..self.line() + 1, vec![*number]));
            self.text.push_str("}\n");
        }
        self.text.push_str(&format!("\n_ => {{\n{body}}}}}\n"));
    }

    /// Returns the number of the last line, from 1.
    fn line(&self) -> usize {
        self.text.matches('\n').count() + 1
    }
}

/// Returns the place of the text that a fault replaces.
fn place_of(text: &str, fault: &Mutation) -> Option<Range<usize>> {
    let start = text.find(&fault.from)?;
    Some(start..start + fault.from.len())
}

/// Returns the innermost function body, without its braces, that contains the place. Returns `None`
/// if no function contains it, or if the function is `const`, which cannot read the environment.
fn body_around(text: &str, place: &Range<usize>) -> Option<Range<usize>> {
    let mut innermost = None;
    for (start, line) in lines(text).take_while(|(start, _)| *start <= place.start) {
        if !starts_function(line) {
            continue;
        }
        let indent = &line[..line.len() - line.trim_start().len()];
        let mut rest = lines(&text[start..]).map(|(at, line)| (start + at, line.trim_end()));
        let ends_signature = |line: &str| line.ends_with(['{', '}', ';']);
        let Some((at, last)) = rest.find(|(_, line)| ends_signature(line)) else { continue };
        let Some((end, _)) = rest.find(|(_, line)| *line == format!("{indent}}}")) else {
            continue;
        };
        let body = at + last.len()..end;
        if last.ends_with('{') && body.start <= place.start && place.end <= body.end {
            let is_const = line.trim_start().split(' ').any(|word| word == "const");
            innermost = (!is_const).then_some(body);
        }
    }
    innermost
}

/// Returns true if this is the first line of a function.
fn starts_function(line: &str) -> bool {
    const BEFORE: [&str; 6] = ["pub", "const", "async", "unsafe", "extern", "\"C\""];
    let line = line.trim_start();
    let after_scope = line.strip_prefix("pub(").and_then(|rest| rest.split_once(')'));
    let mut words = after_scope.map_or(line, |(_, rest)| rest).split_whitespace();
    words.find(|word| !BEFORE.contains(word)) == Some("fn")
}

/// Returns the lines of the text with their offsets.
fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut at = 0;
    text.split_inclusive('\n').map(move |line| {
        at += line.len();
        (at - line.len(), line)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
const LIMIT: u32 = 7;

impl Queue {
    /// Returns the length.
    pub(in crate::queue) fn len(
        &self,
    ) -> u32 {
        self.head - self.tail
    }

    const fn limit() -> u32 {
        LIMIT + 1
    }

    fn is_empty(&self) -> bool {
        fn is_zero(n: u32) -> bool {
            n == 0
        }
        is_zero(self.len())
    }
}
";

    fn fault(from: &str, to: &str) -> Mutation {
        Mutation {
            ids: Vec::new(),
            breaks: None,
            file: "queue.rs".into(),
            from: from.into(),
            to: to.into(),
            package: "p".into(),
            target: "lib".into(),
            tests: Vec::new(),
        }
    }

    fn woven(faults: &[Mutation]) -> Woven {
        let numbered: Vec<Numbered> = (1..).zip(faults).collect();
        Woven::new(TEXT, &numbered)
    }

    #[test]
    fn faults_of_a_function_become_arms_of_a_match() {
        let woven = woven(&[fault("head - self", "head + self"), fault("self.tail", "self.head")]);
        assert!(woven.left_out.is_empty());
        let body = woven.text.split("-> u32 {").nth(1).expect("a body");
        let arms: Vec<&str> = body.split("=>").skip(1).take(3).collect();
        assert!(arms[0].contains("self.head + self.tail"), "{}", woven.text);
        assert!(arms[1].contains("self.head - self.head"), "{}", woven.text);
        assert!(arms[2].contains("self.head - self.tail"), "{}", woven.text);
    }

    #[test]
    fn an_error_is_blamed_on_its_arm_or_function_or_file() {
        let faults = [
            fault("head - self", "head + self"),
            fault("self.tail", "self.head"),
            fault("n == 0", "n != 0"),
        ];
        let woven = woven(&faults);
        let line_of = |part: &str| {
            1 + woven.text.lines().position(|line| line.contains(part)).expect("a line")
        };
        assert_eq!(woven.suspects(line_of("head + self.tail")), [1]);
        assert_eq!(woven.suspects(line_of("head - self.head")), [2]);
        assert_eq!(woven.suspects(line_of("head - self.tail")), [1, 2]);
        assert_eq!(woven.suspects(line_of("n != 0")), [3]);
        let of_file: std::collections::BTreeSet<_> = woven.suspects(1).into_iter().collect();
        assert_eq!(of_file, [1, 2, 3].into());
    }

    #[test]
    fn faults_outside_of_functions_that_run_are_left_out() {
        let faults = [
            fault("u32 = 7", "u32 = 8"),
            fault("LIMIT + 1", "LIMIT"),
            fault("pub(in crate::queue) fn len", "pub fn len"),
            fault("is_zero(self.len())", "true"),
            fault("n == 0", "n != 0"),
        ];
        let woven = woven(&faults);
        // The last fault is in a function inside the function that has the fourth fault.
        assert_eq!(woven.left_out, [1, 2, 3, 5]);
        assert!(woven.text.starts_with("const LIMIT: u32 = 7;"));
    }
}
