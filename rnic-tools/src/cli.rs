//! Command-line conventions of all programs: exit codes, output, sizes, progress bars.

use std::fmt::Display;
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;
use std::time::Duration;

use indicatif::{BinaryBytes, ProgressBar, ProgressStyle};

/// The error that ends a program.
pub type Failure = Box<dyn std::error::Error>;

/// Returns the exit code of a program: 0, or 1 after printing the error to standard error. A wrong
/// command line exits with 2 (clap).
pub fn exit_code<E: Display>(program: &str, result: Result<(), E>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            print_error(program, &e);
            ExitCode::FAILURE
        }
    }
}

/// Prints a line to standard error. Ignores errors.
pub fn print_error(program: &str, what: impl Display) {
    let _ = writeln!(io::stderr(), "{program}: {what}");
}

/// Prints a line to standard output. A closed pipe is not an error.
pub fn print_line(line: impl Display) -> io::Result<()> {
    write(format!("{line}\n").as_bytes())
}

/// Writes all bytes to standard output. A closed pipe is not an error.
pub fn write(bytes: &[u8]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(()),
        Err(e) => Err(io::Error::new(e.kind(), format!("cannot write to standard output: {e}"))),
        Ok(()) => Ok(()),
    }
}

/// Parses a number of bytes: `4096`, `64KiB`, `1MiB`, `2GiB`.
pub fn size(text: &str) -> Result<u64, String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let scale: u64 = match unit.trim() {
        "" | "B" => 1,
        "KiB" | "K" | "k" => 1 << 10,
        "MiB" | "M" => 1 << 20,
        "GiB" | "G" => 1 << 30,
        "TiB" | "T" => 1 << 40,
        _ => return Err(format!("{text:?} is not a size such as 4096, 64KiB, 1MiB or 2GiB")),
    };
    let number: u64 = number.parse().map_err(|e| format!("{text:?} is not a valid size: {e}"))?;
    number.checked_mul(scale).ok_or_else(|| format!("{text} does not fit in 64 bits"))
}

/// Like [`size`], for sizes that must fit 32 bits.
pub fn size32(text: &str) -> Result<u32, String> {
    u32::try_from(size(text)?).map_err(|_| format!("{text} is too large: must be less than 4GiB"))
}

/// Parses a number of seconds above 0, which may have a fraction.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|e| format!("{text:?} is not a number: {e}"))?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(Duration::ZERO) => Err("it must be above 0".to_owned()),
        other => other.map_err(|e| format!("{text} seconds: {e}")),
    }
}

/// Parses a number that is at least 1.
pub fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("it must be at least 1".to_owned()),
        other => other.map_err(|e| format!("{text:?} is not a valid count: {e}")),
    }
}

/// Returns a progress bar for `total` bytes on standard error, hidden if that is not a terminal.
pub fn byte_bar(total: u64, what: &str) -> ProgressBar {
    let bar = ProgressBar::new(total).with_message(printable(what));
    // A test parses the template, so this cannot fail.
    match ProgressStyle::with_template(BYTE_BAR) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// Formats size, time and rate: `12.0 MiB in 0.01 s (1.17 GiB/s)`.
pub fn throughput(bytes: u64, seconds: f64) -> String {
    let size = BinaryBytes(bytes);
    if seconds > 0.0 {
        // Saturates: rates above 2^64 bytes per second do not matter.
        let rate = BinaryBytes((bytes as f64 / seconds) as u64);
        format!("{size} in {seconds:.2} s ({rate}/s)")
    } else {
        format!("{size} in no time")
    }
}

/// Replaces control characters in a text from a peer, so that it cannot control the terminal.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{FFFD}' } else { c }).collect()
}

const BYTE_BAR: &str = "{msg:16!} {wide_bar} {binary_bytes:>10}/{binary_total_bytes} \
                        {binary_bytes_per_sec:>14} {eta:>4}";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units_and_bounds() {
        assert_eq!(size("4096"), Ok(4096));
        assert_eq!(size("64KiB"), Ok(65536));
        assert_eq!(size("2 GiB"), Ok(2 << 30));
        assert_eq!(size("16777215TiB"), Ok(16_777_215 << 40));
        for wrong in ["", "KiB", "1kb", "-1", "16777216TiB", "1.5MiB", "99999999999999999999"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
        assert!(size32("4GiB").is_err());
        assert_eq!(size32("1MiB"), Ok(1 << 20));
    }

    #[test]
    fn seconds_may_have_a_fraction_but_no_sign() {
        assert_eq!(seconds("1.5"), Ok(Duration::from_millis(1500)));
        for wrong in ["", "-1", "nan", "inf", "1s", "0", "1e30"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
        assert_eq!(at_least_one("3"), Ok(3));
        for wrong in ["0", "-1", "x", ""] {
            assert!(at_least_one(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn control_characters_are_replaced() {
        assert_eq!(printable("a\x1b[2Jb\nc"), "a\u{FFFD}[2Jb\u{FFFD}c");
    }

    #[test]
    fn the_template_of_bars_is_valid() {
        assert!(ProgressStyle::with_template(BYTE_BAR).is_ok());
        assert_eq!(throughput(1 << 20, 0.5), "1.00 MiB in 0.50 s (2.00 MiB/s)");
    }
}
