//! Text tables, and numbers with units: as printed, and as given on command lines.

use std::time::Duration;

/// A table. The first column is left-aligned text, the others are right-aligned numbers.
pub struct Table {
    head: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Creates a table with these column titles and no rows.
    pub fn new(head: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Table { head: head.into_iter().map(Into::into).collect(), rows: Vec::new() }
    }

    /// Adds a row. Missing cells at its end are empty.
    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// Renders the table as lines without trailing spaces.
    pub fn render(&self) -> String {
        let all = || std::iter::once(&self.head).chain(&self.rows);
        let columns = all().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            all()
                .filter_map(|row: &Vec<String>| row.get(column))
                .map(|cell: &String| len(cell))
                .max()
        };
        let widths: Vec<usize> = (0..columns).map(|c| width(c).unwrap_or(0)).collect();
        let mut text = String::new();
        for row in all() {
            let mut line = String::new();
            for (column, width) in widths.iter().enumerate() {
                let cell = row.get(column).map_or("", String::as_str);
                let gap = " ".repeat(width - len(cell));
                match column {
                    0 => line += &format!("{cell}{gap}"),
                    _ => line += &format!("  {gap}{cell}"),
                }
            }
            text += line.trim_end();
            text.push('\n');
        }
        text
    }
}

/// Returns the width of a cell. All characters printed here have width one.
fn len(cell: &str) -> usize {
    cell.chars().count()
}

/// Formats three significant digits, at most three after the point: `0.123`, `12.3`, `1234`.
pub fn digits(x: f64) -> String {
    match x.abs() {
        0.0 => "0".to_owned(),
        a if a >= 99.95 => format!("{x:.0}"),
        a if a >= 9.995 => format!("{x:.1}"),
        a if a >= 0.9995 => format!("{x:.2}"),
        _ => format!("{x:.3}"),
    }
}

/// Formats bytes in the largest binary unit that divides them: `1 MiB`, `1500 B`.
pub fn bytes(n: u64) -> String {
    for (unit, shift) in [("GiB", 30), ("MiB", 20), ("KiB", 10)] {
        if n != 0 && n.is_multiple_of(1 << shift) {
            return format!("{} {unit}", n >> shift);
        }
    }
    format!("{n} B")
}

/// Formats bytes with three significant digits: `512 B`, `1.00 MiB`, `1.17 GiB`.
pub fn rounded(bytes: f64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = (bytes.max(1.0).log2() / 10.0).min(4.0) as usize;
    let value = bytes / 1024_f64.powi(unit as i32);
    match unit {
        0 => format!("{value:.0} B"),
        _ => format!("{} {}", digits(value), units[unit]),
    }
}

/// Formats a transfer's size, time and rate: `12.0 MiB in 0.01 s (1.17 GiB/s)`.
pub fn throughput(bytes: u64, seconds: f64) -> String {
    let size = rounded(bytes as f64);
    if seconds > 0.0 {
        format!("{size} in {seconds:.2} s ({}/s)", rounded(bytes as f64 / seconds))
    } else {
        format!("{size} in no time")
    }
}

/// Parses a size in bytes: `8`, `4k`, `1MiB`, `64 KiB`. Units are binary.
pub fn size(text: &str) -> Result<u64, String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        _ => return Err(format!("{text:?} is not a size such as 4096, 64KiB, 1MiB or 2GiB")),
    };
    let number: u64 = number.parse().map_err(|e| format!("{text:?} is not a valid size: {e}"))?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text} does not fit in 64 bits"))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(["", "GB/s", "ratio"]);
        table.row(vec!["RDMA Write".into(), "12.3".into(), "0.95".into()]);
        table.row(vec!["memcpy".into(), "4.56".into()]);
        assert_eq!(
            table.render(),
            "            GB/s  ratio\n\
             RDMA Write  12.3   0.95\n\
             memcpy      4.56\n"
        );
    }

    #[test]
    fn characters_count_not_bytes() {
        let mut table = Table::new(["what", "goal"]);
        table.row(vec!["a".into(), "≥ 8".into()]);
        assert_eq!(table.render(), "what  goal\na      ≥ 8\n");
    }

    #[test]
    fn figures_have_three_digits() {
        for (x, said) in [
            (0.0, "0"),
            (0.12345, "0.123"),
            (0.9999, "1.00"),
            (1.2345, "1.23"),
            (9.999, "10.0"),
            (12.345, "12.3"),
            (99.99, "100"),
            (123_456.7, "123457"),
        ] {
            assert_eq!(digits(x), said);
        }
    }

    #[test]
    fn sizes_are_parsed_as_they_are_written() {
        for n in [0, 1, 8, 1500, 1024, 1536, 1 << 20, 3 << 30] {
            assert_eq!(size(&bytes(n)), Ok(n));
        }
        assert_eq!(size("64k"), Ok(65536));
        assert_eq!(size("2 GiB"), Ok(2 << 30));
        assert_eq!(size("16777215TiB"), Ok(16_777_215 << 40));
        for wrong in ["", "KiB", "1kb", "-1", "16777216TiB", "1.5MiB", "99999999999999999999"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
        assert!(size32("4GiB").is_err());
        assert_eq!(size32("1MiB"), Ok(1 << 20));
    }

    #[test]
    fn transfers_have_three_digits() {
        assert_eq!(throughput(1 << 20, 0.5), "1.00 MiB in 0.50 s (2.00 MiB/s)");
        assert_eq!(throughput(1023, 0.0), "1023 B in no time");
        assert_eq!(rounded(0.0), "0 B");
        assert_eq!(rounded(1.5 * 1024.0), "1.50 KiB");
        assert_eq!(rounded(5e15), "4547 TiB");
    }

    #[test]
    fn seconds_may_have_a_fraction_but_no_sign() {
        assert_eq!(seconds("1.5"), Ok(Duration::from_millis(1500)));
        for wrong in ["", "-1", "nan", "inf", "1s", "0", "1e30"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }
}
