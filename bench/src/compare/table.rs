//! Results of a comparison, as tables by message size.

use rnic_tools::perf::report::Figure;
use rnic_tools::text::{Table, bytes, digits};

use super::sweep::Compared;
use crate::report::Row;

/// Renders a table for each operation and path, with a line for each size, and failures below.
pub fn render(all: &[Compared]) -> String {
    let tables: Vec<String> = all.iter().map(one).collect();
    tables.join("\n")
}

fn one(compared: &Compared) -> String {
    let unit = unit(&compared.rows);
    let others = compared.sweep.foreign();
    let mut head = vec![format!("  {unit}"), "rnicd".to_owned()];
    for other in &others {
        head.extend([other.name(), "ratio".to_owned()]);
    }
    let mut table = Table::new(head);
    let mut failures = Vec::new();
    for row in &compared.rows {
        if let Some(why) = &row.failure {
            let line = format!("  not measured: {}: {why}\n", row.subject);
            if !failures.contains(&line) {
                failures.push(line);
            }
            continue;
        }
        let size = row.spec.as_ref().map_or_else(String::new, |spec| bytes(spec.size.into()));
        let mut cells =
            vec![format!("  {size}"), row.figures.first().map_or_else(String::new, spread)];
        for other in &others {
            let name = other.name();
            let found = row.figures.iter().position(|figure| figure.what.starts_with(&name));
            match found.and_then(|n| Some((row.figures.get(n)?, row.outcomes.get(n - 1)?))) {
                Some((figure, outcome)) => cells.extend([spread(figure), digits(outcome.value)]),
                None => cells.extend(["".to_owned(), "".to_owned()]),
            }
        }
        table.row(cells);
    }
    format!("{}\n{}{}", compared.sweep.title(), table.render(), failures.concat())
}

/// Formats the median and the range of the rounds.
fn spread(figure: &Figure) -> String {
    match (figure.series.lowest(), figure.series.highest()) {
        (Some(low), Some(high)) if figure.series.rounds.len() > 1 => {
            format!("{} ({}-{})", digits(figure.median), digits(low), digits(high))
        }
        _ => digits(figure.median),
    }
}

fn unit(rows: &[Row]) -> &'static str {
    rows.iter().find_map(|row| row.figures.first()).map_or("", |figure| figure.unit)
}
