//! Text tables, and numbers with units.

/// A table. The first column is left-aligned text, the others are right-aligned numbers.
pub struct Table {
    head: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Creates a table with these column titles and no rows.
    pub fn new(head: &[&str]) -> Self {
        Table { head: head.iter().map(|s| (*s).to_owned()).collect(), rows: Vec::new() }
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

/// Parses a size in bytes: `8`, `4k`, `1MiB`, `64 KiB`. Units are binary.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        _ => return Err(format!("'{unit}' is not a unit of bytes; use KiB, MiB or GiB")),
    };
    let number: u64 =
        number.parse().map_err(|_| "is not a number of bytes like 1MiB".to_owned())?;
    number.checked_mul(1 << shift).ok_or_else(|| "is 2^64 bytes or more".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(&["", "GB/s", "ratio"]);
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
        let mut table = Table::new(&["what", "goal"]);
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
    fn bytes_read_back_as_they_are_written() {
        for n in [0, 1, 8, 1500, 1024, 1536, 1 << 20, 3 << 30] {
            assert_eq!(parse_bytes(&bytes(n)), Ok(n));
        }
        assert_eq!(parse_bytes("64k"), Ok(65536));
        assert_eq!(parse_bytes(" 1 MiB "), Ok(1 << 20));
        for wrong in ["", "MiB", "1 MB", "-1", "1.5k", "99999999999999G"] {
            assert!(parse_bytes(wrong).is_err(), "{wrong}");
        }
    }
}
